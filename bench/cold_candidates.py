"""Three ways to keep payloads on flash, behind one face: what `bench.cold` compares.

One file a block is the product's own cold tier; the others are as small as they can be without being slow or unsafe.
All write a record's frames with their xxh3 and check it when they read, whole records in reads as long as may be or
each frame in one contiguous read, and are durable as of `commit`. Which record goes when there is no room is for the
caller to say.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import lmdb
import msgspec
import numpy as np
import xxhash

from kvstore.directory import DataDirectory
from kvstore.flash import flash_file, record
from kvstore.flash.cold import ColdTier
from kvstore.flash.cold_index import Row
from kvstore.flash.flash_file import PAGE, FlashReader

Frames = Sequence[memoryview]

_TOKENS = 128
_MIB = 1 << 20


class DamagedError(Exception):
    """A frame that is not what was written."""


class Candidate(Protocol):
    """Records under `folder`, at most `budget` bytes of disk. `read` may be called by several threads."""

    def __init__(self, folder: Path, budget: int) -> None: ...

    def keys(self) -> list[bytes]:
        """What is held, oldest first as far as that is known."""
        ...

    def fits(self, nbytes: int) -> bool:
        """Whether a record of `nbytes` can be put without deleting another."""
        ...

    def put(self, key: bytes, frames: Frames) -> None: ...

    def delete(self, key: bytes) -> None: ...

    def commit(self) -> None:
        """Make all that was put durable."""
        ...

    def read(self, key: bytes) -> int:
        """Read and check a whole record; bytes read. Raises DamagedError."""
        ...

    def read_frames(self, key: bytes, timed: Callable[[], object]) -> int:
        """The same frame by frame, calling `timed` after each."""
        ...

    def close(self) -> None: ...


# -- one file a block --------------------------------------------------------------------------------------


class FilePerBlock:
    """The product: `kvstore.flash.cold`, its records and its index."""

    def __init__(self, folder: Path, budget: int) -> None:
        self._directory = DataDirectory(folder, _TOKENS)
        self._tier = ColdTier(self._directory, budget, _TOKENS)
        self._rows = dict(self._tier.rows)
        self._reserved = 0

    def keys(self) -> list[bytes]:
        return [row.key for row in sorted(self._rows.values(), key=lambda row: row.last_use)]

    def fits(self, nbytes: int) -> bool:
        if self._reserved:
            self._tier.release(self._reserved)
        self._reserved = self._tier.reserve(nbytes + 2 * PAGE) or 0
        return self._reserved > 0

    def put(self, key: bytes, frames: Frames) -> None:
        table, offset = [], 0
        for frame in frames:
            table.append(
                record.Frame(
                    offset=offset,
                    layers=(0, 1),
                    form="",  # nothing is decoded here
                    lengths=(len(frame),),
                    raw_length=len(frame),
                    checksum=xxhash.xxh3_64_intdigest(frame),
                )
            )
            offset += len(frame)
        header = record.Header(
            identity=_OWNER,
            key=key,
            parent_key=_OWNER,
            start=0,
            tokens=bytes(4 * _TOKENS),
            exact=True,
            frames=tuple(table),
        )
        size = self._tier.write(key, record.assemble(header, frames), self._reserved)
        self._tier.release(self._reserved - size)
        self._reserved = 0
        self._rows[key] = Row(
            key=key,
            identity=_OWNER,
            parent_key=_OWNER,
            start=0,
            tokens=header.tokens,
            exact=True,
            file_bytes=size,
            last_use=time.time(),
            hits=0,
        )

    def delete(self, key: bytes) -> None:
        self._tier.remove(key, self._rows.pop(key).file_bytes)

    def commit(self) -> None:
        self._tier.sync()
        self._tier.measure_overhead()
        if self._tier.index_is_due:
            self._tier.write_index(self._rows.values())

    def read(self, key: bytes) -> int:
        with self._reader(key) as reader:
            reader.check_frames()
            return sum(frame.length for frame in reader.header.frames)

    def read_frames(self, key: bytes, timed: Callable[[], object]) -> int:
        with self._reader(key) as reader:
            for number in range(len(reader.header.frames)):
                reader.check_frame(number)
                timed()
            return sum(frame.length for frame in reader.header.frames)

    @contextlib.contextmanager
    def _reader(self, key: bytes) -> Iterator[record.RecordReader]:
        try:
            with contextlib.closing(self._tier.reader(key)) as reader:
                yield reader
        except record.BadRecordError as error:
            raise DamagedError(str(error)) from error

    def close(self) -> None:
        if self._reserved:
            self._tier.release(self._reserved)
        self._tier.close(self._rows.values())
        self._directory.close()


_OWNER = bytes(32)


# -- values in LMDB ----------------------------------------------------------------------------------------


class LmdbValues:
    """Each frame a value, checksum first; a transaction a commit. The file grows as far as LMDB finds it needs to."""

    _SHARE = 0.85  # of the budget that may be live: pages freed are not free at once

    def __init__(self, folder: Path, budget: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._budget = budget
        self._environment = lmdb.open(
            str(folder / "values"),
            subdir=False,
            map_size=2 * budget // PAGE * PAGE,
            lock=False,
            metasync=True,
            max_dbs=1,
        )
        self._rows = self._environment.open_db(b"lengths")  # apart, since walking over values reads them
        self._held: dict[bytes, list[int]] = {}
        with self._environment.begin(db=self._rows) as transaction:
            for key, lengths in transaction.cursor():
                self._held[bytes(key)] = msgspec.msgpack.decode(lengths, type=list[int])
        self._live = sum(map(sum, self._held.values()))
        self._pending: lmdb.Transaction | None = None

    def keys(self) -> list[bytes]:
        return list(self._held)

    def fits(self, nbytes: int) -> bool:
        return self._live + nbytes <= self._SHARE * self._budget

    def put(self, key: bytes, frames: Frames) -> None:
        transaction = self._begun()
        for number, frame in enumerate(frames):
            checksum = xxhash.xxh3_64_digest(frame)
            transaction.put(key + bytes([number]), b"".join((checksum, frame)))
        self._held[key] = [len(frame) for frame in frames]
        transaction.put(key, msgspec.msgpack.encode(self._held[key]), db=self._rows)
        self._live += sum(self._held[key])

    def delete(self, key: bytes) -> None:
        lengths = self._held.pop(key)
        self._live -= sum(lengths)
        self._begun().delete(key, db=self._rows)
        for number in range(len(lengths)):
            self._begun().delete(key + bytes([number]))

    def commit(self) -> None:
        if self._pending is not None:
            self._pending.commit()
            self._pending = None

    def read(self, key: bytes) -> int:
        return self.read_frames(key, lambda: None)

    def read_frames(self, key: bytes, timed: Callable[[], object]) -> int:
        with self._environment.begin(buffers=True) as transaction:
            for number in range(len(self._held[key])):
                value = transaction.get(key + bytes([number]))
                if value is None or xxhash.xxh3_64_digest(value[8:]) != value[:8]:
                    raise DamagedError(f"{key.hex()} {number}")
                timed()
        return sum(self._held[key])

    def close(self) -> None:
        self.commit()
        self._environment.close()

    def _begun(self) -> lmdb.Transaction:
        if self._pending is None:
            self._pending = self._environment.begin(write=True)
        return self._pending


# -- append-only segments ----------------------------------------------------------------------------------


class _Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a record lies: segment number, offset, bytes taken, and its frames' lengths and checksums."""

    segment: int
    offset: int
    taken: int
    lengths: tuple[int, ...]
    checksums: tuple[int, ...]


