"""Layouts from config.json, for configs as they are published."""

from __future__ import annotations

import math
from typing import Any

import pytest

from kvstore.layout import LayerLayout, Layout, LayoutError, capabilities
from kvstore.pipeline.rope import DynamicNtk, Explicit, Linear, Llama3, LongRope, Rope, Yarn

Config = dict[str, Any]


def config(model_type: str, hidden: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Config:
    return {
        "model_type": model_type,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "torch_dtype": "bfloat16",
        **more,
    }


LLAMA_3_2_1B = config(
    "llama",
    2048,
    16,
    32,
    8,
    head_dim=64,
    max_position_embeddings=131072,
    rope_theta=500000.0,
    rope_scaling={
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
)
SMOLLM2_135M = config("llama", 576, 30, 9, 3, rope_interleaved=False, rope_scaling=None, rope_theta=100000)
QWEN2_5_1_5B = config(
    "qwen2",
    1536,
    28,
    12,
    2,
    max_window_layers=21,
    rope_theta=1e6,
    sliding_window=32768,
    use_sliding_window=False,
)
QWEN3_1_7B = config(
    "qwen3", 2048, 28, 16, 8, head_dim=128, max_window_layers=28, rope_scaling=None, rope_theta=1000000,
    sliding_window=None, use_sliding_window=False,
)  # fmt: skip
GEMMA_3_1B = config(
    "gemma3_text", 1152, 26, 4, 1, head_dim=256, rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000,
    sliding_window=512, sliding_window_pattern=6,
)  # fmt: skip
GEMMA_3_4B: Config = {
    "model_type": "gemma3",
    "text_config": {  # as published: without what equals the defaults
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
PHI_3_5_MINI = config(
    "phi3", 3072, 32, 32, 32, max_position_embeddings=131072, original_max_position_embeddings=4096,
    rope_theta=10000.0, sliding_window=262144,
    rope_scaling={"type": "longrope", "short_factor": [1.0 + i / 50 for i in range(48)],
                  "long_factor": [1.0 + i for i in range(48)]},
)  # fmt: skip
PHI_4_MINI = {
    **PHI_3_5_MINI,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
}
SMOLLM3_3B = config(
    "smollm3", 2048, 36, 16, 4, rope_theta=5000000.0, use_sliding_window=False, sliding_window=None,
    max_window_layers=28, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9,
    layer_types=["full_attention"] * 36,
)  # fmt: skip
MISTRAL_7B = config("mistral", 4096, 32, 32, 8, sliding_window=4096, rope_theta=10000.0)
DEEPSEEK_V2_LITE = config(
    "deepseek_v2", 2048, 27, 16, 16, kv_lora_rank=512, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, rope_theta=10000,
    rope_scaling={"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                  "original_max_position_embeddings": 4096, "type": "yarn"},
)  # fmt: skip


def layout(source: Config, **options: Any) -> Layout:
    return Layout.from_hf_config(source, **options)


def rope(found: Layout, layer: int = 0) -> Rope:
    geometry = found.layers[layer].rope
    assert geometry is not None
    return geometry


@pytest.mark.parametrize(
    ("source", "kib"),
    [
        (LLAMA_3_2_1B, 32),
        (config("llama", 3072, 28, 24, 8, head_dim=128, rope_theta=5e5), 112),
        (config("qwen2", 896, 24, 14, 2, rope_theta=1e6), 12),
        (QWEN2_5_1_5B, 28),
        (config("qwen2", 2048, 36, 16, 2, rope_theta=1e6), 36),
        (QWEN3_1_7B, 112),
        (config("qwen3", 2560, 36, 32, 8, head_dim=128, rope_theta=1e6), 144),
        (GEMMA_3_1B, 26),
        (GEMMA_3_4B, 136),
        (PHI_3_5_MINI, 384),
        (PHI_4_MINI, 128),
        (SMOLLM2_135M, 22.5),
        (config("llama", 960, 32, 15, 5), 40),
        (config("llama", 2048, 24, 32, 32), 192),
        (config("gemma2", 2304, 26, 8, 4, head_dim=256, sliding_window=4096), 104),
        (config("minicpm3", 2560, 62, 40, 40, kv_lora_rank=256, qk_rope_head_dim=32), 34.875),
    ],
)
def test_bytes_a_token_are_those_of_the_published_models(source: Config, kib: float) -> None:
    found = layout(source)
    assert found.token_bytes == kib * 1024
    assert found.block_bytes(128) == 128 * kib * 1024
    assert layout(source, dtype="float32").token_bytes == 2 * found.token_bytes


def test_llama_3_scaling() -> None:
    found = rope(layout(LLAMA_3_2_1B))
    assert found == Rope(64, 500000.0, 64, "half", Llama3(32.0, 1.0, 4.0, 8192))


def test_the_form_of_transformers_5_means_the_same() -> None:
    new = {key: value for key, value in LLAMA_3_2_1B.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = {**LLAMA_3_2_1B["rope_scaling"], "rope_theta": 500000.0}
    assert layout(new) == layout(LLAMA_3_2_1B)
    assert layout({**new, "rope_scaling": new["rope_parameters"]}) == layout(LLAMA_3_2_1B)


def test_a_config_that_says_nothing_of_rope_means_the_plain_one() -> None:
    assert rope(layout(config("llama", 2048, 24, 32, 32))) == Rope(64, 10000.0, 64)


def test_qwen_slides_only_when_told_to_and_only_above() -> None:
    assert all(layer.attention == "full" for layer in layout(QWEN2_5_1_5B).layers)
    sliding = layout({**QWEN2_5_1_5B, "use_sliding_window": True})
    assert [layer.attention for layer in sliding.layers] == ["full"] * 21 + ["sliding"] * 7
    assert sliding.layers[21].window == 32768


def test_qwen_with_yarn() -> None:
    found = layout(
        {
            **QWEN2_5_1_5B,
            "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
        }
    )
    assert rope(found).scaling == Yarn(4.0, 32768)
    assert rope(found).attention_factor == pytest.approx(0.1 * math.log(4) + 1)


def test_gemma_3_has_two_geometries() -> None:
    """One RoPE geometry was assumed for all layers."""
    small, large = layout(GEMMA_3_1B), layout(GEMMA_3_4B)
    assert [layer.attention for layer in small.layers[:7]] == ["sliding"] * 5 + ["full", "sliding"]
    assert sum(layer.attention == "full" for layer in small.layers) == 4
    assert small.layers[0] == LayerLayout(1, 256, None, "sliding", 512, Rope(256, 1e4, 256))
    assert small.layers[5] == LayerLayout(1, 256, None, "full", None, Rope(256, 1e6, 256))
    assert rope(large, 0).scaling is None
    assert rope(large, 5) == Rope(256, 1e6, 256, "half", Linear(8.0))
    assert large.layers[0].window == 1024
    assert "read only the last 512" in capabilities(small).notes[0]


def test_gemma_3_in_the_form_of_transformers_5() -> None:
    text = {key: value for key, value in GEMMA_3_4B["text_config"].items() if key != "rope_scaling"}
    text["rope_parameters"] = {
        "full_attention": {"factor": 8.0, "rope_theta": 1000000.0, "rope_type": "linear"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    text["layer_types"] = (["sliding_attention"] * 5 + ["full_attention"]) * 5 + ["sliding_attention"] * 4
    assert layout({**GEMMA_3_4B, "text_config": text}) == layout(GEMMA_3_4B)


def test_gemma_3n_shares_the_kv_of_its_first_layers() -> None:
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * 6
    found = layout(
        config("gemma3n_text", 2048, 30, 8, 2, head_dim=256, sliding_window=512, num_kv_shared_layers=10,
               layer_types=kinds, rope_theta=1e6, rope_local_base_freq=1e4)
    )  # fmt: skip
    assert [layer.attention for layer in found.layers[18:]] == ["sliding", "full"] + ["shared"] * 10
    assert found.token_bytes == 20 * 2 * 2 * 256 * 2


def test_gemma_4_turns_a_quarter_of_its_wide_global_heads() -> None:
    found = layout(
        config("gemma4_text", 1536, 35, 8, 1, head_dim=256, global_head_dim=512, sliding_window=512,
               num_kv_shared_layers=20, layer_types=(["sliding_attention"] * 4 + ["full_attention"]) * 7,
               rope_parameters={
                   "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1e6, "rope_type": "proportional"},
                   "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}})
    )  # fmt: skip
    assert found.layers[0].head_dim == 256
    assert found.layers[4].head_dim == 512
    frequencies = rope(found, 4).inverse_frequencies()
    assert frequencies[63] == pytest.approx(1e6 ** (-126 / 512))
    assert frequencies[64] < 1e-29
    assert isinstance(rope(found, 4).scaling, Explicit)


def test_longrope_grows_by_the_ratio_of_contexts_and_its_regime_is_part_of_the_layout() -> None:
    short, long = layout(PHI_4_MINI), layout(PHI_4_MINI, regime="long")
    found = rope(short)
    assert (found.head_dim, found.rotary_dim) == (128, 96)
    assert found.attention_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))
    assert isinstance(found.scaling, LongRope)
    assert found.scaling.original_context == 4096
    assert short != long
    assert rope(layout(PHI_3_5_MINI)).rotary_dim == 96  # the whole head


def test_the_old_name_of_longrope_is_understood() -> None:
    renamed = {**PHI_4_MINI, "rope_scaling": {**PHI_4_MINI["rope_scaling"], "type": "su"}}
    assert layout(renamed) == layout(PHI_4_MINI)


def test_smollm3_keeps_every_fourth_layer_unturned() -> None:
    found = layout(SMOLLM3_3B)
    assert [layer.rope is None for layer in found.layers] == [False, False, False, True] * 9
    assert capabilities(found).reuse == "shift"
    derived = {
        key: value for key, value in SMOLLM3_3B.items() if key not in ("no_rope_layers", "layer_types")
    }
    assert layout(derived) == found


def test_cohere_2_turns_only_sliding_layers_with_neighbouring_pairs() -> None:
    found = layout(
        config("cohere2", 4096, 32, 32, 8, rope_theta=50000, sliding_window=4096, sliding_window_pattern=4)
    )
    assert [layer.rope is None for layer in found.layers] == [False, False, False, True] * 8
    assert rope(found).pairing == "interleaved"


def test_llama_4_chunks_where_it_turns() -> None:
    text = config("llama4_text", 5120, 48, 40, 8, head_dim=128, attention_chunk_size=8192, no_rope_layers=[])
    found = layout({"model_type": "llama4", "text_config": text})
    assert found.layers[0].attention == "chunked"
    assert found.layers[0].window == 8192
    assert found.layers[3] == LayerLayout(8, 128)


def test_glm_4_turns_half_of_the_head_in_neighbouring_pairs() -> None:
    found = rope(
        layout(config("glm4", 4096, 40, 32, 2, head_dim=128, partial_rotary_factor=0.5, rope_theta=10000.0))
    )
    assert (found.rotary_dim, found.pairing) == (64, "interleaved")


def test_stablelm_and_gpt_neox_turn_a_quarter_in_halves() -> None:
    found = rope(layout(config("stablelm", 2048, 24, 32, 32, partial_rotary_factor=0.25, rope_theta=10000)))
    assert (found.rotary_dim, found.pairing) == (16, "half")
    neox = {"model_type": "gpt_neox", "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
            "rotary_pct": 0.25, "rotary_emb_base": 10000}  # fmt: skip
    assert rope(layout(neox)).rotary_dim == 16


def test_gpt_j_names_its_rotary_dim() -> None:
    found = rope(
        layout({"model_type": "gptj", "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64})
    )
    assert (found.head_dim, found.rotary_dim, found.pairing) == (256, 64, "interleaved")


def test_mistral_slides_everywhere_or_nowhere() -> None:
    assert {layer.window for layer in layout(MISTRAL_7B).layers} == {4096}
    assert {layer.attention for layer in layout({**MISTRAL_7B, "sliding_window": None}).layers} == {"full"}


@pytest.mark.parametrize("nested", [False, True])
def test_qwen_2_vl_may_reuse_prefixes_only(nested: bool) -> None:
    """Shifting M-RoPE keys by one difference gave wrong answers."""
    source = config("qwen2_vl", 1536, 28, 12, 2, rope_theta=1e6, use_sliding_window=False, sliding_window=32768,
                    max_window_layers=28, rope_scaling={"type": "mrope", "mrope_section": [16, 24, 24]})  # fmt: skip
    if nested:
        source = {"model_type": "qwen2_vl", "text_config": {**source, "model_type": "qwen2_vl_text"}}
    found = layout(source)
    assert found.positions == "mrope"
    assert rope(found) == Rope(128, 1e6, 128)
    assert capabilities(found).reuse == "prefix"


def test_dynamic_ntk_may_reuse_exact_matches_only() -> None:
    found = layout({**SMOLLM2_135M, "rope_scaling": {"type": "dynamic", "factor": 2.0}})
    assert rope(found).scaling == DynamicNtk(2.0, 32768)
    assert capabilities(found).reuse == "exact"


def test_hybrid_models_may_reuse_exact_matches_only() -> None:
    """A recurrent state cannot be shifted or cut, yet engines tried."""
    for source in (
        config(
            "qwen3_next", 2048, 48, 16, 2, head_dim=256, full_attention_interval=4, partial_rotary_factor=0.25
        ),
        config(
            "lfm2",
            1024,
            16,
            16,
            8,
            layer_types=["conv", "conv", "full_attention", "conv"] * 4,
            rope_theta=1e6,
        ),
    ):
        found = layout(source)
        assert sum(layer.holds_kv for layer in found.layers) == len(found.layers) // 4
        assert capabilities(found).reuse == "exact"


def test_latent_attention_keeps_the_rotary_part_as_key_and_the_latent_as_value() -> None:
    """The latent holds no position and must not turn."""
    found = layout(DEEPSEEK_V2_LITE)
    assert found.key_shape(0, 5) == (1, 5, 64)
    assert found.value_shape(0, 5) == (1, 5, 512)
    assert rope(found).pairing == "interleaved"
    assert rope(found).attention_factor == 1.0  # mscale and mscale_all_dim cancel out
    assert capabilities(found).reuse == "shift"


def test_alibi_and_learned_positions() -> None:
    bloom = layout({"model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16})
    assert (bloom.positions, capabilities(bloom).reuse) == ("alibi", "shift")
    gpt2 = layout({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024})
    assert (gpt2.positions, capabilities(gpt2).reuse) == ("learned", "prefix")


def test_granite_hybrid_without_positions() -> None:
    kinds = ["mamba"] * 5 + ["attention"]
    found = layout(config("granitemoehybrid", 1536, 6, 12, 4, layer_types=kinds, position_embedding_type="nope",
                          rope_theta=10000))  # fmt: skip
    assert found.positions == "none"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({**LLAMA_3_2_1B, "model_type": "orca9"}, r"model_type = 'orca9' is not known.*by hand"),
        ({**LLAMA_3_2_1B, "rope_scaling": {"rope_type": "ntk", "factor": 2}}, r"rope_type = 'ntk'.*by hand"),
        ({**LLAMA_3_2_1B, "rope_scaling": {"type": "linear", "factor": 2, "alpha": 1000}}, r"alpha = 1000"),
        ({**LLAMA_3_2_1B, "rope_scaling": {"type": "linear"}}, r"lacks factor: add it"),
        ({**LLAMA_3_2_1B, "rope_scaling": {"type": "linear", "factor": "2"}}, r"factor = '2'.*positive number"),
        ({**SMOLLM2_135M, "rope_interleaved": True}, r"rope_interleaved = True in the config of a llama"),
        ({**SMOLLM2_135M, "sliding_window": 4096}, r"sliding_window = 4096 in the config of a llama"),
        ({**SMOLLM2_135M, "rope_ratio": 500}, r"rope_ratio = 500"),
        ({**MISTRAL_7B, "layer_types": ["full_attention"] * 32}, r"layer_types = "),
        ({**LLAMA_3_2_1B, "rope_parameters": {"rope_type": "default"}}, r"rope_parameters says otherwise"),
        ({**SMOLLM3_3B, "no_rope_layers": [1, 0]}, r"no_rope_layers = \[1, 0\].*36 entries"),
        ({**QWEN3_1_7B, "layer_types": ["full_attention"] * 27 + ["sparse"]}, r"layer_types = .*by hand"),
        ({**GEMMA_3_1B, "use_bidirectional_attention": True}, r"depends on later tokens"),
        ({**GEMMA_3_1B, "rope_parameters": {"rope_theta": 1e6}}, r"full_attention and sliding_attention apart"),
        ({**PHI_4_MINI, "partial_rotary_factor": 1.0}, r"short_factor has 48 entries, rotary_dim / 2 is 64"),
        ({**PHI_4_MINI, "rope_scaling": {**PHI_4_MINI["rope_scaling"], "short_mscale": 1.2}}, r"short_mscale = 1.2"),
        ({"model_type": "paligemma", "text_config": {"model_type": "gemma"}}, r"'paligemma' is not a known multimodal"),
        ({**SMOLLM2_135M, "num_hidden_layers": 0}, r"num_hidden_layers = 0.*at least 1"),
        ({**SMOLLM2_135M, "num_attention_heads": None}, r"lacks num_attention_heads: add it"),
        ({**QWEN3_1_7B, "num_key_value_heads": None}, r"lacks num_key_value_heads: add it"),
        (config("gpt_oss", 2880, 24, 64, 8, head_dim=64, sliding_window=128), r"rope_parameters = None.*needs them"),
        (config("ministral", 4096, 36, 32, 8, sliding_window=32768), r"'ministral' is not known"),
    ],
)  # fmt: skip
def test_what_is_not_known_for_sure_is_refused_with_key_value_and_the_way_out(
    source: Config, message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        layout(source)
