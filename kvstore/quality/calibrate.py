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
by more than chance explains is not tried on further prompts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, cast

import msgspec
import numpy as np

import kvstore
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
)
from kvstore.pipeline.self_test import why_not_shift

from ..codec import Codec
from ..language_model import LanguageModel
from ..prefill import prefill
from ..session import Session
from ..store import KVStore
from .codec_trial import MOST_KL as MOST_CODEC_KL
from .codec_trial import CodecTrial, bears, go_on, pass_through
from .fidelity import FORCED, Fidelity, Reference, answer_of_reuse, fidelity, reference
from .reuse import LEAST_AGREEMENT, LEAST_PROMPTS, MOST_KL, Measurement, Verdict, judge
from .trials import Context, Tokens, Trial, trials

CANDIDATES: tuple[AnyRepair, ...] = (
    Nothing(),
    FirstTokens(4),
    FirstTokens(8),
    WhenSure(FirstTokens(8), 0.3),
    FirstTokens(16),
    FirstTokens(32),
    Attended(0.10),
    Attended(0.15),
    Attended(0.25),
    Attended(0.40),
    Both(FirstTokens(4), Attended(0.10)),
)

_ROUND = 16  # prompts after which repairs without a chance are dropped
_CHANCE = 0.01
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


def _bare(repair: AnyRepair) -> AnyRepair:
    if isinstance(repair, WhenSure):
        return WhenSure(cast(FirstTokens, _Bare(repair.repair)), repair.margin)
    return cast(AnyRepair, _Bare(repair))


class Result(NamedTuple):
    """What one repair did to one answer. `found`: whether the fact is still in it; None where none is asked for.

    `recomputed`: share of the moved tokens computed again.
    """

    close: Fidelity
    found: bool | None
    recomputed: float


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
    refused = why_not_shift(model.engine, [layer.rope for layer in store.layout.layers])
    if refused is not None:
        store.keep_verdict(verdict := Verdict(None, None, reasons=(refused,)))
        return verdict
    results: dict[AnyRepair, list[Result]] = {repair: [] for repair in candidates}
    steps = len(own) + trials
    close = closeness(model, own, candidates, lambda done: progress(done / steps))
    tried = list(results)
    coded = dict[Codec, list[CodecTrial]]()
    for number, asked in enumerate(answered(model, text, trials, tokens=tokens, seed=seed), start=1):
        for repair, result in attempt(model, asked, "traffic", tried).items():
            results[repair].append(result)
        if number % _ROUND == 0:
            tried = [
                repair for repair in tried if not _out_of_reach(_judged_by(results[repair], close[repair]))
            ]
        if number <= _CODED:
            for codec, trial in _through_codecs(model, asked, store.block_tokens).items():
                coded.setdefault(codec, []).append(trial)
        progress((len(own) + number) / steps)
    verdict = msgspec.structs.replace(
        judge(tuple(measurement(repair, some, close[repair]) for repair, some in results.items() if some)),
        codecs=tuple(codec for codec, some in coded.items() if bears(codec, some)),
    )
    store.keep_verdict(verdict)
    return verdict


def closeness(
    model: LanguageModel,
    prompts: Sequence[Tokens],
    repairs: Sequence[AnyRepair],
    progress: Callable[[int], None] = lambda _: None,
) -> dict[AnyRepair, list[Fidelity]]:
    """How close each of `repairs` keeps the answers to `prompts`, where what came before gives them moved tokens.

    The prompts are served one after another from an empty store, exactly, so each is measured over what those before it
    left. A repair takes what it would in use, so the calls are full.
    """
    engine, found = model.engine, {repair: list[Fidelity]() for repair in repairs}
    with kvstore.open(None, identity=model.identity) as store:
        exact = Session(engine, store, "exact")
        for number, prompt in enumerate(prompts, start=1):
            full: Reference | None = None
            end = len(prompt)
            for repair in repairs if store.lookup(prompt, moved=True).runs else ():
                kv = engine.allocate(end + FORCED)
                if full is None:
                    full = reference(engine, kv, engine.prefill(prompt, kv), end)
                done = prefill(engine, store, prompt, kv, repair)
                if done.moved or done.recomputed:
                    found[repair].append(fidelity(engine, kv, done.logits, end, full))
                engine.recycle(kv)
            exact.generate(prompt, 1)
            progress(number)
    return found


