"""Vectors of blocks in one file, so that a restart need not embed again what is still held.

A file is the xxh3-128 of the rest, then one msgpack map: format, the embedder's name and digest, dimension, the
keys of the blocks and their vectors as float16, little-endian, row by row. It takes its name when it is complete
and on the medium. One that is damaged, or whose vectors another embedder made, is not used; nothing else follows
from that, as every vector can be computed again. Who keeps it may have the map encrypted.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

_FORMAT = 1
_DIGEST_BYTES = 16


class Cipher(Protocol):
    """Encrypts a file. `open` raises an exception of its own for what `seal` did not give."""

    def seal(self, plain: bytes) -> bytes: ...
    def open(self, stored: bytes) -> bytes: ...


class _Contents(msgspec.Struct, frozen=True):
    format: int
    embedder: str
    embedder_digest: str
    dimension: int
    keys: list[bytes]
    vectors: bytes


class Opened(NamedTuple):
    """What a file held: vectors float16 [dimension] by key. `state`: "new", "whole", or "rebuilt: " and why."""

    state: str
    vectors: dict[bytes, NDArray[np.float16]]


def read(path: Path, embedder_digest: str, cipher: Cipher | None = None) -> Opened:
    """All of the file at `path`, or nothing of it. Raises no error whatever is there."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Opened("new", {})
    except OSError as error:
        return Opened(f"rebuilt: {path.name} cannot be read ({error.strerror})", {})
    if xxhash.xxh3_128_digest(memoryview(data)[_DIGEST_BYTES:]) != data[:_DIGEST_BYTES]:
        return Opened(f"rebuilt: {path.name} is damaged", {})
    plain = data[_DIGEST_BYTES:]
    if cipher is not None:
        try:
            plain = cipher.open(plain)
        except Exception:  # of a kind that only the cipher knows
            return Opened(f"rebuilt: {path.name} is of another key", {})
    try:
        contents = msgspec.msgpack.decode(plain, type=_Contents)
    except msgspec.DecodeError:
        return Opened(f"rebuilt: {path.name} is of another format", {})
    if contents.format != _FORMAT:
        return Opened(f"rebuilt: {path.name} is of format {contents.format}, this is {_FORMAT}", {})
    if contents.embedder_digest != embedder_digest:
        made = f"{contents.embedder} {contents.embedder_digest[:12]}"
        return Opened(f"rebuilt: vectors are of another embedder, {made}", {})
    if len(contents.vectors) != 2 * contents.dimension * len(contents.keys):
        return Opened(f"rebuilt: {path.name} contradicts itself", {})
    rows = np.frombuffer(contents.vectors, "<f2").reshape(len(contents.keys), contents.dimension)
    return Opened("whole", dict(zip(contents.keys, rows, strict=True)))


def size(blocks: int, dimension: int) -> int:
    """Bytes that a file of so many vectors and keys of 32 bytes does not exceed."""
    return 4096 + blocks * (2 * dimension + 40)


def write(
    path: Path,
    embedder: str,
    embedder_digest: str,
    keys: Sequence[bytes],
    vectors: NDArray[np.float16],
    cipher: Cipher | None = None,
) -> int:
    """Replace the file at `path` by `vectors` [n, dimension] of n `keys`; returns its bytes.

    Raises OSError (disk full); the old file stays then.
    """
    contents = _Contents(
        _FORMAT,
        embedder,
        embedder_digest,
        vectors.shape[1],
        list(keys),
        np.ascontiguousarray(vectors, "<f2").tobytes(),
    )
    data = msgspec.msgpack.encode(contents)
    if cipher is not None:
        data = cipher.seal(data)
    scratch = path.with_name(path.name + ".tmp")
    try:
        with scratch.open("wb") as file:
            file.write(xxhash.xxh3_128_digest(data))
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    return _DIGEST_BYTES + len(data)
