"""Repair by deviation: what differs most from a fresh second layer is what is computed again."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import kvstore
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.recompute import Both, Deviating, FirstTokens, Nothing
from kvstore.prefill import prefill
from kvstore.session import Session, identity_of
from tests.tiny_models import write_tiny_gguf


def test_what_deviates_most_is_computed_again(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", layers=4)
    engine = StaticGraphEngine(
        tmp_path / "tiny.gguf", cache=tmp_path / "cache", sizes=(1, 16), contexts=(256,), groups=2
    )
    draw = np.random.default_rng(0).integers(0, engine.config.vocab, 200).astype(np.int32)
    passage = draw[:80]
    prompt = np.concatenate([draw[80:110], passage, draw[110:120]])
    with kvstore.open(None, identity=identity_of(engine, "00" * 32)) as store:
        Session(engine, store, "exact").generate(np.concatenate([draw[120:170], passage]), 1)
        plain, repaired, both = (engine.allocate(len(prompt)) for _ in range(3))
        prefill(engine, store, prompt, plain, Nothing())
        done = prefill(engine, store, prompt, repaired, Deviating(0.2))
        assert (done.moved + done.recomputed, done.computed) == (80, 40)
        assert done.recomputed >= 16
        more = prefill(engine, store, prompt, both, Both(FirstTokens(4), Deviating(0.1)))
        assert more.recomputed >= 12
    full = engine.allocate(len(prompt))
    engine.prefill(prompt, full)
    places = np.arange(30, 110)
    apart = sum(
        np.square(mine[1][:, places] - theirs[1][:, places]).sum(axis=(0, 2))
        for mine, theirs in ((plain.keys, full.keys), (plain.values, full.values))
    )
    again = np.flatnonzero((repaired.keys[3] != plain.keys[3]).any(axis=(0, 2))[places])
    assert set(again) == set(np.argsort(-apart)[: done.recomputed])
