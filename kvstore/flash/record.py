"""The form of a block on flash: one self-describing record, all that is read of it under a checksum.

    preamble   magic, version, header length, xxh3-64 of all that precedes the padding
    header     msgpack: identity, key, parent key, position, token ids, table of frames
    padding    as many zeros as make the file whole pages, which direct writes need; nobody reads them
    frames     one per layer group, in order, each with its own xxh3-64 in the table

A record says by itself what it is, so the index can be rebuilt from records alone. Frames of all layers of a group
lie together: one (block, group) is one contiguous read.

Under a key a record has a version of its own. Header and frames are encrypted, see `encryption`; before the header
stands in clear under which key and salt, and with it are the tags of the frames. Checksums are over what is stored.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from .. import codec
from ..codec import Codec
from ..codec.shape import FrameShape
from ..layout import Layout
from .ciphers import Ciphers
from .encryption import CLEAR_BYTES, ID_BYTES, AlteredError, Cipher, Decryption, OtherKeyError, Sealing
from .flash_file import PAGE, FlashReader

MAGIC = b"NPUKVBLK"
VERSION = 2
ENCRYPTED = 3  # the version of a record under a key
_PREAMBLE = struct.Struct("<8sIIQ")
_MAX_HEADER = 1 << 20


class BadRecordError(Exception):
    """A record that must not be used; `reason` is one of a few words that are counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class NotNowError(BadRecordError):
    """A record that cannot be read for want of file descriptors or memory: there is nothing wrong with it."""


FOREIGN = ("encrypted with another key", "not encrypted")


