"""A tier in memory (hot or warm): a budget of arenas from which blocks get extents.

Accounting invariant, checked by `check()`: free + used = total, at every step. Bytes of a block that is still
being copied in count from the moment their extent is handed out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .arena import Arena, Extent

_PAGE = 4096


class MemoryTier:
    """`budget` bytes in arenas of at most `arena_bytes` each; never more is handed out than the budget.

    Not thread-safe: the store calls it under its lock. Bytes are read and written through `view` outside it.
    """

    def __init__(self, name: str, budget: int, *, arena_bytes: int, alignment: int, pin: bool) -> None:
        self.name = name
        self._arenas: list[Arena] = []
        left = budget
        while left >= alignment:
            size = min(left, arena_bytes)
            self._arenas.append(Arena(f"kvstore-{name}", size, alignment, pin=pin))
            left -= self._arenas[-1].size
        self.total = sum(arena.size for arena in self._arenas)
        self.used = 0
        self._known = [0] * len(self._arenas)  # where the pages end that the system has found

    @property
    def arenas(self) -> Sequence[Arena]:
        """By the numbers that extents name."""
        return self._arenas

    @property
    def free(self) -> int:
        return sum(arena.free_bytes for arena in self._arenas)

    @property
    def pinned(self) -> bool:
        """Whether the OS agreed to keep the tier in RAM."""
        return all(arena.pinned for arena in self._arenas)

    @property
    def largest_arena(self) -> int:
        """The most bytes one block can have here."""
        return max((arena.size for arena in self._arenas), default=0)

    def allocate(self, nbytes: int) -> Extent | None:
        """An extent of at least `nbytes`, or None when no free run is long enough."""
        for number, arena in enumerate(self._arenas):
            if (place := arena.allocate(nbytes)) is not None:
                self.used += place[1]
                self._known[number] = max(self._known[number], sum(place))
                return Extent(number, *place)
        return None

    def release(self, extent: Extent) -> None:
        self._arenas[extent.arena].free(extent.offset, extent.size)
        self.used -= extent.size

    def view(self, extent: Extent, nbytes: int) -> NDArray[np.uint8]:
        """The first `nbytes` of an extent, writable, uint8."""
        return self._arenas[extent.arena].bytes[extent.offset : extent.offset + nbytes]

    def touch_ahead(self, nbytes: int) -> None:
        """Have the system find pages for the next `nbytes` that are handed out, so that no caller waits for that.

        Only reads, so it needs no lock: on the first read of shared memory, a page is made as on the first write.
        """
        for number, arena in enumerate(self._arenas):
            known = sum(self._known) - self.used  # that nobody uses
            start = self._known[number]
            end = min(arena.size, start + nbytes - known)
            if end > start:
                arena.bytes[start:end:_PAGE].max(initial=0)
                self._known[number] = max(self._known[number], end)

    def lacks_touched(self, nbytes: int) -> bool:
        """Whether `touch_ahead` has something to do: fewer bytes are ready for who asks next."""
        known = sum(self._known)
        return known < self.total and known - self.used < nbytes

    def handle(self, extent: Extent) -> tuple[int, int]:
        """(file descriptor, offset) under which another process or a device maps this extent."""
        return self._arenas[extent.arena].fd, extent.offset

    def check(self) -> None:
        """Raise AssertionError unless free + used = total."""
        if self.free + self.used != self.total:
            raise AssertionError(f"{self.name}: free {self.free} + used {self.used} != total {self.total}")

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()
