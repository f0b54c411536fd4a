"""Which of the moved runs that were found a prefill uses, and why not the others.

It is decided here alone: `prefill` does it, `explain` tells it beforehand, and both are right about each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline.recompute import PROBED, QUESTION, AnyRepair, Both, Evidence, Nothing, select
from kvstore.pipeline.recompute import MovedRun as Run
from kvstore.pipeline.schedule import CallCosts

from .moved import SHORTEST, MovedRun

LAST_TOKEN = "the last token is always computed, for its logits"
THE_QUESTION = "the end of the question is computed, to see what it attends to"


class Declined(NamedTuple):
    """Tokens [start, start + length) are held, and computed nevertheless."""

    start: int
    length: int
    reason: str


class Choice(NamedTuple):
    """What a prefill loads: the first `prefix` tokens, and `runs` behind them. `declined` is held too.

    hole: tokens of the prefix, [hole[0], hole[1]), that are computed nevertheless. ahead: what is to be computed before
    this position goes first, without waiting for flash.
    """

    prefix: int
    runs: tuple[MovedRun, ...]
    declined: tuple[Declined, ...]
    hole: tuple[int, int] = (0, 0)
    ahead: int = 0


def choose(
    tokens: int,
    held: int,
    runs: Sequence[MovedRun],
    repair: AnyRepair,
    costs: CallCosts | None,
    *,
    refused: str | None = None,
) -> Choice:
    """What to load of a prompt of `tokens` tokens, whose first `held` are held as a prefix and `runs` elsewhere.

    costs: of this engine's graph calls over the prompt's context; None takes it that moving always pays.
    refused: why no run may be used at all.
    """
    last = tokens - 1
    prefix = min(held, last)
    declined = [Declined(last, 1, LAST_TOKEN)] if held > last else []
    if refused is not None:
        return Choice(prefix, (), (*declined, *(_whole(run, refused) for run in runs)))
    asks = repair.evidence == "attention"
    end, why = (max(prefix, tokens - QUESTION), THE_QUESTION) if asks else (last, LAST_TOKEN)
    used = []
    for run in runs:
        part = run.before(end)
        if run.target + run.length > end:
            begin = max(run.target, end)
            declined.append(Declined(begin, run.target + run.length - begin, why))
        if part is None:
            continue
        if part.length >= SHORTEST:
            used.append(part)
        else:
            declined.append(_whole(part, too_short(part.length)))
    if used and costs is not None and (reason := _why_not_worth_it(prefix, tokens, used, repair, costs)):
        declined += [_whole(run, reason) for run in used]
        used = []
    return Choice(prefix, tuple(used), tuple(sorted(declined)))


def spare(fresh: int, runs: Sequence[Run], repair: AnyRepair, costs: CallCosts) -> int:
    """How many tokens more than the repair needs are computed again, in calls that are paid for anyway.

    Counted with full-width calls; with windows the plan may differ by a call.
    """
    return costs.cover(fresh + repair.least(runs)).padding


def recomputed(fresh: int, runs: Sequence[Run], repair: AnyRepair, costs: CallCosts | None) -> int:
    """How many tokens of `runs` are computed again beside `fresh` others; without `costs`, how many at least."""
    if isinstance(repair, Nothing) or not runs:
        return 0
    more = 0 if costs is None else spare(fresh, runs, repair, costs)
    return min(sum(run.length for run in runs), repair.least(runs) + more)


def known_ahead(
    fresh: int, runs: Sequence[Run], repair: AnyRepair, costs: CallCosts | None
) -> NDArray[np.int64]:
    """Which of them are known before anything is computed, ascending: where no evidence chooses, all."""
    if not runs:
        return np.empty(0, dtype=np.int64)
    if repair.evidence is None:
        return select(repair, runs, Evidence(), 0 if costs is None else spare(fresh, runs, repair, costs))
    if isinstance(repair, Both):
        return select(repair.first, runs, Evidence())
    return np.empty(0, dtype=np.int64)


def too_short(length: int) -> str:
    """Why a moved run of so many tokens is not used."""
    return (
        f"only {length} tokens in a row are held elsewhere, fewer than {SHORTEST} are not worth their repair"
    )


def repairable(runs: Sequence[MovedRun]) -> list[Run]:
    """The runs as repairs see them."""
    return [Run(run.target, run.length) for run in runs]


def spread(places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """`count` of `places` evenly: where tokens may be of which only the number is known."""
    return places[np.linspace(0, len(places) - 1, min(count, len(places))).astype(np.int64)]


def _why_not_worth_it(
    prefix: int, tokens: int, runs: Sequence[MovedRun], repair: AnyRepair, costs: CallCosts
) -> str | None:
    """Why moving and repairing `runs` costs more than computing all of a prompt of `tokens` behind its `prefix`."""
    places, moved = np.arange(tokens), np.zeros(tokens, bool)
    for run in runs:
        moved[run.target : run.target + run.length] = True
    fresh = places[~moved & (places >= prefix)]
    again = spread(places[moved], repair.least(repairable(runs)))
    probe = 0.0
    if repair.evidence == "attention":
        probe = costs.cover(min(QUESTION, len(fresh))).seconds * PROBED[1]
    moving = probe + costs.cover_at(np.sort(np.concatenate([fresh, again]))).seconds
    computing = costs.cover_at(places[prefix:]).seconds
    if moving <= computing:
        return None
    return f"repair would cost more than computing: {moving * 1e3:.1f} ms of calls against {computing * 1e3:.1f} ms"


def _whole(run: MovedRun, reason: str) -> Declined:
    return Declined(run.target, run.length, reason)
