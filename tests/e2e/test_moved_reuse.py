"""Moved reuse through an engine: repaired, counted to the token, exact where everything is computed again."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.recompute import AnyRepair, Attended, Both, Everything, FirstTokens, Nothing, WhenSure
from kvstore.prefill import prefill
from kvstore.quality.reuse import Policy, Verdict
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
_FAST = Verdict(fast=FirstTokens(4), careful=None)
_CAREFUL = Verdict(fast=FirstTokens(4), careful=Attended(0.15))

Tokens = NDArray[np.int32]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> StaticGraphEngine:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_gguf(folder / "tiny.gguf", layers=6)
    return StaticGraphEngine(
        folder / "tiny.gguf", cache=folder / "cache", sizes=(16,), contexts=(256, 512), groups=3
    )


def some(engine: StaticGraphEngine, seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, engine.config.vocab, length).astype(np.int32)


def opened(path: Path | None, engine: StaticGraphEngine, verdict: Verdict = _CAREFUL) -> kvstore.KVStore:
    store = kvstore.open(path, identity=identity_of(engine, "00" * 32), profile=_PROFILE)
    store.keep_verdict(verdict)
    return store


def two_prompts(engine: StaticGraphEngine) -> tuple[Tokens, Tokens]:
    """Two prompts with a system prompt and two passages in common, in another order."""
    system, one, two = some(engine, 1, 40), some(engine, 2, 70), some(engine, 3, 55)
    return (
        np.concatenate([system, some(engine, 4, 45), one, two, some(engine, 5, 10)]),
        np.concatenate([system, two, some(engine, 6, 9), one, some(engine, 7, 21)]),
    )


def test_everything_computed_again_equals_prefill(engine: StaticGraphEngine) -> None:
    first, second = two_prompts(engine)
    with opened(None, engine) as store:
        Session(engine, store, "exact").generate(first, 1)
        kv = engine.allocate(len(second))
        done = prefill(engine, store, second, kv, Everything())
        assert done.recomputed == 125
        assert done.moved == 0
        plain = engine.allocate(len(second))
        engine.prefill(second[: done.prefix], plain)
        expected = engine.prefill(second, plain, start=done.prefix)
        np.testing.assert_array_equal(done.logits, expected)
        for ours, theirs in zip((*kv.keys, *kv.values), (*plain.keys, *plain.values), strict=True):
            np.testing.assert_allclose(ours[:, : len(second)], theirs[:, : len(second)], atol=1e-5)


@pytest.mark.parametrize(
    "repair", [Nothing(), FirstTokens(8), Attended(0.2), Both(FirstTokens(4), Attended(0.1))], ids=str
)
def test_every_repair_accounts_for_each_token(engine: StaticGraphEngine, repair: AnyRepair) -> None:
    first, second = two_prompts(engine)
    with opened(None, engine) as store:
        Session(engine, store, "exact").generate(first, 1)
        before = engine.statistics.tokens
        done = prefill(engine, store, second, engine.allocate(len(second)), repair)
        assert done.prefix == 40
        assert done.moved + done.recomputed == 125
        assert done.computed == 30
        assert engine.statistics.tokens - before == done.computed + done.recomputed
        assert np.isfinite(done.logits).all()
        assert done.recomputed >= (0 if isinstance(repair, Nothing) else 12)


def test_an_unsure_answer_is_computed_after_all(engine: StaticGraphEngine) -> None:
    first, second = two_prompts(engine)
    with opened(None, engine, Verdict(fast=WhenSure(FirstTokens(4), 1e9), careful=None)) as store:
        Session(engine, store, "exact").generate(first, 1)
        kv, plain = engine.allocate(len(second)), engine.allocate(len(second))
        done = prefill(engine, store, second, kv, WhenSure(FirstTokens(4), 1e9))
        assert done.unsure
        assert (done.prefix, done.moved, done.recomputed) == (40, 0, 0)
        assert done.computed == len(second) - 40
        np.testing.assert_allclose(done.logits, engine.prefill(second, plain), atol=1e-4)
        assert "is computed after all" in " ".join(store.explain(second, "fast").notes)
        Session(engine, store, "fast").generate(second, 1)
        assert store.stats().counts["requests_unsure"] == 2
        assert store.lookup(second).length == len(second)  # exact KV, kept as such


def test_a_sure_answer_is_what_the_repair_gives(engine: StaticGraphEngine) -> None:
    first, second = two_prompts(engine)
    with opened(None, engine) as store:
        Session(engine, store, "exact").generate(first, 1)
        sure = prefill(engine, store, second, engine.allocate(len(second)), WhenSure(FirstTokens(4), 0.0))
        plain = prefill(engine, store, second, engine.allocate(len(second)), FirstTokens(4))
        assert not sure.unsure
        assert (sure.moved, sure.recomputed) == (plain.moved, plain.recomputed)
        np.testing.assert_array_equal(sure.logits, plain.logits)


@pytest.mark.parametrize("cold", [False, True], ids=["memory", "flash"])
def test_kv_is_exact_up_to_the_first_moved_token(
    tmp_path: Path, engine: StaticGraphEngine, cold: bool
) -> None:
    first, second = two_prompts(engine)
    repair = FirstTokens(24)
    with opened(tmp_path, engine) as store:
        Session(engine, store, "exact").generate(first, 1)
    with opened(tmp_path, engine, Verdict(fast=repair, careful=None)) as store:
        if not cold:
            store.promote(store.lookup(second, moved=True), to="warm")
        kv, plain = engine.allocate(len(second)), engine.allocate(len(second))
        done = prefill(engine, store, second, kv, repair)
        assert bool(done.tiers["cold"]) == cold
        assert 40 + 24 <= done.exact_until < 40 + 55
        engine.prefill(second, plain)
        for ours, theirs in zip((*kv.keys, *kv.values), (*plain.keys, *plain.values), strict=True):
            np.testing.assert_allclose(
                ours[:, : done.exact_until], theirs[:, : done.exact_until], atol=1e-5, rtol=0
            )
        Session(engine, store, "fast").generate(second, 1)
        assert store.lookup(second).length == done.exact_until


def test_a_second_look_computes_from_the_first_moved_token_on(engine: StaticGraphEngine) -> None:
    first, second = two_prompts(engine)
    with opened(None, engine) as store:
        Session(engine, store, "exact").generate(first, 1)
        once = prefill(engine, store, second, engine.allocate(len(second)), FirstTokens(24))
        before = engine.statistics.tokens
        again = prefill(engine, store, second, engine.allocate(len(second)), WhenSure(FirstTokens(24), 1e9))
        assert again.unsure
        assert again.exact_until == len(second)
        all_after_all = len(second) - once.exact_until
        assert engine.statistics.tokens - before == once.computed + once.recomputed + all_after_all


def test_no_second_look_where_all_that_moved_was_computed_again(engine: StaticGraphEngine) -> None:
    first, second = two_prompts(engine)
    with opened(None, engine) as store:
        Session(engine, store, "exact").generate(first, 1)
        done = prefill(engine, store, second, engine.allocate(len(second)), WhenSure(FirstTokens(70), 1e9))
        assert (done.moved, done.recomputed, done.unsure) == (0, 125, False)
        assert done.exact_until == len(second)
        logits = engine.prefill(second, engine.allocate(len(second)))
        np.testing.assert_allclose(done.logits, logits, atol=1e-4)


def test_recompute_fills_the_calls_that_are_paid_for_anyway(engine: StaticGraphEngine) -> None:
    first, second = two_prompts(engine)
    with opened(None, engine) as store:
        Session(engine, store, "exact").generate(first, 1)
        padding = engine.statistics.padding
        prefill(engine, store, second, engine.allocate(len(second)), FirstTokens(4))
        assert engine.statistics.padding == padding


@pytest.mark.parametrize(("policy", "moves"), [("exact", False), ("careful", True), ("fast", True)])
def test_policies(engine: StaticGraphEngine, policy: Policy, moves: bool) -> None:
    first, second = two_prompts(engine)
    with opened(None, engine) as store:
        Session(engine, store, "exact").generate(first, 1)
        done = Session(engine, store, policy).generate(second, 3)
        assert (done.moved > 0) == moves
        assert done.hot + done.warm + done.cold + done.moved + done.recomputed + done.computed == len(second)


def test_careful_falls_back_to_exact_where_no_repair_keeps_the_recall(engine: StaticGraphEngine) -> None:
    first, second = two_prompts(engine)
    with opened(None, engine, _FAST) as store:
        Session(engine, store, "exact").generate(first, 1)
        assert Session(engine, store, "careful").generate(second, 1, keep=False).moved == 0
        assert Session(engine, store, "fast").generate(second, 1).moved > 0


def test_without_a_verdict_nothing_is_approximated(tmp_path: Path, engine: StaticGraphEngine) -> None:
    """Blending accepted for models where it ruins quality."""
    first, second = two_prompts(engine)
    with kvstore.open(tmp_path / "kv", identity=identity_of(engine, "00" * 32), profile=_PROFILE) as store:
        Session(engine, store, "fast").generate(first, 1)
        assert Session(engine, store, "fast").generate(second, 1, keep=False).moved == 0
        store.keep_verdict(_FAST)
    with kvstore.open(tmp_path / "kv", identity=identity_of(engine, "00" * 32), profile=_PROFILE) as store:
        assert store.verdict == _FAST
        assert Session(engine, store, "fast").generate(second, 1).moved > 0


def test_what_was_computed_behind_moved_runs_is_reused_as_moved_never_as_prefix(
    engine: StaticGraphEngine,
) -> None:
    first, second = two_prompts(engine)
    fresh = some(engine, 8, 64)
    third = np.concatenate([second[:110], fresh, second[110:]])
    with opened(None, engine) as store:
        Session(engine, store, "exact").generate(first, 1)
        Session(engine, store, "fast").generate(third, 1)
        held = store.lookup(third).length
        assert 40 + 4 <= held < 40 + 16  # the system prompt, and the head that was computed again behind it
        again = np.concatenate([some(engine, 9, 17), fresh, some(engine, 10, 4)])
        (run,) = store.lookup(again, moved=True).runs
        assert (run.target, run.length) == (17, 64)
        assert not run.pieces[0].block.exact
        exact = Session(engine, store, "exact").generate(third, 3)
        assert exact.tokens == Session(engine, None).generate(third, 3).tokens


def test_the_last_token_is_computed_even_when_a_run_covers_it(engine: StaticGraphEngine) -> None:
    first, _ = two_prompts(engine)
    prompt = np.concatenate([some(engine, 11, 13), first[85:155]])  # ends inside a held passage
    with opened(None, engine) as store:
        Session(engine, store, "exact").generate(first, 1)
        done = Session(engine, store, "fast").generate(prompt, 1)
        assert done.computed == 14
        assert done.moved + done.recomputed == 69


def test_the_end_of_the_question_is_computed_even_when_it_is_held(engine: StaticGraphEngine) -> None:
    first, _ = two_prompts(engine)
    prompt = np.concatenate([some(engine, 11, 13), first[85:155]])  # ends inside a held passage
    with opened(None, engine) as store:
        Session(engine, store, "exact").generate(first, 1)
        done = prefill(engine, store, prompt, engine.allocate(len(prompt)), Attended(0.2))
        assert done.computed == 13 + 16
        assert done.moved + done.recomputed == 70 - 16
        assert {
            span.reason: span.length
            for span in store.explain(prompt, "careful").spans
            if "question" in (span.reason or "")
        } == {"the end of the question is computed, to see what it attends to": 16}


def test_damage_in_a_moved_run_is_computed_instead(tmp_path: Path, engine: StaticGraphEngine) -> None:
    first, second = two_prompts(engine)
    with opened(tmp_path / "kv", engine) as store:
        Session(engine, store, "exact").generate(first, 1)
        runs = store.lookup(second, moved=True).runs
        victim = runs[1].pieces[1].block
    record = tmp_path / "kv" / "blocks" / victim.key[:16].hex()
    content = bytearray(record.read_bytes())
    content[-2] ^= 1
    record.write_bytes(content)
    with opened(tmp_path / "kv", engine) as store:
        done = Session(engine, store, "fast").generate(second, 1)
        assert done.computed >= 30 + runs[1].length
        assert store.stats().misses["bad record: frame checksum"] == 1


def test_a_wrong_geometry_turns_moving_off(engine: StaticGraphEngine) -> None:
    """Keys turned by a geometry that is not the model's: the engine's own layer 0 tells."""
    right = identity_of(engine, "00" * 32)
    rope = right.layout.layers[0].rope
    assert rope is not None
    wrong = kvstore.Rope(rope.head_dim, rope.theta * 3, rope.rotary_dim, rope.pairing)
    layout = kvstore.Layout.uniform(
        layers=6,
        kv_heads=right.layout.layers[0].kv_heads,
        head_dim=rope.head_dim,
        rope=wrong,
        dtype="float32",
    )
    identity = kvstore.Identity(
        weights=right.weights, tokenizer=right.tokenizer, quantisation=right.quantisation, layout=layout
    )
    first, second = two_prompts(engine)
    with kvstore.open(None, identity=identity, profile=_PROFILE) as store:
        store.keep_verdict(_FAST)
        Session(engine, store, "exact").generate(first, 1)
        assert Session(engine, store, "fast").generate(second, 1, keep=False).moved == 0
        assert "layer 0" in (store.shift_refused or "")


def test_a_session_opens_over_any_context_and_is_repaired_there(tmp_path: Path) -> None:
    """The faults this excludes: a self-test that needed 133 slots, and a question longer than the graphs over them."""
    write_tiny_gguf(tmp_path / "tiny.gguf", layers=6)
    short = StaticGraphEngine(tmp_path / "tiny.gguf", cache=tmp_path, sizes=(1, 256), contexts=(128,))
    chunk = some(short, 2, 60)
    with opened(None, short, Verdict(fast=Attended(0.1), careful=None)) as store:
        Session(short, store, "exact").generate(np.concatenate([some(short, 1, 20), chunk]), 1)
        prompt = np.concatenate([some(short, 3, 9), chunk, some(short, 4, 30)])
        done = Session(short, store, "fast").generate(prompt, 1)
        assert store.shift_refused is None
        assert (done.moved, done.recomputed, done.computed) == (54, 6, 39)


def test_moved_runs_are_left_alone_where_repairing_them_does_not_pay(engine: StaticGraphEngine) -> None:
    """One more graph call for the probe, none fewer for the prompt: slower than prefix reuse alone."""
    chunk = some(engine, 12, 33)
    with opened(None, engine) as store:
        Session(engine, store, "exact").generate(np.concatenate([some(engine, 13, 40), chunk]), 1)
        prompt = np.concatenate([some(engine, 14, 1), chunk, some(engine, 15, 14)])  # 48 tokens: three calls
        half = Verdict(fast=Attended(0.9), careful=Attended(0.9))
        store.keep_verdict(half)
        assert store.lookup(prompt, moved=True).runs
        done = Session(engine, store, "careful").generate(prompt, 1)
        assert (done.moved, done.recomputed, done.computed) == (0, 0, 48)
