"""Layouts from GGUF metadata, for files as the converter writes them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from numpy.typing import NDArray

from kvstore.layout import LayerLayout, Layout, LayoutError, capabilities
from kvstore.pipeline.gguf_metadata import read_metadata
from kvstore.pipeline.rope import Explicit, Linear, LongRope, Rope, Yarn
from kvstore.pipeline.weights import open_weights
from tests.reference import Reference
from tests.tiny_models import write_tiny_gguf


def metadata(
    arch: str, layers: int, hidden: int, heads: int, kv_heads: int | list[int], **more: Any
) -> dict[str, Any]:
    """Keys of more are written with _ for . after their first word: rope_freq_base for rope.freq_base."""
    keys = {key.replace("_", ".", 1).replace("scaling_", "scaling.", 1): value for key, value in more.items()}
    keys |= {
        "block_count": layers,
        "embedding_length": hidden,
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "context_length": 32768,
    }
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in keys.items()}}


def layout(source: dict[str, Any], tensors: dict[str, Any] | None = None, **options: Any) -> Layout:
    return Layout.from_gguf(source, **{"rope_tensors": tensors or {}, "unpermuted": True, **options})


def rope(found: Layout, layer: int = 0) -> Rope:
    geometry = found.layers[layer].rope
    assert geometry is not None
    return geometry


LLAMA = metadata(
    "llama", 16, 2048, 32, 8, rope_dimension_count=64, rope_freq_base=500000.0, attention_key_length=64
)
QWEN2 = metadata("qwen2", 28, 1536, 12, 2, rope_freq_base=1e6)
GEMMA3 = metadata(
    "gemma3", 26, 1152, 4, 1, attention_key_length=256, attention_value_length=256, rope_freq_base=1e6,
    attention_sliding_window=512, rope_scaling_type="linear", rope_scaling_factor=8.0,
)  # fmt: skip
PHI3 = metadata(
    "phi3", 32, 3072, 24, 8, rope_dimension_count=96, rope_scaling_attn_factor=1.19, attention_sliding_window=262144,
    rope_scaling_type="longrope", rope_scaling_original_context_length=4096,
)  # fmt: skip
PHI3_TENSORS = {"rope_factors_short.weight": np.ones(48), "rope_factors_long.weight": np.full(48, 2.0)}


def test_a_real_file(smollm2: Path) -> None:
    found = layout(read_metadata(smollm2))
    assert found == Layout.uniform(layers=30, kv_heads=3, head_dim=64, rope=Rope(64, 100000.0, 64))
    assert found.token_bytes == 22.5 * 1024


SCALINGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 256},
    "longrope": {"rope_type": "longrope", "short_factor": [1.0 + i / 8 for i in range(8)],
                 "long_factor": [2.0 + i for i in range(8)], "original_max_position_embeddings": 512},
}  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_keys_of_a_model_turn_as_its_layout_says(tmp_path: Path, arch: str, scaling: str) -> None:
    """RoPE scaling was ignored when keys were moved. Keys come from an independent implementation."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, arch=arch, theta=500.0, rope_scaling=SCALINGS[scaling])
    tensors = {t.name: np.asarray(t.data) for t in GGUFReader(path).tensors if t.name.startswith("rope_")}
    tokens = [7] * 100  # in layer 0 the key of a token depends on nothing but its position
    for regime in ("short", "long"):
        found = layout(read_metadata(path), tensors, dtype="float32", regime=regime)
        keys, _ = Reference(path, long_rope=regime == "long").kv(tokens)[0]
        assert keys.shape == found.key_shape(0, 100)
        moved = _turn(keys[:, :1], rope(found), np.arange(100))
        np.testing.assert_allclose(moved, keys, atol=2e-5 * np.abs(keys).max())


