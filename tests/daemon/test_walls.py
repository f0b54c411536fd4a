"""Tenants: none sees memory of another, and nothing is left of what is purged."""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstore.admin.administration import Administration
from kvstore.admin.remote import connected as administered
from kvstore.daemon import wire
from kvstore.daemon.remote_store import RemoteStore, connect
from kvstore.open_directory import OpenDirectory
from kvstore.pipeline.recompute import FirstTokens
from kvstore.quality.reuse import Verdict
from kvstore.store import KVStore
from kvstore.tiers.memory import MemoryTier
from tests.faults.child import Child
from tests.known_kv import identity, known_kv, load, prompt, put, quiet, small_profile

from .raw_client import RawClient, raw_client
from .running import Daemon, daemon, descriptors

PAGE = 4096
SALTS = (b"", b"one", b"two", b"three")
MEMFD = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory is found by its name on Linux")


def tenant(running: Daemon, salt: bytes) -> RemoteStore:
    store = connect(running.socket, identity=identity(salt=salt), fallback="none")
    assert store.is_connected
    return store


# -- what can be mapped -----------------------------------------------------------------------------------------------


@MEMFD
def test_a_client_maps_nothing_of_another_tenant(tmp_path: Path) -> None:
    """Arenas were shared by all, and mapped whole."""
    with daemon(tmp_path / "kv") as running, tenant(running, b"one") as one, tenant(running, b"two") as two:
        put(one, prompt(1, 100))
        put(two, prompt(2, 100))
        assert [load(one, prompt(1, 100)), load(two, prompt(2, 100))] == [100, 100]
        child = Child(_what_is_mapped, str(running.socket), b"two")
        own, others = child.receive()
        assert own, "it would have been found"
        assert not others


def _what_is_mapped(connection: Connection, path: str, salt: bytes) -> None:
    """Whether all memory that a client of "two" can reach holds KV of its own, and of tenant "one"."""
    store = connect(path, identity=identity(salt=salt), fallback="none")
    assert load(store, prompt(2, 100)) == 100  # type: ignore[arg-type]
    seen = b"".join(_mapped("/memfd:kvstore"))
    own = [piece in seen for piece in _kv_pieces(prompt(2, 100), identity(salt=b"two"))]
    others = [piece in seen for piece in _kv_pieces(prompt(1, 100), identity(salt=b"one"))]
    connection.send((all(own), any(others)))


