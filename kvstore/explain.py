"""Why a prompt is reused as far as it is, and not further: each of its tokens, before anything is computed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline.recompute import Nothing, WhenSure, first_of
from kvstore.pipeline.schedule import CallCosts

from .block import Block
from .choice import Choice, Declined, choose, known_ahead, recomputed, repairable, too_short
from .flash_choice import against_flash
from .identity import Identity
from .moved import SHORTEST, MovedRun
from .namespace import Namespace
from .quality.reuse import Policy, Verdict, named
from .tiers.tiers import Tiers

_SHORTEST_NOTED = SHORTEST // 2
"""Shorter coincidences with what is held say nothing."""

_NOWHERE = "held nowhere"


class Span(msgspec.Struct, frozen=True):
    """`length` tokens from `start` on, and what becomes of them.

    prefix, moved: loaded from `source` out of `block`, keys turned by `shift` positions. recomputed: loaded like
    moved ones and computed again. computed: because of `reason`.
    """

    start: int
    length: int
    kind: Literal["prefix", "moved", "recomputed", "computed"]
    source: Literal["hot", "warm", "cold", "compute"]
    block: str | None = None
    shift: int = 0
    reason: str | None = None


class Explanation(msgspec.Struct, frozen=True):
    """Spans cover the prompt exactly once, in order.

    prefix + moved + recomputed + computed = tokens of the prompt, as a request that comes now does them. Where the
    repair chooses tokens by evidence, which of the moved ones are recomputed is known only then, and spans call
    `recomputed` no more than what is certain; `notes` say of how many that holds, and what else is open. They also
    name what another identity would have found.

    `repair` is what `policy` stands for by the `verdict` on this identity, in words; None: prefixes only, and `refused`
    says why.
    """

    spans: tuple[Span, ...]
    policy: Policy
    repair: str | None
    verdict: Verdict
    prefix: int
    moved: int
    recomputed: int
    computed: int
    notes: tuple[str, ...] = ()
    refused: str | None = None


class Found(NamedTuple):
    """What look-up finds of a prompt: `blocks` hold its first `length` tokens, `runs` stand elsewhere.

    `near` are the same runs with those that are too short. `stopped`: why the prefix ends where it does, when that is
    not in what is held. `shift_refused`: why runs must not be used. `flash_bytes_per_second`: None where all is loaded
    whatever that takes.
    """

    blocks: Sequence[Block]
    length: int
    runs: Sequence[MovedRun]
    near: Sequence[MovedRun]
    stopped: str | None
    shift_refused: str | None
    flash_bytes_per_second: float | None


def explain(
    tokens: NDArray[np.int32],
    found: Found,
    namespace: Namespace,
    tiers: Tiers,
    identity: Identity,
    verdict: Verdict,
    policy: Policy,
    costs: CallCosts | None,
    layer_groups: int,
) -> Explanation:
    """What `prefill` would do with `found` under `policy`. Called under the store's lock."""
    repair = verdict.repair(policy)
    refused = verdict.why_none(policy)
    if policy != "exact" and found.shift_refused is not None:
        refused = f"shift refused: {found.shift_refused}"
    doing = first_of(repair or Nothing())
    choice = choose(len(tokens), found.length, found.runs, doing, costs, refused=refused)
    if costs is not None:
        speed = found.flash_bytes_per_second
        choice = against_flash(choice, len(tokens), found.blocks, doing, costs, speed, layer_groups)
    runs = repairable(choice.runs)
    loaded = _loaded(len(tokens), choice)
    beside = int((~loaded[choice.ahead :]).sum())  # new tokens in the calls that recompute
    again = recomputed(beside, runs, doing, costs)
    certain = known_ahead(beside, runs, doing, costs)
    name = None if refused is not None or repair is None else named(repair)

    spans = [*_prefix(found.blocks, choice)]
    for run in choice.runs:
        spans += _moved(run, certain, f"repair: {name}")
    stopped = found.stopped or _why(tokens, namespace, found.blocks, found.length)
    spans += _computed(loaded, choice, found, stopped)
    notes = []
    if again > len(certain):
        notes.append(f"{again - len(certain)} more of the moved tokens are recomputed, chosen at the request")
    if choice.runs and isinstance(repair, WhenSure):
        notes.append(
            f"where the likeliest next token then leads by less than {repair.margin:g} nats, all from token "
            f"{choice.runs[0].target} on is computed after all"
        )
    if choice.runs and costs is None:
        notes.append(
            "costs of graph calls not given: only the request can say whether moving pays, and whether more "
            "tokens are recomputed where a call has room"
        )
    return Explanation(
        tuple(sorted(spans, key=lambda span: span.start)),
        policy,
        name,
        verdict,
        prefix=choice.prefix - (choice.hole[1] - choice.hole[0]),
        moved=sum(run.length for run in runs) - again,
        recomputed=again,
        computed=int((~loaded).sum()),
        notes=(*notes, *_elsewhere(tokens, found.length, namespace, tiers, identity)),
        refused=refused,
    )


