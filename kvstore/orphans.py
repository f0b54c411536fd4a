"""Blocks that a prefix may lead to although no look-up reaches them: a block before them is not held."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from .block import Block, block_key
from .namespace import ROOT_KEY


def continuing(
    orphans: Iterable[Block], prefix: NDArray[np.int32], seed: bytes | None, block_tokens: int
) -> list[Block]:
    """Those of `orphans` whose prompt starts with `prefix`, or may do so, the last in a prompt first.

    A block names its parent by a key that stands for all tokens before it. Where the prefix reaches up to the block,
    that key can be made and compared. Behind the prefix, the block before decides; where that is not held, nobody
    can know, and the block counts as a continuation. seed: what keys of this identity start from, None where that
    differs from prompt to prompt.
    """
    whole = len(prefix) // block_tokens
    keys = [ROOT_KEY]
    for at in range(0, whole * block_tokens, block_tokens):
        keys.append(block_key(seed or b"", keys[-1], prefix[at : at + block_tokens]))
    starts_with: dict[bytes, bool] = {}  # by key of an orphan
    ordered = sorted(orphans, key=lambda block: block.start)
    for block in ordered:
        if block.start > whole * block_tokens:
            starts_with[block.key] = starts_with.get(block.parent_key, True)
            continue
        rest = prefix[block.start : block.start + block_tokens]
        starts_with[block.key] = (
            (seed is None or block.parent_key == keys[block.start // block_tokens])
            and block.start + block.length >= len(prefix)
            and np.array_equal(block.tokens[: len(rest)], rest)
        )
    return [block for block in reversed(ordered) if starts_with[block.key]]