@MEMFD
def test_memory_that_changes_hands_shows_zeros_to_who_mapped_it(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv") as running, tenant(running, b"one") as one, tenant(running, b"two") as two:
        for seed in range(5):
            put(one, prompt(seed, 16 * 15))
        with raw_client(running.socket) as client:
            client.greet()
            maps = _lease_and_map(
                client, client.open(identity(salt=b"one")), [prompt(seed, 240) for seed in range(5)]
            )
            assert sum(len(each) for each in maps.values()) > 0.7 * one.stats().warm.total
            before = {number: bytes(each) for number, each in maps.items()}
            one.flush()
            for seed in range(10, 14):
                assert _until(lambda seed=seed: put(two, prompt(seed, 100)).refused == 0)  # type: ignore[misc]
            gone = {client.receive().arena for _ in range(2)}
            for number in gone:
                assert any(before[number])
                assert not any(bytes(maps[number])), "an arena that was given up still shows KV"
            for number in maps.keys() - gone:
                assert not _any_kv(bytes(maps[number]), prompt(13, 100), identity(salt=b"two"))
        for seed in range(5):
            load(one, prompt(seed, 240))  # and compares
        assert load(two, prompt(13, 100)) == 100
        one.check()


def _lease_and_map(client: RawClient, view: int, prompts: list[Any]) -> dict[int, mmap.mmap]:
    """What a client that keeps everything has mapped, having let go of its leases."""
    found: dict[int, mmap.mmap] = {}
    for at, tokens in enumerate(prompts):
        leased = client.ask(wire.Lookup(10 + at, view, tokens.astype("<i4").tobytes(), False, [], True))
        for arena in leased.arenas:
            found[arena.number] = mmap.mmap(client.descriptors[len(found)], arena.size, prot=mmap.PROT_READ)
        assert client.ask(wire.Release(50 + at, leased.lease)) == wire.Done(50 + at)
    return found


def test_each_tenant_gets_memory_however_many_there_are(tmp_path: Path) -> None:
    """One that came first and filled it all would keep it all."""
    with daemon(tmp_path / "kv") as running:
        stores = [tenant(running, b"salt %d" % number) for number in range(12)]
        for store in stores:
            for seed in range(8):
                put(store, prompt(seed, 16 * 10))
            store.flush()
        for number, store in enumerate(stores):
            assert _until(lambda store=store: put(store, prompt(20, 16)).refused == 0), number  # type: ignore[misc]
            assert load(store, prompt(20, 16)) == 16
        stores[0].check()
        assert descriptors(running.pid, arenas=True) <= 2 * 24, "of arenas that were given up"
        for store in stores:
            store.close()


def test_look_ups_tell_nothing_of_another_tenant(tmp_path: Path) -> None:
    """The same replies, and the same counters, for what another holds and for what nobody does."""
    with daemon(tmp_path / "kv") as running, tenant(running, b"one") as one, tenant(running, b"two") as two:
        put(one, prompt(1, 100))
        seen = []
        for seed in (1, 2):
            before = two.stats()
            found = two.lookup(prompt(seed, 100), moved=True)
            after = two.stats()
            moved = {
                name: count - before.counts.get(name, 0)
                for name, count in after.counts.items()
                if not name.startswith("daemon_")
            }
            seen.append(
                (
                    found,
                    moved,
                    after.misses,
                    two.explain(prompt(seed, 100)).spans,
                    two.neighbours(prompt(seed, 100)),
                )
            )
        assert seen[0] == seen[1]
        assert seen[0][0].length == 0


def test_statistics_tell_no_verdict_of_another_tenant(tmp_path: Path) -> None:
    """Those of all tenants came, with the digests of their identities."""
    with daemon(tmp_path / "kv") as running, tenant(running, b"one") as one, tenant(running, b"two") as two:
        one.keep_verdict(Verdict(FirstTokens(4), None, reasons=("careful: only one knows",)))
        assert two.stats().verdicts == {}
        two.keep_verdict(Verdict(FirstTokens(8), FirstTokens(8)))
        for store, repair in ((one, "first 4 tokens of each run"), (two, "first 8 tokens of each run")):
            ((digest, policies),) = store.stats().verdicts.items()
            assert digest == store.identity.digest().hex()
            assert policies["fast"].repair == repair


# -- accounting -------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aaar"), st.integers(0, 3), st.integers(1, 40)), max_size=60))
def test_no_memory_goes_from_one_owner_to_another(steps: list[tuple[str, int, int]]) -> None:
    memory = MemoryTier("warm", 64 * PAGE, arena_bytes=64 * PAGE, alignment=PAGE, pin=False, walled=True)
    retired: list[int] = []
    memory.retired = retired.append
    held = []
    with closing(memory):
        for step, which, pages in steps:
            if step == "r" and held:
                memory.release(held.pop(pages % len(held))[0])
            elif (extent := memory.allocate(pages * PAGE - 100, SALTS[which], 3 * PAGE)) is not None:
                assert memory.owner(extent.arena) == SALTS[which]
                assert extent.arena not in retired
                found = set(memory.view(extent, extent.size)[:: PAGE // 2].tolist())
                assert found <= {0, which + 1}, "bytes of another owner"
                memory.view(extent, extent.size)[:] = which + 1
                held.append((extent, which))
            memory.check()
            assert sum(memory.owned().values()) <= memory.total
            for extent, owner in held:
                assert (memory.view(extent, extent.size) == owner + 1).all()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.sampled_from(["put", "put", "load", "promote", "flush", "purge", "lease", "release"]),
                  st.integers(0, 3), st.integers(0, 5), st.integers(1, 300)),
        max_size=40,
    )
)  # fmt: skip
def test_accounts_stay_exact_whatever_tenants_do(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int, int]]
) -> None:
    opened = OpenDirectory(tmp_path_factory.mktemp("kv") / "kv", small_profile(), walled=True)
    with closing(opened):
        stores = [KVStore(opened, identity(salt=salt)) for salt in SALTS]
        leases = []
        for step, which, seed, length in steps:
            store = stores[which]
            if step == "put":
                put(store, prompt(seed, length))
            elif step == "load":
                load(store, prompt(seed, length))
            elif step == "promote":
                store.promote(store.lookup(prompt(seed, length)))
            elif step == "flush":
                quiet(store)
            elif step == "purge":
                Administration(opened).purge(
                    prefix=prompt(seed, min(length, 20)).tolist(),
                    identity=store.identity.digest().hex(),
                    dry_run=False,
                )
            elif step == "lease":
                leases.append(store.lease(store.lookup(prompt(seed, length))))
            elif leases:
                leases.pop(length % len(leases)).release()
            store.check()
            with opened.tiers.lock:
                for block in opened.tiers.blocks.values():
                    if block.memory is not None:
                        owner = block.memory.tier.owner(block.memory.extent.arena)
                        assert owner == opened.tiers.owner(block.namespace)
        for lease in leases:
            lease.release()


