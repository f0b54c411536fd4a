"""The pieces of a frame: bytes of a known length each, which are zstd-compressed where that pays.

A piece that is stored shorter than it is, is compressed; nothing else needs to be said about it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

_LEVEL = (
    1  # what shrinks here has few distinct values and no repetitions: higher levels search for them in vain
)
_SAMPLE = 16 * 1024
_WORTH = 0.95  # a piece is compressed only when it shrinks below this share

_decompressors = threading.local()


def pack(piece: NDArray[np.uint8]) -> bytes | memoryview:
    """`piece` (uint8, contiguous) as it is stored. Whether compressing pays is found by a sample."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    sample = piece[:_SAMPLE]
    if len(sample) and len(compressor.compress(sample.data)) < _WORTH * len(sample):
        packed = compressor.compress(piece.data)
        if len(packed) < _WORTH * len(piece):
            return packed
    return piece.data


class StoredPieces:
    """Buffers for the stored pieces of a frame (`buffers`), and what they hold once they are filled (`unpack`).

    stored: their lengths. wholes: arrays (uint8, contiguous) as long as the pieces are when unpacked; one that is
    stored as it is has its array for a buffer. Raises ValueError when lengths or counts do not fit.
    """

    def __init__(self, stored: Sequence[int], wholes: Sequence[NDArray[np.uint8]]) -> None:
        if len(stored) != len(wholes) or any(
            not 0 <= length <= len(whole) for length, whole in zip(stored, wholes, strict=False)
        ):
            lengths = tuple(len(whole) for whole in wholes)
            raise ValueError(f"pieces of {tuple(stored)} bytes do not make {lengths}")
        self._wholes = wholes
        self.buffers = [
            whole if length == len(whole) else np.empty(length, dtype=np.uint8)
            for length, whole in zip(stored, wholes, strict=True)
        ]

    def unpack(self) -> list[NDArray[np.uint8]]:
        """The pieces at their whole lengths. Raises ValueError for one that does not unpack to its length."""
        return [
            buffer if buffer is whole else _unpack(buffer, len(whole))
            for buffer, whole in zip(self.buffers, self._wholes, strict=True)
        ]


def _unpack(buffer: NDArray[np.uint8], length: int) -> NDArray[np.uint8]:
    try:
        if zstandard.frame_content_size(buffer.data) != length:  # what it says is what it allocates
            raise ValueError(f"a piece does not say that it unpacks to {length} bytes")
        return np.frombuffer(_decompressor().decompress(buffer.data), dtype=np.uint8)
    except zstandard.ZstdError as error:
        raise ValueError(f"zstd: {error}") from error


def _decompressor() -> Any:
    """One a thread: making one costs as much as unpacking a small piece."""
    held = getattr(_decompressors, "held", None)
    if held is None:
        held = _decompressors.held = zstandard.ZstdDecompressor()
    return held
