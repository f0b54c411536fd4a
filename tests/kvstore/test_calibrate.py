"""Calibration measures what repairs do, on a model so small that the figures themselves mean nothing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from kvstore.language_model import LanguageModel
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.recompute import (
    AnyRepair,
    Attended,
    Deviating,
    Everything,
    FirstTokens,
    Nothing,
    WhenSure,
)
from kvstore.prefill import prefill
from kvstore.quality.calibrate import (
    Answered,
    Result,
    answered,
    at_least,
    attempt,
    calibrate,
    closeness,
    measurement,
)
from kvstore.quality.fidelity import FORCED, Fidelity, answer_of_reuse, fidelity, greedy
from kvstore.quality.reuse import Measurement, judge
from kvstore.quality.trials import CONTEXTS
from kvstore.session import Session
from tests.tiny_models import write_tiny_gguf

TOKENS = 600  # nearly a byte each here


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_gguf(folder / "tiny.gguf", layers=6, context=4096)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_CACHE_DIR", str(folder / "cache"))
        made = LanguageModel(folder / "tiny.gguf")
        made.engine = StaticGraphEngine(
            folder / "tiny.gguf", cache=folder / "cache", sizes=(16, 128), contexts=(1024, 2048)
        )
    return made


def three_passages(model: LanguageModel, text: str) -> list[NDArray[np.int32]]:
    """24 prompts, each with one of three passages, behind a number that moves it."""
    words = text.split()
    shown = [" ".join(words[at : at + 40]) for at in (0, 40, 80)]
    return [model.chat_prompt("Notes.", f"Number {at}. {shown[at % 3]} Question {at}") for at in range(24)]


def test_the_verdict_is_kept_and_nothing_else(model: LanguageModel, pydoc_text: str) -> None:
    shares: list[float] = []
    repairs: list[AnyRepair] = [Nothing(), FirstTokens(4), Attended(0.1), Deviating(0.1), Everything()]
    with kvstore.open(None, identity=model.identity) as store:
        verdict = calibrate(
            model, store, pydoc_text, trials=4, candidates=repairs, tokens=TOKENS, progress=shares.append
        )
        assert store.verdict == verdict
        assert store.stats().warm.blocks == store.stats().hot.blocks == 0
    assert shares == [0.25, 0.5, 0.75, 1.0]
    by_repair = {each.repair: each for each in verdict.measurements}
    assert set(by_repair) == set(repairs)
    exact, nothing = by_repair[Everything()], by_repair[Nothing()]
    assert exact.kl_mean < 1e-6
    assert (exact.first_agrees, exact.all_agree, exact.recomputed) == (1, 1, 1)
    assert nothing.kl_mean > exact.kl_mean
    assert nothing.recomputed == 0
    for repair in (Attended(0.1), Deviating(0.1)):
        assert by_repair[repair].recomputed == pytest.approx(0.1, abs=0.01)  # not what fills the calls
    assert verdict.fast is verdict.careful is None
    assert "closeness over 4 prompts" in (verdict.why_none("careful") or "")


def test_the_users_own_prompts_decide_how_close_answers_stay(model: LanguageModel, pydoc_text: str) -> None:
    words = pydoc_text.split()
    passages = [" ".join(words[at : at + 40]) for at in range(0, 400, 40)]
    own = [
        model.chat_prompt(
            "Notes.",
            "\n\n".join([passages[at % 10], passages[(3 * at + at // 10 + 1) % 10], f"Question {at}"]),
        )
        for at in range(24)
    ]
    repairs: list[AnyRepair] = [Nothing(), Everything()]
    shares: list[float] = []
    with kvstore.open(None, identity=model.identity) as store:
        verdict = calibrate(
            model,
            store,
            pydoc_text,
            own=own,
            trials=2,
            candidates=repairs,
            tokens=TOKENS,
            progress=shares.append,
        )
    of_own = closeness(model, own, repairs)
    for each in verdict.measurements:
        kl = [result.close.kl.mean() for result in of_own[each.repair]]
        assert 16 <= len(kl) < len(own)  # nothing moved in the first
        assert (each.prompts, each.kl_mean) == (len(kl), pytest.approx(sum(kl) / len(kl)))
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    few = closeness(model, own[:3], repairs)
    with kvstore.open(None, identity=model.identity) as store:
        verdict = calibrate(
            model, store, pydoc_text, own=own[:3], trials=2, candidates=repairs, tokens=TOKENS
        )
    assert 0 < len(few[Nothing()]) < 16
    assert [each.prompts for each in verdict.measurements] == [2, 2]


def test_what_has_no_chance_is_dropped(model: LanguageModel, pydoc_text: str) -> None:
    """Calibration that took an hour for repairs that failed on every prompt."""
    with kvstore.open(None, identity=model.identity) as store:
        verdict = calibrate(
            model, store, pydoc_text, trials=17, candidates=[Nothing(), Everything()], tokens=TOKENS
        )
    nothing, exact = verdict.measurements
    assert nothing.kl_mean > 0.04  # or this model does not serve to show it
    assert (nothing.prompts, exact.prompts) == (16, 17)
    assert verdict.fast == Everything()
    assert verdict.careful is None  # a random model finds no fact, so nothing shows that reuse does
    assert "0 prompts" in (verdict.why_none("careful") or "")


def test_what_the_users_prompts_rule_out_is_dropped(model: LanguageModel, pydoc_text: str) -> None:
    """Closeness over own prompts tried every repair on each of them, and calibration then on generated ones, too."""
    own = three_passages(model, pydoc_text)
    repairs: list[AnyRepair] = [Nothing(), Everything()]
    close = closeness(model, own, repairs)
    assert len(close[Nothing()]) == 16 < len(close[Everything()])
    with kvstore.open(None, identity=model.identity) as store:
        verdict = calibrate(model, store, pydoc_text, own=own, trials=3, candidates=repairs, tokens=TOKENS)
    nothing, exact = verdict.measurements
    assert (nothing.prompts, exact.prompts) == (16, len(close[Everything()]))
    assert nothing.kl_mean > 0.04  # or this model does not serve to show it
    assert verdict.fast == Everything()


def test_what_costs_more_than_computing_is_dropped(model: LanguageModel, pydoc_text: str) -> None:
    """Second looks that computed nearly every prompt after all were tried to the end, since answers stayed close."""
    own = three_passages(model, pydoc_text)
    never_sure = WhenSure(Nothing(), 1e9)
    with kvstore.open(None, identity=model.identity) as store:
        verdict = calibrate(
            model, store, pydoc_text, own=own, trials=0, candidates=[never_sure, Everything()], tokens=TOKENS
        )
    looked, exact = verdict.measurements
    assert (looked.prompts, looked.looked, looked.kl_mean, looked.recomputed) == (16, 1, 0, 1)
    assert looked.in_vain > 0
    assert exact.prompts > 16
    assert (verdict.fast, verdict.careful) == (Everything(), None)
    assert "recall over 0 prompts" in (verdict.why_none("careful") or "")


@pytest.mark.parametrize(("margin", "share"), [(0.0, 0.0), (1e9, 1.0)])
def test_a_second_look_is_measured_with_what_it_looks_at(
    model: LanguageModel, pydoc_text: str, margin: float, share: float
) -> None:
    """Prompts on which a repair was unsure counted for nothing among the user's own: only those it was sure of did."""
    repair = WhenSure(Nothing(), margin)
    words = pydoc_text.split()
    own = [model.chat_prompt("Notes.", f"Number {at}. {' '.join(words[:60])}") for at in range(3)]
    close = closeness(model, own, [Nothing(), repair])
    (asked,) = answered(model, pydoc_text, 1, tokens=TOKENS)
    results = attempt(model, asked, "traffic", [Nothing(), repair])
    assert list(results) == [Nothing(), repair]
    assert results[repair].recomputed == share
    assert results[Nothing()].in_vain == 0
    assert (results[repair].in_vain > 0) is results[repair].looked is (share == 1)
    assert len(close[repair]) == len(close[Nothing()]) == 2
    for looked, plain in [
        (results[repair].close, results[Nothing()].close),
        *[(looked.close, plain.close) for looked, plain in zip(close[repair], close[Nothing()], strict=True)],
    ]:
        assert plain.kl.max() > 1e-3
        assert looked.kl.tolist() == (plain.kl.tolist() if margin == 0.0 else [0.0] * FORCED)
        assert looked.agrees.all() or margin == 0.0


