"""The kernels of `kernels` in numpy: what runs without a C compiler, and what the C ones are compared with.

Arguments come checked from `kernels`. Every operation rounds to fp32 once, in the order the C code uses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

_CHUNK = 1 << 16  # channels turned at a time, so that the intermediate floats stay in cache


def to_floats(values: NDArray[Any], dtype: str) -> Floats:
    if dtype == "bfloat16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    with np.errstate(invalid="ignore"):  # signalling NaN
        return values.astype(np.float32)


def from_floats(values: Floats, dtype: str) -> NDArray[Any]:
    if dtype == "float32":
        return values
    if dtype == "float16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = bits >> np.uint32(16) | np.uint32(0x40)
    return np.where(np.isnan(values), quiet, rounded).astype(np.uint16)


def place(
    src: NDArray[Any],
    dst: NDArray[Any],
    slots: NDArray[np.int64] | None,
    cos: Floats | None,
    sin: Floats | None,
    src_dtype: str,
    dst_dtype: str,
    pairing: str,
) -> None:
    heads, tokens, channels = src.shape
    if slots is not None:
        for token in np.flatnonzero((slots < 0) | (slots >= dst.shape[1])):
            raise IndexError(
                f"slot {slots[token]} of token {token}: the target has slots 0 to {dst.shape[1] - 1}"
            )
    if cos is None and src_dtype == dst_dtype:
        dst[:, slice(tokens) if slots is None else slots] = src
        return
    step = max(1, _CHUNK // max(1, channels))
    for head in range(heads):
        for start in range(0, tokens, step):
            some = slice(start, min(start + step, tokens))
            part = src[head, some]
            values = to_floats(part, src_dtype)
            with np.errstate(all="ignore"):  # infinities and NaN pass through, as in C
                if cos is not None and sin is not None:
                    rows = slice(None) if len(cos) == 1 else some
                    values = _turn(values, cos[rows], sin[rows], pairing)
                written = from_floats(values, dst_dtype)
            if cos is not None and src_dtype == dst_dtype:
                written[:, 2 * cos.shape[1] :] = part[:, 2 * cos.shape[1] :]
            dst[head, some if slots is None else slots[some]] = written


def _turn(values: Floats, cos: Floats, sin: Floats, pairing: str) -> Floats:
    pairs = cos.shape[1]
    if pairing == "half":
        first, second = slice(0, pairs), slice(pairs, 2 * pairs)
    else:
        first, second = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    a, b = values[:, first], values[:, second]
    turned = values.copy()
    turned[:, first] = a * cos - b * sin
    turned[:, second] = b * cos + a * sin
    return turned


def extremes(src: NDArray[Any], low: Floats, high: Floats, src_dtype: str, per: str, group: int) -> None:
    """Least and greatest value of each group of `src`, NaN where it has one."""
    values = to_floats(src, src_dtype)
    axis = 1 if per == "channel" else 2
    if low.size:
        starts = np.arange(0, src.shape[axis], group)
        low[...] = np.minimum.reduceat(values, starts, axis)
        high[...] = np.maximum.reduceat(values, starts, axis)


def encode(
    src: NDArray[Any],
    scales: Floats,
    offsets: Floats | None,
    codes: NDArray[Any],
    src_dtype: str,
    per: str,
    group: int,
) -> None:
    values = to_floats(src, src_dtype)
    with np.errstate(all="ignore"):  # a tiny scale may overflow the quotient, which is then limited
        if offsets is None:
            np.rint(np.clip(values / _spread(scales, src.shape, per, group), -127, 127), out=values)
            codes[...] = values.astype(np.int8)
        else:
            values -= _spread(offsets, src.shape, per, group)
            values /= _spread(scales, src.shape, per, group)
            packed = codes.shape[2] != src.shape[2]
            steps = np.rint(np.clip(values, 0, 15 if packed else 255)).astype(np.uint8)
            codes[...] = steps[..., 0::2] | steps[..., 1::2] << np.uint8(4) if packed else steps


def decode(
    codes: NDArray[Any], scales: Floats, offsets: Floats | None, bits: int, per: str, group: int
) -> Floats:
    """Values [heads, tokens, channels] of codes."""
    if bits == 4:
        nibbles = np.stack([codes & np.uint8(15), codes >> np.uint8(4)], axis=-1)
        codes = nibbles.reshape(*codes.shape[:2], 2 * codes.shape[2])
    scaled = codes.astype(np.float32) * _spread(scales, codes.shape, per, group)
    return scaled if offsets is None else scaled + _spread(offsets, codes.shape, per, group)


def _spread(values: Floats, shape: tuple[int, ...], per: str, group: int) -> Floats:
    """One value per item of an array [heads, tokens, channels] from one per group."""
    axis = 1 if per == "channel" else 2
    return np.repeat(values, min(group, shape[axis]), axis)[:, : shape[1], : shape[2]]


def split(items: NDArray[np.uint8], planes: NDArray[np.uint8]) -> None:
    planes[...] = items.reshape(-1, len(planes)).T


def join(planes: NDArray[np.uint8], items: NDArray[np.uint8]) -> None:
    items.reshape(-1, len(planes))[...] = planes.T


def collect(
    sources: Sequence[NDArray[Any]],
    out: NDArray[np.uint8],
    tokens: int,
    kept: int,
    first: int,
    slots: NDArray[np.int64] | None,
) -> None:
    given = tokens - kept
    end = first + given if slots is None else int(slots.max(initial=-1)) + 1
    if given < 0 or kept < 0 or first < 0 or (slots is not None and len(slots) != given):
        raise ValueError("no such tokens")
    if slots is not None and slots.min(initial=0) < 0:
        raise IndexError("slots must not be negative")
    if any(source.ndim != 3 for source in sources):
        raise ValueError("sources are [heads, rows, channels]")
    whole = sum(len(source) * tokens * source.shape[2] * source.itemsize for source in sources)
    if whole > len(out) or any(source.shape[1] < end for source in sources):
        raise ValueError("sources, out, tokens and slots do not fit")
    at = 0
    for source in sources:
        heads, _, channels = source.shape
        nbytes = heads * tokens * channels * source.itemsize
        target = out[at : at + nbytes].view(source.dtype).reshape(heads, tokens, channels)
        target[:, kept:] = source[:, first:end] if slots is None else source[:, slots]
        at += nbytes
