"""The form of a block on flash: one self-describing record, every byte of which a checksum covers.

    preamble   magic, version, header length, xxh3-64 of all that precedes the frames
    header     msgpack: identity, key, parent key, position, token ids, table of frames
    frames     one per layer group, in order, each with its own xxh3-64 in the table

A record says by itself what it is, so the index can be rebuilt from records alone. Frames of all layers of a group
lie together: one (block, group) is one contiguous read.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from . import codec

MAGIC = b"NPUKVBLK"
VERSION = 1
_PREAMBLE = struct.Struct("<8sIIQ")
_MAX_HEADER = 1 << 20


class BadRecordError(Exception):
    """A record that must not be used; `reason` is one of a few words that are counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class NotNowError(BadRecordError):
    """A record that cannot be read for want of file descriptors or memory: there is nothing wrong with it."""


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One layer group: where it starts in the file, its planes' stored lengths, its raw length and checksum."""

    offset: int
    plane_lengths: tuple[int, ...]
    raw_length: int
    checksum: int

    @property
    def length(self) -> int:
        return sum(self.plane_lengths)


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What a record holds. `tokens` are int32 little-endian; frame offsets count from the end of the header.

    `exact` as in `Block`.
    """

    identity: bytes
    key: bytes
    parent_key: bytes
    start: int
    tokens: bytes
    exact: bool
    frames: tuple[Frame, ...]

    def token_ids(self) -> NDArray[np.int32]:
        return np.frombuffer(self.tokens, dtype="<i4").astype(np.int32)


def encode(
    *,
    identity: bytes,
    key: bytes,
    parent_key: bytes,
    start: int,
    tokens: NDArray[np.int32],
    exact: bool,
    groups: Sequence[NDArray[np.uint8]],
    itemsize: int,
) -> list[bytes | memoryview]:
    """The pieces of a record, to be written one after the other. `groups` are the raw bytes of each layer group."""
    frames: list[Frame] = []
    pieces: list[bytes | memoryview] = []
    offset = 0
    for raw in groups:
        planes = codec.encode(raw, itemsize)
        checksum = xxhash.xxh3_64()
        for plane in planes:
            checksum.update(plane)
        frame = Frame(offset, tuple(len(plane) for plane in planes), len(raw), checksum.intdigest())
        frames.append(frame)
        pieces += planes
        offset += frame.length
    header = msgspec.msgpack.encode(
        Header(identity, key, parent_key, start, tokens.astype("<i4").tobytes(), exact, tuple(frames))
    )
    return [_preamble(header), header, *pieces]


class RecordReader:
    """Reads one record file. The header is checked on opening, each frame when it is read.

    Raises BadRecordError for anything that is not exactly what was written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise BadRecordError("missing", str(path)) from error
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise NotNowError("too many open files or too little memory", str(error)) from error
            raise BadRecordError("unreadable", str(error)) from error
        try:
            self.header, self._frames_start = self._read_header()
        except BaseException:
            self.close()
            raise
        self.bytes_read = self._frames_start

    def frame(self, number: int, out: NDArray[np.uint8]) -> None:
        """Read, check and decode layer group `number` into `out` (uint8, raw length)."""
        frame = self.header.frames[number]
        if frame.raw_length != len(out):
            raise BadRecordError(
                "shape", f"group {number} has {frame.raw_length} bytes, layout has {len(out)}"
            )
        try:
            decoder = codec.Decoder(frame.plane_lengths, frame.raw_length)
            self._read_pieces(frame, decoder.pieces)
            checksum = xxhash.xxh3_64()
            for piece in decoder.pieces:
                checksum.update(piece.data)
            if checksum.intdigest() != frame.checksum:
                raise BadRecordError("frame checksum", f"group {number}")
            decoder.finish(out)
        except ValueError as error:
            raise BadRecordError("decode", str(error)) from error
        self.bytes_read += frame.length

    def read(self, start: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` (uint8) with the block's raw bytes from `start` on, however they are cut into frames."""
        at, stop = 0, start + len(out)
        for number, frame in enumerate(self.header.frames):
            end = at + frame.raw_length
            low, high = max(at, start), min(end, stop)
            if (low, high) == (at, end):
                self.frame(number, out[at - start : end - start])
            elif low < high:  # written with other layer groups than these
                whole = np.empty(frame.raw_length, dtype=np.uint8)
                self.frame(number, whole)
                out[low - start : high - start] = whole[low - at : high - at]
            at = end

    def check_frames(self) -> None:
        """Check every frame's checksum without decoding."""
        for number, frame in enumerate(self.header.frames):
            stored = self._read(self._frames_start + frame.offset, frame.length)
            if xxhash.xxh3_64_intdigest(stored) != frame.checksum:
                raise BadRecordError("frame checksum", f"group {number}")

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _read_header(self) -> tuple[Header, int]:
        self.status = os.fstat(self._fd)
        size = self.status.st_size
        first = self._read(0, min(size, 4096))
        if len(first) < _PREAMBLE.size:
            raise BadRecordError("truncated", f"{size} bytes")
        magic, version, length, checksum = _PREAMBLE.unpack_from(first)
        if magic != MAGIC:
            raise BadRecordError("magic", repr(magic))
        if version != VERSION:
            raise BadRecordError("version", f"{version}, this build reads {VERSION}")
        end = _PREAMBLE.size + length
        if length > _MAX_HEADER or end > size:
            raise BadRecordError("truncated", f"header of {length} bytes in a file of {size}")
        body = (first if end <= len(first) else self._read(0, end))[_PREAMBLE.size : end]
        if _checksum(body) != checksum:
            raise BadRecordError("header checksum", f"{length} bytes")
        try:
            header = msgspec.msgpack.decode(body, type=Header)
        except msgspec.DecodeError as error:
            raise BadRecordError("header", str(error)) from error
        expected = end + sum(frame.length for frame in header.frames)
        if size != expected:
            raise BadRecordError(
                "truncated" if size < expected else "size", f"{size} bytes instead of {expected}"
            )
        return header, end

    def _read_pieces(self, frame: Frame, pieces: Sequence[NDArray[np.uint8]]) -> None:
        """One contiguous read, scattered over the pieces of a frame."""
        offset = self._frames_start + frame.offset
        try:
            count = os.preadv(self._fd, [piece.data for piece in pieces], offset)
        except OSError as error:
            raise BadRecordError("unreadable", str(error)) from error
        if count != frame.length:  # regular files below 2 GiB are read whole
            raise BadRecordError("truncated", f"{count} of {frame.length} bytes at {offset}")

    def _read(self, offset: int, length: int) -> bytes:
        try:
            data = os.pread(self._fd, length, offset)
        except OSError as error:
            raise BadRecordError("unreadable", str(error)) from error
        if len(data) != length:
            raise BadRecordError("truncated", f"{len(data)} of {length} bytes at {offset}")
        return data


def _preamble(header: bytes) -> bytes:
    return _PREAMBLE.pack(MAGIC, VERSION, len(header), _checksum(header))


def _checksum(header: bytes) -> int:
    """Over version and length too, so that no bit of the preamble is free."""
    return xxhash.xxh3_64_intdigest(struct.pack("<II", VERSION, len(header)) + header)
