"""Hot, warm and cold: where blocks are, how they move, what goes first, and that the accounts are right."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.errors import BudgetError
from kvstore.profile import ANE, CPU, NNAPI, Profile
from kvstore.store import KVStore, open_store
from tests.known_kv import LAYOUT, Arrays, identity, load, matches, prompt, put, quiet, small_profile

PAGE = 4096  # what a full block of 16 tokens takes in memory


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as opened:
        yield opened
        opened.check()


def where(store: KVStore, tokens: np.ndarray) -> list[str]:
    """The tier that each span of a prompt would come from; the last token is computed, so one more is asked for."""
    return [span.source for span in store.explain(np.append(tokens, 0)).spans[:-1]]


# -- moves -------------------------------------------------------------------------------------------


def test_use_brings_a_block_nearer(store: KVStore) -> None:
    """A hot tier that was never filled, and nobody noticed."""
    tokens = prompt(1, 32)
    put(store, tokens)
    store.flush()
    assert where(store, tokens) == ["warm", "warm"]
    store.demote(store.lookup(tokens))
    assert where(store, tokens) == ["cold", "cold"]
    seen = []
    for _ in range(5):
        seen.append(where(store, tokens)[0])
        assert load(store, tokens) == 32
        quiet(store)
    assert seen[0] == "cold"
    assert seen[-1] == "hot"
    assert sorted(seen, key=("cold", "warm", "hot").index) == seen
    assert store.stats().counts["moved_warm_hot"] == 2


def test_a_full_hot_tier_gives_way_to_what_is_used(tmp_path: Path) -> None:
    profile = small_profile(hot_bytes=2 * PAGE)
    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        for seed in (1, 2):
            put(store, prompt(seed, 32))
            for _ in range(3):
                load(store, prompt(seed, 32))
                quiet(store)
        assert where(store, prompt(2, 32)) == ["hot", "hot"]
        assert where(store, prompt(1, 32)) == ["warm", "warm"]
        assert [load(store, prompt(seed, 32)) for seed in (1, 2)] == [32, 32]
        store.check()


def test_promote_and_demote_on_request(store: KVStore) -> None:
    tokens = prompt(1, 32)
    put(store, tokens)
    assert store.demote(store.lookup(tokens)) in (0, 1, 2)  # what is not on flash yet stays
    assert load(store, tokens) == 32
    store.flush()
    store.demote(store.lookup(tokens))
    store.promote(store.lookup(tokens))
    assert where(store, tokens) == ["hot", "hot"]
    assert store.demote(store.lookup(tokens)) == 2
    assert where(store, tokens) == ["cold", "cold"]
    assert load(store, tokens) == 32


def test_without_hot_memory(tmp_path: Path) -> None:
    profile = small_profile(hot_bytes=0)
    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        put(store, prompt(1, 32))
        for _ in range(3):
            assert load(store, prompt(1, 32)) == 32
            quiet(store)
        store.promote(store.lookup(prompt(1, 32)))
        assert where(store, prompt(1, 32)) == ["warm", "warm"]
        assert store.stats().hot.total == 0


# -- write-behind ------------------------------------------------------------------------------------


def test_a_block_is_found_while_it_waits_for_flash(store: KVStore) -> None:
    for seed in range(12):
        put(store, prompt(seed, 64), wait=10)
        assert load(store, prompt(seed, 64)) == 64
    assert store.stats().refusals == {}


def test_a_full_queue_refuses_with_a_reason_and_waiting_helps(tmp_path: Path) -> None:
    """Puts dropped in silence when the writer fell behind."""
    profile = small_profile(warm_bytes=4 * PAGE, hot_bytes=0)
    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        refused = 0
        for seed in range(100):
            result = put(store, prompt(seed, 64))
            assert result.stored + result.refused == 64
            assert (result.refused > 0) == (result.reason is not None)
            refused += result.refused
        assert store.stats().refusals.get("warm tier full of what is leased or waits for flash", 0) == refused
        for seed in range(100, 120):
            assert put(store, prompt(seed, 64), wait=30).refused == 0
        store.flush()
        assert [load(store, prompt(seed, 64)) for seed in range(100, 120)] == [64] * 20


def test_a_wait_ends_in_time(tmp_path: Path) -> None:
    profile = small_profile(warm_bytes=4 * PAGE, hot_bytes=0)
    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        put(store, prompt(1, 64), wait=10)
        with store.lease(store.lookup(prompt(1, 64))):
            started = time.monotonic()
            assert put(store, prompt(2, 64), wait=0.3).refused == 64
            assert 0.25 < time.monotonic() - started < 20
        assert put(store, prompt(2, 64), wait=10).refused == 0


def test_flush_returns_although_others_keep_putting(store: KVStore) -> None:
    """Write-through that starved: a queue that never ran empty kept the caller waiting."""
    stop = threading.Event()

    def keep_putting() -> None:
        seed = 0
        while not stop.is_set():
            seed += 1
            put(store, prompt(seed, 64))

    thread = threading.Thread(target=keep_putting)
    thread.start()
    try:
        for _ in range(5):
            store.flush(timeout=60)
    finally:
        stop.set()
        thread.join()


# -- eviction ----------------------------------------------------------------------------------------


def test_leaves_go_before_what_they_hang_on(tmp_path: Path) -> None:
    for path in (None, tmp_path / "kv"):
        profile = small_profile(warm_bytes=12 * PAGE, hot_bytes=0, cold_bytes=500 * 1024)
        with open_store(path, identity=identity(), profile=profile) as store:
            order = np.random.default_rng(2)
            for _ in range(200):
                stem = prompt(int(order.integers(3)), 48)
                tokens = np.concatenate([stem, prompt(int(order.integers(100)), 30)])
                put(store, tokens[: order.integers(1, 79)], wait=10)
                load(store, tokens)
            held = store.stats()
            store.check()
            reached: set[int] = set()
            for first in range(3):
                for end in range(100):
                    asked = np.concatenate([prompt(first, 48), prompt(end, 30)])
                    reached.update(block.number for block in store.lookup(asked).blocks)
            blocks = held.warm.blocks if path is None else held.cold.blocks
            assert held.counts.get("evicted_warm", 0) + held.counts.get("evicted_cold", 0) > 20
            assert len(reached) >= blocks, "every block that is held can be reached: none lost its prefix"


@pytest.mark.parametrize("tier", ["memory", "flash"])
def test_a_new_entry_lives_at_the_cap(tmp_path: Path, tier: str) -> None:
    """A new item that was written and at once evicted, in a loop."""
    profile = small_profile(warm_bytes=8 * PAGE, hot_bytes=0, cold_bytes=450 * 1024)
    path = None if tier == "memory" else tmp_path / "kv"
    with open_store(path, identity=identity(), profile=profile) as store:
        for seed in range(60):
            assert put(store, prompt(seed, 60), wait=10).refused == 0
            store.flush()
            assert load(store, prompt(seed, 60)) == 60
            if tier == "flash":
                store.demote(store.lookup(prompt(seed, 60)))
                assert load(store, prompt(seed, 60)) == 60
        assert store.stats().refusals == {}


def test_what_was_used_last_stays() -> None:
    profile = small_profile(warm_bytes=12 * PAGE, hot_bytes=0)
    with open_store(None, identity=identity(), profile=profile) as store:
        put(store, prompt(0, 32))
        for seed in range(1, 40):
            put(store, prompt(seed, 32))
            assert load(store, prompt(0, 32)) == 32
        assert load(store, prompt(1, 32)) == 0


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    """A counter of uses that started at zero again, so that the best went first."""
    roomy = small_profile(hot_bytes=0)
    with open_store(tmp_path / "kv", identity=identity(), profile=roomy) as store:
        for seed in range(8):
            put(store, prompt(seed, 64))
        store.flush()
        for seed in (0, 1, 2):
            time.sleep(0.01)
            load(store, prompt(seed, 64))
        room = store.stats().cold.used
    tight = small_profile(hot_bytes=0, cold_bytes=room - 10 * 8192)
    with open_store(tmp_path / "kv", identity=identity(), profile=tight) as store:
        assert [load(store, prompt(seed, 64)) for seed in (0, 1, 2)] == [64] * 3
        assert load(store, prompt(3, 64)) < 64
        assert store.stats().cold.used <= store.stats().cold.total


# -- accounts ----------------------------------------------------------------------------------------


def test_free_and_used_add_up_at_each_step(tmp_path: Path) -> None:
    profile = small_profile(warm_bytes=16 * PAGE, hot_bytes=4 * PAGE, cold_bytes=500 * 1024)
    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        order = np.random.default_rng(4)
        for step in range(200):
            seed = int(order.integers(40))
            put(store, prompt(seed, int(order.integers(1, 80))), wait=1)
            load(store, prompt(int(order.integers(40)), 80))
            if step % 20 == 0:
                store.invalidate(prefix=prompt(seed, 1))
            store.check()
            stats = store.stats()
            for tier, budget in (
                (stats.hot, profile.hot_bytes),
                (stats.warm, profile.warm_bytes),
                (stats.cold, profile.cold_bytes),
            ):
                assert tier.used + tier.free == tier.total <= budget
                assert tier.used >= 0
                assert tier.free >= 0


def test_counts_of_tokens_add_up(store: KVStore) -> None:
    put(store, prompt(1, 40))
    store.lookup(prompt(1, 30))
    store.lookup(prompt(2, 30))
    counts = store.stats().counts
    assert counts["tokens_stored"] == 40
    assert counts["tokens_asked"] == counts["tokens_matched"] + counts["tokens_missed"] == 60
    assert counts["tokens_matched"] == 30


# -- profiles ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", [CPU, ANE, NNAPI], ids=lambda profile: profile.name)
def test_the_profiles_that_come_along_work(profile: Profile) -> None:
    with open_store(None, identity=identity(), profile=profile) as store:
        tokens = prompt(1, 3 * profile.block_tokens + 5)
        put(store, tokens)
        assert load(store, tokens) == len(tokens)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"block_tokens": 0}, "block_tokens 0"),
        ({"alignment": 3}, "power of two"),
        ({"hot_bytes": -1}, "must not be negative"),
        ({"frame_bytes": 0}, "must be positive"),
        ({"hot_bytes": 4096 * 9, "arena_bytes": 4096, "max_hot_arenas": 8}, "the device pins 8"),
    ],
)
def test_a_profile_that_cannot_be_is_refused(settings: dict[str, int], text: str) -> None:
    with pytest.raises(BudgetError, match=text):
        Profile(**settings)  # type: ignore[arg-type]


def test_a_budget_below_one_block_is_refused(tmp_path: Path) -> None:
    profile = small_profile(warm_bytes=LAYOUT.block_bytes(16) - 1)
    with pytest.raises(BudgetError, match="warm_bytes"):
        open_store(tmp_path / "kv", identity=identity(), profile=profile)
    with open_store(
        tmp_path / "kv", identity=identity(), profile=small_profile()
    ) as store:  # not left locked
        put(store, prompt(1, 20))


def test_flash_too_small_for_anything_leaves_memory_at_work(tmp_path: Path) -> None:
    profile = small_profile(cold_bytes=1)
    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        put(store, prompt(1, 40))
        store.flush()
        assert load(store, prompt(1, 40)) == 40
        assert store.stats().refusals == {"cold tier full": 3}


def test_memory_of_a_block_that_a_device_can_map(store: KVStore) -> None:
    """The bytes behind the file descriptor of the hot tier are the block's, in the layout's raw form."""
    tokens = prompt(1, 16)
    put(store, tokens)
    store.flush()
    store.promote(store.lookup(tokens))
    (block,) = store.lookup(tokens).blocks
    assert block.memory is not None
    assert block.memory.tier.name == "hot"
    descriptor, offset = block.memory.tier.handle(block.memory.extent)
    assert offset % PAGE == 0
    with mmap.mmap(descriptor, offset + PAGE) as mapped:
        raw = np.frombuffer(mapped, np.uint8)[offset : offset + block.nbytes].copy()
    pairs = [pair for pair in LAYOUT.views(raw, 16) if pair is not None]
    mapped_kv = Arrays([keys for keys, _ in pairs], [values for _, values in pairs])
    assert matches(mapped_kv, tokens, store.identity, 16)
