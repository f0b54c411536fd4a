"""How long the stages of requests take, as histograms, for metrics and the live view.

Measured only while somebody looks: each look keeps it on for a few minutes. Next to what it measures it costs nothing:
about a microsecond a stage, a third of one when it is off.

    lookup     find what is held of a prompt
    lease      hold it
    read       bring one tile (block x layer group) from flash: read, check, decode, turn, place
    place      bring one tile from memory: turn, place
    wait       of one request, what the engine waited for look-up, lease and tiles
    prefill    of one request, from the prompt to its logits: its time to first token
    put        copy the new KV of one prompt into blocks
    write      encode one block and write it to flash

Engines report `wait` and `prefill`. What is placed in the engine's process, beside a daemon, the daemon does not see.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import msgspec

from .spans import Span, begin_span

Stage = Literal["lookup", "lease", "read", "place", "wait", "put", "write", "prefill"]
STAGES: tuple[Stage, ...] = ("lookup", "lease", "read", "place", "wait", "put", "write", "prefill")

BOUNDS = (*(base * 10.0**exponent for exponent in range(-5, 1) for base in (1.0, 2.5, 5.0)), 10.0)
"""Upper ends of the buckets in seconds, 10 µs to 10 s; what took longer is in one more."""

_KEPT_ON = 300.0  # seconds after the last look


def microseconds(seconds: float) -> int:
    """As counts keep them: whole, never less than 0, and none for what is no number."""
    return round(min(seconds, 1e9) * 1e6) if seconds > 0 else 0


class StageUse(msgspec.Struct, frozen=True):
    """How often a stage ran, its seconds in all, and how often by bucket: `counts` has one more than BOUNDS."""

    counts: tuple[int, ...]
    seconds: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Histogram:
    """Counts by fixed buckets. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = [0] * (len(BOUNDS) + 1)
        self._seconds = 0.0

    def observe(self, seconds: float) -> None:
        bucket = bisect_left(BOUNDS, seconds)
        with self._lock:
            self._counts[bucket] += 1
            self._seconds += seconds

    def use(self) -> StageUse:
        """What was counted until now."""
        with self._lock:
            return StageUse(tuple(self._counts), self._seconds)


class Timings:
    """A histogram a stage. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._until = float("-inf")
        self._histograms = {stage: Histogram() for stage in STAGES}

    @property
    def is_on(self) -> bool:
        return self._clock() < self._until

    def look(self) -> dict[Stage, StageUse]:
        """What was measured until now; measures from now on, for a few minutes."""
        self._until = self._clock() + _KEPT_ON
        return {stage: histogram.use() for stage, histogram in self._histograms.items()}

    def stage(self, name: Stage) -> AbstractContextManager[object]:
        """Around one run of a stage; also a span of that name where spans are wanted, see `spans`."""
        span = begin_span(name)
        if span is None and self._clock() >= self._until:
            return _UNSEEN
        return _Running(self._histograms[name], span, self._clock)

    def observe(self, name: Stage, seconds: float) -> None:
        """One run of a stage that somebody else measured."""
        if self._clock() < self._until:
            self._histograms[name].observe(seconds)


class _Running:
    __slots__ = ("_clock", "_histogram", "_span", "_started")

    def __init__(self, histogram: Histogram, span: Span | None, clock: Callable[[], float]) -> None:
        self._histogram, self._span, self._clock = histogram, span, clock

    def __enter__(self) -> None:
        self._started = self._clock()

    def __exit__(self, *_: object) -> None:
        self._histogram.observe(self._clock() - self._started)
        if self._span is not None:
            self._span.end()


_UNSEEN: AbstractContextManager[object] = nullcontext()
