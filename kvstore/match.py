"""What a look-up found."""

from __future__ import annotations

from typing import NamedTuple

from .block import HeldBlock
from .moved import MovedRun


class Match(NamedTuple):
    """The first `length` of the tokens asked for are held, in `blocks`; `runs` elsewhere."""

    length: int
    blocks: tuple[HeldBlock, ...]
    runs: tuple[MovedRun, ...] = ()
