"""The estimate of reuse against streams whose hazards are known, and its index against a brute-force search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.prefetch import worth
from kvstore.prefetch.worth import ReuseChance, age_slot, value_density


@given(st.floats(0, 1e9))
def test_age_slots_cover_all_ages(age: float) -> None:
    slot = age_slot(age)
    assert worth._EDGES[slot] <= age * (1 + 1e-9)
    assert slot == worth._AGES - 1 or age <= worth._EDGES[slot + 1] * (1 + 1e-9)


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(1e-6, 1.0), min_size=worth._AGES, max_size=worth._AGES))
def test_index_is_the_best_ratio_over_waiting_times(hazards: list[float]) -> None:
    """By a plain loop over all waiting times that end with a bucket."""
    found = worth._index(np.array([hazards]))[0]
    for age in range(worth._AGES):
        best, survive, kept = 0.0, 1.0, 0.0
        for slot in range(age, worth._AGES):
            width = worth._WIDTHS[slot] / (2 if slot == age else 1)
            stay = np.exp(-hazards[slot] * width)
            kept += survive * (1 - stay) / hazards[slot]
            survive *= stay
            best = max(best, (1 - survive) / kept)
        assert found[age] == pytest.approx(best, rel=1e-6)


def test_a_class_that_comes_back_is_worth_more_than_one_that_does_not() -> None:
    chance = ReuseChance()
    back, never = chance.class_of("back", 1, 1), chance.class_of("never", 1, 1)
    now = 0.0
    for turn in range(4000):
        now += 1.0
        chance.used(("never", turn), now, never)
        chance.used(("back", turn), now, back)
        chance.used(("back", turn - 30), now, chance.class_of("back", 2, 1))
        chance.learn(now)
    young, old = age_slot(1.0), age_slot(300.0)
    assert chance.index[back][young] > 20 * chance.index[never][young]
    assert chance.index[back][age_slot(20.0)] > chance.index[back][young], (
        "the nearer its time, the more it is worth"
    )
    assert chance.index[back][old] < chance.index[back][young] / 5, "its time is over"


def test_a_constant_rate_is_found() -> None:
    """Uses of one class with a rate of 1/50 s: the index is that rate at all ages that occur."""
    chance = ReuseChance()
    rng = np.random.default_rng(4)
    number = chance.class_of("", 2, 1)
    due = rng.exponential(50, 400)
    now = 0.0
    while now < 3000:
        name = int(due.argmin())
        now = float(due[name])
        chance.used(name, now, number)
        due[name] = now + rng.exponential(50)
        chance.learn(now)
    for age in (2.0, 10.0, 60.0):
        assert chance.index[number][age_slot(age)] == pytest.approx(1 / 50, rel=0.25)
        assert chance.within(number, age, 30.0) == pytest.approx(1 - np.exp(-30 / 50), rel=0.25)


@given(st.floats(0, 1e7), st.floats(0, 1e7), st.floats(0, 1e7))
def test_the_chance_of_reuse_grows_with_the_time_that_is_waited(age: float, wait: float, more: float) -> None:
    chance = ReuseChance()
    soon, late = chance.within(0, age, wait), chance.within(0, age, wait + more)
    assert 0.0 <= soon <= late < 1.0


def test_a_use_that_is_told_twice_is_one() -> None:
    chance = ReuseChance()
    for told in (False, True, True):
        chance.used("a", 100.0, 0, told=told)
    assert sum(map(sum, chance._ends)) == 0.0
    chance.used("a", 100.0, 0)
    assert sum(map(sum, chance._ends)) == 1.0, "two requests in the same instant are two uses"


def test_what_is_observed_is_bounded() -> None:
    chance = ReuseChance()
    for name in range(100_000):
        chance.used(name, float(name), 0)
    assert 16_000 < len(chance._open) <= worth._OBSERVED


def test_value_density_orders_by_saving_and_size() -> None:
    assert value_density(0.1, 2.0, 100) > value_density(0.1, 1.0, 100) > value_density(0.1, 1.0, 200)
    assert value_density(0.1, 1.0, 100) > value_density(0.1, -1.0, 100) > 0
