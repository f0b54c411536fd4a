"""Arenas: a few large contiguous memory areas, registered once, from which blocks get page-aligned extents.

Registering memory with an NPU is slow, so arenas are mapped at start-up and never moved; a block is an
(arena, offset) in one of them. Pages that were never touched cost nothing.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Extent(NamedTuple):
    """`size` bytes at `offset` of arena number `arena`; size is already rounded up to the alignment."""

    arena: int
    offset: int
    size: int


class Arena:
    """`size` bytes of shared memory with a file descriptor that another process or an NPU driver can map."""

    def __init__(self, name: str, size: int, alignment: int, *, pin: bool) -> None:
        self.size = size // alignment * alignment
        self._alignment = alignment
        self.fd, self.reading_fd = shared_file(name)
        try:
            os.ftruncate(self.fd, self.size)
            self._map = mmap.mmap(self.fd, self.size)
        except BaseException:
            self._close_descriptors()
            raise
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, dtype=np.uint8)
        self.pinned = pin and _mlock(self.bytes)
        self._free_from = {0: self.size}  # offset of a free run -> its end, and the reverse, to merge in O(1)
        self._free_to = {self.size: 0}
        self._by_size: list[tuple[int, int]] = [(self.size, 0)]  # sorted: best fit by bisection

    def allocate(self, nbytes: int) -> tuple[int, int] | None:
        """(offset, rounded size) of the smallest free run that holds `nbytes`, or None."""
        size = self.round_up(nbytes)
        place = bisect.bisect_left(self._by_size, (size, 0))
        if place == len(self._by_size):
            return None
        run, offset = self._by_size.pop(place)
        end = offset + run
        del self._free_from[offset]
        if run == size:
            del self._free_to[end]
        else:
            self._free_from[offset + size] = end
            self._free_to[end] = offset + size
            bisect.insort(self._by_size, (run - size, offset + size))
        return offset, size

    def free(self, offset: int, size: int) -> None:
        """Give an extent back; neighbouring free runs merge."""
        start, end = offset, offset + size
        if (left := self._free_to.pop(start, None)) is not None:
            self._forget(left, start - left)
            del self._free_from[left]
            start = left
        if (right := self._free_from.pop(end, None)) is not None:
            self._forget(end, right - end)
            end = right
        self._free_from[start] = end
        self._free_to[end] = start
        bisect.insort(self._by_size, (end - start, start))

    def round_up(self, nbytes: int) -> int:
        return -(-nbytes // self._alignment) * self._alignment

    @property
    def free_runs(self) -> Sequence[tuple[int, int]]:
        """(size, offset) of each."""
        return self._by_size

    @property
    def free_bytes(self) -> int:
        return sum(size for size, _ in self._by_size)

    def close(self) -> None:
        """Unmap when no view is left, and close the descriptor."""
        self.bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):  # a caller still holds a view: the map goes with the view
            self._map.close()
        self._close_descriptors()

    def _close_descriptors(self) -> None:
        for descriptor in (self.fd, self.reading_fd):
            if descriptor >= 0:
                os.close(descriptor)

    def _forget(self, offset: int, size: int) -> None:
        place = bisect.bisect_left(self._by_size, (size, offset))
        del self._by_size[place]


def shared_file(name: str) -> tuple[int, int]:
    """Memory that others can map: a memfd on Linux, unnamed POSIX shared memory elsewhere.

    Returns its descriptor, and one for reading only, -1 where the first can be opened anew for that.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), -1
    import _posixshmem  # what multiprocessing.shared_memory stands on

    path = f"/{name}-{os.getpid()}-{os.urandom(4).hex()}"
    fd = int(_posixshmem.shm_open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600))
    reading = int(_posixshmem.shm_open(path, os.O_RDONLY, mode=0o600))
    _posixshmem.shm_unlink(path)
    return fd, reading


_MLOCK_ONFAULT = 1


def _mlock(area: NDArray[np.uint8]) -> bool:
    """Keep pages in RAM from their first touch on. False where RLIMIT_MEMLOCK or the OS does not allow it."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        address, length = ctypes.c_void_p(area.ctypes.data), ctypes.c_size_t(area.nbytes)
        return int(libc.mlock2(address, length, ctypes.c_uint(_MLOCK_ONFAULT))) == 0
    except (OSError, AttributeError):
        return False
