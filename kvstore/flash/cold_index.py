"""The cold tier's index in LMDB: one row per record on flash, with what changes (last use, hits).

Rows only speed opening up: a record says by itself what it is, and one without a row is adopted from its header.

LMDB pages carry no checksum, and damage ends the process that has the file mapped: of an index that was held open,
each truncation and a third of all zeroed pages did. So no index is ever changed in place or kept mapped. It is
written whole to a file that takes its name when it is complete, and the name is the digest of the content: a file
is mapped only after it was found to be what its name says, and else it is not used. That also makes a kill
harmless at any point, and needs no fsync.

Under a key rows are encrypted, and lie in a file of that key: indexes of several keys do not know of one another.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import lmdb
import msgspec
import xxhash

from .encryption import AlteredError, Cipher, OtherKeyError

_SUFFIX = ".mdb"
_SCRATCH = "new.tmp"
_KIND = re.compile("([.][0-9a-f]{16})?[.]mdb$")
_CLEAR = b"\0"  # under a key, the first row: what stands in clear

Opened = Literal["new", "sealed", "rebuilt"]
"""How the rows were got: there was no index, it was whole, or it was damaged and records speak for themselves."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One record on flash. `tokens` int32 little-endian; `file_bytes` as allocated; `last_use` unix seconds.

    `head_bytes`: of its file, up to the end of the first frame; 0 where nobody said.
    """

    key: bytes
    identity: bytes
    parent_key: bytes
    start: int
    tokens: bytes
    exact: bool
    file_bytes: int
    last_use: float
    hits: int
    head_bytes: int = 0


def row_bytes(block_tokens: int) -> int:
    """The most that one row takes on disk, the copy that exists while the index is written anew included."""
    return 4 * (4 * block_tokens + 256)


class ColdIndex:
    """Reads the rows on opening (`opened`, `rows`), writes them anew with `write`."""

    def __init__(self, directory: Path, cipher: Cipher | None = None) -> None:
        self._directory = directory
        self._cipher = cipher
        directory.mkdir(exist_ok=True)
        self.opened, self.rows = read(directory, cipher)

    def write(self, rows: Iterable[Row]) -> int:
        """Replace the index; the bytes it takes. Raises OSError (disk full); the old one stays then."""
        pairs = _packed(rows, self._cipher)
        scratch = self._directory / _SCRATCH
        try:
            scratch.unlink(missing_ok=True)
            _write(scratch, pairs)
            target = self._directory / (_digest(scratch) + _suffix(self._cipher))
            scratch.rename(target)
        except (lmdb.Error, OSError) as error:
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise OSError(f"index not written: {error}") from error
        for path in index_files(self._directory, self._cipher):
            if path != target:
                path.unlink(missing_ok=True)
        return target.stat().st_size

    @staticmethod
    def remove_all(directory: Path) -> None:
        """Leave no index, whatever key it is of. Raises OSError."""
        for path in directory.iterdir():
            path.unlink(missing_ok=True)


def read(directory: Path, cipher: Cipher | None = None) -> tuple[Opened, dict[bytes, Row]]:
    """Rows of the newest whole index; older ones are there only after a kill between two steps of `write`."""
    files = index_files(directory, cipher)
    for path in files:
        with contextlib.suppress(OSError, OtherKeyError, AlteredError):  # unreadable is damaged
            if is_sealed(path):
                return "sealed", {row.key: row for _, row in pairs(path, cipher)}
    return ("rebuilt" if files else "new"), {}


def index_files(directory: Path, cipher: Cipher | None = None) -> list[Path]:
    """Files that claim to be an index, the newest first; not those of another key. Raises OSError."""
    foreign = foreign_files(directory, cipher)
    files = [path for path in directory.iterdir() if path.name != _SCRATCH and path not in foreign]
    return sorted(files, key=lambda path: path.stat().st_mtime_ns, reverse=True)


def foreign_files(directory: Path, cipher: Cipher | None) -> list[Path]:
    """Indexes that are not of `cipher`'s key, or not in clear where that is None. Raises OSError."""
    own = _suffix(cipher)
    return [path for path in directory.iterdir() if (found := _KIND.search(path.name)) and found[0] != own]


def is_sealed(path: Path) -> bool:
    """Whether a file is what its name says, so that it may be mapped. Raises OSError."""
    kind = _KIND.search(path.name)
    return kind is not None and path.name == _digest(path) + kind[0]


def pairs(path: Path, cipher: Cipher | None = None) -> list[tuple[bytes, Row]]:
    """Keys and rows of a file that `is_sealed`. Raises OtherKeyError, AlteredError."""
    with (
        lmdb.open(str(path), subdir=False, lock=False, max_dbs=0, readonly=True) as environment,
        environment.begin() as transaction,
    ):
        found = [(bytes(key), bytes(row)) for key, row in transaction.cursor()]
    if cipher is None:
        return [(key, msgspec.msgpack.decode(row, type=Row)) for key, row in found]
    if not found or found[0][0] != _CLEAR:
        raise AlteredError
    sealing = cipher.unsealing(found[0][1])
    opened = []
    for number, (name, sealed) in enumerate(found[1:]):
        row = msgspec.msgpack.decode(sealing.open(number, sealed), type=Row)
        opened.append((row.key if cipher.name(row.key) == name else name, row))
    return opened


def _packed(rows: Iterable[Row], cipher: Cipher | None) -> list[tuple[bytes, bytes]]:
    """What is stored, in order."""
    if cipher is None:
        return sorted((row.key, msgspec.msgpack.encode(row)) for row in rows)
    plain = sorted((cipher.name(row.key), msgspec.msgpack.encode(row)) for row in rows)
    sealing = cipher.sealing()
    sealed = [(name, sealing.seal(number, row)) for number, (name, row) in enumerate(plain)]
    return [(_CLEAR, sealing.clear), *sealed]


def _suffix(cipher: Cipher | None) -> str:
    return _SUFFIX if cipher is None else f".{cipher.id.hex()}{_SUFFIX}"


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
