"""What becomes of a prompt, and what that would cost."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

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
        None if costs is None else costs.cover(through).seconds,
    )
    return Explained(identity.digest().hex(), tokens, explanation, cost)