@pytest.mark.parametrize("most", [1, 2, 3])
def test_all_tenants_together_have_no_more_hot_arenas_than_the_device_pins(tmp_path: Path, most: int) -> None:
    """Each tenant had arenas of its own, whatever the profile said."""
    profile = small_profile(hot_bytes=9 * PAGE, max_hot_arenas=most)
    opened = OpenDirectory(tmp_path / "kv", profile, walled=True)
    with closing(opened):
        stores = [KVStore(opened, identity(salt=salt)) for salt in SALTS]
        for store in stores:
            put(store, prompt(1, 16 * 3))
        stores[0].flush(60)
        for turn in range(12):
            store = stores[turn % 4]
            store.promote(store.lookup(prompt(1, 16 * 3)))
            assert 1 <= len(opened.tiers.hot.arenas) <= most
            store.check()
            assert load(store, prompt(1, 16 * 3)) == 16 * 3
        assert opened.tiers.hot.used > 0


# -- quotas -----------------------------------------------------------------------------------------------------------


def test_a_tenant_at_its_quota_loses_blocks_of_its_own(tmp_path: Path) -> None:
    profile = small_profile(tenant_memory_bytes=10 * PAGE, tenant_cold_bytes=300_000)
    with (
        daemon(tmp_path / "kv", profile) as running,
        tenant(running, b"one") as one,
        tenant(running, b"two") as two,
    ):
        put(two, prompt(100, 16 * 5))
        two.flush()
        with closing(administered(running.socket)) as admin:
            for seed in range(30):
                put(one, prompt(seed, 16 * 3))
                load(one, prompt(seed, 16 * 3))
                one.flush()
                one.promote(one.lookup(prompt(seed, 16 * 3)))
                for each in admin.quota():
                    assert each.memory_bytes <= 10 * PAGE == each.most_memory_bytes
                    assert each.flash_bytes <= 300_000 == each.most_flash_bytes
            assert max(each.flash_bytes for each in admin.quota()) > 250_000
            assert admin.status().counts["evicted_cold"] > 0
        assert load(two, prompt(100, 16 * 5)) == 16 * 5
        one.check()


def test_what_exceeds_a_quota_is_refused_and_said_so(tmp_path: Path) -> None:
    profile = small_profile(tenant_memory_bytes=3 * PAGE, cold_bytes=0)
    with (
        daemon(tmp_path / "kv", profile) as running,
        tenant(running, b"one") as one,
        tenant(running, b"two") as two,
    ):
        result = put(one, prompt(1, 16 * 5))
        assert (result.stored, result.refused, result.reason) == (16 * 3, 16 * 2, "tenant quota")
        assert one.stats().refusals["tenant quota"] == 16 * 2
        assert put(two, prompt(1, 16 * 3)).refused == 0
        one.check()


def test_a_quota_of_flash_counts_what_was_there_before_a_restart(tmp_path: Path) -> None:
    profile = small_profile(tenant_cold_bytes=200_000)
    before = 0
    for number in range(3):
        with daemon(tmp_path / "kv", profile) as running, tenant(running, b"one") as one:
            with closing(administered(running.socket)) as admin:
                assert sum(each.flash_bytes for each in admin.quota()) == before
                for seed in range(8):
                    put(one, prompt(10 * number + seed, 16 * 3))
                    one.flush()
                (found,) = (each for each in admin.quota() if each.tenant)
                before = found.flash_bytes
                assert 100_000 < before <= 200_000
            one.check()
            assert running.stop() == 0


def test_a_refused_write_says_that_it_was_the_quota(tmp_path: Path) -> None:
    with (
        daemon(tmp_path / "kv", small_profile(tenant_cold_bytes=8192)) as running,
        tenant(running, b"one") as one,
    ):
        put(one, prompt(1, 64))
        one.flush()
        assert one.stats().refusals["tenant quota"] > 0
        assert one.stats().cold.blocks == 0


# -- purge ------------------------------------------------------------------------------------------------------------


