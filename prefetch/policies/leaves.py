"""Leaves in the order of a rank that rises when a block is used: the heap that most policies are made of.

A rank that rose is noticed only when its leaf comes up, which is then put back with the new rank. So a touch costs
one store into a dictionary, and to find the lowest leaf O(log n), spread over all calls.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any


class Leaves:
    """Blocks with ranks; `first` gives the leaf of the lowest. Ranks are of one type that compares; they only rise."""

    def __init__(self, is_leaf: Callable[[int], bool]) -> None:
        self.rank: dict[int, Any] = {}
        """Rank of each block here, leaf or not. To change one, store into it."""
        self._is_leaf = is_leaf
        self._heap: list[tuple[Any, int]] = []
        self._entry: dict[int, tuple[Any, int]] = {}  # the one that counts, of those of a block in the heap

    def leaf(self, block: int) -> None:
        """`block` became a leaf."""
        if block not in self._entry and block in self.rank:
            self._push(block)

    def forget(self, block: int) -> None:
        """`block` is not here any more."""
        self.rank.pop(block, None)
        self._entry.pop(block, None)
        if len(self._heap) > 2 * len(self.rank) + 64:
            self._heap = list(self._entry.values())
            heapify(self._heap)

    def first(self, may_leave: Callable[[int], bool]) -> int | None:
        """The leaf of the lowest rank that may leave, or None."""
        heap, entries, ranks = self._heap, self._entry, self.rank
        held_back: list[tuple[Any, int]] = []
        found = None
        while heap:
            entry = heap[0]
            block = entry[1]
            if entries.get(block) is not entry:
                heappop(heap)
            elif not self._is_leaf(block):
                del entries[block]
                heappop(heap)
            elif ranks[block] != entry[0]:
                entries[block] = renewed = (ranks[block], block)
                heapreplace(heap, renewed)
            elif may_leave(block):
                found = block
                break
            else:
                held_back.append(heappop(heap))
        for entry in held_back:
            heappush(heap, entry)
        return found

    def __len__(self) -> int:
        return len(self.rank)

    def __contains__(self, block: int) -> bool:
        return block in self.rank

    def _push(self, block: int) -> None:
        self._entry[block] = entry = (self.rank[block], block)
        heappush(self._heap, entry)
