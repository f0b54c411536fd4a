"""The hot tier of a client whose NPU's memory no other process can map: ANE's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.admin.remote import connected as administered
from kvstore.daemon import client_hot, wire
from kvstore.daemon.client_hot import ClientHot
from kvstore.daemon.remote_store import RemoteStore, connect
from kvstore.prefetch.eviction import POLICIES
from kvstore.profile import PROFILES, Profile
from tests.faults.child import Child
from tests.known_kv import empty, identity, known_kv, load, matches, prompt, put, quiet, small_profile

from .raw_client import raw_client
from .running import Daemon, daemon

PAGE = 4096
BLOCK = 16
PROMPT = prompt(1, 5 * BLOCK)
KV_BYTES = 5 * PAGE
MEMFD = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory is found by its name on Linux")


def profile(**changes: Any) -> Profile:
    """Sixteen blocks in four pinned buffers, of which one client gets two."""
    settings: dict[str, Any] = {"hot_bytes": 16 * PAGE, "max_hot_arenas": 4, "shares_hot": False}
    return small_profile(block_tokens=BLOCK, **(settings | changes))


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tmp_path / "kv", profile()) as started:
        yield started


def client(running: Daemon, name: str = "a", salt: bytes = b"") -> RemoteStore:
    store = connect(running.socket, identity=identity(name, salt=salt), fallback="none")
    assert store.is_connected
    return store


@pytest.fixture
def store(running: Daemon) -> Iterator[RemoteStore]:
    with client(running) as connected:
        yield connected
        connected.check()


def hot(store: RemoteStore) -> ClientHot:
    found = store._link.hot(store._link.channel())
    assert found is not None
    return found


def use(store: RemoteStore, tokens: Any) -> int:
    length = load(store, tokens)  # type: ignore[arg-type]
    assert hot(store).settled(60)
    return length


def counts(store: RemoteStore) -> dict[str, int]:
    return {
        name: count for name, count in store.stats().counts.items() if name.startswith(("bytes_from", "hot_"))
    }


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


# -- what it is for ---------------------------------------------------------------------------------------------------


def test_a_hot_prefix_is_read_from_this_process_and_nothing_from_warm(store: RemoteStore) -> None:
    put(store, PROMPT)
    for _ in range(2):  # the second use makes it hot
        assert use(store, PROMPT) == len(PROMPT)
    assert counts(store) == {"bytes_from_warm": 2 * KV_BYTES, "hot_bytes_copied": KV_BYTES}
    for turn in range(1, 4):
        assert use(store, PROMPT) == len(PROMPT)
        assert counts(store) == {
            "bytes_from_warm": 2 * KV_BYTES,
            "hot_bytes_copied": KV_BYTES,
            "bytes_from_hot": turn * KV_BYTES,
        }


def test_the_daemon_keeps_warm_and_cold_alone(running: Daemon, store: RemoteStore) -> None:
    put(store, PROMPT)
    for _ in range(3):
        use(store, PROMPT)
    quiet(store)  # type: ignore[arg-type]
    with closing(administered(running.socket)) as admin:
        tiers = admin.status().tiers
    assert (tiers["hot"].total, tiers["hot"].blocks) == (0, 0)
    assert tiers["warm"].blocks == tiers["cold"].blocks == 5
    mine = store.stats().hot
    assert (mine.total, mine.used, mine.blocks, mine.leased) == (8 * PAGE, 5 * PAGE, 5, 0)


def test_look_ups_and_leases_say_what_is_hot_here(running: Daemon, store: RemoteStore) -> None:
    put(store, PROMPT)
    store.promote(store.lookup(PROMPT), "hot")
    match = store.lookup(PROMPT)
    assert {block.tier for block in match.blocks} == {"hot"}
    with store.lease(match) as lease:
        assert lease.tokens_by_tier() == {"hot": len(PROMPT), "warm": 0, "cold": 0}
    with client(running) as other:
        assert {block.tier for block in other.lookup(PROMPT).blocks} == {"warm"}


def test_a_copy_serves_while_the_daemon_has_the_block_on_flash_alone(store: RemoteStore) -> None:
    put(store, PROMPT)
    quiet(store)  # type: ignore[arg-type]
    store.promote(store.lookup(PROMPT), "hot")
    assert store._move(store.lookup(PROMPT), "cold") == 5
    before = store.stats().counts
    assert load(store, PROMPT) == len(PROMPT)  # type: ignore[arg-type]
    after = store.stats().counts
    assert after.get("daemon_tiles", 0) == before.get("daemon_tiles", 0)
    assert after["bytes_from_hot"] == KV_BYTES


def test_demote_takes_it_from_here_too(store: RemoteStore) -> None:
    put(store, PROMPT)
    quiet(store)  # type: ignore[arg-type]
    store.promote(store.lookup(PROMPT), "hot")
    assert store.stats().hot.blocks == 5
    store.demote(store.lookup(PROMPT))
    assert store.stats().hot.used == 0
    assert {block.tier for block in store.lookup(PROMPT).blocks} == {"cold"}
    assert load(store, PROMPT) == len(PROMPT)  # type: ignore[arg-type]


def test_moved_runs_are_read_from_here(store: RemoteStore) -> None:
    put(store, PROMPT)
    store.promote(store.lookup(PROMPT), "hot")
    behind = np.concatenate([prompt(2, 7), PROMPT])
    buffer = empty(len(behind))
    with store.lease(store.lookup(behind, moved=True)) as lease:
        assert lease.runs
        for _ in lease.layer_groups(buffer):
            pass
    assert counts(store).get("bytes_from_warm", 0) == 0 < counts(store)["bytes_from_hot"]


def test_what_a_sharing_daemon_serves_has_no_tier_here(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv", profile(shares_hot=True)) as running, client(running) as store:
        put(store, PROMPT)
        assert store._link.hot(store._link.channel()) is None
        store.promote(store.lookup(PROMPT), "hot")
        assert store.stats().hot.blocks == 5
        with raw_client(running.socket) as raw:
            raw.greet()
            assert _room(raw.ask(wire.TakeHot(7, PAGE))).arenas == 0


def test_only_ane_keeps_its_memory_to_one_process() -> None:
    assert [name for name, each in PROFILES.items() if not each.shares_hot] == ["ane"]


# -- budgets ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", sorted(POLICIES))
def test_every_policy_evicts_within_the_budget(tmp_path: Path, eviction: str) -> None:
    with daemon(tmp_path / "kv", profile(eviction=eviction)) as running, client(running) as store:
        prompts = [prompt(seed, 3 * BLOCK) for seed in range(6)]
        for tokens in prompts * 3:
            put(store, tokens)
            use(store, tokens)
            assert store.stats().hot.used <= store.stats().hot.total <= 8 * PAGE
        store.check()
        assert counts(store)["hot_evicted"] > 0
        use(store, prompts[-1])
        before = counts(store)["bytes_from_warm"]
        assert use(store, prompts[-1]) == 3 * BLOCK
        assert counts(store)["bytes_from_warm"] == before, "what was just used is here"


def test_pinned_buffers_are_one_budget_for_all_clients(running: Daemon) -> None:
    stores = [client(running) for _ in range(5)]
    put(stores[0], PROMPT)
    totals = []
    for store in stores:
        for _ in range(2):
            use(store, PROMPT)
        totals.append(store.stats().hot.total)
    assert totals == [8 * PAGE, 4 * PAGE, 4 * PAGE, 0, 0]
    assert not gets_room(running)
    for store in stores[:2]:
        store.close()
    until(lambda: gets_room(running))
    for store in stores[2:]:
        store.close()


def gets_room(running: Daemon) -> bool:
    """Whether one more client has a hot tier when it needs one."""
    with client(running) as late:
        for _ in range(2):
            use(late, PROMPT)
        return late.stats().hot.total > 0


def test_a_client_at_rest_gives_its_part_back_and_has_one_when_it_goes_on(
    running: Daemon, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_hot, "ASK_SECONDS", 0.05)
    put(store, PROMPT)
    store.promote(store.lookup(PROMPT), "hot")
    assert store.stats().hot.total == 8 * PAGE
    monkeypatch.setattr(client_hot, "_REST_SECONDS", 0.05)
    until(lambda: store.stats().hot.total == 0)
    monkeypatch.undo()
    with client(running) as other:
        other.promote(other.lookup(PROMPT), "hot")
        assert other.stats().hot.total == 8 * PAGE, "as if there were nobody else"
    for _ in range(2):
        use(store, PROMPT)
    assert store.stats().hot.blocks > 0


def test_a_block_that_no_arena_takes_is_read_from_warm(tmp_path: Path) -> None:
    with (
        daemon(tmp_path / "kv", profile(hot_bytes=4 * PAGE, arena_bytes=PAGE, warm_bytes=0x40000)) as running,
        raw_client(running.socket) as raw,
    ):
        raw.greet()
        assert _room(raw.ask(wire.TakeHot(7, 2 * PAGE))).arenas == 0
        assert _room(raw.ask(wire.TakeHot(8, PAGE))) == wire.HotRoom(2, PAGE, PAGE, "least worth", "laptop")


def _room(answered: wire.Answer) -> wire.HotRoom:
    return msgspec.msgpack.decode(answered.body, type=wire.HotRoom)


# -- what was purged --------------------------------------------------------------------------------------------------


def _pieces(tokens: Any, salt: bytes = b"") -> list[bytes]:
    """64 bytes of each array's KV."""
    return [
        np.ascontiguousarray(each).tobytes()[:64] for each in known_kv(tokens, identity(salt=salt)).each()
    ]


