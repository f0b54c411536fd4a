"""The quality gate: measures what moved reuse does to a model's answers, and which repair each policy may use.

Prompts are made of a text (see `trials`), their passages captured before as traffic captures them. Each is answered by
full prefill, and with each repair over the moved passages:

- KL(full || reuse) at the first token and, teacher-forced, over 16 tokens, and whether the most likely token stays;
- recall: of the facts that full prefill finds, how many reuse still finds. KL alone does not tell: with five similar
  facts in five passages lookup fell from 0.62 to 0.2 while KL stayed small.

Closeness depends on what a user asks, so his own prompts decide it where he gives enough of them; recall is asked of
generated ones, whose facts are known. Some prompts also go on from KV that went through each codec with loss, see
`codec`.

A prompt whose fact full prefill does not find says nothing about reuse, and is left out. A repair that misses the bars
by more than chance explains is not tried on further prompts. What a second look leads to is known without doing it:
full prefill's answer where the repair's own is unsure, else the repair's; so `WhenSure` costs no run of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple, cast

import msgspec
import numpy as np

import kvstore
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.kv_allocation import KvAllocation
from kvstore.pipeline.recompute import (
    AnyRepair,
    Attended,
    Both,
    Evidence,
    FirstTokens,
    MovedRun,
    Nothing,
    Positions,
    WhenSure,
    first_of,
    lead,
)
from kvstore.pipeline.self_test import why_engine_does_not_shift

from ..api import Store
from ..codec import Codec
from ..language_model import LanguageModel
from ..prefill import prefill
from ..session import Session
from ..store import KVStore
from .codec_trial import MOST_KL as MOST_CODEC_KL
from .codec_trial import CodecTrial, bears, go_on, pass_through
from .fidelity import FORCED, Fidelity, Reference, answer_of_reuse, fidelity, reference, unchanged
from .reuse import LEAST_PROMPTS, MOST_KL, ONE_SIDED, Measurement, Verdict, judge, within_chance
from .trials import Context, Tokens, Trial, trials

_REPAIRS: tuple[Nothing | FirstTokens | Attended | Both, ...] = (
    Nothing(),
    FirstTokens(4),
    FirstTokens(16),
    Attended(0.08),
    Both(FirstTokens(4), Attended(0.15)),
    Both(FirstTokens(8), Attended(0.30)),
    Both(FirstTokens(8), Attended(0.45)),
    Both(FirstTokens(64), Attended(0.30)),
)
_MARGINS = 0.05, 0.1, 0.2, 0.3, 0.5
CANDIDATES: tuple[AnyRepair, ...] = (
    *_REPAIRS,
    *(WhenSure(repair, margin) for margin in _MARGINS for repair in _REPAIRS),
)
"""The better a repair, the less it changes what leads, and the smaller a margin a second look needs. Over 40 prompts of
tool schemas, whose answers SmolLM2-135M leaves open, another token led after first 4 16 times, by up to 0.7 nats; after
first 4 and attended 15 %, 10 times by up to 0.24; after first 8 and attended 30 %, 6 times, 5 of them by up to 0.06.
Where few long runs moved, as in meetings, what stood before them is missing most at their heads: over 34 prompts mean
KL was 0.029 after first 128 (36 % of the moved tokens) and 0.019 after first 64 and attended 30 % (53 %), against 0.036
after first 8 and attended 45 % (52 %)."""

_ROUND = 16  # prompts after which repairs without a chance are dropped
_CODED = 16  # prompts that go through the codecs, whose effect varies little


class Answered(NamedTuple):
    """A trial, and what full prefill says to it. A fact that is asked for is in the answer."""

    trial: Trial
    full: Reference


class _Bare(NamedTuple):
    """A repair that takes no more than it needs.

    In use, calls are filled with what it ranks next. In prompts as short as these that is half as much again and more,
    so that 10 % would be judged by what 15 % do, and not keep its word in long ones.
    """

    repair: AnyRepair

    @property
    def evidence(self) -> str | None:
        return self.repair.evidence

    def least(self, runs: Sequence[MovedRun]) -> int:
        return self.repair.least(runs)

    def rank(self, runs: Sequence[MovedRun], evidence: Evidence) -> Positions:
        return self.repair.rank(runs, evidence)[: self.least(runs)]


class Result(NamedTuple):
    """What one repair did to one answer. `found`: whether the fact is still in it; None where none is asked for.

    `recomputed`: share of the moved tokens computed again. `in_vain`: what was computed before a second look had all
    computed once more, as a share of the moved tokens, too. looked: whether it had.
    lead: nats by which full prefill's likeliest first token leads. shift: nats by which reuse changed the difference
    between its two likeliest, before any second look.
    """

    close: Fidelity
    found: bool | None
    recomputed: float
    lead: float
    shift: float
    in_vain: float = 0.0
    looked: bool = False


def calibrate(
    model: LanguageModel,
    store: KVStore,
    text: str,
    *,
    own: Sequence[Tokens] = (),
    trials: int = 64,
    candidates: Sequence[AnyRepair] = CANDIDATES,
    tokens: int = 450,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> Verdict:
    """Measure `candidates` over `trials` prompts of about `tokens` tokens, keep the verdict with `store`, return it.

    own: prompts of the user, int32 [n] each, in the order in which they came; see `closeness`. From 16 on in which
    something moved, they decide how close answers stay. `store` holds this model's identity; what is captured for the
    trials does not get into it. progress: share done. Raises ValueError when `text` is too short for passages.
    """
    refused = why_engine_does_not_shift(model.engine, [layer.rope for layer in store.layout.layers])
    if refused is not None:
        store.keep_verdict(verdict := Verdict(None, None, reasons=(refused,)))
        return verdict
    results: dict[AnyRepair, list[Result]] = {repair: [] for repair in candidates}
    steps = len(own) + trials
    of_own = closeness(model, own, candidates, lambda done: progress(done / steps))
    tried = _in_reach(list(candidates), of_own)
    coded = dict[Codec, list[CodecTrial]]()
    for number, asked in enumerate(answered(model, text, trials, tokens=tokens, seed=seed), start=1):
        for repair, result in attempt(model, asked, "traffic", tried).items():
            results[repair].append(result)
        if number % _ROUND == 0:
            tried = _in_reach(
                tried, {repair: _judged_by(results[repair], of_own[repair]) for repair in tried}
            )
        if number <= _CODED:
            for codec, trial in _through_codecs(model, asked, store.block_tokens).items():
                coded.setdefault(codec, []).append(trial)
        progress((len(own) + number) / steps)
    verdict = msgspec.structs.replace(
        judge(
            tuple(
                measurement(repair, some, of_own[repair])
                for repair, some in results.items()
                if some or len(of_own[repair]) >= LEAST_PROMPTS
            )
        ),
        codecs=tuple(codec for codec, some in coded.items() if bears(codec, some)),
    )
    store.keep_verdict(verdict)
    return verdict


def closeness(
    model: LanguageModel,
    prompts: Sequence[Tokens],
    repairs: Sequence[AnyRepair],
    progress: Callable[[int], None] = lambda _: None,
) -> dict[AnyRepair, list[Result]]:
    """What each of `repairs` does to the answers to `prompts`, where what came before gives them moved tokens.

    The prompts are served one after another from an empty store, exactly, so each is measured over what those before it
    left. A repair takes what it would in use, so the calls are full. One without a chance is dropped after 16 prompts
    in which something moved, and has fewer than the others then.
    """
    engine, found = model.engine, {repair: list[Result]() for repair in repairs}
    tried, measured = list(repairs), 0
    with kvstore.open(None, identity=model.identity) as store:
        exact = Session(engine, store, "exact")
        for number, prompt in enumerate(prompts, start=1):
            if tried and store.lookup(prompt, moved=True).runs:
                kv = engine.allocate(len(prompt) + FORCED)
                full = reference(engine, kv, engine.prefill(prompt, kv), len(prompt))
                for done in _reuse(engine, store, prompt, full, tried):
                    if done.share is not None:
                        for repair, result in _results(done, full, None).items():
                            found[repair].append(result)
                store.put(prompt, kv)
                engine.recycle(kv)
                measured += 1
                if measured % _ROUND == 0:
                    tried = _in_reach(tried, found)
            else:
                exact.generate(prompt, 1)
            progress(number)
    return found


def answered(
    model: LanguageModel, text: str, count: int, *, tokens: int = 450, seed: int = 0
) -> Iterator[Answered]:
    """Up to `count` trials on which a repair can be measured; fewer where full prefill finds few facts."""
    yielded = 0
    for trial in trials(model, text, 3 * count, tokens=tokens, seed=seed):
        if yielded == count:
            return
        asked = answer_in_full(model, trial)
        if asked is not None:
            yielded += 1
            yield asked


def answer_in_full(model: LanguageModel, trial: Trial) -> Answered | None:
    """A trial with the answer of full prefill; None where that does not find the fact."""
    engine, end = model.engine, len(trial.prompt)
    kv = engine.allocate(end + FORCED)
    full = reference(engine, kv, engine.prefill(trial.prompt, kv), end)
    engine.recycle(kv)
    if trial.fact is None or trial.fact in model.tokenizer.decode(full.answer):
        return Answered(trial, full)
    return None


def attempt(
    model: LanguageModel, asked: Answered, context: Context, repairs: Sequence[AnyRepair]
) -> dict[AnyRepair, Result]:
    """Answer a trial's prompt with moved reuse under each of `repairs`, its passages captured in `context`."""
    engine, (trial, full) = model.engine, asked
    results = dict[AnyRepair, Result]()
    with kvstore.open(None, identity=model.identity) as store:
        exact = Session(engine, store, "exact")
        for capture in trial.captures[context]:
            exact.generate(capture, 1)
        for done in _reuse(engine, store, trial.prompt, full, repairs, bare=True):
            found = None
            if trial.fact is not None:
                answer = answer_of_reuse(engine, done.kv, len(trial.prompt), full, done.close)
                found = trial.fact in model.tokenizer.decode(answer)
            results |= _results(done, full, found)
    return results


