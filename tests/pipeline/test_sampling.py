"""Greedy and random choice of the next token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from kvstore.pipeline.sampling import Sampler

LOGITS = arrays(np.float32, st.integers(1, 40), elements=st.floats(-30, 30, width=32))
SHARES = np.array([0.5, 0.25, 0.15, 0.06, 0.04])  # of five tokens


def draws(logits: np.ndarray[Any, Any], count: int = 8_000, **options: Any) -> list[float]:
    sampler = Sampler(seed=1, **options)
    drawn = np.bincount([sampler(logits) for _ in range(count)], minlength=len(logits))
    return (drawn / count).tolist()


@given(logits=LOGITS)
def test_greedy_takes_the_highest_and_the_lowest_id_of_equals(logits: np.ndarray[Any, Any]) -> None:
    best = Sampler()(logits)
    assert (logits <= logits[best]).all()
    assert (logits[:best] < logits[best]).all()


@given(logits=LOGITS, seed=st.integers(0, 2**32))
def test_filters_that_leave_one_token_are_greedy(logits: np.ndarray[Any, Any], seed: int) -> None:
    for options in ({"top_k": 1}, {"top_p": 1e-9}):
        assert Sampler(1.0, seed=seed, **options)(logits) == Sampler()(logits)
    drawn = Sampler(1.0, min_p=1.0, seed=seed)(logits)
    np.testing.assert_allclose(logits[drawn], logits.max(), atol=1e-6)  # equally likely in float64


@given(logits=LOGITS, seed=st.integers(0, 2**32))
def test_one_seed_gives_one_sequence(logits: np.ndarray[Any, Any], seed: int) -> None:
    one, other = (Sampler(1.5, top_p=0.9, seed=seed) for _ in range(2))
    assert [one(logits) for _ in range(8)] == [other(logits) for _ in range(8)]


@given(logits=LOGITS, top_p=st.floats(0.01, 0.999), seed=st.integers(0, 99))
def test_nothing_outside_of_the_nucleus_is_drawn(
    logits: np.ndarray[Any, Any], top_p: float, seed: int
) -> None:
    likeliest_first = np.argsort(-logits, kind="stable")
    shares = np.exp(logits[likeliest_first].astype(np.float64) - float(logits.max()))
    before = np.cumsum(shares / shares.sum()) - shares / shares.sum()
    nucleus = likeliest_first[before < top_p + 1e-9]
    sampler = Sampler(5.0, top_p=top_p, seed=seed)
    assert {sampler(logits) for _ in range(20)} <= set(nucleus.tolist())


@given(logits=LOGITS, top_k=st.integers(1, 10), seed=st.integers(0, 99))
def test_nothing_outside_of_the_top_k_is_drawn(logits: np.ndarray[Any, Any], top_k: int, seed: int) -> None:
    allowed = np.argsort(-logits, kind="stable")[:top_k]
    sampler = Sampler(5.0, top_k=top_k, seed=seed)
    assert {sampler(logits) for _ in range(20)} <= set(allowed.tolist())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, SHARES),
        ({"temperature": 2.0}, SHARES**0.5),
        ({"temperature": 0.5}, SHARES**2),
        ({"top_k": 2}, [0.5, 0.25, 0, 0, 0]),
        ({"top_p": 0.8}, [0.5, 0.25, 0.15, 0, 0]),
        ({"min_p": 0.2}, [0.5, 0.25, 0.15, 0, 0]),
        ({"top_k": 3, "top_p": 0.7}, [0.5, 0.25, 0, 0, 0]),
        (
            {"temperature": 2.0, "top_p": 0.7},
            [0.5**0.5, 0.25**0.5, 0, 0, 0],
        ),  # filters come before temperature
    ],
)
def test_shares_of_draws(options: dict[str, Any], expected: Any) -> None:
    order = np.array([3, 0, 4, 1, 2])  # the likeliest need not come first
    logits = np.empty(5, np.float32)
    logits[order] = np.log(SHARES) + 7
    found = np.array(draws(logits, **{"temperature": 1.0, **options}))[order]
    np.testing.assert_allclose(found, np.array(expected) / np.sum(expected), atol=0.02)


def test_excluded_tokens_are_never_drawn() -> None:
    logits = np.array([-np.inf, 0.0, -np.inf, 0.0], np.float32)
    for options in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.01}):
        assert draws(logits, 200, temperature=100.0, **options)[::2] == [0, 0]


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_refused(bad: float, temperature: float) -> None:
    with pytest.raises(ValueError, match="at token 1: the model's output is broken"):
        Sampler(temperature)(np.array([0.0, bad, 1.0], np.float32))
    with pytest.raises(ValueError, match="broken"):
        Sampler(temperature)(np.full(3, -np.inf, np.float32))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"temperature": np.nan}, "temperature nan"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 0.0}, "top_p 0.0"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"min_p": 1.5}, "min_p 1.5"),
    ],
)
def test_parameters_outside_of_their_range_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Sampler(**options)
