"""Kernels: every level gives the same bits, and those are what an fp64 oracle written here expects."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.pipeline import kernels
from kvstore.pipeline.rope import Rope

DTYPES = ("float16", "bfloat16", "float32")
HOLDS = {"float16": np.float16, "bfloat16": np.uint16, "float32": np.float32}
MANTISSA = {"float16": 10, "bfloat16": 7, "float32": 23}
LEAST = {"float16": 2.0**-24, "bfloat16": 2.0**-133, "float32": 2.0**-149}
MOST = {"float16": 65504.0, "bfloat16": 3.3895313892515355e38, "float32": 3.4028234663852886e38}
LAYOUTS = ("plain", "dim before token", "every other channel", "padded", "backwards", "unaligned")


@contextmanager
def on(level: str) -> Iterator[None]:
    before = kernels.level()
    kernels.use(level)
    try:
        yield
    finally:
        kernels.use(before)


@pytest.fixture(params=kernels.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with on(request.param):
        yield request.param


def bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(f"u{array.dtype.itemsize}")


def exact(array: np.ndarray, dtype: str) -> np.ndarray:
    """fp64 values of a stored array."""
    if dtype == "bfloat16":
        sign = np.where(array >> 15, -1.0, 1.0)
        exponent, fraction = (array >> 7 & 0xFF).astype(int), (array & 0x7F).astype(float)
        value = np.where(
            exponent == 0, fraction * 2.0**-133, np.ldexp(1 + fraction / 128, np.minimum(exponent, 254) - 127)
        )
        special = np.where(fraction == 0, np.inf, np.nan)
        return sign * np.where(exponent == 255, special, value)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return array.astype(np.float64)


def stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest array of `dtype`; for bfloat16, cut off rather than rounded, since any value will do."""
    with np.errstate(over="ignore"):
        if dtype == "bfloat16":
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(HOLDS[dtype])


def same(a: np.ndarray, b: np.ndarray, dtype: str) -> bool:
    """Equal bits, except that any NaN equals any other."""
    nan_a, nan_b = np.isnan(exact(a, dtype)), np.isnan(exact(b, dtype))
    return bool(np.array_equal(nan_a, nan_b) and np.array_equal(bits(a)[~nan_a], bits(b)[~nan_b]))


def laid_out(values: np.ndarray, layout: str) -> np.ndarray:
    """The same [heads, items, channels] in memory of another order; what lies between is filled with 0xA5."""
    heads, items, channels = values.shape
    size = values.dtype.itemsize

    def memory(*shape: int) -> np.ndarray:
        return np.frombuffer(bytearray(b"\xa5" * (int(np.prod(shape)) * size)), values.dtype).reshape(shape)

    if layout == "dim before token":
        view = memory(heads, channels, items).transpose(0, 2, 1)
    elif layout == "every other channel":
        view = memory(heads, items, 2 * channels)[:, :, ::2]
    elif layout == "padded":
        view = memory(heads + 1, items + 3, channels + 5)[1:, 2 : items + 2, 3 : channels + 3]
    elif layout == "backwards":
        view = memory(heads, items, channels)[::-1, ::-1, ::-1]
    elif layout == "unaligned":
        raw = np.frombuffer(bytearray(values.nbytes + 1), np.uint8)[1:]
        view = raw.view(values.dtype).reshape(values.shape)
    else:
        view = memory(heads, items, channels)
    view[...] = values
    return view


def oracle_turn(values: np.ndarray, cos: np.ndarray, sin: np.ndarray, pairing: str) -> np.ndarray:
    """Each pair as a complex number times cos + i sin, in fp64."""
    turned = values.copy()
    pairs = cos.shape[1]
    for i in range(pairs):
        first, second = (i, i + pairs) if pairing == "half" else (2 * i, 2 * i + 1)
        spin = cos[:, i].astype(np.float64) + 1j * sin[:, i].astype(np.float64)
        pair = (values[..., first] + 1j * values[..., second]) * spin
        turned[..., first], turned[..., second] = pair.real, pair.imag
    return turned


