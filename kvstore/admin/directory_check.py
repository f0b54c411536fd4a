"""Checks a data directory file by file, without opening it for writing: what is there, and what does not fit.

Where another process owns the directory, records come and go meanwhile and its index follows later, so what is only
behind is no fault then.
"""

from __future__ import annotations

import errno
import fcntl
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash

from kvstore.block import block_key
from kvstore.directory import FORMAT, SCRATCH, find_record, is_part, record_name
from kvstore.errors import DirectoryUnusableError
from kvstore.flash import cold_index, write_budget
from kvstore.flash.ciphers import Ciphers
from kvstore.flash.cold_index import Row, row_bytes
from kvstore.flash.encryption import AlteredError, Cipher, OtherKeyError
from kvstore.flash.record import Header, NotNowError
from kvstore.identity import Identity, IdentityError
from kvstore.layout import capabilities
from kvstore.namespace import ROOT_KEY
from kvstore.quality.reuse import Verdict
from kvstore.tiers import pins

from .fault import Fault, Kind
from .record_check import LOST, check_record, misfit

_TOMORROW = 86_400  # seconds that clocks may differ by


class Checked(NamedTuple):
    """All that a check found. `headers` of sound records and `rows` of sound rows, by key."""

    block_tokens: int | None
    headers: dict[bytes, Header]
    rows: dict[bytes, Row]
    bytes_read: int
    faults: list[Fault]
    notes: list[str]


