"""Which blocks are worth a write to flash: those likely to be read from it, while the day's writes last.

Flash wears out by being written, and most of what comes by is never asked for again. But whoever waits for the second
use before writing has lost the first reuse of everything. Memory is the place to wait in: a block is decided on when it
is about to leave memory, by what was seen of its kind until then, how often it was used, and how long ago that was.

    written if   chance that it is used again, now that memory gives it up  >  price
    price        = fair                                             while the day's writes keep pace with the day
                   fair + (1 - fair) * (spent - day) / (1 - day)    when they run ahead of it

`fair` is the price at which two fifths of what comes by are written: it rises a little with each block that is written,
and falls two fifths as much with each that comes, between two ends. Below the one nothing is worth a write, above the
other anything is. `spent` is the share of the day's writes that is used up, `day` the share of the day that is over: so
a burst finds ever higher prices, none can be paid once all is spent, and what a quiet morning left is there in the
evening.

A refusal may be wrong. What was refused and dropped is remembered, and written when it was asked for again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

from .policy import Facts
from .worth import ReuseChance

LEAST, MOST = 0.05, 0.75
"""The ends between which the fair price lies, as chances of reuse."""

_STEP = 0.005  # of the fair price, for a block
_SHARE = 0.4
_LEARNING = 500  # uses seen; before that all is written
_REMEMBERED = 65_536
_AHEAD = 86_400.0  # seconds that flash keeps a block for, at least
_SHORTEST = 60.0
_DAY = 86_400.0


def price(fair: float, spent: int, per_day: int | None, now: float) -> float:
    """The chance of reuse that a write has to have; `now` in unix seconds, a day being one of UTC."""
    if per_day is None:
        return fair
    if spent >= per_day:
        return 1.0
    day = now % _DAY / _DAY
    ahead = max(0.0, (spent / per_day - day) / (1.0 - day))
    return fair + (1.0 - fair) * ahead


class Admission:
    """Decides block by block. Told of all uses, held or not. Not for several threads at once.

    per_day: bytes that may be written in a day, None for any number. `seconds` is the clock, unix time.
    """

    def __init__(self, per_day: int | None = None, seconds: Callable[[], float] = time.time) -> None:
        self.per_day = per_day
        self._seconds = seconds
        self._chance = ReuseChance()
        self._fair = LEAST
        self._uses = 0
        self._began: float | None = None
        self._refused: OrderedDict[Hashable, None] = OrderedDict()
        self._again: set[Hashable] = set()

    def used(self, facts: Facts, *, missed: bool) -> None:
        """A block was used: `facts.name`, `uses` in all, now or at `last_use`. `missed` says that it was not held."""
        now = self._seconds() if facts.last_use is None else facts.last_use
        self._began = now if self._began is None else min(now, self._began)
        self._uses += 1
        self._chance.used(facts.name, now, self._class_of(facts))
        if missed and self._uses > _LEARNING:
            self._fair = max(LEAST, self._fair - _STEP * _SHARE)
        if missed and facts.name in self._refused:
            self._again.add(facts.name)

    def admits(self, facts: Facts, spent: int = 0) -> bool:
        """Whether a block is to be written, `spent` bytes of today's having been written. Tell what was: `wrote`."""
        asked_again = facts.name in self._again
        self._forget(facts.name)
        asked = price(self._fair, spent, self.per_day, self._seconds())
        if self._uses < _LEARNING:
            return asked < 1.0
        admitted = asked < 1.0 and (asked_again or self.chance(facts) >= asked)
        if not admitted:
            self._refused[facts.name] = None
            if len(self._refused) > _REMEMBERED:
                self._forget(next(iter(self._refused)))
        return admitted

    def wrote(self, blocks: int) -> None:
        """So many blocks are written: one that was admitted, and those before it that flash did not hold."""
        if self._uses > _LEARNING:
            self._fair = min(MOST, self._fair + _STEP * blocks)

    def chance(self, facts: Facts) -> float:
        """The chance that a block is used again; looks no further ahead than it has looked back."""
        now = self._seconds()
        self._chance.learn(now)
        age = 0.0 if facts.last_use is None else max(0.0, now - facts.last_use)
        seen = 0.0 if self._began is None else now - self._began
        return self._chance.within(self._class_of(facts), age, min(_AHEAD, max(_SHORTEST, seen)))

    def _class_of(self, facts: Facts) -> int:
        return self._chance.class_of(facts.kind, facts.uses, facts.fresh, facts.whole)

    def _forget(self, name: Hashable) -> None:
        self._refused.pop(name, None)
        self._again.discard(name)
