"""What several sessions use stays; the least recently used of the rest goes, leaves first."""

from __future__ import annotations

from collections.abc import Hashable

from ..policy import Facts, MayLeave
from .leaves import Leaves
from .lru import Lru


class PinnedLru(Lru):
    """A block with blocks of two sessions below it is a shared prefix and stays, up to half of the room.

    It may leave only when nothing else may.
    """

    name = "pinned + lru"

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._below: dict[int, Hashable] = {}  # the session of the first block that came below a block
        self._shared: set[int] = set()
        self._shared_leaves = Leaves(self.is_leaf)
        self._shared_leaves.rank = self._leaves.rank

    def victim(self, may_leave: MayLeave, incoming: Facts | None = None) -> int | None:
        shared = self._shared
        found = super().victim(lambda block: block not in shared and may_leave(block), incoming)
        return self._shared_leaves.first(may_leave) if found is None else found

    def _leaf(self, block: int) -> None:
        if block in self._shared:  # and not among the others, which would be passed over each time
            self._shared_leaves.leaf(block)
        else:
            super()._leaf(block)

    def _inserted(self, block: int, facts: Facts) -> None:
        super()._inserted(block, facts)
        at, session = facts.parent, facts.session
        while at is not None and at in self._facts and at not in self._shared:
            if self._below.setdefault(at, session) != session and len(self._shared) < self.room // 2:
                self._shared.add(at)
            elif self._facts[at].session == session:
                break
            at = self._facts[at].parent

    def _removed(self, block: int, facts: Facts) -> None:
        super()._removed(block, facts)
        self._shared_leaves.forget(block)
        self._below.pop(block, None)
        self._shared.discard(block)