def oracle_tolerance(want: np.ndarray, values: np.ndarray, dtype: str) -> np.ndarray:
    """Half a unit in the last place of the target, and three fp32 roundings at the size of the operands."""
    half_ulp = np.maximum(np.abs(want) * 2.0 ** -MANTISSA[dtype], LEAST[dtype]) / 2
    return half_ulp * 1.001 + 3 * 2.0**-24 * 2 * np.abs(values).max(axis=-1, keepdims=True) + 2.0**-149


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A `place` call: shapes, dtypes, layouts, angles and slots."""
    heads, tokens = draw(st.integers(0, 3)), draw(st.integers(0, 70))
    channels = draw(st.sampled_from([1, 2, 7, 16, 24, 33, 64, 80, 96, 128]))
    src_dtype, dst_dtype = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(DTYPES))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    pairs = draw(st.sampled_from([0, channels // 2, channels // 4, max(0, channels // 2 - 3)]))
    angles = rng.uniform(-4000, 4000, (draw(st.sampled_from([1, tokens])), pairs))
    extra = draw(st.integers(0, 40))
    slots = rng.permutation(tokens + extra)[:tokens] if draw(st.booleans()) else None
    values = rng.standard_normal((heads, tokens, channels)) * 10.0 ** draw(st.integers(-6, 3))
    return {
        "values": values,
        "src": laid_out(stored(values, src_dtype), draw(st.sampled_from(LAYOUTS))),
        "dst_shape": (heads, tokens + extra, channels),
        "dst_layout": draw(st.sampled_from(LAYOUTS)),
        "slots": slots,
        "rng": rng,
        "options": {
            "src_dtype": src_dtype,
            "dst_dtype": dst_dtype,
            "cos": np.cos(angles).astype(np.float32) if pairs else None,
            "sin": np.sin(angles).astype(np.float32) if pairs else None,
            "pairing": draw(st.sampled_from(["half", "interleaved"])),
            "slots": slots,
        },
    }


def placed(case: dict[str, Any], src: Any = None) -> np.ndarray:
    dtype = case["options"]["dst_dtype"]
    blank = np.frombuffer(b"\x5a" * (4 * int(np.prod(case["dst_shape"]))), HOLDS[dtype])
    dst = laid_out(blank[: int(np.prod(case["dst_shape"]))].reshape(case["dst_shape"]), case["dst_layout"])
    if src is None:
        kernels.place(case["src"], dst, **case["options"])
    else:
        options = {key: value for key, value in case["options"].items() if key != "src_dtype"}
        kernels.place_quantised(src, dst, **options)
    return dst


def with_specials(case: dict[str, Any]) -> None:
    """Put infinities, NaN, zeros, subnormals and largest values among the source's."""
    src = case["src"]
    dtype = case["options"]["src_dtype"]
    kinds = {
        "float16": [0x7C00, 0xFC00, 0x7E01, 0xFD55, 0, 0x8000, 1, 0x83FF, 0x7BFF],
        "bfloat16": [0x7F80, 0xFF80, 0x7FC1, 0xFFA5, 0, 0x8000, 1, 0x807F, 0x7F7F],
        "float32": [0x7F800000, 0xFF800000, 0x7FC00001, 0xFFA00000, 0, 1 << 31, 1, 0x807FFFFF, 0x7F7FFFFF],
    }[dtype]
    specials = np.array(kinds, f"u{src.dtype.itemsize}").view(src.dtype)
    where = case["rng"].random(src.shape) < 0.05
    bits_in = case["rng"].choice(specials.view(f"u{src.dtype.itemsize}"), src.shape).view(src.dtype)
    src[where] = bits_in[where]


@settings(deadline=None, max_examples=200)
@given(cases(), st.booleans())
def test_every_level_places_the_same_bits(case: dict[str, Any], special: bool) -> None:
    if special:
        with_specials(case)
    before = case["src"].tobytes()
    with on("numpy"):
        want = placed(case)
    for name in kernels.levels():
        with on(name):
            got = placed(case)
        assert same(got, want, case["options"]["dst_dtype"]), name
    assert case["src"].tobytes() == before


@settings(deadline=None, max_examples=200)
@given(cases())
def test_placing_agrees_with_fp64(case: dict[str, Any]) -> None:
    options, dtype = case["options"], case["options"]["dst_dtype"]
    values = exact(case["src"], options["src_dtype"])
    want = values
    if options["cos"] is not None:
        want = oracle_turn(values, options["cos"], options["sin"], options["pairing"])
    tokens = values.shape[1]
    slots = np.arange(tokens) if case["slots"] is None else case["slots"]
    dst = placed(case)
    got = exact(dst[:, slots], dtype)
    fits = np.abs(want) < MOST[dtype]
    assert np.all((np.abs(got - want) <= oracle_tolerance(want, values, dtype))[fits])

    untouched = np.setdiff1d(np.arange(dst.shape[1]), slots)
    assert np.all(bits(dst[:, untouched]).view(np.uint8) == 0x5A)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_copy_keeps_every_bit_pattern(dtype: str, layout: str) -> None:
    """Fault: signalling NaN quietened by a conversion to fp32 and back."""
    patterns = np.arange(1 << 16, dtype=np.uint16)
    if dtype == "float32":
        patterns = patterns.astype(np.uint32) << 16 | patterns[::-1]
    src = laid_out(patterns.view(HOLDS[dtype]).reshape(4, 256, 64), layout)
    for dst_layout in LAYOUTS:
        dst = laid_out(np.zeros((4, 256, 64), HOLDS[dtype]), dst_layout)
        kernels.place(src, dst, src_dtype=dtype, dst_dtype=dtype)
        assert np.array_equal(bits(dst), bits(src))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", DTYPES)
