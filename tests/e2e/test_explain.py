"""What `explain` says of a prompt beforehand is what a request then does, to the token."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import kvstore
from kvstore.explain import Explanation
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.recompute import AnyRepair, Attended, Both, FirstTokens, Nothing
from kvstore.quality.reuse import Measurement, Policy, Verdict
from kvstore.session import Session, identity_of
from tests.tiny_models import write_tiny_gguf

_PROFILE = kvstore.Profile(
    block_tokens=32,
    hot_bytes=1 << 22,
    warm_bytes=1 << 24,
    cold_bytes=1 << 25,
    arena_bytes=1 << 24,
    frame_bytes=4096,
)
_PARTS = (3, 40, 20, 70, 33, 64, 31, 50)
"""Tokens of the texts that prompts are made of."""

_REPAIRS: tuple[AnyRepair, ...] = (
    Nothing(),
    FirstTokens(4),
    FirstTokens(16),
    Attended(0.15),
    Attended(0.9),
    Both(FirstTokens(4), Attended(0.1)),
)

Tokens = NDArray[np.int32]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> StaticGraphEngine:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_gguf(folder / "tiny.gguf", layers=3)
    return StaticGraphEngine(
        folder / "tiny.gguf", cache=folder / "cache", sizes=(1, 16, 64), contexts=(256, 512), groups=2
    )


@pytest.fixture
def store(engine: StaticGraphEngine) -> Iterator[kvstore.KVStore]:
    with kvstore.open(None, identity=identity_of(engine, "00" * 32), profile=_PROFILE) as opened:
        yield opened


def part(number: int, length: int | None = None) -> Tokens:
    size = _PARTS[number] if length is None else length
    return np.random.default_rng(number).integers(0, 300, size).astype(np.int32)


def joined(*parts: Tokens) -> Tokens:
    return np.concatenate(parts).astype(np.int32)


def check_spans(
    explained: Explanation, prompt: Tokens, store: kvstore.KVStore, boundaries: Sequence[int] = ()
) -> None:
    """Each token in one span, each loaded one out of a block that holds it where the span says."""
    match = store.lookup(prompt, moved=True, boundaries=boundaries)  # which copy serves depends on them
    held = {block.key.hex(): block for block in match.blocks}
    for run in match.runs:
        held |= {piece.block.key.hex(): piece.block for piece in run.pieces}
    ends = [0, *(span.start + span.length for span in explained.spans)]
    assert [span.start for span in explained.spans] == ends[:-1]
    assert ends[-1] == len(prompt)
    for span in explained.spans:
        assert span.length > 0
        assert (span.source == "compute") == (span.kind == "computed") == (span.block is None)
        assert (span.reason is not None) == (span.kind in ("recomputed", "computed"))
        if span.block is not None:
            block = held[span.block]
            offset = span.start - span.shift - block.start
            np.testing.assert_array_equal(
                block.tokens[offset : offset + span.length], prompt[span.start : span.start + span.length]
            )

    def of(kind: str) -> int:
        return sum(span.length for span in explained.spans if span.kind == kind)

    assert (of("prefix"), of("computed")) == (explained.prefix, explained.computed)
    assert of("moved") + of("recomputed") == explained.moved + explained.recomputed
    assert of("recomputed") <= explained.recomputed


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_explain_predicts_what_a_request_does(engine: StaticGraphEngine, data: st.DataObject) -> None:
    numbers = st.integers(0, len(_PARTS) - 1)
    verdict = Verdict(fast=data.draw(st.sampled_from(_REPAIRS)), careful=data.draw(st.sampled_from(_REPAIRS)))
    with kvstore.open(None, identity=identity_of(engine, "00" * 32), profile=_PROFILE) as store:
        store.keep_verdict(verdict)
        for request in range(data.draw(st.integers(1, 6))):
            policy: Policy = data.draw(st.sampled_from(["exact", "careful", "fast"]))
            parts = [part(number) for number in data.draw(st.lists(numbers, min_size=1, max_size=6))]
            if data.draw(st.booleans()):
                parts.append(part(100 + request, data.draw(st.integers(1, 40))))
            prompt = joined(*parts)[: 250 + 200 * data.draw(st.integers(0, 1))]
            boundaries = np.cumsum([len(each) for each in parts]).tolist() if data.draw(st.booleans()) else []
            session = Session(engine, store, policy)
            explained = session.explain(prompt, 2, boundaries=boundaries)
            check_spans(explained, prompt, store, boundaries)
            done = session.generate(prompt, 2, boundaries=boundaries, keep=data.draw(st.booleans()))
            assert explained.prefix == done.hot + done.warm + done.cold
            assert (explained.moved, explained.recomputed, explained.computed) == (
                done.moved,
                done.recomputed,
                done.computed,
            )
            assert explained.policy == policy


def reasons(explained: Explanation) -> list[tuple[int, int, str]]:
    return [
        (span.start, span.length, span.reason or "") for span in explained.spans if span.kind == "computed"
    ]


def test_each_span_says_where_from_by_how_much_and_why(
    engine: StaticGraphEngine, store: kvstore.KVStore
) -> None:
    store.keep_verdict(Verdict(fast=FirstTokens(4), careful=None))
    system, one, two = part(1), part(3), part(5)
    Session(engine, store, "exact").generate(joined(system, part(20, 45), one, two), 1)
    prompt = joined(system, part(21, 9), one, part(22, 21))
    explained = store.explain(prompt, "fast")
    check_spans(explained, prompt, store)
    assert (explained.repair, explained.refused) == ("first 4 tokens of each run", None)
    kinds = [(span.kind, span.shift) for span in explained.spans]
    assert kinds[0] == ("prefix", 0)
    assert ("recomputed", 9 - 45) in kinds
    assert ("moved", 9 - 45) in kinds
    assert [
        (span.start, span.length, span.reason) for span in explained.spans if span.kind == "recomputed"
    ] == [(49, 4, "repair: first 4 tokens of each run")]
    fresh = reasons(explained)
    assert [(start, length) for start, length, _ in fresh] == [(40, 9), (119, 21)]
    assert "diverges at 40" in fresh[0][2]
    assert fresh[1][2] == "held nowhere"


@pytest.mark.parametrize(
    ("policy", "verdict", "reason"),
    [
        ("exact", Verdict(FirstTokens(4), FirstTokens(4)), "policy exact uses prefixes only"),
        ("careful", None, "never measured"),
        ("careful", Verdict(FirstTokens(4), None, reasons=("careful: y",)), "careful: y"),
    ],
)
def test_a_policy_without_a_repair_says_why(
    engine: StaticGraphEngine, store: kvstore.KVStore, policy: Policy, verdict: Verdict | None, reason: str
) -> None:
    if verdict is not None:
        store.keep_verdict(verdict)
    Session(engine, store, "exact").generate(joined(part(1), part(3)), 1)
    explained = store.explain(joined(part(20, 9), part(3), part(21, 5)), policy)
    (said,) = [why for start, length, why in reasons(explained) if (start, length) == (9, 70)]
    assert reason in said
    assert (explained.moved, explained.computed, explained.repair) == (0, 84, None)
    assert explained.refused == said


def test_a_refused_shift_says_why(engine: StaticGraphEngine, store: kvstore.KVStore) -> None:
    store.keep_verdict(Verdict(FirstTokens(4), FirstTokens(4)))
    store.shift_refused = "layer 0: keys differ"
    Session(engine, store, "exact").generate(joined(part(1), part(3)), 1)
    explained = store.explain(joined(part(20, 9), part(3), part(21, 5)))
    assert (9, 70, "shift refused: layer 0: keys differ") in reasons(explained)
    assert (explained.repair, explained.refused) == (None, "shift refused: layer 0: keys differ")


def test_a_run_that_is_too_short_and_the_last_token(
    engine: StaticGraphEngine, store: kvstore.KVStore
) -> None:
    store.keep_verdict(Verdict(FirstTokens(4), FirstTokens(4)))
    Session(engine, store, "exact").generate(joined(part(1), part(3), part(20, 40)), 1)
    explained = store.explain(joined(part(21, 9), part(3)[4:35], part(22, 7), part(3)))
    short, last = [each for each in reasons(explained) if "tokens in a row" in each[2] or "last" in each[2]]
    assert (short[:2], last[:2]) == ((9, 31), (116, 1))
    assert short[2].startswith("only 31 tokens in a row")
    assert last[2].startswith("the last token is always computed")


def test_a_repair_that_costs_more_than_it_saves(engine: StaticGraphEngine, store: kvstore.KVStore) -> None:
    store.keep_verdict(Verdict(Attended(0.99), Attended(0.99)))
    Session(engine, store, "exact").generate(joined(part(1), part(4)), 1)
    prompt = joined(part(20, 1), part(4), part(21, 30))
    without, with_costs = store.explain(prompt), Session(engine, store).explain(prompt)
    assert without.moved + without.recomputed == 33
    assert "costs of graph calls not given" in without.notes[-1]
    assert with_costs.computed == 64
    (said,) = [why for start, _, why in reasons(with_costs) if start == 1]
    assert said.startswith("repair would cost more than computing")


def test_of_an_attention_repair_the_count_is_known_and_the_choice_is_not(
    engine: StaticGraphEngine, store: kvstore.KVStore
) -> None:
    store.keep_verdict(Verdict(None, Both(FirstTokens(4), Attended(0.5))))
    Session(engine, store, "exact").generate(joined(part(1), part(3)), 1)
    explained = store.explain(joined(part(20, 9), part(3), part(21, 16)))
    assert explained.recomputed == 4 + 35
    assert sum(span.length for span in explained.spans if span.kind == "recomputed") == 4
    assert "35 more of the moved tokens" in explained.notes[0]


def test_what_flash_is_too_slow_for_is_computed_and_said_so(
    tmp_path: Path, engine: StaticGraphEngine
) -> None:
    prompt = joined(part(20, 200))
    identity = identity_of(engine, "00" * 32)
    with kvstore.open(tmp_path / "kv", identity=identity, profile=_PROFILE) as store:
        Session(engine, store).generate(prompt, 1)
    with kvstore.open(tmp_path / "kv", identity=identity, profile=_PROFILE) as store:
        flash = store._tiers.flash
        flash.begin()
        time.sleep(0.1)
        flash.end(1)  # ten bytes a second
        session = Session(engine, store)
        explained = session.explain(prompt, 2)
        check_spans(explained, prompt, store)
        assert any("flash is slow" in why for _, _, why in reasons(explained))
        done = session.generate(prompt, 2)
        assert (explained.prefix, explained.computed) == (done.hot + done.warm + done.cold, done.computed)


def test_a_request_brings_what_it_read_from_flash_into_memory(
    tmp_path: Path, engine: StaticGraphEngine
) -> None:
    """KV read from flash again on each request, since the engine never asked for more than the last layers."""
    prompt = joined(part(20, 100))
    identity = identity_of(engine, "00" * 32)
    with kvstore.open(tmp_path / "kv", identity=identity, profile=_PROFILE) as store:
        Session(engine, store).generate(prompt, 1)
    with kvstore.open(tmp_path / "kv", identity=identity, profile=_PROFILE) as store:
        first, second = (Session(engine, store).generate(prompt, 1) for _ in range(2))
        assert first.cold == 99
        assert second.hot + second.warm == 99
        assert second.bytes_read == 0


def test_stats_say_what_each_policy_stands_for_and_what_requests_did(
    engine: StaticGraphEngine, store: kvstore.KVStore
) -> None:
    measured = Measurement(FirstTokens(4), 64, 0.01, 0.02, 0.98, 0.95, 0.5, 40, 0.1)
    store.keep_verdict(
        Verdict(FirstTokens(4), None, (measured,), ("careful: no repair keeps 90% of the recall",))
    )
    Session(engine, store, "exact").generate(joined(part(1), part(3)), 1)
    done = Session(engine, store, "fast").generate(joined(part(20, 9), part(3), part(21, 5)), 1)
    stats = store.stats()
    policies = stats.verdicts[store.identity.digest().hex()]
    assert policies["fast"].repair == "first 4 tokens of each run"
    assert policies["fast"].measured == measured
    assert (policies["careful"].repair, policies["careful"].measured) == (None, None)
    assert policies["careful"].reason == "careful: no repair keeps 90% of the recall"
    counts = stats.counts
    assert (counts["tokens_moved"], counts["tokens_recomputed"]) == (done.moved, done.recomputed)
    assert counts["requests"] == 2
    kinds = ("prefix", "moved", "recomputed", "computed")
    assert sum(counts[f"tokens_{kind}"] for kind in kinds) == 110 + 84