def _found(pieces: list[bytes], name: str) -> bool:
    """Whether any of `pieces` lies in memory of this process that is called so."""
    with open("/proc/self/maps") as maps, open("/proc/self/mem", "rb") as memory:
        for line in maps:
            if name not in line:
                continue
            start, end = (int(each, 16) for each in line.split()[0].split("-"))
            memory.seek(start)
            seen = memory.read(end - start)
            if any(piece in seen for piece in pieces):
                return True
    return False


@MEMFD
@pytest.mark.parametrize("how", ["purge", "invalidate", "evicted before"])
def test_a_purge_by_another_client_leaves_nothing_here_for_long(
    running: Daemon, store: RemoteStore, how: str
) -> None:
    put(store, PROMPT)
    store.promote(store.lookup(PROMPT), "hot")
    assert _found(_pieces(PROMPT), "kvstore-hot-client"), "it would be found"
    if how == "evicted before":  # what is free here holds nothing of it either
        for seed in range(2, 6):
            put(store, prompt(seed, 4 * BLOCK))
            store.promote(store.lookup(prompt(seed, 4 * BLOCK)), "hot")
    with closing(administered(running.socket)) as admin:
        if how == "invalidate":
            with client(running) as other:
                other.invalidate(prefix=PROMPT[:BLOCK])
        else:
            admin.purge(everything=True, dry_run=False)
    assert store.lookup(PROMPT).length == 0, "at once"
    until(lambda: not _found(_pieces(PROMPT), "kvstore-hot-client"), 10)
    until(lambda: not store.stats().hot.used, 10)


