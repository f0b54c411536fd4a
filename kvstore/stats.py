"""What the store counts: use of each tier, tokens asked for and found, and the reasons of every refusal."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from .tiers import Tiers
    from .write_behind import WriteBehind


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


class Stats(msgspec.Struct, frozen=True):
    """A snapshot. `counts` grow from opening on; tokens asked = tokens matched + tokens missed.

    `waiting` blocks are not on flash yet. `refusals` count what was not stored, `misses` what was held but not
    usable, `bad_records` what opening found damaged, each by reason. `index` says how the flash index was opened.
    """

    hot: TierStats
    warm: TierStats
    cold: TierStats
    waiting: int
    counts: dict[str, int]
    refusals: dict[str, int]
    misses: dict[str, int]
    bad_records: dict[str, int]
    index: str | None


def collect(tiers: Tiers, worker: WriteBehind) -> Stats:
    """Called under the store's lock."""
    blocks = tiers.blocks.values()

    def of(name: str, total: int, used: int, pinned: bool = False) -> TierStats:
        if name == "cold":
            here = [block for block in blocks if block.cold_bytes]
        else:
            here = [block for block in blocks if block.memory is not None and block.memory.tier.name == name]
        leased = sum(block.leases > 0 for block in here)
        return TierStats(total, used, total - used, len(here), leased, pinned)

    cold = tiers.cold
    counts = dict(tiers.counts)
    counts["tokens_missed"] = counts.get("tokens_asked", 0) - counts.get("tokens_matched", 0)
    if cold is not None:
        counts["bytes_written"] = cold.bytes_written
    return Stats(
        hot=of("hot", tiers.hot.total, tiers.hot.used, tiers.hot.pinned),
        warm=of("warm", tiers.warm.total, tiers.warm.used),
        cold=of("cold", cold.total, cold.used) if cold is not None else TierStats(0, 0, 0, 0, 0),
        waiting=worker.waiting,
        counts=counts,
        refusals=dict(tiers.refusals),
        misses=dict(tiers.misses),
        bad_records={reason: count for reason, count in cold.bad.items() if count}
        if cold is not None
        else {},
        index=cold.opened if cold is not None else None,
    )
