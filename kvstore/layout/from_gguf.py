"""The layout of a model from the metadata of its GGUF file.

What is described is the KV as llama.cpp caches it, with one choice: the order of a key's channels. The converter
stores the Q and K rows of some architectures permuted, so that RoPE pairs are neighbours (2i, 2i + 1); an engine
that undoes this when it reads the weights has them half a head apart, as Hugging Face does.

Nothing is guessed: an architecture that is not in the table, a scaling that is not known, and a key that speaks of
positions but that nobody here reads, raise LayoutError with key, value and the way out. Sources: llama.cpp's
`llama_model_rope_type`, `load_arch_hparams` of each architecture, and its converter (b11549).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike

from kvstore.layout import Attention, Dtype, LayerLayout, Layout, LayoutError, Positions
from kvstore.layout.config_source import BY_HAND, Source
from kvstore.pipeline.rope import Explicit, Linear, LongRope, Pairing, Rope, Scaling, Yarn

_ABOUT_POSITIONS = r"^rope\.|sliding|_swa|_mla|_lora|shared_kv|recurrent|alibi|indexer|ssm"
"""Keys that match speak of positions or of what a layer caches: none of them may go unread."""


@dataclass(frozen=True, kw_only=True)
class _Arch:
    """Rules of an architecture.

    `pairs`: of a key's channels; `permuted` are interleaved unless the engine undoes the permutation.
    `slides`: each so many-th layer is full and the others slide, unless the file lists them; 0, it must list
    them; None, no layer slides. `may_lack_window`: then none slides. `ignores_window`: what the file says of one
    is not used. `local_theta`: of sliding layers, where the file names none; None for that of the others.
    `nope`: each so many-th layer keeps its keys unturned. `marks_nope`: a file may say that none turns them.
    `yarn_keys`: what llama.cpp reads of YaRN's finer numbers.
    """

    pairs: Literal["half", "interleaved", "permuted"] = "half"
    slides: int | None = None
    may_lack_window: bool = False
    ignores_window: bool = False
    local_theta: float | None = None
    scales_local: bool = True
    only_sliding_turn: bool = False
    nope: int | None = None
    marks_nope: bool = False
    yarn_keys: tuple[str, ...] = ()
    positions: Positions = "rope"


_HALF = _Arch()
_INTERLEAVED = _Arch(pairs="interleaved")
_PERMUTED = _Arch(pairs="permuted")

_ARCHS: dict[str, _Arch] = {
    "arcee": _PERMUTED,
    "bloom": _Arch(positions="alibi"),
    "cohere2": _Arch(pairs="interleaved", slides=4, only_sliding_turn=True),
    "command-r": _INTERLEAVED,
    "ernie4_5": _INTERLEAVED,
    "gemma": _HALF,
    "gemma2": _Arch(slides=2),
    "gemma3": _Arch(slides=6, may_lack_window=True, local_theta=1e4, scales_local=False),
    "gemma3n": _Arch(slides=0, local_theta=1e4, scales_local=False),
    "gemma4": _Arch(slides=0, local_theta=1e4, scales_local=False),
    "glm4": _INTERLEAVED,
    "gpt-oss": _Arch(slides=2),
    "gpt2": _Arch(positions="learned"),
    "gptneox": _HALF,
    "granite": _Arch(pairs="permuted", marks_nope=True),
    "internlm2": _PERMUTED,
    "lfm2": _HALF,
    "llama": _PERMUTED,
    "minicpm": _PERMUTED,
    "mistral3": _Arch(pairs="permuted", yarn_keys=("beta_fast", "beta_slow", "log_multiplier")),
    "nemotron": _HALF,
    "olmo": _PERMUTED,
    "olmo2": _Arch(slides=4, may_lack_window=True, scales_local=False),
    "phi2": _HALF,
    "phi3": _Arch(ignores_window=True),
    "qwen2": _HALF,
    "qwen2moe": _HALF,
    "qwen2vl": _Arch(positions="mrope"),
    "qwen3": _HALF,
    "qwen3moe": _HALF,
    "qwen3vl": _Arch(positions="mrope"),
    "seed_oss": _HALF,
    "smollm3": _Arch(pairs="permuted", nope=4),
    "stablelm": _HALF,
    "starcoder2": _HALF,
}


def layout_from_gguf(
    metadata: Mapping[str, Any],
    *,
    rope_tensors: Mapping[str, ArrayLike],
    unpermuted: bool,
    dtype: Dtype = "float16",
    regime: Literal["short", "long"] = "short",
) -> Layout:
    """The layout that `metadata`, all keys of a GGUF as plain values and lists, describes.

    rope_tensors: those tensors of the file whose names start with "rope_", by name, [rotary_dim / 2] each; {} when
        there are none. They have to be asked for, since Llama 3 scaling is found nowhere else.
    unpermuted: the engine undoes the permutation of Q and K rows; of no effect where the file has none.
    dtype: of the cached KV. regime: which LongRoPE divisors are in use, by the size of the engine's context.
    Raises LayoutError; see the module's text.
    """
    arch = metadata.get("general.architecture")
    if arch not in _ARCHS:
        raise LayoutError(f"general.architecture = {arch!r} is not known. {BY_HAND}")
    prefix = f"{arch}."
    values = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    source = Source(values, f"the metadata of a {arch} GGUF")
    reader = _Reader(source, _ARCHS[arch], rope_tensors, unpermuted, regime)
    try:
        layers = reader.layers()
    except LayoutError:
        raise
    except ValueError as error:  # a geometry that Rope refuses
        raise LayoutError(f"a {arch} GGUF: {error}") from error
    source.refuse_unread(_ABOUT_POSITIONS)
    positions = _ARCHS[arch].positions
    if positions == "rope" and not any(layer.rope for layer in layers):
        positions = "none"
    return Layout(layers, dtype, positions)


@dataclass(frozen=True)
class _Reader:
    source: Source
    arch: _Arch
    rope_tensors: Mapping[str, ArrayLike]
    unpermuted: bool
    regime: Literal["short", "long"]

    def layers(self) -> tuple[LayerLayout, ...]:
        count = self.source.whole("block_count")
        own = count - self.source.whole("attention.shared_kv_layers", default=0, least=0)
        heads = self._per_layer("attention.head_count", count)
        kv_heads = self._per_layer("attention.head_count_kv", count, heads)
        window, sliding = self._windows(count)
        turning = self._turning(sliding)
        sizes = self._sizes(max(heads))
        thetas = self._thetas()
        scaling = self._scaling()
        layers = []
        for number, slides in enumerate(sliding):
            if number >= own:
                layers.append(LayerLayout(attention="shared"))
            elif not kv_heads[number]:
                layers.append(LayerLayout(attention="none"))
            else:
                head_dim, value_dim, rotary_dim = sizes[slides]
                rope = None
                if turning[number]:
                    kept = scaling if self.arch.scales_local or not slides else None
                    rope = Rope(head_dim, thetas[slides], rotary_dim, self._pairing(), kept)
                kind: Attention = "sliding" if slides else "full"
                layers.append(
                    LayerLayout(kv_heads[number], head_dim, value_dim, kind, window if slides else None, rope)
                )
        return tuple(layers)

    def _per_layer(self, key: str, count: int, default: list[int] | None = None) -> list[int]:
        """One number for each layer, 0 allowed."""
        value = self.source.get(key)
        if value is None and default is not None:
            return default
        values = value if isinstance(value, list) else [self.source.whole(key)] * count
        if len(values) != count or not all(type(one) is int and one >= 0 for one in values):
            raise self.source.refusal(key, value, f"an integer, or {count} of them, is needed")
        return values

    def _sizes(self, heads: int) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """(head_dim, value_dim, rotary_dim) of full and of sliding layers."""
        whole = self.source.whole
        head_dim = whole("attention.key_length", default=whole("embedding_length") // max(heads, 1))
        value_dim = whole("attention.value_length", default=head_dim)
        rotary_dim = whole("rope.dimension_count", default=head_dim)
        return (head_dim, value_dim, rotary_dim), (
            whole("attention.key_length_swa", default=head_dim),
            whole("attention.value_length_swa", default=value_dim),
            whole("rope.dimension_count_swa", default=rotary_dim),
        )

    def _windows(self, count: int) -> tuple[int | None, list[bool]]:
        """The window, and which layers have it."""
        key, pattern_key = "attention.sliding_window", "attention.sliding_window_pattern"
        window = self.source.get(key) or None
        if self.arch.ignores_window or (window is None and self.arch.may_lack_window):
            return None, [False] * count
        if self.arch.slides is None:
            if window is not None:
                raise self.source.refusal(
                    key, window, f"llama.cpp ignores it, other engines may not. {BY_HAND}"
                )
            return None, [False] * count
        window = self.source.whole(key)
        pattern = self.source.get(pattern_key)
        if isinstance(pattern, list):
            if len(pattern) != count:
                raise self.source.refusal(pattern_key, pattern, f"{count} entries are needed")
            return window, [bool(slides) for slides in pattern]
        period = self.source.whole(pattern_key, default=self.arch.slides or None)
        return window, [(number + 1) % period != 0 for number in range(count)]

    def _turning(self, sliding: list[bool]) -> list[bool]:
        """Which layers rotate their keys."""
        stated = self.source.get("rope.scaling.finetuned")
        if self.arch.positions in ("alibi", "learned") or (self.arch.marks_nope and stated is False):
            return [False] * len(sliding)
        if self.arch.only_sliding_turn:
            return sliding
        nope = self.arch.nope
        return [nope is None or (number + 1) % nope != 0 for number in range(len(sliding))]

    def _thetas(self) -> tuple[float, float]:
        """Of full and of sliding layers."""
        theta = self.source.number("rope.freq_base", default=10_000.0)
        return theta, self.source.number("rope.freq_base_swa", default=self.arch.local_theta or theta)

    def _pairing(self) -> Pairing:
        if self.arch.positions == "mrope":
            self.source.get("rope.dimension_sections")
        if self.arch.pairs == "permuted":
            return "half" if self.unpermuted else "interleaved"
        return self.arch.pairs

    def _scaling(self) -> Scaling | None:
        source = self.source
        kind = source.get("rope.scaling.type") or "linear"  # what llama.cpp assumes
        factor = source.get("rope.scaling.factor", "rope.scale_linear")
        grown = source.number("rope.scaling.attn_factor", default=1.0)
        divisors = {name: self._divisors(name) for name in sorted(self.rope_tensors)}
        match kind, [*divisors]:
            case "yarn", []:
                return self._yarn(grown)
            case "longrope", ["rope_factors_long.weight", "rope_factors_short.weight"] if factor is None:
                long, short = divisors.values()
                return LongRope(short, long, self._original_context(), grown, self.regime)
            case "none" | "linear", ["rope_freqs.weight"] if factor is None and grown == 1:
                return Explicit(divisors["rope_freqs.weight"])
            case "none", [] if grown == 1:
                return None
            case "linear", [] if grown == 1:
                if factor is None:
                    return None
                return Linear(source.number("rope.scaling.factor", "rope.scale_linear"))
        why = f"not known with factor {factor}, attn_factor {grown} and tensors {[*divisors]}. {BY_HAND}"
        raise source.refusal("rope.scaling.type", kind, why)

    def _divisors(self, name: str) -> tuple[float, ...]:
        return tuple(float(one) for one in np.asarray(self.rope_tensors[name], dtype=np.float64).ravel())

    def _original_context(self) -> int:
        return self.source.whole("rope.scaling.original_context_length", "context_length")

    def _yarn(self, grown: float) -> Yarn:
        """`grown` multiplies what the paper lets keys grow by; Ministral 3 divides it by its own measure."""
        factor = self.source.number("rope.scaling.factor")
        measure = math.log(factor) / 10 if factor > 1 else 0.0
        beta_fast = self._yarn_number("beta_fast", 32.0)
        beta_slow = self._yarn_number("beta_slow", 1.0)
        grown /= self._yarn_number("log_multiplier", 0.0) * measure + 1
        self._yarn_number("ext_factor", 1.0)
        self._yarn_number("attn_factor", 1.0)
        attention_factor = None if grown == 1 else (measure + 1) * grown
        return Yarn(factor, self._original_context(), beta_fast, beta_slow, attention_factor)

    def _yarn_number(self, name: str, usual: float) -> float:
        key = f"rope.scaling.yarn_{name}"
        value = self.source.get(key)
        if value is None or value == usual:
            return usual
        if name not in self.arch.yarn_keys:
            raise self.source.refusal(key, value, f"llama.cpp ignores it, other engines may not. {BY_HAND}")
        return self.source.number(key)
