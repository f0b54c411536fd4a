"""The oracle itself, against facts that hold without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.pipeline.tokenizer import Tokenizer
from tests.reference import Reference
from tests.tiny_models import write_tiny_gguf

TOKENS = np.random.default_rng(7).integers(0, 300, 48)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    return path


def test_the_row_order_of_an_architecture_changes_nothing(tmp_path: Path) -> None:
    results = []
    for arch in ("llama", "qwen2"):
        write_tiny_gguf(tmp_path / "m.gguf", arch=arch, qkv_bias=True, rotary_dim=8)
        results.append(Reference(tmp_path / "m.gguf").logits(TOKENS))
    np.testing.assert_array_equal(*results)


def test_a_later_token_changes_no_earlier_logits(model: Path) -> None:
    reference = Reference(model)
    changed = [*TOKENS[:20], 3, 4]
    np.testing.assert_allclose(reference.logits(TOKENS)[:20], reference.logits(changed)[:20], atol=1e-4)


def test_an_earlier_token_changes_all_later_logits(model: Path) -> None:
    reference = Reference(model)
    changed = TOKENS.copy()
    changed[0] += 1
    difference = np.abs(reference.logits(TOKENS) - reference.logits(changed)).max(axis=1)
    assert (difference > 1e-3).all()


def test_greedy_with_its_cache_equals_a_full_run_each_step(model: Path) -> None:
    reference = Reference(model)
    tokens = list(TOKENS)
    for _ in range(16):
        tokens.append(int(reference.logits(tokens)[-1].argmax()))
    assert reference.greedy(TOKENS, 16) == tokens[len(TOKENS) :]


def test_keys_turn_with_their_position_and_values_do_not(model: Path) -> None:
    k, v = Reference(model).kv([5] * 40)[0]  # layer 0 sees the token alone
    assert k.shape == v.shape == (2, 40, 16)
    np.testing.assert_allclose(v, np.broadcast_to(v[:, :1], v.shape), atol=1e-6)
    first, second = k[..., :8], k[..., 8:]
    pairs = first + 1j * second
    frequencies = 10000.0 ** -(np.arange(8) / 8)
    turns = np.exp(1j * np.multiply.outer(np.arange(40), frequencies))
    np.testing.assert_allclose(pairs, pairs[:, :1] * turns, atol=1e-5)


@pytest.mark.parametrize(
    ("scaling", "fastest", "slowest", "size"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 1 / 4, 1 / 4, 1.0),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}, 1, 1 / 4, 1.1386294),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            1,
            1 / 8,
            1.0,
        ),
        (
            {
                "rope_type": "longrope",
                "original_max_position_embeddings": 512,
                "short_factor": [1.0, 1, 1, 1, 1, 1, 1, 5],
                "long_factor": [2.0, 2, 2, 2, 2, 2, 2, 9],
            },
            1,
            1 / 5,
            (1 + np.log(2048 / 512) / np.log(512)) ** 0.5,
        ),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else "",
)
def test_rope_scaling_slows_the_pairs_it_should(
    tmp_path: Path, model: Path, scaling: dict[str, Any], fastest: float, slowest: float, size: float
) -> None:
    """Of eight pairs the fastest turns by 1 and the slowest by 10000^(-7/8) a position when nothing is scaled."""
    write_tiny_gguf(tmp_path / "scaled.gguf", rope_scaling=scaling)
    plain, scaled = (Reference(path).kv([5] * 30)[0][0] for path in (model, tmp_path / "scaled.gguf"))
    pairs = scaled[0, :, :8] + 1j * scaled[0, :, 8:]
    angle = np.angle(pairs[1:] / pairs[:-1]).mean(axis=0)
    np.testing.assert_allclose(angle[0], fastest, rtol=1e-3)
    np.testing.assert_allclose(angle[7], slowest * 10000 ** (-7 / 8), rtol=1e-2)
    np.testing.assert_allclose(np.linalg.norm(scaled[0, 0]), size * np.linalg.norm(plain[0, 0]), rtol=1e-5)


def test_qwen3_norms_make_each_head_the_same_size(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", arch="qwen3", qk_norm=True)
    keys = [k for k, _ in Reference(tmp_path / "m.gguf").kv(TOKENS)]
    write_tiny_gguf(tmp_path / "plain.gguf", arch="qwen3")
    plain = [k for k, _ in Reference(tmp_path / "plain.gguf").kv(TOKENS)]
    spread = [
        np.linalg.norm(k, axis=-1).std() / np.linalg.norm(k, axis=-1).mean() for k in (keys[0], plain[0])
    ]
    assert spread[0] < 0.12 < spread[1]


@pytest.mark.parametrize(("kind", "near"), [("F16", 0.05), ("BF16", 0.5), ("Q8_0", 1.0)])
def test_quantised_weights_stay_near_the_plain_ones(
    tmp_path: Path, model: Path, kind: str, near: float
) -> None:
    write_tiny_gguf(tmp_path / "q.gguf", quantise=kind)
    difference = Reference(tmp_path / "q.gguf").logits(TOKENS) - Reference(model).logits(TOKENS)
    assert 0 < np.abs(difference).max() < near


def test_smollm2_gives_the_probabilities_that_llama_cpp_gives(smollm2_reference: Reference) -> None:
    """Recorded from llama.cpp on the same weights dequantised to F32, KV in F32: "The capital of France is"."""
    recorded = {7042: -0.2579, 260: -2.7406, 4528: -4.3842, 2250: -4.6197, 1315: -4.6777}
    logits = smollm2_reference.logits([504, 3575, 282, 4649, 314])[-1].astype(np.float64)
    log_probabilities = logits - np.log(np.exp(logits).sum())
    assert np.argsort(-logits)[:5].tolist() == list(recorded)
    np.testing.assert_allclose(log_probabilities[list(recorded)], list(recorded.values()), atol=5e-4)


def test_smollm2_knows_the_capital_of_france(smollm2: Path, smollm2_reference: Reference) -> None:
    tokenizer = Tokenizer.from_gguf(smollm2)
    answer = smollm2_reference.greedy(tokenizer.encode("The capital of France is"), 3)
    assert tokenizer.decode(answer).startswith(" Paris.")
