"""Which static-graph calls compute n tokens at the least measured cost, and which graphs are worth having.

A graph computes exactly C tokens, so n tokens take several calls and one may be padded. What was reused between the
tokens does not matter: a call takes any tokens in ascending order, so pieces on both sides of a reused gap share calls,
a long piece is split where a call ends, and new tokens ride beside recomputed ones. What is left to decide is how to
fill n with sizes, and in which order: a call costs T(C, W), the measured time over the window W that its last token
needs, so the front of a prompt is cheaper than its end. With w(j) the window of token j:

    f(0) = 0,   f(j) = min over C of  f(max(0, j - C)) + T(C, w(j))

the covering step of the scheduler of "Dynamic Flow, Static Graph" (arXiv 2609.34727), with times in place of
padding: 150 tokens are 128 + 32 where a padded 256 costs more, and one call where it does not. Padding goes into the
first call: so every call ends as early as can be. f depends on nothing but how many tokens need which window, so no
recompute of a gap to join two would cost less.

f is searched from its end, best first (A*, Hart, Nilsson and Raphael 1968): what is left of j tokens costs at least the
best seconds per token of any size, over the window of each.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
import os
import statistics
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

# Calls of a size: a long phase of load does not outlast them, a slower device in the end does.
_REMEMBERED = 256
_CHANGED = 0.2  # smaller differences are noise, and not worth another split of the same prompt
_SHARE_CHANGED = 0.05  # of what windows save, which is told by ratios of calls of one size
_TOLD = 8  # calls of a size over a window before the least of them tells anything

WINDOWED = 64
"""Graphs of at least so many tokens have windows: smaller ones gain little, and are many."""

_KNOWN_COVERS = 4096  # kept; beyond that they are searched anew


class Cover(msgspec.Struct, frozen=True):
    """Calls for tokens in ascending order: their sizes, first to last, and how many places of the first are padding.

    `bound` is what no set of calls can beat: the tokens at the best seconds per token of any size.
    """

    sizes: tuple[int, ...]
    padding: int
    seconds: float
    bound: float


class Windows(msgspec.Struct, frozen=True):
    """Of the graphs of at least `least` tokens: windows W, ascending, and what a call over W costs as share of one
    over all slots. The last is S itself, 1.0.

    A token's attention costs in proportion to W, the rest the same, whatever the size: shares lie on a line
    (`on_a_line`). Measured for sizes 64 to 512: 0.79 to 0.85 at half of 1024 slots.
    """

    shares: dict[int, float]
    least: int = WINDOWED

    @staticmethod
    def on_a_line(windows: Sequence[int], first: float, least: int = WINDOWED) -> Windows:
        """With `first` as the share of the first of these windows; more than 1 is noise."""
        low, high = windows[0], windows[-1]
        rise = (1 - min(first, 1.0)) / max(high - low, 1)
        return Windows({window: 1 - rise * (high - window) for window in windows}, least)


class CallCosts:
    """Seconds of one call by its size C, at one context length. May be used by several threads.

    `seconds` are those of calls over all slots; with `windows`, calls over fewer cost less.
    Begins with what was measured, on a machine that may have been busy, and follows what calls really take.
    Raises ValueError if there is no size, or a size or a time is not positive, or a wider window costs less.
    """

    def __init__(self, seconds: Mapping[int, float], windows: Windows | None = None) -> None:
        if not seconds or min(seconds) < 1 or not all(0 < each < math.inf for each in seconds.values()):
            raise ValueError(f"call sizes and their seconds must be positive and finite: {dict(seconds)}")
        if windows is not None:
            rising = [share for _, share in sorted(windows.shares.items())]
            if (
                not rising
                or not rising[0] > 0
                or not all(a <= b for a, b in itertools.pairwise([*rising, 1.0]))
            ):
                raise ValueError(
                    f"shares must be positive, not fall from window to window, and end at 1: {windows}"
                )
        self.seconds = dict(sorted(seconds.items()))
        self.windows = windows
        self._shares = sorted(windows.shares.items()) if windows else []
        self._bounds = np.array([window for window, _ in self._shares[:-1]], dtype=np.int64)
        self._measured = self.seconds
        self._recent = {size: deque([each], _REMEMBERED) for size, each in self.seconds.items()}
        self._seen: set[int] = set()
        self._over: dict[tuple[int, int], deque[float]] = {}  # by size and window, as they were
        self._lock = threading.Lock()
        self._covers: dict[tuple[int, ...], Cover] = {}

    def of(self, size: int, window: int) -> float:
        """Seconds of a call of `size` tokens of which the last needs the first `window` slots."""
        return self.seconds[size] * self.share(size, window)

    def share(self, size: int, window: int) -> float:
        """What a call that needs the first `window` slots costs, as share of one over all."""
        if self.windows is None or size < self.windows.least:
            return 1.0
        return next((share for each, share in self._shares if each >= max(window, size)), 1.0)

    def cover(self, tokens: int) -> Cover:
        """The cheapest calls for `tokens` >= 0 tokens, each of which may need all slots."""
        return self._cover((0,) * len(self._bounds) + (tokens,))

    def cover_at(self, places: NDArray[np.integer]) -> Cover:
        """The cheapest calls for tokens in these slots, ascending, that see no slot behind their own.

        So it is where token i of a prompt lies in slot i.
        """
        edges = [0, *np.searchsorted(places, self._bounds).tolist(), len(places)]
        return self._cover(tuple(b - a for a, b in itertools.pairwise(edges)))

    def _cover(self, counts: tuple[int, ...]) -> Cover:
        with self._lock:
            if counts not in self._covers:
                if len(self._covers) >= _KNOWN_COVERS:
                    self._covers.clear()
                self._covers[counts] = self._cheapest(counts)
            return self._covers[counts]

    def _cheapest(self, counts: Sequence[int]) -> Cover:
        """Of `counts[k]` tokens that need window k. Among equals, the shorter calls come first."""
        windows = [*self._bounds.tolist(), sys.maxsize]
        prices = [[(size, self.of(size, window)) for size in reversed(self.seconds)] for window in windows]
        window_of = np.repeat(np.arange(len(counts)), counts).tolist()
        rates = np.repeat([min(cost / size for size, cost in each) for each in prices], counts)
        bound = [0.0, *np.cumsum(rates).tolist()]
        total = sum(counts)
        costs: dict[int, float] = {total: 0.0}  # of the calls behind the first so many tokens
        after: dict[int, tuple[int, int]] = {}  # the first of these calls: where it ends, and its size
        open_, done = [(bound[total], total)], set[int]()
        while (left := heapq.heappop(open_)[1]) > 0:
            if left in done:
                continue
            done.add(left)
            for size, seconds in prices[window_of[left - 1]]:
                before, cost = max(0, left - size), costs[left] + seconds
                if before not in costs or cost < costs[before]:
                    costs[before], after[before] = cost, (left, size)
                    heapq.heappush(open_, (cost + bound[before], before))
        calls, at = [], 0
        while at < total:
            at, size = after[at]
            calls.append((window_of[at - 1], size))
        # Within a window the order is free: all padding fits into any call, or that call would not have been needed.
        sizes = tuple(size for _, size in sorted(calls))
        return Cover(sizes, sum(sizes) - total, costs[0], bound[total])

    def observe_windows(self, calls: Iterable[tuple[int, int, float]]) -> bool:
        """Learn what windows save from calls that ran: (size, window, seconds) each. True if shares changed.

        The least of a size's recent calls over each of two windows or more tells how much of a call is attention: the
        median of what sizes tell. What `observe` has learned of these sizes is reckoned anew: it was with wrong shares.
        """
        with self._lock:
            if self.windows is None:
                return False
            for size, window, seconds in calls:
                if size >= self.windows.least and size in self.seconds:
                    self._over.setdefault((size, window), deque(maxlen=_REMEMBERED)).append(seconds)
            least: dict[int, dict[int, float]] = {}
            for (size, window), some in self._over.items():
                if len(some) >= _TOLD:
                    least.setdefault(size, {})[window] = min(some)
            slots = max(self.windows.shares)
            rises = [_rise(some, slots) for some in least.values() if len(some) > 1]
            if not rises:
                return False
            first = min(self.windows.shares)
            share = min(1.0, max(1 - statistics.median(rises) * (slots - first), first / slots))
            if abs(share / self.windows.shares[first] - 1) <= _SHARE_CHANGED:
                return False
            self.windows = Windows.on_a_line(sorted(self.windows.shares), share, self.windows.least)
            self._shares = sorted(self.windows.shares.items())
            for size in {size for size, _ in self._over}:
                over_all = [
                    min(some) / self.share(size, of)
                    for (each, of), some in self._over.items()
                    if each == size
                ]
                self._recent[size] = deque([min(over_all)], _REMEMBERED)
                self._seen.add(size)
            self._covers = {}
            return True

    def observe(self, calls: Iterable[tuple[int, float]]) -> bool:
        """Learn from calls that ran: (size, seconds over all slots) each. True if costs changed.

        Sizes without a cost are ignored. What took t over a window counts as t / `share`.

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
            self._covers = {}
            return True


