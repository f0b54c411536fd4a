"""What a held block is worth: seconds that it is likely to save, for each byte and second that it is kept.

    value density = chance of reuse * sqrt((recompute - load from the next tier) / bytes)

The chance is an index per kind of block and age: the best ratio, over all times T to wait, of the chance that the block
is used within T to the time that it is kept until then,

    index(age) = max over T of  P(used before age + T | not used until age) / E[min(time to its use, T)],

which is what Gittins (1979) showed to be the order in which to serve one of many such bets, and what LHD (Beckmann et
al., NSDI 2018) calls hit density. It is high where uses are near, so a young block that nobody asks for in its first
seconds, since its user still reads, is kept until it should have been asked for, and goes when that time is over.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from math import exp, log2, sqrt

import numpy as np
from numpy.typing import NDArray

_FRESH = 8  # used once, in a request with 0, 1 to 2, 3 to 6, ... 127 or more new blocks
_USED = 5  # used 2, 3, 4, 5, 6 or more times
_PART = _FRESH + _USED  # a block that is not full
_KIND = _PART + 1
_AGES = 48  # half octaves from 1 second up, half a year in all
_EDGES = np.concatenate([[0.0], 2.0 ** (np.arange(_AGES) / 2)])
_WIDTHS = np.diff(_EDGES)
_MIDDLES = (_EDGES[:-1] + _EDGES[1:]) / 2

_LATER = np.triu(np.ones((_AGES, _AGES), dtype=bool))

_PRIOR = 0.15  # hazard at age a before anything was seen: this over a, which makes the order LRU
_PRIOR_WEIGHT = 10.0  # as many uses
_CLASS_WEIGHT = 20.0
_OBSERVED = 32_768
_FORGET = 0.98


def age_slot(age: float) -> int:
    """The age bucket of an age in seconds."""
    if age < 1.0:
        return 0
    slot = int(2.0 * log2(age)) + 1
    return slot if slot < _AGES else _AGES - 1


class ReuseChance:
    """Estimates online how likely blocks are used again, by class and age.

    The class of a block says what kind of content it is, how often it was used, and of a block used once, how many new
    blocks came with it (a short continuation is more likely to be continued again than a long document).

    A sample of all blocks that come by is observed, held or not, or what the tier drops early would never be seen
    coming back: by a hash of their names, so that a block is observed always or never, and at most 32,768 at a time
    (SHARDS, Waldspurger et al., FAST 2015). What has been seen loses weight slowly. Classes with few observations lean
    on those with as many uses, and these on all.
    """

    def __init__(self) -> None:
        self._kinds: dict[str, int] = {}  # the first class of each
        self._open: dict[Hashable, int] = {}  # place of an observed block in:
        self._then = array("d")  # its last use
        self._class = array("q")  # its class then, -1 where there is none
        self._free: list[int] = []
        self._share = _ALL
        self._events = 0
        self._due = 500
        self._since = 0
        self._grow(1)

    def class_of(self, kind: str, uses: int, fresh: int, whole: bool = True) -> int:
        """The class of a block of a kind that was used `uses` times and came in a request with `fresh` new blocks.

        One that is not `whole` is in a class by itself: it ends a prompt, and few others go on behind it.
        """
        first = self._kinds.get(kind)
        if first is None:
            first = self._kinds[kind] = len(self._kinds) * _KIND
            if first:
                self._grow(len(self._kinds))
        if not whole:
            return first + _PART
        if uses == 1:
            length = (fresh + 1).bit_length()
            return first + (length if length < _FRESH else _FRESH) - 1
        return first + _FRESH + (uses - 2 if uses <= _USED else _USED - 1)

    def used(self, name: Hashable, now: float, block_class: int, *, told: bool = False) -> None:
        """A block was used, the first time or again, and is of this class from now on. `now` in seconds.

        `told` says that this use may have been told before: then one of the same time changes only the class.
        """
        self._since += 1
        if self._share < _ALL and _place(name) >= self._share:
            return  # most of them, in a large tier
        at = self._open.get(name)
        if at is not None:
            age = max(0.0, now - self._then[at])
            if told and not age:
                self._class[at] = block_class
                return
            slot = age_slot(age)
            before = self._class[at]
            self._ends[before][slot] += 1.0
            self._rests[before][slot] += age - _LOW[slot]
        elif self._free:
            at = self._open[name] = self._free.pop()
        else:
            at = self._open[name] = len(self._then)
            self._then.append(0.0)
            self._class.append(-1)
        self._then[at], self._class[at] = now, block_class
        if len(self._open) > _OBSERVED:
            self._observe_less()

    def within(self, block_class: int, age: float, seconds: float) -> float:
        """The chance that a block of a class, not used for `age` seconds, is used in the `seconds` that follow."""
        until = self._until[block_class]
        return 1.0 - exp(_at(until, age) - _at(until, age + seconds))

    def learn(self, now: float) -> bool:
        """Bring the index up to date if enough has happened since; True if it was."""
        if self._since < self._due:
            return False
        self._events += self._since
        self._since = 0
        self._due = int(min(16_000, max(500, self._events * 0.1)))
        self._fit(now)
        return True

    def _observe_less(self) -> None:
        self._share -= self._share // 8
        for name in [name for name in self._open if _place(name) >= self._share]:
            at = self._open.pop(name)
            self._class[at] = -1
            self._free.append(at)

    def _grow(self, kinds: int) -> None:
        """Room for the classes of one more kind. `index` holds a list by age for each class."""
        first = _PRIOR / (_EDGES[:-1] + 1.0)
        until = [0.0, *(first * _WIDTHS).cumsum().tolist()]
        self.index: list[list[float]] = getattr(self, "index", [])
        self._until: list[list[float]] = getattr(self, "_until", [])  # hazards summed up to each age
        self._ends: list[list[float]] = getattr(self, "_ends", [])
        self._rests: list[list[float]] = getattr(self, "_rests", [])
        while len(self.index) < kinds * _KIND:
            self.index.append(first.tolist())
            self._until.append(until)
            self._ends.append([0.0] * _AGES)
            self._rests.append([0.0] * _AGES)

    def _fit(self, now: float) -> None:
        ends, rests = np.array(self._ends), np.array(self._rests)
        exposed = _exposure(ends, rests)
        classes = np.array(self._class)
        waiting = classes >= 0
        classes, ages = classes[waiting], np.maximum(now - np.array(self._then)[waiting], 0.0)
        slots = np.minimum(np.searchsorted(_EDGES, ages, side="right") - 1, _AGES - 1)
        at = classes * _AGES + slots
        exposed += _exposure(
            *(
                np.bincount(at, weights, ends.size).astype(np.float64).reshape(ends.shape)
                for weights in (np.ones_like(ages), ages - _EDGES[slots])
            )
        )
        hazards = _hazards(ends, exposed)
        self.index = _index(hazards).tolist()
        self._until = np.pad((hazards * _WIDTHS).cumsum(axis=1), ((0, 0), (1, 0))).tolist()
        self._ends, self._rests = (ends * _FORGET).tolist(), (rests * _FORGET).tolist()


def _at(until: list[float], age: float) -> float:
    """Hazards summed up to an age."""
    slot = age_slot(age)
    share = min(1.0, (age - _LOW[slot]) / (_LOW[slot + 1] - _LOW[slot]))
    return until[slot] + share * (until[slot + 1] - until[slot])


def _place(name: Hashable) -> int:
    """Where a name lies between 0 and `_ALL`, evenly spread also for consecutive numbers."""
    return hash(name) * 0x9E3779B97F4A7C15 >> 17 & _ALL - 1


_ALL = 1 << 32
_LOW: list[float] = _EDGES.tolist()

Table = NDArray[np.float64]


def _exposure(ends: Table, rests: Table) -> Table:
    """Seconds spent in each age bucket by intervals that ended in buckets, `rests` seconds behind their beginnings."""
    passed = ends[:, ::-1].cumsum(axis=1)[:, ::-1] - ends
    seconds: Table = passed * _WIDTHS + rests
    return seconds


def _hazards(uses: Table, exposed: Table) -> Table:
    """Uses a second by class and age, each estimate leaning on a coarser one."""
    prior = _PRIOR / _MIDDLES
    overall = (uses.sum(axis=0) + _PRIOR_WEIGHT) / (exposed.sum(axis=0) + _PRIOR_WEIGHT / prior)
    found = _lean(uses, exposed, np.broadcast_to(overall, uses.shape))
    for kind in range(0, len(uses), _KIND):
        once = slice(kind, kind + _FRESH)
        of_all = _lean(uses[once].sum(axis=0)[None], exposed[once].sum(axis=0)[None], overall[None])
        found[once] = _lean(uses[once], exposed[once], np.repeat(of_all, _FRESH, axis=0))
    return found


def _lean(uses: Table, exposed: Table, on: Table) -> Table:
    """Hazards of a class: its own where it has uses, else the shape of `on` at the height that fits the class."""
    weight = _CLASS_WEIGHT
    height = (uses.sum(axis=1) + weight) / ((exposed * on).sum(axis=1) + weight)
    on = on * height[:, None]
    found: Table = (uses + weight) / (exposed + weight / on)
    return found


def _index(hazards: Table) -> Table:
    """The index from hazards that are constant within an age bucket, seen from the middle of each bucket.

    `left` [class, age, end]: the chance that a block of an age is unused at the end of a bucket.
    """
    expected = hazards * _WIDTHS
    until = expected.cumsum(axis=1)
    left = np.exp(
        until[:, :, None] - until[:, None, :] - expected[:, :, None] / 2,
        where=_LATER,
        out=np.ones((len(hazards), _AGES, _AGES)),
    )
    used = np.concatenate([np.ones_like(left[:, :, :1]), left[:, :, :-1]], axis=2) - left
    kept = (used / hazards[:, None, :]).cumsum(axis=2)
    found: Table = np.divide(1 - left, kept, where=_LATER, out=np.zeros_like(left)).max(axis=2)
    return found


def value_density(index: float, saved: float, nbytes: int) -> float:
    """The worth of a block by the index of its class and age, the seconds that a hit saves, and its bytes.

    Seconds a byte count by their square root. Taken in full they save another hundredth of the time on the traces of
    `bench.eviction`, but there deep blocks push out many shallow ones, up to a point of hits. What saves nothing still
    has an order, far below all else.
    """
    return index * sqrt((saved if saved > 1e-9 else 1e-9) / nbytes)
