"""Memory that a daemon shares with its clients.

An arena belongs to one tenant, and only clients that opened an identity of it are given it: with the first reply that
names a block in it. Arenas go out as descriptors opened for reading; on Linux they are sealed besides, so that nobody
who holds one can map it for writing by opening it anew, nor change its size under others. A client that writes into its
mapping faults, and nobody else notices. Memory in which a client leaves its KV is its own, can be written, and keeps
its size, so that the daemon never reads past its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvstore.block import Residence
from kvstore.tiers.arena import Arena, shared_file
from kvstore.tiers.tiers import Tiers

from . import wire

_SEAL_FUTURE_WRITE = 0x10  # of fcntl(2); Python does not name it
NOWHERE = (-1, 0)
"""The place of a block that lies in no arena."""


class SharedArenas:
    """The arenas of both memory tiers under one numbering, the hot ones even.

    `retired` is called with the number of each arena that is given up, in any thread; `forget` it then.
    """

    def __init__(self, tiers: Tiers, retired: Callable[[int], None]) -> None:
        self._tiers = (tiers.hot, tiers.warm)
        self._descriptors: dict[int, int] = {}
        for which, tier in enumerate(self._tiers):
            tier.retired = partial(_retired, retired, which)

    def place(self, residence: Residence | None) -> tuple[int, int]:
        """(number of arena, offset)"""
        if residence is None:
            return NOWHERE
        which = self._tiers.index(residence.tier)
        return residence.extent.arena * 2 + which, residence.extent.offset

    def arenas(self, numbers: Sequence[int]) -> list[wire.Arena]:
        """What a client has to know of arenas, in which something is leased to it."""
        return [wire.Arena(number, self._arena(number).size) for number in numbers]

    def descriptors(self, numbers: Sequence[int]) -> list[int]:
        """The caller's own, for reading these. Raises OSError when the process has none left."""
        made: list[int] = []
        try:
            for number in numbers:
                if number not in self._descriptors:
                    arena = self._arena(number)
                    self._descriptors[number] = _for_reading(arena.fd, arena.reading_fd)
                made.append(os.dup(self._descriptors[number]))
        except OSError:
            for descriptor in made:
                os.close(descriptor)
            raise
        return made

    def forget(self, number: int) -> None:
        """An arena was given up."""
        if (descriptor := self._descriptors.pop(number, None)) is not None:
            os.close(descriptor)

    def close(self) -> None:
        for number in list(self._descriptors):
            self.forget(number)

    def _arena(self, number: int) -> Arena:
        return self._tiers[number % 2].arenas[number // 2]


def _retired(tell: Callable[[int], None], which: int, number: int) -> None:
    tell(number * 2 + which)


def _for_reading(descriptor: int, reading: int) -> int:
    """A descriptor of the same memory that cannot be mapped for writing."""
    if reading >= 0:
        return os.dup(reading)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE)
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


class MappedArenas:
    """A client's view of those that it was given."""

    def __init__(self) -> None:
        self._maps: dict[int, mmap.mmap] = {}
        self._bytes: dict[int, NDArray[np.uint8]] = {}

    def add(self, arena: wire.Arena, descriptor: int) -> None:
        """Map one more. Takes the descriptor, and closes it. Raises OSError, ValueError."""
        try:
            mapped = mmap.mmap(descriptor, arena.size, prot=mmap.PROT_READ)
        finally:
            os.close(descriptor)
        self._maps[arena.number] = mapped
        self._bytes[arena.number] = np.frombuffer(mapped, np.uint8)

    def remove(self, number: int) -> None:
        """The daemon gave this one up: unmap it, with the last view."""
        self._bytes.pop(number, None)
        if (mapped := self._maps.pop(number, None)) is not None:
            with contextlib.suppress(BufferError):
                mapped.close()

    def view(self, place: tuple[int, int], nbytes: int) -> NDArray[np.uint8]:
        """`nbytes` bytes at (number of arena, offset), for reading. Raises ValueError for a place that there is not."""
        number, offset = place
        held = self._bytes.get(number)
        if held is None or not 0 <= offset <= len(held) - nbytes:
            raise ValueError(f"no {nbytes} bytes at {offset} in arena {number}")
        return held[offset : offset + nbytes]

    def close(self) -> None:
        """Unmap what no view reads any more."""
        for number in list(self._maps):
            self.remove(number)


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
    """A client's own staging memory, for writing. Takes the descriptor, and closes it.

    The daemon may read what was put from it until it answers the next request. So puts take turns in two halves: the
    reply to one says that the half of the one before is free again.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        try:
            self._map = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.half = size // 2
        self._turn = False

    def next_half(self) -> int:
        """The offset of the half that is free."""
        self._turn = not self._turn
        return self.half * self._turn

    def close(self) -> None:
        self.bytes = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()
