"""The probe says which slots a question attends to, as a reference computed by hand does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.graphs import EMPTY, Form
from tests.tiny_models import write_tiny_gguf


@pytest.mark.parametrize("form", ["in_place", "read_only_past"])
def test_probe_sums_attention_of_the_middle_layers(tmp_path: Path, form: Form) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, layers=6)
    engine = StaticGraphEngine(path, cache=tmp_path / "cache", sizes=(1, 16, 32), contexts=(128,), form=form)
    prompt = np.random.default_rng(0).integers(0, engine.config.vocab, 60).astype(np.int32)
    kv = engine.allocate(60)
    engine.prefill(prompt[:50], kv)
    places = np.arange(50, 60)
    found = engine.probe(prompt[50:], places, places, kv)
    assert found.shape == (kv.slots,)
    assert (found[:50] > 0).all()
    assert not found[60:].any()
    layers = len(range(2, 3))
    rows = 10 * engine.config.heads * layers  # each row of probabilities sums to one
    if form == "in_place":
        assert found.sum() == pytest.approx(rows, rel=1e-4)
    else:  # what the question reads of itself is not in a slot yet
        assert 0 < found.sum() < rows


def test_probe_then_prefill_gives_the_logits_of_prefill_alone(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path, layers=6)
    engine = StaticGraphEngine(path, cache=tmp_path / "cache", sizes=(16,), contexts=(128,))
    prompt = np.random.default_rng(0).integers(0, engine.config.vocab, 60).astype(np.int32)
    plain, probed = engine.allocate(60), engine.allocate(60)
    engine.prefill(prompt[:50], plain)
    expected = engine.prefill(prompt, plain, start=50)
    engine.prefill(prompt[:50], probed)
    places = np.arange(50, 60)
    engine.probe(prompt[50:], places, places, probed)
    np.testing.assert_array_equal(engine.prefill(prompt, probed, start=50), expected)
    assert (probed.slot_positions[60:] == EMPTY).all()
