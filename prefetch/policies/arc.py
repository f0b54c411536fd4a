"""Adaptive replacement (Megiddo and Modha, FAST 2003), leaves first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from ..policy import Facts, MayLeave, Policy
from .leaves import Leaves


class Arc(Policy):
    """Blocks used once and blocks used again are two lists, each with a ghost of as many that left it.

    A block that comes back from a ghost moves the border between the two towards the list that it was missed from.
    """

    name = "arc"

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._now = 0
        self._once, self._again = Leaves(self.is_leaf), Leaves(self.is_leaf)
        self._once_gone: OrderedDict[Hashable, None] = OrderedDict()
        self._again_gone: OrderedDict[Hashable, None] = OrderedDict()
        self._wanted = 0.0  # blocks used once

    def victim(self, may_leave: MayLeave, incoming: Facts | None = None) -> int | None:
        name = incoming and incoming.name
        often = name is not None and name in self._again_gone
        once_first = len(self._once) > self._wanted or (often and len(self._once) == self._wanted)
        lists = (self._once, self._again) if once_first else (self._again, self._once)
        for leaves in lists:
            found = leaves.first(may_leave)
            if found is not None:
                return found
        return None

    def _inserted(self, block: int, facts: Facts) -> None:
        self._now += 1
        name = block if facts.name is None else facts.name
        once, again = len(self._once_gone), len(self._again_gone)
        target = self._again
        if name in self._once_gone:
            self._wanted = min(self.room, self._wanted + max(1.0, again / once))
            del self._once_gone[name]
        elif name in self._again_gone:
            self._wanted = max(0.0, self._wanted - max(1.0, once / again))
            del self._again_gone[name]
        else:
            target = self._once
        target.rank[block] = self._now

    def _touched(self, blocks: list[int]) -> None:
        for block in blocks:
            self._now += 1
            if block in self._once:
                self._once.forget(block)
            self._again.rank[block] = self._now
            if self.is_leaf(block):
                self._again.leaf(block)

    def _leaf(self, block: int) -> None:
        (self._once if block in self._once else self._again).leaf(block)

    def _removed(self, block: int, facts: Facts) -> None:
        name = block if facts.name is None else facts.name
        if block in self._once:
            self._once.forget(block)
            self._once_gone[name] = None
        else:
            self._again.forget(block)
            self._again_gone[name] = None
        while len(self._once_gone) + len(self._once) > self.room and self._once_gone:
            self._once_gone.popitem(last=False)
        held = len(self._once) + len(self._again) + len(self._once_gone)
        while len(self._again_gone) + held > 2 * self.room and self._again_gone:
            self._again_gone.popitem(last=False)
