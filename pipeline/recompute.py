"""Which tokens of moved runs are computed again, since their KV lacks attention to what now precedes them.

A repair ranks the tokens of all moved runs, best first, and says how many it needs at least. The caller may take more
of the ranking for nothing: a static graph computes a fixed number of tokens, so the rest of the last call is paid for
anyway (see `select`). A repair sees positions and evidence, never KV.

    Nothing             full reuse; a control
    FirstTokens(k)      the first k of each run, known ahead (EPIC, Hu et al. 2024, arXiv 2410.15332, section 4):
                        repairs the false attention sink at the head of a run
    Attended(share)     what the question attends to over the blended KV, by spans (after ProphetKV, arXiv 2602.02579)
    Deviating(share)    where keys and values of an early layer differ most from fresh ones (CacheBlend, Yao et al.
                        2024, arXiv 2405.16444, section 4)
    Both(a, b)          what a needs, then b's ranking
    Everything          every token; equals prefill exactly
    WhenSure(a, margin) what a needs; and everything where the answer then hangs in the balance

Tried on SmolLM2-135M and left out. Numbers are differences in log KL over 16 tokens against one of these at as many
tokens, mean and standard error over n paired prompts; less is better.

    the last 8 of each run instead of the first 8         +0.20 +- 0.07, n = 40
    4, 4, 8, 16 of the runs, most nearest the question    -0.10 +- 0.05, n = 32; on real notes +0.05 +- 0.07, n = 13
    attended 10 % in two rounds, with a second probe      -0.03 +- 0.02, n = 40
    the attended join at half depth, which needs no probe +0.23 +- 0.06, n = 16
    attention of the last 16 tokens of the question       -0.01 +- 0.03, n = 32; half the probe where that is its graph
    deviation 10 % instead of attended 10 %               +0.24 +- 0.18, n = 9; and 5 % of a prefill instead of 2 %

Not tried: anchors, tokens put between chunks to take the false sinks; recompute of values alone, keys staying as they
were turned; a probe that shares its call with other tokens, which would save its launch and its padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

PROBED = 2 / 5, 8 / 15
"""Which layers' attention `Attended` goes by, as shares of the depth; a probe stops behind them.

Measured over 450-token prompts of SmolLM2-135M: as telling as the middle third or the later half of the layers.
"""

QUESTION = 16
"""The question whose attention chooses what is recomputed: so many of the last tokens (32 do no better, measured)."""

Positions = NDArray[np.int64]


class MovedRun(NamedTuple):
    """Tokens [target, target + length) of a prompt, whose KV was loaded from elsewhere and turned."""

    target: int
    length: int


class Evidence(NamedTuple):
    """What was measured over the blended KV, by position in the prompt, float32 [prompt tokens]; None if it was not.

    attention: softmax probabilities of the question's tokens, summed over heads and layers.
    deviation: squared difference of keys and values from fresh ones.
    """

    attention: NDArray[np.float32] | None = None
    deviation: NDArray[np.float32] | None = None


class Repair(Protocol):
    """A way of choosing. `evidence` names what `rank` needs measured: "attention", "deviation", or None."""

    @property
    def evidence(self) -> str | None: ...

    def least(self, runs: Sequence[MovedRun]) -> int:
        """How many tokens have to be computed again at least."""
        ...

    def rank(self, runs: Sequence[MovedRun], evidence: Evidence) -> Positions:
        """Positions of the moved tokens, best first; at least `least` of them."""
        ...


def select(repair: Repair, runs: Sequence[MovedRun], evidence: Evidence, spare: int = 0) -> Positions:
    """Ascending positions to compute again: what the repair needs, and up to `spare` more that cost nothing.

    Without runs there is nothing to choose, and no evidence is looked at.
    """
    if not runs:
        return _positions(runs)
    return np.sort(repair.rank(runs, evidence)[: repair.least(runs) + spare])


class Nothing(msgspec.Struct, frozen=True, tag="nothing"):
    """Full reuse: nothing is computed again, not even where it would be free."""

    evidence: None = None

    def least(self, runs: Sequence[MovedRun]) -> int:
        del runs
        return 0

    def rank(self, runs: Sequence[MovedRun], evidence: Evidence) -> Positions:
        del runs, evidence
        return np.empty(0, dtype=np.int64)


class FirstTokens(msgspec.Struct, frozen=True, tag="first"):
    """The first `k` tokens of each run; more of the ranking lengthens all runs' heads alike."""

    k: int
    evidence: None = None

    def least(self, runs: Sequence[MovedRun]) -> int:
        return sum(min(self.k, run.length) for run in runs)

    def rank(self, runs: Sequence[MovedRun], evidence: Evidence) -> Positions:
        del evidence
        depth = _positions([MovedRun(0, run.length) for run in runs])
        return _positions(runs)[np.argsort(depth, kind="stable")]


