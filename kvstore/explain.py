"""Why a prompt is reused as far as it is, and not further."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from .block import Block
from .identity import Identity
from .namespace import Namespace
from .tiers import Tiers


class Span(msgspec.Struct, frozen=True):
    """`length` tokens from `start` on: loaded from `tier` out of `block`, or computed, because of `reason`."""

    start: int
    length: int
    source: Literal["hot", "warm", "cold", "compute"]
    block: str | None = None
    reason: str | None = None


class Explanation(msgspec.Struct, frozen=True):
    """Spans cover the prompt exactly once, in order. `notes` name what another identity would have found."""

    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()


def explain(
    tokens: NDArray[np.int32],
    blocks: Sequence[Block],
    length: int,
    namespace: Namespace,
    tiers: Tiers,
    identity: Identity,
    reason: str | None = None,
) -> Explanation:
    """`blocks` serve the first `length` tokens; `reason` why not more, when it is not in what is held.

    Called under the store's lock.
    """
    spans = [
        Span(
            start=block.start,
            length=min(block.length, length - block.start),
            source=_nearest(block.tier),
            block=block.key.hex(),
        )
        for block in blocks
    ]
    if length < len(tokens):
        why = reason or _why(tokens, namespace, blocks, length)
        spans.append(Span(length, len(tokens) - length, "compute", reason=why))
    return Explanation(tuple(spans), tuple(_elsewhere(tokens, length, namespace, tiers, identity)))


def _nearest(tier: str) -> Literal["hot", "warm", "cold", "compute"]:
    return tier if tier in ("hot", "warm", "cold") else "compute"  # type: ignore[return-value]


def _why(tokens: NDArray[np.int32], namespace: Namespace, blocks: Sequence[Block], length: int) -> str:
    if not namespace.by_key:
        return "nothing is held for this identity"
    if not blocks:
        return "no held prompt begins with these tokens"
    last = blocks[-1]
    inside = length - last.start
    if inside < last.length:
        return f"diverges at {length}: token {tokens[length]} here, {last.tokens[inside]} in the held block"
    if namespace.is_leaf(last):
        return f"what is held ends at {length}"
    return f"held continuations diverge at {length}"


def _elsewhere(
    tokens: NDArray[np.int32], length: int, namespace: Namespace, tiers: Tiers, identity: Identity
) -> list[str]:
    """Other identities of the same tenant under which more of the prompt is held, and how they differ."""
    notes = []
    for other in tiers.namespaces.values():
        if other is namespace or other.identity is None or other.identity.tenant_salt != identity.tenant_salt:
            continue
        _, further = other.match(tokens)
        if further > length:
            parts = ", ".join(str(part) for part in identity.diff(other.identity))
            notes.append(f"{further} tokens are held under another identity; it differs in {parts}")
    return notes
