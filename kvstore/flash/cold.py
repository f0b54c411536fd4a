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
from typing import NamedTuple

from ..directory import SCRATCH, DataDirectory, record_name
from . import flash_file
from .cold_index import ColdIndex, Opened, Row, index_files, row_bytes
from .encryption import Cipher
from .record import FOREIGN, BadRecordError, ForeignRecordError, Header, RecordReader
from .write_budget import WriteBudget

_GROWTH = 256 * 1024  # what folders may grow by between two looks at them, and an index without rows
_INDEX_LAG = 256  # changes until the index is written anew, which bounds what opening has to adopt
_COMMIT = 32 * 1024 * 1024  # bytes written until records are forced to the medium
_MOST_HEADER = 64 * 1024  # bytes of a header and of what rounding adds
_INDEX_SHARE = 32  # or this part of all records: so the index is written 32 times over its size at most

log = logging.getLogger(__name__)


class ColdTier:
    """Record files under `directory`, at most `budget` bytes of disk in all: records, index, folders, quarantine.

    Records under keys that are not at hand take their room until it is needed, or the key comes (`unlock`).
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
        self.ciphers = directory.ciphers
        self._under: dict[
            bytes, Cipher
        ] = {}  # which cipher, by key of the block; those in clear are left out
        self._indexes: dict[Cipher | None, ColdIndex] = {}
        self._unsynced: set[Path] = set()
        self._unsynced_bytes = 0
        self._changes = 0  # of records since the index was written
        self._count = 0
        self.bad: Counter[str] = Counter()
        self._foreign: dict[Path, _Foreign] = {}
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
        found = {index.opened for index in self._indexes.values()}
        return "rebuilt" if "rebuilt" in found else "sealed" if "sealed" in found else "new"

    @property
    def used(self) -> int:
        """Bytes of disk in use or reserved."""
        useless = sum(self._quarantine.values()) + sum(each.nbytes for each in self._foreign.values())
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
        while self.free < needed and (useless := self._quarantine or self._foreign):
            path = next(iter(useless))
            path.unlink(missing_ok=True)
            useless.pop(path)

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

    def write(
        self,
        key: bytes,
        pieces: Sequence[bytes | memoryview],
        reserved: int,
        cipher: Cipher | None = None,
    ) -> int:
        """Write a record into space reserved before; the bytes it now occupies. Raises OSError, leaving nothing.

        cipher: what it is under.
        """
        target = self._directory.block_file(key, cipher)
        scratch = target.with_suffix(SCRATCH)
        if not self.writes.take(reserved):
            raise OSError("today's write budget is spent")
        try:
            size = self._occupied(flash_file.write(scratch, pieces))
            if size > reserved:
                raise OSError(f"record occupies {size} bytes, {reserved} were reserved")
            scratch.rename(target)
            self._foreign.pop(target, None)
            if cipher is not None:
                self._under[key] = cipher
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
        self._delete(self.file(key), size)
        self._under.pop(key, None)

    def set_aside(self, key: bytes, number: int) -> None:
        """Keep the record of a dropped block for the lease that still reads it; gone after any stop."""
        with contextlib.suppress(OSError):
            self.file(key).rename(self._directory.aside_file(number))
        self._under.pop(key, None)

    def remove_aside(self, number: int, size: int) -> None:
        self._delete(self._directory.aside_file(number), size)

    def quarantine(self, key: bytes, size: int, reason: str) -> None:
        """Set a bad record aside; its space stays counted until room is needed. What is foreign stays."""
        source = self.file(key)
        cipher = self._under.pop(key, None)
        self._forget(source, size)
        self.bad[reason] += 1
        if reason in FOREIGN:
            self._foreign[source] = _Foreign(_allocated(source), b"" if cipher is None else cipher.id)
            return
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

    def file(self, key: bytes) -> Path:
        """Where a record lies."""
        return self._directory.block_file(key, self._under.get(key))

    def reader(self, key: bytes, ahead: int = 0) -> RecordReader:
        """Open a record. `ahead` as in RecordReader. Raises BadRecordError."""
        return RecordReader(self.file(key), self.ciphers, ahead)

    def reader_aside(self, number: int, ahead: int = 0) -> RecordReader:
        """Open a record that was set aside. Raises BadRecordError."""
        return RecordReader(self._directory.aside_file(number), self.ciphers, ahead)

    def under(self, key: bytes) -> Cipher | None:
        """What a record is under."""
        return self._under.get(key)

    def copy_under(
        self, source: Path, key: bytes, pieces: Sequence[bytes | memoryview], cipher: Cipher
    ) -> int:
        """Write a second copy of the record `source`, under `cipher`, and force it to the medium; what it occupies.

        `take_copy` has it serve; without, it goes on opening. Raises OSError, leaving nothing.
        """
        scratch = self._directory.block_file(key, cipher).with_suffix(SCRATCH)
        try:
            size = self._occupied(flash_file.write(scratch, pieces))
            status = source.stat()
            os.utime(scratch, ns=(status.st_atime_ns, status.st_mtime_ns))
            flash_file.sync(scratch)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise
        self.bytes_written += size - self._row_bytes
        return size

    def take_copy(self, key: bytes, cipher: Cipher, more: int) -> Path:
        """Have a copy serve, which is of `more` bytes than the record that it was made of; where that lies.

        That one is to go once the name of the copy is on the medium. Called under the store's lock.
        """
        first, second = self.file(key), self._directory.block_file(key, cipher)
        second.with_suffix(SCRATCH).rename(second)
        self._foreign.pop(second, None)
        self._under[key] = cipher
        self._records += more
        self._unsynced.discard(first)
        self._changes += 1
        return first

    def in_clear(self) -> list[Path]:
        """Records that are not encrypted though keys are in use."""
        return [path for path, each in self._foreign.items() if not each.key_id]

    def take_encrypted(self, source: Path, key: bytes, cipher: Cipher) -> None:
        """Have a copy stand for a record that lies `in_clear`; `unlock` makes it readable.

        Where one stands for it already, that stays. Called under the store's lock.
        """
        clear, target = self._foreign.pop(source), self._directory.block_file(key, cipher)
        if self._under.get(key) is None:
            target.with_suffix(SCRATCH).rename(target)
            self._foreign[target] = clear._replace(key_id=cipher.id)

    def unlocked(self) -> list[tuple[Path, Row, Cipher | None]]:
        """What can be read now that keys came since opening; for `unlock`. Takes no lock."""
        waiting = [path for path, each in list(self._foreign.items()) if self.ciphers.has(each.key_id)]
        if not waiting:
            return []
        by_name = self._rows_by_name()
        found = list[tuple[Path, Row, Cipher | None]]()
        for path in waiting:
            with contextlib.suppress(BadRecordError):
                row, cipher = by_name.get(path.name) or self._row_of(path)
                found.append((path, row, cipher))
        return found

    def unlock(self, found: Iterable[tuple[Path, Row, Cipher | None]]) -> None:
        """Count records as held, and leave them in `rows`. Called under the store's lock."""
        self.rows = {}
        for path, row, cipher in found:
            if self._foreign.pop(path, None) is not None and path.exists():
                self._hold(row, cipher)
                self.rows[row.key] = row
                self._records += row.file_bytes
                self._count += 1
        self._changes += len(self.rows)

    @property
    def index_is_due(self) -> bool:
        """Whether so many records changed that opening would be slow with the index as it is."""
        return self._changes > max(_INDEX_LAG, self._count // _INDEX_SHARE)

    def write_index(self, rows: Iterable[Row]) -> None:
        """Write the index anew. Raises OSError (disk full)."""
        self._changes = 0  # also when it fails: the next attempt comes after as many changes
        sorted_out: dict[Cipher | None, list[Row]] = {cipher: [] for cipher in tuple(self._indexes)}
        for row in rows:
            sorted_out.setdefault(self._under.get(row.key), []).append(row)
        most = self._count * self._row_bytes + _GROWTH * max(1, len(sorted_out))
        if not self.writes.take(most):
            raise OSError("today's write budget is spent")
        size = 0
        for cipher, its_rows in sorted_out.items():
            size += self._index_of(cipher).write(its_rows)
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
            ColdIndex.remove_all(self._directory.index)

    def drop_index(self, cipher: Cipher | None) -> None:
        """Nothing lies under this cipher any more. By the thread that writes. Raises OSError."""
        self._indexes.pop(cipher, None)
        for path in index_files(self._directory.index, cipher):
            path.unlink(missing_ok=True)

    def measure_overhead(self) -> None:
        """Look at what folders occupy; called after each group of records."""
        folders = (self._directory.path, *self._directory.folders)
        notes = (*self._directory.identity_notes(), *self._directory.path.glob("pins*"))
        self._overhead = sum(
            _allocated(path) for path in (*folders, *notes, self._directory.writes)
        ) + _GROWTH * max(1, len(self._indexes))

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
        flash_file.sync_folder(self._directory.blocks)

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
        by_name = self._rows_by_name()
        kept: dict[bytes, Row] = {}
        adopted = 0
        with os.scandir(self._directory.blocks) as entries:
            for entry in entries:
                if entry.name.endswith(SCRATCH):
                    with contextlib.suppress(OSError):
                        os.unlink(entry.path)
                elif (known := by_name.get(entry.name) or self._adopt(entry)) is not None:
                    adopted += entry.name not in by_name
                    row, cipher = known
                    if row.key in kept:  # a stop came between two steps of a rotation
                        is_last = cipher is self.ciphers.of(row.identity)
                        stale = self._under.get(row.key) if is_last else cipher
                        with contextlib.suppress(OSError):
                            self._directory.block_file(row.key, stale).unlink()
                        if not is_last:
                            continue
                    kept[row.key] = row
                    self._hold(row, cipher)
        missing = len({row.key for row, _ in by_name.values()} - kept.keys())
        self.bad["missing"] += missing
        self._changes = adopted + missing
        self._count = len(kept)
        return kept

    def _hold(self, row: Row, cipher: Cipher | None) -> None:
        if cipher is not None:
            self._under[row.key] = cipher

    def _index_of(self, cipher: Cipher | None) -> ColdIndex:
        if cipher not in self._indexes:
            self._indexes[cipher] = ColdIndex(self._directory.index, cipher)
        return self._indexes[cipher]

    def _rows_by_name(self) -> dict[str, tuple[Row, Cipher | None]]:
        """What indexes that were not read yet know of records that may be read, by the names of their files."""
        found: dict[str, tuple[Row, Cipher | None]] = {}
        for cipher in self.ciphers.all():
            index = self._index_of(cipher)
            rows, index.rows = index.rows, {}
            for key, row in rows.items():
                if not self.ciphers.permits(row.identity, cipher):
                    continue
                found[record_name(key, cipher)] = row, cipher
                for other in self.ciphers.under_which(row.identity):  # a rotation may have been stopped
                    found.setdefault(record_name(key, other), (row, other))
        return found

    def _adopt(self, entry: os.DirEntry[str]) -> tuple[Row, Cipher | None] | None:
        """A row made from a record's own header; a record that has none to trust is set aside."""
        path = Path(entry.path)
        try:
            return self._row_of(path)
        except ForeignRecordError as error:
            self.bad[error.reason] += 1
            self._foreign[path] = _Foreign(_allocated(path), error.key_id)
        except BadRecordError as error:
            self.bad[error.reason] += 1
            with contextlib.suppress(OSError):
                self._set_in_quarantine(path, error.reason)
        return None

    def _row_of(self, path: Path) -> tuple[Row, Cipher | None]:
        """Raises BadRecordError."""
        reader = RecordReader(path, self.ciphers)
        reader.close()
        header: Header = reader.header
        if record_name(header.key, reader.cipher) != path.name:
            raise BadRecordError("key", f"{path.name} holds {header.key.hex()}")
        row = Row(
            key=header.key,
            identity=header.identity,
            parent_key=header.parent_key,
            start=header.start,
            tokens=header.tokens,
            exact=header.exact,
            file_bytes=self._occupied(reader.status),
            last_use=reader.status.st_mtime,
            hits=0,
            head_bytes=reader.head_bytes,
        )
        return row, reader.cipher

    def _occupied(self, status: os.stat_result) -> int:
        """What a record occupies, its row included."""
        return max(self._round_up(status.st_size), status.st_blocks * 512) + self._row_bytes

    def _round_up(self, nbytes: int) -> int:
        return -(-nbytes // self._page) * self._page


class _Foreign(NamedTuple):
    """A record whose key is not at hand: what it occupies, and which key it is under, empty for none."""

    nbytes: int
    key_id: bytes


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
