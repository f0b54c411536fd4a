"""A full disk costs reuse after the next restart, and nothing else: puts go on, reasons are counted, space is used
again as soon as there is some."""

from __future__ import annotations

import errno
import resource
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvstore.errors import DirectoryUnusableError
from kvstore.store import KVStore, open_store
from tests.known_kv import identity, load, prompt, put, small_profile

from .child import Child
from .small_disk import SmallDisk, small_disk

FULL = "disk full or not writable"


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 2 << 20) as mounted:
        if mounted is None:
            pytest.skip("needs the right to mount a tmpfs")
        yield mounted


def opened(disk: SmallDisk) -> KVStore:
    return open_store(disk.path / "kv", identity=identity(), profile=small_profile())


def from_flash(store: KVStore, which: int) -> int:
    """Tokens of a prompt that come from flash alone."""
    store.demote(store.lookup(prompt(which, 60)))
    with store.lease(store.lookup(prompt(which, 60))) as lease:
        held = lease.tokens_by_tier()["cold"]
    assert load(store, prompt(which, 60)) >= held
    return held


def test_puts_go_on_and_writes_resume(disk: SmallDisk) -> None:
    """A write that failed and left its row, or stopped the writer for good."""
    with opened(disk) as store:
        put(store, prompt(0, 60))
        store.flush()
        disk.fill(leave=16 * 1024)
        for which in range(1, 30):
            assert put(store, prompt(which, 60), wait=10).refused == 0
            store.flush()
            assert load(store, prompt(which, 60)) == 60
        assert store.stats().refusals[FULL] > 50
        assert from_flash(store, 0) == 60
        assert from_flash(store, 29) == 0
        store.check()
        disk.relieve()
        put(store, prompt(50, 60), wait=10)
        store.flush()
        assert from_flash(store, 50) == 60
        store.check()
    assert not list((disk.path / "kv" / "blocks").glob("*.tmp"))
    with opened(disk) as store:
        assert load(store, prompt(0, 60)) == 60
        assert load(store, prompt(50, 60)) == 60
        assert load(store, prompt(29, 60)) == 60, "memory held it still when there was room again"
        assert store.stats().bad_records == {}


def test_closing_and_opening_on_a_full_disk(disk: SmallDisk) -> None:
    with opened(disk) as store:
        for which in range(5):
            put(store, prompt(which, 60))
        store.flush()
        disk.fill()
    for _ in range(2):
        with opened(disk) as store:
            assert [load(store, prompt(which, 60)) for which in range(5)] == [60] * 5
            put(store, prompt(9, 60))
            assert load(store, prompt(9, 60)) == 60
            assert load(store.view(identity("b")), prompt(9, 60)) == 0
            store.check()
    disk.relieve()
    with opened(disk) as store:
        assert [load(store, prompt(which, 60)) for which in range(5)] == [60] * 5
        assert load(store, prompt(9, 60)) == 0


def test_no_room_for_a_new_directory(disk: SmallDisk) -> None:
    disk.fill()
    with pytest.raises(DirectoryUnusableError, match="No space left"):
        opened(disk)
    disk.relieve()
    with opened(disk) as store:
        put(store, prompt(1, 60))
        assert load(store, prompt(1, 60)) == 60


def test_a_disk_that_becomes_read_only(disk: SmallDisk) -> None:
    with opened(disk) as store:
        put(store, prompt(0, 60))
        store.flush()
        with disk.read_only(disk.path / "kv" / "blocks"):
            put(store, prompt(1, 60), wait=10)
            store.flush()
            assert store.stats().refusals == {FULL: 4}
            assert load(store, prompt(1, 60)) == 60
            assert from_flash(store, 0) == 60
        put(store, prompt(2, 60))
        store.flush()
        assert from_flash(store, 2) == 60
        store.check()
    with opened(disk) as store:
        assert (load(store, prompt(0, 60)), load(store, prompt(1, 60))) == (60, 60), "tried again"
    with disk.read_only(disk.path / "kv"), pytest.raises(DirectoryUnusableError, match="Read-only"):
        opened(disk)
    with opened(disk) as store:
        assert load(store, prompt(0, 60)) == 60


def test_a_limit_on_file_sizes(tmp_path: Path) -> None:
    """Where nothing can be mounted: writes that the system cuts off in the middle of a record."""
    child = Child(_write_little, str(tmp_path / "kv"))
    assert child.receive() == ""
    child.join()
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        assert load(store, prompt(0, 60)) == 60
        assert load(store, prompt(1, 60)) == 60, "tried again, when there was no limit any more"
        assert load(store, prompt(2, 60)) == 60
        assert store.stats().bad_records == {}


def _write_little(connection: Connection, directory: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with open_store(directory, identity=identity(), profile=small_profile()) as store:
            put(store, prompt(0, 60))
            store.flush()
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
            put(store, prompt(1, 60))
            store.flush()
            assert store.stats().refusals == {FULL: 4}, store.stats().refusals
            assert load(store, prompt(1, 60)) == 60
            store.check()
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
            put(store, prompt(2, 60))
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
    else:
        connection.send("")


def test_flush_says_when_the_medium_does_not_take_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync that fails is the one error a caller has to hear of: what was put is not durable."""
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        put(store, prompt(0, 60))

        def fail(_: int) -> None:
            raise OSError(errno.EIO, "medium error")

        with monkeypatch.context() as patched:
            patched.setattr("os.fsync", fail)
            for _ in range(2):
                with pytest.raises(OSError, match="medium error"):
                    store.flush()
        store.flush()
        assert load(store, prompt(0, 60)) == 60
