"""Policies that give each block one rank, which changes only when the block is used: lowest leaf first."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from ..policy import Facts, MayLeave, Policy
from .leaves import Leaves


class Ranked(Policy):
    """One heap of leaves. What follows it says what the rank of a block is when it comes and when it is used.

    `now` counts insertions and uses. Blocks of one path are used from the leaf up to the root, so that among equals
    the deeper one leaves first.
    """

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self.now = 0
        self._leaves = Leaves(self.is_leaf)

    def victim(self, may_leave: MayLeave, incoming: Facts | None = None) -> int | None:  # noqa: ARG002
        return self._leaves.first(may_leave)

    @abstractmethod
    def _rank(self, block: int, before: Any) -> Any:
        """The rank of a block that is used now; `before` is what it was, None for a block that comes."""

    def _inserted(self, block: int, facts: Facts) -> None:  # noqa: ARG002
        self.now += 1
        self._leaves.rank[block] = self._rank(block, None)

    def _touched(self, blocks: list[int]) -> None:
        ranks = self._leaves.rank
        for block in blocks:
            self.now += 1
            ranks[block] = self._rank(block, ranks[block])

    def _leaf(self, block: int) -> None:
        self._leaves.leaf(block)

    def _removed(self, block: int, facts: Facts) -> None:  # noqa: ARG002
        self._leaves.forget(block)