def test_channels_that_do_not_turn_keep_their_bits(dtype: str) -> None:
    rng = np.random.default_rng(1)
    src = rng.integers(0, 256, (2, 9, 40 * np.dtype(HOLDS[dtype]).itemsize), np.uint8).view(HOLDS[dtype])
    cos, sin = Rope(head_dim=40, theta=1e4, rotary_dim=18).table([5])
    dst = np.zeros_like(src)
    kernels.place(src, dst, src_dtype=dtype, dst_dtype=dtype, cos=cos, sin=sin)
    assert np.array_equal(bits(dst[:, :, 18:]), bits(src[:, :, 18:]))


@pytest.mark.usefixtures("level")
def test_all_halfs_become_the_right_floats_and_come_back() -> None:
    src = np.arange(1 << 16, dtype=np.uint16).view(np.float16).reshape(1, 1024, 64)
    wide = np.empty(src.shape, np.float32)
    kernels.place(src, wide, src_dtype="float16", dst_dtype="float32")
    assert np.array_equal(wide, exact(src, "float16"), equal_nan=True)
    back = np.empty_like(src)
    kernels.place(wide, back, src_dtype="float32", dst_dtype="float16")
    assert same(back, src, "float16")


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_rounding_is_to_nearest_ties_to_even(dtype: str) -> None:
    """Each value of the narrow dtype, the middle to its neighbour, and the floats on both sides of the middle."""
    infinity = 0x7C00 if dtype == "float16" else 0x7F80
    patterns = np.arange(infinity, dtype=np.uint16)
    narrow = exact(patterns.view(HOLDS[dtype]), dtype)
    # The neighbour of the largest value is where infinity would be if the exponent went on.
    upper = np.append(narrow[1:], narrow[-1] + (narrow[-1] - narrow[-2]))
    with np.errstate(over="ignore"):  # beyond the largest bfloat16 a float32 may overflow: infinity then, too
        middle = ((narrow + upper) / 2).astype(np.float32)
        above, below = np.nextafter(middle, np.float32(np.inf)), np.nextafter(middle, np.float32(0))
    rounded_up = patterns + 1
    values = np.concatenate([narrow.astype(np.float32), below, middle, above])
    want = np.concatenate([patterns, patterns, patterns + (patterns & 1), rounded_up]).astype(np.uint16)
    src = np.stack([values, -values])[:, :, None]
    dst = np.empty(src.shape, HOLDS[dtype])
    kernels.place(np.ascontiguousarray(src), dst, src_dtype="float32", dst_dtype=dtype)
    assert np.array_equal(bits(dst)[0, :, 0], want)
    assert np.array_equal(bits(dst)[1, :, 0], want | 0x8000)


