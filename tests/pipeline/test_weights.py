"""Reading GGUF weights and keeping them as float32."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kvstore.pipeline.gguf_metadata import GgufError
from kvstore.pipeline.rope import Explicit, Rope
from kvstore.pipeline.weights import UnsupportedModel, Weights, open_weights
from tests.tiny_models import write_tiny_gguf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def entries(cache: Path) -> list[Path]:
    """What lies in the cache, apart from lock files."""
    return [path for path in cache.iterdir() if path.suffix != ".lock"]


def test_the_configuration_is_what_the_file_says(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(
        path, arch="qwen2", layers=3, hidden=96, heads=6, kv_heads=3, head_dim=32, ffn=96, vocab=280,
        context=512, theta=5e5, tied=False, qkv_bias=True, quantise="Q4_1",
    )  # fmt: skip
    config = open_weights(path, cache).config
    assert (config.arch, config.layers, config.hidden, config.heads) == ("qwen2", 3, 96, 6)
    assert (config.kv_heads, config.head_dim, config.ffn, config.vocab) == (3, 32, 96, 280)
    assert (config.context_length, config.norm_eps) == (512, pytest.approx(1e-5))
    assert config.rope == Rope(head_dim=32, theta=5e5, rotary_dim=32, pairing="half")
    assert (config.tied, config.qkv_bias, config.qk_norm) == (False, True, False)
    assert config.quantization == "gguf:Q4_1,Q8_0→float32"


def test_matrices_are_dequantised_fused_and_transposed(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path, arch="qwen2", qkv_bias=True, quantise="Q8_0", tied=False)
    weights = open_weights(path, cache)
    stored = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}
    q, k, v = (stored[f"blk.1.attn_{name}.weight"] for name in "qkv")
    np.testing.assert_array_equal(weights["layers.1.qkv"], np.concatenate([q / 4, k, v]).T)  # 1/√16
    q, k, v = (stored[f"blk.1.attn_{name}.bias"] for name in "qkv")
    np.testing.assert_array_equal(weights["layers.1.qkv_bias"], np.concatenate([q / 4, k, v]))
    gate, up = stored["blk.1.ffn_gate.weight"], stored["blk.1.ffn_up.weight"]
    np.testing.assert_array_equal(weights["layers.1.gate_up"], np.concatenate([gate, up]).T)
    np.testing.assert_array_equal(weights["embedding"], stored["token_embd.weight"])
    np.testing.assert_array_equal(weights["head"], stored["output.weight"])


def test_the_pair_order_of_llama_files_is_undone(tmp_path: Path, cache: Path) -> None:
    """The writer draws the same matrices for both archs and stores them in each one's order."""
    llama, qwen = tmp_path / "llama.gguf", tmp_path / "qwen.gguf"
    write_tiny_gguf(llama, arch="llama", seed=3)
    write_tiny_gguf(qwen, arch="qwen2", seed=3)
    a, b = open_weights(llama, cache), open_weights(qwen, cache)
    assert set(a.tensors) == set(b.tensors)
    for name in a.tensors:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def test_llama3_scaling_becomes_one_divisor_for_each_frequency(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "model.gguf"
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    write_tiny_gguf(path, rope_scaling={**scaling, "original_max_position_embeddings": 256})
    rope = open_weights(path, cache).config.rope
    assert isinstance(rope.scaling, Explicit)
    assert len(rope.scaling.factors) == rope.rotary_dim // 2
    assert rope.scaling.factors[0] == 1
    assert rope.scaling.factors[-1] == 8
    assert rope.attention_factor == 1


def test_a_second_open_reads_the_cache_alone(model: Path, cache: Path) -> None:
    first = open_weights(model, cache)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    second = open_weights(model, cache)
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    assert second.digest == first.digest
    assert second.config == first.config
    np.testing.assert_array_equal(second["layers.0.down"], first["layers.0.down"])


def test_the_content_decides_which_cache_entry_is_used(model: Path, tmp_path: Path, cache: Path) -> None:
    copy, other = tmp_path / "elsewhere.gguf", tmp_path / "other.gguf"
    copy.write_bytes(model.read_bytes())
    write_tiny_gguf(other, seed=1)
    digest = open_weights(model, cache).digest
    assert open_weights(copy, cache).digest == digest
    assert open_weights(other, cache).digest != digest
    assert len(entries(cache)) == 2


def test_mapped_weights_cannot_be_written(model: Path, cache: Path) -> None:
    array = open_weights(model, cache)["embedding"]
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "gemma"}, "arch gemma"),
        ({"llama.rope.dimension_count": 8}, "partial rotary"),
        ({"llama.attention.sliding_window": 64}, "sliding window of 64"),
        ({"llama.expert_count": 4}, "expert_count is 4"),
        ({"llama.attention.value_length": 8}, "values have head_dim 8"),
        ({"llama.rope.scaling.type": "longrope", "llama.rope.scaling.factor": 2.0}, "longrope"),
        ({"llama.rope.scaling.yarn_beta_fast": 16.0}, "yarn_beta_fast"),
        ({"llama.block_count": 1}, "blk.1.attn_k.weight"),
        ({"llama.block_count": 3}, "blk.2.attn_norm.weight is missing"),
        ({"llama.feed_forward_length": 64}, "ffn_gate.weight has shape"),
    ],
)
def test_what_the_graphs_do_not_compute_is_refused_by_name(
    tmp_path: Path, cache: Path, change: dict[str, Any], named: str
) -> None:
    plain, path = tmp_path / "plain.gguf", tmp_path / "changed.gguf"
    write_tiny_gguf(plain)
    rewrite(plain, path, change)
    with pytest.raises(UnsupportedModel, match=named):
        open_weights(path, cache)
    assert entries(cache) == []


