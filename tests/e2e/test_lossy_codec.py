"""KV kept with loss serves the policies that may approximate, and nobody else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.codec import Codec
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.quality.reuse import Policy, Verdict
from kvstore.session import Session, identity_of
from kvstore.store import KVStore
from tests.tiny_models import write_tiny_gguf

BEARS_ALL = Verdict(fast=None, careful=None, codecs=("int8", "fine", "small"))


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> StaticGraphEngine:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_gguf(folder / "tiny.gguf", layers=4)
    return StaticGraphEngine(folder / "tiny.gguf", cache=folder, sizes=(16,), contexts=(256,), groups=2)


def opened(path: Path, engine: StaticGraphEngine, codec: Codec) -> KVStore:
    profile = kvstore.Profile(
        block_tokens=32,
        hot_bytes=0,
        warm_bytes=1 << 23,
        cold_bytes=1 << 25,
        arena_bytes=1 << 23,
        frame_bytes=4096,
        codec=codec,
    )
    return kvstore.open(path, identity=identity_of(engine, "00" * 32), profile=profile)


def prompt_of(engine: StaticGraphEngine, seed: int, tokens: int = 120) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, engine.config.vocab, tokens).astype(np.int32)


def keys_after(
    engine: StaticGraphEngine, store: KVStore, prompt: NDArray[np.int32]
) -> tuple[int, NDArray[np.float32]]:
    kv = engine.allocate(len(prompt))
    with store.lease(store.lookup(prompt)) as lease:
        held = lease.load_into(kv)
    keys = np.stack([array[:, :held] for array in kv.keys])
    engine.recycle(kv)
    return held, keys


@pytest.mark.parametrize("codec", ["int8", "fine", "small"])
def test_only_policies_that_may_approximate_see_kv_with_loss(
    tmp_path: Path, engine: StaticGraphEngine, codec: Codec
) -> None:
    prompt = prompt_of(engine, 1)
    plain = engine.allocate(len(prompt))
    engine.prefill(prompt, plain)
    with opened(tmp_path / "kv", engine, codec) as store:
        store.keep_verdict(BEARS_ALL)
        assert Session(engine, store, "careful").generate(prompt, 1).computed == 120
    with opened(tmp_path / "kv", engine, codec) as store:  # from flash
        assert store.verdict == BEARS_ALL
        assert store.lookup(prompt).length == 0
        assert store.under("exact") is store
        lossy = store.under("fast")
        assert lossy.under("exact").identity == store.identity
        held, keys = keys_after(engine, lossy, prompt)
        assert held == 120
        exact_keys = np.stack([array[:, :held] for array in plain.keys])
        error = np.abs(keys - exact_keys).max() / np.abs(exact_keys).max()
        assert 0 < error < {"int8": 0.02, "fine": 0.2, "small": 0.6}[codec]
        assert np.array_equal(keys[:, :, :4], exact_keys[:, :, :4])
        assert Session(engine, store, "exact").generate(prompt, 1, keep=False).computed == 120
        assert Session(engine, store, "careful").generate(prompt, 1, keep=False).computed == 1


@pytest.mark.parametrize("policy", ["exact", "careful", "fast"])
def test_without_a_verdict_all_is_exact(tmp_path: Path, engine: StaticGraphEngine, policy: Policy) -> None:
    prompt = prompt_of(engine, 2)
    with opened(tmp_path / "kv", engine, "small") as store:
        Session(engine, store, policy).generate(prompt, 1)
    kv = engine.allocate(len(prompt))
    engine.prefill(prompt, kv)
    with opened(tmp_path / "kv", engine, "small") as store:
        assert store.under(policy) is store
        held, keys = keys_after(engine, store, prompt)
    assert held == 120
    assert np.array_equal(keys, np.stack([array[:, :held] for array in kv.keys]))


def test_what_is_computed_behind_lossy_kv_never_reaches_an_exact_look_up(
    tmp_path: Path, engine: StaticGraphEngine
) -> None:
    first = prompt_of(engine, 3, 64)
    second = np.concatenate([first, prompt_of(engine, 4, 64)])
    with opened(tmp_path / "kv", engine, "small") as store:
        store.keep_verdict(BEARS_ALL)
        Session(engine, store, "fast").generate(first, 1)
    with opened(tmp_path / "kv", engine, "small") as store:
        assert Session(engine, store, "fast").generate(second, 1).computed == 64
        assert store.under("fast").lookup(second).length == 128
        assert store.lookup(second).length == 0
        Session(engine, store, "exact").generate(second, 1)
        held, keys = keys_after(engine, store, second)
    kv = engine.allocate(len(second))
    engine.prefill(second, kv)
    assert held == 128
    assert np.array_equal(keys, np.stack([array[:, :held] for array in kv.keys]))


def test_a_prefix_is_forgotten_in_all_its_forms(tmp_path: Path, engine: StaticGraphEngine) -> None:
    prompt = prompt_of(engine, 5)
    with opened(tmp_path / "kv", engine, "fine") as store:
        store.keep_verdict(BEARS_ALL)
        for policy in ("exact", "fast"):
            Session(engine, store, policy).generate(prompt, 1)
        assert store.invalidate(prefix=prompt[:8]) > 0
        assert store.lookup(prompt).length == store.under("fast").lookup(prompt).length == 0


def test_a_lossy_record_under_a_lossless_identity_is_a_bad_record(
    tmp_path: Path, engine: StaticGraphEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever wrote it: KV with loss is not taken for exact."""
    prompt = prompt_of(engine, 6)
    with monkeypatch.context() as patched, opened(tmp_path / "kv", engine, "small") as store:
        patched.setattr("kvstore.namespace.Namespace.codec", "small")
        Session(engine, store, "exact").generate(prompt, 1)
        store.flush()
    with opened(tmp_path / "kv", engine, "small") as store:
        assert Session(engine, store, "exact").generate(prompt, 1, keep=False).computed == 120
        assert store.stats().misses["bad record: codec"] > 0