def test_what_is_put_again_after_a_purge_is_not_served_from_the_old_copy(store: RemoteStore) -> None:
    """The key is the same; the KV need not be."""
    put(store, PROMPT)
    store.promote(store.lookup(PROMPT), "hot")
    store.invalidate(prefix=PROMPT[:BLOCK])
    other = known_kv(PROMPT, identity("b"))
    store.put(PROMPT, other)
    buffer = empty(len(PROMPT))
    with store.find(PROMPT) as lease:
        assert lease.load_into(buffer) == len(PROMPT)
    assert matches(buffer, PROMPT, identity("b"), len(PROMPT))


@MEMFD
def test_a_lost_daemon_leaves_nothing_here_for_long(running: Daemon, store: RemoteStore) -> None:
    put(store, PROMPT)
    store.promote(store.lookup(PROMPT), "hot")
    running.kill()
    until(lambda: not _found(_pieces(PROMPT), "kvstore-hot-client"), 15)
    running.start()
    until(lambda: store.is_connected)
    put(store, PROMPT)
    for _ in range(2):
        assert use(store, PROMPT) == len(PROMPT)
    assert store.stats().hot.blocks == 5


@MEMFD
def test_a_copy_that_a_load_reads_stays_until_that_ends(store: RemoteStore) -> None:
    put(store, PROMPT)
    store.promote(store.lookup(PROMPT), "hot")
    buffer = empty(len(PROMPT))
    with store.lease(store.lookup(PROMPT)) as lease:
        groups = lease.layer_groups(buffer)
        next(groups)
        hot(store).forget(block.key for block in lease.blocks)
        assert store.stats().hot.blocks == 0 < store.stats().hot.used
        assert [group.tokens for group in groups] == [len(PROMPT)]
        assert matches(buffer, PROMPT, store.identity, len(PROMPT))
    assert store.stats().hot.used == 0
    assert not _found(_pieces(PROMPT), "kvstore-hot-client")


