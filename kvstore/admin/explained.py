"""What becomes of a prompt, and what that would cost."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.choice import spread
from kvstore.explain import Explanation
from kvstore.identity import Identity
from kvstore.pipeline.schedule import CallCosts

from .entry import Entry


class Cost(msgspec.Struct, frozen=True):
    """Bytes of KV from memory, bytes of records from flash and how long that takes at the speed measured so far.

    flash_seconds: None where nothing was measured. computed: tokens that go through the model, recomputed ones
    included. compute_seconds: of the cheapest calls for so many, None where it is not known what calls cost.
    """

    memory_bytes: int
    flash_bytes: int
    flash_seconds: float | None
    computed: int
    compute_seconds: float | None


class Explained(msgspec.Struct, frozen=True):
    """Of the `tokens` of a prompt under one identity; see `Explanation`."""

    identity: str
    tokens: int
    explanation: Explanation
    cost: Cost


def explained(
    tokens: int,
    identity: Identity,
    explanation: Explanation,
    held: Mapping[str, Entry],
    bytes_per_second: float | None,
    costs: CallCosts | None,
) -> Explained:
    """`held`: blocks by key in hex."""
    memory = flash = 0.0
    for span in explanation.spans:
        if span.source in ("hot", "warm"):
            memory += identity.layout.block_bytes(span.length)
        elif span.source == "cold" and span.block is not None and (entry := held.get(span.block)) is not None:
            flash += entry.flash_bytes * span.length / len(entry.tokens)
    through = explanation.computed + explanation.recomputed
    cost = Cost(
        int(memory),
        int(flash),
        flash / bytes_per_second if bytes_per_second else None,
        through,
        None if costs is None else costs.cover_at(_computed(explanation, through)).seconds,
    )
    return Explained(identity.digest().hex(), tokens, explanation, cost)


def _computed(explanation: Explanation, count: int) -> NDArray[np.int64]:
    """Places of the `count` tokens that go through the model; where that is not known yet, evenly over moved runs."""

    def places_of(*kinds: str) -> NDArray[np.int64]:
        spans = (span for span in explanation.spans if span.kind in kinds)
        each = (np.arange(span.start, span.start + span.length) for span in spans)
        return np.concatenate([np.empty(0, dtype=np.int64), *each])

    places, moved = places_of("computed", "recomputed"), places_of("moved")
    return np.sort(np.concatenate([places, spread(moved, count - len(places))]))
