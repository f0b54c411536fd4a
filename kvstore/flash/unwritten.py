"""Blocks in memory that flash does not hold: those not decided on yet, the refused, and the queue of those to write.

A new block is undecided. It stays in memory, where its first reuses show, until memory needs the room: then admission
says whether it is written, and with it what precedes it, or may be dropped. `flush` and `close` write all of them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from kvstore.prefetch.admission import Admission

from ..block import Block
from ..tiers.appraisal import Appraisal
from ..tiers.orders import Orders

NOT_WORTH_A_WRITE = "not worth a write to flash"


class Write(NamedTuple):
    """A block to write. `asked`: its user did, by `flush` or `close`, so that worth is not a question."""

    block: Block
    asked: bool


class Unwritten:
    """Called under the store's lock. In the order of warm memory, what is undecided is kept.

    refusals: counts what admission refuses. spent(): bytes that were written to flash today.
    """

    def __init__(
        self,
        appraisal: Appraisal,
        admission: Admission,
        orders: Orders,
        spent: Callable[[], int],
        refusals: Counter[str],
    ) -> None:
        self.admission = admission
        self.queue: deque[Write] = deque()
        self._appraisal = appraisal
        self._orders = orders
        self._spent = spent
        self._refusals = refusals
        self._undecided: OrderedDict[int, Block] = OrderedDict()  # what was used longest ago comes first
        self._undecided_bytes = 0
        self._refused: dict[int, Block] = {}

    def __len__(self) -> int:
        """Blocks that only memory holds and that are not queued."""
        return len(self._undecided) + len(self._refused)

    def is_undecided(self, block: Block) -> bool:
        return block.number in self._undecided

    def put(self, block: Block) -> None:
        """A block is new: it was asked for, and memory did not hold it."""
        self.admission.used(self._appraisal.use(block), missed=True)
        self._to_be_decided(block)

    def use(self, block: Block) -> None:
        """A held block is used. If only memory holds it, it is decided on anew, after all others."""
        self.admission.used(self._appraisal.use(block), missed=False)
        if block.memory is not None and not (block.cold_bytes or block.doomed):
            self._to_be_decided(block)

    def decide(self, most: float = 0) -> Iterator[Block]:
        """Decide on one block after the other, what was used longest ago first, while more than `most` bytes wait.

        What is admitted is queued, and before it what precedes it and is not on flash either; the rest may be dropped
        when memory needs the room.
        """
        while self._undecided and self._undecided_bytes > most:
            block = next(iter(self._undecided.values()))
            self._decide_on(block)
            yield block

    def decide_among(self, among: Callable[[Block], bool]) -> Iterator[Block]:
        """The same on all that wait and of which `among` holds."""
        for block in list(self._undecided.values()):
            if block.number in self._undecided and among(block):  # it may have been queued before another
                self._decide_on(block)
                yield block

    def _decide_on(self, block: Block) -> None:
        self.remove(block)
        if self.admission.admits(self._appraisal.use(block), self._spent()):
            path = _unwritten_path(block)
            self.write(path)
            self.admission.wrote(len(path))
        else:
            self.refuse(block)
            self._refusals[NOT_WORTH_A_WRITE] += 1

    def _to_be_decided(self, block: Block) -> None:
        if block.waiting:
            return
        if block.number in self._undecided:
            self._undecided.move_to_end(block.number)
            return
        self._refused.pop(block.number, None)
        self._undecided[block.number] = block
        self._undecided_bytes += block.nbytes
        self._orders.keep("warm", block)

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
            self._undecided_bytes -= block.nbytes
            self._orders.offer("warm", block)


def _unwritten_path(block: Block) -> list[Block]:
    """A block and those before it, the first one first, back to one that is on flash or on its way."""
    path = []
    at: Block | None = block
    while at is not None and at.memory is not None and not (at.cold_bytes or at.waiting):
        path.append(at)
        at = at.namespace.parent(at)
    return path[::-1]
