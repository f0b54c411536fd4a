"""How memory goes from one tenant to another: empty, and full of zeros.

A walled tier cuts its budget into arenas that have owners, see `memory`. When an owner needs room and the budget is
used up, one who has more gives an arena up: first its blocks leave memory, then the tier fills it with zeros and makes
a new one of its bytes. Blocks never move to make this possible: what has to stay keeps its arena where it is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ..block import Block
from ..namespace import Namespace
from .memory import MemoryTier

if TYPE_CHECKING:
    from .tiers import Tiers


def take_arena(tiers: Tiers, tier: MemoryTier, owner: bytes) -> bool:
    """Empty an arena of an owner who has more memory than `owner`, so that it can be given up; whether one was.

    Of those who have the most, the arena that was used longest ago goes. What is leased, pinned or waits for flash
    keeps its arena in place. Owners that have an arena less than others leave it at that. Called under the lock.
    """
    if not tier.walled:
        return False
    owned = tier.owned()
    mine = owned[owner]
    rich = {
        number: owned[tier.owner(number)]
        for number, arena in tier.arenas.items()
        if tier.owner(number) != owner
        and (not mine or owned[tier.owner(number)] - arena.size >= mine + arena.size)
    }
    if not rich:
        return False
    lying: dict[int, list[Block]] = {number: [] for number in rich}
    for block in tiers.blocks.values():
        if block.memory is not None and block.memory.tier is tier and block.memory.extent.arena in lying:
            lying[block.memory.extent.arena].append(block)
    used = {number: max((block.last_use for block in lying[number]), default=0.0) for number in rich}
    return any(
        _empty(tiers, tier, number, lying[number])
        for number in sorted(rich, key=lambda number: (-rich[number], used[number]))
    )


def _empty(tiers: Tiers, tier: MemoryTier, number: int, blocks: list[Block]) -> bool:
    """Have all blocks of an arena leave memory. Nothing changes where one of them has to stay."""
    if any(block.leases or block.doomed or tiers.leaving.stays(block) for block in blocks):
        return False
    here = {block.number for block in blocks}
    tiers.decide_among(lambda block: block.number in here)
    if any(block.waiting for block in blocks):
        return False
    for block in sorted(blocks, key=lambda block: -block.start):
        if block.number in tiers.blocks and block.memory is not None:
            if not tiers.leaving.may_leave_memory(block):
                return False
            tiers.leave_memory(block)
    return tier.is_empty(number)


def wipe_free(tiers: Tiers, spaces: Collection[Namespace]) -> None:
    """Overwrite what blocks of these namespaces left in memory that is free now.

    Takes the lock for moments; meanwhile an arena's free memory is handed out to this, so that nobody writes there.
    """
    owners = {tiers.owner(space) for space in spaces}
    for tier in (tiers.hot, tiers.warm):
        with tiers.lock:
            numbers = [number for number in tier.arenas if tier.owner(number) in owners]
        for number in numbers:
            with tiers.lock:
                taken = tier.take_free(number)
            for extent in taken:
                tier.wipe(extent)
            with tiers.lock:
                for extent in taken:
                    tier.release(extent)
                tiers.changed.notify_all()
