"""Whether what the tiers count is what the blocks have: free + used = total, and all that is counted besides.

Memory and flash may count more than blocks have: what is being copied or written, and what is no block's. Never less.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from .orders import NAMES

if TYPE_CHECKING:
    from .tiers import Tiers


def check(tiers: Tiers) -> None:
    """Raise AssertionError unless every tier's accounting adds up. Called under the lock."""
    _check_numbers(tiers)
    _check_memory(tiers)
    _check_flash(tiers)


def _check_numbers(tiers: Tiers) -> None:
    held, leased = Counter[str](), Counter[str]()
    for block in tiers.blocks.values():
        names = [block.memory.tier.name] if block.memory is not None else []
        for name in [*names, *(["cold"] if block.cold_bytes else [])]:
            held[name] += 1
            leased[name] += block.leases > 0
    for name in NAMES:
        if (held[name], leased[name]) != (tiers.held(name), tiers.leased[name]):
            raise AssertionError(
                f"{name}: {held[name]} blocks, {leased[name]} of them leased; counted are {tiers.held(name)} "
                f"and {tiers.leased[name]}"
            )


def _check_memory(tiers: Tiers) -> None:
    for tier in (tiers.hot, tiers.warm):
        tier.check()
        held = sum(
            block.memory.extent.size
            for block in tiers.blocks.values()
            if block.memory and block.memory.tier is tier
        )
        if held > tier.used:
            raise AssertionError(f"{tier.name}: blocks have {held} bytes, the tier counts {tier.used}")


def _check_flash(tiers: Tiers) -> None:
    by_space = Counter[bytes]()
    for block in tiers.blocks.values():
        by_space[block.namespace.digest] += block.cold_bytes
    for digest, space in tiers.namespaces.items():
        if space.flash_bytes != by_space[digest]:
            raise AssertionError(
                f"{digest.hex()[:12]}: blocks have {by_space[digest]} bytes on flash, counted are "
                f"{space.flash_bytes}"
            )
    cold = tiers.cold
    if cold is not None and (by_space.total() > cold.used or cold.used > cold.total):
        raise AssertionError(f"cold: blocks {by_space.total()}, used {cold.used}, total {cold.total}")
