"""What leaves the tiers, what is never given up, and what is worth a write to flash."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from kvstore.errors import BudgetError
from kvstore.flash.unwritten import NOT_WORTH_A_WRITE
from kvstore.prefetch.eviction import POLICIES
from kvstore.prefetch.policy import Facts
from kvstore.profile import Profile
from kvstore.store import KVStore, open_store
from kvstore.tiers.shared_beginnings import PARTED
from tests.known_kv import identity, load, prompt, put, small_profile
from tests.kvstore.test_store_machine import TIGHT, Histories

PAGE = 4096  # what a full block of 16 tokens takes in memory


# -- every policy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "flash"])
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_random_histories_under_each_policy(name: str, in_memory: bool) -> None:
    """Budgets, accounts, leases and right KV; see `test_store_machine`."""
    machine = type("Evicting", (Histories,), {"budgets": {**TIGHT, "eviction": name}, "in_memory": in_memory})
    case = machine.TestCase
    case.settings = settings(
        max_examples=6, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_each_policy_gives_up_leaves_first_and_spares_what_is_leased(tmp_path: Path, name: str) -> None:
    for path in (None, tmp_path / "kv"):
        profile = small_profile(
            warm_bytes=12 * PAGE, hot_bytes=2 * PAGE, cold_bytes=500 * 1024, eviction=name
        )
        with open_store(path, identity=identity(), profile=profile) as store:
            order = np.random.default_rng(3)
            for step in range(100):
                stem = prompt(int(order.integers(3)), 32)
                tokens = np.concatenate([stem, prompt(int(order.integers(40)), 30)])
                put(store, tokens[: order.integers(1, 63)], wait=10)
                with store.lease(store.lookup(tokens)) as lease:
                    put(store, prompt(1000 + step, 40), wait=10)
                    assert store.lookup(tokens).length >= lease.length
                load(store, tokens)
                store.check()
            asked = [
                np.concatenate([prompt(first, 32), prompt(end, 30)])
                for first in range(3)
                for end in range(40)
            ]
            asked += [prompt(1000 + step, 40) for step in range(100)]
            reached = {block.number for tokens in asked for block in store.lookup(tokens).blocks}
            held = store.stats()
            blocks = held.hot.blocks + held.warm.blocks if path is None else held.cold.blocks
            assert held.counts.get("evicted_warm", 0) + held.counts.get("evicted_cold", 0) > 20
            assert len(reached) >= blocks, "every block that is held can be reached: none lost its prefix"


def test_a_policy_or_device_that_does_not_exist_is_named() -> None:
    with pytest.raises(BudgetError, match=r"eviction 'newest first' is not one of .*least worth"):
        Profile(eviction="newest first")
    with pytest.raises(BudgetError, match=r"device 'toaster' is not one of .*laptop"):
        Profile(device="toaster")


def test_the_uses_of_a_block_survive_a_restart(tmp_path: Path) -> None:
    """Counters that began anew, so that what was used most was as likely to go as what came last."""
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile(eviction="lfu")) as store:
        for seed in range(6):
            put(store, prompt(seed, 64))
        for _ in range(3):
            load(store, prompt(0, 64))
        store.flush()
        room = store.stats().cold.used
    tight = small_profile(cold_bytes=room - 10 * 8192)
    with open_store(tmp_path / "kv", identity=identity(), profile=tight) as store:
        (first, *_) = store.lookup(prompt(0, 64)).blocks
        assert first.hits == 3
        assert load(store, prompt(0, 64)) == 64


# -- shared beginnings ---------------------------------------------------------------------------------


def behind(system: np.ndarray, seed: int, length: int = 20) -> np.ndarray:
    return np.concatenate([system, prompt(seed, length)])


def is_shared(store: KVStore, tokens: np.ndarray) -> list[bool]:
    return [block.shared > 0 for block in store.lookup(tokens).blocks]


@pytest.mark.parametrize("name", ["least worth", "lru", "gdsf"])
def test_what_several_prompts_begin_with_stays(name: str) -> None:
    profile = small_profile(warm_bytes=32 * PAGE, hot_bytes=0, cold_bytes=0, eviction=name)
    with open_store(None, identity=identity(), profile=profile) as store:
        system = prompt(0, 96)
        for seed in range(1, PARTED + 1):
            put(store, behind(system, seed))
        assert is_shared(store, system) == [True] * 6
        for seed in range(100, 200):
            assert put(store, prompt(seed, 100)).refused == 0
        assert store.lookup(system).length == 96
        assert load(store, behind(system, 1)) == 96, "what hung on it is not shared, and went"


def test_what_is_short_or_not_yet_shared_is_not_held_for_good() -> None:
    with open_store(None, identity=identity(), profile=small_profile(cold_bytes=0)) as store:
        for seed in range(5):
            put(store, behind(prompt(0, 64), 10 + seed))
        assert is_shared(store, prompt(0, 64)) == [False] * 4, "64 tokens are computed at once"
        for turn in range(1, 6):  # one conversation that grows
            put(store, prompt(1, 30 * turn))
        for again in range(5):
            put(store, behind(prompt(2, 96), 20 + again % 2))
        assert not any(is_shared(store, prompt(1, 150)) + is_shared(store, prompt(2, 96)))


def test_shared_beginnings_never_take_all_the_room() -> None:
    """Pins that made a cache refuse everything."""
    profile = small_profile(warm_bytes=32 * PAGE, hot_bytes=0, cold_bytes=0)
    with open_store(None, identity=identity(), profile=profile) as store:
        for system in range(20):
            for seed in range(PARTED + 1):
                assert put(store, behind(prompt(system, 80), 100 * system + seed)).refused == 0
            shared = sum(
                block.nbytes for block in store._tiers.blocks.values() if block.shared and block.memory
            )
            assert shared <= 8 * PAGE
        assert is_shared(store, prompt(19, 80)) == [True] * 5, "the newest took the place of the oldest"
        assert not any(is_shared(store, prompt(0, 80)))


def test_shared_beginnings_are_known_again_after_a_restart(tmp_path: Path) -> None:
    system = prompt(0, 96)
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile(hot_bytes=0)) as store:
        for seed in range(1, PARTED + 1):
            put(store, behind(system, seed))
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile(hot_bytes=0)) as store:
        assert is_shared(store, system) == [True] * 6
        store.invalidate(everything=True)
        assert store.lookup(system).length == 0, "its user may drop it"
        assert store._tiers._beginnings.used == 0


# -- writes to flash -----------------------------------------------------------------------------------


def taught(store: KVStore) -> None:
    """For two hours, nothing that came was ever asked for again."""
    now = time.time()
    for number in range(2000):
        past = Facts(fresh=4, name=number, last_use=now - 7200 + 3 * number)
        store._tiers.unwritten.admission.used(past, missed=True)


def test_new_blocks_wait_in_memory_and_close_writes_them(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        put(store, prompt(1, 64))
        stats = store.stats()
        assert (stats.unwritten, stats.waiting, stats.cold.blocks) == (4, 0, 0)
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        assert load(store, prompt(1, 64)) == 64
        assert store.stats().unwritten == 0


def test_a_conversation_that_grows_is_written_once(tmp_path: Path) -> None:
    """The last, partial block of each turn, written each time."""
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        for turn in range(1, 20):
            put(store, prompt(1, 7 * turn))
        store.flush()
        assert store.stats().cold.blocks == -(-7 * 19 // 16)
        written = store.stats().counts["bytes_written"]
    with open_store(tmp_path / "one", identity=identity(), profile=small_profile()) as store:
        put(store, prompt(1, 7 * 19))
        store.flush()
        assert written == store.stats().counts["bytes_written"]


def test_what_is_not_worth_a_write_makes_room_at_once(tmp_path: Path) -> None:
    """Memory full of blocks that could not leave: puts were refused until flash had taken what nobody wants."""
    profile = small_profile(warm_bytes=16 * PAGE, hot_bytes=0)
    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        taught(store)
        for seed in range(50):
            assert put(store, prompt(seed, 64)).refused == 0, "without waiting"
            store.check()
        stats = store.stats()
        assert stats.cold.blocks == 0
        assert stats.counts["bytes_written"] == 0
        assert stats.refusals == {NOT_WORTH_A_WRITE: 200 - 12}, "but for the blocks not yet decided on"
        store.flush()
        assert store.stats().cold.blocks == store.stats().warm.blocks > 0, "flush keeps what there is"


def test_a_wrong_refusal_is_corrected(tmp_path: Path) -> None:
    profile = small_profile(warm_bytes=16 * PAGE, hot_bytes=0)
    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        taught(store)
        for seed in range(10):
            put(store, prompt(seed, 64))
        assert store.lookup(prompt(0, 64)).length == 0
        put(store, prompt(0, 64))
        for seed in range(10, 20):
            put(store, prompt(seed, 64), wait=10)
        while any(block.waiting for block in list(store._tiers.blocks.values())):
            time.sleep(0.01)
        assert store.stats().cold.blocks == 4
        assert load(store, prompt(0, 64)) == 64


def test_admission_keeps_to_the_days_writes(tmp_path: Path) -> None:
    settled: dict[str, Any] = {"warm_bytes": 16 * PAGE, "hot_bytes": 0, "cold_bytes_per_day": 1 << 20}
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile(**settled)) as store:
        for seed in range(150):
            assert put(store, prompt(seed, 64), wait=10).refused == 0
            assert store.stats().counts["bytes_written_today"] <= 1 << 20
        assert store.stats().cold.blocks > 0
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile(**settled)) as store:
        assert store.stats().counts["bytes_written_today"] <= 1 << 20
