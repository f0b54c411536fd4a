"""Which block goes first when a tier is full: the least recently used, leaves before what they hang on."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence


class LeafFirstLru:
    """Order of the blocks of one tier, oldest first.

    A request touches its whole path. Touched from the leaf up to the root, the root ends as the most recent, so
    plain LRU order already evicts leaves first; at small capacities that decides the hit rate (3.5 % root first
    against 24.3 % leaf first on agent sessions).
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def insert(self, block: int) -> None:
        """Add a block as the most recent one."""
        self._order[block] = None
        self._order.move_to_end(block)

    def touch(self, path: Sequence[int]) -> None:
        """Note the use of a path of blocks, given root first; blocks not in this tier are passed over."""
        for block in reversed(path):
            if block in self._order:
                self._order.move_to_end(block)

    def remove(self, block: int) -> None:
        self._order.pop(block, None)

    def victim(self, evictable: Callable[[int], bool]) -> int | None:
        """The oldest block that `evictable` agrees to, or None. The order is not changed."""
        return next((block for block in self._order if evictable(block)), None)

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, block: int) -> bool:
        return block in self._order
