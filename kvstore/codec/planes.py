"""Lossless codec of a flash frame: byte planes, of which those that shrink are zstd-compressed.

The bytes of equal weight of all elements lie together ("planes"). The plane of sign and exponent has few distinct
values and shrinks; the mantissa planes are noise and are stored as they are. On real KV nothing lossless passes
about 1.2x, so the point is to be cheap: planes that do not pay are found by a sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline import kernels

from .pieces import StoredPieces, pack

FORM = "planes/1"


def encode(raw: NDArray[np.uint8], itemsize: int) -> list[bytes | memoryview]:
    """Planes of `raw` (uint8, a multiple of `itemsize` long), lowest byte first."""
    return [pack(plane) for plane in kernels.split_planes(raw.data, itemsize)]


class Decoder:
    """Reads planes of `lengths` stored bytes into `raw_length` bytes; see `codec.Decoder`. Raises ValueError."""

    def __init__(self, lengths: Sequence[int], raw_length: int, itemsize: int) -> None:
        if raw_length % itemsize:
            raise ValueError(f"{raw_length} bytes are no whole number of {itemsize}-byte items")
        self._planes = np.empty((itemsize, raw_length // itemsize), dtype=np.uint8)
        self._rows = list(self._planes)
        self._stored = StoredPieces(lengths, self._rows)
        self.pieces = self._stored.buffers

    def finish(self, out: NDArray[np.uint8]) -> None:
        for row, piece in zip(self._rows, self._stored.unpack(), strict=True):
            if piece is not row:
                row[:] = piece
        kernels.join_planes(self._planes, out)
