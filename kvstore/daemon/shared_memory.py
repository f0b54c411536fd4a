"""Memory that a daemon shares with its clients.

Arenas go out as descriptors opened for reading; on Linux they are sealed besides, so that nobody who holds one can map
it for writing by opening it anew, nor change its size under others. A client that writes into its mapping faults, and
nobody else notices. Memory in which a client leaves its KV is its own, can be written, and keeps its size, so that the
daemon never reads past its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.arena import shared_file
from kvstore.block import Residence
from kvstore.tiers import Tiers

from . import wire

_SEAL_FUTURE_WRITE = 0x10  # of fcntl(2); Python does not name it
NOWHERE = (-1, 0)
"""The place of a block that lies in no arena."""


class SharedArenas:
    """The arenas of both memory tiers under one numbering, the hot ones first."""

    def __init__(self, tiers: Tiers) -> None:
        self.arenas: list[wire.Arena] = []
        self.descriptors: list[int] = []
        self._first = {}
        for tier in (tiers.hot, tiers.warm):
            self._first[tier.name] = len(self.arenas)
            for arena in tier.arenas:
                self.arenas.append(wire.Arena(tier.name, arena.size))  # type: ignore[arg-type]
                self.descriptors.append(_for_reading(arena.fd, arena.reading_fd))

    def place(self, residence: Residence | None) -> tuple[int, int]:
        """(number of arena, offset)"""
        if residence is None:
            return NOWHERE
        return self._first[residence.tier.name] + residence.extent.arena, residence.extent.offset

    def descriptors_for_client(self) -> list[int]:
        """The caller's own. Raises OSError when the process has none left."""
        made: list[int] = []
        try:
            for descriptor in self.descriptors:
                made.append(os.dup(descriptor))
        except OSError:
            for descriptor in made:
                os.close(descriptor)
            raise
        return made

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)


def _for_reading(descriptor: int, reading: int) -> int:
    """A descriptor of the same memory that cannot be mapped for writing."""
    if reading >= 0:
        return os.dup(reading)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE)
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class MappedArenas:
    """A client's view of them. Takes the descriptors, and closes them. Raises OSError, ValueError."""

    def __init__(self, arenas: Sequence[wire.Arena], descriptors: Sequence[int]) -> None:
        self._maps: list[mmap.mmap] = []
        try:
            for arena, descriptor in zip(arenas, descriptors, strict=True):
                self._maps.append(mmap.mmap(descriptor, arena.size, prot=mmap.PROT_READ))
        except BaseException:
            self.close()
            raise
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._bytes = [np.frombuffer(mapped, np.uint8) for mapped in self._maps]

    def view(self, place: tuple[int, int], nbytes: int) -> NDArray[np.uint8]:
        """`nbytes` bytes at (number of arena, offset), for reading. Raises ValueError for a place that there is not."""
        number, offset = place
        if not (0 <= number < len(self._bytes) and 0 <= offset <= len(self._bytes[number]) - nbytes):
            raise ValueError(f"no {nbytes} bytes at {offset} in arena {number}")
        return self._bytes[number][offset : offset + nbytes]

    def close(self) -> None:
        """Unmap what no view reads any more."""
        self._bytes = []
        for mapped in self._maps:
            with contextlib.suppress(BufferError):  # goes with the view
                mapped.close()


class StagingMemory:
    """`size` bytes that one client writes and the daemon reads. `closed` is called once, with the size."""

    def __init__(self, size: int, closed: Callable[[int], None]) -> None:
        self.size = size
        self._closed = closed
        self._descriptor, reading = shared_file("kvstore-staging")
        if reading >= 0:
            os.close(reading)
        try:
            os.ftruncate(self._descriptor, size)
            self._map = mmap.mmap(self._descriptor, size)
            if reading < 0:
                seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
                fcntl.fcntl(self._descriptor, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self._descriptor)
            raise
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def take_descriptor(self) -> int:
        """What the client maps; the caller's from now on."""
        descriptor, self._descriptor = self._descriptor, -1
        return descriptor

    def close(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._closed(self.size)


class MappedStaging:
    """A client's own staging memory, for writing. Takes the descriptor, and closes it."""

    def __init__(self, descriptor: int, size: int) -> None:
        try:
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def close(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()