@MEMFD
@pytest.mark.parametrize("what", ["tenant", "prefix", "document", "everything"])
def test_nothing_is_left_of_what_is_purged(tmp_path: Path, what: str) -> None:
    """Token ids in the index and in pins, KV where it lay before it moved, records that failed a check."""
    ours = identity(salt=b"one")
    tokens, kept = prompt(1, 16 * 6), prompt(2, 16 * 3)
    with daemon(tmp_path / "kv") as running, tenant(running, b"one") as one:
        put(one, tokens)
        assert running.stop() == 0, "which writes the index"
    with daemon(tmp_path / "kv") as running, tenant(running, b"one") as one, tenant(running, b"two") as two:
        assert load(one, tokens) == len(tokens)  # type: ignore[arg-type]
        put(two, kept)
        with closing(administered(running.socket)) as admin:
            one.promote(one.lookup(tokens[:64]))
            one.flush()
            one.demote(one.lookup(tokens))  # what lay in memory is free now, and not overwritten
            assert load(one, tokens) == len(tokens)  # type: ignore[arg-type]
            admin.pin(tokens[:48].tolist(), identity=ours.digest().hex())
            two.flush()
            pieces = (
                _kv_pieces(tokens, ours) + _pieces(tokens.astype("<i4").tobytes()) + _record_pieces(tmp_path)
            )
            kept_pieces = _pieces(kept.astype("<i4").tobytes())
            before = b"".join(_all_there_is(tmp_path, running.pid))
            assert sum(piece in before for piece in pieces) > 0.9 * len(pieces)
            name = next(
                each.tenant for each in admin.status().identities if each.identity == ours.digest().hex()
            )
            arguments = {
                "tenant": {"tenant": name},
                "prefix": {"prefix": tokens[:5].tolist(), "identity": ours.digest().hex()},
                "document": {"document": tokens[3:40].tolist()},
                "everything": {"everything": True},
            }[what]
            assert admin.purge(**arguments, dry_run=False).blocks >= 6
            after = b"".join(_all_there_is(tmp_path, running.pid))
            if what != "everything":
                pieces = [piece for piece in pieces if piece not in _kept_records(tmp_path)]
                assert any(piece in after for piece in kept_pieces), "what another tenant holds stays"
                assert load(two, kept) == len(kept)  # type: ignore[arg-type]
            assert [piece for piece in pieces if piece in after] == []
        two.check()
        assert running.stop() == 0
        assert [piece for piece in pieces if piece in b"".join(_files(tmp_path))] == []


def test_what_was_leased_at_a_purge_goes_with_the_lease(tmp_path: Path) -> None:
    tokens = prompt(1, 64)
    opened = OpenDirectory(tmp_path / "kv", small_profile())
    with closing(opened):
        store = KVStore(opened, identity())
        put(store, tokens)
        store.flush()
        pieces = _kv_pieces(tokens, store.identity)
        lease = store.lease(store.lookup(tokens))
        Administration(opened).purge(everything=True, dry_run=False)
        held = b"".join(
            bytes(arena.bytes)
            for tier in (opened.tiers.hot, opened.tiers.warm)
            for arena in tier.arenas.values()
        )
        assert all(piece in held for piece in pieces), "a lease keeps what it names"
        lease.release()
        for tier in (opened.tiers.hot, opened.tiers.warm):
            for arena in tier.arenas.values():
                assert not arena.bytes.any()
        assert list((tmp_path / "kv" / "blocks").iterdir()) == []


# -- what there is to be found ----------------------------------------------------------------------------------------


def _pieces(content: bytes) -> list[bytes]:
    """What one of is in any 64 bytes of `content`."""
    whole = len(content) // 32 * 32
    pieces = [content[at : at + 32] for at in range(0, whole, 32)]
    return [piece for piece in pieces if len(set(piece)) > 8]  # no padding


def _kv_pieces(tokens: Any, owner: Any) -> list[bytes]:
    """Of KV as it lies in memory: the rows of a head are 32 bytes, one behind the other."""
    found = []
    for array in known_kv(tokens, owner).each():
        for head in np.ascontiguousarray(array):
            found += _pieces(head.tobytes())
    return found


def _any_kv(content: bytes, tokens: Any, owner: Any) -> bool:
    return any(piece in content for piece in _kv_pieces(tokens, owner))


def _record_pieces(path: Path) -> list[bytes]:
    return [piece for file in (path / "kv" / "blocks").iterdir() for piece in _pieces(file.read_bytes())]


def _kept_records(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in (path / "kv" / "blocks").iterdir())


def _files(path: Path) -> Iterator[bytes]:
    for file in path.rglob("*"):
        if file.is_file():
            yield file.read_bytes()


def _all_there_is(path: Path, pid: int) -> Iterator[bytes]:
    """Every file of a data directory, and every arena that its daemon has open."""
    yield from _files(path)
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        if re.match(r"/memfd:kvstore-(hot|warm)", os.readlink(descriptor)):
            yield descriptor.read_bytes()


def _mapped(name: str) -> Iterator[bytes]:
    """What this process has mapped of files called so."""
    with Path("/proc/self/maps").open() as maps, Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for line in maps:
            if name in line:
                start, end = (int(each, 16) for each in line.split()[0].split("-"))
                memory.seek(start)
                yield memory.read(end - start)


def _until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if true():
            return True
        time.sleep(0.02)
    return False
