"""Least frequently used while held, leaves first; among equals the least recently used."""

from __future__ import annotations

from typing import Any

from .ranked import Ranked


class Lfu(Ranked):
    """The rank of a block is how often it was used since it came, then when it was last used."""

    name = "lfu"

    def _rank(self, block: int, before: Any) -> tuple[int, int]:  # noqa: ARG002
        return (1 if before is None else before[0] + 1), self.now
