"""The cold tier's index in LMDB: one row per record on flash, with what changes (last use, hits).

Rows only speed opening up: a record says by itself what it is, and one without a row is adopted from its header.

LMDB pages carry no checksum, and damage ends the process that has the file mapped: of an index that was held open,
each truncation and a third of all zeroed pages did. So no index is ever changed in place or kept mapped. It is
written whole to a file that takes its name when it is complete, and the name is the digest of the content: a file
is mapped only after it was found to be what its name says, and else it is not used. That also makes a kill
harmless at any point, and needs no fsync.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import lmdb
import msgspec
import xxhash

_SUFFIX = ".mdb"
_SCRATCH = "new.tmp"

Opened = Literal["new", "sealed", "rebuilt"]
"""How the rows were got: there was no index, it was whole, or it was damaged and records speak for themselves."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One record on flash. `tokens` int32 little-endian; `file_bytes` as allocated; `last_use` unix seconds."""

    key: bytes
    identity: bytes
    parent_key: bytes
    start: int
    tokens: bytes
    exact: bool
    file_bytes: int
    last_use: float
    hits: int


def row_bytes(block_tokens: int) -> int:
    """The most that one row takes on disk, the copy that exists while the index is written anew included."""
    return 4 * (4 * block_tokens + 256)


class ColdIndex:
    """Reads the rows on opening (`opened`, `rows`), writes them anew with `write`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)
        self.opened, self.rows = read(directory)

    def write(self, rows: Iterable[Row]) -> int:
        """Replace the index; the bytes it takes. Raises OSError (disk full); the old one stays then."""
        pairs = sorted((row.key, msgspec.msgpack.encode(row)) for row in rows)
        scratch = self._directory / _SCRATCH
        try:
            scratch.unlink(missing_ok=True)
            _write(scratch, pairs)
            target = self._directory / (_digest(scratch) + _SUFFIX)
            scratch.rename(target)
        except (lmdb.Error, OSError) as error:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise OSError(f"index not written: {error}") from error
        for path in self._directory.iterdir():
            if path != target:
                path.unlink(missing_ok=True)
        return target.stat().st_size

    def remove(self) -> None:
        """Leave no index. Raises OSError."""
        for path in self._directory.iterdir():
            path.unlink(missing_ok=True)


def read(directory: Path) -> tuple[Opened, dict[bytes, Row]]:
    """Rows of the newest whole index; older ones are there only after a kill between two steps of `write`."""
    files = index_files(directory)
    for path in files:
        with contextlib.suppress(OSError):  # unreadable is damaged
            if is_sealed(path):
                return "sealed", {row.key: row for _, row in pairs(path)}
    return ("rebuilt" if files else "new"), {}


def index_files(directory: Path) -> list[Path]:
    """Files that claim to be an index, the newest first. Raises OSError."""
    files = [path for path in directory.iterdir() if path.name != _SCRATCH]
    return sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def is_sealed(path: Path) -> bool:
    """Whether a file is what its name says, so that it may be mapped. Raises OSError."""
    return path.name == _digest(path) + _SUFFIX


def pairs(path: Path) -> list[tuple[bytes, Row]]:
    """Keys and rows of a file that `is_sealed`."""
    with (
        lmdb.open(str(path), subdir=False, lock=False, max_dbs=0, readonly=True) as environment,
        environment.begin() as transaction,
    ):
        return [(bytes(key), msgspec.msgpack.decode(row, type=Row)) for key, row in transaction.cursor()]


def _write(path: Path, pairs: list[tuple[bytes, bytes]]) -> None:
    size = sum(len(key) + len(value) for key, value in pairs)
    room = 4 * size // 4096 * 4096 + (1 << 20)  # address space, not disk: pages are filled to a half at least
    with (
        lmdb.open(str(path), subdir=False, lock=False, max_dbs=0, map_size=room, sync=False) as environment,
        environment.begin(write=True) as transaction,
    ):
        for key, value in pairs:
            transaction.put(key, value, append=True)


def _digest(path: Path) -> str:
    """Of the whole content; small against the records, so reading it all is cheap."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()
