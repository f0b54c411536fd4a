"""Which static-graph calls compute n tokens at the least measured cost.

A graph computes exactly C tokens, so n tokens take several calls and the last one may be padded. The cheapest set
of calls is a dynamic program over the number of tokens still to compute, with T(C) the measured time of one call:

    f(0) = 0,   f(n) = min over C of  f(max(0, n - C)) + T(C)

the covering step of the scheduler of "Dynamic Flow, Static Graph" (arXiv 2609.34727), with times in place of
padding: 150 tokens are 128 + 32 where a padded 256 costs more, and one call where it does not.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import msgspec


class Cover(msgspec.Struct, frozen=True):
    """Calls for consecutive tokens: their sizes, largest first, and how many places of the last one are padding."""

    sizes: tuple[int, ...]
    padding: int
    seconds: float


class CallCosts:
    """Measured seconds of one call by its size C, at one context length. Not for use by two threads at once.

    Raises ValueError if there is no size, or a size or a time is not positive.
    """

    def __init__(self, seconds: Mapping[int, float]) -> None:
        if not seconds or min(seconds) < 1 or not min(seconds.values()) > 0:
            raise ValueError(f"call sizes and their seconds must be positive: {dict(seconds)}")
        self.seconds = dict(sorted(seconds.items()))
        self._best = [0.0]
        self._last = [0]  # size of one call of the best cover of n tokens

    def cover(self, tokens: int) -> Cover:
        """The cheapest calls for `tokens` >= 0 consecutive tokens; among equals the one with the larger calls."""
        for n in range(len(self._best), tokens + 1):
            cost, size = min(
                (self._best[max(0, n - size)] + seconds, -size) for size, seconds in self.seconds.items()
            )
            self._best.append(cost)
            self._last.append(-size)
        sizes, left = [], tokens
        while left > 0:
            sizes.append(self._last[left])
            left -= sizes[-1]
        # Largest first: all padding then fits into the last call, or that call would not have been needed.
        return Cover(tuple(sorted(sizes, reverse=True)), -left, self._best[tokens])


class CostTable:
    """Costs of a device by context length S, measured once and kept in the JSON file at `path`.

    The file says seconds by S by C. A file that is damaged or of other sizes is measured anew, never an error.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._costs: dict[int, CallCosts] = {}

    def at(self, slots: int, sizes: Collection[int], measure: Callable[[], Mapping[int, float]]) -> CallCosts:
        """Costs of calls of these sizes over `slots` slots; `measure` is called if they are not known."""
        if slots not in self._costs:
            known = self._read()
            seconds = known.get(slots, {})
            if set(seconds) != set(sizes) or not min(seconds.values(), default=0) > 0:
                known[slots] = dict(measure())
                self._write(known)
            self._costs[slots] = CallCosts(known[slots])
        return self._costs[slots]

    def _read(self) -> dict[int, dict[int, float]]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[int, dict[int, float]])
        except (FileNotFoundError, msgspec.DecodeError):
            return {}

    def _write(self, costs: Mapping[int, Mapping[int, float]]) -> None:
        with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=".costs-", delete=False) as file:
            file.write(msgspec.json.encode(costs))
        os.replace(file.name, self._path)
