"""Recency weighted by frequency: each use counts, and counts half after a while (LRFU, Lee et al., IEEE ToC 2001)."""

from __future__ import annotations

from math import log2
from typing import Any

from .ranked import Ranked


class FrequencyWeightedLru(Ranked):
    """The rank of a block is the sum over its uses of 2^((use - now) / half-life).

    Time goes in uses of blocks; a use counts half after as many as the tier has room for. As all sums fall at one rate,
    they are kept as the logarithm of what they were at time 0, which changes only with a use.
    """

    name = "frequency-weighted lru"

    def _rank(self, block: int, before: Any) -> float:  # noqa: ARG002
        this = self.now / self.room
        if before is None:
            return this
        high, low = max(this, before), min(this, before)
        return float(high + log2(1 + 2.0 ** max(low - high, -60.0)))