def _loaded(tokens: int, choice: Choice) -> NDArray[np.bool_]:
    """Which tokens of a prompt are loaded, recomputed or not."""
    loaded = np.zeros(tokens, np.bool_)
    loaded[: choice.prefix] = True
    loaded[choice.hole[0] : choice.hole[1]] = False
    for run in choice.runs:
        loaded[run.target : run.target + run.length] = True
    return loaded


def _prefix(blocks: Sequence[Block], choice: Choice) -> Iterator[Span]:
    for block in blocks:
        if block.start < choice.prefix and not choice.hole[0] <= block.start < choice.hole[1]:
            count = min(block.length, choice.prefix - block.start)
            yield Span(block.start, count, "prefix", _nearest(block.tier), block.key.hex())


def _moved(run: MovedRun, certain: NDArray[np.int64], reason: str) -> Iterator[Span]:
    """The pieces of a run, cut where recomputed tokens begin or end."""
    for piece in run.pieces:
        inside = certain[(certain >= piece.target) & (certain < piece.target + piece.length)] - piece.target
        again = np.zeros(piece.length, np.bool_)
        again[inside] = True
        edges = np.flatnonzero(np.diff(again)) + 1
        cuts = [0, *edges.tolist(), piece.length]
        for begin, end in itertools.pairwise(cuts):
            yield Span(
                piece.target + begin,
                end - begin,
                "recomputed" if again[begin] else "moved",
                _nearest(piece.block.tier),
                piece.block.key.hex(),
                piece.shift,
                reason if again[begin] else None,
            )


def _computed(loaded: NDArray[np.bool_], choice: Choice, found: Found, stopped: str) -> Iterator[Span]:
    """Spans that nothing loaded covers, each stretch with one reason."""
    reasons = [_NOWHERE, stopped]
    why = np.zeros(len(loaded), np.int64)
    why[found.length : _first(loaded, found.length)] = 1
    declined = list(choice.declined)
    for near in found.near:
        declined += _short(near, loaded, declined)
    for each in declined:
        why[each.start : each.start + each.length] = len(reasons)
        reasons.append(each.reason)
    why[loaded] = -1
    cuts = [0, *(np.flatnonzero(np.diff(why)) + 1).tolist(), len(loaded)]
    for begin, end in itertools.pairwise(cuts):
        if why[begin] >= 0:
            yield Span(begin, end - begin, "computed", "compute", reason=reasons[why[begin]])


def _short(near: MovedRun, loaded: NDArray[np.bool_], declined: Sequence[Declined]) -> Iterator[Declined]:
    """The parts of a run that are too short, so far as nothing else is said of them."""
    free = ~loaded[near.target : near.target + near.length]
    for each in declined:
        begin, end = each.start - near.target, each.start + each.length - near.target
        free[max(0, begin) : max(0, end)] = False
    edges = np.flatnonzero(np.diff(free, prepend=False, append=False))
    for begin, end in edges.reshape(-1, 2).tolist():
        if _SHORTEST_NOTED <= end - begin < SHORTEST:
            yield Declined(near.target + begin, end - begin, too_short(end - begin))


def _first(loaded: NDArray[np.bool_], start: int) -> int:
    """The first loaded position from `start` on, or the end."""
    rest = np.flatnonzero(loaded[start:])
    return start + int(rest[0]) if len(rest) else len(loaded)


def _nearest(tier: str) -> Literal["hot", "warm", "cold", "compute"]:
    return tier if tier in ("hot", "warm", "cold") else "compute"  # type: ignore[return-value]


def _why(tokens: NDArray[np.int32], namespace: Namespace, blocks: Sequence[Block], length: int) -> str:
    if length == len(tokens):
        return "all of it is held"
    if not namespace.by_key:
        return "nothing is held for this identity"
    if not blocks:
        return "no held prompt begins with these tokens"
    last = blocks[-1]
    inside = length - last.start
    if inside < last.length:
        return f"diverges at {length}: token {tokens[length]} here, {last.tokens[inside]} in the held block"
    if namespace.is_leaf(last):
        return f"what is held ends at {length}"
    return f"held continuations diverge at {length}"


def _elsewhere(
    tokens: NDArray[np.int32], length: int, namespace: Namespace, tiers: Tiers, identity: Identity
) -> list[str]:
    """Other identities of the same tenant under which more of the prompt is held, and how they differ."""
    notes = []
    for other in tiers.namespaces.values():
        if other is namespace or other.identity is None or other.identity.tenant_salt != identity.tenant_salt:
            continue
        _, further = other.match(tokens)
        if further > length:
            parts = ", ".join(str(part) for part in identity.diff(other.identity))
            notes.append(f"{further} tokens are held under another identity; it differs in {parts}")
    return notes
