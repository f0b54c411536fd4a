"""Blocks and moved runs as messages name them: a table of blocks, the prefix first, and places in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from kvstore.block import Block, HeldBlock
from kvstore.errors import InvalidRequestError
from kvstore.lease import Lease
from kvstore.match import Match
from kvstore.moved import MovedRun, Piece
from kvstore.store import KVStore

from . import wire


def references(blocks: Sequence[Block]) -> list[wire.BlockRef]:
    """In their encoded form, made once for each block and place: most of what a look-up takes would be this."""
    made: list[Any] = []
    for block in blocks:
        memory, cold_bytes, told = block.memory, block.cold_bytes, block.told
        tier = memory.tier.name if memory is not None else "cold" if cold_bytes else "none"
        if told is None or told[0] != tier or told[1] != cold_bytes:
            reference = wire.BlockRef(
                block.number, block.key, block.start, block.length, block.nbytes, cold_bytes, tier
            )
            told = block.told = tier, cold_bytes, msgspec.Raw(msgspec.msgpack.encode(reference))
        made.append(told[2])
    return made


def own(block: HeldBlock) -> Block:
    assert isinstance(block, Block), "the daemon's own store names blocks of this process"
    return block


def table(found: Match | Lease) -> tuple[list[Block], list[wire.RunRef]]:
    """All blocks of a match or lease, the prefix first, and its runs by their places in that table."""
    blocks = [own(block) for block in (found.blocks if isinstance(found, Match) else found.prefix)]
    if not found.runs:
        return blocks, []
    at = {block.number: place for place, block in enumerate(blocks)}
    runs = []
    for run in found.runs:
        pieces = []
        for piece in run.pieces:
            number = piece.block.number
            if number not in at:
                at[number] = len(blocks)
                blocks.append(own(piece.block))
            pieces.append(wire.PieceRef(at[number], piece.offset, piece.length))
        runs.append(wire.RunRef(run.target, pieces))
    return blocks, runs


def match_of(store: KVStore, request: wire.TakeLease | wire.GetPresence) -> Match:
    """What a client found before, as far as it is held still. Raises InvalidRequestError."""
    held = store.blocks_of(request.keys)
    if request.prefix > len(held):
        raise InvalidRequestError(f"{request.prefix} blocks of a prefix, {len(held)} keys given")
    prefix = tuple(itertools.takewhile(lambda block: block is not None, held[: request.prefix]))
    runs = tuple(run for each in request.runs if (run := _run(each, held)) is not None)
    return Match(request.length, prefix, runs)  # type: ignore[arg-type]


def _run(run: wire.RunRef, blocks: Sequence[Block | None]) -> MovedRun | None:
    """A moved run that a client names; None when a block of it is gone. Raises InvalidRequestError."""
    pieces, target = [], run.target
    if not run.pieces:
        raise InvalidRequestError("a moved run without pieces")
    for piece in run.pieces:
        if piece.block >= len(blocks):
            raise InvalidRequestError(f"a piece of block {piece.block}, {len(blocks)} keys given")
        block = blocks[piece.block]
        if block is None:
            return None
        if not piece.length or piece.offset + piece.length > block.length:
            raise InvalidRequestError(
                f"tokens {piece.offset} to {piece.offset + piece.length} of a block of {block.length}"
            )
        pieces.append(Piece(block, piece.offset, piece.length, target))
        target += piece.length
    return MovedRun(run.target, target - run.target, tuple(pieces))
