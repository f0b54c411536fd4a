"""Graphs that were started and are not over: while one runs, the next waits in the device's queue.

So what the host does between two graphs, some 0.1 ms, is done beside a graph. No more than one waits: a prefill that is
broken off has little left to wait for.
"""

from __future__ import annotations

import contextlib
from collections import deque

from .runtime import Execution


class Ahead:
    """Executions of `calls` calls, each of several graphs. `seconds`: what the graphs of each call took so far."""

    def __init__(self, calls: int) -> None:
        self.seconds = [0.0] * calls
        self._running: deque[tuple[int, float, Execution]] = deque()
        self._over = 0.0

    def add(self, call: int, begun: float, execution: Execution) -> None:
        """A graph of call number `call` was started at `begun` (perf_counter). Returns when all before it are over."""
        self._running.append((call, begun, execution))
        while len(self._running) > 1:
            self._wait()

    def finish(self) -> None:
        """Until all are over."""
        while self._running:
            self._wait()

    def abandon(self) -> None:
        """As `finish`, whatever happens: until then the device writes to memory."""
        while self._running:
            with contextlib.suppress(Exception):
                self._wait()

    def _wait(self) -> None:
        call, begun, execution = self._running.popleft()
        execution.wait()
        self.seconds[call] += execution.over_at - max(begun, self._over)
        self._over = execution.over_at
