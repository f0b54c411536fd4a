"""What is written to flash: what comes back, within the day's writes, and at once what was refused in error."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.prefetch.admission import LEAST, MOST, Admission, price
from kvstore.prefetch.policy import Facts

DAY = 86_400.0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@given(st.integers(0, 200), st.integers(0, 200), st.integers(0, 100), st.floats(0, 10 * DAY))
def test_the_price_rises_with_what_was_spent(one: int, more: int, per_day: int, now: float) -> None:
    cheap, dear = price(0.3, one, per_day, now), price(0.3, one + more, per_day, now)
    assert 0.3 <= cheap <= dear <= 1.0
    assert price(0.3, per_day, per_day, now) == 1.0
    assert price(0.3, one, None, now) == 0.3


@given(st.integers(0, 99), st.floats(0, 0.99), st.floats(0, 0.99))
def test_the_price_falls_as_the_day_goes_by(spent: int, one: float, other: float) -> None:
    early, late = sorted((one, other))
    assert price(0.3, spent, 100, late * DAY) <= price(0.3, spent, 100, early * DAY)
    keeping_pace = int(early * 100)
    assert price(0.3, keeping_pace, 100, early * DAY + 1e-3) == pytest.approx(0.3)


def learned(clock: Clock, per_day: int | None = None, uses: int = 4000) -> Admission:
    """One that has seen nine notes in ten come back after half a minute, and one-shots never."""
    admission = Admission(per_day, clock)
    order = random.Random(1)
    for turn in range(uses // 3):
        clock.now += 1.0
        admission.used(Facts(kind="one-shot", name=("one-shot", turn)), missed=True)
        admission.used(Facts(kind="note", name=("note", turn)), missed=True)
        if turn >= 30 and order.random() < 0.9:
            admission.used(Facts(kind="note", name=("note", turn - 30), uses=2), missed=True)
    return admission


def test_what_comes_back_is_written_and_what_does_not_is_not() -> None:
    clock = Clock()
    admission = learned(clock)
    note = Facts(kind="note", name="a", last_use=clock.now - 5)
    one_shot = Facts(kind="one-shot", name="b", last_use=clock.now - 5)
    assert 0.6 < admission.chance(note) < 0.95
    assert admission.chance(one_shot) < 0.05
    assert admission.admits(note)
    assert not admission.admits(one_shot)


def test_the_time_of_a_block_goes_by() -> None:
    """A note that was not asked for when its time came is not likely to be."""
    clock = Clock()
    admission = learned(clock)
    young, old = (Facts(kind="note", name="a", last_use=clock.now - age) for age in (5, 400))
    assert admission.chance(old) < admission.chance(young) / 4


def test_before_it_has_seen_anything_all_is_written() -> None:
    clock = Clock()
    admission = Admission(100, clock)
    for number in range(50):
        admission.used(Facts(name=number), missed=True)
        assert admission.admits(Facts(name=number), number)
    assert not admission.admits(Facts(name=50), 100), "but no more than the day's writes"


def test_a_wrong_refusal_is_corrected_when_the_block_is_asked_for_again() -> None:
    clock = Clock()
    admission = learned(clock)
    one_shot = Facts(kind="one-shot", name="b", last_use=clock.now)
    assert not admission.admits(one_shot)
    assert not admission.admits(one_shot), "to decide again is not to ask for it again"
    admission.used(one_shot, missed=False)
    assert not admission.admits(one_shot), "memory held it still: nothing was lost"
    clock.now += 3000
    admission.used(one_shot._replace(last_use=None), missed=True)
    assert admission.admits(one_shot)
    assert not admission.admits(one_shot), "once"


def test_no_correction_is_worth_more_than_the_days_writes() -> None:
    clock = Clock()
    admission = learned(clock, per_day=1000)
    one_shot = Facts(kind="one-shot", name="b", last_use=clock.now)
    assert not admission.admits(one_shot, 500)
    admission.used(one_shot, missed=True)
    assert not admission.admits(one_shot, 1000)


def test_a_burst_leaves_writes_for_the_rest_of_the_day() -> None:
    """Half of what comes returns. However much comes at once, the day's writes do not go to it alone."""
    clock = Clock()
    clock.now = 10 * DAY
    admission = Admission(2_000, clock)
    order = random.Random(1)
    for turn in range(3000):
        clock.now += 1.0
        admission.used(Facts(name=turn), missed=True)
        if turn >= 20 and order.random() < 0.5:
            admission.used(Facts(name=turn - 20, uses=2), missed=True)
    spent = 0
    for number in range(4_000):
        spent += admission.admits(Facts(name=("burst", number), last_use=clock.now), spent)
    chance = admission.chance(Facts(name="one more", last_use=clock.now))
    day = clock.now % DAY / DAY
    assert 0.3 < chance < 0.8
    assert day * 2_000 < spent <= 2_000 * (day + (1 - day) * (chance - LEAST) / (1 - LEAST)) + 1


def test_where_all_is_as_likely_to_come_back_two_fifths_are_written() -> None:
    """Unless nearly all of it does: then the choice would be a wrong one."""
    for share, least, most in ((0.5, 0.35, 0.5), (0.95, 0.95, 1.0)):
        clock = Clock()
        admission = Admission(None, clock)
        order = random.Random(2)
        for turn in range(3000):
            clock.now += 1.0
            admission.used(Facts(name=turn), missed=True)
            if turn >= 20 and order.random() < share:
                admission.used(Facts(name=turn - 20, uses=2), missed=True)
        written = 0
        for number in range(2000):
            facts = Facts(name=("new", number), last_use=clock.now)
            admission.used(facts, missed=True)
            if admission.admits(facts):
                admission.wrote(1)
                written += 1
        assert least <= written / 2000 <= most
    assert MOST < 0.95


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.prefetch.admission._REMEMBERED", 1000)
    clock = Clock()
    admission = learned(clock)
    for number in range(3000):
        admission.admits(Facts(kind="one-shot", name=number, last_use=clock.now - 5))
        admission.used(Facts(kind="one-shot", name=number), missed=True)
    assert len(admission._refused) == 1000
    assert len(admission._again) <= 1000
