"""Memory that is shared: for reading only, by lease, and without a copy."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from kvstore.daemon import wire
from kvstore.daemon.remote_lease import RemoteLease
from kvstore.daemon.remote_store import RemoteStore, connect
from kvstore.errors import LeaseReleasedError
from kvstore.layout import Layout
from kvstore.profile import Profile
from kvstore.store import KVStore
from tests.faults.child import Child
from tests.known_kv import empty, identity, known_kv, load, matches, prompt, put, small_profile

from .raw_client import RawClient, raw_client
from .running import Daemon, daemon


def _leased(store: RemoteStore) -> int:
    stats = store.stats()
    return stats.warm.leased + stats.hot.leased


def connected(running: Daemon, name: str = "a", salt: bytes = b"") -> RemoteStore:
    store = connect(running.socket, identity=identity(name, salt=salt), fallback="none")
    assert store.is_connected
    return store


def test_a_client_that_writes_into_an_arena_faults_alone(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv") as running, connected(running) as store:
        put(store, prompt(1, 50))
        child = Child(_write_into_arena, str(running.socket))
        assert child.receive() == "writing"
        assert child.exit_code() == -signal.SIGSEGV
        assert load(store, prompt(1, 50)) == 50
        _until(lambda: _leased(store) == 0)  # a block that is being moved counts, too


def _write_into_arena(connection: Connection, path: str) -> None:
    import ctypes

    store = connect(path, identity=identity(), fallback="none")
    lease = store.lease(store.lookup(prompt(1, 50)))
    assert isinstance(lease, RemoteLease)
    block = lease.prefix[0]
    bytes_ = lease.channel.arenas.view(lease.place(block.number), block.nbytes)
    assert not bytes_.flags.writeable
    connection.send("writing")
    ctypes.memset(bytes_.ctypes.data, 1, 1)
    connection.send("written")


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="sealed memory is Linux's")
def test_an_arena_cannot_be_opened_anew_for_writing_nor_cut(tmp_path: Path) -> None:
    """A descriptor of memory that is the user's own file: /proc gives it back with all rights."""
    with (
        daemon(tmp_path / "kv") as running,
        connected(running) as store,
        raw_client(running.socket) as client,
    ):
        put(store, prompt(1, 50))
        client.greet()
        leased = lease_of(client, client.open(identity()), prompt(1, 50))
        assert len(client.descriptors) == len(leased.arenas) > 0
        for descriptor, arena in zip(client.descriptors, leased.arenas, strict=True):
            again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
            with pytest.raises(PermissionError):
                mmap.mmap(again, arena.size)
            for size in (0, arena.size + 4096):
                with pytest.raises(PermissionError):
                    os.ftruncate(again, size)
            with pytest.raises(PermissionError):
                os.pwrite(again, b"x", 0)
            os.close(again)


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="sealed memory is Linux's")
def test_staging_memory_cannot_be_cut_under_the_daemon(tmp_path: Path) -> None:
    """A daemon killed by SIGBUS: it read past the end of a file that a client had shortened."""
    with daemon(tmp_path / "kv") as running, raw_client(running.socket) as client:
        client.greet()
        given = client.ask(wire.Staging(5, 100_000))
        assert given.nbytes >= 100_000
        staging = client.descriptors[0]
        with pytest.raises(PermissionError):
            os.ftruncate(staging, 0)
        with pytest.raises(PermissionError):
            fcntl.fcntl(staging, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_lease_of_what_lies_in_memory_copies_nothing(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv") as running, connected(running) as store:
        put(store, prompt(1, 100))
        before = store.stats().counts["daemon_bytes_copied"]
        for _ in range(10):
            assert load(store, prompt(1, 100)) == 100
        assert store.stats().counts["daemon_bytes_copied"] == before > 0


def test_two_clients_share_what_one_of_them_put(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv") as running, connected(running) as one, connected(running) as other:
        put(one, prompt(1, 100))
        assert load(other, prompt(1, 100)) == 100


def test_what_a_client_changes_in_its_staging_memory_later_changes_nothing(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv") as running, connected(running) as store:
        put(store, prompt(1, 100))
        staging = store._link.channel()._staging
        assert staging is not None
        store.stats()  # the daemon answers it once the put is copied
        staging.bytes[:] = 0xFF
        assert load(store, prompt(1, 100)) == 100


def test_more_than_the_staging_memory_holds_is_put_in_pieces(tmp_path: Path) -> None:
    profile = small_profile(staging_bytes=4 * 20480, warm_bytes=256 * 4096)
    tokens = prompt(1, 700)
    with daemon(tmp_path / "kv", profile) as running, connected(running) as store:
        assert put(store, tokens).stored == 700
        channel = store._link.channel()
        assert channel._staging is not None
        assert len(channel._staging.bytes) == 20480 < 700 * 256
        assert load(store, tokens) == 700
        spans = [(10, 600)]
        result = store.put_inexact(prompt(2, 700), known_kv(prompt(2, 700), store.identity), spans)
        assert (result.stored, result.refused) == (590, 0)


def test_pieces_of_a_put_leave_alone_what_the_daemon_has_yet_to_copy(tmp_path: Path) -> None:
    """KV of one piece under the tokens of the one before: the daemon copies after its reply."""
    owner = identity(layout=Layout.uniform(layers=4, kv_heads=4, head_dim=64, rope=None, dtype="float32"))
    profile = Profile(warm_bytes=64 << 20, cold_bytes=0, staging_bytes=16 << 20)
    with (
        daemon(tmp_path / "kv", profile) as running,
        connect(running.socket, identity=owner, fallback="none") as store,
    ):
        assert put(store, prompt(1, 3000)).stored == 3000
        staging = store._link.channel()._staging
        assert staging is not None
        assert len(staging.bytes) == 4 << 20 < 3000 * owner.layout.token_bytes // 5
        assert load(store, prompt(1, 3000)) == 3000


def test_another_client_finds_what_was_put_at_once(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv") as running, connected(running) as one, connected(running) as other:
        for which in range(20):
            put(one, prompt(which, 40))
            assert other.lookup(prompt(which, 40)).length == 40


def test_staging_memory_for_a_single_block_is_enough(tmp_path: Path) -> None:
    profile = small_profile(staging_bytes=4 * 4096)
    with daemon(tmp_path / "kv", profile) as running, connected(running) as store:
        for which in range(3):
            assert put(store, prompt(which, 100)).stored == 100
        staging = store._link.channel()._staging
        assert staging is not None
        assert len(staging.bytes) == 4096
        for which in range(3):
            assert load(store, prompt(which, 100)) == 100


def test_staging_memory_has_a_budget_and_clients_give_it_back(tmp_path: Path) -> None:
    profile = small_profile(staging_bytes=64 * 1024)
    with daemon(tmp_path / "kv", profile) as running:
        given = []
        clients = []
        for _ in range(40):
            client = RawClient(running.socket)
            client.greet()
            given.append(client.ask(wire.Staging(1, 1 << 20)).nbytes)
            clients.append(client)
        assert sum(given) <= 64 * 1024
        assert given[0] == 16 * 1024
        assert given[-1] == 0
        with connected(running) as store:
            result = put(store, prompt(1, 50))
            assert (result.stored, result.refused) == (0, 50)
            assert "staging_bytes" in result.reason
        for client in clients:
            client.close()
        with connected(running) as store:
            assert put(store, prompt(1, 50)).stored == 50


# -- leases ---------------------------------------------------------------------------------------------------------


def lease_of(client: RawClient, view: int, tokens: np.ndarray) -> wire.Leased:
    leased = client.ask(wire.Lookup(2, view, tokens.astype("<i4").tobytes(), False, [], True))
    assert isinstance(leased, wire.Leased)
    return leased


def test_a_lease_is_its_connections_own(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv") as running, connected(running) as store:
        put(store, prompt(1, 50))
        with raw_client(running.socket) as one, raw_client(running.socket) as other:
            one.greet()
            other.greet()
            handle = lease_of(one, one.open(identity()), prompt(1, 50)).lease
            other.open(identity())
            for message in (
                wire.Release(3, handle),
                wire.Renew(3, handle),
                wire.Bring(3, handle, 1, [(0, 0)]),
                wire.EndBring(3, handle, 1),
            ):
                refused = other.ask(message)
                assert (refused.id, refused.kind) == (3, "LeaseReleasedError")
            assert one.ask(wire.Release(3, handle)) == wire.Done(3)
            assert one.ask(wire.Release(4, handle)).kind == "LeaseReleasedError"
        store.check()


def test_leases_end_with_their_connection(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv") as running, connected(running) as store:
        put(store, prompt(1, 50))
        store.flush()
        with raw_client(running.socket) as client:
            client.greet()
            lease_of(client, client.open(identity()), prompt(1, 50))
            stats = store.stats()
            assert stats.warm.leased + stats.hot.leased == 4
        _until(lambda: _leased(store) == 0)
        assert store.stats().counts["leases_of_lost_clients"] == 1
        store.check()


def test_a_lease_that_nobody_renews_ends(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv", lease_seconds=1) as running, connected(running) as store:
        put(store, prompt(1, 50))
        with raw_client(running.socket) as client:
            client.greet()
            leased = lease_of(client, client.open(identity()), prompt(1, 50))
            kept = lease_of(client, 1, prompt(1, 50))
            for _ in range(15):
                time.sleep(0.1)
                assert client.ask(wire.Renew(5, kept.lease)) == wire.Done(5)
            assert client.ask(wire.Renew(5, leased.lease)).kind == "LeaseReleasedError"
        assert store.stats().counts["leases_expired"] == 1


def test_nothing_of_an_expired_lease_counts_as_loaded(tmp_path: Path) -> None:
    """A process that was stopped while it copied, and read what had become somebody else's."""
    with daemon(tmp_path / "kv", lease_seconds=0.4) as running, connected(running) as store:
        put(store, prompt(1, 50))
        with store.lease(store.lookup(prompt(1, 50))) as lease:
            groups = lease.layer_groups(empty(50))
            time.sleep(1.5)
            assert store.invalidate(everything=True) == 4
            assert [group.tokens for group in groups] == [0, 0]
            assert lease.length == 0
        with pytest.raises(LeaseReleasedError):
            lease.release()
        store.check()


def test_a_lease_in_use_is_renewed(tmp_path: Path) -> None:
    buffer = empty(50)
    with daemon(tmp_path / "kv", lease_seconds=1.5) as running, connected(running) as store:
        put(store, prompt(1, 50))
        with store.lease(store.lookup(prompt(1, 50))) as lease:
            for _ in range(6):
                time.sleep(0.4)
                assert lease.load_into(buffer) == 50
        assert matches(buffer, prompt(1, 50), store.identity, 50)
        assert store.stats().counts.get("leases_expired", 0) == 0


def test_a_lease_that_nobody_released_ends_with_the_next_request(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv") as running, connected(running) as store:
        put(store, prompt(1, 50))
        lease = store.lease(store.lookup(prompt(1, 50)))
        del lease
        _until(lambda: _leased(store) == 0)


# -- walls ----------------------------------------------------------------------------------------------------------


def test_tenants_share_nothing(tmp_path: Path) -> None:
    with (
        daemon(tmp_path / "kv") as running,
        connected(running, salt=b"one") as one,
        connected(running, salt=b"two") as two,
        connected(running) as none,
    ):
        put(one, prompt(1, 50))
        assert [load(each, prompt(1, 50)) for each in (one, two, none)] == [50, 0, 0]
        assert none.neighbours(prompt(1, 50)) == []
        keys = [block.key for block in one.lookup(prompt(1, 50)).blocks]
        with raw_client(running.socket) as client:
            client.greet()
            view = client.open(identity(salt=b"two"))
            leased = client.ask(wire.TakeLease(2, view, 50, keys, len(keys), []))
            assert (leased.length, leased.blocks, leased.places) == (0, [], [])


def test_what_a_store_of_this_process_kept_the_daemon_serves_and_the_other_way_round(tmp_path: Path) -> None:
    from kvstore.store import open_store

    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as here:
        put(here, prompt(1, 50))
        here.flush()
    with daemon(tmp_path / "kv") as running, connected(running) as store:
        assert load(store, prompt(1, 50)) == 50  # type: ignore[arg-type]
        put(store, prompt(2, 50))
        assert running.stop() == 0
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as here:
        assert isinstance(here, KVStore)
        assert [load(here, prompt(seed, 50)) for seed in (1, 2)] == [50, 50]


def _until(true: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come to be in time"
        time.sleep(0.01)
