"""Lossy codec of a flash frame: numbers rounded to a grid of at most 256 steps, and the steps entropy-coded.

Keys    RoPE is undone first, so that a channel keeps its mean and its spread from token to token. Its mean over the
        block is the middle of its grid. One step serves all channels of a head: what a rounded key does to attention is
        an error of equal size in every channel, so channels that vary more get more bits, not larger steps.
Values  keep their place; the middle is zero, and the step of a token is a share of that token's root mean square.

A step is never finer than 256 of them can span, so no code is cut off, and a channel or token with outliers is held at
least as well as by 8 bits of its own scale. Steps are powers of 2^(1/8), a byte each.

Codes of one array have nearly one distribution, narrow and without repetitions: zstd at level 1 stores them as Huffman
codes alone, which decode at more than 1 GB/s. With fixed 4-bit codes the same quality takes more: their range has to
fit the outliers of 32 numbers, and a scale and offset for these cost a bit a number.

Tried, on real KV (SmolLM2), and left out: steps in proportion to a channel's spread, as in KIVI (arXiv 2402.02750; 3.5
times the KL of one step a head at equal bytes); keys as deltas along tokens (with RoPE and mean gone, neighbours
correlate by 0.24, which is 0.04 bits); Huffman tables by class of channel (2 % smaller, needs channels permuted). Not
tried: a Hadamard rotation, since it evens out the spreads that the entropy coder lives on. An eigenbasis a head (KVTC,
arXiv 2511.01815) would save 0.6 bits of a key's number and 0.3 of a value's by the eigenvalues, at the price of
calibration and a matrix product.

Stored pieces: the first tokens of a prompt, exact; for each stretch of equal layers, steps and middles (float16) of
keys [layers, heads, channels], steps of values [layers, heads, tokens]; codes of all keys; codes of all values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline import kernels
from kvstore.pipeline.kernels import Quantised
from kvstore.pipeline.rope import Rope

from .pieces import StoredPieces, pack
from .shape import FrameShape, Stretch

FORM = "grid/1"

EXACT_TOKENS = 4
"""So many at the start of a prompt stay as they are."""

_FEWEST = 16  # tokens with codes, from which a spread can be told
_PER_OCTAVE, _BIAS = 8, 184  # step = 2 ** ((byte - _BIAS) / _PER_OCTAVE): 2^-23 to 2^8.9
_STEP = (2.0 ** ((np.arange(256) - _BIAS) / _PER_OCTAVE)).astype(np.float32)
_MIDDLE = 128  # the code of the middle; 1 to 255 are as far to either side

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Steps:
    """How coarse: of keys in the mean spread of a head's channels, of values in a token's root mean square.

    0 is as fine as 8 bits allow. `compressed` False stores codes as they are.
    """

    keys: float
    values: float
    compressed: bool


def encode(raw: NDArray[np.uint8], shape: FrameShape, steps: Steps) -> list[bytes | memoryview] | None:
    """Pieces of `raw` (uint8); None when it cannot be held: not finite, beyond float16, or too few tokens."""
    exact = _exact_tokens(shape)
    if shape.tokens - exact < _FEWEST or not shape.nbytes:
        return None
    numbers: list[NDArray[np.uint8]] = []
    key_codes: list[NDArray[np.uint8]] = []
    value_codes: list[NDArray[np.uint8]] = []
    for part in _parts(raw, shape):
        keys, values = _unturned(part, shape), _floats(part.values, shape)
        for array, codes, grid in (
            (keys, key_codes, _key_grid(part.by_head(keys), exact, steps.keys)),
            (values, value_codes, _value_grid(part.by_head(values), steps.values)),
        ):
            if grid is None:
                return None
            numbers += grid.stored
            made = kernels.quantise_on(
                array, grid.scales, grid.offsets, src_dtype="float32", per=grid.per, group=grid.group
            )
            codes.append(made.codes.reshape(-1))
    stored = [_exact_bytes(raw, shape, exact), *map(np.concatenate, (numbers, key_codes, value_codes))]
    first, numbers_of_all, *codes_of_all = stored
    packed = (pack(codes) if steps.compressed else codes.data for codes in codes_of_all)
    return [first.data, pack(numbers_of_all), *packed]


class Decoder:
    """Reads pieces of `lengths` stored bytes into a frame of `shape`; see `codec.Decoder`. Raises ValueError."""

    def __init__(self, lengths: Sequence[int], shape: FrameShape) -> None:
        self._shape = shape
        self._exact = _exact_tokens(shape)
        exact, numbers, keys, values = 0, 0, 0, 0
        for layer, times, _ in shape.stretches:
            heads = times * layer.kv_heads
            exact += self._exact * heads * (layer.head_dim + layer.value_dim) * shape.layout.itemsize
            numbers += heads * (3 * layer.head_dim + shape.tokens)
            keys += heads * shape.tokens * layer.head_dim
            values += heads * shape.tokens * layer.value_dim
        wholes = [np.empty(length, dtype=np.uint8) for length in (exact, numbers, keys, values)]
        self._stored = StoredPieces(lengths, wholes)
        self.pieces = self._stored.buffers

    def finish(self, out: NDArray[np.uint8]) -> None:
        shape, tokens = self._shape, self._shape.tokens
        exact, *rest = self._stored.unpack()
        numbers, keys, values = map(_Cursor, rest)
        dtype = shape.layout.dtype
        for part in _parts(out, shape):
            layer, times = part.layer, part.times
            rows, heads = layer.kv_heads * tokens, times * layer.kv_heads
            scales = _STEP[numbers.take(heads * layer.head_dim)].reshape(times, layer.kv_heads, -1)
            middles = numbers.take(2 * heads * layer.head_dim).view("<f2").astype(np.float32)
            grid = _Grid(scales, middles.reshape(scales.shape) - _MIDDLE * scales, "channel", tokens)
            codes = keys.take(heads * tokens * layer.head_dim).reshape(times, rows, layer.head_dim)
            turn = _turn(layer.rope, shape.start, tokens, layer.kv_heads)
            kernels.place_quantised(grid.quantised(codes), part.keys, dst_dtype=dtype, **turn)
            scales = _STEP[numbers.take(heads * tokens)].reshape(times, rows, 1)
            grid = _Grid(scales, -_MIDDLE * scales, "token", layer.value_dim)
            codes = values.take(heads * tokens * layer.value_dim).reshape(times, rows, layer.value_dim)
            kernels.place_quantised(grid.quantised(codes), part.values, dst_dtype=dtype)
        at = 0
        for array in _first_tokens(out, shape, self._exact):
            array[...] = exact[at : at + array.nbytes].view(array.dtype).reshape(array.shape)
            at += array.nbytes


class _Part(NamedTuple):
    """Keys and values of a stretch of equal layers, [layers, heads * tokens, channels], as views."""

    stretch: Stretch
    keys: NDArray[Any]
    values: NDArray[Any]

    @property
    def layer(self) -> Any:
        return self.stretch.layer

    @property
    def times(self) -> int:
        return self.stretch.times

    def by_head(self, array: Floats) -> Floats:
        """[layers, heads, tokens, channels]"""
        return array.reshape(self.times, self.layer.kv_heads, -1, array.shape[2])


def _parts(raw: NDArray[np.uint8], shape: FrameShape) -> Iterator[_Part]:
    item = shape.layout.numpy_dtype
    for stretch in shape.stretches:
        layer, times, offset = stretch
        nbytes = times * shape.array_bytes(layer)
        whole = raw[offset : offset + nbytes].view(item).reshape(times, -1)
        cut = layer.kv_heads * shape.tokens * layer.head_dim
        rows = layer.kv_heads * shape.tokens
        yield _Part(
            stretch,
            whole[:, :cut].reshape(times, rows, layer.head_dim),
            whole[:, cut:].reshape(times, rows, layer.value_dim),
        )


class _Grid(NamedTuple):
    """Scales and offsets as the kernels take them, and the bytes that say them."""

    scales: Floats
    offsets: Floats
    per: Any
    group: int
    stored: tuple[NDArray[np.uint8], ...] = ()

    def quantised(self, codes: NDArray[np.uint8]) -> Quantised:
        return Quantised(codes, self.scales, self.offsets, 8, self.per, self.group)


def _key_grid(keys: Floats, first: int, share: float) -> _Grid | None:
    """Of keys [layers, heads, tokens, channels] without RoPE, by tokens from `first` on; None where they do not fit."""
    tokens = keys.shape[2]
    keys = keys[:, :, first:]
    with np.errstate(all="ignore"):  # infinity and NaN are looked for at the end
        middles = keys.mean(axis=2).astype("<f2")
        centred = keys - middles[:, :, None].astype(np.float32)
        reach = np.maximum(centred.max(axis=2), -centred.min(axis=2))
        spread = np.sqrt(np.square(centred).mean(axis=2))
        common = np.exp(np.log(spread + np.float32(1e-30)).mean(axis=2, keepdims=True))
        steps = _rounded(share * common, reach)
    if steps is None:
        return None
    scales = _STEP[steps]
    offsets = middles.astype(np.float32) - _MIDDLE * scales
    return _Grid(scales, offsets, "channel", tokens, (steps.reshape(-1), middles.reshape(-1).view(np.uint8)))


def _value_grid(values: Floats, share: float) -> _Grid | None:
    """Of values [layers, heads, tokens, channels]; None where they do not fit."""
    with np.errstate(all="ignore"):
        reach = np.maximum(values.max(axis=3), -values.min(axis=3))
        size = np.sqrt(np.square(values).mean(axis=3))
        steps = _rounded(share * size, reach)
    if steps is None:
        return None
    scales = _STEP[steps].reshape(len(steps), -1, 1)
    return _Grid(scales, -_MIDDLE * scales, "token", values.shape[3], (steps.reshape(-1),))


def _rounded(wanted: Floats, reach: Floats) -> NDArray[np.uint8] | None:
    """Bytes of the steps nearest to `wanted`, but no finer than 127 of them reach; None when that is impossible."""
    if not np.isfinite(reach).all() or not np.isfinite(wanted).all():
        return None
    least = np.ceil(_PER_OCTAVE * np.log2(np.maximum(reach / np.float32(127), _STEP[0])) + _BIAS)
    nearest = np.rint(_PER_OCTAVE * np.log2(np.maximum(wanted, _STEP[0])) + _BIAS)
    steps = np.maximum(least, nearest)
    return None if steps.max(initial=0) > 255 else steps.astype(np.uint8)


def _exact_tokens(shape: FrameShape) -> int:
    return min(shape.tokens, max(0, EXACT_TOKENS - shape.start))


def _exact_bytes(raw: NDArray[np.uint8], shape: FrameShape, exact: int) -> NDArray[np.uint8]:
    arrays = (np.ascontiguousarray(array) for array in _first_tokens(raw, shape, exact))
    return np.concatenate([np.empty(0, np.uint8), *(array.reshape(-1).view(np.uint8) for array in arrays)])


def _first_tokens(raw: NDArray[np.uint8], shape: FrameShape, exact: int) -> Iterator[NDArray[Any]]:
    """Views of the first `exact` tokens of all keys and values."""
    if not exact:
        return
    for part in _parts(raw, shape):
        for array in (part.keys, part.values):
            yield array.reshape(part.times, part.layer.kv_heads, shape.tokens, -1)[:, :, :exact]


def _unturned(part: _Part, shape: FrameShape) -> Floats:
    """Keys as they are before RoPE, float32."""
    return _floats(
        part.keys, shape, **_turn(part.layer.rope, shape.start, shape.tokens, part.layer.kv_heads, back=True)
    )


def _floats(array: NDArray[Any], shape: FrameShape, **turn: Any) -> Floats:
    out = np.empty(array.shape, dtype=np.float32)
    kernels.place(array, out, src_dtype=shape.layout.dtype, dst_dtype="float32", **turn)
    return out


@lru_cache(maxsize=64)
def _turn(rope: Rope | None, start: int, tokens: int, heads: int, *, back: bool = False) -> dict[str, Any]:
    """What turns `heads` * `tokens` rows to their positions, or back; the same for all layers of one geometry."""
    if rope is None:
        return {}
    cos, sin = rope.table(np.arange(start, start + tokens))
    return {
        "cos": np.tile(cos, (heads, 1)),
        "sin": np.tile(-sin if back else sin, (heads, 1)),
        "pairing": rope.pairing,
    }


class _Cursor:
    """Takes bytes from the front."""

    def __init__(self, held: NDArray[np.uint8]) -> None:
        self._held = held
        self._at = 0

    def take(self, count: int) -> NDArray[np.uint8]:
        self._at += count
        return self._held[self._at - count : self._at]
