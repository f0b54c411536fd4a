"""Covering tokens with static-graph calls, and keeping measured costs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.pipeline.schedule import CallCosts, CostTable

costs = st.dictionaries(st.integers(1, 40), st.floats(0.001, 10, allow_nan=False), min_size=1, max_size=4)


@given(costs, st.integers(0, 60))
def test_a_cover_holds_every_token_and_pads_only_its_last_call(
    seconds: dict[int, float], tokens: int
) -> None:
    cover = CallCosts(seconds).cover(tokens)
    assert set(cover.sizes) <= set(seconds)
    assert sum(cover.sizes) - cover.padding == tokens
    assert list(cover.sizes) == sorted(cover.sizes, reverse=True)
    assert 0 <= cover.padding < (cover.sizes[-1] if cover.sizes else 1)
    assert cover.seconds == pytest.approx(sum(seconds[size] for size in cover.sizes))


@given(
    st.dictionaries(st.integers(1, 8), st.floats(0.01, 10), min_size=1, max_size=3),
    st.integers(1, 12),
)
def test_no_other_set_of_calls_is_cheaper(seconds: dict[int, float], tokens: int) -> None:
    most = -(-tokens // min(seconds))
    cheapest = min(
        sum(seconds[size] for size in sizes)
        for count in range(1, most + 1)
        for sizes in itertools.combinations_with_replacement(seconds, count)
        if sum(sizes) >= tokens
    )
    assert CallCosts(seconds).cover(tokens).seconds == pytest.approx(cheapest)


def test_padding_is_taken_where_it_is_cheaper_and_only_there() -> None:
    milliseconds = CallCosts({1: 30, 16: 45, 32: 71, 64: 122, 128: 237, 256: 450, 512: 882})  # of one device
    assert milliseconds.cover(1).sizes == (1,)
    assert milliseconds.cover(2).sizes == (16,)
    assert milliseconds.cover(150).sizes == (128, 32)
    assert milliseconds.cover(250).sizes == (256,)


def test_covers_asked_in_any_order_are_the_same() -> None:
    seconds = {1: 3.0, 16: 4.5, 64: 12.2}
    table = CallCosts(seconds)
    backwards = [table.cover(n) for n in range(200, 0, -1)]
    assert backwards == [CallCosts(seconds).cover(n) for n in range(200, 0, -1)]


@pytest.mark.parametrize("seconds", [{}, {0: 1.0}, {-1: 1.0}, {16: 0.0}, {16: -1.0}, {16: float("nan")}])
def test_costs_that_make_no_sense_are_refused(seconds: dict[int, float]) -> None:
    with pytest.raises(ValueError, match="positive"):
        CallCosts(seconds)


class Device:
    """Counts how often it is measured."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.seconds, self.measured = seconds, 0

    def __call__(self) -> dict[int, float]:
        self.measured += 1
        return self.seconds


def test_a_device_is_measured_once_for_each_context_length(tmp_path: Path) -> None:
    short, long = Device({1: 0.1, 16: 0.2}), Device({1: 0.3, 16: 0.4})
    for table in (CostTable(tmp_path / "costs.json"), CostTable(tmp_path / "costs.json")):
        for _ in range(2):
            assert table.at(512, [1, 16], short).seconds == short.seconds
            assert table.at(1024, [1, 16], long).seconds == long.seconds
    assert (short.measured, long.measured) == (1, 1)


def test_other_sizes_are_measured_anew_and_other_context_lengths_kept(tmp_path: Path) -> None:
    path, device, kept = tmp_path / "costs.json", Device({1: 0.1, 32: 0.2}), Device({1: 0.5})
    CostTable(path).at(512, [1], Device({1: 0.1}))
    CostTable(path).at(1024, [1], kept)
    assert CostTable(path).at(512, [1, 32], device).seconds == device.seconds
    assert device.measured == 1
    CostTable(path).at(1024, [1], kept)
    assert kept.measured == 1


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"512": 3}', b'{"512": {"1": 0}}', b"\xff" * 20])
def test_a_damaged_file_is_measured_anew(tmp_path: Path, content: bytes) -> None:
    path, device = tmp_path / "costs.json", Device({1: 0.1})
    path.write_bytes(content)
    assert CostTable(path).at(512, [1], device).seconds == {1: 0.1}
    assert CostTable(path).at(512, [1], device).seconds == {1: 0.1}
    assert device.measured == 1
    assert [p.name for p in tmp_path.iterdir()] == ["costs.json"]
