"""Leaves in the order of a rank that rises when a block is used: the queue that most policies are made of.

A rank that rose is noticed only when its leaf comes up, which is then put back with the new rank. So a touch costs
one store into a dictionary, and to find the lowest leaf O(log n), spread over all calls.

Most blocks that come have the highest rank of all, and are no leaf any more when their turn comes. These stand in a
line, where they cost nothing; only those that belong before its end are in a heap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Leaves:
    """Blocks with ranks; `first` gives the leaf of the lowest.

    Ranks are of one type that compares, never None; they only rise.
    """

    def __init__(self, is_leaf: Callable[[int], bool]) -> None:
        self.rank: dict[int, Any] = {}
        """Rank of each block here, leaf or not. To change one, store into it."""
        self._is_leaf = is_leaf
        self._line: deque[tuple[Any, int]] = deque()  # rising
        self._heap: list[tuple[Any, int]] = []
        self._entry: dict[int, tuple[Any, int]] = {}  # of a block in line or heap, the one that counts

    def leaf(self, block: int) -> None:
        """`block` became a leaf."""
        if block not in self._entry and (rank := self.rank.get(block)) is not None:
            self._enter(rank, block)

    def forget(self, block: int) -> None:
        """`block` is not here any more."""
        self.rank.pop(block, None)
        self._entry.pop(block, None)
        if len(self._line) + len(self._heap) > 2 * len(self.rank) + 64:
            self._line, self._heap = deque(sorted(self._entry.values())), []

    def first(self, may_leave: Callable[[int], bool]) -> int | None:
        """The leaf of the lowest rank that may leave, or None."""
        line, heap, entries, ranks, is_leaf = self._line, self._heap, self._entry, self.rank, self._is_leaf
        held_back: list[tuple[Any, int]] = []
        found = None
        while line or heap:
            in_line = not heap or (bool(line) and line[0] < heap[0])
            entry = line[0] if in_line else heap[0]
            block = entry[1]
            risen: Any = None
            if entries.get(block) is entry:
                if not is_leaf(block):
                    del entries[block]
                elif (rank := ranks[block]) is not entry[0]:
                    risen = rank
                elif may_leave(block):
                    found = block
                    break
                else:
                    held_back.append(entry)
            if in_line:
                line.popleft()
            else:
                heappop(heap)
            if risen is not None:
                self._enter(risen, block)
        for entry in held_back:
            heappush(heap, entry)
        return found

    def __len__(self) -> int:
        return len(self.rank)

    def __contains__(self, block: int) -> bool:
        return block in self.rank

    def _enter(self, rank: Any, block: int) -> None:
        self._entry[block] = entry = (rank, block)
        if not self._line or entry > self._line[-1]:
            self._line.append(entry)
        else:
            heappush(self._heap, entry)
