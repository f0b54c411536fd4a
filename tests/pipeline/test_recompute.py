"""What repairs choose: as much as they need, the best first, and only moved tokens."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.pipeline.recompute import (
    AnyRepair,
    Attended,
    Both,
    Deviating,
    Everything,
    Evidence,
    FirstTokens,
    MovedRun,
    Nothing,
    WhenSure,
    first_of,
    select,
)

REPAIRS: tuple[AnyRepair, ...] = (
    Nothing(),
    FirstTokens(8),
    Attended(0.15),
    Deviating(0.1),
    Both(FirstTokens(4), Attended(0.1)),
    Both(FirstTokens(2), Deviating(0.1)),
    Everything(),
    WhenSure(FirstTokens(8), 0.3),
)


@st.composite
def some_runs(draw: st.DrawFn) -> list[MovedRun]:
    runs, at = [], 0
    for _ in range(draw(st.integers(0, 6))):
        at += draw(st.integers(0, 20))
        runs.append(MovedRun(at, draw(st.integers(1, 60))))
        at += runs[-1].length
    return runs


def measured(runs: list[MovedRun], seed: int) -> Evidence:
    tokens = max((run.target + run.length for run in runs), default=0) + 10
    random = np.random.default_rng(seed)
    return Evidence(*(random.random(tokens, np.float32) for _ in range(2)))


@pytest.mark.parametrize("repair", REPAIRS, ids=str)
@settings(deadline=None)
@given(runs=some_runs(), spare=st.integers(0, 40), seed=st.integers(0, 9))
def test_what_is_needed_and_as_much_more_as_is_free(
    repair: AnyRepair, runs: list[MovedRun], spare: int, seed: int
) -> None:
    moved = np.array([at for run in runs for at in range(run.target, run.target + run.length)], dtype=int)
    chosen = select(repair, runs, measured(runs, seed), spare)
    assert (np.diff(chosen) > 0).all()
    assert np.isin(chosen, moved).all()
    room = 0 if isinstance(repair, Nothing) else spare
    assert len(chosen) == min(len(moved), repair.least(runs) + room)


@pytest.mark.parametrize("repair", REPAIRS, ids=str)
def test_without_runs_nothing_is_chosen_and_no_evidence_needed(repair: AnyRepair) -> None:
    assert select(repair, [], Evidence(), spare=7).tolist() == []
    assert repair.rank([], measured([], 0)).tolist() == []


def test_heads_of_all_runs_grow_alike() -> None:
    runs = [MovedRun(10, 50), MovedRun(70, 2), MovedRun(130, 50)]
    assert select(FirstTokens(3), runs, Evidence(), spare=2).tolist() == [
        10,
        11,
        12,
        13,
        70,
        71,
        130,
        131,
        132,
        133,
    ]


def test_attention_chooses_spans_and_deviation_single_tokens() -> None:
    measured_ = np.zeros(60, np.float32)
    measured_[[22, 40]] = 9, 10
    measured_[21:24] += 5
    runs = [MovedRun(10, 50)]
    evidence = Evidence(attention=measured_, deviation=measured_)
    assert select(Deviating(0.02), runs, evidence).tolist() == [22]
    (chosen,) = select(Attended(0.02), runs, evidence).tolist()
    assert 18 <= chosen <= 26


@pytest.mark.parametrize("repair", REPAIRS, ids=str)
def test_repairs_outlive_a_file(repair: AnyRepair) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(repair), type=AnyRepair) == repair


def test_sure_is_what_leads_by_the_margin() -> None:
    repair = WhenSure(FirstTokens(4), 0.5)
    assert repair.is_sure(np.array([0.0, 3.0, 2.5, -9.0], np.float32))
    assert not repair.is_sure(np.array([2.75, 3.0, 0.0], np.float32))
    assert first_of(repair) == FirstTokens(4) == first_of(FirstTokens(4))
