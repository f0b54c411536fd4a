"""kill -9 anywhere: what is left is whole or absent, and what a flush confirmed is there. `bench.faults` runs 200."""

from __future__ import annotations

import os
import resource
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvstore.profile import Profile
from kvstore.store import open_store
from tests.known_kv import identity, load, prompt, put, small_profile

from .child import Child
from .killing import ROOMY, TIGHT, kill_runs


@pytest.mark.parametrize("profile", [ROOMY, TIGHT], ids=["nothing evicted", "demotions and evictions"])
def test_kill_at_random_moments(tmp_path: Path, profile: Profile) -> None:
    """Index rows of failed writes; restarts that found less than was promised."""
    killed = kill_runs(tmp_path / "kv", runs=10, seed=1, profile=profile)
    assert killed.failures == []
    assert killed.runs == 10
    assert killed.tokens > 0, "something survived, so something was verified"
    if profile == ROOMY:
        assert killed.durable > 0


def test_what_was_durable_stays_until_what_replaces_it_is(tmp_path: Path) -> None:
    """A record deleted in favour of a longer one that was never written."""
    child = Child(_replace_and_die, str(tmp_path / "kv"))
    assert child.receive() == ""
    child.join()
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        assert load(store, prompt(1, 30)) == 20
        store.check()


def _replace_and_die(connection: Connection, directory: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    profile = small_profile(hot_bytes=0, warm_bytes=6 * 4096)
    store = open_store(directory, identity=identity(), profile=profile)
    try:
        put(store, prompt(1, 20))
        store.flush()
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # nothing more gets to flash
        for length in (25, 30):
            assert put(store, prompt(1, length)).stored == 5
            store.flush()
            assert load(store, prompt(1, 30)) == length
        for other in range(2, 6):
            assert put(store, prompt(other, 60)).refused == 0  # and out of memory goes what replaced it
            store.flush()
        assert load(store, prompt(1, 30)) == 20
        assert put(store, prompt(1, 30)).stored == 10
        assert load(store, prompt(1, 30)) == 30
        store.check()
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
    else:
        connection.send("")
    connection.close()
    os._exit(1)
