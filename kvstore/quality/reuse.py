"""How far an engine or user lets moved runs stand in for computed tokens, and what a model was measured to bear.

    exact     prefix runs only: bit-identical KV
    careful   moved runs, repaired so that facts in them are still found; exact where no repair achieves that
    fast      moved runs at the cheapest repair whose answers stay close to those of full prefill

Which repair that is differs from model to model, so it is measured (see `calibrate`), and the verdict is kept with
the identity. Without a verdict nothing is approximated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvstore.pipeline.recompute import (
    AnyRepair,
    Attended,
    Both,
    Deviating,
    Everything,
    FirstTokens,
    Nothing,
    WhenSure,
    first_of,
)

from ..codec import Codec

Policy = Literal["exact", "careful", "fast"]


class Measurement(msgspec.Struct, frozen=True):
    """What one repair did to the answers, over `prompts` prompts, against full prefill.

    kl_first, kl_mean: KL(full || reuse) in nats at the first token, and over 16 teacher-forced ones.
    first_agrees, all_agree: share of first tokens, and of the 16, that stay the most likely one.
    first_at_least: what that share of first tokens is at least, surely enough, see `calibrate.at_least`.
    recall: of the facts that full prefill finds, the share still found; recall_prompts says of how many.
    recomputed: share of the moved tokens computed again. in_vain: what was computed before second looks had all
    computed once more, as a share of the moved tokens, too. looked: share of the prompts in which one had.
    """

    repair: AnyRepair
    prompts: int
    kl_first: float
    kl_mean: float
    first_agrees: float
    all_agree: float
    recall: float
    recall_prompts: int
    recomputed: float
    in_vain: float = 0.0
    looked: float = 0.0
    first_at_least: float = 1.0


class Verdict(msgspec.Struct, frozen=True):
    """The repair that each policy uses for one identity; None means prefix runs only, `reasons` say why.

    codecs: those with loss that the policies `careful` and `fast` may keep KV in, see `codec`.
    """

    fast: AnyRepair | None
    careful: AnyRepair | None
    measurements: tuple[Measurement, ...] = ()
    reasons: tuple[str, ...] = ()
    codecs: tuple[Codec, ...] = ()

    def repair(self, policy: Policy) -> AnyRepair | None:
        """What `policy` recomputes of moved runs; None: it uses none."""
        return {"exact": None, "careful": self.careful, "fast": self.fast}[policy]

    def why_none(self, policy: Policy) -> str | None:
        """Why `policy` has no repair; None when it has one."""
        if policy == "exact":
            return "policy exact uses prefixes only"
        if self.repair(policy) is not None:
            return None
        return "; ".join(self.reasons) or f"the verdict names no repair for policy {policy}"

    def measured(self, policy: Policy) -> Measurement | None:
        """The figures on which `policy` stands; None where there are none."""
        repair = self.repair(policy)
        return next(
            (each for each in self.measurements if repair is not None and each.repair == repair), None
        )


def named(repair: AnyRepair) -> str:
    """A repair in words."""
    match repair:
        case Nothing():
            return "no repair"
        case FirstTokens(k):
            return f"first {k} tokens of each run"
        case Attended(share):
            return f"{share:.0%} that the question attends to"
        case Deviating(share):
            return f"{share:.0%} that deviate most"
        case Both(first, then):
            return f"{named(first)}, then {named(then)}"
        case Everything():
            return "every token"
        case WhenSure(first, margin):
            return f"{named(first)}; all from the first run on where the answer leads by less than {margin:g} nats"


def figures(measured: Measurement) -> str:
    """What a repair came to, in words."""
    facts = measured.recall_prompts
    recall = f"recall {measured.recall:.0%} of {facts} facts" if facts else "recall not measured"
    return (
        f"mean KL {measured.kl_mean:.3f}, first tokens equal in {measured.first_agrees:.0%} of "
        f"{measured.prompts} prompts, {recall}"
    )


NOT_MEASURED = Verdict(None, None, reasons=("this identity was never measured; run `kvstore calibrate`",))

MOST_KL, LEAST_AGREEMENT, LEAST_RECALL = 0.04, 0.97, 0.90
LEAST_PROMPTS = 16
"""Prompts, at least, for closeness to say anything, and facts that full prefill finds for recall to do so."""

ONE_SIDED = 1.645
"""Standard errors: 95 % of a normal distribution lie below."""

_CHANCE = 0.01
_HARDLY_MORE = 0.10
"""Of the moved tokens. Two second looks in 49 prompts, more or fewer, are chance, and cost half of this."""
_EVIDENCE = 0.03
"""What evidence costs, as a share of the moved tokens computed again: a probe took 2 % of a prefill of 940 tokens, the
deviation of all tokens 5 %."""


def cost(measured: Measurement) -> float:
    """What a repair computes, all in all, as a share of the moved tokens."""
    return measured.recomputed + measured.in_vain + (0.0 if measured.repair.evidence is None else _EVIDENCE)


def unlooked_cost(measured: Measurement) -> float:
    """What it computes for a prompt that no second look follows, which is the usual one, as `cost` counts."""
    others = 1 - measured.looked
    kept = (measured.recomputed - measured.looked) / others if others else 1.0
    return kept + (0.0 if measured.repair.evidence is None else _EVIDENCE)


def pays(measured: Measurement) -> bool:
    """Whether it costs less than computing the moved tokens: on the whole, and, surely enough, for most requests."""
    error = math.sqrt(measured.looked * (1 - measured.looked) / measured.prompts)
    return cost(measured) <= 1 and measured.looked + ONE_SIDED * error <= 0.5


def keeps_close(measured: Measurement) -> bool:
    """Whether answers stay close enough: as counted, and surely enough, since few prompts count few misses."""
    agreement = min(measured.first_agrees, measured.first_at_least)
    return measured.kl_mean <= MOST_KL and agreement >= LEAST_AGREEMENT


def within_chance(misses: int, prompts: int) -> bool:
    """Whether a repair whose first tokens agree just often enough shows so many misses in one series of 100 or more."""
    fewer = sum(
        math.comb(prompts, k) * (1 - LEAST_AGREEMENT) ** k * LEAST_AGREEMENT ** (prompts - k)
        for k in range(misses)
    )
    return 1 - fewer >= _CHANCE


def judge(measurements: tuple[Measurement, ...]) -> Verdict:
    """A repair, as cheap as any that passes, for each policy; `measurements` of all that may be chosen, in any order.

    fast: mean KL <= 0.04 and first tokens agree in >= 97 %, counted and surely, over 16 prompts or more, at no more
    than computing the moved tokens costs, and with second looks that surely compute all of no more than half of the
    prompts: else most requests were slower than without reuse. careful: that, and recall >= 0.90 of full prefill, over
    16 facts or more. Which of those that pass and cost about as little as the cheapest, see `_chosen`.
    """
    told = [each for each in sorted(measurements, key=cost) if each.prompts >= LEAST_PROMPTS]
    faithful = [each for each in told if keeps_close(each)]
    close = [each for each in faithful if pays(each)]
    enough = [each for each in close if each.recall_prompts >= LEAST_PROMPTS]
    recalling = [each for each in enough if each.recall >= LEAST_RECALL]
    reasons = []
    if not told:
        most = max((each.prompts for each in measurements), default=0)
        reasons.append(f"closeness over {most} prompts, {LEAST_PROMPTS} are needed; give more trials")
    elif not faithful:
        reasons.append(
            f"no repair keeps mean KL <= {MOST_KL} and agreement >= {LEAST_AGREEMENT:.0%}; {_nearest(told)}"
        )
    elif not close:
        reasons.append(
            f"repair would not pay for most requests: {named(faithful[0].repair)} computes "
            f"{cost(faithful[0]):.0%} of what moved, with second looks in {faithful[0].looked:.0%} of the prompts"
        )
    elif not enough:
        most = max(each.recall_prompts for each in close)
        reasons.append(f"careful: recall over {most} prompts, {LEAST_PROMPTS} are needed; give more trials")
    elif not recalling:
        best = max(enough, key=lambda each: each.recall)
        kept = f"{best.recall:.0%} of {best.recall_prompts} prompts"
        reasons.append(f"careful: no repair keeps {LEAST_RECALL:.0%} of the recall, the best {kept}")
    return Verdict(
        _chosen(close).repair if close else None,
        _chosen(recalling).repair if recalling else None,
        measurements,
        tuple(reasons),
    )


def _chosen(passing: Sequence[Measurement]) -> Measurement:
    """Of `passing`, which are in order of cost, and of those that cost hardly more than the first of them: the repair
    that computes least for the usual prompt, with the widest margin for second looks.

    Over notes of 1,920 tokens the first 4 tokens of each run came to 22 % of the moved tokens, what the question
    attends to to 21 %: the same, within chance. But the usual prompt had 2 % computed again, or 8 % and a probe.

    The cheapest margin that passes only just passes: over notes the first 4 tokens of each run and a margin of 0.2,
    sure of 97.0 % over 49 prompts, missed 4 first tokens of 100 others. The margin of 0.5 computes 7 % of the moved
    tokens more, and missed one.
    """
    alike = [each for each in passing if cost(each) <= cost(passing[0]) + _HARDLY_MORE]
    least = first_of(min(alike, key=unlooked_cost).repair)
    return max(
        (each for each in alike if first_of(each.repair) == least),
        key=lambda each: each.repair.margin if isinstance(each.repair, WhenSure) else 0.0,
    )


def _nearest(measurements: Sequence[Measurement]) -> str:
    """What the one nearest to the bars of closeness came to, over how many prompts, and whether more may help."""
    nearest = min(
        measurements,
        key=lambda each: max(
            each.kl_mean / MOST_KL,
            (1 - min(each.first_agrees, each.first_at_least)) / (1 - LEAST_AGREEMENT),
        ),
    )
    misses = round((1 - nearest.first_agrees) * nearest.prompts)
    expected = (
        ""
        if nearest.first_at_least >= LEAST_AGREEMENT
        else f", up to {1 - nearest.first_at_least:.0%} expected"
    )
    chance = nearest.kl_mean <= MOST_KL and within_chance(misses, nearest.prompts)
    return (
        f"the nearest comes to KL {nearest.kl_mean:.3f} and {misses} misses in {nearest.prompts} prompts{expected}"
        f"{', which may be chance: give more trials or prompts' if chance else ''}"
    )
