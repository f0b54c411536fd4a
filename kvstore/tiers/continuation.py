"""How a new block goes on from those before it: with their conversation, or as another beginning behind them."""

from __future__ import annotations

from ..block import Block
from .shared_beginnings import PARTED


def follow(block: Block, replaced: Block | None) -> Block | None:
    """Note which conversation a new block belongs to; the block before it, when prompts part behind that now.

    The first block behind another goes on with its conversation, as does one in place of `replaced`, a shorter one of
    the same tokens; any other begins one of its own. Called under the store's lock, once the block is findable.
    """
    block.session = block.number
    above = block.namespace.parent(block)
    if replaced is not None:
        block.session = replaced.session
    elif above is not None and not above.behind:
        block.session = above.session
    if above is None or block.key in above.behind or len(above.behind) >= PARTED:
        return None
    before = above.behind
    if replaced is not None:
        before = tuple(key for key in before if key != replaced.key)
    above.behind = (*before, block.key)
    return above if len(above.behind) >= PARTED else None