def owner(path: Path) -> str | None:
    """The pid of the process that owns a data directory, None when there is none."""
    try:
        lock = os.open(path / "LOCK", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return os.pread(lock, 32, 0).decode(errors="replace").strip() or "unknown"
        return None
    finally:
        os.close(lock)
    return None


def check_directory(path: Path, *, owned: bool, ciphers: Ciphers | None = None) -> Checked:
    """Check everything in `path`, of what is encrypted that which `ciphers` open.

    Raises DirectoryUnusableError where there is no data directory to read.
    """
    if not path.is_dir():
        raise DirectoryUnusableError(
            f"{path} is no data directory; give the one that the store was opened with"
        )
    try:
        return _Check(path, owned, Ciphers() if ciphers is None else ciphers).run()
    except NotNowError as error:
        raise DirectoryUnusableError(f"{path} cannot be checked now: {error}") from error


class _Check:
    def __init__(self, path: Path, owned: bool, ciphers: Ciphers) -> None:
        self._ciphers = ciphers
        self._names: dict[bytes, str] = {}
        self._path = path
        self._owned = owned
        self._faults: list[Fault] = []
        self._notes: list[str] = []
        self._bytes_read = 0

    def run(self) -> Checked:
        strangers = sorted(entry.name for entry in self._path.iterdir() if not is_part(entry.name))
        for name in strangers:
            self._say("stranger", name, "no part of a data directory", "repair sets it aside")
        noted = self._format()
        identities = self._identity_notes()
        for digest, identity in identities.items():
            self._ciphers.note(digest, identity.tenant_salt)
        self._small_files()
        records = self._records(identities)
        block_tokens = _block_tokens_of(records) or noted
        if noted is not None and block_tokens != noted:
            found = f"says blocks of {noted} tokens, records are of {block_tokens}"
            self._say("format", "FORMAT", found, "repair writes what the records say")
        if block_tokens is not None:
            self._fit(records, block_tokens)
        self._family(records, identities, block_tokens)
        rows = self._index()
        self._compare(rows, records, block_tokens)
        bad = {fault.block for fault in self._faults}
        for digest in {header.identity for header, _ in records.values()} - identities.keys():
            self._notes.append(
                f"nobody described identity {digest.hex()[:12]}: of its records, checksums and keys were checked; "
                "opening a store with it describes it again"
            )
        return Checked(
            block_tokens,
            {key: header for key, (header, _) in records.items()},
            {key: row for key, row in rows.items() if key in records and key.hex() not in bad},
            self._bytes_read,
            self._faults,
            self._notes,
        )

    def _say(self, kind: Kind, entry: str, found: str, cure: str, key: bytes | None = None) -> None:
        self._faults.append(Fault(kind, entry, found, cure, key.hex() if key is not None else None))

    # -- what is beside the records -----------------------------------------------------------------------------

    def _format(self) -> int | None:
        """Tokens a block, or None where nobody says it."""
        try:
            content = (self._path / "FORMAT").read_bytes()
            found = msgspec.json.decode(content, type=dict[str, int])
        except FileNotFoundError:
            found = {}
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            self._say("format", "FORMAT", f"is damaged: {error}", "repair writes what the records say")
            return None
        size = found.get("block_tokens", 0)
        if found == {"format": FORMAT, "block_tokens": size} and is_block_size(size):
            return size
        self._say("format", "FORMAT", f"says {found or 'nothing'}", "repair writes what the records say")
        return None

    def _identity_notes(self) -> dict[bytes, Identity]:
        known: dict[bytes, Identity] = {}
        for entry in _files(self._path / "identities"):
            name = f"identities/{entry.name}"
            digest, dot, kind = entry.name.partition(".")
            if entry.name.endswith(SCRATCH):
                continue
            if not _is_hex(digest, 64) or (dot and kind not in ("verdict", "vectors")):
                self._say("stranger", name, "no note on an identity", "repair sets it aside")
                continue
            try:
                content = Path(entry.path).read_bytes()
            except OSError as error:
                if not self._owned:
                    self._say("identity note", name, f"cannot be read: {error}", "repair sets it aside")
                continue
            if kind == "verdict":
                self._verdict(name, content)
            elif kind == "vectors":
                if xxhash.xxh3_128_digest(content[16:]) != content[:16]:
                    cure = "repair sets it aside; the next embedder makes vectors anew"
                    self._say("vectors", name, "its checksum does not fit", cure)
            else:
                try:
                    identity = Identity.from_bytes(content)
                    if identity.digest().hex() != digest:
                        raise IdentityError(f"describes {identity.digest().hex()[:12]}")
                    known[identity.digest()] = identity
                except IdentityError as error:
                    cure = "repair sets it aside; opening a store with this identity describes it again"
                    self._say("identity note", name, str(error), cure)
        return known

    def _verdict(self, name: str, content: bytes) -> None:
        cure = "repair sets it aside; `kvstore calibrate` measures again"
        if xxhash.xxh3_64_digest(content[8:]) != content[:8]:
            self._say("verdict", name, "its checksum does not fit", cure)
            return
        try:
            msgspec.json.decode(content[8:], type=Verdict)
        except msgspec.DecodeError as error:
            self._say("verdict", name, str(error), cure)

    def _small_files(self) -> None:
        checks: list[tuple[Kind, str, Callable[[Path], object], str]] = [
            ("write count", "writes", write_budget.check, "today's writes are counted from 0 then")
        ]
        for cipher in self._ciphers.all():
            name = pins.file_under(self._path / "pins", cipher).name
            check_pins = partial(pins.check, ciphers=self._ciphers)
            checks.append(("pins", name, check_pins, "pin again what is to stay"))
        for kind, name, check, then in checks:
            try:
                check(self._path / name)
            except FileNotFoundError:
                pass
            except (OSError, ValueError) as error:
                self._say(kind, name, str(error), f"repair sets it aside; {then}")

    # -- index --------------------------------------------------------------------------------------------------

    def _index(self) -> dict[bytes, Row]:
        """Rows that make sense by themselves, by key."""
        rows: dict[bytes, Row] = {}
        for cipher in self._ciphers.all():
            rows |= self._index_under(cipher)
        return rows

    def _index_under(self, cipher: Cipher | None) -> dict[bytes, Row]:
        try:
            files = cold_index.index_files(self._path / "index", cipher)
        except OSError:
            return {}
        for number, file in enumerate(files):
            try:
                if cold_index.is_sealed(file):
                    if number or len(files) > 1:
                        self._notes.append(
                            f"{len(files)} index files: a stop came between two steps of writing"
                        )
                    rows = self._rows(cold_index.pairs(file, cipher), f"index/{file.name}")
                    for key in rows:
                        self._names.setdefault(key, f"blocks/{record_name(key, cipher)}")
                    return rows
                found = "is not what its name says"
            except OSError as error:
                if not file.exists():
                    continue
                found = str(error)
            except (OtherKeyError, AlteredError):
                found = "is not what was written under this key"
            cure = "repair sets it aside and makes the index anew from the records"
            self._say("index", f"index/{file.name}", found, cure)
        return {}

    def _rows(self, pairs: list[tuple[bytes, Row]], name: str) -> dict[bytes, Row]:
        rows: dict[bytes, Row] = {}
        double = Counter(row.key for _, row in pairs)
        for key, row in pairs:
            cure = "repair makes the row anew from the record"
            if double[row.key] > 1:
                self._say("duplicate", name, f"{double[row.key]} rows of one block", cure, row.key)
            elif key != row.key:
                self._say(
                    "row differs", name, f"row of {row.key.hex()[:12]} under {key.hex()[:12]}", cure, row.key
                )
            elif row.hits < 0 or not 0 <= row.last_use < time.time() + _TOMORROW or math.isnan(row.last_use):
                found = f"{row.hits} hits, last use at {row.last_use}"
                self._say("counter", name, found, cure, row.key)
            rows[row.key] = row
        return rows

    def _compare(self, rows: Mapping[bytes, Row], records: _Records, block_tokens: int | None) -> None:
        """Rows and records, which have to be about the same."""
        told = {fault.block for fault in self._faults}
        unsound = {fault.entry for fault in self._faults}
        for key, row in rows.items():
            name = self._name(key)
            if key not in records:
                if name in unsound or self._owned or key.hex() in told:
                    continue
                cure = "opening drops the row, repair does, too; the next prompt with these tokens is computed again"
                self._say("row without record", name, "the index names it, there is no such file", cure, key)
                continue
            header, status = records[key]
            sizes = _sizes(status, self._path)
            cure = "repair makes the row anew from the record"
            if _said(row) != _said(header):
                self._say("row differs", name, "row and record tell different things", cure, key)
            elif not self._owned and block_tokens and row.file_bytes - row_bytes(block_tokens) not in sizes:
                found = f"the row counts {row.file_bytes} bytes, the record takes {max(sizes)} and the row its part"
                self._say("counter", name, found, cure, key)
        if self._owned:
            return
        for key in records.keys() - rows.keys():
            cure = "nothing is lost: opening adopts it, repair does, too"
            self._say("record without row", self._name(key), "the index does not name it", cure, key)

    # -- records ------------------------------------------------------------------------------------------------

    def _records(self, identities: Mapping[bytes, Identity]) -> _Records:
        """Headers of the records that are sound by themselves."""
        records: _Records = {}
        scratch = foreign = 0
        for entry in sorted(_files(self._path / "blocks"), key=lambda entry: entry.name):
            name = f"blocks/{entry.name}"
            if entry.name.endswith(SCRATCH):
                scratch += 1
                continue
            if not _is_hex(entry.name, 32):
                self._say("stranger", name, "no record has such a name", "repair sets it aside")
                continue
            checked = check_record(Path(entry.path), identities, ciphers=self._ciphers)
            self._bytes_read += checked.bytes_read
            header = checked.header
            if checked.kind is None and header is None:
                foreign += 1
            elif checked.kind is None and header is not None and checked.status is not None:
                records[header.key] = header, checked.status
                self._names[header.key] = name
            elif Path(entry.path).exists():
                key = header.key if header is not None else None
                if checked.kind == "name" and header is not None and self._has_record(header):
                    self._say("duplicate", name, checked.found, "repair sets it aside; the other one stays")
                else:
                    self._say(checked.kind or "record", name, checked.found, LOST, key)
        if foreign:
            clear = None in self._ciphers.all()
            needed = "encrypted with another key" if clear else "of another key, or of none"
            self._notes.append(f"{foreign} records are {needed}, and were not checked")
        if scratch and not self._owned:
            self._notes.append(f"{scratch} half-written files of a stop; opening removes them")
        return records

    def _name(self, key: bytes) -> str:
        return self._names[key]

    def _has_record(self, header: Header) -> bool:
        return find_record(self._path / "blocks", header.key, header.identity, self._ciphers) is not None

    def _fit(self, records: _Records, block_tokens: int) -> None:
        for key, (header, _) in list(records.items()):
            if (wrong := misfit(header, block_tokens)) is not None:
                self._say(wrong[0], self._name(key), wrong[1], LOST, key)
                del records[key]

    def _family(
        self, records: _Records, identities: Mapping[bytes, Identity], block_tokens: int | None
    ) -> None:
        """Children must go on where their parents end. Parents are judged first; who hangs on a bad one is not."""
        sound = {key: header for key, (header, _) in records.items() if header.exact}
        children: dict[bytes, list[Header]] = {}
        for header in sound.values():
            if header.parent_key in sound:
                children.setdefault(header.parent_key, []).append(header)
        waiting = [header for header in sound.values() if header.parent_key not in sound]
        bad: set[bytes] = set()
        while waiting:
            above = waiting.pop()
            end = above.start + len(above.tokens) // 4
            for child in children.get(above.key, ()):
                waiting.append(child)
                if above.key in bad:
                    continue
                entry = self._name(child.key)
                if child.identity != above.identity:
                    self._say("parent", entry, "its parent is of another identity", LOST, child.key)
                elif len(above.tokens) // 4 != (block_tokens or len(above.tokens) // 4):
                    self._say("parent", entry, "its parent is not a full block", LOST, child.key)
                elif child.start != end:
                    self._say(
                        "position",
                        entry,
                        f"starts at {child.start}, its parent ends at {end}",
                        LOST,
                        child.key,
                    )
                else:
                    continue
                bad.add(child.key)
        for key in bad:
            del records[key]
        self._whole_prompts(
            [header for header in sound.values() if header.key not in bad], children, identities, records
        )

    def _whole_prompts(
        self,
        headers: list[Header],
        children: Mapping[bytes, list[Header]],
        identities: Mapping[bytes, Identity],
        records: _Records,
    ) -> None:
        """Keys of identities that permit exact reuse only follow from the prompt as a whole."""
        by_key = {header.key: header for header in headers}
        for leaf in headers:
            identity = identities.get(leaf.identity)
            if identity is None or capabilities(identity.layout).reuse != "exact" or children.get(leaf.key):
                continue
            path = [leaf]
            while path[0].parent_key in by_key:
                path.insert(0, by_key[path[0].parent_key])
            if path[0].parent_key != ROOT_KEY:
                continue  # part of it is gone, and the key cannot be made
            ids = np.concatenate([header.token_ids() for header in path])
            seed, key = block_key(leaf.identity, ROOT_KEY, ids), ROOT_KEY
            for header in path:
                key = block_key(seed, key, header.token_ids())
                if header.key != key and header.key in records:
                    found = "does not follow from the prompt that it is of"
                    self._say("key", self._name(header.key), found, LOST, header.key)
                    del records[header.key]


_Records = dict[bytes, tuple[Header, os.stat_result]]


def is_block_size(tokens: int) -> bool:
    """Whether a profile may have blocks of so many tokens."""
    return 1 <= tokens <= 4096 and (tokens <= 16 or tokens % 16 == 0)


def _block_tokens_of(records: _Records) -> int | None:
    """What records say of the size of a block: the length of those that others follow."""
    parents = {header.parent_key for header, _ in records.values() if header.exact}
    lengths = Counter(
        len(header.tokens) // 4 for key, (header, _) in records.items() if key in parents and header.exact
    )
    return lengths.most_common(1)[0][0] if lengths else None


def _said(of: Row | Header) -> tuple[object, ...]:
    return of.identity, of.parent_key, of.start, of.tokens, of.exact


def _sizes(status: os.stat_result, path: Path) -> tuple[int, int]:
    page = max(4096, os.statvfs(path).f_frsize)
    whole = -(-status.st_size // page) * page
    return whole, max(whole, status.st_blocks * 512)


def _files(folder: Path) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except FileNotFoundError:
        return


def _is_hex(name: str, length: int) -> bool:
    return len(name) == length and all(letter in "0123456789abcdef" for letter in name)
