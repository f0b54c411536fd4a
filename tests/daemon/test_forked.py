"""A client forks: the child goes on with a connection of its own, whatever the parent's threads were just doing."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvstore.daemon.remote_store import RemoteStore, connect
from tests.faults.child import Child
from tests.known_kv import identity, load, prompt, put, small_profile

from .running import Daemon, daemon

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="fork is Unix's")

PROMPT = prompt(1, 64)
CHILDREN = 30


@pytest.fixture(params=[True, False], ids=["shared hot", "own hot"])
def running(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Daemon]:
    with daemon(tmp_path / "kv", small_profile(block_tokens=16, shares_hot=request.param)) as started:
        yield started


def client(path: str) -> RemoteStore:
    return connect(path, identity=identity(), fallback="none")


def _in_child(store: RemoteStore) -> int:
    """How many tokens a forked child loads right, or 255 when that fails."""
    pid = os.fork()
    if pid == 0:
        found = 255
        try:
            found = load(store, PROMPT)
            store.close()
        finally:
            os._exit(found)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork_while_others_work(connection: Connection, path: str) -> None:
    with client(path) as store:
        stop = threading.Event()

        def work() -> None:
            while not stop.is_set():
                load(store, PROMPT)

        others = [threading.Thread(target=work) for _ in range(3)]
        for other in others:
            other.start()
        connection.send([_in_child(store) for _ in range(CHILDREN)])
        stop.set()
        for other in others:
            other.join()
        connection.send(load(store, PROMPT))


def test_a_child_waits_for_no_lock_that_a_thread_of_the_parent_held(running: Daemon) -> None:
    with client(str(running.socket)) as store:
        put(store, PROMPT)
    child = Child(_fork_while_others_work, str(running.socket))
    assert child.receive(120) == [len(PROMPT)] * CHILDREN
    assert child.receive() == len(PROMPT)


def _fork_after_a_load_from_flash(connection: Connection, path: str) -> None:
    with client(path) as store:
        load(store, PROMPT)  # its threads live from here on
        store.demote(store.lookup(PROMPT))
        connection.send(_in_child(store))


def test_a_child_loads_from_flash_with_threads_of_its_own(running: Daemon) -> None:
    """Work given to the parent's was never done."""
    with client(str(running.socket)) as store:
        put(store, PROMPT)
        store.flush(60)
        store.demote(store.lookup(PROMPT))
    child = Child(_fork_after_a_load_from_flash, str(running.socket))
    assert child.receive() == len(PROMPT)
