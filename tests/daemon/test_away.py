"""The daemon is away, goes, comes back: requests go on, and nothing wrong is ever read."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.daemon.remote_lease import RemoteLease
from kvstore.daemon.remote_store import RemoteStore, connect
from kvstore.errors import DaemonLostError, StoreClosedError
from kvstore.store import KVStore
from tests.known_kv import empty, identity, load, matches, prompt, put, small_profile

from .running import Daemon, daemon
from .test_sharing import connected


def test_without_a_daemon_and_without_a_fallback_nothing_is_reused_and_nothing_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        caplog.at_level(logging.WARNING),
        connect(tmp_path / "no.sock", identity=identity(), fallback="none") as store,
    ):
        for _ in range(3):
            assert store.lookup(prompt(1, 50)).length == 0
            assert load(store, prompt(1, 50)) == 0  # type: ignore[arg-type]
            result = put(store, prompt(1, 50))
            assert (result.stored, result.refused, result.reason) == (0, 50, "the daemon is away")
            store.served(prefix=0, moved=0, recomputed=0, computed=50)
        assert not store.is_connected
        with pytest.raises(DaemonLostError):
            store.flush()
        with pytest.raises(DaemonLostError):
            store.invalidate(prefix=prompt(1, 10))
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, "said once"
    assert "no cache serves" in warnings[0].message


def test_a_store_of_this_process_serves_while_the_daemon_is_away(tmp_path: Path) -> None:
    running = Daemon(tmp_path / "kv")
    with connect(running.socket, identity=identity(), profile=small_profile()) as store:
        put(store, prompt(1, 50))
        assert load(store, prompt(1, 50)) == 50  # type: ignore[arg-type]
        running.start()
        try:
            _until_connected(store)
            assert load(store, prompt(1, 50)) == 0, "it is the daemon's KV again"  # type: ignore[arg-type]
            put(store, prompt(2, 50))
            assert load(store, prompt(2, 50)) == 50  # type: ignore[arg-type]
        finally:
            running.kill()
        assert load(store, prompt(1, 50)) == 50  # type: ignore[arg-type]
        assert load(store, prompt(2, 50)) == 0  # type: ignore[arg-type]


def test_a_match_from_before_serves_a_lease_after_a_restart(tmp_path: Path) -> None:
    """Block numbers of a daemon that is no more, taken for those of its successor."""
    running = Daemon(tmp_path / "kv")
    running.start()
    with connected(running) as store:
        for seed in range(4):
            put(store, prompt(seed, 50))
        store.flush()
        matches_before = [store.lookup(prompt(seed, 50)) for seed in range(4)]
        running.kill()
        running.start()
        _until_connected(store)
        put(store, prompt(9, 50))
        for seed in (3, 1, 2, 0):
            buffer = empty(50)
            with store.lease(matches_before[seed]) as lease:
                assert lease.load_into(buffer) == 50
            assert matches(buffer, prompt(seed, 50), store.identity, 50)
        running.kill()


@pytest.mark.parametrize("where", ["memory", "flash"])
@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_daemon_that_goes_during_a_load(tmp_path: Path, where: str, how: str) -> None:
    """Tokens that were in place before count; of the rest none does."""
    tokens = prompt(1, 100)
    with daemon(tmp_path / "kv") as running, connected(running) as store:
        put(store, tokens)
        if where == "flash":
            store.flush()
            store.demote(store.lookup(tokens))
        buffer = empty(100)
        with store.lease(store.lookup(tokens)) as lease:
            groups = lease.layer_groups(buffer)
            first = next(groups)
            assert first.tokens == 100
            running.kill() if how == "kill" else running.stop()
            last = next(groups)
            assert last.tokens in (0, 100), "what came before the end may count, all else must not"
            assert lease.length == last.tokens
            assert lease.load_into(empty(100)) == 0
        assert matches(buffer, tokens, store.identity, last.tokens)
        assert load(store, tokens) == 0  # type: ignore[arg-type]


def test_what_was_leased_is_not_trusted_after_the_connection_is_gone(tmp_path: Path) -> None:
    """A daemon that lives and gave the client up reuses what the client still maps."""
    tokens = prompt(1, 100)
    with daemon(tmp_path / "kv") as running, connected(running) as store:
        put(store, tokens)
        with store.lease(store.lookup(tokens)) as lease:
            assert isinstance(lease, RemoteLease)
            lease.channel._socket.shutdown(2)
            assert lease.load_into(empty(100)) == 0
            assert lease.length == 0
        assert load(store, tokens) == 100  # type: ignore[arg-type]


def test_a_hanging_daemon_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import signal

    from kvstore.daemon import client

    with daemon(tmp_path / "kv") as running, connected(running) as store:
        put(store, prompt(1, 50))
        monkeypatch.setattr(client, "PATIENCE", 1.0)
        monkeypatch.setattr(client.Channel.call, "__defaults__", (1.0,))
        os.kill(running.pid, signal.SIGSTOP)
        started = time.monotonic()
        assert store.lookup(prompt(1, 50)).length == 0
        assert time.monotonic() - started < 60
        os.kill(running.pid, signal.SIGCONT)
        _until_connected(store)
        assert load(store, prompt(1, 50)) == 50  # type: ignore[arg-type]


def test_open_asks_a_daemon_where_it_is_told_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with daemon(tmp_path / "kv") as running:
        with kvstore.open(None, identity=identity(), daemon=running.socket) as store:
            assert isinstance(store, RemoteStore)
            put(store, prompt(1, 50))
        monkeypatch.setenv("KVSTORE_DAEMON", str(running.socket))
        with kvstore.open(None, identity=identity()) as store:
            assert isinstance(store, RemoteStore)
            assert load(store, prompt(1, 50)) == 50  # type: ignore[arg-type]
        monkeypatch.delenv("KVSTORE_DAEMON")
        with kvstore.open(None, identity=identity()) as store:
            assert isinstance(store, KVStore)


def test_open_falls_back_to_the_directory_that_it_is_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with kvstore.open(
        tmp_path / "own", identity=identity(), profile=small_profile(), daemon=tmp_path / "no.sock"
    ) as store:
        assert isinstance(store, KVStore)
        assert store.path == tmp_path / "own"
    assert "no daemon at" in caplog.text


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv") as running:
        store = connected(running)
        view = store.view(identity("b"))
        lease = store.lease(store.lookup(prompt(1, 5)))
        store.close()
        store.close()
        for call in (
            lambda: store.lookup(prompt(1, 5)),
            lambda: view.lookup(np.arange(5)),
            lambda: put(store, prompt(1, 5)),
            store.stats,
        ):
            with pytest.raises(StoreClosedError):
                call()
        del lease


def _until_connected(store: RemoteStore) -> None:
    deadline = time.monotonic() + 30
    while not store.is_connected:
        assert time.monotonic() < deadline
        time.sleep(0.02)
