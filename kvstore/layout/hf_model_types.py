"""What each Hugging Face `model_type` means for the KV: kinds of attention, which layers turn keys, and defaults.

Taken from the configuration and modeling files of transformers 5.24 and checked by running every type below at
two offsets and comparing the caches. A type that is not here is refused, for two models of one shape can differ in
ways that only wrong answers show.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvstore.layout import Attention, Positions
from kvstore.layout.config_source import BY_HAND, Source
from kvstore.pipeline.rope import Pairing

Kinds = Callable[[Source, int], list[Attention]]
"""(config, number of layers) -> the attention of each."""

Turning = Callable[[Source, list[Attention]], list[bool]]
"""(config, the attention of each layer) -> whether its keys are rotated."""


# Attention of each layer. Newer configs list `layer_types`, and then the list decides.

_NAMES: dict[str, Attention] = {
    "full_attention": "full",
    "attention": "full",
    "sliding_attention": "sliding",
    "chunked_attention": "chunked",
    "linear_attention": "none",
    "mamba": "none",
    "conv": "none",
}


def _listed(source: Source, layers: int) -> list[Attention] | None:
    names = source.get("layer_types")
    if names is None:
        return None
    if len(names) != layers or not set(names) <= set(_NAMES):
        raise source.refusal("layer_types", names, f"{layers} of {', '.join(_NAMES)} are needed. {BY_HAND}")
    return [_NAMES[name] for name in names]


def _must_be_listed(source: Source, layers: int) -> list[Attention]:
    listed = _listed(source, layers)
    if listed is None:
        raise source.refusal("layer_types", None, "it must say which layers have attention: add it")
    return listed


def _full(_: Source, layers: int) -> list[Attention]:
    return ["full"] * layers


def _sliding(source: Source, layers: int) -> list[Attention]:
    """All layers, where there is a window at all."""
    return ["full" if source.get("sliding_window") is None else "sliding"] * layers


def _sliding_if_used(source: Source, layers: int) -> list[Attention]:
    source.get("max_window_layers")  # in published configs of Qwen 3 MoE, without effect there
    return _sliding(source, layers) if source.get("use_sliding_window") else _ignore_window(source, layers)


def _upper_sliding_if_used(source: Source, layers: int) -> list[Attention]:
    """Layers from `max_window_layers` up."""
    first = source.whole("max_window_layers", default=layers, least=0)
    if not source.get("use_sliding_window"):
        return _listed(source, layers) or _ignore_window(source, layers)
    return _listed(source, layers) or ["sliding" if layer >= first else "full" for layer in range(layers)]


def _ignore_window(source: Source, layers: int) -> list[Attention]:
    source.get("sliding_window")
    return ["full"] * layers


def _every(nth: int, other: Attention, *period_keys: str) -> Kinds:
    """Each nth layer full, the others `other`. `period_keys` may hold another n."""

    def kinds(source: Source, layers: int) -> list[Attention]:
        stated = source.get(*period_keys)
        listed = _listed(source, layers)
        if listed is not None:
            return listed
        if stated is not None and type(stated) is not int:
            raise source.refusal(period_keys[0], stated, "an integer, or layer_types beside it, is needed")
        return ["full" if (layer + 1) % (stated or nth) == 0 else other for layer in range(layers)]

    return kinds


def _gemma4(source: Source, layers: int) -> list[Attention]:
    return [*_every(6, "sliding")(source, layers)[:-1], "full"]


def _exaone4(source: Source, layers: int) -> list[Attention]:
    if source.get("sliding_window") is not None:
        return _every(4, "sliding", "sliding_window_pattern")(source, layers)
    source.get("sliding_window_pattern", "layer_types")
    return ["full"] * layers


def _lfm2(source: Source, layers: int) -> list[Attention]:
    full = source.get("full_attn_idxs") or range(layers)
    return _listed(source, layers) or ["full" if layer in full else "none" for layer in range(layers)]


def _llama4(source: Source, layers: int) -> list[Attention]:
    """Layers that rotate see only their chunk."""
    chunked: Attention = "full" if source.get("attention_chunk_size") is None else "chunked"
    turning = _listed_turn(source, ["full"] * layers)
    return _listed(source, layers) or [chunked if turns else "full" for turns in turning]


def _smollm3(source: Source, layers: int) -> list[Attention]:
    if source.get("use_sliding_window") and source.get("layer_types") is None:
        raise source.refusal("use_sliding_window", True, "layer_types must say which layers slide: add it")
    return _upper_sliding_if_used(source, layers)


# Which layers turn their keys.


def _all_turn(_: Source, kinds: list[Attention]) -> list[bool]:
    return [True] * len(kinds)


def _none_turns(_: Source, kinds: list[Attention]) -> list[bool]:
    return [False] * len(kinds)


def _listed_turn(source: Source, kinds: list[Attention]) -> list[bool]:
    """`no_rope_layers` has, despite its name, a 1 for each layer with RoPE."""
    period = source.whole("no_rope_layer_interval", default=4)
    listed = source.get("no_rope_layers") or [(layer + 1) % period for layer in range(len(kinds))]
    if len(listed) != len(kinds):
        raise source.refusal("no_rope_layers", listed, f"{len(kinds)} entries are needed")
    return [bool(turns) for turns in listed]


def _sliding_turn(_: Source, kinds: list[Attention]) -> list[bool]:
    return [kind == "sliding" for kind in kinds]


def _sliding_turn_if_any(_: Source, kinds: list[Attention]) -> list[bool]:
    return [kind == "sliding" or "sliding" not in kinds for kind in kinds]


def _granite_hybrid_turn(source: Source, kinds: list[Attention]) -> list[bool]:
    embedding = source.get("position_embedding_type")
    if embedding not in ("nope", "rope"):
        raise source.refusal("position_embedding_type", embedding, f"rope or nope is needed. {BY_HAND}")
    if embedding == "nope":
        source.get("rope_theta", "rope_scaling", "rope_parameters")  # written all the same
    return [embedding == "rope"] * len(kinds)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Rules of a model type, and what it assumes where its config is silent.

    `partial`: part of head_dim that turns; `names_rotary_dim`: the config says `rotary_dim` instead.
    `head_dim`: None for hidden_size / num_attention_heads. `global_head_dim`: that of full layers, if another.
    `grouped`: num_key_value_heads must be stated; else it is num_attention_heads where the config is silent.
    `local_theta`, `scales_local`: sliding layers may have a base of their own, and no scaling.
    `states_rope`: transformers assumes a scaling where the config has none, so the config must have one.
    `latent`: multi-head latent attention, whose key is the shared rotary part and whose value is the latent.
    `shared`: so many last layers read the KV of earlier ones, where the config names no other number.
    `sizes`: sub-configs are written without what equals these.
    """

    kinds: Kinds = _full
    turning: Turning = _all_turn
    pairing: Pairing = "half"
    positions: Positions = "rope"
    theta: float = 10_000.0
    partial: float = 1.0
    names_rotary_dim: bool = False
    head_dim: int | None = None
    global_head_dim: int | None = None
    grouped: bool = True
    local_theta: float | None = None
    scales_local: bool = True
    states_rope: bool = False
    latent: bool = False
    shared: int | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)