def test_what_a_second_look_leads_to_is_what_it_is_measured_as(model: LanguageModel, pydoc_text: str) -> None:
    """Measured without doing it; this does it."""
    (asked,) = answered(model, pydoc_text, 1, tokens=TOKENS)
    prompt, end = asked.trial.prompt, len(asked.trial.prompt)
    for margin in (0.0, 1e9):
        repair = WhenSure(FirstTokens(4), margin)
        measured = attempt(model, asked, "alone", [repair])[repair]
        with kvstore.open(None, identity=model.identity) as store:
            for capture in asked.trial.captures["alone"]:
                Session(model.engine, store, "exact").generate(capture, 1)
            kv = model.engine.allocate(end + FORCED)
            done = prefill(model.engine, store, prompt, kv, repair)
        assert done.unsure is (margin > 0)
        close = fidelity(model.engine, kv, done.logits, end, asked.full)
        if done.unsure:
            assert close.kl == pytest.approx(measured.close.kl, abs=1e-6)
            assert close.likeliest.tolist() == measured.close.likeliest.tolist()


def test_prompts_whose_fact_full_prefill_does_not_find_are_left_out(
    model: LanguageModel, pydoc_text: str
) -> None:
    some = list(answered(model, pydoc_text, 3, tokens=TOKENS))
    assert [asked.trial.task for asked in some] == ["open"] * 3


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_fact_that_reuse_keeps_is_found(model: LanguageModel, pydoc_text: str, context: str) -> None:
    (asked,) = answered(model, pydoc_text, 1, tokens=TOKENS)
    fact = model.tokenizer.decode(asked.full.answer)
    asked = Answered(asked.trial._replace(fact=fact), asked.full)
    results = attempt(model, asked, context, [Everything(), Nothing()])  # type: ignore[arg-type]
    assert results[Everything()].found is True
    assert results[Nothing()].found == bool(results[Nothing()].close.agrees.all())
    summary = measurement(Everything(), [results[Everything()]] * 2)
    assert (summary.recall, summary.recall_prompts, summary.prompts) == (1, 2, 2)


