"""Load or recompute: never worse than either alone, and right at the ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvstore.prefetch.load_or_recompute import WORTH, Decision, Held, Throughput, decide


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[Held]]:
    """A prefix of blocks, then moved ones with gaps between; in memory or on flash; at least one token after them."""
    held, at = [], 0
    for moved, count in ((False, draw(st.integers(0, 6))), (True, draw(st.integers(0, 6)))):
        for _ in range(count):
            at += draw(st.integers(0, 50)) if moved else 0
            length = draw(st.integers(1, 128))
            held.append(Held(at, length, draw(st.sampled_from([0, 100 * length])), moved))
            at += length
    return at + draw(st.integers(1, 100)), held


def decided(
    tokens: int, held: Sequence[Held], token_seconds: float, byte_seconds: float, groups: int, heads: int = 0
) -> Decision:
    return decide(
        tokens,
        held,
        lambda front: sum(
            heads for piece in held if piece.moved and (piece.start >= front or not piece.nbytes)
        ),
        lambda places: len(places) * token_seconds,
        lambda nbytes: nbytes * byte_seconds,
        [1 / groups] * groups,
    )


def hole(held: Sequence[Held]) -> tuple[int, int]:
    """From the first to the last token of the prefix that only flash holds: what is computed is one stretch."""
    cold = [piece for piece in held if piece.nbytes and not piece.moved]
    return (cold[0].start, cold[-1].start + cold[-1].length) if cold else (0, 0)


@given(prompts(), st.floats(1e-5, 1e-2), st.floats(1e-9, 1e-4), st.sampled_from([1, 4, 10]))
def test_it_is_never_slower_than_all_or_nothing_but_for_noise(
    prompt: tuple[int, list[Held]], token_seconds: float, byte_seconds: float, groups: int
) -> None:
    tokens, held = prompt
    decision = decided(tokens, held, token_seconds, byte_seconds, groups)
    assert decision.seconds <= decision.load_all
    due = tokens - sum(piece.length for piece in held)
    begin, end = hole(held)
    cold = sum(piece.length for piece in held if piece.nbytes and piece.moved) + end - begin
    load_nothing = (due + cold) * token_seconds
    assert decision.seconds * WORTH <= load_nothing * (1 + 1e-9)
    load = sum(piece.nbytes for piece in held) * byte_seconds
    least = max(due * token_seconds, load)
    assert decision.load_all >= least * (1 - 1e-9)
    if cold:
        assert decision.load_all <= (due * token_seconds + load) * (1 + 1e-9)


@given(prompts(), st.integers(1, 10))
def test_what_costs_nothing_to_load_is_loaded(prompt: tuple[int, list[Held]], groups: int) -> None:
    tokens, held = prompt
    decision = decided(tokens, held, 1e-3, 0.0, groups)
    assert (decision.front, decision.ahead, decision.hole[0]) == (0, 0, decision.hole[1])


@given(prompts(), st.integers(1, 10))
def test_what_takes_for_ever_to_load_is_computed_and_memory_still_serves(
    prompt: tuple[int, list[Held]], groups: int
) -> None:
    tokens, held = prompt
    cold = [piece for piece in held if piece.nbytes]
    assume(cold)
    decision = decided(tokens, held, 1e-3, 1e3, groups)
    assert decision.front == cold[-1].start + cold[-1].length
    assert decision.hole == hole(held)


def test_front_and_back_meet_in_the_middle() -> None:
    """Cake: constants c to compute a token and l to load one take n * c * l / (c + l) together."""
    held = [Held(at, 10, 10, False) for at in range(0, 1000, 10)]
    compute, load = 1.0, 3.0  # seconds a token
    decision = decide(
        1001, held, lambda _: 0, lambda places: len(places) * compute, lambda n: n * load, [0.01] * 100
    )
    assert decision.hole == (0, decision.front)
    assert decision.ahead == decision.front
    assert decision.front == pytest.approx(1000 * load / (compute + load), abs=20)
    assert decision.seconds == pytest.approx(1000 * compute * load / (compute + load), rel=0.03)
    assert decision.load_all == pytest.approx(3000, rel=0.01)


def test_runs_on_flash_before_the_front_are_left_and_those_in_memory_stay() -> None:
    held = [
        Held(0, 100, 0),
        Held(120, 100, 10_000, True),
        Held(230, 100, 0, True),
        Held(340, 100, 10_000, True),
    ]
    decision = decided(450, held, token_seconds=1e-3, byte_seconds=1.5e-5, groups=10)
    assert decision.front == 220  # the first run costs 100 ms to compute, 150 ms to load
    assert decision.hole[0] == decision.hole[1]
    assert decision.ahead == 230  # nothing is built on a run that is not repaired yet


def test_what_is_read_for_two_is_paid_once_and_whole() -> None:
    two = [Held(100, 50, 1000, True, source=7), Held(200, 50, 1000, True, source=7)]
    assert decided(300, two, 1e-3, 1e-5, groups=1).load_all == pytest.approx(0.2 + 0.01)
    late = decided(300, two, 1e-3, 1e-3, groups=1)  # to leave one of them on flash saves nothing
    assert (late.front, late.seconds) == (250, pytest.approx(0.3))


def test_a_small_gain_is_no_reason_to_split_a_prompt_otherwise() -> None:
    held = [Held(0, 1000, 1000)]
    assert decided(2000, held, 1e-3, 1e-3 / 100, groups=1).ahead == 0


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def read(speed: Throughput, clock: Clock, nbytes: int, seconds: float) -> None:
    speed.begin()
    clock.now += seconds
    speed.end(nbytes)


def test_throughput_counts_the_time_in_which_anything_is_under_way() -> None:
    clock = Clock()
    speed = Throughput(clock)
    assert speed.bytes_per_second() is None
    speed.begin()
    clock.now += 1
    speed.begin()  # two at a time
    clock.now += 1
    speed.end(500)
    clock.now += 1
    speed.end(500)
    assert speed.bytes_per_second() == pytest.approx(1000 / 3)


def test_throughput_follows_a_flash_that_slows_down_and_recovers() -> None:
    clock = Clock()
    speed = Throughput(clock)
    read(speed, clock, 1000, 1.0)
    for _ in range(2):
        read(speed, clock, 10, 1.0)
    assert speed.bytes_per_second() < 100  # type: ignore[operator]
    for _ in range(3):
        read(speed, clock, 1000, 1.0)
    assert speed.bytes_per_second() > 900  # type: ignore[operator]


def test_a_flash_that_was_slow_is_given_another_chance_after_a_while() -> None:
    clock = Clock()
    speed = Throughput(clock)
    read(speed, clock, 1000, 1.0)
    for _ in range(3):
        read(speed, clock, 1, 1.0)
    slow = speed.bytes_per_second()
    clock.now += 60
    rested = speed.bytes_per_second()
    clock.now += 10_000
    assert slow is not None
    assert rested == pytest.approx(4 * slow)
    assert speed.bytes_per_second() == pytest.approx(1000)  # never better than it was seen


def test_rest_lasts_from_the_end_of_the_last_read_to_the_next() -> None:
    clock = Clock()
    speed = Throughput(clock)
    speed.begin()
    speed.begin()
    clock.now += 1
    speed.end(100)
    assert speed.resting() == 0, "one is still under way"
    speed.end(0)
    clock.now += 3
    assert speed.resting() == pytest.approx(3)


def test_failed_reads_say_nothing() -> None:
    clock = Clock()
    speed = Throughput(clock)
    read(speed, clock, 0, 5.0)
    assert speed.bytes_per_second() is None
    read(speed, clock, 100, 1.0)
    assert speed.bytes_per_second() == pytest.approx(100)
