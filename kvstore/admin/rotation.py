"""Puts what a tenant has on flash under a new key, or under a first one; and erases a tenant by dropping its keys.

A rotation begins by keeping the new key beside the old one, and ends by erasing the old one, once nothing is under it.
Between, record by record: a copy under the new key is forced to the medium and takes over before the first one goes.
So all that is held can be read whenever this stops, and the next run goes on. Requests go on meanwhile. Records that
are damaged, or whose key is not at hand, stay. Nothing is decoded, so KV comes out bit by bit as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
import xxhash

from kvstore.block import Block
from kvstore.directory import SCRATCH, DataDirectory, record_name
from kvstore.errors import BudgetError, EncryptionError
from kvstore.flash import cold_index, flash_file, record
from kvstore.flash.cold import ColdTier
from kvstore.flash.encryption import AlteredError, Cipher, OtherKeyError
from kvstore.flash.record import BadRecordError, Header, NotNowError, RecordReader
from kvstore.open_directory import OpenDirectory
from kvstore.tiers import pins
from kvstore.tiers.quotas import on_flash

_GROUP = 8  # records between two turns of those that are put meanwhile
_VECTORS_DIGEST = 16  # bytes before the content, see `index.vector_file`

Item = TypeVar("Item")


class Rotated(msgspec.Struct, frozen=True):
    """Tenants that have a new key, records put under it, and records that stay: damaged, or nobody knows whose.

    own: tenants that gave a key of their own, and so have to give the next one.
    """

    tenants: int
    records: int
    left: int
    own: int


class Dropped(msgspec.Struct, frozen=True):
    """Tenants whose keys are erased, and blocks that went with them, or would go."""

    tenants: int
    blocks: int
    dry_run: bool


def rotate(opened: OpenDirectory, tenant: bytes | None = None) -> Rotated:
    """Put what is on flash of a tenant (its salt; None: of each) under a new key, and erase the old one.

    What is in clear of it is encrypted. Raises EncryptionError, also for records that cannot be read now, OSError (disk
    full): both keys stay then, and the next run goes on.
    """
    ciphers, cold = opened.ciphers, opened.tiers.cold
    own = set[bytes]()
    if tenant is None:
        own = {each for each in ciphers.tenants() if ciphers.has_only_its_own(each)}
    tenants = ciphers.tenants() - own if tenant is None else {tenant}
    for each in tenants:
        ciphers.renew(each)
    moved = left = 0
    if cold is not None and opened.directory is not None:
        work = _Work(opened, opened.directory, cold, tenants)
        due = opened.worker.run(work.due).result()  # after what is written under the old key just now
        moved, left = work.in_groups(due, work.anew)
        encrypted, unknown = work.in_groups(cold.in_clear(), work.encrypted)
        opened.worker.run(partial(work.small_files, bool(encrypted))).result()
        moved, left = moved + encrypted, left + unknown
    for each in tenants:
        old = ciphers.settle(each)
        if cold is not None:
            for cipher in old:
                opened.worker.run(partial(cold.drop_index, cipher)).result()
    changed = sum(ciphers.has_key(each) for each in tenants)
    return Rotated(changed, moved, left, len(own))


def drop(opened: OpenDirectory, tenants: Collection[bytes]) -> None:
    """Erase the keys of tenants (salts). What nobody purged of theirs is lost. Raises EncryptionError, OSError."""
    for tenant in tenants:
        for cipher in opened.ciphers.drop(tenant):
            if opened.directory is not None:
                pins.file_under(opened.directory.pins, cipher).unlink(missing_ok=True)
            if opened.tiers.cold is not None:
                opened.worker.run(partial(opened.tiers.cold.drop_index, cipher)).result()


class _Work:
    """Its parts are run by the thread that writes."""

    def __init__(
        self, opened: OpenDirectory, directory: DataDirectory, cold: ColdTier, tenants: Collection[bytes]
    ) -> None:
        self._opened = opened
        self._tiers = opened.tiers
        self._directory = directory
        self._cold = cold
        self._ciphers = opened.ciphers
        self._tenants = tenants

    def due(self) -> list[Block]:
        """Blocks whose records are under an older key than their tenant's last one."""
        with self._tiers.lock:
            return [
                block
                for block in self._tiers.blocks.values()
                if block.cold_bytes
                and self._ciphers.tenant(block.namespace.digest) in self._tenants
                and self._cold.under(block.key) is not self._ciphers.of(block.namespace.digest)
            ]

    def in_groups(
        self, items: Sequence[Item], work: Callable[[Sequence[Item]], tuple[int, int]]
    ) -> tuple[int, int]:
        """What `work` sums up to."""
        moved = left = 0
        for at in range(0, len(items), _GROUP):
            done = self._opened.worker.run(partial(work, items[at : at + _GROUP])).result()
            moved, left = moved + done[0], left + done[1]
        return moved, left

    def anew(self, blocks: Sequence[Block]) -> tuple[int, int]:
        """Put records under their tenants' keys; how many were, and how many are damaged."""
        first, left = list[Path](), 0
        try:
            for block in blocks:
                with self._tiers.lock:
                    if block.doomed or not block.cold_bytes:
                        continue
                    self._tiers.acquire([block], used=False)
                try:
                    if (replaced := self._anew(block)) is not None:
                        first.append(replaced)
                except BadRecordError as error:
                    _stop_unless_damaged(error)
                    left += 1
                finally:
                    with self._tiers.lock:
                        self._tiers.release([block])
        finally:
            self._remove(first)
        return len(first), left

    def _anew(self, block: Block) -> Path | None:
        """Where the first copy of its record lies; None if the block was dropped meanwhile. Raises BadRecordError."""
        with self._tiers.lock:
            source, cipher = self._cold.file(block.key), self._cipher(block.namespace.digest)
            in_clear = self._cold.under(block.key) is None
        header, pieces = _under(RecordReader(source, None if in_clear else self._ciphers), cipher)
        if header.key != block.key:
            raise BadRecordError("key", f"{source.name} holds {header.key.hex()}")
        size = self._copied(source, header.key, pieces, cipher)
        with self._tiers.lock:
            if block.doomed:
                self._directory.block_file(block.key, cipher).with_suffix(SCRATCH).unlink()
                return None
            first = self._cold.take_copy(block.key, cipher, size - block.cold_bytes)
            on_flash(block, size)
        return first

    def encrypted(self, files: Sequence[Path]) -> tuple[int, int]:
        """The same for records in clear."""
        done, left = list[Path](), 0
        try:
            for file in files:
                try:
                    reader = RecordReader(file)
                    tenant = self._ciphers.tenant(reader.header.identity)
                    if tenant not in self._tenants or file.name != record_name(reader.header.key, None):
                        left += tenant is None or tenant in self._tenants
                        reader.close()
                        continue
                    cipher = self._cipher(reader.header.identity)
                    header, pieces = _under(reader, cipher)
                except BadRecordError as error:
                    _stop_unless_damaged(error)
                    left += 1
                    continue
                if self._cold.under(header.key) is None:
                    self._copied(file, header.key, pieces, cipher)
                with self._tiers.lock:
                    self._cold.take_encrypted(file, header.key, cipher)
                done.append(file)
        finally:
            self._remove(done)
        return len(done), left

    def small_files(self, clear_ones: bool) -> None:
        """Pins, vectors and the index, and what was encrypted just now is held."""
        known = cold_index.read(self._directory.index)[1] if clear_ones else {}
        with self._tiers.lock:
            self._pins_in_clear()
            self._tiers.pins.rewrite()
        for digest in self._ciphers.identities(self._tenants):
            self._vectors(digest)
        self._opened.unlock(known)
        self._cold.forget_index(self._tiers.rows())
        if clear_ones:
            self._cold.drop_index(None)

    def _pins_in_clear(self) -> None:
        """Where keys are in use nobody reads them; what is not of these tenants stays."""
        file = self._directory.pins
        if None in self._ciphers.all() or not file.exists():
            return
        rest = list[pins.Pin]()
        with contextlib.suppress(ValueError):  # damaged: they are of no use
            for pin in pins.check(file, self._ciphers):
                if self._ciphers.tenant(pin.identity) not in self._tenants:
                    rest.append(pin)
                    continue
                with contextlib.suppress(BudgetError):
                    self._tiers.pins.add(pin)
        if rest:
            pins.write(file, rest)
        else:
            file.unlink()

    def _vectors(self, digest: bytes) -> None:
        """Vectors can be made anew: those that are damaged, or of a key that is not at hand, are left to that."""
        file, sealer = self._directory.vectors_file(digest), self._ciphers.sealer(digest)
        if sealer is None or not file.exists():
            return
        content = file.read_bytes()[_VECTORS_DIGEST:]
        try:
            plain = sealer.open(content)
        except AlteredError:
            return
        except OtherKeyError:
            plain = content
            try:
                msgspec.msgpack.decode(plain)
            except msgspec.DecodeError:
                return
        sealed = sealer.seal(plain)
        scratch = file.with_name(file.name + SCRATCH)
        scratch.write_bytes(xxhash.xxh3_128_digest(sealed) + sealed)
        scratch.replace(file)

    def _copied(self, source: Path, key: bytes, pieces: Sequence[bytes | memoryview], cipher: Cipher) -> int:
        """A second copy of a record on the medium; the bytes it occupies. Raises OSError."""
        with self._tiers.lock:
            room = self._tiers.reserve_cold(sum(len(piece) for piece in pieces))
        if room is None:
            raise OSError("no room for a second copy of a record: raise cold_bytes, or purge something")
        try:
            return self._cold.copy_under(source, key, pieces, cipher)
        finally:
            with self._tiers.lock:
                self._cold.release(room)

    def _cipher(self, digest: bytes) -> Cipher:
        cipher = self._ciphers.of(digest)
        assert cipher is not None, "a tenant has a key when its rotation begins"
        return cipher

    def _remove(self, replaced: Sequence[Path]) -> None:
        """First copies go once the names of the second ones are on the medium."""
        if replaced:
            flash_file.sync_folder(self._directory.blocks)
            for file in replaced:
                file.unlink(missing_ok=True)


def _under(reader: RecordReader, cipher: Cipher) -> tuple[Header, list[bytes | memoryview]]:
    """Header and pieces of a record as it is under `cipher`. Closes the reader. Raises BadRecordError."""
    with contextlib.closing(reader):
        stored: list[list[bytes | memoryview]] = []
        for number, frame in enumerate(reader.header.frames):
            pieces = [np.empty(length, np.uint8) for length in frame.lengths]
            reader.stored(number, pieces)
            stored.append([piece.data for piece in pieces])
        return record.encrypt(reader.header, stored, cipher)


def _stop_unless_damaged(error: BadRecordError) -> None:
    """The old key must not go while a record may be read under it another time."""
    if isinstance(error, NotNowError) or error.reason == "unreadable":
        raise EncryptionError(
            f"a record cannot be read now, {error}; rotate again, or `kvstore verify --repair` first"
        )
