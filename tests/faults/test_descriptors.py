"""File descriptors: none is leaked, and a process that has none left loses no KV by it."""

from __future__ import annotations

import os
import resource
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvstore.errors import KVStoreError
from kvstore.store import open_store
from tests.known_kv import empty, identity, load, prompt, put, small_profile

from .child import Child

TOKENS = prompt(1, 60)


def test_no_descriptor_is_leaked(tmp_path: Path) -> None:
    def use() -> int:
        with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
            put(store, TOKENS)
            store.flush()
            store.demote(store.lookup(TOKENS))
            with store.lease(store.lookup(TOKENS)) as lease:
                next(lease.layer_groups(empty(60)))  # broken off
            store.demote(store.lookup(TOKENS))
            record = tmp_path / "kv" / "blocks" / store.lookup(TOKENS).blocks[1].key[:16].hex()
            record.write_bytes(record.read_bytes()[:-1])
            assert load(store, TOKENS) == 16
        (tmp_path / "kv" / "FORMAT").rename(tmp_path / "FORMAT")
        with pytest.raises(KVStoreError):
            open_store(tmp_path / "kv", identity=identity(), profile=small_profile())
        (tmp_path / "FORMAT").rename(tmp_path / "kv" / "FORMAT")
        return len(os.listdir("/proc/self/fd"))

    before = use()
    assert [use() for _ in range(5)] == [before] * 5


def test_a_process_without_descriptors(tmp_path: Path) -> None:
    """Good records set aside as damaged, since they could not be opened just then."""
    child = Child(_run_out, str(tmp_path / "kv"))
    assert child.receive() == ""
    child.join()
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        assert load(store, TOKENS) == 60


def _run_out(connection: Connection, directory: str) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with open_store(directory, identity=identity(), profile=small_profile()) as store:
            put(store, TOKENS)
            store.flush()
            store.demote(store.lookup(TOKENS))
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
            assert load(store, TOKENS) == 0
            put(store, prompt(2, 60), wait=10)
            assert load(store, prompt(2, 60)) == 60
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            assert store.stats().misses == {"too many open files or too little memory": 1}
            assert load(store, TOKENS) == 60
            store.check()
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
    else:
        connection.send("")
