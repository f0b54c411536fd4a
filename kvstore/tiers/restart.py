"""What flash holds outlasts a restart: a row of the index for each record, and from the rows the same blocks again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..block import Block
from ..flash.cold import ColdTier
from ..flash.cold_index import Row
from ..namespace import Namespace
from .continuation import follow
from .quotas import on_flash

if TYPE_CHECKING:
    from .tiers import Tiers


def row_of(block: Block) -> Row:
    """What the index is to say of a block on flash."""
    return Row(
        key=block.key,
        identity=block.namespace.digest,
        parent_key=block.parent_key,
        start=block.start,
        tokens=block.tokens.astype("<i4").tobytes(),
        exact=block.exact,
        file_bytes=block.cold_bytes,
        last_use=block.last_use,
        hits=block.hits,
        head_bytes=block.head_bytes,
    )


def load_rows(tiers: Tiers, cold: ColdTier) -> None:
    """Make findable again what `cold.rows` speak of, as far as it fits the budget, which may have been lowered.

    Parents come before their children, so that all find their place; children that are held already, where a key came
    later, find theirs then. The policy is told in the order of last use, so that its order survives. Called under the
    lock.
    """
    blocks = []
    for row in sorted(cold.rows.values(), key=lambda row: row.start):
        block = _block_of(row, tiers.new_number(), _namespace(tiers, cold, row))
        tiers.blocks[block.number] = block
        standing, replaced = block.namespace.add(block)
        if standing is not block:
            tiers.discard(block)
            continue
        if replaced is not None:
            tiers.discard(replaced)
        follow(block, replaced)
        block.pinned = tiers.pins.covers(block)
        blocks.append(block)
        for double in block.namespace.adopt_orphans(block):
            tiers.discard(double)
        for child in block.namespace.children(block):
            tiers.orders.changed(child)
    for block in sorted(blocks, key=lambda block: (block.last_use, -block.start)):
        if block.number in tiers.blocks:
            tiers.orders.insert("cold", block)
    cold.drop_useless(0)
    while cold.free < 0 and (victim := tiers.leaving.from_flash()) is not None:
        tiers.leave_flash(victim)
    cold.rows = {}


def _namespace(tiers: Tiers, cold: ColdTier, row: Row) -> Namespace:
    """Whose it is counts against quotas before anybody opens the identity."""
    space = tiers.namespace(row.identity)
    if space.identity is None:
        space.tenant = cold.ciphers.tenant(row.identity) or b""
    return space


def _block_of(row: Row, number: int, space: Namespace) -> Block:
    """Its size in memory follows from the layout, which is known once somebody opens the identity."""
    block = Block(
        number=number,
        key=row.key,
        parent_key=row.parent_key,
        namespace=space,
        tokens=np.frombuffer(row.tokens, dtype="<i4").astype(np.int32),
        start=row.start,
        nbytes=0 if space.identity is None else space.layout.block_bytes(len(row.tokens) // 4),
        exact=row.exact,
        hits=row.hits,
        last_use=row.last_use,
    )
    on_flash(block, row.file_bytes)
    block.head_bytes = row.head_bytes
    return block
