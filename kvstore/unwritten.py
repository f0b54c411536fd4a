"""Blocks in memory that flash does not hold: those not decided on yet, the refused, and the queue of those to write.

A new block is undecided. It stays in memory, where its first reuses show, until memory needs the room: then admission
says whether it is written, and with it what precedes it, or may be dropped. `flush` and `close` write all of them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import NamedTuple

from .block import Block


class Write(NamedTuple):
    """A block to write. `asked`: its user did, by `flush` or `close`, so that worth is not a question."""

    block: Block
    asked: bool


class Unwritten:
    """Called under the store's lock."""

    def __init__(self) -> None:
        self.queue: deque[Write] = deque()
        self.undecided_bytes = 0
        self._undecided: OrderedDict[int, Block] = OrderedDict()  # what was used longest ago comes first
        self._refused: dict[int, Block] = {}

    def __len__(self) -> int:
        """Blocks that only memory holds and that are not queued."""
        return len(self._undecided) + len(self._refused)

    def is_undecided(self, block: Block) -> bool:
        return block.number in self._undecided

    def oldest(self) -> Block | None:
        """The undecided block that was used longest ago."""
        return next(iter(self._undecided.values()), None)

    def add(self, block: Block) -> None:
        """A block is new, or was used: it is to be decided on, after all others."""
        if block.waiting:
            return
        if block.number in self._undecided:
            self._undecided.move_to_end(block.number)
            return
        self._refused.pop(block.number, None)
        self._undecided[block.number] = block
        self.undecided_bytes += block.nbytes

    def refuse(self, block: Block) -> None:
        """A block is not written unless it is used again, or its user asks for that."""
        self.remove(block)
        self._refused[block.number] = block

    def write(self, blocks: Iterable[Block], *, asked: bool = False) -> None:
        """Queue blocks, in this order."""
        for block in blocks:
            self.remove(block)
            block.waiting = True
            self.queue.append(Write(block, asked))

    def write_all(self) -> None:
        """Queue all there are, beginnings of prompts first, and see that those in the queue are written, too."""
        for at, (block, _) in enumerate(self.queue):
            self.queue[at] = Write(block, True)
        blocks = [*self._refused.values(), *self._undecided.values()]
        self.write(sorted(blocks, key=lambda block: block.start), asked=True)

    def remove(self, block: Block) -> None:
        """A block is on flash, or gone."""
        self._refused.pop(block.number, None)
        if self._undecided.pop(block.number, None) is not None:
            self.undecided_bytes -= block.nbytes
