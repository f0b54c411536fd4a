"""What flash holds and is computed nevertheless, in any part, gives the answer of a prefill without a store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.recompute import Attended, Everything, FirstTokens
from kvstore.prefetch.load_or_recompute import Decision
from kvstore.prefill import prefill
from kvstore.quality.reuse import Verdict
from kvstore.session import Session, identity_of
from kvstore.store import KVStore
from tests.tiny_models import write_tiny_gguf

Tokens = NDArray[np.int32]

_PROFILE = kvstore.Profile(
    block_tokens=32,
    hot_bytes=1 << 22,
    warm_bytes=1 << 24,
    cold_bytes=1 << 25,
    arena_bytes=1 << 24,
    frame_bytes=4096,
)


def some(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 300, length).astype(np.int32)


SYSTEM, ONE, TWO = some(1, 128), some(2, 70), some(3, 64)
FIRST = np.concatenate([SYSTEM, some(4, 32), ONE, TWO])
SECOND = np.concatenate([SYSTEM, some(5, 20), TWO, some(6, 11), ONE, some(7, 9)])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> StaticGraphEngine:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_gguf(folder / "tiny.gguf", layers=6)
    return StaticGraphEngine(
        folder / "tiny.gguf", cache=folder / "cache", sizes=(1, 16, 64), contexts=(512,), groups=3
    )


@pytest.fixture
def store(tmp_path: Path, engine: StaticGraphEngine) -> Iterator[KVStore]:
    """Holds FIRST: its first 64 tokens in memory, the rest on flash only."""
    with kvstore.open(tmp_path / "kv", identity=identity_of(engine, "00" * 32), profile=_PROFILE) as opened:
        kv = engine.allocate(len(FIRST))
        engine.prefill(FIRST, kv)
        opened.put(FIRST, kv, wait=10)
        opened.flush()
        opened.demote(opened.lookup(FIRST))
        opened.promote(opened.lookup(FIRST[:64]), to="warm")
        assert [block.tier for block in opened.lookup(FIRST).blocks] == ["warm"] * 2 + ["cold"] * 8
        yield opened


@pytest.mark.parametrize("moved", [False, True], ids=["prefix", "moved"])
@pytest.mark.parametrize(
    ("hole", "front", "ahead"),
    [
        ((0, 0), 0, 64),
        ((64, 96), 96, 0),
        ((64, 96), 96, 96),
        ((64, 128), 128, 0),
        ((64, 128), 128, 148),
        ((64, 128), 180, 148),
        ((64, 128), 1000, 148),
        ((64, 128), 1000, 0),
    ],
)
def test_any_part_may_be_computed_instead(
    engine: StaticGraphEngine,
    store: KVStore,
    monkeypatch: pytest.MonkeyPatch,
    moved: bool,
    hole: tuple[int, int],
    front: int,
    ahead: int,
) -> None:
    """The decision is given; whatever it is, the answer is right and each token is accounted for."""
    monkeypatch.setattr("kvstore.flash_choice.decide", lambda *_: Decision(hole, front, ahead, 1.0, 2.0))
    flash = store._tiers.flash
    flash.begin()
    flash.end(1)  # its speed is known, so that it is asked for a decision
    before = engine.statistics.tokens
    kv = engine.allocate(len(SECOND))
    done = prefill(engine, store, SECOND, kv, Everything() if moved else None)
    computed = engine.statistics.tokens - before
    plain = engine.allocate(len(SECOND))
    np.testing.assert_allclose(done.logits, engine.prefill(SECOND, plain), atol=1e-4)
    for ours, theirs in zip((*kv.keys, *kv.values), (*plain.keys, *plain.values), strict=True):
        np.testing.assert_allclose(ours[:, : len(SECOND)], theirs[:, : len(SECOND)], atol=1e-4)
    assert done.prefix == 128 - (hole[1] - hole[0])
    assert sum(done.tiers.values()) == done.prefix
    assert done.prefix + done.moved + done.recomputed + done.computed == len(SECOND)
    assert computed == done.recomputed + done.computed
    if moved:
        assert (done.recomputed == 134) == (front <= 148)
        assert (done.recomputed > 0) == (front < 1000)


@pytest.mark.parametrize("repair", [FirstTokens(4), Attended(0.2)], ids=str)
def test_what_was_computed_instead_is_stored_again_by_nobody(
    engine: StaticGraphEngine, store: KVStore, monkeypatch: pytest.MonkeyPatch, repair: FirstTokens | Attended
) -> None:
    monkeypatch.setattr("kvstore.flash_choice.decide", lambda *_: Decision((64, 128), 180, 148, 1.0, 2.0))
    store.keep_verdict(Verdict(fast=repair, careful=repair))
    flash = store._tiers.flash
    flash.begin()
    flash.end(1)
    Session(engine, store, "fast").generate(SECOND, 3)
    held = store.lookup(FIRST)
    assert held.length == len(FIRST)
    kv = engine.allocate(len(FIRST))
    with store.lease(held) as lease:
        assert lease.load_into(kv) == len(FIRST)
    plain = engine.allocate(len(FIRST))
    engine.prefill(FIRST, plain)
    for ours, theirs in zip((*kv.keys, *kv.values), (*plain.keys, *plain.values), strict=True):
        np.testing.assert_allclose(ours[:, : len(FIRST)], theirs[:, : len(FIRST)], atol=1e-4)
    store.check()


def test_memory_is_no_reason_to_ask(engine: StaticGraphEngine, store: KVStore) -> None:
    store.promote(store.lookup(SECOND, moved=True), to="warm")
    done = prefill(engine, store, SECOND, engine.allocate(len(SECOND)), FirstTokens(4))
    assert (done.prefix, done.moved + done.recomputed) == (128, 134)
