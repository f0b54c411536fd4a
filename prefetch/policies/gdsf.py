"""Greedy dual size frequency (Cherkasova, HP Labs 1998), as RAGCache (arXiv 2404.12457) uses it: leaves first."""

from __future__ import annotations

from typing import Any

from ..policy import PLAIN, Facts, MayLeave
from .ranked import Ranked


class Gdsf(Ranked):
    """The rank of a block is clock + uses * saved seconds / bytes; the clock is the rank of what was last given up.

    Seconds and bytes count relative to the first block that came, so that ranks are of the order of uses.
    """

    name = "gdsf"

    def __init__(self, room: int) -> None:
        super().__init__(room)
        self._clock = 0.0
        self._uses: dict[int, int] = {}
        self._unit = 0.0

    def victim(self, may_leave: MayLeave, incoming: Facts | None = None) -> int | None:
        found = super().victim(may_leave, incoming)
        if found is not None:
            self._clock = max(self._clock, self._leaves.rank[found][0])
        return found

    def _rank(self, block: int, before: Any) -> tuple[float, int]:  # noqa: ARG002
        uses = self._uses[block] = self._uses.get(block, 0) + 1
        facts = self._facts.get(block, PLAIN)
        density = max(facts.saved, 0.0) / facts.nbytes
        self._unit = self._unit or density or 1.0
        return self._clock + uses * density / self._unit, self.now

    def _removed(self, block: int, facts: Facts) -> None:
        super()._removed(block, facts)
        self._uses.pop(block, None)
