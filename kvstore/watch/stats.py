"""What the store counts: use of each tier, tokens asked for and found, and the reasons of every refusal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from kvstore.index.semantic import SemanticStats
from kvstore.prefetch.prefetcher import Usefulness

from ..quality.reuse import Measurement, Policy, Verdict, named

if TYPE_CHECKING:
    from ..namespace import Namespace
    from ..tiers.tiers import Tiers


class TierStats(msgspec.Struct, frozen=True):
    """Bytes of one tier: used + free = total. `blocks` lie here, `leased` of them are held by a lease.

    `pinned` says for the hot tier whether the OS keeps it in RAM.
    """

    total: int
    used: int
    free: int
    blocks: int
    leased: int
    pinned: bool = False


class PolicyInUse(msgspec.Struct, frozen=True):
    """What a policy does to moved runs of one identity: `repair` in words, or None and the `reason`.

    measured: the figures it stands on, where there are any.
    """

    repair: str | None
    reason: str | None
    measured: Measurement | None


class Stats(msgspec.Struct, frozen=True):
    """A snapshot. `counts` grow from opening on; tokens asked = tokens matched + tokens missed by look-ups.

    Of requests that engines reported as served, tokens prefix + moved + recomputed + computed = tokens of the prompts.

    `waiting` blocks are being written to flash; `unwritten` ones lie in memory only, until that needs the room, or
    `flush` or `close` write them. `refusals` count what was not stored, `misses` what was held but not
    usable, `bad_records` what opening found damaged, each by reason. `index` says how the flash index was opened.
    `verdicts`: on identities that were measured, by their digests; a store tells that on its own alone.
    `semantics`: of one identity, the embedder and the blocks it indexed, that wait, and were refused, by reason.
    """

    hot: TierStats
    warm: TierStats
    cold: TierStats
    waiting: int
    unwritten: int
    counts: dict[str, int]
    refusals: dict[str, int]
    misses: dict[str, int]
    bad_records: dict[str, int]
    index: str | None
    semantics: SemanticStats | None
    verdicts: dict[str, dict[Policy, PolicyInUse]]


def collect(
    tiers: Tiers,
    namespace: Namespace | None,
    verdicts: Mapping[bytes, Verdict],
    ahead: Usefulness,
) -> Stats:
    """Called under the store's lock; takes no longer when more is held."""

    def of(name: str, total: int, used: int, pinned: bool = False) -> TierStats:
        return TierStats(total, used, total - used, tiers.held(name), tiers.leased[name], pinned)

    cold = tiers.cold
    counts = dict(tiers.counts)
    counts.update(
        {f"bytes_prefetched_{name}": nbytes for name, nbytes in ahead._asdict().items() if ahead.read}
    )
    counts["tokens_missed"] = counts.get("tokens_asked", 0) - counts.get("tokens_matched", 0)
    if cold is not None:
        counts["bytes_written"] = cold.bytes_written
        counts["bytes_written_today"] = cold.writes.spent
    return Stats(
        hot=of("hot", tiers.hot.total, tiers.hot.used, tiers.hot.pinned),
        warm=of("warm", tiers.warm.total, tiers.warm.used),
        cold=of("cold", cold.total, cold.used) if cold is not None else TierStats(0, 0, 0, 0, 0),
        waiting=len(tiers.unwritten.queue),
        unwritten=len(tiers.unwritten),
        counts=counts,
        refusals=dict(tiers.refusals),
        misses=dict(tiers.misses),
        bad_records={reason: count for reason, count in cold.bad.items() if count}
        if cold is not None
        else {},
        index=cold.opened if cold is not None else None,
        semantics=namespace.semantics.stats()
        if namespace is not None and namespace.semantics is not None
        else None,
        verdicts={digest.hex(): in_use(verdict) for digest, verdict in verdicts.items()},
    )


def in_use(verdict: Verdict) -> dict[Policy, PolicyInUse]:
    """What a verdict makes of each policy that may move anything."""
    policies: tuple[Policy, ...] = ("careful", "fast")
    return {
        policy: PolicyInUse(
            None if (repair := verdict.repair(policy)) is None else named(repair),
            verdict.why_none(policy),
            verdict.measured(policy),
        )
        for policy in policies
    }