def _rise(seconds: Mapping[int, float], slots: int) -> float:
    """How much more of a call over all `slots` slots one slot more costs, from calls over two windows or more."""
    (narrow, less), *_, (wide, more) = sorted(seconds.items())
    slope = (more - less) / (wide - narrow)
    return slope / (more + slope * (slots - wide))


class _Kept(msgspec.Struct, frozen=True):
    """What the file says of one context length."""

    seconds: dict[int, float]
    windows: Windows | None


class CostTable:
    """Costs of a device by context length S, measured once, refreshed by use, kept in the JSON file at `path`.

    What is learned takes effect when the table is opened again: within one process the same tokens are always split
    alike, so that the same prompt gives the same bits.
    The file says seconds by C over all slots, and the shares of windows, by S. A file that is damaged, or of other
    sizes or windows, is measured anew, never an error; one that cannot be written is measured by each process.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._costs: dict[int, CallCosts] = {}
        self._learned: dict[int, CallCosts] = {}

    def at(
        self, slots: int, sizes: Collection[int], windows: Collection[int], measure: Callable[[], CallCosts]
    ) -> CallCosts:
        """Costs of calls of these sizes over `slots` slots; `measure` is called if they are not known.

        windows: of larger graphs, S among them; empty where there are none.
        """
        if slots not in self._costs:
            known = self._read()
            kept = _made(known.get(slots), sizes, windows)
            self._costs[slots] = kept or measure()
            if kept is None:
                self._keep(known, slots, self._costs[slots])
        return self._costs[slots]

    def observe(self, slots: int, calls: Iterable[tuple[int, int, float]]) -> None:
        """Learn from calls over `slots` slots that ran, (size, window, seconds) each; nothing where no costs are."""
        if slots not in self._costs:
            return
        known = self._costs[slots]
        costs = self._learned.setdefault(slots, CallCosts(known.seconds, known.windows))
        ran = list(calls)
        changed = costs.observe_windows(ran)
        changed |= costs.observe((size, seconds / costs.share(size, window)) for size, window, seconds in ran)
        if changed:
            self._keep(self._read(), slots, costs)

    def _read(self) -> dict[int, _Kept]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[int, _Kept])
        except (OSError, msgspec.DecodeError):
            return {}

    def _keep(self, known: Mapping[int, _Kept], slots: int, costs: CallCosts) -> None:
        """Add these costs to what the file is known to say, if it can be written."""
        with contextlib.suppress(OSError):
            self._write({**known, slots: _Kept(costs.seconds, costs.windows)})

    def _write(self, costs: Mapping[int, _Kept]) -> None:
        with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=".costs-", delete=False) as file:
            try:
                file.write(msgspec.json.encode(costs))
                file.flush()
                os.replace(file.name, self._path)
            except BaseException:
                os.unlink(file.name)
                raise


def _made(kept: _Kept | None, sizes: Collection[int], windows: Collection[int]) -> CallCosts | None:
    """None if it is not of these sizes and windows, or makes no sense."""
    if kept is None or set(kept.seconds) != set(sizes):
        return None
    if set(windows) != set(kept.windows.shares if kept.windows else ()):
        return None
    try:
        return CallCosts(kept.seconds, kept.windows)
    except ValueError:
        return None


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
