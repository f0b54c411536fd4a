"""Three queues, first in first out (S3-FIFO, Yang et al., SOSP 2023), leaves first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from ..policy import Facts, MayLeave, Policy
from .leaves import Leaves


class S3Fifo(Policy):
    """New blocks pass a tenth of the room; those used there, or missed soon after, go on to the rest of it.

    There a block that was used goes round again, up to three times.
    """

    name = "s3-fifo"

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._now = 0
        self._small, self._main = Leaves(self.is_leaf), Leaves(self.is_leaf)
        self._uses: dict[int, int] = {}
        self._gone: OrderedDict[Hashable, None] = OrderedDict()

    def victim(self, may_leave: MayLeave, incoming: Facts | None = None) -> int | None:  # noqa: ARG002
        while True:
            small_first = len(self._small) >= max(1, self.room // 10)
            small = self._small.first(may_leave)
            main = self._main.first(may_leave) if small is None or not small_first else None
            if small is not None and (small_first or main is None):
                if not self._uses[small]:
                    return small
                self._small.forget(small)
                self._uses[small] = 0
                self._to(self._main, small)
            elif main is not None:
                if not self._uses[main]:
                    return main
                self._uses[main] -= 1
                self._to(self._main, main)
            else:
                return None

    def _inserted(self, block: int, facts: Facts) -> None:
        self._now += 1
        name = block if facts.name is None else facts.name
        self._uses[block] = 0
        if name in self._gone:
            del self._gone[name]
            self._main.rank[block] = self._now
        else:
            self._small.rank[block] = self._now

    def _touched(self, blocks: list[int]) -> None:
        for block in blocks:
            self._uses[block] = min(3, self._uses[block] + 1)

    def _leaf(self, block: int) -> None:
        (self._small if block in self._small else self._main).leaf(block)

    def _removed(self, block: int, facts: Facts) -> None:
        del self._uses[block]
        if block not in self._small:
            self._main.forget(block)
            return
        self._small.forget(block)
        self._gone[block if facts.name is None else facts.name] = None
        while len(self._gone) > self.room:
            self._gone.popitem(last=False)

    def _to(self, queue: Leaves, block: int) -> None:
        self._now += 1
        queue.rank[block] = self._now
        queue.leaf(block)
