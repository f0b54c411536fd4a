"""Which block goes first when a tier is full: the default policy, and the choice among all of them.

The default keeps what is worth the most. It may also refuse a block that wants in: where most of what comes is never
asked for again, the gain is in not letting it push out what will be.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from heapq import heapify, heappop, heappush, heapreplace

from .policies.arc import Arc
from .policies.frequency_weighted_lru import FrequencyWeightedLru
from .policies.gdsf import Gdsf
from .policies.leaves import Leaves
from .policies.lfu import Lfu
from .policies.lru import Lru
from .policies.pinned_lru import PinnedLru
from .policies.s3_fifo import S3Fifo
from .policies.session_lru import SessionLru
from .policy import Facts, MayLeave, Policy
from .worth import ReuseChance, age_slot, value_density

_REFUSED = 0.5
"""What is worth less than this share of what would go for it is refused. Not all of it, since what is admitted in error
goes with the next victim, while a refusal costs all that would hang on the block, and it too is an estimate."""
_GHOSTS = 65_536, 262_144
_LOOK = 64
"""Uses and insertions after which all classes are looked at anew, or an eighth of the room: where that is a few pinned
buffers, all of it has changed within 64."""


_Use = tuple[float, int, int, int]
"""The last use of a block, number of that use among all, how often the block was used, its class.

Also its rank among the leaves of its class: where two numbers are never equal, what follows them does not matter.
"""


class LeastWorth(Policy):
    """Gives up the leaf of the least value density (see `worth`), and refuses what is worth much less than that.

    Within a class of blocks the order is that of their last use; so only the oldest leaf of each class is looked at.
    Of blocks that left, as many names as the tier has room for twice are remembered with how often they were used (at
    least 65,536, at most 262,144, some 10 to 40 MB), so that one that comes back does not begin anew.

    `seconds` is the clock that ages go by, unix time by default: ages outlast a restart.
    """

    name = "least worth"

    def __init__(self, room: int, seconds: Callable[[], float] = time.time) -> None:
        super().__init__(room)
        self._seconds = seconds
        self._chance = ReuseChance()
        self._now = 0
        self._used: dict[int, _Use] = {}
        self._classes: dict[int, Leaves] = {}
        self._gone: OrderedDict[Hashable, int] = OrderedDict()
        self._remembered = min(max(2 * self.room, _GHOSTS[0]), _GHOSTS[1])
        self._order: list[tuple[float, int]] = []  # (value of its oldest leaf when last seen, class)
        self._look_at = 0

    def victim(self, may_leave: MayLeave, incoming: Facts | None = None) -> int | None:
        now = self._seconds()
        looked = self._chance.learn(now) or self._now >= self._look_at
        if looked:
            self._look(now)
        found = self._least(may_leave, now)
        if found is None and not looked:  # leaves that came up since are not in the order
            self._look(now)
            found = self._least(may_leave, now)
        if found is None or (incoming is not None and self._incoming(incoming) < _REFUSED * found[1]):
            return None
        return found[0]

    def passed(self, facts: Facts) -> None:
        if facts.name is not None:
            uses = self._gone.pop(facts.name, 0) + 1
            self._remember(facts.name, uses)
            self._chance.used(
                facts.name, self._seconds(), self._chance.class_of(facts.kind, uses, facts.fresh, facts.whole)
            )

    def uses(self, block: int) -> int:
        """How often a held block was used, times before it was dropped and came back included."""
        return self._used[block][2]

    def _least(self, may_leave: MayLeave, now: float) -> tuple[int, float] | None:
        """The leaf of the least value, and its value."""
        order = self._order
        while order:
            seen, number = order[0]
            leaves = self._classes.get(number)
            block = None if leaves is None else leaves.first(may_leave)
            if block is None:
                heappop(order)
                continue
            value = self._value(block, now)
            if value > seen:
                heapreplace(order, (value, number))
                if order[0][1] != number:
                    continue
            return block, value
        return None

    def _look(self, now: float) -> None:
        """Value the oldest leaf of each class. In between, values that fell are not noticed, those that rose are."""
        found = []
        for number, leaves in list(self._classes.items()):
            block = leaves.first(_any)
            if block is not None:
                found.append((self._value(block, now), number))
            elif not leaves:
                del self._classes[number]
        heapify(found)
        self._order = found
        self._look_at = self._now + min(_LOOK, self.room // 8)

    def _value(self, block: int, now: float) -> float:
        facts = self._facts[block]
        last, _, _, number = self._used[block]
        return value_density(self._chance.index[number][age_slot(now - last)], facts.saved, facts.nbytes)

    def _incoming(self, incoming: Facts) -> float:
        uses = self._gone.get(incoming.name, 0) + 1
        number = self._chance.class_of(incoming.kind, uses, incoming.fresh, incoming.whole)
        return value_density(self._chance.index[number][0], incoming.saved, incoming.nbytes)

    def _inserted(self, block: int, facts: Facts) -> None:
        before = self._gone.pop(block if facts.name is None else facts.name, 0)
        if facts.last_use is None:
            self._use(block, facts, before + 1, self._seconds())
        else:
            self._use(block, facts, max(before, facts.uses), facts.last_use)

    def _touched(self, blocks: list[int]) -> None:
        now = self._seconds()
        for block in blocks:
            _, _, uses, before = self._used[block]
            if self._use(block, self._facts[block], uses + 1, now) != before:
                self._classes[before].forget(block)
                if self.is_leaf(block):
                    self._leaf(block)

    def _use(self, block: int, facts: Facts, uses: int, now: float) -> int:
        """Note a use, and return the class of the block from now on."""
        self._now = count = self._now + 1
        number = self._chance.class_of(facts.kind, uses, facts.fresh, facts.whole)
        name = block if facts.name is None else facts.name
        self._chance.used(name, now, number, told=facts.last_use == now)
        leaves = self._classes.get(number)
        if leaves is None:
            leaves = self._classes[number] = Leaves(self.is_leaf)
        self._used[block] = leaves.rank[block] = now, count, uses, number
        return number

    def _leaf(self, block: int) -> None:
        number = self._used[block][3]
        self._classes[number].leaf(block)
        heappush(self._order, (0.0, number))  # it may be the oldest leaf of its class: to be looked at

    def _removed(self, block: int, facts: Facts) -> None:
        _, _, uses, number = self._used.pop(block)
        self._classes[number].forget(block)
        self._remember(block if facts.name is None else facts.name, uses)

    def _remember(self, name: Hashable, uses: int) -> None:
        self._gone[name] = uses
        if len(self._gone) > self._remembered:
            self._gone.popitem(last=False)


def _any(_: int) -> bool:
    return True


POLICIES: Mapping[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        LeastWorth,
        Lru,
        SessionLru,
        FrequencyWeightedLru,
        PinnedLru,
        Lfu,
        Arc,
        S3Fifo,
        Gdsf,
    )
}
"""All policies by name; `POLICIES[name](room)` makes one."""

DEFAULT = LeastWorth.name
