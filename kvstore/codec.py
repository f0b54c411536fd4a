"""Lossless codec of a flash frame: byte planes, of which those that shrink are zstd-compressed.

The bytes of equal weight of all elements lie together ("planes"). The plane of sign and exponent has few distinct
values and shrinks; the mantissa planes are noise and are stored as they are. On real KV nothing lossless passes
about 1.2x, so the point is to be cheap: planes that do not pay are found by a sample.
"""

from __future__ import annotations

import numpy as np
import zstandard
from numpy.typing import NDArray

from kvstore.pipeline import kernels

_LEVEL = 1
_SAMPLE = 16 * 1024
_WORTH = 0.95  # a plane is compressed only when it shrinks below this share


def encode(raw: NDArray[np.uint8], itemsize: int) -> list[bytes | memoryview]:
    """Planes of `raw` (uint8, a multiple of `itemsize` long), lowest byte first; a shorter one is compressed."""
    compressor = zstandard.ZstdCompressor(level=_LEVEL, write_content_size=True)
    stored: list[bytes | memoryview] = []
    for plane in kernels.split_planes(raw.data, itemsize):
        sample = plane[:_SAMPLE]
        if len(sample) and len(compressor.compress(sample)) < _WORTH * len(sample):
            packed = compressor.compress(plane)
            if len(packed) < _WORTH * len(plane):
                stored.append(packed)
                continue
        stored.append(memoryview(plane))
    return stored


class Decoder:
    """Takes the stored planes of one frame and gives its raw bytes.

    `pieces` are writable buffers, one a plane, to be filled with what was stored, in order: planes that were not
    compressed are read straight to where they are needed. Raises ValueError when lengths do not fit.
    """

    def __init__(self, lengths: tuple[int, ...], raw_length: int) -> None:
        itemsize = len(lengths)
        count = raw_length // itemsize if itemsize else 0
        if count * itemsize != raw_length or itemsize not in (2, 4) or max(lengths) > count:
            raise ValueError(f"planes of {lengths} bytes do not make {raw_length} bytes")
        self._planes = np.empty((itemsize, count), dtype=np.uint8)
        self.pieces = [
            plane if length == count else np.empty(length, dtype=np.uint8)
            for plane, length in zip(self._planes, lengths, strict=True)
        ]

    def finish(self, out: NDArray[np.uint8]) -> None:
        """Decode into `out` (uint8, the raw length), after the caller has checked the checksum.

        Raises ValueError for a plane that does not unpack to its length.
        """
        count = self._planes.shape[1]
        for plane, piece in zip(self._planes, self.pieces, strict=True):
            if len(piece) == count:
                continue
            try:
                unpacked = zstandard.ZstdDecompressor().decompress(piece.data, max_output_size=count)
            except zstandard.ZstdError as error:
                raise ValueError(f"zstd: {error}") from error
            if len(unpacked) != count:
                raise ValueError(f"a plane unpacks to {len(unpacked)} bytes instead of {count}")
            plane[:] = np.frombuffer(unpacked, dtype=np.uint8)
        kernels.join_planes(self._planes, out)