class _Segments:
    """Append-only files as large as the largest record, and rows in LMDB, written once the payload is on the medium."""

    _SEGMENT = 16 * _MIB
    _share: float  # of the budget that may be live

    def __init__(self, folder: Path, budget: int) -> None:
        self._folder = folder
        self._budget = budget - 4 * _MIB  # the index
        folder.mkdir(parents=True, exist_ok=True)
        self._environment = lmdb.open(str(folder / "index"), subdir=False, map_size=64 * _MIB, lock=False)
        with self._environment.begin() as transaction:
            self._places = {
                bytes(key): msgspec.msgpack.decode(value, type=_Place) for key, value in transaction.cursor()
            }
        self._live: dict[int, int] = {}  # segment -> bytes
        for place in self._places.values():
            self._live[place.segment] = self._live.get(place.segment, 0) + place.taken
        self._readers: dict[int, FlashReader] = {}
        for path in folder.glob("segment-*"):
            number = int(path.name.rpartition("-")[2])
            if number in self._live:
                self._readers[number] = FlashReader(path)
            else:
                path.unlink()
        self._changed: dict[bytes, _Place | None] = {}
        self._dead: list[int] = []  # segments that go with the next commit
        self._number = max(self._live, default=0)
        self._fd = -1
        self._position = self._SEGMENT

    def keys(self) -> list[bytes]:
        return sorted(self._places, key=lambda key: (self._places[key].segment, self._places[key].offset))

    def fits(self, nbytes: int) -> bool:
        return sum(self._live.values()) + flash_file.round_up(nbytes) <= self._share * self._budget

    def put(self, key: bytes, frames: Frames) -> None:
        taken = flash_file.round_up(sum(len(frame) for frame in frames))
        if self._position + taken > self._SEGMENT:
            self._begin_segment()
            self._make_room()
        padding = bytes(taken - sum(len(frame) for frame in frames))
        flash_file.append(self._fd, [*frames, padding])
        self._note(
            key,
            _Place(
                self._number,
                self._position,
                taken,
                tuple(len(frame) for frame in frames),
                tuple(xxhash.xxh3_64_intdigest(frame) for frame in frames),
            ),
        )
        self._position += taken

    def delete(self, key: bytes) -> None:
        place = self._places.pop(key)
        self._changed[key] = None
        self._live[place.segment] -= place.taken
        self._freed(place)

    def commit(self) -> None:
        if self._fd >= 0:
            os.fsync(self._fd)
        with self._environment.begin(write=True) as transaction:
            for key, place in self._changed.items():
                if place is None:
                    transaction.delete(key)
                else:
                    transaction.put(key, msgspec.msgpack.encode(place))
        self._changed.clear()
        self._committed()
        for number in self._dead:
            self._readers.pop(number).close()
            self._path(number).unlink()
        self._dead.clear()

    def read(self, key: bytes) -> int:
        place = self._places[key]
        chunks = self._readers[place.segment].chunks(place.offset, sum(place.lengths))
        try:
            record.check(chunks, list(zip(place.lengths, place.checksums, strict=True)))
        except record.BadRecordError as error:
            raise DamagedError(str(error)) from error
        return sum(place.lengths)

    def read_frames(self, key: bytes, timed: Callable[[], object]) -> int:
        place = self._places[key]
        at = place.offset
        for length, checksum in zip(place.lengths, place.checksums, strict=True):
            try:
                record.check(self._readers[place.segment].chunks(at, length), [(length, checksum)])
            except record.BadRecordError as error:
                raise DamagedError(str(error)) from error
            at += length
            timed()
        return sum(place.lengths)

    def close(self) -> None:
        self.commit()
        for reader in self._readers.values():
            reader.close()
        if self._fd >= 0:
            os.close(self._fd)
        self._environment.close()

    def _note(self, key: bytes, place: _Place) -> None:
        self._places[key] = self._changed[key] = place
        self._live[place.segment] = self._live.get(place.segment, 0) + place.taken

    def _begin_segment(self) -> None:
        if self._fd >= 0:
            os.fsync(self._fd)
            os.close(self._fd)
        self._number += 1
        self._live[self._number] = 0
        self._fd, _ = flash_file.open_file(self._path(self._number), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._readers[self._number] = FlashReader(self._path(self._number))
        self._position = 0

    def _path(self, number: int) -> Path:
        return self._folder / f"segment-{number}"

    def _freed(self, place: _Place) -> None: ...

    def _committed(self) -> None: ...

    def _make_room(self) -> None: ...

    def _drop_segment(self, number: int) -> None:
        del self._live[number]
        self._dead.append(number)


class CopiedSegments(_Segments):
    """Room is made by copying what is live out of the segment that holds least of it."""

    _share = 0.7  # ends of segments, into which no record fits, and one to copy into take the rest

    def _make_room(self) -> None:
        """Have room for one segment more, into which the next can be copied."""
        while (len(self._live) + 1) * self._SEGMENT > self._budget:
            emptiest = min((number for number in self._live if number != self._number), key=self._live.get)  # type: ignore[arg-type]
            for key in [key for key, place in self._places.items() if place.segment == emptiest]:
                self._copy(key)
            self._drop_segment(emptiest)
            self.commit()

    def _copy(self, key: bytes) -> None:
        place = self._places[key]
        if self._position + place.taken > self._SEGMENT:
            self._begin_segment()
        data = np.empty(place.taken, np.uint8)
        self._readers[place.segment].read([data], place.offset)
        flash_file.append(self._fd, [data.data])
        self._note(key, msgspec.structs.replace(place, segment=self._number, offset=self._position))
        self._position += place.taken


class PunchedSegments(_Segments):
    """Room is made by holes: the file system takes back what a deleted record took, once no row names it."""

    _share = 0.93  # what was deleted since the last commit is still there

    def __init__(self, folder: Path, budget: int) -> None:
        super().__init__(folder, budget)
        self._holes: list[_Place] = []

    def _freed(self, place: _Place) -> None:
        self._holes.append(place)

    def _committed(self) -> None:
        for place in self._holes:
            if place.segment in self._live:
                fd = os.open(self._path(place.segment), os.O_WRONLY)
                try:
                    _punch(fd, place.offset, place.taken)
                finally:
                    os.close(fd)
                if not self._live[place.segment] and place.segment != self._number:
                    self._drop_segment(place.segment)
        self._holes.clear()


_KEEP_SIZE_PUNCH_HOLE = 0x01 | 0x02


def _punch(fd: int, offset: int, length: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, _KEEP_SIZE_PUNCH_HOLE, ctypes.c_long(offset), ctypes.c_long(length)):
        raise OSError(ctypes.get_errno(), "fallocate: no holes here")


CANDIDATES: dict[str, type[Candidate]] = {
    "one file a block": FilePerBlock,
    "values in LMDB": LmdbValues,
    "segments, copied": CopiedSegments,
    "segments, holes": PunchedSegments,
}


def disk_bytes(folder: Path) -> int:
    """What a folder takes on disk, files and folders in it included."""
    total = 0
    for path in (folder, *folder.rglob("*")):
        with contextlib.suppress(FileNotFoundError):
            total += path.lstat().st_blocks * 512
    return total


def drop_page_cache(folder: Path) -> None:
    """Make the next read of each file below `folder` come from the medium. None may be mapped."""
    for path in folder.rglob("*"):
        if path.is_file():
            flash_file.sync(path)