class Attended(msgspec.Struct, frozen=True, tag="attended"):
    """The `share` of the moved tokens that the question attends to most, averaged over `span` neighbours.

    Averaging chooses spans instead of single tokens: a fact is a few tokens long.
    """

    share: float
    span: int = 9
    evidence: str = "attention"

    def least(self, runs: Sequence[MovedRun]) -> int:
        return round(self.share * sum(run.length for run in runs))

    def rank(self, runs: Sequence[MovedRun], evidence: Evidence) -> Positions:
        assert evidence.attention is not None
        smooth = np.convolve(evidence.attention, np.full(self.span, 1 / self.span), mode="same")
        positions = _positions(runs)
        return positions[np.argsort(-smooth[positions], kind="stable")]


class Deviating(msgspec.Struct, frozen=True, tag="deviating"):
    """The `share` of the moved tokens whose early keys and values are furthest from fresh ones."""

    share: float
    evidence: str = "deviation"

    def least(self, runs: Sequence[MovedRun]) -> int:
        return round(self.share * sum(run.length for run in runs))

    def rank(self, runs: Sequence[MovedRun], evidence: Evidence) -> Positions:
        assert evidence.deviation is not None
        positions = _positions(runs)
        return positions[np.argsort(-evidence.deviation[positions], kind="stable")]


class Both(msgspec.Struct, frozen=True, tag="both"):
    """What `first` needs, then what `then` ranks highest of the rest."""

    first: FirstTokens
    then: Attended | Deviating

    @property
    def evidence(self) -> str:
        return self.then.evidence

    def least(self, runs: Sequence[MovedRun]) -> int:
        total = sum(run.length for run in runs)
        return min(total, self.first.least(runs) + self.then.least(runs))

    def rank(self, runs: Sequence[MovedRun], evidence: Evidence) -> Positions:
        heads = self.first.rank(runs, evidence)[: self.first.least(runs)]
        others = self.then.rank(runs, evidence)
        return np.concatenate([heads, others[~np.isin(others, heads)]])


class Everything(msgspec.Struct, frozen=True, tag="everything"):
    """Every moved token: the oracle."""

    evidence: None = None

    def least(self, runs: Sequence[MovedRun]) -> int:
        return sum(run.length for run in runs)

    def rank(self, runs: Sequence[MovedRun], evidence: Evidence) -> Positions:
        del evidence
        return _positions(runs)


class WhenSure(msgspec.Struct, frozen=True, tag="sure"):
    """What `repair` does, then a look at the answer: it is kept where the likeliest next token leads by `margin` nats.

    Where it does not, all from the first moved token on is computed after all, and the answer is full prefill's.
    Reuse changes the first token mostly where two are about as likely: of 100 prompts of real notes, first-4 changed it
    in 4, three of them among the 12 whose two likeliest tokens were within 0.5 then.

    It tells nothing of facts, which come later in an answer, after words that are the same for any of them. Over 49
    prompts whose fact full prefill finds, attended 25 % kept 78 %, and 80 % with a margin of 1, below which half of all
    open questions are. A look at the first 12 tokens of the answer, margin 0.3, would keep 92 %; but one of these
    hangs in the balance in 95 % of the answers to open questions, after full prefill, too.
    """

    repair: Nothing | FirstTokens | Attended | Deviating | Both
    margin: float

    @property
    def evidence(self) -> str | None:
        return self.repair.evidence

    def least(self, runs: Sequence[MovedRun]) -> int:
        return self.repair.least(runs)

    def rank(self, runs: Sequence[MovedRun], evidence: Evidence) -> Positions:
        return self.repair.rank(runs, evidence)

    def is_sure(self, logits: NDArray[np.float32]) -> bool:
        """Whether the likeliest token leads by the margin; `logits` float32 [vocab]."""
        return lead(logits) >= self.margin


def lead(logits: NDArray[np.float32]) -> float:
    """Nats by which the likeliest token leads the next; `logits` float32 [vocab]."""
    second, first = np.partition(logits, -2)[-2:]
    return float(first - second)


AnyRepair = Nothing | FirstTokens | Attended | Deviating | Both | Everything | WhenSure


def first_of(repair: AnyRepair) -> AnyRepair:
    """What a repair does before any second look."""
    return repair.repair if isinstance(repair, WhenSure) else repair


def _positions(runs: Sequence[MovedRun]) -> Positions:
    if not runs:
        return np.empty(0, dtype=np.int64)
    return np.concatenate([np.arange(run.target, run.target + run.length, dtype=np.int64) for run in runs])