def rewrite(source: Path, target: Path, change: dict[str, Any]) -> None:
    """Copy a GGUF with some metadata set."""
    reader = gguf.GGUFReader(source)
    arch = change.get("general.architecture", "llama")
    writer = gguf.GGUFWriter(target, arch)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    for name, value in (fields | change).items():
        if name.startswith("llama."):
            name = name.replace("llama", arch, 1)
            if isinstance(value, str):
                writer.add_string(name, value)
            elif isinstance(value, float):
                writer.add_float32(name, value)
            else:
                writer.add_uint32(name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_file_that_is_no_whole_gguf_leaves_nothing_behind(model: Path, tmp_path: Path, cache: Path) -> None:
    whole, path = model.read_bytes(), tmp_path / "damaged.gguf"
    for content in (b"", b"GGUF" + bytes(100), whole[:1000], whole[: len(whole) // 2], whole[:-40]):
        path.write_bytes(content)
        with pytest.raises((UnsupportedModel, GgufError), match="damaged"):
            open_weights(path, cache)
        assert entries(cache) == []
    with pytest.raises(FileNotFoundError):
        open_weights(tmp_path / "absent.gguf", cache)


def test_a_failed_preparation_leaves_nothing_behind(model: Path, cache: Path) -> None:
    def fail(weights: Weights) -> None:
        (weights.folder / "half").write_bytes(b"done")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        open_weights(model, cache, prepare=fail)
    assert entries(cache) == []
    assert open_weights(model, cache)["embedding"].shape == (300, 64)


def test_preparation_sees_the_weights_once_and_may_add_to_them(model: Path, cache: Path) -> None:
    seen: list[np.ndarray[Any, Any]] = []

    def append(weights: Weights) -> None:
        seen.append(weights["final_norm"].copy())
        with weights.path.open("ab") as file:
            file.write(b"more")

    for _ in range(2):
        weights = open_weights(model, cache, variant="device", prepare=append)
        np.testing.assert_array_equal(weights["final_norm"], seen[0])
        assert weights.path.read_bytes().endswith(b"more")
    assert len(seen) == 1
    assert not open_weights(model, cache).path.read_bytes().endswith(b"more")


def test_a_process_killed_while_converting_leaves_a_usable_cache(model: Path, cache: Path) -> None:
    script = (
        "import os, sys; from pathlib import Path; from kvstore.pipeline.weights import open_weights\n"
        "open_weights(Path(sys.argv[1]), Path(sys.argv[2]), prepare=lambda w: os.kill(os.getpid(), 9))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(model), str(cache)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(entries(cache)) == 1, "what was begun is still there"
    weights = open_weights(model, cache)
    assert np.isfinite(weights["layers.1.down"]).all()
    assert entries(cache) == [weights.folder]


def test_threads_that_convert_at_once_convert_once(model: Path, cache: Path) -> None:
    barrier, opened, prepared = threading.Barrier(4), list[Weights](), list[Weights]()

    def work() -> None:
        barrier.wait(60)
        opened.append(open_weights(model, cache, prepare=prepared.append))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(opened), len(prepared), len(entries(cache))) == (4, 1, 1)
    for weights in opened:
        np.testing.assert_array_equal(weights["embedding"], opened[0]["embedding"])
