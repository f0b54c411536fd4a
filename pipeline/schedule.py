"""Which static-graph calls compute n tokens at the least measured cost, and which graphs are worth having.

A graph computes exactly C tokens, so n tokens take several calls and the last one may be padded. What was reused
between the tokens does not matter: a call takes any tokens in ascending order, so pieces on both sides of a reused gap
share calls, a long piece is split where a call ends, and new tokens ride beside recomputed ones. What is left to decide
is how to fill n with sizes. That is a dynamic program over the number of tokens still to compute, with T(C) the
measured time of one call at the context length in use:

    f(0) = 0,   f(n) = min over C of  f(max(0, n - C)) + T(C)

the covering step of the scheduler of "Dynamic Flow, Static Graph" (arXiv 2609.34727), with times in place of
padding: 150 tokens are 128 + 32 where a padded 256 costs more, and one call where it does not. As f depends on n alone,
no order of the pieces, and no recompute of a gap to join two, would cost less.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import statistics
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np

_REMEMBERED = (
    256  # calls of a size: a long phase of load does not outlast them, a slower device in the end does
)
_CHANGED = 0.2  # smaller differences are noise, and not worth another split of the same prompt


class Cover(msgspec.Struct, frozen=True):
    """Calls for consecutive tokens: their sizes, largest first, and how many places of the last one are padding.

    `bound` is what no set of calls can beat: the tokens at the best seconds per token of any size.
    """

    sizes: tuple[int, ...]
    padding: int
    seconds: float
    bound: float


class CallCosts:
    """Seconds of one call by its size C, at one context length. May be used by several threads.

    Begins with what was measured, on a machine that may have been busy, and follows what calls really take.
    Raises ValueError if there is no size, or a size or a time is not positive.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        if not seconds or min(seconds) < 1 or not min(seconds.values()) > 0:
            raise ValueError(f"call sizes and their seconds must be positive: {dict(seconds)}")
        self.seconds = dict(sorted(seconds.items()))
        self._measured = self.seconds
        self._recent = {size: deque([each], _REMEMBERED) for size, each in self.seconds.items()}
        self._seen: set[int] = set()
        self._lock = threading.Lock()
        self._best = [0.0]
        self._last = [0]  # size of one call of the best cover of n tokens

    def cover(self, tokens: int) -> Cover:
        """The cheapest calls for `tokens` >= 0 consecutive tokens; among equals the one with the larger calls."""
        with self._lock:
            for n in range(len(self._best), tokens + 1):
                cost, size = min(
                    (self._best[max(0, n - size)] + seconds, -size) for size, seconds in self.seconds.items()
                )
                self._best.append(cost)
                self._last.append(-size)
            sizes, left = [], tokens
            while left > 0:
                sizes.append(self._last[left])
                left -= sizes[-1]
            bound = tokens * min(seconds / size for size, seconds in self.seconds.items())
            # Largest first: all padding then fits into the last call, or that call would not have been needed.
            return Cover(tuple(sorted(sizes, reverse=True)), -left, self._best[tokens], bound)

    def observe(self, calls: Iterable[tuple[int, float]]) -> bool:
        """Learn from calls that ran: (size, seconds) each; sizes without a cost are ignored. True if costs changed.

        Other work on the machine only ever adds time, so the least of a size's recent calls is its cost. A size that
        never runs would keep a wrong cost for ever, and never run because of it. So it follows the others: its measured
        time changes in proportion to theirs (median), and is no longer than the line between its neighbours.
        """
        with self._lock:
            guessed = {
                size for size, each in self.seconds.items() if each != self._measured[size]
            } - self._seen
            for size, seconds in calls:
                if size in self._recent:
                    self._recent[size].append(seconds)
                    self._seen.add(size)
            if not self._seen:
                return False
            costs = {size: min(self._recent[size]) for size in sorted(self._seen)}
            trend = statistics.median(cost / self._measured[size] for size, cost in costs.items())
            for size in self.seconds.keys() - self._seen:
                line = interpolate({seen: costs[seen] for seen in sorted(self._seen)}, size)
                costs[size] = min(self._measured[size] * trend, line)
            settled = all(abs(costs[size] / each - 1) <= _CHANGED for size, each in self.seconds.items())
            if settled and guessed.isdisjoint(self._seen):
                return False
            self.seconds = dict(sorted(costs.items()))
            self._best, self._last = [0.0], [0]
            return True