def _turn(keys: NDArray[np.float32], geometry: Rope, by: NDArray[np.int64]) -> NDArray[np.float32]:
    assert geometry.pairing == "half"
    cos, sin = geometry.table(by)
    first, second = np.split(keys, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def test_permuted_rows_make_neighbouring_pairs_unless_the_engine_undoes_it() -> None:
    """The wrong pairing turns keys into noise."""
    assert rope(layout(LLAMA)).pairing == "half"
    assert rope(layout(LLAMA, unpermuted=False)).pairing == "interleaved"
    for unpermuted in (True, False):
        assert rope(layout(QWEN2, unpermuted=unpermuted)).pairing == "half"
        glm = metadata("glm4", 40, 4096, 32, 2, attention_key_length=128, rope_dimension_count=64)
        assert rope(layout(glm, unpermuted=unpermuted)).pairing == "interleaved"
        assert rope(layout(glm, unpermuted=unpermuted)).rotary_dim == 64


def test_llama_3_scaling_is_found_in_a_tensor() -> None:
    divisors = np.geomspace(1, 32, 32).astype(np.float32)
    found = rope(layout(LLAMA, {"rope_freqs.weight": divisors}))
    assert found.scaling == Explicit(tuple(divisors.tolist()))
    np.testing.assert_allclose(
        found.inverse_frequencies(), rope(layout(LLAMA)).inverse_frequencies() / divisors
    )


def test_sizes_default_as_in_llama_cpp() -> None:
    assert layout(QWEN2).layers[0] == LayerLayout(2, 128, rope=Rope(128, 1e6, 128))
    alone = {key: value for key, value in QWEN2.items() if not key.endswith(("head_count_kv", "freq_base"))}
    assert layout(alone).layers[0] == LayerLayout(12, 128, rope=Rope(128, 1e4, 128))


def test_gemma_3_scales_and_widens_only_its_full_layers() -> None:
    """One RoPE geometry was assumed for all layers."""
    found = layout(GEMMA3)
    assert found.layers[0] == LayerLayout(1, 256, None, "sliding", 512, Rope(256, 1e4, 256))
    assert found.layers[5] == LayerLayout(
        1, 256, None, "full", None, Rope(256, 1e6, 256, "half", Linear(8.0))
    )
    assert [layer.attention for layer in found.layers].count("full") == 4


def test_gemma_4_has_two_head_sizes_and_shares_kv() -> None:
    divisors = np.r_[np.ones(64), np.full(192, 1e30)]
    found = layout(
        metadata("gemma4", 6, 1536, 8, 1, attention_key_length=512, attention_value_length=512,
                 attention_key_length_swa=256, attention_value_length_swa=256, rope_dimension_count=512,
                 rope_dimension_count_swa=256, rope_freq_base=1e6, rope_freq_base_swa=1e4,
                 attention_sliding_window=512, attention_shared_kv_layers=1,
                 attention_sliding_window_pattern=[True, True, False, True, True, False]),
        {"rope_freqs.weight": divisors},
    )  # fmt: skip
    assert found.layers[0] == LayerLayout(1, 256, None, "sliding", 512, Rope(256, 1e4, 256))
    assert found.layers[2] == LayerLayout(
        1, 512, rope=Rope(512, 1e6, 512, "half", Explicit(tuple(divisors.tolist())))
    )
    assert found.layers[5] == LayerLayout(attention="shared")


def test_phi_3_takes_its_longrope_divisors_from_tensors() -> None:
    found = rope(layout(PHI3, PHI3_TENSORS))
    assert found.rotary_dim == 96
    assert found.scaling == LongRope((1.0,) * 48, (2.0,) * 48, 4096, 1.19, "short")
    assert rope(layout(PHI3, PHI3_TENSORS, regime="long")) != found
    assert {layer.attention for layer in layout(PHI3, PHI3_TENSORS).layers} == {"full"}  # as in llama.cpp


def test_yarn_grows_keys_as_the_paper_says_and_ministral_as_its_file_says() -> None:
    yarn = {
        "rope_scaling_type": "yarn",
        "rope_scaling_factor": 16.0,
        "rope_scaling_original_context_length": 16384,
    }
    found = rope(layout(metadata("qwen3", 2, 512, 4, 2, **yarn)))
    assert found.scaling == Yarn(16.0, 16384)
    assert found.attention_factor == pytest.approx(0.1 * math.log(16) + 1)
    ministral = metadata("mistral3", 2, 512, 4, 2, **yarn)
    ministral["mistral3.rope.scaling.yarn_log_multiplier"] = 1.0
    assert rope(layout(ministral)).attention_factor == pytest.approx(1.0)


def test_smollm3_and_cohere_2_leave_layers_unturned() -> None:
    smollm3 = layout(metadata("smollm3", 8, 2048, 16, 4))
    assert [layer.rope is None for layer in smollm3.layers] == [False, False, False, True] * 2
    cohere2 = layout(metadata("cohere2", 8, 4096, 32, 8, attention_sliding_window=4096))
    assert [layer.rope is None for layer in cohere2.layers] == [False, False, False, True] * 2
    assert [layer.attention for layer in cohere2.layers] == ["sliding", "sliding", "sliding", "full"] * 2


def test_granite_may_be_without_positions() -> None:
    found = layout(metadata("granite", 2, 512, 4, 2, rope_scaling_finetuned=False, rope_freq_base=1e4))
    assert found.positions == "none"


def test_layers_without_kv_heads_are_recurrent() -> None:
    found = layout(metadata("lfm2", 4, 1024, 16, [0, 0, 8, 0], rope_freq_base=1e6))
    assert [layer.holds_kv for layer in found.layers] == [False, False, True, False]
    assert capabilities(found).reuse == "exact"


def test_qwen_2_vl_may_reuse_prefixes_only() -> None:
    found = layout(metadata("qwen2vl", 28, 1536, 12, 2, rope_dimension_sections=[16, 24, 24, 0]))
    assert (found.positions, capabilities(found).reuse) == ("mrope", "prefix")


@pytest.mark.parametrize(
    ("source", "tensors", "message"),
    [
        (metadata("orca", 2, 512, 4, 2), {}, r"general.architecture = 'orca' is not known.*by hand"),
        ({**LLAMA, "llama.rope.scaling.type": "ntk"}, {}, r"rope.scaling.type = 'ntk'.*by hand"),
        ({**LLAMA, "llama.rope.scaling.alpha": 1000.0}, {}, r"rope.scaling.alpha = 1000.0"),
        (
            {**LLAMA, "llama.attention.sliding_window": 4096},
            {},
            r"sliding_window = 4096.*llama.cpp ignores it",
        ),
        ({**LLAMA, "llama.attention.kv_lora_rank": 512}, {}, r"kv_lora_rank = 512"),
        (LLAMA, {"rope_freqs.weight": np.ones(16)}, r"factors has 16 entries, rotary_dim / 2 is 32"),
        (LLAMA, {"rope_other.weight": np.ones(32)}, r"not known with .*rope_other.weight"),
        (PHI3, {}, r"rope.scaling.type = 'longrope'.*not known with .*tensors \[\]"),
        ({**PHI3, "phi3.rope.scaling.factor": 32.0}, PHI3_TENSORS, r"not known with factor 32.0"),
        ({**QWEN2, "qwen2.rope.scaling.attn_factor": 1.2}, {}, r"attn_factor 1.2"),
        (metadata("gemma2", 2, 512, 4, 2), {}, r"lacks attention.sliding_window: add it"),
        (
            metadata("gemma4", 2, 512, 4, 2, attention_sliding_window=512),
            {},
            r"lacks .*sliding_window_pattern",
        ),
        (metadata("lfm2", 4, 1024, 16, [8, 8]), {}, r"head_count_kv = \[8, 8\].*4 of them"),
        (
            metadata("qwen2", 2, 512, 4, 2, rope_scaling_type="yarn", rope_scaling_factor=4.0)
            | {"qwen2.rope.scaling.yarn_beta_fast": 16.0},
            {},
            r"yarn_beta_fast = 16.0.*llama.cpp ignores it",
        ),
    ],
)
def test_what_is_not_known_for_sure_is_refused(
    source: dict[str, Any], tensors: dict[str, Any], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        layout(source, tensors)


def test_the_engine_and_the_layout_read_the_same_geometry(tmp_path: Path) -> None:
    """Two readers of one file that disagree would give one model two identities."""
    path = tmp_path / "llama3.gguf"
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    write_tiny_gguf(path, rope_scaling={**scaling, "original_max_position_embeddings": 256})
    factors = next(t for t in GGUFReader(path).tensors if t.name == "rope_freqs.weight").data
    found = Layout.from_gguf(
        read_metadata(path), rope_tensors={"rope_freqs.weight": factors}, unpermuted=True, dtype="float32"
    )
    assert found.layers[0].rope == open_weights(path, tmp_path / "cache").config.rope