def answered(
    model: LanguageModel, text: str, count: int, *, tokens: int = 450, seed: int = 0
) -> Iterator[Answered]:
    """Up to `count` trials on which a repair can be measured; fewer where full prefill finds few facts."""
    engine, yielded = model.engine, 0
    for trial in trials(model, text, 3 * count, tokens=tokens, seed=seed):
        if yielded == count:
            return
        end = len(trial.prompt)
        kv = engine.allocate(end + FORCED)
        full = reference(engine, kv, engine.prefill(trial.prompt, kv), end)
        engine.recycle(kv)
        if trial.fact is None or trial.fact in model.tokenizer.decode(full.answer):
            yielded += 1
            yield Answered(trial, full)


def attempt(
    model: LanguageModel, asked: Answered, context: Context, repairs: Sequence[AnyRepair]
) -> dict[AnyRepair, Result]:
    """Answer a trial's prompt with moved reuse under each of `repairs`, its passages captured in `context`."""
    engine, (trial, full) = model.engine, asked
    end, results = len(trial.prompt), dict[AnyRepair, Result]()
    with kvstore.open(None, identity=model.identity) as store:
        exact = Session(engine, store, "exact")
        for capture in trial.captures[context]:
            exact.generate(capture, 1)
        for repair in repairs:
            kv = engine.allocate(end + FORCED)
            done = prefill(engine, store, trial.prompt, kv, _bare(repair))
            close = fidelity(engine, kv, done.logits, end, full)
            found = None
            if trial.fact is not None:
                answer = answer_of_reuse(engine, kv, end, full, close)
                found = trial.fact in model.tokenizer.decode(answer)
            covered = done.moved + done.recomputed
            again = done.recomputed / covered if covered else float(done.unsure)
            results[repair] = Result(close, found, again)
            engine.recycle(kv)
    return results


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


def measurement(repair: AnyRepair, results: Sequence[Result], own: Sequence[Fidelity] = ()) -> Measurement:
    """The means of `results`, at least one; where there are 16 of the user's own prompts, closeness is theirs."""
    found = [result.found for result in results if result.found is not None]
    close = _judged_by(results, own)
    return Measurement(
        repair=repair,
        prompts=len(close),
        kl_first=float(np.mean([each.kl[0] for each in close])),
        kl_mean=float(np.mean([each.kl.mean() for each in close])),
        first_agrees=float(np.mean([each.agrees[0] for each in close])),
        all_agree=float(np.mean([each.agrees.mean() for each in close])),
        recall=float(np.mean(found)) if found else 0.0,
        recall_prompts=len(found),
        recomputed=float(np.mean([result.recomputed for result in results])),
    )


def _judged_by(results: Sequence[Result], own: Sequence[Fidelity]) -> Sequence[Fidelity]:
    return own if len(own) >= LEAST_PROMPTS else [result.close for result in results]


def _out_of_reach(close: Sequence[Fidelity]) -> bool:
    """Whether neither policy is going to choose what kept so close: it misses a bar by more than chance explains."""
    kl = np.array([each.kl.mean() for each in close])
    if kl.mean() - 3 * kl.std(ddof=1) / math.sqrt(len(kl)) > MOST_KL:
        return True
    misses, n = sum(not each.agrees[0] for each in close), len(close)
    fewer = sum(
        math.comb(n, k) * (1 - LEAST_AGREEMENT) ** k * LEAST_AGREEMENT ** (n - k) for k in range(misses)
    )
    return 1 - fewer < _CHANCE
