"""What slow flash leaves of moved runs, and why the rest is computed."""

from __future__ import annotations

import pytest

from kvstore.choice import Choice
from kvstore.daemon.wire import BlockRef
from kvstore.flash_choice import against_flash
from kvstore.moved import MovedRun, Piece
from kvstore.pipeline.recompute import FirstTokens
from kvstore.pipeline.schedule import CallCosts


def run_of(*parts: tuple[int, str], target: int) -> MovedRun:
    """A run of blocks of so many tokens, each in its tier."""
    pieces = []
    at = target
    for number, (length, tier) in enumerate(parts):
        on_flash = 1 << 20 if tier == "cold" else 0
        block = BlockRef(number, bytes([number]) * 32, 0, length, 4096, on_flash, tier)
        pieces.append(Piece(block, 0, length, at))
        at += length
    return MovedRun(target, at - target, tuple(pieces))


@pytest.mark.parametrize("between", [8, 31, 32, 40])
def test_each_part_that_is_not_loaded_says_its_own_reason(between: int) -> None:
    """What lay in memory, and was too short alone, was said to be computed because flash is slow."""
    run = run_of((32, "cold"), (between, "warm"), (20, "cold"), (20, "cold"), (40, "warm"), target=10)
    choice = against_flash(
        Choice(0, (run,), ()), 300, (), FirstTokens(4), CallCosts({16: 0.001}), bytes_per_second=1.0, groups=4
    )
    middle = (42, between)
    loaded = [(part.target, part.length) for part in choice.runs]
    assert loaded == ([middle] if between >= 32 else []) + [(82 + between, 40)]
    told = {(start, length): reason for start, length, reason in choice.declined}
    assert told.keys() == {(10, 32), (42 + between, 40)} | ({middle} if between < 32 else set())
    for place, reason in told.items():
        expected = f"only {between} tokens in a row" if place == middle else "flash is slow: "
        assert reason.startswith(expected)