class _Reused(NamedTuple):
    """One prefill over moved tokens, and which repairs it says something of: those that keep it, and those that take a
    second look and compute all after all.

    share: of the moved tokens, what was computed again; None where none moved. in_vain: what a second look has computed
    once more, as a share of the moved tokens. shift: as in Result.
    """

    sure: list[AnyRepair]
    unsure: list[AnyRepair]
    kv: KvAllocation
    close: Fidelity
    share: float | None
    in_vain: float
    shift: float


def _reuse(
    engine: StaticGraphEngine,
    store: Store,
    prompt: Tokens,
    full: Reference,
    repairs: Sequence[AnyRepair],
    *,
    bare: bool = False,
) -> Iterator[_Reused]:
    """Prefill `prompt` once under each of `repairs`, whatever second looks they take. KV is good until the next."""
    for first in dict.fromkeys(map(first_of, repairs)):
        kv = engine.allocate(len(prompt) + FORCED)
        done = prefill(engine, store, prompt, kv, cast(AnyRepair, _Bare(first)) if bare else first)
        covered = done.moved + done.recomputed
        sure, unsure = list[AnyRepair](), list[AnyRepair]()
        for repair in repairs:
            if first_of(repair) == first:
                doubts = done.moved and isinstance(repair, WhenSure) and not repair.is_sure(done.logits)
                (unsure if doubts else sure).append(repair)
        close = fidelity(engine, kv, done.logits, len(prompt), full)
        share = done.recomputed / covered if covered else None
        exact = done.exact_until - done.prefix  # computed, too, and not once more
        in_vain = (done.recomputed + done.computed - exact) / max(1, covered)
        second, first = np.argsort(full.logits[0])[-2:]
        change = full.logits[0] - done.logits
        shift = abs(float(change[first] - change[second]))
        yield _Reused(sure, unsure, kv, close, share, in_vain, shift)
        engine.recycle(kv)


