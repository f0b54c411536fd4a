"""The cold tier: records on flash within a budget of bytes, findable again after any kind of stop.

One file a record: the file system gives its room back at once, so no collector has to copy what is live, as it has
to for append-only segments, and no free list splinters, as that of values in LMDB does. `bench.cold` compares them.

A record is written under a temporary name and renamed, so it is whole or absent. The index follows later, in one
piece: what a kill leaves behind is a temporary file (removed on opening), a record without a row (adopted from its own
header) or a row without its record (dropped). Records are forced to the medium in groups.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from . import flash_file
from .cold_index import ColdIndex, Opened, Row, row_bytes
from .directory import SCRATCH, DataDirectory, record_name
from .record import BadRecordError, ForeignRecordError, Header, RecordReader
from .write_budget import WriteBudget

_GROWTH = 256 * 1024  # what folders may grow by between two looks at them, and an index without rows
_INDEX_LAG = 256  # changes until the index is written anew, which bounds what opening has to adopt
_COMMIT = 32 * 1024 * 1024  # bytes written until records are forced to the medium
_MOST_HEADER = 64 * 1024  # bytes of a header and of what rounding adds
_INDEX_SHARE = 32  # or this part of all records: so the index is written 32 times over its size at most

log = logging.getLogger(__name__)


class ColdTier:
    """Record files under `directory`, at most `budget` bytes of disk in all: records, index, folders, quarantine.

    Records of another key than the directory's take their room until it is needed.
    What a record occupies includes its row of the index. `bytes_per_day` limits what is written, index included.
    `reserve`, `release` and accounting are called under the store's lock; `reader` outside it; `may_write`, `write`,
    `write_index` and `sync` outside it and by one thread.
    """

    def __init__(
        self, directory: DataDirectory, budget: int, block_tokens: int, bytes_per_day: int | None = None
    ) -> None:
        self.total = budget
        self.bytes_written = 0
        self.writes = WriteBudget(directory.writes, bytes_per_day)
        self._directory = directory
        self._page = max(4096, os.statvfs(directory.path).f_frsize)
        self._row_bytes = row_bytes(block_tokens)
        self.cipher = directory.cipher
        """Encrypts records; None: they are not."""
        self._index = ColdIndex(directory.index, directory.cipher)
        self._unsynced: set[Path] = set()
        self._unsynced_bytes = 0
        self._changes = 0  # of records since the index was written
        self._count = 0
        self.bad: Counter[str] = Counter()
        self._foreign: dict[Path, int] = {}
        self.rows = self._reconcile()
        self._records = sum(row.file_bytes for row in self.rows.values())
        self._quarantine = {
            path: _allocated(path) for path in sorted(directory.quarantine.iterdir(), key=_age)
        }
        self._overhead = 0
        self.measure_overhead()

    @property
    def opened(self) -> Opened:
        """How the index was found on opening."""
        return self._index.opened

    @property
    def used(self) -> int:
        """Bytes of disk in use or reserved."""
        useless = sum(self._quarantine.values()) + sum(self._foreign.values())
        return self._records + useless + self._overhead

    @property
    def free(self) -> int:
        return self.total - self.used

    def room(self, nbytes: int) -> int:
        """What a record of `nbytes` may occupy: a page more, since a file system may need one to say where it lies."""
        return self._round_up(nbytes) + self._page + self._row_bytes

    def reserve(self, nbytes: int) -> int | None:
        """Set disk space for a record of `nbytes` aside; the reserved size, or None when there is no room.

        Quarantined records go first, then those of another key: they are of no use to a request.
        """
        size = self.room(nbytes)
        self.drop_useless(size)
        if self.free < size:
            return None
        self._records += size
        return size

    def drop_useless(self, needed: int) -> None:
        """Delete what no request can use, as far as there is less room than `needed`."""
        for useless in (self._quarantine, self._foreign):
            while useless and self.free < needed:
                path = next(iter(useless))
                path.unlink(missing_ok=True)
                del useless[path]

    def release(self, size: int) -> None:
        """Give reserved space back."""
        self._records -= size

    def may_write(self, nbytes: int) -> bool:
        """Whether today's budget has room for a record of `nbytes` of KV, before it is worth encoding."""
        most = nbytes + _MOST_HEADER + self._row_bytes
        taken = self.writes.take(most)
        if taken:
            self.writes.give_back(most)
        return taken

    def write(self, key: bytes, pieces: Sequence[bytes | memoryview], reserved: int) -> int:
        """Write a record into space reserved before; the bytes it now occupies. Raises OSError, leaving nothing."""
        target = self._directory.block_file(key)
        scratch = target.with_suffix(SCRATCH)
        if not self.writes.take(reserved):
            raise OSError("today's write budget is spent")
        try:
            size = self._occupied(flash_file.write(scratch, pieces))
            if size > reserved:
                raise OSError(f"record occupies {size} bytes, {reserved} were reserved")
            scratch.rename(target)
        except OSError:
            self.writes.give_back(reserved - min(reserved, _allocated(scratch)))
            with contextlib.suppress(OSError):
                scratch.unlink(missing_ok=True)
            raise
        written = size - self._row_bytes
        self.writes.give_back(reserved - written)
        self._unsynced.add(target)
        self._unsynced_bytes += written
        self._changes += 1
        self._count += 1
        self.bytes_written += written
        return size

    def remove(self, key: bytes, size: int) -> None:
        """Delete a record and give its space back."""
        self._delete(self._directory.block_file(key), size)

    def set_aside(self, key: bytes, number: int) -> None:
        """Keep the record of a dropped block for the lease that still reads it; gone after any stop."""
        with contextlib.suppress(OSError):
            self._directory.block_file(key).rename(self._directory.aside_file(number))

    def remove_aside(self, number: int, size: int) -> None:
        self._delete(self._directory.aside_file(number), size)

    def quarantine(self, key: bytes, size: int, reason: str) -> None:
        """Set a bad record aside; its space stays counted until room is needed."""
        source = self._directory.block_file(key)
        self._forget(source, size)
        self.bad[reason] += 1
        with contextlib.suppress(OSError):
            target = self._set_in_quarantine(source, reason)
            self._quarantine[target] = _allocated(target)

    def quarantined(self) -> list[tuple[str, int]]:
        """Names of what was set aside, and the bytes it occupies."""
        return [(path.name, nbytes) for path, nbytes in self._quarantine.items()]

    def empty_quarantine(self) -> None:
        """Delete what was set aside."""
        for path in list(self._quarantine):
            path.unlink(missing_ok=True)
            del self._quarantine[path]

    def reader(self, key: bytes) -> RecordReader:
        """Open a record. Raises BadRecordError."""
        return RecordReader(self._directory.block_file(key), self.cipher)

    def reader_aside(self, number: int) -> RecordReader:
        """Open a record that was set aside. Raises BadRecordError."""
        return RecordReader(self._directory.aside_file(number), self.cipher)

    @property
    def index_is_due(self) -> bool:
        """Whether so many records changed that opening would be slow with the index as it is."""
        return self._changes > max(_INDEX_LAG, self._count // _INDEX_SHARE)

    def write_index(self, rows: Iterable[Row]) -> None:
        """Write the index anew. Raises OSError (disk full)."""
        self._changes = 0  # also when it fails: the next attempt comes after as many changes
        most = self._count * self._row_bytes + _GROWTH
        if not self.writes.take(most):
            raise OSError("today's write budget is spent")
        size = self._index.write(rows)
        self.bytes_written += size
        self.writes.give_back(most - size)

    def forget_index(self, rows: Iterable[Row]) -> None:
        """Leave only `rows` in the index; where it cannot be written, none: records speak for themselves then.

        Raises OSError when the old one cannot be removed either.
        """
        try:
            self.write_index(rows)
        except OSError as error:
            log.warning("%s; removed, the next opening reads the records themselves", error)
            self._index.remove()

    def measure_overhead(self) -> None:
        """Look at what folders occupy; called after each group of records."""
        folders = (self._directory.path, *self._directory.folders)
        notes = self._directory.identity_notes()
        self._overhead = (
            sum(_allocated(path) for path in (*folders, *notes, self._directory.writes, self._directory.pins))
            + _GROWTH
        )

    @property
    def sync_is_due(self) -> bool:
        """Whether enough was written to be worth a `sync`."""
        return self._unsynced_bytes >= _COMMIT

    def sync(self) -> None:
        """Force records to the medium. Raises OSError when that fails; what failed stays to be synced."""
        self._unsynced_bytes = 0
        for path in list(self._unsynced):
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                flash_file.sync(path)
            self._unsynced.discard(path)
        folder = os.open(self._directory.blocks, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self, rows: Iterable[Row]) -> None:
        """Write the index a last time, with what was used since."""
        try:
            self.write_index(rows)
        except OSError as error:
            log.warning("%s; the next opening reads the records themselves", error)
        self.writes.close()

    def _delete(self, path: Path, size: int) -> None:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        self._forget(path, size)

    def _forget(self, path: Path, size: int) -> None:
        self._records -= size
        self._count -= 1
        self._changes += 1
        self._unsynced.discard(path)

    def _set_in_quarantine(self, path: Path, reason: str) -> Path:
        return path.rename(self._directory.quarantine / f"{path.name}.{reason.replace(' ', '-')}")

    def _reconcile(self) -> dict[bytes, Row]:
        """Rows that have a record, and records that had no row."""
        rows = self._index.rows
        by_name = {record_name(key, self.cipher): row for key, row in rows.items()}
        kept: dict[bytes, Row] = {}
        adopted = 0
        with os.scandir(self._directory.blocks) as entries:
            for entry in entries:
                if entry.name.endswith(SCRATCH):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
                elif (row := by_name.get(entry.name) or self._adopt(entry)) is not None:
                    adopted += entry.name not in by_name
                    kept[row.key] = row
        missing = len(rows.keys() - kept.keys())
        self.bad["missing"] += missing
        self._changes = adopted + missing
        self._count = len(kept)
        return kept

    def _adopt(self, entry: os.DirEntry[str]) -> Row | None:
        """A row made from a record's own header; a record that has none to trust is set aside."""
        try:
            reader = RecordReader(entry.path, self.cipher)
            reader.close()
            header: Header = reader.header
            if record_name(header.key, self.cipher) != entry.name:
                raise BadRecordError("key", f"{entry.name} holds {header.key.hex()}")
        except ForeignRecordError as error:
            self.bad[error.reason] += 1
            self._foreign[Path(entry.path)] = _allocated(Path(entry.path))
            return None
        except BadRecordError as error:
            self.bad[error.reason] += 1
            with contextlib.suppress(OSError):
                self._set_in_quarantine(Path(entry.path), error.reason)
            return None
        return Row(
            key=header.key,
            identity=header.identity,
            parent_key=header.parent_key,
            start=header.start,
            tokens=header.tokens,
            exact=header.exact,
            file_bytes=self._occupied(reader.status),
            last_use=reader.status.st_mtime,
            hits=0,
        )

    def _occupied(self, status: os.stat_result) -> int:
        """What a record occupies, its row included."""
        return max(self._round_up(status.st_size), status.st_blocks * 512) + self._row_bytes

    def _round_up(self, nbytes: int) -> int:
        return -(-nbytes // self._page) * self._page


def _allocated(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0


def _age(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0
