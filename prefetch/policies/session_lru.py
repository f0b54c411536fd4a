"""Least recently used, for each session by itself: the one that holds the most gives up its oldest leaf."""

from __future__ import annotations

from collections.abc import Hashable
from heapq import heappop, heappush

from ..policy import Facts, MayLeave, Policy
from .leaves import Leaves


class SessionLru(Policy):
    """A block belongs to the session that brought it, so that no session pushes out more than its share."""

    name = "per-session lru"

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._now = 0
        self._sessions: dict[Hashable, Leaves] = {}
        self._largest: list[tuple[int, int, Hashable]] = []  # (-blocks, number, session), some out of date
        self._pushed = 0

    def victim(self, may_leave: MayLeave, incoming: Facts | None = None) -> int | None:  # noqa: ARG002
        heap, passed = self._largest, []
        found = None
        while heap and found is None:
            size, _, session = entry = heap[0]
            leaves = self._sessions.get(session)
            heappop(heap)
            if leaves is not None and len(leaves) == -size:
                found = leaves.first(may_leave)
                passed.append(entry)
        for entry in passed:
            heappush(heap, entry)
        return found

    def _inserted(self, block: int, facts: Facts) -> None:
        self._now += 1
        leaves = self._sessions.get(facts.session)
        if leaves is None:
            leaves = self._sessions[facts.session] = Leaves(self.is_leaf)
        leaves.rank[block] = self._now
        self._rate(facts.session, leaves)

    def _touched(self, blocks: list[int]) -> None:
        for block in blocks:
            self._now += 1
            self._sessions[self._facts[block].session].rank[block] = self._now

    def _leaf(self, block: int) -> None:
        self._sessions[self._facts[block].session].leaf(block)

    def _removed(self, block: int, facts: Facts) -> None:
        leaves = self._sessions[facts.session]
        leaves.forget(block)
        if leaves:
            self._rate(facts.session, leaves)
        else:
            del self._sessions[facts.session]

    def _rate(self, session: Hashable, leaves: Leaves) -> None:
        self._pushed += 1
        heappush(self._largest, (-len(leaves), self._pushed, session))
        if len(self._largest) > 4 * len(self._sessions) + 1024:
            self._largest = sorted(
                (-len(leaves), number, session)
                for number, (session, leaves) in enumerate(self._sessions.items(), self._pushed)
            )
            self._pushed += len(self._sessions)
