"""Who may use a data directory: one process, of this format, where it can be written. A refusal changes nothing."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kvstore.errors import DirectoryInUseError, DirectoryUnusableError, FormatMismatchError, KVStoreError
from kvstore.store import KVStore, open_store
from tests.known_kv import identity, load, prompt, put, small_profile

from .child import Child

TOKENS = prompt(1, 60)


def opened(path: Path, block_tokens: int = 16) -> KVStore:
    return open_store(path, identity=identity(), profile=small_profile(block_tokens=block_tokens))


def contents(path: Path) -> dict[str, tuple[str, int]]:
    """Digest and time of change of every file."""
    return {
        str(file.relative_to(path)): (
            hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "",
            file.stat().st_mtime_ns,
        )
        for file in sorted(path.rglob("*"))
    }


def _open(connection: Connection, path: str, user: int) -> None:
    """Open in this process; the type and text of what is raised."""
    if user:
        os.setuid(user)
    try:
        with opened(Path(path)) as store:
            connection.send(("", str(load(store, TOKENS))))
    except KVStoreError as error:
        connection.send((type(error).__name__, str(error)))


def _hold(connection: Connection, path: str) -> None:
    with opened(Path(path)) as store:
        put(store, TOKENS)
        store.flush()
        connection.send(os.getpid())
        connection.recv()


def test_a_second_process_is_refused_and_the_first_unharmed(tmp_path: Path) -> None:
    """Two writers that shared a path and cut off each other's files."""
    with opened(tmp_path / "kv") as store:
        put(store, TOKENS)
        store.flush()
        before = contents(tmp_path / "kv")
        child = Child(_open, str(tmp_path / "kv"), 0)
        kind, text = child.receive()
        child.join()
        assert kind == "DirectoryInUseError"
        assert re.search(rf"\b{os.getpid()}\b", text)
        assert contents(tmp_path / "kv") == before
        put(store, prompt(2, 60))
        store.flush()
        assert (load(store, TOKENS), load(store, prompt(2, 60))) == (60, 60)
    child = Child(_open, str(tmp_path / "kv"), 0)
    assert child.receive() == ("", "60")
    child.join()


def test_the_same_process_is_refused_as_well(tmp_path: Path) -> None:
    with opened(tmp_path / "kv"), pytest.raises(DirectoryInUseError, match=str(os.getpid())):
        opened(tmp_path / "kv")
    opened(tmp_path / "kv").close()


def test_a_killed_owner_owns_nothing(tmp_path: Path) -> None:
    """Locks that outlived their process."""
    child = Child(_hold, str(tmp_path / "kv"))
    owner = child.receive()
    with pytest.raises(DirectoryInUseError, match=str(owner)):
        opened(tmp_path / "kv")
    child.kill()
    with opened(tmp_path / "kv") as store:
        assert load(store, TOKENS) == 60


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format":2,"block_tokens":16}', "has format 2, this build reads 1"),
        ('{"format":1,"block_tokens":32}', "blocks of 32 tokens, the profile asks for 16"),
        ('{"format":1}', "damaged"),
        ("", "damaged"),
        ("\x00\xff", "damaged"),
        ('{"format":"1","block_tokens":16}', "damaged"),
    ],
)
def test_another_format_is_left_untouched(tmp_path: Path, text: str, message: str) -> None:
    with opened(tmp_path / "kv") as store:
        put(store, TOKENS)
    note = tmp_path / "kv" / "FORMAT"
    right = note.read_bytes()
    note.write_bytes(text.encode("latin-1"))
    before = contents(tmp_path / "kv")
    with pytest.raises(FormatMismatchError, match=message):
        opened(tmp_path / "kv")
    assert contents(tmp_path / "kv") == before
    note.write_bytes(right)
    with opened(tmp_path / "kv") as store:
        assert load(store, TOKENS) == 60


def test_another_block_size_is_left_untouched(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as store:
        put(store, TOKENS)
    before = contents(tmp_path / "kv")
    with pytest.raises(FormatMismatchError, match="block_tokens=16"):
        opened(tmp_path / "kv", block_tokens=32)
    assert contents(tmp_path / "kv") == before


def test_a_directory_of_something_else_is_left_untouched(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.jpg").write_bytes(b"precious")
    before = contents(tmp_path)
    with pytest.raises(DirectoryUnusableError, match=r"one\.jpg"):
        opened(tmp_path / "photos")
    with pytest.raises(DirectoryUnusableError, match="not a directory"):
        opened(tmp_path / "photos" / "one.jpg")
    with pytest.raises(DirectoryUnusableError, match=r"one\.jpg"):
        opened(tmp_path / "photos" / "one.jpg" / "kv")
    assert contents(tmp_path) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without rights")
def test_a_directory_that_this_user_cannot_write(tmp_path: Path) -> None:
    with opened(tmp_path / "kv") as store:
        put(store, TOKENS)
    before = contents(tmp_path / "kv")
    for path in (tmp_path / "kv", tmp_path / "new"):
        child = Child(_open, str(path), 65534)
        kind, text = child.receive()
        child.join()
        assert kind == "DirectoryUnusableError"
        assert "directory that this user can write" in text
    assert contents(tmp_path / "kv") == before


@pytest.mark.parametrize("left", [["LOCK"], ["LOCK", "FORMAT.tmp"], []])
def test_a_first_opening_that_was_cut_off(tmp_path: Path, left: list[str]) -> None:
    """A directory that a kill during its creation made unusable for good."""
    (tmp_path / "kv").mkdir()
    for name in left:
        (tmp_path / "kv" / name).write_bytes(b"1")
    with opened(tmp_path / "kv") as store:
        put(store, TOKENS)
    with opened(tmp_path / "kv") as store:
        assert load(store, TOKENS) == 60


def test_folders_that_vanish_under_an_open_store(tmp_path: Path) -> None:
    """Someone clears the cache directory by hand: everything is a miss, nothing fails."""
    with opened(tmp_path / "kv") as store:
        put(store, TOKENS)
        store.flush()
        store.demote(store.lookup(TOKENS))
        shutil.rmtree(tmp_path / "kv")
        assert load(store, TOKENS) == 0
        misses = store.stats().misses  # a second thread may have been reading the next block
        assert set(misses) == {"bad record: missing"}
        assert misses["bad record: missing"] in (1, 2)
        put(store, prompt(2, 60))
        assert load(store, prompt(2, 60)) == 60
        with pytest.raises(OSError, match="No such file"):
            store.flush()
        assert store.stats().refusals["disk full or not writable"] == 4
        store.check()
