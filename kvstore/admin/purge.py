"""Which blocks a purge means, and how they go: nothing of them stays in a file or in memory that is shared.

Records are deleted, and the index is written anew; what failed a check goes with them, since nobody can say whose it
is. Memory that is free is overwritten, since blocks leave their bytes behind wherever they lay. What a lease holds at
the time goes when the lease ends. Copies that engines have in memory of their own are theirs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.block import Block
from kvstore.errors import InvalidRequestError
from kvstore.identity import Identity
from kvstore.index.windows import WindowHash
from kvstore.invalidation import starting_with
from kvstore.layout import capabilities
from kvstore.namespace import Namespace
from kvstore.open_directory import OpenDirectory
from kvstore.tiers.hand_over import wipe_free
from kvstore.tiers.tiers import Tiers

from .entry import tenant_of

_WINDOW = 16  # tokens in a row that say that a block holds some of a document


class Purged(msgspec.Struct, frozen=True):
    """What went, or would go: blocks, their tokens, and what they occupied.

    kept: blocks that a lease holds in the tier, or that wait for flash; only where a tier is purged.
    """

    blocks: int
    tokens: int
    memory_bytes: int
    flash_bytes: int
    kept: int
    dry_run: bool


def with_prefix(space: Namespace, tokens: NDArray[np.int32], identity: Identity) -> list[Block]:
    """What starts with `tokens`, or may do so but lost the block before it."""
    return starting_with(space, tokens, whole=capabilities(identity.layout).reuse == "exact")


def with_document(spaces: Iterable[Namespace], document: NDArray[np.int32]) -> list[Block]:
    """Blocks that hold a part of a document, and all that was computed behind one of them in the same prompt.

    A part is 16 tokens in a row, or the whole of a shorter document; and the end of a block that leads up to such a
    part at the beginning of the next one.
    """
    window = 1 << (min(_WINDOW, len(document)).bit_length() - 1)
    hashes = WindowHash(window)
    wanted = np.unique(hashes(document))
    places: dict[bytes, list[int]] = {}
    for at in range(len(document) - window + 1):
        places.setdefault(document[at : at + window].tobytes(), []).append(at)
    found: dict[bytes, Block] = {}
    for space in spaces:
        children: dict[bytes, list[Block]] = {}
        holding = list[Block]()
        for block in space.by_key.values():
            children.setdefault(block.parent_key, []).append(block)
            hits = np.flatnonzero(np.isin(hashes(block.tokens), wanted))
            if any(block.tokens[at : at + window].tobytes() in places for at in hits):
                holding.append(block)
        for block in list(holding):
            begins = places.get(block.tokens[:window].tobytes(), ())
            above = space.by_key.get(block.parent_key)
            if above is not None and any(at and document[at - 1] == above.tokens[-1] for at in begins):
                holding.append(above)
        while holding:
            block = holding.pop()
            if block.key not in found:
                found[block.key] = block
                holding += children.get(block.key, ())
    return sorted(found.values(), key=lambda block: -block.start)


def of_tenant(
    spaces: Iterable[Namespace], tenant: str, identities: Mapping[bytes, Identity]
) -> list[Namespace]:
    """Every identity with this tenant's salt. Raises InvalidRequestError for a tenant of none."""
    theirs = [space for space in spaces if tenant_of(identities.get(space.digest)) == tenant]
    if not theirs:
        raise InvalidRequestError(f"no identity of tenant {tenant!r} is held; `kvstore status` names them")
    return theirs


def of_adapter(
    spaces: Iterable[Namespace], adapter: str, identities: Mapping[bytes, Identity]
) -> list[Namespace]:
    """Every identity with an adapter whose digest begins so. Raises InvalidRequestError for none such."""
    digests = {
        digest
        for digest, identity in identities.items()
        if any(each.digest.startswith(adapter.lower()) for each in identity.adapters)
    }
    if not digests or not adapter:
        raise InvalidRequestError(
            f"no identity with adapter {adapter!r} is known; `kvstore status` names them"
        )
    return [space for space in spaces if space.digest in digests]


def forget(tiers: Tiers, blocks: Sequence[Block], *, dry_run: bool) -> Purged:
    """Forget blocks, in all tiers. Called under the store's lock."""
    purged = _sum(blocks, 0, dry_run=dry_run)
    if not dry_run:
        for block in blocks:
            for each in (block, block.tail):
                if each is not None and each.leases:  # else `erase` finds what it leaves
                    each.purged = True
            tiers.drop(block)
        tiers.counts["invalidated"] += len(blocks)
    return purged


def erase(opened: OpenDirectory, spaces: Collection[Namespace]) -> None:
    """After `forget`, leave nothing of what these namespaces' blocks were. Without the store's lock. Raises OSError."""
    tiers = opened.tiers
    wipe_free(tiers, spaces)
    if tiers.cold is None:
        return
    with tiers.lock:
        tiers.cold.empty_quarantine()
    opened.worker.rewrite_index().result()


def end_pins(tiers: Tiers, blocks: Iterable[Block], spaces: Iterable[Namespace], *, whole: bool) -> None:
    """A pin keeps tokens in a file: end those of `blocks`, and where all of `spaces` goes, all of theirs.

    Called under the store's lock, before the blocks are forgotten. Raises OSError.
    """
    keys = {block.key for block in blocks}
    purged = {space.digest for space in spaces} if whole else set()
    for pin in tiers.pins:
        space = tiers.namespaces.get(pin.identity)
        path = () if space is None else space.match(pin.token_ids())[0]
        if pin.identity in purged or any(block.key in keys for block in path):
            tiers.pins.remove(pin.identity, pin.tokens)


def empty_tier(tiers: Tiers, tier: str, *, dry_run: bool) -> Purged:
    """Free a tier of what nobody uses. What lies elsewhere, too, stays there; the rest is forgotten.

    Called under the store's lock.
    """
    if tier not in ("hot", "warm", "cold"):
        raise InvalidRequestError(f"tier {tier!r} is not hot, warm or cold")
    there = [block for block in tiers.blocks.values() if not block.doomed and _lies_in(block, tier)]
    there.sort(key=lambda block: -block.start)
    free = [block for block in there if not block.leases and not block.waiting]
    purged = _sum(free, len(there) - len(free), dry_run=dry_run, tier=tier)
    for block in () if dry_run else free:
        if tier == "cold":
            tiers.forget_flash(block)
        elif block.cold_bytes:
            tiers.forget_memory(block)
        else:
            tiers.drop(block)
    return purged


def _lies_in(block: Block, tier: str) -> bool:
    if tier == "cold":
        return block.cold_bytes > 0
    return block.memory is not None and block.memory.tier.name == tier


def _sum(blocks: Sequence[Block], kept: int, *, dry_run: bool, tier: str | None = None) -> Purged:
    return Purged(
        len(blocks),
        sum(block.length for block in blocks),
        0
        if tier == "cold"
        else sum(block.memory.extent.size for block in blocks if block.memory is not None),
        sum(block.cold_bytes for block in blocks) if tier in (None, "cold") else 0,
        kept,
        dry_run,
    )
