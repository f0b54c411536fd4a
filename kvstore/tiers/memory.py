"""A tier in memory (hot or warm): a budget of arenas from which blocks get extents.

Without walls all arenas are made at once and serve everybody. With walls (a daemon's) an arena belongs to one owner:
it is made when he needs room, and when he has left it empty and another owner needs the room, it is filled with zeros
and given up. No memory ever goes from one owner to another, so who was given an arena never sees anything else in it.

Accounting invariant, checked by `check()`: free + used = total, at every step. Bytes of a block that is still
being copied in count from the moment their extent is handed out.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from .arena import Arena, Extent

_PAGE = 4096
_MOST_ARENAS = 8  # of a walled tier, about: a tenant gets memory in eighths of the budget

log = logging.getLogger(__name__)


def _nobody(_: int) -> None:
    """Nobody asks which arenas were given up."""


class MemoryTier:
    """`budget` bytes in arenas of at most `arena_bytes` each; never more is handed out than the budget.

    walled: arenas have owners; then each has about an eighth of the budget, in whole blocks. most_arenas: how many of
    them there are at a time, for all owners together, where a device counts its pinned buffers; then each has as large
    a part of the budget. None sets no limit. Not thread-safe: the store calls it under its lock. Bytes are read and
    written through `view` outside it.
    """

    def __init__(
        self,
        name: str,
        budget: int,
        *,
        arena_bytes: int,
        alignment: int,
        pin: bool,
        walled: bool = False,
        most_arenas: int | None = None,
    ) -> None:
        self.name = name
        self.walled = walled
        self.retired: Callable[[int], None] = _nobody
        """Called with the number of an arena that was given up."""
        self.total = budget // alignment * alignment
        self.used = 0
        self.used_by = Counter[bytes]()
        """The same by owner."""
        self._alignment = alignment
        self._most_arenas = most_arenas
        self._arena_bytes = arena_bytes // alignment * alignment
        self._share = min(self._arena_bytes, -(-budget // min(_MOST_ARENAS, most_arenas or _MOST_ARENAS)))
        self._pin = pin
        self._arenas: dict[int, Arena] = {}
        self._owners: dict[int, bytes] = {}
        self._known: dict[int, int] = {}  # where the pages end that the system has found
        self._last = -1
        self._unmade = self.total  # bytes of the budget in no arena
        while not walled and self._unmade:
            self._make(b"", min(self._unmade, arena_bytes))

    @property
    def arenas(self) -> Mapping[int, Arena]:
        """By the numbers that extents name; a number never comes again."""
        return self._arenas

    def owner(self, number: int) -> bytes:
        """Whose arena it is."""
        return self._owners[number]

    @property
    def free(self) -> int:
        return self._unmade + sum(arena.free_bytes for arena in self._arenas.values())

    @property
    def pinned(self) -> bool:
        """Whether the OS agreed to keep the tier in RAM."""
        return all(arena.pinned for arena in self._arenas.values())

    @property
    def largest_arena(self) -> int:
        """The most bytes one block can have here."""
        if self.walled:
            return min(self.total, self._arena_bytes)
        return max((arena.size for arena in self._arenas.values()), default=0)

    def owned(self) -> Counter[bytes]:
        """Bytes of the arenas that each owner has."""
        found = Counter[bytes]()
        for number, arena in self._arenas.items():
            found[self._owners[number]] += arena.size
        return found

    def allocate(self, nbytes: int, owner: bytes = b"", unit: int = 1) -> Extent | None:
        """An extent of at least `nbytes`, or None when there is no free run so long in an arena of `owner`, nor room
        to make him one. unit: bytes of the blocks that will fill it.
        """
        for number, arena in self._arenas.items():
            if self._owners[number] == owner and (extent := self._in(number, arena, nbytes)) is not None:
                return extent
        if not self.walled or nbytes > self.largest_arena:
            return None
        unit, needed = self.round_up(unit), self.round_up(nbytes)
        wanted = max(needed, min(-(-self._share // unit) * unit, self._arena_bytes))
        for number in list(self._arenas):
            if self._may_make(needed):
                break
            if self.is_empty(number):
                self._retire(number)
        if not self._may_make(needed):
            return None
        try:
            number = self._make(owner, min(self._unmade, wanted))
        except OSError as error:  # no descriptor left
            log.warning("no arena was made: %s", error)
            return None
        return self._in(number, self._arenas[number], nbytes)

    def release(self, extent: Extent) -> None:
        self._arenas[extent.arena].free(extent.offset, extent.size)
        self._count(extent.arena, -extent.size)

    def view(self, extent: Extent, nbytes: int) -> NDArray[np.uint8]:
        """The first `nbytes` of an extent, writable, uint8."""
        return self._arenas[extent.arena].bytes[extent.offset : extent.offset + nbytes]

    def wipe(self, extent: Extent) -> None:
        """Leave nothing of what was written to an extent."""
        written = self._known[extent.arena] - extent.offset  # the rest was never handed out
        self.view(extent, max(0, min(extent.size, written)))[:] = 0

    def take_free(self, number: int) -> list[Extent]:
        """All that is free in an arena, as extents to be released; none when it was given up."""
        taken = []
        if (arena := self._arenas.get(number)) is not None:
            for size, _ in list(arena.free_runs):
                place = arena.allocate(size)
                assert place is not None
                self._count(number, place[1])
                taken.append(Extent(number, *place))
        return taken

    def round_up(self, nbytes: int) -> int:
        """What `nbytes` occupy."""
        return -(-nbytes // self._alignment) * self._alignment

    def is_empty(self, number: int) -> bool:
        arena = self._arenas[number]
        return arena.free_bytes == arena.size

    def touch_ahead(self, nbytes: int) -> None:
        """Have the system find pages for the next `nbytes` that are handed out, so that no caller waits for that.

        Only reads, so it needs no lock: on the first read of shared memory, a page is made as on the first write.
        """
        for number, arena in list(self._arenas.items()):
            known = sum(list(self._known.values())) - self.used  # that nobody uses
            start = self._known.get(number, arena.size)
            end = min(arena.size, start + nbytes - known)
            if end > start:
                arena.bytes[start:end:_PAGE].max(initial=0)
                if number in self._known:
                    self._known[number] = max(self._known[number], end)

    def lacks_touched(self, nbytes: int) -> bool:
        """Whether `touch_ahead` has something to do: fewer bytes are ready for who asks next."""
        known = sum(self._known.values())
        return known < self.total - self._unmade and known - self.used < nbytes

    def handle(self, extent: Extent) -> tuple[int, int]:
        """(file descriptor, offset) under which another process or a device maps this extent."""
        return self._arenas[extent.arena].fd, extent.offset

    def check(self) -> None:
        """Raise AssertionError unless free + used = total."""
        if self.used != self.used_by.total():
            raise AssertionError(f"{self.name}: used {self.used}, by owners {self.used_by.total()}")
        if self.free + self.used != self.total:
            raise AssertionError(f"{self.name}: free {self.free} + used {self.used} != total {self.total}")

    def close(self) -> None:
        for arena in self._arenas.values():
            arena.close()

    def _may_make(self, nbytes: int) -> bool:
        """Whether an arena of `nbytes` keeps to the budget, and to the number of arenas."""
        return self._unmade >= nbytes and len(self._arenas) < (self._most_arenas or len(self._arenas) + 1)

    def _count(self, number: int, nbytes: int) -> None:
        self.used += nbytes
        self.used_by[self._owners[number]] += nbytes

    def _in(self, number: int, arena: Arena, nbytes: int) -> Extent | None:
        place = arena.allocate(nbytes)
        if place is None:
            return None
        self._count(number, place[1])
        self._known[number] = max(self._known[number], sum(place))
        extent = Extent(number, *place)
        self.view(extent, extent.size)[nbytes:] = 0  # where the block leaves what another one left
        return extent

    def _make(self, owner: bytes, size: int) -> int:
        """A new arena's number. Raises OSError."""
        arena = Arena(f"kvstore-{self.name}", size, self._alignment, pin=self._pin)
        self._last = number = self._last + 1
        self._arenas[number], self._owners[number], self._known[number] = arena, owner, 0
        self._unmade -= arena.size
        return number

    def _retire(self, number: int) -> None:
        """Give an empty arena up. Who mapped it sees zeros, for as long as he keeps it mapped."""
        arena = self._arenas[number]
        self.wipe(Extent(number, 0, arena.size))
        self._unmade += arena.size
        del self._arenas[number], self._owners[number], self._known[number]
        arena.close()
        self.retired(number)
