"""What followed what: learned from requests, bounded, and forgetting."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvstore.prefetch.followers import Followers


def test_what_always_comes_after_something_is_expected_after_it() -> None:
    followers = Followers()
    for _ in range(5):
        followers.learn([1, 2])  # the calendar, then the notes
        followers.learn([1, 3, 4])
        followers.learn([9])
    expected = followers.expect({2: 1.0}, 0.2)
    assert set(expected) >= {3, 4}
    assert expected[3] > 0.7


def test_a_walk_reaches_what_comes_several_steps_later_with_falling_chance() -> None:
    followers = Followers()
    for _ in range(8):
        followers.learn(list(range(100, 110)))
        followers.learn([7])
    expected = followers.expect({100: 1.0}, 0.1)
    assert list(expected)[:3] == [101, 102, 103]
    assert {101, 102, 103, 104} <= set(expected)
    assert list(expected.values()) == sorted(expected.values(), reverse=True)


def test_what_came_only_once_is_hardly_expected_and_what_comes_at_random_is_not() -> None:
    followers = Followers()
    followers.learn([1])
    followers.learn([2])
    assert followers.expect({1: 1.0}, 0.6) == {}
    rng = random.Random(0)
    for _ in range(300):
        followers.learn([50])
        followers.learn([rng.randrange(100, 200)])
    assert followers.expect({50: 1.0}, 0.2) == {}


def test_habits_that_change_are_unlearned() -> None:
    followers = Followers()
    for _ in range(100):
        followers.learn([1])
        followers.learn([2])
    for _ in range(60):
        followers.learn([1])
        followers.learn([3])
    expected = followers.expect({1: 1.0}, 0.1)
    assert expected[3] > 0.8
    assert expected.get(2, 0.0) < 0.15


@given(
    st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=60), st.integers(1, 12), st.integers(1, 4)
)
def test_the_table_stays_within_its_bounds_and_chances_between_0_and_1(
    requests: list[list[int]], rows: int, wide: int
) -> None:
    followers = Followers(rows, wide)
    for request in requests:
        followers.learn(request)
        assert len(followers) <= rows
    for start in range(41):
        expected = followers.expect({start: 1.0}, 0.05, most=10)
        assert len(expected) <= 10
        assert start not in expected
        assert all(0.05 <= chance <= 1 for chance in expected.values())


def test_a_block_that_is_gone_leads_nowhere() -> None:
    followers = Followers()
    for _ in range(5):
        followers.learn([1])
        followers.learn([2])
    followers.forget(1)
    assert followers.expect({1: 1.0}, 0.1) == {}