class ForeignRecordError(BadRecordError):
    """A record that another key opens, or none where one was given: nothing is wrong with it.

    The reason is one of FOREIGN. key_id: of the key that it is under, empty for none.
    """

    def __init__(self, reason: str, detail: str, key_id: bytes) -> None:
        super().__init__(reason, detail)
        self.key_id = key_id


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One layer group: where it starts, the layers [first, end) in it, how they are stored, raw length and checksum.

    form: what `codec` calls it, version included. lengths: of the pieces that are stored one after the other.
    """

    offset: int
    layers: tuple[int, int]
    form: str
    lengths: tuple[int, ...]
    raw_length: int
    checksum: int

    @property
    def length(self) -> int:
        return sum(self.lengths)


class Header(msgspec.Struct, frozen=True, array_like=True):
    """What a record holds. `tokens` are int32 little-endian; frame offsets count from the first frame.

    `exact` as in `Block`.
    """

    identity: bytes
    key: bytes
    parent_key: bytes
    start: int
    tokens: bytes
    exact: bool
    frames: tuple[Frame, ...]

    @property
    def lossless(self) -> bool:
        """Whether it gives back the very bytes that were put."""
        return all(codec.is_lossless(frame.form) for frame in self.frames)

    def token_ids(self) -> NDArray[np.int32]:
        return np.frombuffer(self.tokens, dtype="<i4").astype(np.int32)


class _Sealed(msgspec.Struct, frozen=True, array_like=True):
    """What is encrypted at the start of a record under a key."""

    header: Header
    tags: tuple[bytes, ...]


def encode(
    *,
    identity: bytes,
    key: bytes,
    parent_key: bytes,
    start: int,
    tokens: NDArray[np.int32],
    exact: bool,
    raw: NDArray[np.uint8],
    layout: Layout,
    groups: Sequence[range],
    with_codec: Codec,
    cipher: Cipher | None = None,
) -> tuple[Header, list[bytes | memoryview]]:
    """A record's header, and its pieces, to be written one after the other.

    raw: the block (uint8, in the layout's raw form), of which each of `groups`, contiguous layers, makes one frame.
    cipher: encrypts the record.
    """
    frames: list[Frame] = []
    stored: list[list[bytes | memoryview]] = []
    offset = 0
    for layers in groups:
        shape = FrameShape(layout, layers, len(tokens), start)
        encoded = codec.encode(with_codec, raw[layout.span(layers, len(tokens))], shape)
        frame = Frame(
            offset=offset,
            layers=(layers.start, layers.stop),
            form=encoded.form,
            lengths=tuple(len(piece) for piece in encoded.pieces),
            raw_length=shape.nbytes,
            checksum=0 if cipher is not None else _digest(encoded.pieces),
        )
        frames.append(frame)
        stored.append(encoded.pieces)
        offset += frame.length
    ids = tokens.astype("<i4").tobytes()
    header = Header(identity, key, parent_key, start, ids, exact, tuple(frames))
    if cipher is not None:
        return encrypt(header, stored, cipher)
    return header, assemble(header, [piece for pieces in stored for piece in pieces])


def encrypt(
    header: Header, stored: Sequence[Sequence[bytes | memoryview]], cipher: Cipher
) -> tuple[Header, list[bytes | memoryview]]:
    """A record under a key, like `encode`; `stored` are the pieces of each frame, and checksums are made anew."""
    sealing = cipher.sealing()
    frames, tags = list[Frame](), list[bytes]()
    pieces: list[bytes | memoryview] = []
    for number, (frame, plain) in enumerate(zip(header.frames, stored, strict=True), start=1):
        sealed, tag = sealing.encrypt(number, plain)
        frames.append(msgspec.structs.replace(frame, checksum=_digest(sealed)))
        tags.append(tag)
        pieces += sealed
    header = msgspec.structs.replace(header, frames=tuple(frames))
    packed = msgspec.msgpack.encode(_Sealed(header, tuple(tags)))
    return header, _laid_out(ENCRYPTED, sealing.clear + sealing.seal(0, packed), pieces)


def assemble(header: Header, stored: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """The pieces of a record whose frames are stored as `stored`, one after the other."""
    return _laid_out(VERSION, msgspec.msgpack.encode(header), stored)


def _laid_out(version: int, packed: bytes, stored: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    length = _PREAMBLE.size + len(packed) + sum(len(piece) for piece in stored)
    return [_preamble(version, packed), packed, bytes(-length % PAGE), *stored]


class RecordReader:
    """Reads one record file. The header is checked on opening, each frame when it is read.

    `ciphers` open records of tenants whose keys they are; None opens what is in clear. `ahead`: bytes of the file to
    read at once with the header, since the first frame comes next (see `Row.head_bytes`). Raises BadRecordError for
    anything that is not exactly what was written.
    """

    def __init__(self, path: str | os.PathLike[str], ciphers: Ciphers | None = None, ahead: int = 0) -> None:
        self._ciphers = ciphers
        self._ahead: NDArray[np.uint8] | None = None  # the file's beginning, until the first frame was read
        self.cipher: Cipher | None = None
        """What the record is under."""
        self._sealing: Sealing | None = None
        self._tags: tuple[bytes, ...] = ()
        try:
            self._file = FlashReader(path)
        except FileNotFoundError as error:
            raise BadRecordError("missing", str(path)) from error
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise NotNowError("too many open files or too little memory", str(error)) from error
            raise BadRecordError("unreadable", str(error)) from error
        try:
            self.header, self._frames_start = self._read_header(ahead)
        except BaseException:
            self.close()
            raise
        self.bytes_read = self._frames_start

    @property
    def head_bytes(self) -> int:
        """Of the file, up to the end of the first frame."""
        return self._frames_start + sum(frame.length for frame in self.header.frames[:1])

    def frame(self, number: int, layout: Layout, out: NDArray[np.uint8]) -> None:
        """Read, check and decode layer group `number` into `out` (uint8, raw length)."""
        frame = self.header.frames[number]
        first, end = frame.layers
        tokens = len(self.header.tokens) // 4
        inside = 0 <= first < end <= len(layout.layers)
        shape = FrameShape(layout, range(first, end) if inside else range(1), tokens, self.header.start)
        if not inside or not frame.raw_length == shape.nbytes == len(out):
            raise BadRecordError(
                "shape",
                f"group {number}: layers {first}–{end - 1} in {frame.raw_length} bytes, not {len(out)}",
            )
        try:
            decoder = codec.decoder(frame.form, frame.lengths, shape)
            self.stored(number, decoder.pieces)
            decoder.finish(out)
        except codec.UnknownFormError as error:
            raise BadRecordError("codec", str(error)) from error
        except ValueError as error:
            raise BadRecordError("decode", str(error)) from error

    def stored(self, number: int, pieces: Sequence[NDArray[np.uint8]]) -> None:
        """Fill `pieces` (uint8, of the frame's lengths) with layer group `number` as its codec left it; check it."""
        frame = self.header.frames[number]
        if self._sealing is None:
            self._read_pieces(frame, pieces)
            checksum = _digest([piece.data for piece in pieces])
        else:
            checksum = self._decrypt(frame, self._sealing.decryption(number + 1), self._tags[number], pieces)
        if checksum != frame.checksum:
            raise BadRecordError("frame checksum", f"group {number}")
        self.bytes_read += frame.length
        if number == 0:
            self._ahead = None

    def read(self, layout: Layout, start: int, out: NDArray[np.uint8]) -> None:
        """Fill `out` (uint8) with the block's raw bytes from `start` on, however they are cut into frames."""
        at, stop = 0, start + len(out)
        for number, frame in enumerate(self.header.frames):
            end = at + frame.raw_length
            low, high = max(at, start), min(end, stop)
            if (low, high) == (at, end):
                self.frame(number, layout, out[at - start : end - start])
            elif low < high:  # written with other layer groups than these
                whole = np.empty(frame.raw_length, dtype=np.uint8)
                self.frame(number, layout, whole)
                out[low - start : high - start] = whole[low - at : high - at]
            at = end

    def check_frames(self) -> None:
        """Check every frame's checksum without decoding, in reads as long as they may be."""
        frames = self.header.frames
        chunks = self._chunks(0, sum(frame.length for frame in frames))
        check(chunks, [(frame.length, frame.checksum) for frame in frames])

    def check_frame(self, number: int) -> None:
        """Read layer group `number` and check it without decoding."""
        frame = self.header.frames[number]
        check(self._chunks(frame.offset, frame.length), [(frame.length, frame.checksum)], first=number)

    def padding(self) -> bytes:
        """What lies between header and frames: zeros, as written."""
        return self._read(self._header_end, self._frames_start - self._header_end)

    def close(self) -> None:
        self._file.close()

    def _read_header(self, ahead: int) -> tuple[Header, int]:
        self.status = self._file.status()
        size = self.status.st_size
        begun = np.empty(min(size, max(ahead, PAGE)), np.uint8)
        self._fill([begun], 0, len(begun))
        first = begun[:PAGE].tobytes()
        if len(first) < _PREAMBLE.size:
            raise BadRecordError("truncated", f"{size} bytes")
        magic, version, length, checksum = _PREAMBLE.unpack_from(first)
        if magic != MAGIC:
            raise BadRecordError("magic", repr(magic))
        if version not in (VERSION, ENCRYPTED):
            raise BadRecordError("version", f"{version}, this build reads {VERSION} and {ENCRYPTED}")
        end = _PREAMBLE.size + length
        if length > _MAX_HEADER or end > size:
            raise BadRecordError("truncated", f"header of {length} bytes in a file of {size}")
        body = (first if end <= len(first) else self._read(0, end))[_PREAMBLE.size : end]
        if _checksum(version, body) != checksum:
            raise BadRecordError("header checksum", f"{length} bytes")
        try:
            header = self._header_of(version, body)
        except msgspec.DecodeError as error:
            raise BadRecordError("header", str(error)) from error
        frames = sum(frame.length for frame in header.frames)
        expected = -(-(end + frames) // PAGE) * PAGE
        if size != expected:
            raise BadRecordError(
                "truncated" if size < expected else "size", f"{size} bytes instead of {expected}"
            )
        self._header_end = end
        if len(begun) > PAGE:
            self._ahead = begun
        return header, size - frames

    def _header_of(self, version: int, body: bytes) -> Header:
        """Raises msgspec.DecodeError."""
        key_id = body[:ID_BYTES]
        if version == VERSION:
            header = msgspec.msgpack.decode(body, type=Header)
            if self._ciphers is not None and not self._ciphers.permits(header.identity, None):
                raise ForeignRecordError("not encrypted", "keys are in use", b"")
            return header
        if self._ciphers is None:
            raise ForeignRecordError("encrypted with another key", "no key was given", key_id)
        try:
            self.cipher, self._sealing = self._ciphers.unsealing(body[:CLEAR_BYTES])
            plain = self._sealing.open(0, body[CLEAR_BYTES:])
        except OtherKeyError as error:
            raise ForeignRecordError("encrypted with another key", "its id is not at hand", key_id) from error
        except AlteredError as error:
            raise BadRecordError("authentication", "header") from error
        sealed = msgspec.msgpack.decode(plain, type=_Sealed)
        if len(sealed.tags) != len(sealed.header.frames):
            raise msgspec.DecodeError(f"{len(sealed.tags)} tags of {len(sealed.header.frames)} frames")
        if not self._ciphers.permits(sealed.header.identity, self.cipher):
            raise ForeignRecordError("encrypted with another key", "not its tenant's", key_id)
        self._tags = sealed.tags
        return sealed.header

    def _decrypt(
        self, frame: Frame, decryption: Decryption, tag: bytes, pieces: Sequence[NDArray[np.uint8]]
    ) -> int:
        """Decrypt a frame into `pieces` as it is read; the checksum of what was read, which tells damage from fraud."""
        checksum, left = xxhash.xxh3_64(), frame.length
        pending = [piece for piece in pieces if len(piece)]
        for chunk in self._chunks(frame.offset, frame.length):
            checksum.update(chunk.data)
            left -= len(chunk)
            while len(chunk):
                part = min(len(pending[0]), len(chunk))
                decryption.update(chunk[:part], pending[0][:part])
                chunk, rest = chunk[part:], pending[0][part:]
                pending[:1] = [rest] if len(rest) else []
        if left:
            raise BadRecordError("truncated", f"a frame lacks {left} bytes")
        found = checksum.intdigest()
        if found == frame.checksum:
            try:
                decryption.finish(tag)
            except AlteredError as error:
                raise BadRecordError("authentication", "frame") from error
        return found

    def _chunks(self, offset: int, length: int) -> Iterator[NDArray[np.uint8]]:
        """What there is of `length` bytes of frames from `offset` on, each part good until this thread reads again."""
        at, ahead = self._frames_start + offset, self._ahead
        if ahead is not None and at + length <= len(ahead):
            yield ahead[at : at + length]
            return
        try:
            yield from self._file.chunks(at, length)
        except OSError as error:
            raise BadRecordError("unreadable", str(error)) from error

    def _read_pieces(self, frame: Frame, pieces: Sequence[NDArray[np.uint8]]) -> None:
        """One contiguous read, scattered over the pieces of a frame; none where it was read ahead."""
        at, ahead = self._frames_start + frame.offset, self._ahead
        if ahead is None or at + frame.length > len(ahead):
            self._fill(pieces, at, frame.length)
            return
        for piece in pieces:
            piece[:] = ahead[at : at + len(piece)]
            at += len(piece)

    def _read(self, offset: int, length: int) -> bytes:
        data = np.empty(length, dtype=np.uint8)
        self._fill([data], offset, length)
        return data.tobytes()

    def _fill(self, pieces: Sequence[NDArray[np.uint8]], offset: int, length: int) -> None:
        try:
            count = self._file.read(pieces, offset)
        except OSError as error:
            raise BadRecordError("unreadable", str(error)) from error
        if count != length:
            raise BadRecordError("truncated", f"{count} of {length} bytes at {offset}")


def check(chunks: Iterator[NDArray[np.uint8]], frames: Sequence[tuple[int, int]], first: int = 0) -> None:
    """Raise BadRecordError unless `chunks` are, cut anywhere, frames of these lengths and checksums."""
    chunk = np.empty(0, np.uint8)
    for number, (left, expected) in enumerate(frames, first):
        checksum = xxhash.xxh3_64()
        while left:
            if not len(chunk):
                chunk = next(chunks, chunk)
                if not len(chunk):
                    raise BadRecordError("truncated", f"group {number} lacks {left} bytes")
            part, chunk = chunk[:left], chunk[left:]
            checksum.update(part.data)
            left -= len(part)
        if checksum.intdigest() != expected:
            raise BadRecordError("frame checksum", f"group {number}")


def _preamble(version: int, header: bytes) -> bytes:
    return _PREAMBLE.pack(MAGIC, version, len(header), _checksum(version, header))


def _checksum(version: int, header: bytes) -> int:
    """Over version and length too, so that no bit of the preamble is free."""
    return xxhash.xxh3_64_intdigest(struct.pack("<II", version, len(header)) + header)


def _digest(pieces: Sequence[bytes | memoryview]) -> int:
    checksum = xxhash.xxh3_64()
    for piece in pieces:
        checksum.update(piece)
    return checksum.intdigest()
