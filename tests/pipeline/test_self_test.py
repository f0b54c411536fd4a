"""Layouts whose geometry is not the engine's are told, whatever layer it is in; those that are right pass."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.onnx_runtime import OnnxRuntime
from kvstore.pipeline.rope import Linear, Llama3, Rope, Scaling
from kvstore.pipeline.self_test import KeysAt, why_engine_does_not_shift, why_not_shift
from tests.tiny_models import write_tiny_gguf

CONTEXT = 4096
LOCAL, GLOBAL = Rope(32, 10_000.0, 32), Rope(32, 1_000_000.0, 32)
ROPES = [LOCAL, GLOBAL, None, Rope(32, 10_000.0, 16, "interleaved")]


def keys_of(ropes: Sequence[Rope | None], dtype: str = "float32") -> KeysAt:
    """A model of layers of these geometries, in numpy: complex numbers, no code of the kernels."""

    def keys_at(token: int, position: int) -> list[NDArray[Any]]:
        found = []
        for layer, rope in enumerate(ropes):
            keys = np.random.default_rng([token, layer]).standard_normal((2, 32))
            if rope is not None:
                half = rope.rotary_dim // 2
                apart = rope.pairing == "half"
                a, b = (
                    (slice(half), slice(half, 2 * half))
                    if apart
                    else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
                )
                turned = (keys[:, a] + 1j * keys[:, b]) * np.exp(1j * position * rope.inverse_frequencies())
                keys[:, a], keys[:, b] = turned.real, turned.imag
            found.append(keys.astype(dtype))
        return found

    return keys_at


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_what_turns_as_the_layout_says_passes(dtype: str) -> None:
    assert why_not_shift(keys_of(ROPES, dtype), ROPES, context=CONTEXT, kv_dtype=dtype) is None


@pytest.mark.parametrize(
    ("layer", "instead"),
    [
        (0, GLOBAL),
        (1, LOCAL),  # of two geometries the second, wrong, was tested against itself alone
        (1, Rope(32, 1_010_000.0, 32)),
        (1, Rope(32, 1_000_000.0, 32, "interleaved")),
        (1, Rope(32, 1_000_000.0, 30)),
        (1, Rope(32, 1_000_000.0, 32, scaling=Linear(1.01))),
        (1, Rope(32, 1_000_000.0, 32, scaling=Llama3(8.0, 1.0, 4.0, 8192))),
        (1, None),
        (2, LOCAL),
        (3, Rope(32, 10_000.0, 16, "half")),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_wrong_geometry_of_any_layer_is_told(layer: int, instead: Rope | None, dtype: str) -> None:
    wrong = [*ROPES[:layer], instead, *ROPES[layer + 1 :]]
    reason = why_not_shift(keys_of(ROPES, dtype), wrong, context=CONTEXT, kv_dtype=dtype)
    assert reason is not None
    assert reason.startswith(f"keys of layer {layer} moved by ")


def test_layers_without_keys_are_passed_over_and_missing_ones_are_an_error() -> None:
    def some(token: int, position: int) -> list[NDArray[Any] | None]:
        return [keys_of(ROPES)(token, position)[0], None]

    assert why_not_shift(some, [LOCAL, None], context=CONTEXT) is None
    with pytest.raises(ValueError, match="argument"):
        why_not_shift(some, [LOCAL], context=CONTEXT)


def test_keys_that_are_no_numbers_are_no_pass() -> None:
    reason = why_not_shift(lambda *_: [np.full((2, 32), np.nan)], [LOCAL], context=CONTEXT)
    assert "differ from those computed there by nan" in (reason or "")


class _Counting(OnnxRuntime):
    def __init__(self) -> None:
        super().__init__()
        self.allocations = list[weakref.ref[Any]]()

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        memory = super().allocate(nbytes)
        self.allocations.append(weakref.ref(memory))
        return memory


SCALINGS: dict[str, tuple[dict[str, Any] | None, Scaling | None]] = {
    "none": (None, Linear(2.0)),
    "linear": ({"rope_type": "linear", "factor": 2.0}, None),
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, None),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 128},
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", SCALINGS)
def test_the_engine_turns_as_it_says_in_every_layer(tmp_path: Path, name: str, kv_dtype: Any) -> None:
    scaling, wrong = SCALINGS[name]
    write_tiny_gguf(tmp_path / "tiny.gguf", layers=3, rope_scaling=scaling)
    engine = StaticGraphEngine(
        tmp_path / "tiny.gguf", cache=tmp_path / "cache", sizes=(1, 16), contexts=(64,), kv_dtype=kv_dtype
    )
    right = engine.config.rope
    other = Rope(right.head_dim, right.theta, right.rotary_dim, right.pairing, wrong)
    assert why_engine_does_not_shift(engine, [right] * 3) is None
    for layer in range(3):
        ropes = [other if each == layer else right for each in range(3)]
        assert f"layer {layer} moved" in (why_engine_does_not_shift(engine, ropes) or "")


def test_a_short_context_suffices_the_engine_is_asked_once_and_gets_its_memory_back(tmp_path: Path) -> None:
    """It needed 133 slots, and a session of an engine with fewer could not be opened; each session asked anew."""
    write_tiny_gguf(tmp_path / "tiny.gguf", context=40)
    npu = _Counting()
    engine = StaticGraphEngine(
        tmp_path / "tiny.gguf", runtime=npu, cache=tmp_path / "cache", sizes=(16,), contexts=(32,)
    )
    before = len(npu.allocations)
    for ropes in ([engine.config.rope] * 2, [None] * 2):
        answers = {why_engine_does_not_shift(engine, ropes)}
        asked = engine.statistics.tokens
        answers.add(why_engine_does_not_shift(engine, ropes))
        assert engine.statistics.tokens == asked > 0
        assert len(answers) == 1
    assert len(npu.allocations) == before + 1
    assert not list((tmp_path / "cache").rglob("costs-*.json")), "no call is measured for it"
    of_engine = weakref.ref(engine)
    del engine
    gc.collect()
    assert of_engine() is None