@pytest.mark.usefixtures("level")
def test_vectors_and_their_remainders_convert_alike() -> None:
    """The same values as whole rows and as rows too short for any vector."""
    rng = np.random.default_rng(2)
    values = rng.integers(0, 1 << 32, 3 * 4096, np.uint32).view(np.float32)
    for dtype in ("float16", "bfloat16"):
        results = []
        for channels in (3, 4096):
            dst = np.empty((1, values.size // channels, channels), HOLDS[dtype])
            kernels.place(values.reshape(dst.shape), dst, src_dtype="float32", dst_dtype=dtype)
            results.append(dst.reshape(-1))
        assert same(*results, dtype)


@pytest.mark.usefixtures("level")
def test_ten_thousand_moves_start_from_the_same_stored_bytes() -> None:
    """Fault: a turned key written back, so that errors add up (rule 3 of the design)."""
    rope = Rope(head_dim=64, theta=1e4, rotary_dim=64)
    rng = np.random.default_rng(3)
    key = rng.standard_normal((1, 1, 64))
    src = key.astype(np.float16)
    before = src.tobytes()
    deltas = rng.integers(-32768, 32768, 10_000)
    cos, sin = rope.table(deltas)
    dst = np.empty_like(src)
    worst = 0.0
    for i in range(len(deltas)):
        kernels.place(
            src, dst, src_dtype="float16", dst_dtype="float16", cos=cos[i : i + 1], sin=sin[i : i + 1]
        )
        angles = float(deltas[i]) * rope.inverse_frequencies()
        spin = (key[..., :32].astype(np.float16) + 1j * key[..., 32:].astype(np.float16)) * np.exp(
            1j * angles
        )
        want = np.concatenate([spin.real, spin.imag], axis=-1)
        worst = max(worst, float(np.linalg.norm(dst - want) / np.linalg.norm(want)))
    assert src.tobytes() == before
    assert worst < 2.0**-11  # one rounding to float16


@pytest.mark.usefixtures("level")
def test_moving_a_key_equals_turning_it_there() -> None:
    rope = Rope(head_dim=96, theta=5e5, rotary_dim=64, pairing="interleaved")
    raw = np.random.default_rng(4).standard_normal((2, 50, 96)).astype(np.float32)
    options: dict[str, Any] = {"src_dtype": "float32", "dst_dtype": "float32", "pairing": rope.pairing}
    here, there, moved = np.empty_like(raw), np.empty_like(raw), np.empty_like(raw)
    positions = np.arange(50) + 7
    for dst, at in ((here, positions), (there, positions + 1234)):
        cos, sin = rope.table(at)
        kernels.place(raw, dst, cos=cos, sin=sin, **options)
    cos, sin = rope.table([1234])
    kernels.place(here, moved, cos=cos, sin=sin, **options)
    assert np.abs(moved - there).max() < 2e-6


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_infinity_and_nan_stay_in_their_pair(pairing: str, bad: float) -> None:
    src = np.ones((1, 1, 64), np.float16)
    src[0, 0, 6] = bad
    cos, sin = Rope(head_dim=64, theta=1e4, rotary_dim=64).table([1])
    dst = np.empty_like(src)
    kernels.place(src, dst, src_dtype="float16", dst_dtype="float16", cos=cos, sin=sin, pairing=pairing)
    partner = 38 if pairing == "half" else 7
    assert np.flatnonzero(~np.isfinite(dst)).tolist() == [6, partner]


@pytest.mark.usefixtures("level")
def test_a_value_too_large_for_the_target_becomes_infinity() -> None:
    dst = np.empty((1, 1, 9), np.float16)
    kernels.place(np.full((1, 1, 9), -1e6, np.float32), dst, src_dtype="float32", dst_dtype="float16")
    assert np.all(dst == -np.inf)


@pytest.mark.usefixtures("level")
def test_of_tokens_in_one_slot_the_last_stays() -> None:
    src = np.arange(5, dtype=np.float32).repeat(8).reshape(1, 5, 8)
    for layout in LAYOUTS:
        dst = laid_out(np.zeros((1, 3, 8), np.float32), layout)
        slots = np.array([2, 0, 2, 2, 0])
        kernels.place(src, dst, src_dtype="float32", dst_dtype="float32", slots=slots)
        assert dst[0, :, 0].tolist() == [4, 0, 3]


# ---- quantised ----


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    width = draw(st.sampled_from([8, 4]))
    return {
        "bits": width,
        "per": draw(st.sampled_from(["channel", "token"])),
        "group": draw(st.sampled_from([None, 1, 3, 32, 50, 2**62])),
    }


def oracle_dequantise(q: kernels.Quantised) -> tuple[np.ndarray, np.ndarray]:
    """(values, steps) in fp64, from the documented form, item by item."""
    heads, tokens, width = q.codes.shape
    channels = width if q.bits == 8 else 2 * width
    h, t, c = np.indices((heads, tokens, channels))
    at = (h, t // q.group, c) if q.per == "channel" else (h, t, c // q.group)
    steps = q.scales[at].astype(np.float64)
    if q.bits == 8:
        return q.codes.astype(np.float64) * steps, steps
    assert q.offsets is not None
    pair = q.codes[h, t, c // 2]
    code = np.where(c % 2 == 0, pair & 15, pair >> 4)
    return code * steps + q.offsets[at].astype(np.float64), steps


@settings(deadline=None, max_examples=200)
@given(cases(), recipes())
def test_a_code_is_within_half_a_step(case: dict[str, Any], recipe: dict[str, Any]) -> None:
    src, dtype = case["src"], case["options"]["src_dtype"]
    if recipe["bits"] == 4 and src.shape[2] % 2:
        src = src[:, :, 1:]
    before = src.tobytes()
    results = []
    for name in kernels.levels():
        with on(name):
            results.append(kernels.quantise(src, src_dtype=dtype, **recipe))
    first = results[0]
    for other in results[1:]:
        for part in ("codes", "scales", "offsets"):
            a, b = getattr(first, part), getattr(other, part)
            assert (a is None and b is None) or np.array_equal(bits(a), bits(b)), part
    assert src.tobytes() == before

    values = exact(src, dtype)
    decoded, steps = oracle_dequantise(first)
    fp32_rounding = 2.0**-23 * np.abs(values).max(initial=0)
    assert np.all(np.abs(decoded - values) <= steps / 2 * (1 + 1e-5) + fp32_rounding)


@settings(deadline=None, max_examples=100)
@given(cases(), st.sampled_from(["channel", "token"]), st.sampled_from([1, 3, 32, 2**62]))
def test_codes_on_a_given_grid(case: dict[str, Any], per: Any, group: int) -> None:
    """Within half a step inside the grid, at its ends outside; placed as the values that they stand for."""
    src, dtype, rng = case["src"], case["options"]["src_dtype"], case["rng"]
    heads, tokens, channels = src.shape
    shape = (
        (heads, -(-tokens // group), channels) if per == "channel" else (heads, tokens, -(-channels // group))
    )
    size = float(np.abs(case["values"]).max(initial=1e-3))
    scales = (size * rng.uniform(0.001, 0.02, shape)).astype(np.float32)
    offsets = (size * rng.uniform(-1, 0.5, shape)).astype(np.float32)
    results = []
    for name in kernels.levels():
        with on(name):
            made = kernels.quantise_on(src, scales, offsets, src_dtype=dtype, per=per, group=group)
            results.append((made.codes.tobytes(), placed(case, made)))
    assert len({codes for codes, _ in results}) == 1
    for _, other in results[1:]:
        assert same(other, results[0][1], case["options"]["dst_dtype"])

    h, t, c = np.indices(src.shape)
    at = (h, t // group, c) if per == "channel" else (h, t, c // group)
    steps, lowest = scales[at].astype(np.float64), offsets[at].astype(np.float64)
    values = np.clip(exact(src, dtype), lowest, lowest + 255 * steps)
    decoded = made.codes * steps + lowest
    assert np.all(np.abs(decoded - values) <= steps / 2 * (1 + 1e-3) + 2.0**-22 * size)
    plain = np.empty(src.shape, np.float32)
    kernels.place_quantised(made, plain, dst_dtype="float32")
    assert np.all(np.abs(plain - decoded) <= 2.0**-21 * (np.abs(decoded) + np.abs(lowest)) + 2.0**-149)


@settings(deadline=None, max_examples=200)
@given(cases(), recipes())
def test_placing_codes_equals_dequantising_then_placing(case: dict[str, Any], recipe: dict[str, Any]) -> None:
    src, dtype = case["src"], case["options"]["src_dtype"]
    if recipe["bits"] == 4 and src.shape[2] % 2:
        return
    quantised = kernels.quantise(src, src_dtype=dtype, **recipe)
    plain = np.empty(src.shape, np.float32)
    with on("numpy"):
        kernels.place_quantised(quantised, plain, dst_dtype="float32")
    decoded, _ = oracle_dequantise(quantised)
    size = np.abs(decoded) + (0 if quantised.offsets is None else np.abs(quantised.offsets).max(initial=0))
    assert np.all(np.abs(plain - decoded) <= 2.0**-22 * size + 2.0**-149)

    case = {**case, "src": plain, "options": {**case["options"], "src_dtype": "float32"}}
    want = placed(case)
    for name in kernels.levels():
        with on(name):
            got = placed(case, quantised)
        assert same(got, want, case["options"]["dst_dtype"]), name


@pytest.mark.usefixtures("level")
def test_outlier_channels_do_not_cost_the_others_precision() -> None:
    keys = np.random.default_rng(5).standard_normal((2, 64, 32)).astype(np.float32)
    keys[:, :, 3] += 300
    for bits_, per_step in ((8, 127.0), (4, 15.0)):
        quantised = kernels.quantise(keys, src_dtype="float32", bits=bits_, per="channel")
        got = np.empty_like(keys)
        kernels.place_quantised(quantised, got, dst_dtype="float32")
        others = np.delete(np.arange(32), 3)
        assert np.abs(got - keys)[:, :, others].max() <= 10 / per_step / 2


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("bits_", [8, 4])
def test_equal_values_survive_quantising(bits_: int) -> None:
    for value in (0.0, -0.0, 0.5, -3.0):
        src = np.full((1, 40, 8), value, np.float32)
        quantised = kernels.quantise(src, src_dtype="float32", bits=bits_, per="channel")
        got = np.empty_like(src)
        kernels.place_quantised(quantised, got, dst_dtype="float32")
        assert np.allclose(got, src, rtol=1e-6, atol=0)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("bits_", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_tiny_values_are_not_divided_by_zero(dtype: str, bits_: int) -> None:
    src = np.zeros((1, 4, 16), HOLDS[dtype])
    src.view(f"u{src.dtype.itemsize}")[0, 1, 3] = 1  # the least subnormal
    quantised = kernels.quantise(src, src_dtype=dtype, bits=bits_, per="channel")
    decoded, steps = oracle_dequantise(quantised)
    assert np.all(np.abs(decoded - exact(src, dtype)) <= steps / 2 * (1 + 1e-5))


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan, -np.nan])
@pytest.mark.parametrize("per", ["channel", "token"])
@pytest.mark.parametrize("bits_", [8, 4])
def test_what_has_no_code_is_refused(bad: float, per: str, bits_: int) -> None:
    src = np.ones((3, 40, 64), np.float16)
    src[2, 35, 63] = bad
    with pytest.raises(ValueError, match="head 2"):
        kernels.quantise(src, src_dtype="float16", bits=bits_, per=per)


@pytest.mark.usefixtures("level")
def test_four_bits_refuse_what_float16_scales_cannot_hold() -> None:
    src = np.zeros((1, 4, 8), np.float32)
    src[0, 0, 0] = -1e5
    with pytest.raises(ValueError, match="8 bits"):
        kernels.quantise(src, src_dtype="float32", bits=4, per="channel")
    kernels.quantise(src, src_dtype="float32", bits=8, per="channel")


@pytest.mark.usefixtures("level")
def test_wrong_recipes_are_refused() -> None:
    src = np.zeros((1, 4, 7), np.float16)
    with pytest.raises(ValueError, match="even"):
        kernels.quantise(src, src_dtype="float16", bits=4, per="token")
    with pytest.raises(ValueError, match="group"):
        kernels.quantise(src, src_dtype="float16", bits=8, per="token", group=0)
    with pytest.raises(ValueError, match="bits"):
        kernels.quantise(src, src_dtype="float16", bits=2, per="token")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="per"):
        kernels.quantise(src, src_dtype="float16", bits=8, per="head")  # type: ignore[arg-type]


@pytest.mark.usefixtures("level")
def test_codes_and_scales_that_do_not_fit_are_refused() -> None:
    q8 = kernels.quantise(
        np.ones((2, 40, 64), np.float16), src_dtype="float16", bits=8, per="channel", group=16
    )
    q4 = kernels.quantise(np.ones((2, 40, 64), np.float16), src_dtype="float16", bits=4, per="token")
    assert q4.offsets is not None
    dst = np.full((2, 40, 64), 7, np.float16)
    wrong: list[tuple[type[Exception], kernels.Quantised]] = [
        (ValueError, replace(q8, group=8)),
        (ValueError, replace(q8, group=-1)),
        (ValueError, replace(q8, per="token")),
        (ValueError, replace(q8, scales=q8.scales[:, :2])),
        (TypeError, replace(q8, scales=q8.scales.astype(np.float64))),
        (TypeError, replace(q8, bits=4)),
        (ValueError, replace(q8, codes=q8.codes[:, :32])),
        (ValueError, replace(q8, codes=q8.codes.transpose(0, 2, 1).copy().transpose(0, 2, 1))),
        (TypeError, replace(q8, offsets=q8.scales)),
        (ValueError, replace(q4, offsets=None)),
        (ValueError, replace(q4, offsets=q4.offsets[:, :, :1])),
        (ValueError, replace(q4, codes=q4.codes[:, :, :31])),
    ]
    for error, quantised in wrong:
        with pytest.raises(error):
            kernels.place_quantised(quantised, dst, dst_dtype="float16")
    assert np.all(dst == 7)


# ---- refusals of place ----

GOOD: dict[str, Any] = {"src_dtype": "float16", "dst_dtype": "float16"}
HALF = np.zeros((2, 6, 16), np.float16)
ANGLES = np.zeros((6, 8), np.float32)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize(
    ("error", "src", "options"),
    [
        (TypeError, HALF.astype(np.float32), {}),
        (TypeError, HALF.astype(">f2"), {}),
        (TypeError, HALF.tolist(), {}),
        (TypeError, HALF, {"src_dtype": "bfloat16"}),
        (TypeError, HALF, {"dst_dtype": "float32"}),
        (TypeError, HALF, {"dst_dtype": "float8"}),
        (ValueError, HALF[0], {}),
        (ValueError, HALF[:1], {}),
        (ValueError, HALF[:, :, :8], {}),
        (ValueError, np.zeros((2, 9, 16), np.float16), {}),
        (ValueError, HALF, {"cos": ANGLES}),
        (ValueError, HALF, {"sin": ANGLES}),
        (ValueError, HALF, {"cos": ANGLES, "sin": ANGLES[:1]}),
        (ValueError, HALF, {"cos": ANGLES[:5], "sin": ANGLES[:5]}),
        (ValueError, HALF, {"cos": np.zeros((6, 9), np.float32), "sin": np.zeros((6, 9), np.float32)}),
        (TypeError, HALF, {"cos": ANGLES.astype(np.float64), "sin": ANGLES.astype(np.float64)}),
        (ValueError, HALF, {"pairing": "split"}),
        (IndexError, HALF, {"slots": np.array([0, 1, 2, 3, 4, 8])}),
        (IndexError, HALF, {"slots": np.array([0, 1, -1, 3, 4, 5])}),
        (IndexError, HALF, {"slots": np.array([0, 1, 2, 2**62, 4, 5])}),
        (IndexError, HALF, {"slots": np.full(6, -(2**63))}),
        (TypeError, HALF, {"slots": np.arange(6, dtype=np.int32)}),
        (TypeError, HALF, {"slots": [0, 1, 2, 3, 4, 5]}),
        (ValueError, HALF, {"slots": np.arange(5)}),
        (ValueError, HALF, {"slots": np.arange(6)[None]}),
    ],
)
def test_a_wrong_call_is_refused_and_writes_nothing(
    error: type[Exception], src: Any, options: dict[str, Any]
) -> None:
    dst = np.full((2, 8, 16), 7, np.float16)
    with pytest.raises(error):
        kernels.place(src, dst, **{**GOOD, **options})
    assert np.all(dst == 7)


@pytest.mark.usefixtures("level")
def test_a_refusal_says_what_is_needed_and_what_is_there() -> None:
    with pytest.raises(ValueError, match=r"need 6 slots.*holds 4"):
        kernels.place(HALF, np.zeros((2, 4, 16), np.float16), **GOOD)
    with pytest.raises(IndexError, match=r"slot 9 of token 5.*0 to 7"):
        kernels.place(HALF, np.zeros((2, 8, 16), np.float16), **GOOD, slots=np.array([0, 1, 2, 3, 4, 9]))


@pytest.mark.usefixtures("level")
def test_a_read_only_target_is_refused() -> None:
    dst = np.zeros((2, 6, 16), np.float16)
    dst.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kernels.place(HALF, dst, **GOOD)


@pytest.mark.usefixtures("level")
def test_overlap_is_refused_and_mere_neighbourhood_is_not() -> None:
    arena = np.arange(4 * 8 * 16).astype(np.float16).reshape(4, 8, 16)
    before = arena.copy()
    overlapping = [
        (arena, arena),
        (arena[:, :6], arena[:, 2:]),
        (arena[:2], arena[1:3]),
        (arena, arena[::-1]),
    ]
    for src, dst in overlapping:
        with pytest.raises(ValueError, match="overlaps"):
            kernels.place(src, dst, **GOOD)
    assert np.array_equal(arena, before)
    kernels.place(arena[0::2], arena[1::2], **GOOD)  # heads in turn
    kernels.place(arena[:, :, :8], arena[:, :, 8:], **GOOD)  # the two halves of every row
    assert np.array_equal(arena[:, :, 8:], arena[:, :, :8])
    assert np.array_equal(arena[1::2, :, :8], before[0::2, :, :8])


def test_native_code_checks_for_itself() -> None:
    """Whoever calls the C functions past `kernels` meets an exception, not memory of others."""
    native = pytest.importorskip("kvstore.pipeline._kernels")
    src, dst = np.zeros((2, 6, 16), np.float16), np.zeros((2, 6, 16), np.float16)
    tail = (None, None, None, None, None, 0, 0, 0, False, 1)
    native.place(src, dst, *tail)
    bad_tables = np.zeros((6, 9), np.float32)
    scales = np.zeros((2, 1, 16), np.float32)
    codes = np.zeros((2, 6, 16), np.int8)
    for args in (
        (src[:, :, :8], dst, *tail),
        (np.zeros((2, 7, 16), np.float16), dst, *tail),
        (src[:1], dst, *tail),
        (None, dst, *tail),
        (src, None, *tail),
        (src.astype(np.float32), dst, *tail),
        (src, dst, *tail[:5], 0, 5, 0, False, 1),
        (src, dst, *tail[:5], 9, 0, 0, False, 1),
        (src, dst, *tail[:5], 0, 0, 2, False, 1),
        (src, dst, None, bad_tables, bad_tables, *tail[3:]),
        (src, dst, None, bad_tables, None, *tail[3:]),
        (codes, dst, None, None, None, None, None, 3, 0, 0, False, 6),
        (codes, dst, None, None, None, scales, None, 3, 0, 0, False, 5),
        (codes, dst, None, None, None, scales, None, 3, 0, 0, False, 0),
        (codes, dst, None, None, None, scales, None, 4, 0, 0, False, 6),
    ):
        with pytest.raises(ValueError, match=r"fit|needed|differ|axes|no such|more tokens"):
            native.place(*args)
    with pytest.raises(IndexError):
        native.place(src, dst, np.full(6, 6), *tail[1:])
    small = np.zeros((2, 1, 15), np.float32)
    with pytest.raises(ValueError, match="fit"):
        native.extremes(src, small, small, 0, False, 6)
    with pytest.raises(ValueError, match="fit"):
        native.encode(src, scales, None, codes[:1], 0, False, 6)
    with pytest.raises(ValueError, match="fit"):
        native.split(np.zeros(8, np.uint8), np.zeros(6, np.uint8), 2)


# ---- byte planes ----


@settings(deadline=None, max_examples=100)
@given(st.sampled_from([2, 4]), st.integers(0, 700), st.integers(0, 3), st.integers(0, 2**32))
def test_planes_hold_byte_k_of_each_item_and_join_again(
    itemsize: int, items: int, shift: int, seed: int
) -> None:
    raw = np.random.default_rng(seed).integers(0, 256, items * itemsize + shift, np.uint8)
    source = raw[shift:]
    want = [source.tobytes()[k::itemsize] for k in range(itemsize)]
    for name in kernels.levels():
        with on(name):
            planes = kernels.split_planes(source, itemsize)
            assert [plane.tobytes() for plane in planes] == want
            assert kernels.split_planes(source.tobytes(), itemsize).tobytes() == planes.tobytes()
            assert kernels.join_planes(planes).tobytes() == source.tobytes()
            spare = np.zeros(source.size + 1, np.uint8)
            assert kernels.join_planes(planes, spare[1:]).tobytes() == source.tobytes()
            assert spare.tobytes() == b"\0" + source.tobytes()


@pytest.mark.usefixtures("level")
def test_wrong_planes_are_refused() -> None:
    items = np.zeros(12, np.uint8)
    planes = kernels.split_planes(items, 4)
    with pytest.raises(ValueError, match="itemsize"):
        kernels.split_planes(items, 3)
    with pytest.raises(ValueError, match="whole number"):
        kernels.split_planes(items[:10], 4)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.split_planes(items[::2], 2)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.join_planes(planes.T.copy().T)
    with pytest.raises(TypeError):
        kernels.join_planes(planes.astype(np.int8))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="out"):
        kernels.split_planes(items, 4, np.zeros((4, 2), np.uint8))
    with pytest.raises(ValueError, match="out"):
        kernels.join_planes(planes, np.zeros(13, np.uint8))
    with pytest.raises(ValueError, match="overlaps"):
        kernels.split_planes(items, 4, items.reshape(4, 3))


# ---- levels and threads ----


def test_numpy_is_always_there_and_unknown_levels_are_refused() -> None:
    assert kernels.levels()[-1] == "numpy"
    before = kernels.level()
    with pytest.raises(ValueError, match="numpy"):
        kernels.use("mmx")
    assert kernels.level() == before


@pytest.mark.parametrize("name", kernels.levels())
def test_the_environment_chooses_the_level(name: str) -> None:
    program = "from kvstore.pipeline import kernels; print(kernels.level())"
    environment = {**os.environ, "KVSTORE_KERNELS": name}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == name, done.stderr


def test_an_environment_that_names_no_level_says_which_there_are() -> None:
    program = "from kvstore.pipeline import kernels"
    environment = {**os.environ, "KVSTORE_KERNELS": "abacus"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "'abacus'" in done.stderr
    assert kernels.levels()[0] in done.stderr


def test_without_the_extension_numpy_serves() -> None:
    program = """
import sys
sys.modules["kvstore.pipeline._kernels"] = None
import numpy as np
from kvstore.pipeline import kernels
dst = np.zeros((1, 2, 4), np.float32)
kernels.place(np.ones((1, 2, 4), np.float16), dst, src_dtype="float16", dst_dtype="float32")
print(kernels.levels(), dst.sum())
"""
    environment = {key: value for key, value in os.environ.items() if key != "KVSTORE_KERNELS"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stdout.strip() == "('numpy',) 8.0", done.stderr


@pytest.mark.usefixtures("level")
def test_threads_place_into_one_buffer_at_once() -> None:
    src = np.random.default_rng(6).standard_normal((4, 2048, 64)).astype(np.float16)
    cos, sin = Rope(head_dim=64, theta=1e4, rotary_dim=64).table(np.arange(2048))
    want, got = np.zeros_like(src), np.zeros_like(src)
    kernels.place(src, want, **GOOD, cos=cos, sin=sin)

    def part(first: int) -> None:
        some = slice(first, first + 256)
        kernels.place(src[:, some], got[:, some], **GOOD, cos=cos[some], sin=sin[some])

    threads = [threading.Thread(target=part, args=(first,)) for first in range(0, 2048, 256)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(bits(got), bits(want))
