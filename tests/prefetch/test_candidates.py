"""What is worth reading: chances that are learned, and a knapsack of bytes."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.prefetch.candidates import PRICE, Candidate, Chances, Read, Sign, choose

signs = st.builds(
    Sign,
    st.sampled_from(["tokens", "session", "near", "beside", "follows"]),
    st.integers(0, 20),
    st.integers(0, 9),
)
reads = st.builds(Read, st.integers(1, 50), st.integers(1, 50), st.floats(0.001, 1), st.floats(0, 1))
candidates = st.lists(
    st.builds(Candidate, st.integers(), st.floats(0, 1), reads, st.floats(0, 1)), max_size=9
)


def test_a_sign_that_is_always_right_becomes_certain_and_one_that_never_is_becomes_worthless() -> None:
    right, wrong = Sign("near", 3, 4), Sign("tokens")
    chances = Chances()
    for _ in range(200):
        chances.learn(right, True)
        chances.learn(wrong, False)
    assert chances.of(right) > 0.95
    assert chances.of(wrong) < 0.05


def test_what_was_learned_of_one_rank_says_nothing_of_another() -> None:
    chances = Chances()
    before = chances.of(Sign("near", 1, 5))
    for _ in range(50):
        chances.learn(Sign("near", 0, 5), False)
    assert chances.of(Sign("near", 1, 5)) == before


def test_a_sign_that_changes_its_mind_is_believed_within_a_hundred_requests() -> None:
    chances = Chances()
    sign = Sign("follows", 0, 5)
    for _ in range(10_000):
        chances.learn(sign, True)
    for _ in range(100):
        chances.learn(sign, False)
    assert chances.of(sign) < 0.3


@given(st.lists(st.tuples(signs, st.booleans()), max_size=200), st.lists(signs, max_size=5))
def test_chances_stay_chances_and_more_signs_never_lower_one(
    learned: list[tuple[Sign, bool]], shown: list[Sign]
) -> None:
    chances = Chances()
    for sign, used in learned:
        chances.learn(sign, used)
    together = chances.of_all(shown)
    assert 0 <= together <= 1
    assert all(0 <= chances.of(sign) <= together + 1e-9 for sign in shown)


def test_a_source_nobody_knows_is_an_error() -> None:
    with pytest.raises(ValueError, match="astrology"):
        Chances().of(Sign("astrology"))


def test_a_read_that_is_worth_less_than_its_price_is_not_made() -> None:
    read = Read(10, 10, seconds=1.0, saved=1.0)
    assert choose([Candidate(1, PRICE - 0.01, read)], 100) == []
    assert choose([Candidate(1, PRICE + 0.01, read)], 100) != []
    assert choose([Candidate(1, PRICE - 0.01, read, price=0)], 100) != [], "it was read: only room counts"


def test_equals_keep_their_order_so_the_beginning_of_a_prefix_comes_first() -> None:
    read = Read(10, 10, 1.0, 1.0)
    assert [each.block for each in choose([Candidate(n, 0.9, read) for n in (5, 3, 8)], 20)] == [5, 3]


@given(candidates, st.integers(0, 200))
def test_the_chosen_fit_and_fall_short_of_the_optimum_by_less_than_one_candidate(
    given_: list[Candidate], budget: int
) -> None:
    chosen = choose(given_, budget)
    assert sum(each.read.room for each in chosen) <= budget
    assert all(each.value > 0 for each in chosen)
    fitting = [each for each in given_ if each.value > 0 and each.read.room <= budget]
    best = max(
        (
            sum(each.value for each in some)
            for count in range(len(fitting) + 1)
            for some in combinations(fitting, count)
            if sum(each.read.room for each in some) <= budget
        ),
        default=0.0,
    )
    most = max((each.value for each in fitting), default=0.0)
    assert sum(each.value for each in chosen) >= best - most - 1e-9
