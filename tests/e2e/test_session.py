"""Generation at its edges: no new token at all, and fewer than none."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.errors import InvalidRequestError
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.recompute import FirstTokens
from kvstore.quality.reuse import Policy, Verdict
from kvstore.session import Session, identity_of
from tests.tiny_models import write_tiny_gguf

_PROFILE = kvstore.Profile(
    block_tokens=32, hot_bytes=0, warm_bytes=1 << 24, cold_bytes=0, arena_bytes=1 << 24, frame_bytes=4096
)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> StaticGraphEngine:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_gguf(folder / "tiny.gguf", layers=3)
    return StaticGraphEngine(
        folder / "tiny.gguf", cache=folder / "cache", sizes=(1, 16, 64), contexts=(256,), groups=2
    )


def some(seed: int, length: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, 300, length).astype(np.int32)


def test_no_token_asked_for_warms_the_cache(engine: StaticGraphEngine) -> None:
    """It decoded until the context was full, and raised an error then."""
    prompt = some(1, 255)  # all that the context holds
    with kvstore.open(None, identity=identity_of(engine, "00" * 32), profile=_PROFILE) as store:
        session = Session(engine, store)
        assert session.explain(prompt, 0).computed == 255
        done = session.generate(prompt, 0)
        assert (done.tokens, done.computed, done.ttft_seconds) == ([], 255, 0.0)
        assert store.lookup(prompt).length == 255
        answer = session.generate(prompt[:200], 5)
        assert answer.computed == 1
        assert answer.tokens == Session(engine, None).generate(prompt[:200], 5).tokens
    assert Session(engine, None).generate(prompt, 0).tokens == []


@pytest.mark.parametrize("policy", ["exact", "fast"])
def test_with_moved_runs_too_each_part_is_kept_as_what_it_is(
    engine: StaticGraphEngine, policy: Policy
) -> None:
    chunk, end = some(2, 90), some(4, 40)
    prompt = np.concatenate([some(3, 20), chunk, end])
    with kvstore.open(None, identity=identity_of(engine, "00" * 32), profile=_PROFILE) as store:
        store.keep_verdict(Verdict(FirstTokens(4), None))
        Session(engine, store, "exact").generate(np.concatenate([some(5, 50), chunk]), 0)
        done = Session(engine, store, policy).generate(prompt, 0)
        assert done.moved == (0 if policy == "exact" else pytest.approx(86, abs=20))
        head = done.recomputed  # of the one run, right behind what is exact
        assert store.lookup(prompt).length == (len(prompt) if policy == "exact" else 20 + head)
        (run,) = store.lookup(np.concatenate([some(6, 7), end]), moved=True).runs
        assert (run.target, run.length) == (7, 40)


def test_fewer_tokens_than_none_are_an_error(engine: StaticGraphEngine) -> None:
    with kvstore.open(None, identity=identity_of(engine, "00" * 32), profile=_PROFILE) as store:
        session = Session(engine, store)
        for ask in (session.generate, session.explain):
            with pytest.raises(InvalidRequestError, match="asked for -1 new tokens"):
                ask(some(1, 50), -1)
        assert store.stats().counts.get("lookups", 0) == 0
