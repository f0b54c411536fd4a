"""The quality gate: measures what moved reuse does to a model's answers, and which repair each policy may use.

Prompts are made of passages of a text, each with one of several similar facts in it, behind one system prompt. Every
passage was captured before, behind the system prompt and other passages, as real traffic captures it. Each prompt is
answered by full prefill, and with each repair over the moved passages:

- KL(full || reuse) at the first token and, teacher-forced, over 16 tokens, and whether the most likely token stays;
- recall: of the facts that full prefill finds, how many reuse still finds. KL alone does not tell: with five similar
  facts in five passages lookup fell from 0.62 to 0.2 while KL stayed small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline.recompute import AnyRepair, Attended, Both, FirstTokens, Nothing

from .fidelity import FORCED, Fidelity, Reference, fidelity, greedy, reference
from .language_model import LanguageModel
from .prefill import prefill
from .reuse import Measurement, Verdict, judge
from .session import Session
from .store import KVStore

CANDIDATES: tuple[AnyRepair, ...] = (
    Nothing(),
    FirstTokens(8),
    FirstTokens(16),
    FirstTokens(32),
    Attended(0.10),
    Attended(0.15),
    Attended(0.25),
    Both(FirstTokens(8), Attended(0.15)),
)

_PASSAGES = 5
_PLACES = ("north", "south", "east", "west", "harbour", "hill", "river", "forest", "valley", "island")
_SYSTEM = "You are a helpful assistant. Answer the question from the passages below."


class Trial(NamedTuple):
    """One prompt: token ids, what full prefill says to it, and the fact that it asks for (None: an open question)."""

    prompt: NDArray[np.int32]
    full: Reference
    fact: str | None
    found: bool  # whether full prefill's answer holds the fact


def calibrate(
    model: LanguageModel,
    store: KVStore,
    text: str,
    *,
    trials: int = 64,
    candidates: Sequence[AnyRepair] = CANDIDATES,
    seed: int = 0,
    progress: Callable[[float], None] = lambda _: None,
) -> Verdict:
    """Measure `candidates` over `trials` prompts made of `text`, keep the verdict with the store, and return it.

    `store` holds this model's identity; what is captured for the trials stays in it. progress: share done.
    """
    random = np.random.default_rng(seed)
    passages = _passages(model, text)
    made: list[Trial] = []
    results: dict[AnyRepair, list[_Result]] = {repair: [] for repair in candidates}
    for number in range(trials):
        chosen = random.choice(len(passages), _PASSAGES, replace=False)
        facts = _facts(random)
        told = [_with_fact(passages[at], fact, random) for at, fact in zip(chosen, facts, strict=True)]
        _capture(model, store, told, random)
        trial = _trial(model, told, facts, ask_fact=number % 2 == 0, random=random)
        made.append(trial)
        for repair in candidates:
            results[repair].append(_try(model, store, trial, repair))
        progress((number + 1) / trials)
    verdict = judge(tuple(_summary(repair, made, results[repair]) for repair in candidates))
    store.keep_verdict(verdict)
    return verdict


class _Result(NamedTuple):
    close: Fidelity
    found: bool
    recomputed: float


def _try(model: LanguageModel, store: KVStore, trial: Trial, repair: AnyRepair) -> _Result:
    """Answer a trial's prompt with moved reuse under `repair`, teacher-forced with full prefill's answer."""
    engine, end = model.engine, len(trial.prompt)
    kv = engine.allocate(end + FORCED)
    done = prefill(engine, store, trial.prompt, kv, repair)
    close = fidelity(engine, kv, done.logits, end, trial.full)
    found = trial.found and _holds(model, greedy(engine, kv, done.logits, end), trial.fact)
    covered = done.moved + done.recomputed
    return _Result(close, found, done.recomputed / covered if covered else 0.0)


def _summary(repair: AnyRepair, trials: Sequence[Trial], results: Sequence[_Result]) -> Measurement:
    asked = [bool(result.found) for trial, result in zip(trials, results, strict=True) if trial.found]
    return Measurement(
        repair=repair,
        prompts=len(results),
        kl_first=float(np.mean([result.close.kl[0] for result in results])),
        kl_mean=float(np.mean([result.close.kl.mean() for result in results])),
        first_agrees=float(np.mean([result.close.agrees[0] for result in results])),
        all_agree=float(np.mean([result.close.agrees.mean() for result in results])),
        recall=float(np.mean(asked)) if asked else 0.0,
        recall_prompts=len(asked),
        recomputed=float(np.mean([result.recomputed for result in results])),
    )


def _passages(model: LanguageModel, text: str, tokens: int = 140) -> list[str]:
    """Consecutive passages of about `tokens` tokens, each a whole number of lines."""
    passages, lines, size = [], list[str](), 0
    for line in text.splitlines():
        lines.append(line)
        size += len(model.tokenizer.encode(line)) + 1
        if size >= tokens:
            passages.append("\n".join(lines).strip())
            lines, size = [], 0
    return [passage for passage in passages if passage]


def _facts(random: np.random.Generator) -> list[tuple[str, str]]:
    places = random.choice(_PLACES, _PASSAGES, replace=False)
    codes = random.choice(np.arange(1000, 10000), _PASSAGES, replace=False)
    return [(str(place), str(code)) for place, code in zip(places, codes, strict=True)]


def _with_fact(passage: str, fact: tuple[str, str], random: np.random.Generator) -> str:
    """The passage with the fact at its start, middle or end."""
    lines = passage.splitlines()
    at = [0, len(lines) // 2, len(lines)][int(random.integers(3))]
    place, code = fact
    return "\n".join([*lines[:at], f"The access code of the {place} warehouse is {code}.", *lines[at:]])


def _prompt(model: LanguageModel, passages: Sequence[str], question: str) -> NDArray[np.int32]:
    return model.chat_prompt(_SYSTEM, "\n\n".join([*passages, question]))


def _capture(
    model: LanguageModel, store: KVStore, passages: Sequence[str], random: np.random.Generator
) -> None:
    """Let each passage be seen in a prompt of its own kind: behind the system prompt and other passages."""
    order = random.permutation(len(passages))
    half = len(order) // 2
    for first, second in ((order[:half], order[half:]), (order[half:], order[:half])):
        shown = [passages[at] for at in (*first, *second)]
        Session(model.engine, store, "exact").generate(_prompt(model, shown, "What is this about?"), 1)


def _trial(
    model: LanguageModel,
    passages: Sequence[str],
    facts: Sequence[tuple[str, str]],
    *,
    ask_fact: bool,
    random: np.random.Generator,
) -> Trial:
    order = random.permutation(len(passages))
    place, code = facts[int(random.integers(len(facts)))]
    question = (
        f"What is the access code of the {place} warehouse? Answer with the number."
        if ask_fact
        else "What are these passages about? Answer in one sentence."
    )
    prompt = _prompt(model, [passages[at] for at in order], question)
    engine, fact = model.engine, code if ask_fact else None
    kv = engine.allocate(len(prompt) + FORCED)
    full = reference(engine, kv, engine.prefill(prompt, kv), len(prompt))
    return Trial(prompt, full, fact, _holds(model, full.answer, fact))


def _holds(model: LanguageModel, answer: Sequence[int], fact: str | None) -> bool:
    return fact is not None and fact in model.tokenizer.decode(answer)