class CostTable:
    """Costs of a device by context length S, measured once, refreshed by use, kept in the JSON file at `path`.

    What is learned takes effect when the table is opened again: within one process the same tokens are always split
    alike, so that the same prompt gives the same bits.
    The file says seconds by S by C. A file that is damaged or of other sizes is measured anew, never an error.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._costs: dict[int, CallCosts] = {}
        self._learned: dict[int, CallCosts] = {}

    def at(self, slots: int, sizes: Collection[int], measure: Callable[[], Mapping[int, float]]) -> CallCosts:
        """Costs of calls of these sizes over `slots` slots; `measure` is called if they are not known."""
        if slots not in self._costs:
            known = self._read()
            seconds = known.get(slots, {})
            if set(seconds) != set(sizes) or not min(seconds.values(), default=0) > 0:
                known[slots] = dict(measure())
                self._write(known)
            self._costs[slots] = CallCosts(known[slots])
        return self._costs[slots]

    def observe(self, slots: int, calls: Iterable[tuple[int, float]]) -> None:
        """Learn from calls over `slots` slots that ran, (size, seconds) each; nothing where no costs are known."""
        if slots not in self._costs:
            return
        costs = self._learned.setdefault(slots, CallCosts(self._costs[slots].seconds))
        if costs.observe(calls):
            with contextlib.suppress(OSError):  # the next process learns it again
                self._write(self._read() | {slots: costs.seconds})

    def _read(self) -> dict[int, dict[int, float]]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[int, dict[int, float]])
        except (FileNotFoundError, msgspec.DecodeError):
            return {}

    def _write(self, costs: Mapping[int, Mapping[int, float]]) -> None:
        with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=".costs-", delete=False) as file:
            try:
                file.write(msgspec.json.encode(costs))
                file.flush()
                os.replace(file.name, self._path)
            except BaseException:
                os.unlink(file.name)
                raise


def suggest_sizes(lengths: Mapping[int, int], seconds: Mapping[int, float], count: int) -> tuple[int, ...]:
    """The `count` sizes of which the cheapest covers cost least in all, ascending.

    lengths: a histogram, how often so many tokens had to be computed; seconds: T(C) of every size in question,
    measured or from `interpolate`. Exact: every subset is tried, 4,368 of 16 sizes taken 5 at a time in under a second.
    Sizes with a large common divisor are faster: lengths are rounded up to it, which changes no cover.
    Raises ValueError if there is nothing to choose from or nothing to choose by.
    """
    CallCosts(seconds)  # refuses what makes no sense
    if count < 1 or min(lengths, default=0) < 1:
        raise ValueError(
            f"{count} sizes for lengths {sorted(lengths)[:3]}...: both must be at least 1, not empty"
        )
    unit = math.gcd(*seconds)
    weights = np.zeros(-(-max(lengths) // unit) + 1)
    for tokens, times in lengths.items():
        weights[-(-tokens // unit)] += times
    subsets = itertools.combinations(sorted(seconds), min(count, len(seconds)))
    best, chosen = math.inf, tuple[int, ...]()
    while some := list(itertools.islice(subsets, 4096)):  # so many at once stay in the processor's cache
        sizes = np.array(some).T
        price = np.vectorize(seconds.get, otypes=[float])(sizes)
        steps, column = sizes // unit, np.arange(len(some))
        cost = np.zeros((len(weights), len(some)))
        for n in range(1, len(weights)):
            cost[n] = np.min(cost[np.maximum(n - steps, 0), column] + price, axis=0)
        totals = weights @ cost
        if totals.min() < best:
            best, chosen = totals.min(), some[int(totals.argmin())]
    return tuple(chosen)


def interpolate(seconds: Mapping[int, float], size: int) -> float:
    """Seconds of a size that was not measured, from `seconds` by ascending size: on the line between its neighbours.

    Below the least size, as long as that; above the largest, in proportion.
    """
    largest = max(seconds)
    if size > largest:
        return seconds[largest] * size / largest
    return float(np.interp(size, list(seconds), list(seconds.values())))
