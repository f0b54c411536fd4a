"""What an engine has computed so far, and how well its graph sizes fit that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from .call import Call
from .schedule import Cover


@dataclass
class Statistics:
    """Counts of calls that ran, and of plans. Whoever adds to it holds the engine's lock.

    `calls` counts by size C; `padding` is what the sizes exceed the tokens.
    `lengths` counts plans by how many tokens they were to compute, steps of one token in a graph of one left out: what
    `suggest_sizes` goes by. By measured costs the cheapest calls for these plans take `planned_seconds`, and no set of
    calls of these sizes less than `bound_seconds` (see `Cover`).
    """

    calls: Counter[int] = field(default_factory=Counter)
    tokens: int = 0
    padding: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    planned_seconds: float = 0.0
    bound_seconds: float = 0.0

    def ran(self, calls: Sequence[Call]) -> None:
        for call in calls:
            self.calls[call.size] += 1
            self.tokens += len(call.token_ids)
            self.padding += call.size - len(call.token_ids)

    def planned(self, tokens: int, cover: Cover) -> None:
        self.lengths[tokens] += 1
        self.planned_seconds += cover.seconds
        self.bound_seconds += cover.bound
