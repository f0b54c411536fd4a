"""The contract of an eviction policy: which block of a tier goes first when the tier is full.

Blocks form trees: a block serves as a prefix only while its parent is there, so a policy never gives up a block
before those that are held and hang on it (leaf first). Whether a block may leave just now (leased, pinned, waiting for
flash) is the caller's to say, at the moment of asking.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

MayLeave = Callable[[int], bool]


class Facts(NamedTuple):
    """What a policy may know of a block.

    `nbytes` it occupies; `saved`, the seconds that a hit saves over doing without it here
    (`DeviceCosts.saved_seconds`), best spread evenly over the blocks of its prompt: a block deep in a context costs
    more to compute, but is of no use without those before it. `fresh`, how many blocks of its prompt came with it;
    `whole` False for a block that is not full, at the end of its prompt; `kind` of content, if known; `session` that
    brought it; `name`, what it is called when it comes again after it was dropped, by default its number.

    A block that comes from another tier, or from before a restart, brings `last_use`, when it was used, by the clock of
    the policy, and `uses`, how often in all. `last_use` None is a block that is used now, and was not held before.
    """

    parent: int | None = None
    nbytes: int = 1
    saved: float = 1.0
    fresh: int = 1
    whole: bool = True
    kind: str = ""
    session: Hashable = None
    name: Hashable = None
    last_use: float | None = None
    uses: int = 1


PLAIN = Facts()


class Policy(ABC):
    """The blocks of one tier and the order in which they would leave it. Blocks go by number.

    `room` is the number of blocks that the tier is likely to hold: policies that remember what has left, or that
    divide their room, go by it. It is no limit: the caller asks for a victim when its budget is used up.

    Not for several threads at once.
    """

    name: str

    def __init__(self, room: int) -> None:
        self.room = max(1, room)
        self._facts: dict[int, Facts] = {}
        self._children: dict[int, int] = {}  # of a block, held here or not: how many that are held hang on it
        self._kept: set[int] = set()

    def insert(self, block: int, facts: Facts = PLAIN) -> None:
        """A block came into the tier, as the most recent one. A block that is in it already counts as touched."""
        if block in self._facts:
            self.touch((block,))
            return
        self._facts[block] = facts
        self._hang(facts.parent)
        self._inserted(block, facts)
        if self.is_leaf(block):
            self._leaf(block)

    def keep(self, block: int) -> None:
        """Do not think of a block as a victim, until `offer`: for many that may not leave, cheaper than being asked."""
        if block in self._facts:
            self._kept.add(block)

    def offer(self, block: int) -> None:
        """A block that was kept may leave again."""
        if block in self._kept:
            self._kept.discard(block)
            if self.is_leaf(block):
                self._leaf(block)

    def update(self, block: int, parent: int | None, nbytes: int, saved: float) -> None:
        """A block hangs on another parent now, or a hit on it saves more or less. It was not used by that."""
        before = self._facts.get(block)
        if before is None:
            return
        self._facts[block] = before._replace(parent=parent, nbytes=nbytes, saved=saved)
        if parent != before.parent:
            self._hang(parent)
            self._unhang(before.parent)

    def touch(self, path: Sequence[int]) -> None:
        """A request used a path of blocks, given root first; blocks that are not in this tier are passed over."""
        facts = self._facts
        self._touched([block for block in reversed(path) if block in facts])

    def remove(self, block: int) -> None:
        """A block left the tier, for whatever reason; nothing happens if it is not in it."""
        facts = self._facts.pop(block, None)
        if facts is None:
            return
        self._kept.discard(block)
        self._removed(block, facts)
        self._unhang(facts.parent)

    @abstractmethod
    def victim(self, may_leave: MayLeave, incoming: Facts | None = None) -> int | None:
        """The block to give up next, or None. Nothing is removed: the caller does that, and calls `remove`.

        `may_leave` is asked about leaves. With `incoming`, the facts of the block that wants in, None also means that
        it is worth less than all that may leave. To ask is to mean it: a policy may learn from it.
        """

    def passed(self, facts: Facts) -> None:  # noqa: B027
        """A block was asked for, was not held, and will not be: it was refused, or its parent was.

        For policies that learn from what they turn away; `facts.name` says which it was.
        """

    def is_leaf(self, block: int) -> bool:
        """Whether nothing that is held here hangs on the block, and it is not kept."""
        return block not in self._children and block not in self._kept

    def _hang(self, parent: int | None) -> None:
        if parent is not None:
            self._children[parent] = self._children.get(parent, 0) + 1

    def _unhang(self, parent: int | None) -> None:
        if parent is None:
            return
        left = self._children[parent] - 1
        if left:
            self._children[parent] = left
            return
        del self._children[parent]
        if parent in self._facts and self.is_leaf(parent):
            self._leaf(parent)

    def __len__(self) -> int:
        return len(self._facts)

    def __contains__(self, block: int) -> bool:
        return block in self._facts

    @abstractmethod
    def _inserted(self, block: int, facts: Facts) -> None:
        """`block` is new."""

    @abstractmethod
    def _touched(self, blocks: list[int]) -> None:
        """Blocks that are held were used by one request; the last of them is the nearest to the root."""

    @abstractmethod
    def _leaf(self, block: int) -> None:
        """`block`, held, is a leaf from now on, until something is inserted below it, or it is kept."""

    @abstractmethod
    def _removed(self, block: int, facts: Facts) -> None:
        """`block` is gone."""
