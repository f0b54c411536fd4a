"""What followed what: for each block, which ones were used soon after it, as a small table of decaying counts.

A request shows the blocks that it uses in order: its prefix from the root, then what was found elsewhere. Of these the
new ones count, which the request before did not use; each is noted as a follower of the few before it, over the border
of requests too. So the table learns what belongs together (tools of one task, parts of one document) and what comes
next (the notes that are opened after the calendar), and a walk through it from what is in use now tells what to expect:
along a path, chances multiply.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

ROWS = 4096
"""Blocks whose followers are kept, those seen last: some 3 MB with `WIDE` followers each."""

WIDE = 8
"""Followers of a block that are kept, the most frequent ones."""

_WINDOW = 2  # a block is noted as a follower of so many before it
_MEMORY = 16.0  # sightings after which old ones count half
_DOUBT = 1.0  # what was seen once may be chance: sightings added to the denominator


class Followers:
    """Bounded: `rows` blocks with `wide` followers each. Not for several threads at once."""

    def __init__(self, rows: int = ROWS, wide: int = WIDE) -> None:
        self._rows = rows
        self._wide = wide
        self._seen: OrderedDict[int, float] = (
            OrderedDict()
        )  # how often a block was seen, those seen last at the end
        self._after: dict[int, dict[int, float]] = {}
        self._request: frozenset[int] = frozenset()
        self._last: list[int] = []

    def __len__(self) -> int:
        return len(self._seen)

    def learn(self, request: Sequence[int]) -> None:
        """A request used these blocks, in this order."""
        new = [block for block in dict.fromkeys(request) if block not in self._request]
        for block in new:
            for before in self._last:
                self._note(before, block)
            self._see(block)
            self._last = [*self._last, block][-_WINDOW:]
        self._request = frozenset(request)

    def expect(self, starts: Mapping[int, float], least: float, most: int = 64) -> dict[int, float]:
        """What may follow blocks that are needed with these chances, likeliest first, and how likely: at least `least`.

        At most `most` blocks, none of `starts`.
        """
        found: dict[int, float] = {}
        heap = [(-chance, block) for block, chance in starts.items()]
        heap.sort()
        reached: dict[int, float] = dict(starts)
        while heap and len(found) < most:
            negative, block = heappop(heap)
            chance = -negative
            if chance < reached.get(block, 0.0):
                continue  # was reached on a better way
            if block not in starts:
                found[block] = chance
            times = self._seen.get(block, 0.0) + _DOUBT
            for follower, count in self._after.get(block, {}).items():
                through = chance * min(1.0, count / times)
                if through >= least and through > reached.get(follower, 0.0):
                    reached[follower] = through
                    heappush(heap, (-through, follower))
        return found

    def forget(self, block: int) -> None:
        """A block is gone for good."""
        self._seen.pop(block, None)
        self._after.pop(block, None)

    def _see(self, block: int) -> None:
        seen = self._seen.pop(block, 0.0)
        if seen >= _MEMORY:
            seen /= 2
            self._after[block] = {each: count / 2 for each, count in self._after.get(block, {}).items()}
        self._seen[block] = seen + 1.0
        if len(self._seen) > self._rows:
            oldest, _ = self._seen.popitem(last=False)
            self._after.pop(oldest, None)

    def _note(self, before: int, block: int) -> None:
        if before not in self._seen:
            return
        row = self._after.setdefault(before, {})
        row[block] = row.get(block, 0.0) + 1.0
        if len(row) > self._wide:
            del row[min((each for each in row if each != block), key=row.__getitem__)]
