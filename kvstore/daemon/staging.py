"""Staging: how KV gets from a client to the daemon.

The client packs what the daemon lacks into memory that both map, in canonical raw form (see `layout`); the daemon
copies it into blocks, with the checks of an embedded put, and makes them findable. A daemon hands out so much of that
memory and no more.
"""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from kvstore.buffer import KvBuffer
from kvstore.pipeline import kernels

from .shared_memory import StagingMemory

_PAGE = 4096
_SHARE = 4

log = logging.getLogger(__name__)


class Grants:
    """The daemon's side: `total` bytes for all clients together."""

    def __init__(self, total: int) -> None:
        self._free = total

    def grant(self, wanted: int) -> StagingMemory | None:
        """As much as is wanted, a fourth of what is free at most, so that there is some left for the next.

        None when that is not even a page. Raises OSError.
        """
        size = min(-(-max(1, wanted) // _PAGE) * _PAGE, self._free // _SHARE // _PAGE * _PAGE)
        if size < _PAGE:
            log.warning("no staging memory left for another client; raise staging_bytes")
            return None
        self._free -= size
        try:
            return StagingMemory(size, self._give_back)
        except BaseException:
            self._free += size
            raise

    def _give_back(self, size: int) -> None:
        self._free += size


def pack(
    kv: KvBuffer, first: int, count: int, slots: NDArray[np.int64] | None, into: NDArray[np.uint8]
) -> None:
    """The client's side: rows first .. first + count of a buffer, or rows slots[first: first + count], in raw form."""
    sources = [
        array
        for pair in zip(kv.keys, kv.values, strict=True)
        for array in pair
        if array is not None  # of a layer without KV
    ]
    if slots is None:
        kernels.collect(sources, into, tokens=count, first=first)
    else:
        kernels.collect(
            sources, into, tokens=count, slots=np.ascontiguousarray(slots[first : first + count], np.int64)
        )