def test_a_client_is_told_nothing_of_blocks_of_another_tenant(running: Daemon) -> None:
    with client(running, salt=b"one") as one, raw_client(running.socket) as raw:
        put(one, PROMPT)
        block = one.lookup(PROMPT).blocks[0]
        raw.greet()
        view = raw.open(identity(salt=b"two"))
        asked = raw.ask(wire.KeepHot(9, view, [block.number], [block.key]))
        assert msgspec.msgpack.decode(asked.body) == [block.number], "as of what there is not"


def _leave_child(connection: Connection, path: str) -> None:
    """A child of a process with copies goes on with a connection of its own, and ends."""
    store = connect(path, identity=identity(), fallback="none")
    for _ in range(3):
        use(store, PROMPT)
    pid = os.fork()
    if pid == 0:
        load(store, PROMPT)  # type: ignore[arg-type]
        store.close()
        os._exit(0)
    os.waitpid(pid, 0)
    before = counts(store)["bytes_from_hot"]
    length = use(store, PROMPT)
    connection.send((length, counts(store)["bytes_from_hot"] - before))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is Unix's")
def test_a_forked_child_does_not_overwrite_its_parents_copies(running: Daemon) -> None:
    with client(running) as store:
        put(store, PROMPT)
    child = Child(_leave_child, str(running.socket))
    assert child.receive() == (len(PROMPT), KV_BYTES)


# -- whatever is done -------------------------------------------------------------------------------------------------


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["put", "use", "use", "promote", "demote", "purge", "lease", "release"]),
            st.integers(0, 4),
            st.integers(1, 100),
        ),
        max_size=30,
    )
)
def test_no_copy_is_ever_wrong_and_every_byte_is_accounted_for(
    running: Daemon, steps: list[tuple[str, int, int]]
) -> None:
    with client(running) as store:
        leases: list[Any] = []
        for step, seed, length in steps:
            tokens = prompt(seed, length)
            if step == "put":
                put(store, tokens)
            elif step == "use":
                load(store, tokens)  # type: ignore[arg-type]
            elif step == "promote":
                store.promote(store.lookup(tokens), "hot")
            elif step == "demote":
                store.demote(store.lookup(tokens))
            elif step == "purge":
                store.invalidate(prefix=tokens)
            elif step == "lease":
                leases.append(store.find(tokens))
            elif leases:
                leases.pop(length % len(leases)).release()
            assert hot(store).settled(60)
            store.check()
            assert store.stats().hot.used <= store.stats().hot.total
        for lease in leases:
            lease.release()
