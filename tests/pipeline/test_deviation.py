"""Deviation of the second layer is what an independent model says it is."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.graphs import Form
from tests.reference import Reference
from tests.tiny_models import write_tiny_gguf


@pytest.mark.parametrize("form", ["in_place", "read_only_past"])
@pytest.mark.parametrize(("kv_dtype", "within"), [("float32", 1e-4), ("float16", 2e-2)])
def test_deviation_equals_the_reference(
    tmp_path: Path, form: Form, kv_dtype: Literal["float32", "float16"], within: float
) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, layers=3)
    engine = StaticGraphEngine(
        path, cache=tmp_path / "cache", sizes=(16, 32), contexts=(128,), form=form, kv_dtype=kv_dtype
    )
    draw = np.random.default_rng(0).integers(0, engine.config.vocab, 100).astype(np.int32)
    before, now, fresh, chunk = draw[:20], draw[20:40], draw[40:50], draw[50:90]
    captured = np.concatenate([before, fresh, chunk])
    prompt = np.concatenate([now, draw[90:100], chunk])  # other tokens before the chunk, as many
    kv = engine.allocate(80)
    engine.prefill(captured, kv)
    engine.prefill(now, kv)  # leaves the chunk's KV where it is
    kv.slot_positions[30:70] = np.arange(30, 70)
    untouched = [array.copy() for array in (*kv.keys[1:], *kv.values[1:])]

    places = np.arange(20, 70)  # with those that nobody held, since the chunk follows them
    found = engine.deviation(prompt[places], places, places, kv)

    reference = Reference(path)
    (old_keys, old_values), (new_keys, new_values) = reference.kv(captured)[1], reference.kv(prompt)[1]
    expected = sum(
        np.square(new - old).sum(axis=(0, 2)) for new, old in ((new_keys, old_keys), (new_values, old_values))
    )
    np.testing.assert_allclose(found[10:], expected[30:], rtol=within, atol=within)
    assert found[10:].min() >= 0
    assert found[10:].max() > 0.1
    for array, old in zip((*kv.keys[1:], *kv.values[1:]), untouched, strict=True):
        np.testing.assert_array_equal(array[:, :-1], old[:, :-1])


def test_nothing_deviates_where_it_was_captured(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, layers=2)
    engine = StaticGraphEngine(path, cache=tmp_path / "cache", sizes=(16,), contexts=(128,))
    prompt = np.random.default_rng(1).integers(0, engine.config.vocab, 50).astype(np.int32)
    kv = engine.allocate(50)
    engine.prefill(prompt, kv)
    asked: list[int] = []
    places = np.arange(5, 50)
    found = engine.deviation(prompt[places], places, places, kv, before_layers=asked.append)
    assert found.shape == (45,)
    assert found.max() < 1e-6
    assert asked == [2]


def test_one_layer_has_no_second(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", layers=1)
    engine = StaticGraphEngine(tmp_path / "tiny.gguf", cache=tmp_path / "cache", contexts=(64,), sizes=(16,))
    with pytest.raises(ValueError, match="one"):
        engine.deviation([1], [0], [0], engine.allocate(10))
