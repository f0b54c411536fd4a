"""A data directory that is not open here: looked at without a daemon, without its lock, and without a change.

Another process may own it and go on. What is seen then is a snapshot that lags a little behind, and what vanishes
while it is read is passed over.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.directory import FORMAT, SCRATCH, find_record, record_name
from kvstore.errors import DirectoryUnusableError, FormatMismatchError
from kvstore.flash import cold_index
from kvstore.flash.ciphers import Ciphers
from kvstore.flash.cold_index import Row
from kvstore.flash.encryption import Cipher
from kvstore.flash.keys import Keys, source_of
from kvstore.flash.record import BadRecordError, RecordReader
from kvstore.identity import Identity
from kvstore.pipeline.schedule import CallCosts
from kvstore.profile import Profile
from kvstore.quality.reuse import Policy, Verdict
from kvstore.tiers import pins
from kvstore.watch.stats import TierStats

from . import entry as entries
from .directory_check import owner
from .entry import Entry
from .fault import Verified
from .held import Held
from .record_check import read_kv
from .status import Status, identity_statuses, pin_statuses
from .verify import verify_directory

if TYPE_CHECKING:
    from kvstore.explain import Explanation


class BareDirectory(Held):
    """The data directory at `path`. Raises DirectoryUnusableError where there is none, FormatMismatchError.

    Of what is encrypted, what `key` opens is seen. What is there is read once, at the first question.
    """

    def __init__(self, path: Path, key: Keys | None = None) -> None:
        self.path: Path = path.expanduser()
        self._key = source_of(key)
        self.ciphers = Ciphers(self._key)
        self.block_tokens = _block_tokens(self.path)
        self._opened: cold_index.Opened = "new"
        self._entries: list[Entry] | None = None
        self._identities: dict[bytes, Identity] | None = None
        for digest, identity in self.identities().items():
            self.ciphers.note(digest, identity.tenant_salt)

    def entries(self) -> list[Entry]:
        if self._entries is None:
            self._entries = [entries.of_row(row) for row in self._rows()]
        return self._entries

    def identities(self) -> dict[bytes, Identity]:
        if self._identities is None:
            self._identities = {}
            for path in _files(self.path / "identities"):
                with contextlib.suppress(OSError, ValueError):
                    identity = Identity.from_bytes(path.read_bytes())
                    self._identities[identity.digest()] = identity
        return self._identities

    def record_of(self, entry: Entry) -> Path | None:
        return find_record(self.path / "blocks", entry.key, entry.identity, self.ciphers)

    def raw(self, entry: Entry) -> NDArray[np.uint8]:
        layout = self.identities()[entry.identity].layout
        file = self.record_of(entry)
        if file is None:
            raise LookupError("evicted meanwhile")
        try:
            with contextlib.closing(RecordReader(file, self.ciphers)) as reader:
                return read_kv(reader, entry, layout)
        except BadRecordError as error:
            raise LookupError(str(error)) from error

    def status(self) -> Status:
        """What the directory holds; counters are known only to who has it open."""
        held = self.entries()
        names = _files(self.path / "quarantine")
        used = sum(_allocated(path) for path in self.path.rglob("*"))
        flash = TierStats(0, used, 0, len(held), 0)
        kept = pins.read(self.path / "pins", self.ciphers)
        return Status(
            directory=str(self.path),
            owner=owner(self.path),
            block_tokens=self.block_tokens,
            blocks=len(held),
            tokens=sum(len(each.tokens) for each in held),
            tiers={"cold": flash},
            identities=identity_statuses(held, self.identities(), self._verdicts()),
            pins=pin_statuses(kept),
            pinned_bytes=0,
            most_pinned_bytes=0,
            quarantined=len(names),
            index=self._opened,
            waiting=0,
            counts={},
            refusals={},
            misses={},
            bad_records={},
        )

    def verify(self, *, repair: bool = False) -> Verified:
        """See `verify_directory`."""
        self._entries = self._identities = None
        return verify_directory(self.path, repair=repair, block_tokens=self.block_tokens, key=self._key)

    def explanation(
        self,
        tokens: NDArray[np.int32],
        identity: Identity,
        policy: Policy,
        costs: CallCosts | None,
        layer_groups: int,
    ) -> tuple[Explanation, float | None]:
        """As a store would say it that had just opened the directory; but nothing is opened, or written."""
        from kvstore.block import Block
        from kvstore.open_directory import OpenDirectory
        from kvstore.store import KVStore

        opened = OpenDirectory(None, _no_memory(self.block_tokens, identity))
        try:
            opened.verdicts |= self._verdicts()
            tiers = opened.tiers
            for each in sorted(self.entries(), key=lambda each: each.start):
                block = Block(
                    number=tiers.new_number(),
                    key=each.key,
                    parent_key=each.parent_key,
                    namespace=tiers.namespace(each.identity),
                    tokens=each.tokens,
                    start=each.start,
                    nbytes=0,
                    exact=each.exact,
                    cold_bytes=each.flash_bytes,
                    hits=each.hits,
                    last_use=each.last_use,
                )
                block.namespace.add(block)
            for digest, other in self.identities().items():
                if digest in tiers.namespaces:
                    tiers.namespaces[digest].open(other, 1)
            store = KVStore(opened, identity)
            return store.explain(tokens, policy, costs=costs, layer_groups=layer_groups), None
        finally:
            opened.close()

    def close(self) -> None:
        """Nothing is open."""

    def _rows(self) -> list[Row]:
        """Rows that have a record, and rows made of the headers of records that have none."""
        by_name = dict[str, Row]()
        for cipher in self.ciphers.all():
            by_name |= {record_name(key, cipher): row for key, row in self._index(cipher).items()}
        found = list[Row]()
        try:
            with os.scandir(self.path / "blocks") as scanned:
                for each in scanned:
                    if (row := by_name.get(each.name)) is not None:
                        found.append(row)
                    elif not each.name.endswith(SCRATCH):
                        with contextlib.suppress(BadRecordError):
                            found.append(_adopted(Path(each.path), self.ciphers))
        except FileNotFoundError:
            pass
        # A rotation that was stopped may leave two records of one block.
        return list({row.key: row for row in found}.values())

    def _index(self, cipher: Cipher | None) -> dict[bytes, Row]:
        rows = dict[bytes, Row]()
        for _ in range(2):  # it may be replaced just then
            with contextlib.suppress(OSError):
                opened, rows = cold_index.read(self.path / "index", cipher)
                self._opened = opened if self._opened == "new" else self._opened
                break
        return {key: row for key, row in rows.items() if self.ciphers.permits(row.identity, cipher)}

    def _verdicts(self) -> dict[bytes, Verdict]:
        found = {}
        for path in (self.path / "identities").glob("*.verdict"):
            with contextlib.suppress(OSError, ValueError, msgspec.DecodeError):
                content = path.read_bytes()
                if xxhash.xxh3_64_digest(content[8:]) == content[:8]:
                    found[bytes.fromhex(path.stem)] = msgspec.json.decode(content[8:], type=Verdict)
        return found


class _Format(msgspec.Struct):
    format: int
    block_tokens: int


def _block_tokens(path: Path) -> int:
    try:
        found = msgspec.json.decode((path / "FORMAT").read_bytes(), type=_Format)
    except FileNotFoundError:
        raise DirectoryUnusableError(
            f"{path} is no data directory; give the one that the store was opened with"
        ) from None
    except OSError as error:
        raise DirectoryUnusableError(f"{path} cannot be read: {error}") from error
    except msgspec.DecodeError as error:
        raise FormatMismatchError(
            f"{path / 'FORMAT'} is damaged ({error}); `kvstore verify --repair` restores it"
        ) from error
    if found.format != FORMAT:
        raise FormatMismatchError(
            f"{path} has format {found.format}, this build reads {FORMAT}; use the build that wrote it"
        )
    return found.block_tokens


def _adopted(path: Path, ciphers: Ciphers) -> Row:
    reader = RecordReader(path, ciphers)
    reader.close()
    header, status = reader.header, reader.status
    if record_name(header.key, reader.cipher) != path.name:
        raise BadRecordError("key", f"{path.name} holds {header.key.hex()}")
    return Row(
        key=header.key,
        identity=header.identity,
        parent_key=header.parent_key,
        start=header.start,
        tokens=header.tokens,
        exact=header.exact,
        file_bytes=max(status.st_size, status.st_blocks * 512),
        last_use=status.st_mtime,
        hits=0,
    )


def _no_memory(block_tokens: int, identity: Identity) -> Profile:
    """A profile that takes what little a store asks for on opening."""
    block = 2 * identity.layout.block_bytes(block_tokens) + 65_536
    return Profile(block_tokens=block_tokens, hot_bytes=0, warm_bytes=block, cold_bytes=0, arena_bytes=block)


def _files(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if not path.suffix]
    except OSError:
        return []


def _allocated(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except OSError:
        return 0
