"""Least recently used, leaves first."""

from __future__ import annotations

from typing import Any

from .ranked import Ranked


class Lru(Ranked):
    """The rank of a block is when it was last used."""

    name = "lru"

    def _rank(self, block: int, before: Any) -> int:  # noqa: ARG002
        return self.now
