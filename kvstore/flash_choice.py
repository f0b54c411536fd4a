"""What of a choice is computed after all, because flash is slow to bring it just now (`prefetch.load_or_recompute`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from kvstore.pipeline.layer_groups import shares
from kvstore.pipeline.recompute import AnyRepair
from kvstore.pipeline.schedule import CallCosts
from kvstore.prefetch.load_or_recompute import Decision, Held, decide

from .block import HeldBlock
from .choice import Choice, Declined, repairable, too_short
from .moved import SHORTEST, MovedRun, Piece


def against_flash(
    choice: Choice,
    tokens: int,
    blocks: Sequence[HeldBlock],
    repair: AnyRepair,
    costs: CallCosts,
    bytes_per_second: float | None,
    groups: int,
) -> Choice:
    """`choice` for a prompt of `tokens` tokens, less what is sooner computed than read, and what goes first.

    blocks: those of the prefix. bytes_per_second: of flash as it is now; None, not known yet, loads all. groups: into
    how many layer groups the engine's graphs are split.
    """
    prefix = [
        Piece(block, 0, min(block.length, choice.prefix - block.start), block.start)
        for block in blocks
        if block.start < choice.prefix
    ]
    moved = [piece for run in choice.runs for piece in run.pieces]
    held = [
        Held(piece.target, piece.length, _on_flash(piece.block), is_moved, piece.block.number)
        for pieces, is_moved in ((prefix, False), (moved, True))
        for piece in pieces
    ]
    if bytes_per_second is None or not any(piece.nbytes for piece in held):
        return choice
    speed = bytes_per_second
    decision = decide(
        tokens,
        held,
        lambda front: repair.least(repairable(_kept(choice.runs, front))),
        lambda places: costs.cover_at(places).seconds,
        lambda nbytes: nbytes / speed,
        [float(share) for share in shares(groups)],
    )
    return _applied(choice, decision)


def _applied(choice: Choice, decision: Decision) -> Choice:
    runs = _kept(choice.runs, decision.front)
    begin, end = decision.hole
    prefix, hole = choice.prefix, decision.hole
    if begin < end == prefix:  # nothing of the prefix is loaded behind it
        prefix, hole = begin, (0, 0)
    reason = (
        f"flash is slow: {decision.seconds * 1e3:.1f} ms in all, {decision.load_all * 1e3:.1f} ms with everything "
        "loaded"
    )
    declined = [Declined(begin, end - begin, reason)] if begin < end else []
    for comes_late, part in _parts(choice.runs, decision.front):
        if comes_late or part.length < SHORTEST:
            declined.append(
                Declined(part.target, part.length, reason if comes_late else too_short(part.length))
            )
    return Choice(prefix, runs, tuple(sorted([*choice.declined, *declined])), hole, decision.ahead)


def _kept(runs: Sequence[MovedRun], front: int) -> tuple[MovedRun, ...]:
    """`runs` without what flash holds before `front`, and without remnants that are too short."""
    return tuple(
        part for comes_late, part in _parts(runs, front) if not comes_late and part.length >= SHORTEST
    )


def _parts(runs: Sequence[MovedRun], front: int) -> Iterator[tuple[bool, MovedRun]]:
    """`runs` cut where what flash holds before `front` begins or ends, and of each part whether it is that."""
    for run in runs:
        for comes_late, group in groupby(
            run.pieces, lambda piece: piece.target < front and _on_flash(piece.block) > 0
        ):
            pieces = tuple(group)
            yield comes_late, MovedRun(pieces[0].target, sum(piece.length for piece in pieces), pieces)


def _on_flash(block: HeldBlock) -> int:
    """Bytes that only flash holds; 0 for what lies in memory."""
    return 0 if block.in_memory else block.cold_bytes
