"""Stages are timed while someone looks, and only then; no run is lost or counted twice."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.watch.change import quantile
from kvstore.watch.timings import BOUNDS, STAGES, Histogram, Timings, microseconds


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_nothing_is_timed_until_someone_looks_and_some_minutes_after_the_last_look() -> None:
    clock = Clock()
    timings = Timings(clock)

    def run() -> None:
        with timings.stage("lookup"):
            clock.now += 0.003
        timings.observe("wait", 0.5)

    run()
    assert {use.count for use in timings.look().values()} == {0}
    run()
    found = timings.look()
    assert (found["lookup"].count, found["wait"].count) == (1, 1)
    assert found["lookup"].seconds == pytest.approx(0.003)
    clock.now += 299
    run()
    clock.now += 2
    run()
    found = timings.look()
    assert found["lookup"].count == 2, "a stage that began while it was on counts"
    assert set(found) == set(STAGES)


def test_a_stage_that_fails_took_its_time_too() -> None:
    clock = Clock()
    timings = Timings(clock)
    timings.look()

    def fail() -> None:
        with timings.stage("read"):
            clock.now += 2.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert timings.look()["read"].seconds == pytest.approx(2.0)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_buckets_hold_what_their_bounds_say(times: list[float]) -> None:
    histogram = Histogram()
    for seconds in times:
        histogram.observe(seconds)
    use = histogram.use()
    for number, bound in enumerate(BOUNDS):
        assert sum(use.counts[: number + 1]) == sum(seconds <= bound for seconds in times)
    assert use.count == len(times)
    assert use.seconds == pytest.approx(sum(times))
    middle = quantile(use, BOUNDS, 0.5)
    assert middle is not None
    below = sum(seconds <= middle for seconds in times)
    assert below >= len(times) / 2 or middle == BOUNDS[-1]


def test_threads_lose_no_run() -> None:
    timings = Timings()
    timings.look()

    def many() -> None:
        for _ in range(2000):
            with timings.stage("place"):
                pass

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timings.look()["place"].count == 8000


@pytest.mark.parametrize(
    ("seconds", "count"),
    [(0.5, 500_000), (-1.0, 0), (0.0, 0), (float("nan"), 0), (float("inf"), 10**15), (1e-7, 0)],
)
def test_counts_of_microseconds(seconds: float, count: int) -> None:
    """An engine, or a client of the daemon, may say anything: a count stays a whole number that only grows."""
    assert microseconds(seconds) == count
