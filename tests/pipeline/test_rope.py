"""RoPE geometry against the papers' formulae, written out here pair by pair in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.pipeline.rope import DynamicNtk, Linear, Llama3, LongRope, Rope, Yarn

LLAMA31 = Llama3(factor=8, low_freq_factor=1, high_freq_factor=4, original_context=8192)
SCALINGS = [None, Linear(4), LLAMA31, Yarn(4, 32768), DynamicNtk(2, 4096)]


def plain(theta: float, dim: int) -> list[float]:
    return [1 / theta ** (2 * i / dim) for i in range(dim // 2)]


@pytest.mark.parametrize(("theta", "dim"), [(1e4, 64), (1e5, 128), (5e5, 96), (1e6, 2)])
def test_frequencies_fall_geometrically_from_one(theta: float, dim: int) -> None:
    got = Rope(head_dim=128, theta=theta, rotary_dim=dim).inverse_frequencies()
    assert got.dtype == np.float64
    assert got.tolist() == pytest.approx(plain(theta, dim), rel=1e-14)


def test_partial_rotary_counts_exponents_in_rotary_dim_not_head_dim() -> None:
    """Fault: frequencies of a Phi-like model taken over the whole head."""
    partial = Rope(head_dim=80, theta=1e4, rotary_dim=32)
    assert partial.inverse_frequencies().tolist() == pytest.approx(plain(1e4, 32), rel=1e-14)
    cos, sin = partial.table([1, 2, 3])
    assert cos.shape == sin.shape == (3, 16)


def test_linear_scaling_divides_every_frequency() -> None:
    got = Rope(head_dim=64, theta=1e4, rotary_dim=64, scaling=Linear(2.5)).inverse_frequencies()
    assert got.tolist() == pytest.approx([w / 2.5 for w in plain(1e4, 64)], rel=1e-14)


def test_dynamic_ntk_is_unscaled_inside_the_original_context() -> None:
    got = Rope(head_dim=64, theta=1e4, rotary_dim=64, scaling=DynamicNtk(4, 2048)).inverse_frequencies()
    assert got.tolist() == pytest.approx(plain(1e4, 64), rel=1e-14)


@pytest.mark.parametrize(
    "scaling", [LLAMA31, Llama3(factor=32, low_freq_factor=1, high_freq_factor=4, original_context=8192)]
)
@pytest.mark.parametrize("dim", [64, 128])
def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between(scaling: Llama3, dim: int) -> None:
    want, kinds = [], set()
    for w in plain(5e5, dim):
        turns = scaling.original_context * w / (2 * math.pi)  # full turns over the original context
        if turns > scaling.high_freq_factor:
            want.append(w)
            kinds.add("kept")
        elif turns < scaling.low_freq_factor:
            want.append(w / scaling.factor)
            kinds.add("divided")
        else:
            kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            want.append(w * kept + w / scaling.factor * (1 - kept))
            kinds.add("blended")
    got = Rope(head_dim=dim, theta=5e5, rotary_dim=dim, scaling=scaling).inverse_frequencies()
    assert kinds == {"kept", "divided", "blended"}
    assert got.tolist() == pytest.approx(want, rel=1e-13)


@pytest.mark.parametrize("truncate", [True, False])
@pytest.mark.parametrize(("theta", "dim", "factor", "original"), [(1e6, 128, 4, 32768), (1e4, 64, 40, 4096)])
def test_yarn_interpolates_pairs_that_turn_less_than_beta_slow(
    truncate: bool, theta: float, dim: int, factor: float, original: int
) -> None:
    fast, slow = 32.0, 1.0

    def pair_with(turns: float) -> float:
        """i for which original * theta^(-2i / dim) = 2 pi turns."""
        return dim / 2 * math.log(original / (2 * math.pi * turns), theta)

    first, last = pair_with(fast), pair_with(slow)
    if truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    want = []
    for i, w in enumerate(plain(theta, dim)):
        kept = 1 - min(1, max(0, (i - first) / (last - first)))
        want.append(w * kept + w / factor * (1 - kept))
    rope = Rope(head_dim=dim, theta=theta, rotary_dim=dim, scaling=Yarn(factor, original, truncate=truncate))
    assert rope.inverse_frequencies().tolist() == pytest.approx(want, rel=1e-12)
    assert rope.inverse_frequencies()[0] == pytest.approx(1)
    assert rope.inverse_frequencies()[-1] == pytest.approx(plain(theta, dim)[-1] / factor)


def test_yarn_ramp_of_one_point_is_a_step() -> None:
    """Fault: division by zero where both ends of the ramp fall on one pair."""
    scaling = Yarn(8, 16, beta_fast=1.0, beta_slow=1.0, truncate=False)
    got = Rope(head_dim=16, theta=1e4, rotary_dim=16, scaling=scaling).inverse_frequencies()
    ratio = got / np.array(plain(1e4, 16))
    assert set(np.round(ratio, 9)) == {1.0, 0.125}


@pytest.mark.parametrize("regime", ["short", "long"])
def test_longrope_divides_each_frequency_by_its_own_factor(regime: str) -> None:
    short, long = tuple(1 + i / 10 for i in range(24)), tuple(2.0 + i * i for i in range(24))
    scaling = LongRope(short, long, 4096, 1.19, regime)  # type: ignore[arg-type]
    rope = Rope(head_dim=96, theta=1e4, rotary_dim=48, scaling=scaling)
    factors = short if regime == "short" else long
    want = [w / f for w, f in zip(plain(1e4, 48), factors, strict=True)]
    assert rope.inverse_frequencies().tolist() == pytest.approx(want, rel=1e-14)


def test_attention_factors() -> None:
    def factor(scaling: object) -> float:
        return Rope(head_dim=64, theta=1e4, rotary_dim=64, scaling=scaling).attention_factor  # type: ignore[arg-type]

    assert factor(None) == factor(Linear(4)) == factor(LLAMA31) == 1
    assert factor(Yarn(4, 4096)) == pytest.approx(0.1 * math.log(4) + 1)
    assert factor(Yarn(1, 4096)) == 1
    assert factor(Yarn(4, 4096, attention_factor=0.75)) == 0.75
    assert factor(LongRope((1.0,) * 32, (2.0,) * 32, 4096, 1.19)) == 1.19


@pytest.mark.parametrize("scaling", [*SCALINGS, LongRope((1.0,) * 16, (3.0,) * 16, 4096, 1.19, "long")])
@given(st.integers(-(10**6), 10**6))
def test_a_table_is_a_pure_rotation_by_fp64_angles(scaling: object, position: int) -> None:
    """Faults: angles in fp32 or fp16; the attention factor applied again when a key moves."""
    rope = Rope(head_dim=64, theta=1e4, rotary_dim=32, scaling=scaling)  # type: ignore[arg-type]
    cos, sin = rope.table([position])
    assert cos.dtype == sin.dtype == np.float32
    for i, w in enumerate(rope.inverse_frequencies()):
        assert abs(float(cos[0, i]) - math.cos(position * w)) < 2**-24
        assert abs(float(sin[0, i]) - math.sin(position * w)) < 2**-24


def test_tables_have_one_row_a_position_and_take_a_single_one() -> None:
    rope = Rope(head_dim=64, theta=1e4, rotary_dim=64)
    cos, sin = rope.table(np.array([5, -3, 0]))
    assert np.array_equal(rope.table(5)[0], cos[:1])
    assert np.array_equal(cos[2], np.ones(32, np.float32))
    assert np.array_equal(rope.table([3])[1][0], -sin[1])
    assert rope.table([])[0].shape == (0, 32)


@given(st.integers(-100_000, 100_000), st.integers(-100_000, 100_000))
def test_rotations_add(p: int, q: int) -> None:
    rope = Rope(head_dim=32, theta=1e4, rotary_dim=32, scaling=LLAMA31)

    def spin(at: int) -> np.ndarray:
        cos, sin = rope.table([at])
        return cos.astype(np.complex128) + 1j * sin

    assert np.abs(spin(p) * spin(q - p) - spin(q)).max() < 4 * 2**-24


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"rotary_dim": 63}, "rotary_dim 63"),
        ({"rotary_dim": 0}, "rotary_dim 0"),
        ({"rotary_dim": 66}, "rotary_dim 66"),
        ({"rotary_dim": -2}, "rotary_dim -2"),
        ({"theta": 1.0}, "theta 1"),
        ({"theta": math.inf}, "theta inf"),
        ({"theta": math.nan}, "theta nan"),
        ({"scaling": LongRope((1.0,) * 31, (1.0,) * 32, 4096, 1.0)}, "short_factor has 31"),
        ({"scaling": LongRope((1.0,) * 32, (1.0,) * 33, 4096, 1.0)}, "long_factor has 33"),
    ],
)
def test_geometry_that_no_model_has_is_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Rope(**{"head_dim": 64, "theta": 1e4, "rotary_dim": 64, **options})  # type: ignore[arg-type]