def test_what_reuse_answers_is_what_greedy_decoding_gives(model: LanguageModel, pydoc_text: str) -> None:
    differed = 0
    for asked in answered(model, pydoc_text, 4, tokens=TOKENS):
        prompt, end = asked.trial.prompt, len(asked.trial.prompt)
        with kvstore.open(None, identity=model.identity) as store:
            for capture in asked.trial.captures["alone"]:
                Session(model.engine, store, "exact").generate(capture, 1)
            kv = model.engine.allocate(end + FORCED)
            logits = prefill(model.engine, store, prompt, kv, Nothing()).logits
        close = fidelity(model.engine, kv, logits, end, asked.full)
        found = answer_of_reuse(model.engine, kv, end, asked.full, close)
        assert found == greedy(model.engine, kv, logits, end)
        differed += found != asked.full.answer
    assert differed


def test_what_may_miss_is_foretold_by_leads_and_shifts() -> None:
    """A repair without a miss in 46 prompts, whose leads were smaller than what it shifts, had six in the next 50."""
    same = Fidelity(np.zeros(FORCED), np.ones(FORCED, bool), np.zeros(FORCED, np.int64))

    def result(lead: float, shift: float) -> Result:
        return Result(same, None, 0.1, lead, shift)

    steady = [result(2.0, 0.5)] * 20
    assert at_least(steady) == 1.0
    shaken = steady + [result(0.2, 0.5)] * 20  # half of the leads are smaller than all shifts
    assert 0.6 < at_least(shaken) < 1 - 0.5 / 2
    assert at_least(shaken, margin=0.2) == at_least(shaken)
    assert at_least(shaken, margin=0.4) == 1.0


@pytest.mark.parametrize("margin", [0.0, 0.1, 0.3])
def test_what_is_foretold_comes_true(margin: float) -> None:
    """Also with a margin: leads after reuse, which shifts had made, once foretold a fraction of the misses."""
    same = Fidelity(np.zeros(FORCED), np.ones(FORCED, bool), np.zeros(FORCED, np.int64))
    random = np.random.default_rng(0)

    def series(prompts: int) -> tuple[float, float]:
        """The share of first tokens that stay or are looked at again, and what it is at least."""
        full, noise = random.normal(0, 0.3, prompts), random.normal(0, 0.3, prompts)
        reused = full + noise
        kept = float(np.mean((np.sign(full) == np.sign(reused)) | (np.abs(reused) < margin)))
        made = [Result(same, None, 0.1, abs(a), abs(b)) for a, b in zip(full, noise, strict=True)]
        return kept, at_least(made, margin)

    kept, surely = series(4000)
    assert surely == pytest.approx(kept, abs=0.02)
    few = np.array([series(40)[1] for _ in range(300)])
    assert 0.85 < np.mean(few <= kept) < 1.0
    assert few.mean() > kept - 0.08


def test_a_recall_over_few_prompts_lets_nothing_through() -> None:
    """One fact found by chance decided for a policy."""
    few = Measurement(Nothing(), 40, 0.01, 0.01, 1.0, 1.0, recall=1.0, recall_prompts=15, recomputed=0.0)
    assert judge((few,)).careful is None
    assert "15 prompts, 16 are needed" in (judge((few,)).why_none("careful") or "")
    enough = msgspec.structs.replace(few, recall_prompts=16)
    assert judge((enough,)).careful == Nothing()
