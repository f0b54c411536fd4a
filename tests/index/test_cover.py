"""The choice of pieces against all choices."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.index.cover import between, cover

Runs = list[tuple[int, int]]


@st.composite
def overlapping(draw: st.DrawFn) -> tuple[Runs, int]:
    """(runs, shortest): most runs a little longer than `shortest`, and in each other's way."""
    shortest = draw(st.integers(1, 5))
    runs, at = [], 0
    for step, more in draw(
        st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 5)), min_size=2, max_size=9)
    ):
        at += step
        runs.append((at, at + max(0, shortest + more)))
    return draw(st.permutations(runs)), shortest


def pieces_of(runs: Runs, shortest: int, boundaries: list[int] | None = None) -> Runs:
    begins = np.array([begin for begin, _ in runs], np.int64)
    ends = np.array([end for _, end in runs], np.int64)
    return cover(begins, ends, shortest, boundaries or [])


def best(runs: Runs, shortest: int) -> tuple[int, int]:
    """(tokens, -pieces) of the best choice, by trying for each position every piece that ends there."""

    @cache
    def up_to(end: int) -> tuple[int, int]:
        if end == 0:
            return 0, 0
        choices = [up_to(end - 1)]
        for begin in range(end - shortest + 1):
            if any(first <= begin and end <= last for first, last in runs):
                tokens, pieces = up_to(begin)
                choices.append((tokens + end - begin, pieces - 1))
        return max(choices)

    return up_to(max((end for _, end in runs), default=0))


@settings(max_examples=400)
@given(case=overlapping(), boundaries=st.lists(st.integers(0, 40), max_size=6).map(sorted))
@example(case=([(0, 3), (2, 5), (4, 9), (5, 10)], 3), boundaries=[])  # a third piece for one token more
@example(case=([(0, 8), (4, 12), (8, 16)], 8), boundaries=[])  # the middle one is in the way
@example(case=([(0, 6), (3, 9)], 5), boundaries=[])  # no room for both
@example(case=([(0, 5), (4, 9), (8, 13)], 5), boundaries=[])
@example(case=([], 2), boundaries=[3])
def test_most_tokens_with_fewest_pieces(case: tuple[Runs, int], boundaries: list[int]) -> None:
    runs, shortest = case
    pieces = pieces_of(runs, shortest, boundaries)
    for begin, end in pieces:
        assert end - begin >= shortest
        assert any(first <= begin and end <= last for first, last in runs)
    for (_, end), (begin, _) in pairwise(pieces):
        assert end <= begin
    assert (sum(end - begin for begin, end in pieces), -len(pieces)) == best(runs, shortest)


@settings(max_examples=200)
@given(
    runs=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)).map(lambda run: (run[0], sum(run)))),
    edges=st.lists(st.integers(0, 44), max_size=10, unique=True).map(sorted),
)
def test_between_pieces_is_left_what_no_piece_covers(runs: Runs, edges: list[int]) -> None:
    pieces = list(zip(edges[::2], edges[1::2], strict=False))
    taken = {at for begin, end in pieces for at in range(begin, end)}
    begins = np.array([begin for begin, _ in runs], np.int64)
    ends = np.array([end for _, end in runs], np.int64)
    left = list(zip(*(column.tolist() for column in between(begins, ends, pieces)), strict=True))
    for begin, end in left:
        assert not taken & set(range(begin, end))
        assert any(first <= begin and end <= last for first, last in runs)
    assert {at for run in left for at in range(*run)} == {at for run in runs for at in range(*run)} - taken
    for length in range(1, 13):  # nothing is cut but at pieces
        whole = {
            at
            for at in range(45)
            if not taken & set(range(at, at + length))
            and any(first <= at and at + length <= last for first, last in runs)
        }
        assert whole == {at for begin, end in left for at in range(begin, end - length + 1)}


@pytest.mark.parametrize(
    ("boundaries", "meet"),
    [([], 14), ([12], 12), ([11, 13, 15], 13), ([9, 15], 14), ([10], 10), ([14], 14)],
)
def test_pieces_meet_at_a_boundary_or_as_late_as_possible(boundaries: list[int], meet: int) -> None:
    assert pieces_of([(0, 14), (10, 24)], 3, boundaries) == [(0, meet), (meet, 24)]


def test_a_boundary_never_makes_a_piece_too_short() -> None:
    assert pieces_of([(0, 14), (6, 20)], 8, [7, 13]) == [(0, 12), (12, 20)]
    assert pieces_of([(0, 14), (6, 20), (16, 30)], 8, [7, 13, 20]) == [(0, 12), (12, 20), (20, 30)]


def test_thousands_of_runs_one_token_apart() -> None:
    """As a prompt of one repeated token has them."""
    runs = [(i, i + 128) for i in range(20_000)]
    pieces = pieces_of(runs, 32)
    assert pieces[0][0] == 0
    assert pieces[-1][1] == 20_127
    assert all(end == begin for (_, end), (begin, _) in pairwise(pieces))
    assert len(pieces) == -(-20_127 // 128)
