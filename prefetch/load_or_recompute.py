"""Whether KV that lies on flash is loaded or computed again, by speeds measured just now.

Graphs and flash work side by side, so the question is not which is faster but where they meet. A prompt is computed
from the front while its end is loaded (Cake, Jin et al. 2024, arXiv 2410.03065): what flash holds before `front` is
computed, what it holds behind is loaded. `front` 0 loads all, at the end of the prompt nothing; in between lies a part.

With C(n) the seconds of graph calls for n tokens, by where they stand, L those of the load, and graphs of layer groups,
each of which may start when its layers are in place. The first has the share f of all layers, the last the share l:

    computing waits for all        T = max(f L + C(n),  L + l C(n))
    a calls for tokens ahead of    T = max(max(C(a), f L) + C(n - a),  max(C(a), L) + l C(n - a))
    all that flash holds go first

The least T over all fronts and both ways wins. Loading all, with nothing ahead, is given up only for a gain that is
more than noise: then the same prompt is split into the same calls, and gives the same bits, whenever flash is as fast
as usual.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WORTH = 0.97
"""Another way is taken when it needs less than this part of the time."""

_HALF_LIFE = 0.25  # seconds of reading after which what was seen counts half: two requests, or one slow one
_DOUBT = 30.0  # seconds without a read after which the medium is believed to be twice as fast, up to its best


class Throughput:
    """A running estimate of bytes a second, over the time in which anything was under way. Thread-safe.

    What flash was slow at once would never be asked of it again, and so never be seen to be fast. Therefore an
    estimate that rests grows, up to the best that was seen.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._active = 0
        self._since = 0.0  # when the current stretch began
        self._stretch = 0  # bytes of it
        self._bytes = self._seconds = self._best = 0.0

    def begin(self) -> None:
        """Something is under way."""
        with self._lock:
            if self._active == 0:
                self._since = self._clock()
                self._stretch = 0
            self._active += 1

    def end(self, nbytes: int) -> None:
        """It came to an end after `nbytes` bytes; 0 when it failed."""
        with self._lock:
            self._active -= 1
            self._stretch += nbytes
            if self._active == 0:
                self._learn(self._clock() - self._since)

    def resting(self) -> float:
        """Seconds since anything was under way; 0 while something is."""
        with self._lock:
            return 0.0 if self._active else self._clock() - self._since

    def bytes_per_second(self) -> float | None:
        """The estimate; None before anything was measured."""
        with self._lock:
            if not self._bytes:
                return None
            idle = 0.0 if self._active else self._clock() - self._since
            return min(self._best, self._bytes / self._seconds * math.exp2(min(idle / _DOUBT, 64.0)))

    def _learn(self, seconds: float) -> None:
        self._since = self._clock()
        if not self._stretch or seconds <= 0:
            return
        kept = 0.5 ** (seconds / _HALF_LIFE)
        self._bytes = self._bytes * kept + self._stretch
        self._seconds = self._seconds * kept + seconds
        self._best = max(self._best, self._bytes / self._seconds)


class Held(NamedTuple):
    """Tokens [start, start + length) of a prompt whose KV is held; `nbytes` have to come from flash for it.

    `moved`: it was captured elsewhere, so what is computed before it is repaired must not build on it. `source`: what
    is read for it, once for all that has the same; None is a source of its own.
    """

    start: int
    length: int
    nbytes: int
    moved: bool = False
    source: int | None = None


class Decision(NamedTuple):
    """What to do about flash.

    hole: of the prefix, [hole[0], hole[1]), one stretch, is computed though it is held. front: of the rest, what flash
    holds before this position is. ahead: what is to be computed before this position goes first, without waiting for
    flash.
    seconds: what that takes, and what it takes to load all that flash holds.
    """

    hole: tuple[int, int]
    front: int
    ahead: int
    seconds: float
    load_all: float


def decide(
    tokens: int,
    held: Sequence[Held],
    repaired: Callable[[int], int],
    compute: Callable[[NDArray[np.int64]], float],
    load: Callable[[int], float],
    shares: Sequence[float],
) -> Decision:
    """The fastest way to prefill `tokens` tokens of which `held`, ascending and disjoint, need not be computed.

    repaired(front): how many moved tokens are computed again when those that flash holds before `front` are not used.
    compute(places), load(n): seconds of graph calls for the tokens at these places, ascending, and to bring n bytes
    from flash into place.
    shares: of all layers, that each of the layer groups of the graphs has.
    """
    cold = [piece for piece in held if piece.nbytes]
    if not cold:
        seconds = compute(_due(tokens, held, repaired(0)))
        return Decision((0, 0), 0, 0, seconds, seconds)
    best: Decision | None = None
    wanted = math.inf  # seconds, which the best is to undercut
    for front in _fronts(cold):
        least, *ways = _way(tokens, held, front, repaired, compute, load, shares)
        if best is None:
            best = ways[0]._replace(load_all=ways[0].seconds)
            wanted = WORTH * best.seconds
        if least >= wanted:
            break  # the later the front, the more there is to compute
        for way in ways:
            if way.seconds < wanted:
                best, wanted = way._replace(load_all=best.load_all), way.seconds
    assert best is not None, "there is a front"
    return best


def _fronts(cold: Sequence[Held]) -> list[int]:
    return [0, *(piece.start + piece.length for piece in cold)]


def _way(
    tokens: int,
    held: Sequence[Held],
    front: int,
    repaired: Callable[[int], int],
    compute: Callable[[NDArray[np.int64]], float],
    load: Callable[[int], float],
    shares: Sequence[float],
) -> tuple[float, Decision, Decision]:
    """What graphs take with this front; both ways: waiting for flash with everything, and with what needs it only."""
    lost = [piece for piece in held if piece.nbytes and piece.start < front and not piece.moved]
    hole = (lost[0].start, lost[-1].start + lost[-1].length) if lost else (0, 0)
    kept = [
        piece
        for piece in held
        if (piece.start >= front or not piece.nbytes) and not hole[0] <= piece.start < hole[1]
    ]
    due = _due(tokens, kept, repaired(front))
    reads = {(piece.source, piece.start if piece.source is None else 0): piece.nbytes for piece in kept}
    seconds = load(sum(reads.values()))
    limit = min((piece.start for piece in kept if piece.nbytes or piece.moved), default=tokens)
    # Nothing moved is kept before `limit`, so nothing is repaired there.

    def way(ahead: int) -> Decision:
        first = int(np.searchsorted(due, ahead))
        before, rest = compute(due[:first]), compute(due[first:])
        one = max(before, seconds * shares[0]) + rest
        all_ = max(before, seconds) + rest * shares[-1]
        return Decision(hole, front, ahead, max(one, all_), 0.0)

    if not any(piece.nbytes for piece in kept):
        return compute(due), way(0), way(0)
    return compute(due), way(0), way(limit)


def _due(tokens: int, kept: Sequence[Held], repaired: int) -> NDArray[np.int64]:
    """Places of the tokens to compute: those not kept, and so many of the moved ones; which is open, so evenly."""
    due, moved = np.ones(tokens, bool), np.zeros(tokens, bool)
    for piece in kept:
        due[piece.start : piece.start + piece.length] = False
        moved[piece.start : piece.start + piece.length] = piece.moved
    places = np.flatnonzero(moved)
    due[places[np.linspace(0, len(places) - 1, min(repaired, len(places))).astype(np.int64)]] = True
    return np.flatnonzero(due)
