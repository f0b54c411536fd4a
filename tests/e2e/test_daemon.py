"""An engine over a daemon computes what it computes over a store of its own: same tokens, same logits, same reuse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import kvstore
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.recompute import Attended, FirstTokens
from kvstore.quality.reuse import Verdict
from kvstore.session import Session, identity_of
from tests.daemon.running import Daemon, daemon
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
def engine(tmp_path_factory: pytest.TempPathFactory) -> StaticGraphEngine:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_gguf(folder / "tiny.gguf", layers=4)
    return StaticGraphEngine(
        folder / "tiny.gguf", cache=folder / "cache", sizes=(1, 16), contexts=(256,), groups=2
    )


def _prompts(engine: StaticGraphEngine) -> list[np.ndarray]:
    """A chat that grows, then its parts in another order, so that runs move."""
    random = np.random.default_rng(3)
    parts = [random.integers(0, engine.config.vocab, 50).astype(np.int32) for _ in range(4)]
    grown = [np.concatenate(parts[: count + 1]) for count in range(4)]
    return [*grown, np.concatenate([parts[2], parts[0], parts[3], parts[1][:20]])]


@pytest.mark.parametrize("policy", ["exact", "careful", "fast"])
@pytest.mark.parametrize("tier", ["near", "cold"])
def test_answers_and_reuse_are_those_of_an_embedded_store(
    tmp_path: Path, engine: StaticGraphEngine, policy: str, tier: str
) -> None:
    identity = identity_of(engine, "00" * 32)
    with (
        kvstore.open(tmp_path / "own", identity=identity, profile=_PROFILE) as own,
        daemon(tmp_path / "kv", _PROFILE) as running,
        kvstore.connect(running.socket, identity=identity, fallback="none") as remote,
    ):
        for store in (own, remote):
            store.keep_verdict(Verdict(fast=FirstTokens(4), careful=Attended(0.15)))
        for prompt in _prompts(engine):
            found = []
            for store in (own, remote):
                if tier == "cold":
                    store.flush()
                    store.demote(store.lookup(prompt))
                session = Session(engine, store, policy)  # type: ignore[arg-type]
                explained = session.explain(prompt)
                done = session.generate(prompt, 6)
                if tier == "near":  # else flash decides what is worth it
                    assert (explained.prefix, explained.moved) == (
                        done.hot + done.warm + done.cold,
                        done.moved,
                    )
                found.append((done.tokens, done.moved, done.recomputed, done.computed))
            if tier == "near":
                assert found[0] == found[1]
            elif (
                policy == "exact" or found[0][1:] == found[1][1:]
            ):  # else each flash decided for another reuse
                assert found[0][0] == found[1][0]
        counted = remote.stats().counts
        assert counted["requests"] == 5
        assert counted["tokens_computed"] < sum(map(len, _prompts(engine)))


def test_a_daemon_that_dies_costs_reuse_and_no_answer(tmp_path: Path, engine: StaticGraphEngine) -> None:
    identity = identity_of(engine, "00" * 32)
    plain = [Session(engine, None).generate(prompt, 6).tokens for prompt in _prompts(engine)[:4]]
    running = Daemon(tmp_path / "kv", _PROFILE)
    running.start()
    with kvstore.connect(running.socket, identity=identity, fallback="none") as store:
        session = Session(engine, store)
        for round_ in range(2):
            for number, prompt in enumerate(_prompts(engine)[:4]):
                killed = round_ == 1 and number == 2

                def kill(_: int) -> None:
                    running.kill()

                answer = session.generate(prompt, 6, on_token=kill if killed else None)
                assert answer.tokens == plain[number]
    running.kill()


def test_a_daemon_that_dies_while_the_engine_builds_on_what_it_gives(
    tmp_path: Path, engine: StaticGraphEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstore.daemon.remote_lease import RemoteReading

    identity = identity_of(engine, "00" * 32)
    prompt = _prompts(engine)[3]
    plain = Session(engine, None).generate(prompt, 6).tokens
    raw, left, doomed = RemoteReading.raw, 0, Daemon(tmp_path, _PROFILE)

    def counting(self: RemoteReading, number: int, group: int) -> np.ndarray:
        nonlocal left
        left -= 1
        if left == 0:
            doomed.kill()
        return raw(self, number, group)

    monkeypatch.setattr(RemoteReading, "raw", counting)
    for at in range(6):
        doomed = Daemon(tmp_path / f"kv{at}", _PROFILE)  # a new directory: no speed of flash is known
        doomed.start()
        with kvstore.connect(doomed.socket, identity=identity, fallback="none") as store:
            session = Session(engine, store)
            session.generate(prompt[:-9], 1)
            store.flush()
            store.demote(store.lookup(prompt))
            left = at + 1
            assert session.generate(prompt, 6).tokens == plain
            assert left <= 0, "it was killed"
        doomed.kill()
