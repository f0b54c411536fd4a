"""Prefix reuse changes nothing: KV bit for bit, logits identical to a cold run of the same split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.graphs import KvDtype
from kvstore.session import Session, identity_of
from tests.tiny_models import write_tiny_gguf

_PROFILE = kvstore.Profile(
    block_tokens=32,
    hot_bytes=1 << 22,
    warm_bytes=1 << 23,
    cold_bytes=1 << 25,
    arena_bytes=1 << 23,
    frame_bytes=4096,
)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, layers=4)
    return path


def _engine(gguf: Path, cache: Path, groups: int = 1, kv_dtype: KvDtype = "float32") -> StaticGraphEngine:
    return StaticGraphEngine(
        gguf, cache=cache, sizes=(16,), contexts=(256,), groups=groups, kv_dtype=kv_dtype
    )


def _to_tier(store: kvstore.KVStore, prompt: NDArray[np.int32], tier: str) -> None:
    store.flush()
    match = store.lookup(prompt)
    store.demote(match)
    if tier == "hot":
        store.promote(match, to="hot")
    elif tier == "warm":
        store.promote(match, to="warm")
    loaded = [span for span in store.explain(prompt[: match.length]).spans if span.kind == "prefix"]
    assert {span.source for span in loaded} == {tier}


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
@pytest.mark.parametrize("tier", ["hot", "warm", "cold", "restart"])
def test_prefix_hit_equals_cold_run_of_the_same_split(
    tmp_path: Path, gguf: Path, tier: str, groups: int, kv_dtype: KvDtype
) -> None:
    engine = _engine(gguf, tmp_path / "cache", groups, kv_dtype)
    identity = identity_of(engine, "00" * 32)
    prompt = np.random.default_rng(1).integers(0, engine.config.vocab, 120).astype(np.int32)
    split = 91  # inside a block: the last one is used in part

    cold_run = engine.allocate(len(prompt))
    engine.prefill(prompt[:split], cold_run)
    stored = [array[:, :split].copy() for array in (*cold_run.keys, *cold_run.values)]
    expected = engine.prefill(prompt, cold_run, start=split)

    with kvstore.open(tmp_path / "kv", identity=identity, profile=_PROFILE) as store:
        whole = engine.allocate(len(prompt))
        engine.prefill(prompt[:split], whole)
        other = np.random.default_rng(2).integers(0, engine.config.vocab, 120 - split).astype(np.int32)
        longer = np.concatenate([prompt[:split], other])  # so that the last block is used only in part
        engine.prefill(longer, whole, start=split)
        assert store.put(longer, whole).stored == 120
        if tier != "restart":
            _to_tier(store, longer, tier)
            got, loaded = _resume(engine, store, prompt, split)
    if tier == "restart":
        with kvstore.open(tmp_path / "kv", identity=identity, profile=_PROFILE) as store:
            got, loaded = _resume(engine, store, prompt, split)

    for before, after in zip(stored, loaded, strict=True):
        np.testing.assert_array_equal(before, after)
    np.testing.assert_array_equal(expected, got)


def _resume(
    engine: StaticGraphEngine, store: kvstore.KVStore, prompt: NDArray[np.int32], split: int
) -> tuple[NDArray[np.float32], list[NDArray[np.generic]]]:
    """Logits of a prefill that begins with what is held, and the KV that was loaded for it."""
    kv = engine.allocate(len(prompt))
    match = store.lookup(prompt)
    assert match.length == split
    with store.lease(match) as lease:
        assert lease.load_into(kv) == split
    loaded = [array[:, :split].copy() for array in (*kv.keys, *kv.values)]
    return engine.prefill(prompt, kv, start=split), loaded


def test_a_chat_through_the_store_gives_the_answers_of_one_without(tmp_path: Path, gguf: Path) -> None:
    engine = _engine(gguf, tmp_path / "cache", groups=2)
    random = np.random.default_rng(3)
    prompt = random.integers(0, engine.config.vocab, 60).astype(np.int32)
    with kvstore.open(tmp_path / "kv", identity=identity_of(engine, "00" * 32), profile=_PROFILE) as store:
        for turn in range(4):
            plain = Session(engine, None).generate(prompt, 8)
            stored = Session(engine, store).generate(prompt, 8)
            assert plain.tokens == stored.tokens
            assert stored.hot + stored.warm + stored.cold + stored.computed == len(prompt)
            assert (stored.computed < 30) == (turn > 0)
            question = random.integers(0, engine.config.vocab, 12)
            prompt = np.concatenate([prompt, stored.tokens, question]).astype(np.int32)


def test_the_same_prompt_again_computes_one_token(tmp_path: Path, gguf: Path) -> None:
    engine = _engine(gguf, tmp_path / "cache")
    prompt = np.arange(1, 97, dtype=np.int32)
    with kvstore.open(None, identity=identity_of(engine, "00" * 32), profile=_PROFILE) as store:
        first = Session(engine, store).generate(prompt, 4)
        again = Session(engine, store).generate(prompt, 4)
    assert (first.computed, again.computed) == (96, 1)
    assert first.tokens == again.tokens


@pytest.mark.parametrize("groups", [1, 4])
def test_damage_found_while_the_engine_builds_on_it_is_recomputed(
    tmp_path: Path, gguf: Path, groups: int
) -> None:
    """A flipped bit in the frame of a late layer group: the engine starts over from what is good."""
    engine = _engine(gguf, tmp_path / "cache", groups)
    identity = identity_of(engine, "00" * 32)
    prompt = np.random.default_rng(5).integers(0, engine.config.vocab, 150).astype(np.int32)
    plain = Session(engine, None).generate(prompt, 4)
    with kvstore.open(tmp_path / "kv", identity=identity, profile=_PROFILE) as store:
        Session(engine, store).generate(prompt, 4)
        second_block = store.lookup(prompt).blocks[1]
    record = tmp_path / "kv" / "blocks" / second_block.key[:16].hex()
    content = bytearray(record.read_bytes())
    content[-3] ^= 0x10
    record.write_bytes(content)
    with kvstore.open(tmp_path / "kv", identity=identity, profile=_PROFILE) as store:
        again = Session(engine, store).generate(prompt, 4)
        assert again.tokens == plain.tokens
        assert store.stats().misses["bad record: frame checksum"] == 1
