"""Graphs are started one ahead of the one that runs, and none is left running."""

from __future__ import annotations

import time

import pytest

from kvstore.pipeline.ahead import Ahead


class _Graph:
    """Notes when it is waited for."""

    def __init__(self, number: int, over: list[int], fails: bool = False) -> None:
        self._number, self._over, self._fails = number, over, fails

    def wait(self) -> None:
        self._over.append(self._number)
        if self._fails:
            raise RuntimeError(f"graph {self._number}")


def test_one_runs_and_one_waits() -> None:
    over: list[int] = []
    ahead = Ahead(3)
    for number in range(6):
        ahead.add(number % 3, time.perf_counter(), _Graph(number, over))
        assert over == list(range(number))
    ahead.finish()
    assert over == list(range(6))
    assert all(seconds > 0 for seconds in ahead.seconds)


def test_seconds_add_up_to_no_more_than_passed() -> None:
    """What waits in the queue does not count twice."""
    started = time.perf_counter()
    ahead = Ahead(2)
    for number in range(10):
        ahead.add(number % 2, time.perf_counter(), _Graph(number, []))
    ahead.finish()
    assert sum(ahead.seconds) <= time.perf_counter() - started


def test_what_was_started_is_waited_for_also_after_a_failure() -> None:
    over: list[int] = []
    ahead = Ahead(1)
    ahead.add(0, time.perf_counter(), _Graph(0, over, fails=True))
    with pytest.raises(RuntimeError, match="graph 0"):
        ahead.add(0, time.perf_counter(), _Graph(1, over, fails=True))
    ahead.abandon()
    assert over == [0, 1]
