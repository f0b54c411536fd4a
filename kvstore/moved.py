"""Moved runs: tokens of a prompt whose KV is held from elsewhere, and which of several copies serves best."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.index.chunks import AT_START, Run

from .block import Block, HeldBlock

SHORTEST = 32
"""A moved run of fewer tokens is not worth its repair."""

_CONTEXT = 64  # tokens before a run that are compared with those before a copy
_BEHIND_ITSELF = 16  # a copy right behind so many of its own last tokens was captured behind itself


class Piece(NamedTuple):
    """`length` tokens of `block` from `offset` on, which stand at position `target` of the prompt."""

    block: HeldBlock
    offset: int
    length: int
    target: int

    @property
    def shift(self) -> int:
        """By how many positions the keys have to be turned."""
        return self.target - (self.block.start + self.offset)


class MovedRun(NamedTuple):
    """Tokens [target, target + length) of a prompt, held in consecutive pieces with one shift."""

    target: int
    length: int
    pieces: tuple[Piece, ...]

    @property
    def shift(self) -> int:
        return self.pieces[0].shift

    @property
    def blocks(self) -> tuple[HeldBlock, ...]:
        return tuple(piece.block for piece in self.pieces)

    def before(self, end: int) -> MovedRun | None:
        """The part of the run that lies before position `end`; None when there is none."""
        if self.target >= end:
            return None
        pieces = tuple(
            piece._replace(length=min(piece.length, end - piece.target))
            for piece in self.pieces
            if piece.target < end
        )
        return MovedRun(self.target, min(self.length, end - self.target), pieces)


def moved_run(
    run: Run,
    tokens: NDArray[np.int32],
    block_of: Callable[[int], Block],
    before: Callable[[Block], Block | None],
) -> MovedRun:
    """The run from the copy whose context is nearest to the new one.

    What stood before a copy when its KV was captured decides how well it serves elsewhere (measured: the KL without
    any repair is 0.17 captured alone, 0.05 behind system prompt and another passage). So a copy captured at the start
    of a prompt comes last, and second to last one captured behind itself, the worst of contexts; then counts how many
    tokens before it are those before the run, then exactness, then distance.
    """
    preceding = tokens[: run.target]
    end = tokens[: run.target + run.length][-min(_BEHIND_ITSELF, run.length) :]

    def worth(blocks: Sequence[Block], offset: int) -> tuple[bool, bool, int, bool, int]:
        position = blocks[0].start + offset
        context = _context(blocks[0], offset, before)
        behind_itself = np.array_equal(context[-len(end) :], end)
        exact = all(block.exact for block in blocks)
        distance = abs(position - run.target)
        return position >= AT_START, not behind_itself, _shared(context, preceding), exact, -distance

    copies = [([block_of(number) for number in source.blocks], source.offset) for source in run.sources]
    blocks, offset = max(copies, key=lambda copy: worth(*copy))
    pieces = []
    target, left = run.target, run.length
    for block in blocks:
        length = min(block.length - offset, left)
        pieces.append(Piece(block, offset, length, target))
        target, left, offset = target + length, left - length, 0
    return MovedRun(run.target, run.length, tuple(pieces))


def _context(block: Block, offset: int, before: Callable[[Block], Block | None]) -> NDArray[np.int32]:
    """What is held of the _CONTEXT tokens right before the copy."""
    context = block.tokens[max(0, offset - _CONTEXT) : offset]
    above = before(block)
    while above is not None and len(context) < _CONTEXT:
        context = np.concatenate([above.tokens[len(context) - _CONTEXT :], context])
        above = before(above)
    return context


def _shared(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    """How many tokens at the ends of both are equal."""
    count = min(len(one), len(other))
    if not count:
        return 0
    differ = np.flatnonzero(one[::-1][:count] != other[::-1][:count])
    return int(differ[0]) if len(differ) else count
