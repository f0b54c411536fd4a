"""Beginnings that several prompts share, as system prompts are: they stay where they are.

The beginning ends where prompts first part: at the first block, from the root on, behind which three different ones
were put. One of at most 64 tokens is computed faster than it is worth a place for good. All that stays takes at most
`budget` bytes, so that there is always room for what comes; a beginning that does not fit any more takes the place of
the one that was used longest ago.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..block import Block

PARTED = 3
"""Different blocks behind a block that make a shared beginning of it."""

_SHORT = 64  # tokens


class SharedBeginnings:
    """Marks blocks as `shared`. Called under the store's lock."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._paths: dict[int, Sequence[Block]] = {}  # by the number of the last block

    def consider(self, path: Sequence[Block]) -> None:
        """Prompts part behind the last block of `path`, which is given from the root on."""
        end = path[-1]
        if (
            end.shared
            or len(end.behind) < PARTED
            or end.start + end.length <= _SHORT
            or any(len(block.behind) >= PARTED for block in path[:-1])
        ):
            return
        while self._paths and self.used + _new(path) > self.budget:
            self._unmark(min(self._paths, key=lambda number: self._paths[number][-1].last_use))
        if self.used + _new(path) > self.budget:
            return
        self.used += _new(path)
        for block in path:
            block.shared += 1
        self._paths[end.number] = path

    def forget(self, block: Block) -> None:
        """A block is going to be dropped; what it was a part of is no shared beginning any more."""
        if block.shared:
            for number in [number for number, path in self._paths.items() if block in path]:
                self._unmark(number)

    def _unmark(self, number: int) -> None:
        path = self._paths.pop(number)
        for block in path:
            block.shared -= 1
        self.used -= _new(path)


def _new(path: Sequence[Block]) -> int:
    """Bytes of KV of those blocks that no beginning includes."""
    return sum(block.nbytes for block in path if not block.shared)