def _results(done: _Reused, full: Reference, found: bool | None) -> dict[AnyRepair, Result]:
    """What one prefill says of each repair; `found` is whether the fact is in the answer that it gave."""
    kept = Result(done.close, found, done.share or 0.0, lead(full.logits[0]), done.shift)
    after_all = kept._replace(
        close=unchanged(full),
        found=None if found is None else True,
        recomputed=1.0,
        in_vain=done.in_vain,
        looked=True,
    )
    return dict.fromkeys(done.sure, kept) | dict.fromkeys(done.unsure, after_all)


def _through_codecs(model: LanguageModel, asked: Answered, block_tokens: int) -> dict[Codec, CodecTrial]:
    """Answer a trial's prompt from KV that went through each codec with loss."""
    engine, prompt = model.engine, asked.trial.prompt
    whole = engine.allocate(len(prompt) + FORCED)
    engine.prefill(prompt, whole)
    found = {
        codec: go_on(
            engine,
            whole,
            prompt,
            asked.full,
            partial(pass_through, codec, model.identity.layout, block_tokens),
        )
        for codec in MOST_CODEC_KL
    }
    engine.recycle(whole)
    return found


def measurement(repair: AnyRepair, results: Sequence[Result], own: Sequence[Result] = ()) -> Measurement:
    """The means of `results`; where there are 16 of the user's own prompts, closeness and cost are theirs."""
    found = [result.found for result in results if result.found is not None]
    judged = _judged_by(results, own)
    close = [result.close for result in judged]
    return Measurement(
        repair=repair,
        prompts=len(close),
        kl_first=float(np.mean([each.kl[0] for each in close])),
        kl_mean=float(np.mean([each.kl.mean() for each in close])),
        first_agrees=float(np.mean([each.agrees[0] for each in close])),
        all_agree=float(np.mean([each.agrees.mean() for each in close])),
        recall=float(np.mean(found)) if found else 0.0,
        recall_prompts=len(found),
        recomputed=float(np.mean([result.recomputed for result in judged])),
        in_vain=float(np.mean([result.in_vain for result in judged])),
        looked=float(np.mean([result.looked for result in judged])),
        first_at_least=at_least(judged, repair.margin if isinstance(repair, WhenSure) else 0.0),
    )


