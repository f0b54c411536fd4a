"""Kernels that every loaded block passes through: rotate and place, quantise, byte planes.

One layer's keys or values of a block are an array [kv_heads, tokens, head_dim] with any strides. `place` moves it
into slots of a target buffer [kv_heads, slots, head_dim], converting the dtype and, for keys, turning each token
by RoPE on the way; `place_quantised` does the same from int8 or int4 codes. One pass, source untouched.

All arithmetic is fp32 with one rounding an operation; 16-bit results round to nearest even. So C (AVX-512, AVX2,
NEON, plain) and the numpy fallback give the same bits, NaN payloads apart. Where nothing turns and the dtype stays,
bytes are copied, payloads included. NaN and infinity follow IEEE rules; quantising refuses them.

Wrong shapes, ranges, read-only or overlapping arrays raise ValueError, wrong dtypes TypeError, a slot outside of the
target IndexError, all before anything is written. Calls of 64 KiB and more release the GIL.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import kernels_numpy as fallback
from .rope import Pairing

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer

try:
    from . import _kernels as native  # type: ignore[attr-defined]  # C, absent where no compiler was
except ImportError:  # no compiler was there at installation; `kernels_numpy` gives the same results
    native = None

Dtype = Literal["float16", "bfloat16", "float32"]
"""What a KV array holds. numpy has no bfloat16: such an array has dtype uint16."""

Per = Literal["channel", "token"]
Floats = NDArray[np.float32]

_NUMPY_DTYPE: dict[str, np.dtype[Any]] = {
    "float16": np.dtype("float16"),
    "bfloat16": np.dtype("uint16"),
    "float32": np.dtype("float32"),
}
_FLOAT32, _FLOAT16, _INT64 = np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.int64)
_FORMAT = {"float16": 0, "bfloat16": 1, "float32": 2}  # enum format in _numbers.h
_INT8, _INT4, _UINT8 = 3, 4, 5
_PAIRING: dict[str, int] = {"half": 0, "interleaved": 1}
_OVERLAP_WORK = 10_000  # candidates numpy may try to prove two interleaved arrays apart


@dataclass(frozen=True, slots=True, eq=False)
class Quantised:
    """A block's keys or values in 8 or 4 bits.

    8 bits: codes int8 [heads, tokens, channels], value = code * scale, scales float32, offsets None; or codes uint8,
    value = code * scale + offset, scales and offsets float32.
    4 bits: codes uint8 [heads, tokens, channels / 2], channel 2i in the low half of byte i and 2i + 1 in the high
    half, value = code * scale + offset, scales and offsets float16.

    Each scale serves `group` tokens of one channel (`per="channel"`: scales [heads, ceil(tokens / group),
    channels]) or `group` channels of one token (`per="token"`: scales [heads, tokens, ceil(channels / group)]).
    """

    codes: NDArray[Any]
    scales: NDArray[Any]
    offsets: NDArray[Any] | None
    bits: Literal[8, 4]
    per: Per
    group: int


def levels() -> tuple[str, ...]:
    """What this machine can run, fastest first: some of avx512, avx2, neon, scalar, and always numpy."""
    return (*(native.levels() if native else ()), "numpy")


def level() -> str:
    """What the kernels run on now."""
    return _level


def use(name: str) -> None:
    """Run all later calls of this process on level `name`; raises ValueError when this machine lacks it.

    The environment variable KVSTORE_KERNELS does the same at import.
    """
    global _level
    if name not in levels():
        raise ValueError(f"no kernels for {name!r} on this machine, only {', '.join(levels())}")
    if name != "numpy":
        native.use(name)
    _level = name


_level = "numpy"
use(os.environ.get("KVSTORE_KERNELS") or levels()[0])


def place(
    src: NDArray[Any],
    dst: NDArray[Any],
    *,
    src_dtype: Dtype,
    dst_dtype: Dtype,
    cos: NDArray[np.float32] | None = None,
    sin: NDArray[np.float32] | None = None,
    pairing: Pairing = "half",
    slots: NDArray[np.int64] | None = None,
) -> None:
    """Write token t of `src` [heads, tokens, channels], turned, to slot slots[t] of `dst` [heads, slots, channels].

    `cos` and `sin` float32 [1 or tokens, rotary_dim / 2], from `Rope.table`, turn the first rotary_dim channels:
    one row for all tokens or one each; None turns nothing. `slots` int64 [tokens]; None means slot t for token t;
    of tokens that name the same slot the last one stays.
    """
    _check_array("src", src, _numpy_dtype("src_dtype", src_dtype))
    _check_target(src, dst, dst_dtype, channels=src.shape[2])
    cos, sin = _check_angles(cos, sin, pairing, src.shape[1], src.shape[2])
    slots = _check_slots(slots, src.shape[1], dst.shape[1])
    if _level == "numpy":
        fallback.place(src, dst, slots, cos, sin, src_dtype, dst_dtype, pairing)
    else:
        formats = _FORMAT[src_dtype], _FORMAT[dst_dtype], _PAIRING[pairing]
        native.place(src, dst, slots, cos, sin, None, None, *formats, False, 1)


def place_quantised(
    src: Quantised,
    dst: NDArray[Any],
    *,
    dst_dtype: Dtype,
    cos: NDArray[np.float32] | None = None,
    sin: NDArray[np.float32] | None = None,
    pairing: Pairing = "half",
    slots: NDArray[np.int64] | None = None,
) -> None:
    """As `place`, from codes: dequantised, turned and placed in one pass."""
    _, tokens, channels = _check_quantised(src)
    _check_target(src.codes, dst, dst_dtype, channels)
    cos, sin = _check_angles(cos, sin, pairing, tokens, channels)
    slots = _check_slots(slots, tokens, dst.shape[1])
    scales = _dense(src.scales.astype(np.float32, copy=False))
    offsets = None if src.offsets is None else _dense(src.offsets.astype(np.float32, copy=False))
    if _level == "numpy":
        values = fallback.decode(src.codes, scales, offsets, src.bits, src.per, src.group)
        fallback.place(values, dst, slots, cos, sin, "float32", dst_dtype, pairing)
    else:
        code = _INT4 if src.bits == 4 else _INT8 if offsets is None else _UINT8
        formats = code, _FORMAT[dst_dtype], _PAIRING[pairing]
        native.place(
            src.codes, dst, slots, cos, sin, scales, offsets, *formats, src.per == "token", src.group
        )


def collect(
    sources: Sequence[NDArray[Any]],
    out: NDArray[np.uint8],
    *,
    tokens: int,
    kept: int = 0,
    first: int = 0,
    slots: NDArray[np.int64] | None = None,
) -> None:
    """Copy tokens `kept` to `tokens` of a block from rows `first` on of `sources`, or from rows `slots`.

    sources: arrays [heads, rows, channels] of any strides and dtypes. `out` (uint8, contiguous) begins with as many
    arrays [heads, `tokens`, channels], one after the other; their first `kept` tokens stay as they are. `slots` int64
    [tokens - kept]. In one call, which keeps the GIL up to 4 MiB: copying that takes less than getting it back may.
    Raises ValueError, and IndexError for negative slots, before anything is written.
    """
    if _level == "numpy":
        fallback.collect(sources, out, tokens, kept, first, slots)
    else:
        native.collect(sources, out, tokens, kept, first, slots)


def quantise(
    src: NDArray[Any], *, src_dtype: Dtype, bits: Literal[8, 4], per: Per, group: int | None = None
) -> Quantised:
    """Codes of `src` [heads, tokens, channels], each value within half a step (its scale) of the original.

    Keys want per="channel", since they have outlier channels; values per="token" (KIVI, Liu et al. 2024, arXiv
    2402.02750, section 3). 8 bits are symmetric, |code| <= 127, `group` by default the whole axis; 4 bits are
    affine, code 0 to 15, `group` by default 32, `channels` even. Raises ValueError for values that are not
    finite and, in 4 bits, for those beyond float16: store such a block losslessly.
    """
    _check_array("src", src, _numpy_dtype("src_dtype", src_dtype))
    heads, tokens, channels = src.shape
    if group is None:
        group = 32 if bits == 4 else max(1, tokens if per == "channel" else channels)
    _check_recipe(bits, per, group)
    if bits == 4 and channels % 2:
        raise ValueError(f"4 bits need an even number of channels, not {channels}")

    shape = _scales_shape(src.shape, per, group)
    low, high = np.empty(shape, np.float32), np.empty(shape, np.float32)
    if _level == "numpy":
        fallback.extremes(src, low, high, src_dtype, per, group)
    else:
        native.extremes(src, low, high, _FORMAT[src_dtype], per == "token", group)

    scales, offsets = _eight_bit_scales(low, high) if bits == 8 else _four_bit_scales(low, high)
    divisors = scales.astype(np.float32)
    shifts = None if offsets is None else offsets.astype(np.float32)
    width, code = (channels, np.int8) if bits == 8 else (channels // 2, np.uint8)
    codes: NDArray[Any] = np.empty((heads, tokens, width), code)
    if _level == "numpy":
        fallback.encode(src, divisors, shifts, codes, src_dtype, per, group)
    else:
        native.encode(src, divisors, shifts, codes, _FORMAT[src_dtype], per == "token", group)
    return Quantised(codes, scales, offsets, bits, per, group)


def quantise_on(
    src: NDArray[Any],
    scales: NDArray[np.float32],
    offsets: NDArray[np.float32],
    *,
    src_dtype: Dtype,
    per: Per,
    group: int,
) -> Quantised:
    """Codes 0 to 255 of `src` [heads, tokens, channels] on a grid that is given: (value - offset) / scale, rounded.

    `scales`, all positive, and `offsets` as in `Quantised`. A value beyond either end of its grid gets the code of
    that end, NaN any code.
    """
    _check_array("src", src, _numpy_dtype("src_dtype", src_dtype))
    made = Quantised(np.empty(src.shape, np.uint8), scales, offsets, 8, per, group)
    _check_quantised(made)
    if _level == "numpy":
        fallback.encode(src, scales, offsets, made.codes, src_dtype, per, group)
    else:
        native.encode(
            src, _dense(scales), _dense(offsets), made.codes, _FORMAT[src_dtype], per == "token", group
        )
    return made


def split_planes(items: Buffer, itemsize: int, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Byte k of every item side by side: uint8 [itemsize, number of items], written to `out` if given.

    `items` is any contiguous buffer of whole items. Bytes of equal weight compress better together than mixed.
    """
    source = _bytes_of(items)
    if itemsize not in (2, 4):
        raise ValueError(f"itemsize is {itemsize}, can be 2 or 4")
    if source.size % itemsize:
        raise ValueError(f"{source.size} bytes are no whole number of {itemsize}-byte items")
    planes = _output(source, (itemsize, source.size // itemsize), out)
    if _level == "numpy":
        fallback.split(source, planes)
    else:
        native.split(source, planes, itemsize)
    return planes


def join_planes(planes: NDArray[np.uint8], out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Undo `split_planes`: the items' bytes, uint8 [itemsize * number of items], written to `out` if given."""
    if not isinstance(planes, np.ndarray) or planes.dtype != np.uint8:
        raise TypeError("planes must be a uint8 array")
    if planes.ndim != 2 or len(planes) not in (2, 4) or not planes.flags.c_contiguous:
        raise ValueError(f"planes must be contiguous [2 or 4, items], not {planes.shape}")
    items = _output(planes, (planes.size,), out)
    if _level == "numpy":
        fallback.join(planes, items)
    else:
        native.join(planes, items, len(planes))
    return items


def _eight_bit_scales(low: Floats, high: Floats) -> tuple[NDArray[Any], NDArray[Any] | None]:
    magnitude = np.maximum(-low.astype(np.float64), high.astype(np.float64))
    _refuse_unless_finite(magnitude)
    return _scales(magnitude / 127, np.float32), None


def _four_bit_scales(low: Floats, high: Floats) -> tuple[NDArray[Any], NDArray[Any] | None]:
    with np.errstate(invalid="ignore"):  # infinity minus infinity is refused next
        _refuse_unless_finite(high - low.astype(np.float64))
    offsets = -_rounded_up(0 - low.astype(np.float64), np.float16)
    scales = _scales((high - offsets.astype(np.float64)) / 15, np.float16)
    if not (np.isfinite(offsets).all() and np.isfinite(scales).all()):
        raise ValueError("values beyond float16 have no 4-bit form: quantise to 8 bits or store losslessly")
    return scales, offsets


def _refuse_unless_finite(measures: NDArray[np.floating[Any]]) -> None:
    bad = np.argwhere(~np.isfinite(measures))
    if len(bad):
        raise ValueError(f"infinity or NaN in head {bad[0][0]} has no code: store this block losslessly")


def _scales(steps: NDArray[np.float64], dtype: type[np.floating[Any]]) -> NDArray[Any]:
    scales = _rounded_up(steps, dtype)
    scales[scales == 0] = 1  # all values equal: any scale will do, none may be divided by as 0
    return scales


def _rounded_up(values: NDArray[np.float64], dtype: type[np.floating[Any]]) -> NDArray[Any]:
    """The least of `dtype` that is not below, so that no code is cut off at its limit."""
    with np.errstate(over="ignore"):
        nearest = values.astype(dtype)
        below = nearest.astype(np.float64) < values
        nearest[below] = np.nextafter(nearest[below], dtype(np.inf))
        return nearest


def _numpy_dtype(name: str, dtype: str) -> np.dtype[Any]:
    if dtype not in _NUMPY_DTYPE:
        raise TypeError(f"{name} is {dtype!r}, can be {', '.join(_NUMPY_DTYPE)}")
    return _NUMPY_DTYPE[dtype]


def _check_array(name: str, array: NDArray[Any], dtype: np.dtype[Any], dimensions: int = 3) -> None:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a numpy array, not {type(array).__name__}")
    if array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}, needs {dtype}")
    if array.ndim != dimensions:
        raise ValueError(f"{name} needs {dimensions} axes, has shape {array.shape}")


def _check_target(src: NDArray[Any], dst: NDArray[Any], dst_dtype: str, channels: int) -> None:
    _check_array("dst", dst, _numpy_dtype("dst_dtype", dst_dtype))
    if (dst.shape[0], dst.shape[2]) != (src.shape[0], channels):
        raise ValueError(f"dst {dst.shape} must have {src.shape[0]} heads and {channels} channels as src has")
    if not dst.flags.writeable:
        raise ValueError("dst is read-only")
    if _overlap(src, dst):
        raise ValueError("dst overlaps src: a turned key is never written over its original")


def _overlap(a: NDArray[Any], b: NDArray[Any]) -> bool:
    if not np.may_share_memory(a, b):
        return False
    try:
        return np.shares_memory(a, b, max_work=_OVERLAP_WORK)  # type: ignore[arg-type]  # stub: 0 or -1
    except np.exceptions.TooHardError:
        return True


def _check_angles(
    cos: Floats | None, sin: Floats | None, pairing: str, tokens: int, channels: int
) -> tuple[Floats | None, Floats | None]:
    if pairing not in _PAIRING:
        raise ValueError(f"pairing is {pairing!r}, can be {', '.join(_PAIRING)}")
    if cos is None and sin is None:
        return None, None
    if cos is None or sin is None:
        raise ValueError("cos and sin come together")
    for name, table in (("cos", cos), ("sin", sin)):
        _check_array(name, table, _FLOAT32, 2)
        if table.shape[0] not in (1, tokens) or 2 * table.shape[1] > channels:
            raise ValueError(
                f"{name} {table.shape} does not fit {tokens} tokens of {channels} channels: "
                f"needs [1 or {tokens}, at most {channels // 2}]"
            )
    if cos.shape != sin.shape:
        raise ValueError(f"cos {cos.shape} and sin {sin.shape} must have one shape")
    if cos.shape[1] == 0:
        return None, None
    return _dense(cos), _dense(sin)


def _check_slots(slots: NDArray[np.int64] | None, tokens: int, held: int) -> NDArray[np.int64] | None:
    """The kernels check the range: they do it on a copy that no other thread can change."""
    if slots is None:
        if tokens > held:
            raise ValueError(f"{tokens} tokens need {tokens} slots, dst holds {held}")
        return None
    _check_array("slots", slots, _INT64, 1)
    if len(slots) != tokens:
        raise ValueError(f"{len(slots)} slots for {tokens} tokens")
    return _dense(slots)


def _dense(array: NDArray[Any]) -> NDArray[Any]:
    """As C reads small tables: contiguous and aligned, copied only when it is not so."""
    flags = array.flags
    return array if flags.c_contiguous and flags.aligned else np.require(array, requirements=["C", "A"])


def _scales_shape(shape: tuple[int, ...], per: str, group: int) -> tuple[int, int, int]:
    heads, tokens, channels = shape
    if per == "channel":
        return heads, -(-tokens // group), channels
    return heads, tokens, -(-channels // group)


def _check_quantised(src: Quantised) -> tuple[int, int, int]:
    """Shape of the values."""
    _check_recipe(src.bits, src.per, src.group)
    signed = src.bits == 8 and src.offsets is None
    _check_array("codes", src.codes, np.dtype(np.int8 if signed else np.uint8))
    heads, tokens, width = src.codes.shape
    shape = heads, tokens, width * 8 // src.bits
    if src.codes.size and width > 1 and src.codes.strides[2] != 1:
        raise ValueError("codes of a token must lie side by side")
    parts = [("scales", src.scales)]
    if src.offsets is not None:
        parts.append(("offsets", src.offsets))
    elif src.bits == 4:
        raise ValueError("4-bit codes need offsets")
    for name, values in parts:
        _check_array(name, values, _FLOAT32 if src.bits == 8 else _FLOAT16)
        if values.shape != _scales_shape(shape, src.per, src.group):
            raise ValueError(
                f"{name} {values.shape} do not fit: needs {_scales_shape(shape, src.per, src.group)}"
            )
    return shape


def _check_recipe(bits: int, per: str, group: int) -> None:
    if bits not in (8, 4):
        raise ValueError(f"bits is {bits!r}, can be 8 or 4")
    if per not in ("channel", "token"):
        raise ValueError(f"per is {per!r}, can be 'channel' or 'token'")
    if group < 1:
        raise ValueError(f"group is {group}, must be at least 1")


def _bytes_of(items: Buffer) -> NDArray[np.uint8]:
    view = memoryview(items)
    if not view.c_contiguous:
        raise ValueError("items must be contiguous")
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)


def _output(
    source: NDArray[np.uint8], shape: tuple[int, ...], out: NDArray[np.uint8] | None
) -> NDArray[np.uint8]:
    if out is None:
        return np.empty(shape, np.uint8)
    _check_array("out", out, np.dtype(np.uint8), len(shape))
    if out.shape != shape or not out.flags.c_contiguous or not out.flags.writeable:
        raise ValueError(f"out must be contiguous, writable and {shape}, is {out.shape}")
    if _overlap(source, out):
        raise ValueError("out overlaps the input")
    return out
