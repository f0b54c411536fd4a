"""What one token's KV looks like: per layer its heads, their size, the kind of attention and the RoPE geometry.

The canonical raw form of `n` tokens, which blocks, tiers and codecs share: for each layer that holds KV, in
order, keys [kv_heads, n, head_dim] and then values [kv_heads, n, value_dim], C order, little endian, no padding.
Keys are as the model caches them, so already rotated, each to its own position.

Engines that cache a compressed latent instead of heads (multi-head latent attention, DeepSeek) fit the same
form: the shared rotary part is the key, the latent, which holds no position, is the value, with one KV head.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.errors import BufferTooSmallError, KVStoreError
from kvstore.pipeline.layer_groups import shares
from kvstore.pipeline.rope import DynamicNtk, LongRope, Rope

Dtype = Literal["float16", "bfloat16", "float32"]
Attention = Literal["full", "sliding", "chunked", "shared", "none"]
Positions = Literal["rope", "mrope", "alibi", "learned", "none"]
Reuse = Literal["shift", "prefix", "exact"]

_STORED: dict[str, np.dtype[Any]] = {
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # numpy has no bfloat16; its bits are kept as integers
    "float32": np.dtype("<f4"),
}


class LayoutError(KVStoreError, ValueError):
    """A layout that cannot be, or a model description that does not say for sure which layout it has."""


class LayerLayout(msgspec.Struct, frozen=True):
    """KV of one layer. `attention`:

    - `full`: every earlier token is read.
    - `sliding`: a token reads itself and the `window` - 1 tokens before it.
    - `chunked`: a token reads the earlier tokens of its own chunk; chunks start at multiples of `window`.
    - `shared`: reads the KV of an earlier layer and stores none (Gemma 3n).
    - `none`: keeps a recurrent or convolution state instead of KV (Mamba, linear attention).

    `value_head_dim` is None where values are as wide as keys. `rope` None: keys hold no position (NoPE).
    """

    kv_heads: int = 0
    head_dim: int = 0
    value_head_dim: int | None = None
    attention: Attention = "full"
    window: int | None = None
    rope: Rope | None = None

    def __post_init__(self) -> None:
        if self.value_head_dim == self.head_dim:  # one spelling, so that equal layers compare equal
            msgspec.structs.force_setattr(self, "value_head_dim", None)
        if self.attention not in ("full", "sliding", "chunked", "shared", "none"):
            raise LayoutError(f"attention {self.attention!r} is not full, sliding, chunked, shared or none")
        sizes = (self.kv_heads, self.head_dim, self.value_dim)
        if self.holds_kv and min(sizes) < 1:
            raise LayoutError(f"kv_heads, head_dim, value_head_dim are {sizes}, each must be at least 1")
        if not self.holds_kv and (any(sizes) or self.rope is not None):
            raise LayoutError(
                f"a layer with attention {self.attention!r} holds no KV: give it no sizes, no rope"
            )
        windowed = self.attention in ("sliding", "chunked")
        if (self.window is not None) != windowed or (self.window is not None and self.window < 1):
            raise LayoutError(f"window {self.window} does not go with attention {self.attention!r}")
        if self.rope is not None and self.rope.head_dim != self.head_dim:
            raise LayoutError(f"rope is for head_dim {self.rope.head_dim}, the layer has {self.head_dim}")

    @property
    def holds_kv(self) -> bool:
        return self.attention not in ("shared", "none")

    def read_from(self, position: int) -> int:
        """The first position that tokens at `position` and behind it read."""
        if self.attention == "sliding" and self.window is not None:
            return max(0, position - self.window + 1)
        if self.attention == "chunked" and self.window is not None:
            return position - position % self.window
        return 0

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.value_head_dim is None else self.value_head_dim


class Layout(msgspec.Struct, frozen=True, dict=True):
    """KV of a whole model. `positions` says how a token's position gets into its KV:

    - `rope`: keys are rotated, per layer as `LayerLayout.rope` says.
    - `mrope`: the same with three axes (Qwen-VL); of text alone the axes are equal, of images they are not.
    - `alibi`: a bias on attention scores; nothing of it is stored.
    - `learned`: position embeddings are added to the input, or anything else that no rotation can move.
    - `none`: not at all.
    """

    layers: tuple[LayerLayout, ...]
    dtype: Dtype = "float16"
    positions: Positions = "rope"

    def __post_init__(self) -> None:
        if self.dtype not in _STORED:
            raise LayoutError(f"dtype {self.dtype!r} is not one of {', '.join(_STORED)}")
        if self.positions not in ("rope", "mrope", "alibi", "learned", "none"):
            raise LayoutError(f"positions {self.positions!r} is not rope, mrope, alibi, learned or none")
        if not any(layer.holds_kv for layer in self.layers):
            raise LayoutError("no layer holds KV, so there is nothing to store")
        rotated = any(layer.rope is not None for layer in self.layers)
        if rotated != (self.positions in ("rope", "mrope")):
            raise LayoutError(
                f"positions {self.positions!r} with {'a' if rotated else 'no'} layer that has rope"
            )

    @classmethod
    def uniform(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        rope: Rope | None,
        dtype: Dtype = "float16",
        positions: Positions | None = None,
    ) -> Layout:
        """`layers` equal layers with full attention. `positions` defaults to what `rope` implies."""
        layer = LayerLayout(kv_heads=kv_heads, head_dim=head_dim, rope=rope)
        return cls((layer,) * layers, dtype, positions or ("none" if rope is None else "rope"))

    @classmethod
    def from_hf_config(
        cls,
        config: Mapping[str, Any],
        *,
        dtype: Dtype = "float16",
        regime: Literal["short", "long"] = "short",
    ) -> Layout:
        """From the contents of a Hugging Face `config.json`; see `kvstore.layout.from_config`."""
        from kvstore.layout.from_config import layout_from_config  # it imports this module

        return layout_from_config(config, dtype=dtype, regime=regime)

    @classmethod
    def from_gguf(
        cls,
        metadata: Mapping[str, Any],
        *,
        rope_tensors: Mapping[str, ArrayLike],
        unpermuted: bool,
        dtype: Dtype = "float16",
        regime: Literal["short", "long"] = "short",
    ) -> Layout:
        """From the metadata of a GGUF file; see `kvstore.layout.from_gguf`."""
        from kvstore.layout.from_gguf import layout_from_gguf  # it imports this module

        return layout_from_gguf(
            metadata, rope_tensors=rope_tensors, unpermuted=unpermuted, dtype=dtype, regime=regime
        )

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """How numpy holds one number: bfloat16 as uint16."""
        return _STORED[self.dtype]

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return self.numpy_dtype.itemsize

    @cached_property
    def _ends(self) -> tuple[int, ...]:
        """Bytes of one token up to and including each layer."""
        return tuple(
            accumulate(
                layer.kv_heads * (layer.head_dim + layer.value_dim) * self.itemsize for layer in self.layers
            )
        )

    @cached_property
    def key_sizes(self) -> tuple[tuple[int, int] | None, ...]:
        """(kv_heads, head_dim) of each layer; None where it holds no KV."""
        return tuple((layer.kv_heads, layer.head_dim) if layer.holds_kv else None for layer in self.layers)

    @cached_property
    def value_sizes(self) -> tuple[tuple[int, int] | None, ...]:
        """(kv_heads, value_dim) of each layer; None where it holds no KV."""
        return tuple((layer.kv_heads, layer.value_dim) if layer.holds_kv else None for layer in self.layers)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV, all layers."""
        return self._ends[-1]

    def layer_bytes(self, layer: int, tokens: int) -> int:
        """Bytes of `tokens` tokens in one layer, keys and values; 0 for a layer that holds none."""
        return tokens * (self._ends[layer] - (self._ends[layer - 1] if layer else 0))

    def block_bytes(self, tokens: int) -> int:
        """Bytes of `tokens` tokens in raw form, all layers."""
        return tokens * self.token_bytes

    def key_shape(self, layer: int, tokens: int) -> tuple[int, int, int]:
        """(kv_heads, tokens, head_dim)"""
        return self.layers[layer].kv_heads, tokens, self.layers[layer].head_dim

    def value_shape(self, layer: int, tokens: int) -> tuple[int, int, int]:
        """(kv_heads, tokens, value_dim)"""
        return self.layers[layer].kv_heads, tokens, self.layers[layer].value_dim

    def groups(self, count: int) -> tuple[range, ...]:
        """Cut the layers into `count` contiguous groups of near equal bytes, the first ones each half as large.

        Each has KV in it. Each cut lies at the layer boundary nearest to its share of the bytes, which
        `pipeline.layer_groups` says. Where fewer than `count` layers
        hold KV, each of these is a group. Raises LayoutError for a count below 1.
        """
        if count < 1:
            raise LayoutError(f"{count} layer groups asked for, at least 1 is needed")
        holding = [number for number, layer in enumerate(self.layers) if layer.holds_kv]
        count = min(count, len(holding))
        ends = [self._ends[number] for number in holding]
        starts = [0]  # of each group, as an index into `holding`
        for group, part in enumerate(accumulate(shares(count)[:-1]), start=1):
            share = float(self.token_bytes * part)
            inside = bisect_left(ends, share)  # the layer in which the share ends: cut before or after it
            before = ends[inside - 1] if inside else 0
            nearest = inside if share - before < ends[inside] - share else inside + 1
            starts.append(min(max(nearest, starts[-1] + 1), len(holding) - (count - group)))
        cuts = [0, *(holding[start] for start in starts[1:]), len(self.layers)]
        return tuple(range(start, end) for start, end in pairwise(cuts))

    def span(self, layers: range, tokens: int) -> slice:
        """Where a contiguous range of layers lies in the raw bytes of `tokens` tokens."""
        start = self._ends[layers.start - 1] if layers.start else 0
        return slice(tokens * start, tokens * self._ends[layers.stop - 1])

    def views(self, buffer: Any, tokens: int) -> tuple[tuple[NDArray[Any], NDArray[Any]] | None, ...]:
        """Per layer (keys, values) as arrays onto the raw bytes in `buffer`, None where a layer holds no KV.

        `buffer` is anything with the buffer protocol, C contiguous and at least `block_bytes(tokens)` long;
        the arrays can be written when it can. bfloat16 comes as uint16. Raises BufferTooSmallError.
        """
        found: list[tuple[NDArray[Any], NDArray[Any]] | None] = [None] * len(self.layers)
        for layer, keys, values in self.layer_views(buffer, range(len(self.layers)), tokens):
            found[layer] = keys, values
        return tuple(found)

    def layer_views(
        self, buffer: Any, layers: range, tokens: int
    ) -> Iterator[tuple[int, NDArray[Any], NDArray[Any]]]:
        """(layer, keys, values) of a contiguous range of layers, as `views` gives them; `buffer` begins with it.

        Layers without KV are passed over. Raises BufferTooSmallError.
        """
        raw = memoryview(buffer).cast("B")
        span = self.span(layers, tokens)
        if len(raw) < span.stop - span.start:
            raise BufferTooSmallError(
                f"{tokens} tokens need {span.stop - span.start} bytes, the buffer holds {len(raw)}"
            )
        dtype = self.numpy_dtype
        numbers = np.frombuffer(raw, dtype, (span.stop - span.start) // dtype.itemsize)
        at = 0
        for number in layers:
            layer = self.layers[number]
            if layer.holds_kv:
                between = at + layer.kv_heads * tokens * layer.head_dim
                end = between + layer.kv_heads * tokens * layer.value_dim
                keys = numbers[at:between].reshape(layer.kv_heads, tokens, layer.head_dim)
                yield number, keys, numbers[between:end].reshape(layer.kv_heads, tokens, layer.value_dim)
                at = end


class Capabilities(msgspec.Struct, frozen=True):
    """Which reuse a layout permits. Each restriction has a reason; notes say what else a planner should know.

    - `shift`: tokens may be reused at any position, keys turned by the difference (see `pipeline.rope`).
    - `prefix`: only as the start of a prompt that begins with the same tokens.
    - `exact`: only when everything that was stored is what the prompt begins with, never a part of it.
    """

    reuse: Reuse
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def capabilities(layout: Layout) -> Capabilities:
    """What kind of reuse stays right for this layout, and why not more."""
    restrictions: list[tuple[Reuse, str]] = []
    notes: list[str] = []

    def where(kind: Any) -> str:
        return layer_ranges(number for number, layer in enumerate(layout.layers) if kind(layer))

    if recurrent := where(lambda layer: layer.attention == "none"):
        restrictions.append(
            ("exact", f"layers {recurrent} keep a recurrent state, which cannot be cut back to fewer tokens")
        )
    if dynamic := where(lambda layer: layer.rope is not None and isinstance(layer.rope.scaling, DynamicNtk)):
        restrictions.append(
            (
                "exact",
                f"layers {dynamic} use dynamic NTK: a key's angle depends on how long the sequence was, so a "
                "part of a longer sequence holds other keys",
            )
        )
    if layout.positions == "mrope":
        restrictions.append(
            ("prefix", "M-RoPE gives image tokens three positions, and one difference cannot move all three")
        )
    if layout.positions == "learned":
        restrictions.append(
            (
                "prefix",
                "absolute positions went into the input of the first layer; no rotation takes them out",
            )
        )

    for window in sorted({layer.window or 0 for layer in layout.layers if layer.attention == "sliding"}):
        layers = where(lambda layer, window=window: layer.attention == "sliding" and layer.window == window)
        notes.append(f"layers {layers} read only the last {window} tokens, older KV need not be loaded there")
    if chunked := where(lambda layer: layer.attention == "chunked"):
        notes.append(
            f"layers {chunked} attend inside fixed chunks; a moved run may straddle others than before"
        )
    if shared := where(lambda layer: layer.attention == "shared"):
        notes.append(f"layers {shared} read the KV of earlier layers and store none")
    if layout.positions == "alibi":
        notes.append("ALiBi acts on scores: stored KV holds no position and moves unchanged")
    elif fixed := where(
        lambda layer: layer.holds_kv and layer.rope is None and layout.positions != "learned"
    ):
        notes.append(f"layers {fixed} hold no position (NoPE) and move unchanged")
    for scaling in {layer.rope.scaling: None for layer in layout.layers if layer.rope is not None}:
        if isinstance(scaling, LongRope):
            side = "up to" if scaling.regime == "short" else "beyond"
            notes.append(
                f"LongRoPE: these keys serve sequences {side} {scaling.original_context} tokens only"
            )

    for reuse in ("exact", "prefix"):
        if any(limit == reuse for limit, _ in restrictions):
            return Capabilities(reuse, tuple(reason for _, reason in restrictions), tuple(notes))
    return Capabilities("shift", (), tuple(notes))


def layer_ranges(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 as "0–2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)
