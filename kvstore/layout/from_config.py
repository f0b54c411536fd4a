"""The layout of a model from its Hugging Face `config.json`.

What is described is the KV as the transformers library caches it: heads, layers, and the order in which a rotated
key keeps its channels. An engine that keeps another order, as llama.cpp does for some models, has another layout.

Nothing is guessed. A model type or a scaling that is not known, a missing size, and a key that speaks of
positions but that the model type is not known to have, raise LayoutError with key, value and the way out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from kvstore.layout import Attention, Dtype, LayerLayout, Layout, LayoutError, Positions
from kvstore.layout.config_source import BY_HAND, Source
from kvstore.layout.hf_model_types import FAMILIES, WRAPPERS, Family
from kvstore.pipeline.rope import DynamicNtk, Explicit, Linear, Llama3, LongRope, Rope, Scaling, Yarn

Regime = Literal["short", "long"]

_LAYER_TYPES = {"full": "full_attention", "sliding": "sliding_attention", "chunked": "chunked_attention"}
_ABOUT_POSITIONS = (
    "rope|rotary|alibi|position_emb|sliding|window|attention_chunk|ntk|layer_types|kv_shared|per_layer_config"
)
"""Keys that match speak of positions or of which layers hold KV: none of them may go unread."""


def layout_from_config(
    config: Mapping[str, Any], *, dtype: Dtype = "float16", regime: Regime = "short"
) -> Layout:
    """The layout that `config`, the contents of a config.json of transformers 4 or 5, describes.

    `dtype` is that of the cached KV, which a config does not determine. `regime`: which divisors of LongRoPE are
    in use, short up to the original context, long beyond; other models ignore it.
    Raises LayoutError; see the module's text.
    """
    model_type, config = _language_model(config)
    family = FAMILIES[model_type]
    source = Source(config, f"the config of a {model_type}")
    kinds = _kinds(source, family)
    turning = family.turning(source, kinds)
    both_ways = source.get("use_bidirectional_attention")
    if both_ways not in (None, False, "vision"):
        raise source.refusal(
            "use_bidirectional_attention", both_ways, "KV depends on later tokens and cannot be reused"
        )
    try:
        built = {
            (kind, turns): _layer(source, family, kind, turns, regime)
            for kind, turns in dict.fromkeys(zip(kinds, turning, strict=True))
        }
    except LayoutError:
        raise
    except ValueError as error:  # a geometry that Rope refuses
        raise LayoutError(f"the config of a {model_type}: {error}") from error
    source.get("max_position_embeddings", "original_max_position_embeddings")  # alone they change nothing
    source.refuse_unread(_ABOUT_POSITIONS)

    layers = tuple(built[key] for key in zip(kinds, turning, strict=True))
    positions: Positions = "mrope" if _has_three_axes(source) else family.positions
    if positions == "rope" and not any(layer.rope for layer in layers):
        positions = "none"
    return Layout(layers, dtype, positions)


def _language_model(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """(model type, config) of the part that has the KV."""
    model_type = config.get("model_type")
    text = config.get("text_config")
    if text is not None:
        if model_type not in WRAPPERS:
            raise LayoutError(
                f"model_type = {model_type!r} is not a known multimodal type. If its language model sees one "
                "position a token, pass config['text_config'] instead"
            )
        config, model_type = text, text.get("model_type", model_type)
    if model_type not in FAMILIES:
        raise LayoutError(f"model_type = {model_type!r} is not known. {BY_HAND}")
    return model_type, config


def _kinds(source: Source, family: Family) -> list[Attention]:
    layers = source.whole("num_hidden_layers", "n_layer")
    kinds = family.kinds(source, layers)
    if family.shared is not None:
        own = layers - source.whole("num_kv_shared_layers", default=family.shared, least=0)
        kinds[own:] = ["shared"] * (layers - own)
    return kinds


def _layer(source: Source, family: Family, kind: Attention, turns: bool, regime: Regime) -> LayerLayout:
    if kind in ("shared", "none"):
        return LayerLayout(attention=kind)
    kv_heads, head_dim, value_head_dim = _sizes(source, family, kind)
    window = None
    if kind == "sliding":
        window = source.whole("sliding_window", "sliding_window_size")
    if kind == "chunked":
        window = source.whole("attention_chunk_size")
    rope = _rope(source, family, kind, head_dim, regime) if turns else None
    return LayerLayout(kv_heads, head_dim, value_head_dim, kind, window, rope)


def _sizes(source: Source, family: Family, kind: Attention) -> tuple[int, int, int | None]:
    """(kv_heads, head_dim, value_head_dim)"""
    if family.latent:
        source.get("rope_interleave")  # of the weights: the cached key is in half order either way
        return 1, source.whole("qk_rope_head_dim"), source.whole("kv_lora_rank")
    heads = source.whole("num_attention_heads", "n_head", default=family.sizes.get("num_attention_heads"))
    kv_heads = source.whole(
        "num_key_value_heads",
        default=family.sizes.get("num_key_value_heads", None if family.grouped else heads),
    )
    head_dim = source.get("head_dim") or family.head_dim
    if head_dim is None:
        head_dim = source.whole("hidden_size", "n_embd", "n_embed") // heads
    if family.global_head_dim is not None:
        global_head_dim = source.whole("global_head_dim", default=family.global_head_dim)
        global_kv_heads = source.whole("num_global_key_value_heads", default=kv_heads)
        if kind == "full":
            return global_kv_heads if source.get("attention_k_eq_v") else kv_heads, global_head_dim, None
    return kv_heads, head_dim, None


def _rope(source: Source, family: Family, kind: Attention, head_dim: int, regime: Regime) -> Rope:
    stated = _stated_rope(source, family, kind)
    theta = source.number("rope_theta", "rotary_emb_base", default=family.theta)
    if kind == "sliding" and family.local_theta is not None:
        theta = source.number("rope_local_base_freq", default=family.local_theta)
    theta = stated.number("rope_theta", default=theta)
    partial = source.number("partial_rotary_factor", "rotary_pct", default=family.partial)
    partial = stated.number("partial_rotary_factor", default=partial)
    rotary_dim = source.whole("rotary_dim") if family.names_rotary_dim else int(head_dim * partial)
    scaling: Scaling | None
    if (name := _type_of(stated)) == "proportional":
        # The exponents run over the whole head, and the pairs beyond the rotary part stand still (Gemma 4).
        turned = int(partial * head_dim // 2)
        scaling = Explicit((1.0,) * turned + (1e30,) * (head_dim // 2 - turned))
        rotary_dim = head_dim
    else:
        scaling = _scaling(name, stated, source, regime)
    stated.refuse_unread()
    return Rope(head_dim, theta, rotary_dim, family.pairing, scaling)


def _stated_rope(source: Source, family: Family, kind: Attention) -> Source:
    """What the config states of the RoPE of one kind of layer, in the old form or the new one."""
    old, new = source.get("rope_scaling"), source.get("rope_parameters")
    if old and new and old != new:
        raise source.refusal(
            "rope_scaling", old, f"rope_parameters says otherwise: {new!r}. Drop one of them"
        )
    stated = new or old or {}
    source.get("rope_local_base_freq")
    if any(isinstance(value, Mapping) for value in stated.values()):
        stated = stated.get(_LAYER_TYPES[kind])
        if not isinstance(stated, Mapping):
            raise source.refusal("rope_parameters", new, f"it has none for {kind} layers: add them")
    elif new and not family.scales_local:
        raise source.refusal("rope_parameters", new, "full_attention and sliding_attention apart are needed")
    elif kind == "sliding" and not family.scales_local:
        stated = {}
    if family.states_rope and not stated:
        raise source.refusal("rope_parameters", new, "this type needs them: add them")
    return Source(stated, f"the RoPE parameters of {kind} layers")


def _type_of(stated: Source) -> str:
    name = str(stated.get("rope_type", "type") or "default")
    stated.get("mrope_section", "mrope_interleaved")  # the axes are equal for text, see _has_three_axes
    return {"mrope": "default", "su": "longrope"}.get(name, name)


def _has_three_axes(source: Source) -> bool:
    stated = source.get("rope_parameters") or source.get("rope_scaling") or {}
    return "mrope_section" in stated


def _scaling(name: str, stated: Source, source: Source, regime: Regime) -> Scaling | None:
    match name:
        case "default":
            return None
        case "linear":
            return Linear(stated.number("factor"))
        case "dynamic":
            return DynamicNtk(stated.number("factor"), source.whole("max_position_embeddings"))
        case "llama3":
            return Llama3(
                stated.number("factor"),
                stated.number("low_freq_factor"),
                stated.number("high_freq_factor"),
                _original_context(stated, source),
            )
        case "yarn":
            return _yarn(stated, source)
        case "longrope":
            original = _original_context(stated, source)
            # Ding et al. 2024, section 3.3 (as published models compute it): sqrt(1 + ln(factor) / ln(original))
            factor = stated.number("factor", default=source.whole("max_position_embeddings") / original)
            grown = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
            return LongRope(
                stated.numbers("short_factor"),
                stated.numbers("long_factor"),
                original,
                stated.number("attention_factor", default=grown),
                regime,
            )
    raise stated.refusal("rope_type", name, f"not a known scaling. {BY_HAND}")


def _yarn(stated: Source, source: Source) -> Yarn:
    factor = stated.number("factor")
    attention_factor = stated.get("attention_factor") and stated.number("attention_factor")
    over, under = stated.get("mscale"), stated.get("mscale_all_dim")
    if attention_factor is None and over and under:  # DeepSeek

        def grown(scale: float) -> float:
            return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

        attention_factor = grown(stated.number("mscale")) / grown(stated.number("mscale_all_dim"))
    stated.get("llama_4_scaling_beta", "max_position_embeddings")  # the one scales queries only
    truncate = stated.get("truncate")
    return Yarn(
        factor,
        _original_context(stated, source),
        stated.number("beta_fast", default=32.0),
        stated.number("beta_slow", default=1.0),
        attention_factor,
        truncate is None or bool(truncate),
    )


def _original_context(stated: Source, source: Source) -> int:
    outer = source.get("original_max_position_embeddings")
    return stated.whole("original_max_position_embeddings", default=outer) if outer is None else outer
