"""Puts all that lies in a data directory under another key, or under a first one.

Some records at a time: written anew, forced to the medium, named; only then the old ones go. So each is whole under
one key or the other whenever this stops, and the next run goes on. Records that no given key opens, or that are
damaged, stay. Nothing is decoded, so KV comes out bit by bit as it was, whatever its codec.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec
import numpy as np
import xxhash

from kvstore import cold_index, encryption, flash_file, pins, record
from kvstore.cold import ColdTier
from kvstore.directory import SCRATCH, DataDirectory, pins_name, record_name, take_lock
from kvstore.encryption import AlteredError, Cipher, Key, OtherKeyError
from kvstore.record import BadRecordError, ForeignRecordError, Header, RecordReader

_UNLIMITED = 1 << 62  # bytes: nothing is evicted
_GROUP = 32 << 20  # bytes of records that are there twice at a time
_VECTORS_DIGEST = 16  # bytes before the content, see `index.vector_file`


class Rotated(msgspec.Struct, frozen=True):
    """Records put under the new key, those that were already, and those that stay: of another key, or damaged."""

    records: int
    already: int
    left: int


def rotate_key_file(path: Path, key_file: Path, block_tokens: int) -> Rotated:
    """Make a new key, put a directory that nobody has open under it, and have it take the old one's place.

    What is not encrypted is, from then on, and a key file that does not exist is made. A run that was stopped goes on,
    with the key that it had made; until then the file's key is not given out, see `Key.of_file`. Raises
    EncryptionError, DirectoryInUseError, DirectoryUnusableError, OSError (disk full).
    """
    old = encryption.read(key_file) if key_file.exists() else None
    fresh = key_file.with_name(key_file.name + encryption.NEXT)
    if not fresh.exists():
        os.close(take_lock(path))  # where nothing can be rotated, no key waits for it
        Key.generate().write(fresh)
    done = rotate(path, old, encryption.read(fresh), block_tokens)
    encryption.replace(key_file, fresh)
    return done


def rotate(path: Path, old: Key | None, new: Key, block_tokens: int) -> Rotated:
    """Put under `new` what is under `old`, and what is not encrypted. Nobody else may have the directory open."""
    ciphers: list[Cipher | None] = [None] if old is None else [Cipher(old), None]
    directory = DataDirectory(path, block_tokens, Cipher(new))
    try:
        directory.index.mkdir(exist_ok=True)
        rows = cold_index.read(directory.index, directory.cipher)[1]
        for cipher in ciphers:
            rows = cold_index.read(directory.index, cipher)[1] | rows
        done = _records(directory, ciphers)
        cold = ColdTier(directory, _UNLIMITED, block_tokens)
        known = ((row, rows.get(key, row)) for key, row in cold.rows.items())
        cold.close([msgspec.structs.replace(row, hits=was.hits, last_use=was.last_use) for row, was in known])
        for cipher in ciphers:
            _pins(directory, cipher)
            for file in cold_index.index_files(directory.index, cipher):
                file.unlink()
        for file in (path / "identities").glob("*.vectors"):
            _vectors(file, ciphers, directory.cipher)
        return done
    finally:
        directory.close()


def _records(directory: DataDirectory, ciphers: list[Cipher | None]) -> Rotated:
    assert directory.cipher is not None
    moved = already = left = 0
    group, nbytes = list[tuple[Path, Path]](), 0
    for name in sorted(os.listdir(directory.blocks)):
        file = directory.blocks / name
        if name.endswith(SCRATCH):
            continue
        try:
            RecordReader(file, directory.cipher).close()
            already += 1
            continue
        except ForeignRecordError:
            pass
        except BadRecordError:
            left += 1
            continue
        target = _written_anew(directory, file, ciphers)
        if target is None:
            left += 1
            continue
        moved += 1
        group.append((file, target))
        nbytes += file.stat().st_size
        if nbytes >= _GROUP:
            _replace(directory, group)
            group, nbytes = [], 0
    _replace(directory, group)
    return Rotated(moved, already, left)


def _written_anew(directory: DataDirectory, file: Path, ciphers: list[Cipher | None]) -> Path | None:
    """The file that a record under one of `ciphers` is to be, written under a temporary name; None for any other."""
    assert directory.cipher is not None
    for cipher in ciphers:
        try:
            header, stored = _stored(file, cipher)
        except BadRecordError:
            continue
        if file.name == record_name(header.key, cipher):
            target = directory.block_file(header.key)
            _, pieces = record.encrypt(header, stored, directory.cipher)
            flash_file.write(target.with_suffix(SCRATCH), pieces)
            status = file.stat()
            os.utime(target.with_suffix(SCRATCH), ns=(status.st_atime_ns, status.st_mtime_ns))
            return target
    return None


def _replace(directory: DataDirectory, group: list[tuple[Path, Path]]) -> None:
    """Have what was written anew take the place of what it was made of."""
    for _, target in group:
        scratch = target.with_suffix(SCRATCH)
        flash_file.sync(scratch)
        scratch.rename(target)
    encryption.sync_folder(directory.blocks)
    for file, _ in group:
        file.unlink()
    encryption.sync_folder(directory.blocks)


def _stored(file: Path, cipher: Cipher | None) -> tuple[Header, list[list[bytes | memoryview]]]:
    """A record's header, and the pieces of each frame as its codec left them. Raises BadRecordError."""
    reader = RecordReader(file, cipher)
    try:
        stored: list[list[bytes | memoryview]] = []
        for number, frame in enumerate(reader.header.frames):
            pieces = [np.empty(length, np.uint8) for length in frame.lengths]
            reader.stored(number, pieces)
            stored.append([piece.data for piece in pieces])
        return reader.header, stored
    finally:
        reader.close()


def _pins(directory: DataDirectory, cipher: Cipher | None) -> None:
    source = directory.path / pins_name(cipher)
    if not source.exists() or source == directory.pins:
        return
    with contextlib.suppress(ValueError):  # damaged: they are of no use
        both = {*pins.read(directory.pins, directory.cipher), *pins.check(source, cipher)}
        pins.write(directory.pins, both, directory.cipher)
    source.unlink()


def _vectors(file: Path, ciphers: list[Cipher | None], new: Cipher | None) -> None:
    """Vectors can be made anew: those that are damaged, or of another key, go."""
    assert new is not None
    content = file.read_bytes()[_VECTORS_DIGEST:]
    for each in (new, *ciphers):
        with contextlib.suppress(OtherKeyError, AlteredError):
            plain = content if each is None else each.open(content)
            if each is not new:
                sealed = new.seal(plain)
                scratch = file.with_name(file.name + SCRATCH)
                scratch.write_bytes(xxhash.xxh3_128_digest(sealed) + sealed)
                scratch.replace(file)
            return
