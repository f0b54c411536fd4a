"""Graphs are started one ahead of the one that runs, and none is left running."""

from __future__ import annotations

import pytest

from kvstore.pipeline.ahead import Ahead


class _Graph:
    """Notes when it is waited for."""

    def __init__(self, number: int, over: list[int], over_at: float = 0.0, fails: bool = False) -> None:
        self._number, self._over, self._fails = number, over, fails
        self.over_at = over_at

    def wait(self) -> None:
        self._over.append(self._number)
        if self._fails:
            raise RuntimeError(f"graph {self._number}")


def test_one_runs_and_one_waits() -> None:
    over: list[int] = []
    ahead = Ahead(3)
    for number in range(6):
        ahead.add(number % 3, float(number), _Graph(number, over))
        assert over == list(range(number))
    ahead.finish()
    assert over == list(range(6))


@pytest.mark.parametrize("queued", [True, False])
def test_each_call_is_charged_what_its_own_graphs_took(queued: bool) -> None:
    """Whether the device queues or returns when a graph is over: that went to the call before it, and 0 to the last."""
    ahead, moment = Ahead(2), 10.0
    for number, seconds in enumerate((4.0, 1.0, 5.0, 2.0)):
        begun = 10.0 + number if queued else moment + 0.5
        moment = moment + seconds if queued else begun + seconds
        ahead.add(number % 2, begun, _Graph(number, [], over_at=moment))
    ahead.finish()
    assert ahead.seconds == [9.0, 3.0]


def test_what_was_started_is_waited_for_also_after_a_failure() -> None:
    over: list[int] = []
    ahead = Ahead(1)
    ahead.add(0, 0.0, _Graph(0, over, fails=True))
    with pytest.raises(RuntimeError, match="graph 0"):
        ahead.add(0, 0.0, _Graph(1, over, fails=True))
    ahead.abandon()
    assert over == [0, 1]