_GEMMA3 = Family(
    kinds=_every(6, "sliding", "sliding_window_pattern", "_sliding_window_pattern"),
    theta=1e6,
    local_theta=1e4,
    scales_local=False,
    head_dim=256,
    sizes={"num_attention_heads": 8, "num_key_value_heads": 4},
)
_GEMMA3N = Family(
    kinds=_every(5, "sliding"), theta=1e6, local_theta=1e4, scales_local=False, head_dim=256, shared=15
)
_GEMMA4 = Family(
    kinds=_gemma4, scales_local=False, states_rope=True, head_dim=256, global_head_dim=512, shared=0
)
_GLM = Family(pairing="interleaved", partial=0.5, head_dim=128)
_LLAMA = Family(grouped=False)
_LLAMA4 = Family(kinds=_llama4, turning=_listed_turn, pairing="interleaved", theta=5e5, head_dim=128)
_QWEN2_VL = Family(kinds=_upper_sliding_if_used, positions="mrope", theta=1e6)
_QWEN3_HYBRID = Family(kinds=_every(4, "none", "full_attention_interval"), partial=0.25, head_dim=256)

FAMILIES: dict[str, Family] = {
    "arcee": _LLAMA,
    "bloom": Family(turning=_none_turns, positions="alibi", grouped=False),
    "cohere": Family(pairing="interleaved", theta=5e5, grouped=False),
    "cohere2": Family(
        kinds=_every(4, "sliding", "sliding_window_pattern"),
        turning=_sliding_turn,
        pairing="interleaved",
        grouped=False,
    ),
    "deepseek_v2": Family(latent=True, pairing="interleaved"),
    "deepseek_v3": Family(latent=True),
    "ernie4_5": Family(pairing="interleaved", theta=5e5, head_dim=128),
    "exaone4": Family(kinds=_exaone4, turning=_sliding_turn_if_any),
    "gemma": Family(head_dim=256),
    "gemma2": Family(kinds=_every(2, "sliding"), head_dim=256),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma3n": _GEMMA3N,
    "gemma3n_text": _GEMMA3N,
    "gemma4": _GEMMA4,
    "gemma4_text": _GEMMA4,
    "glm": _GLM,
    "glm4": _GLM,
    "gpt2": Family(turning=_none_turns, positions="learned", grouped=False),
    "gpt_neox": Family(partial=0.25, grouped=False),
    "gpt_oss": Family(kinds=_every(2, "sliding"), theta=1.5e5, head_dim=64, states_rope=True),
    "gptj": Family(pairing="interleaved", names_rotary_dim=True, grouped=False),
    "granite": _LLAMA,
    "granitemoehybrid": Family(kinds=_must_be_listed, turning=_granite_hybrid_turn, grouped=False),
    "helium": Family(pairing="interleaved", theta=1e5, head_dim=128),
    "lfm2": Family(kinds=_lfm2, theta=1e6),
    "llama": _LLAMA,
    "llama4": _LLAMA4,
    "llama4_text": _LLAMA4,
    "minicpm3": Family(latent=True),
    "ministral3": Family(kinds=_sliding, head_dim=128, states_rope=True),
    "mistral": Family(kinds=_sliding),
    "mixtral": Family(kinds=_sliding, theta=1e6),
    "nemotron": Family(partial=0.5, grouped=False),
    "olmo": _LLAMA,
    "olmo2": _LLAMA,
    "olmo3": Family(kinds=_every(4, "sliding"), theta=5e5, scales_local=False, grouped=False),
    "opt": Family(turning=_none_turns, positions="learned", grouped=False),
    "phi": Family(partial=0.5, grouped=False),
    "phi3": Family(kinds=_sliding, grouped=False),
    "qwen2": Family(kinds=_upper_sliding_if_used),
    "qwen2_5_vl": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": Family(kinds=_upper_sliding_if_used, head_dim=128),
    "qwen3_5_text": _QWEN3_HYBRID,
    "qwen3_moe": Family(kinds=_sliding_if_used, head_dim=128),
    "qwen3_next": _QWEN3_HYBRID,
    "qwen3_vl_text": Family(positions="mrope", theta=5e5, head_dim=128),
    "smollm3": Family(kinds=_smollm3, turning=_listed_turn, theta=2e6),
    "stablelm": Family(partial=0.25),
    "starcoder2": Family(kinds=_sliding),
}

# fmt: off
WRAPPERS = {
    "gemma3", "gemma3n", "gemma4", "idefics3", "llama4", "llava", "mistral3", "qwen2_5_vl", "qwen2_vl", "qwen3_5",
    "qwen3_vl", "smolvlm",
}
# fmt: on
"""Multimodal types that describe their language model in `text_config`."""