def at_least(results: Sequence[Result], margin: float = 0.0) -> float:
    """What share of first tokens stays the likeliest over many prompts like these, with a confidence of 95 %.

    margin: below which a second look follows. Another token leads, and by the margin, where reuse shifts the difference
    to its side, which is one of two, by at least the lead and the margin. So each lead is held against the shifts of
    all prompts, not of its own alone, as if the two were independent. Counting needs many more prompts: a repair with
    0 misses in 46 had 6 in 50 others, another with 0 in 49 had 5 in 100. Over notes, screens and tool schemas this
    expects what is counted within 6 points, where that is below 15 %; above it is too hopeful, but there misses are
    plain to see. The standard error is that of a U-statistic (Hoeffding, A class of statistics with asymptotically
    normal distribution, 1948, section 7).
    """
    shifts = np.array([each.shift for each in results])
    leads = np.array([each.lead for each in results])
    excess = shifts - leads[:, None]  # by lead, by shift
    missed = (excess >= margin if margin else excess > 0) / 2
    share = missed.mean(axis=1) + missed.mean(axis=0)
    error = share.std(ddof=1) / math.sqrt(len(results)) if len(results) > 1 else 0.0
    return 1 - float(missed.mean() + ONE_SIDED * error)


def _judged_by(results: Sequence[Result], own: Sequence[Result]) -> Sequence[Result]:
    return own if len(own) >= LEAST_PROMPTS else results


def _in_reach(repairs: Sequence[AnyRepair], found: Mapping[AnyRepair, Sequence[Result]]) -> list[AnyRepair]:
    """Those of `repairs` that may still pass; all of which there are too few prompts to tell."""
    return [
        repair for repair in repairs if len(found[repair]) < LEAST_PROMPTS or not _out_of_reach(found[repair])
    ]


def _out_of_reach(results: Sequence[Result]) -> bool:
    """Whether neither policy is going to choose what did this: it misses a bar by more than chance explains."""
    above = (
        _surely_above(MOST_KL, [float(each.close.kl.mean()) for each in results]),
        _surely_above(1.0, [each.recomputed + each.in_vain for each in results]),
        _surely_above(0.5, [float(each.looked) for each in results]),
    )
    return any(above) or not within_chance(sum(not each.close.agrees[0] for each in results), len(results))


def _surely_above(limit: float, values: Sequence[float]) -> bool:
    """Whether their mean is above, by three standard errors and more."""
    return float(np.mean(values) - 3 * np.std(values, ddof=1) / math.sqrt(len(values))) > limit
