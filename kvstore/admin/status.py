"""What is held in all: tiers, identities, pins."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec

from kvstore.identity import Identity
from kvstore.quality.reuse import Policy, Verdict
from kvstore.tiers.pins import Pin
from kvstore.watch.stats import PolicyInUse, TierStats, in_use

from .entry import Entry, tenant_of


class IdentityStatus(msgspec.Struct, frozen=True):
    """Blocks of one identity. `kv_bytes` is their KV as engines see it, None where nobody described the identity.

    adapters: content digests of those at work. tokenizer: its digest, "?" where that is not known. policies: what each
    does to moved runs, by the verdict; none where the identity was never measured.
    """

    identity: str
    description: str
    tenant: str
    adapters: tuple[str, ...]
    tokenizer: str
    codec: str
    blocks: int
    tokens: int
    kv_bytes: int | None
    flash_bytes: int
    hits: int
    policies: dict[Policy, PolicyInUse]


class PinStatus(msgspec.Struct, frozen=True):
    """A pinned prefix: how many tokens, and the first of them, at most 48."""

    identity: str
    tokens: int
    first: tuple[int, ...]


class Status(msgspec.Struct, frozen=True):
    """`owner` is the pid of the process that has the directory open, None for none.

    Of a directory that is not open here, only the cold tier can be told, and counters are those of the owner to tell.
    `pinned_bytes` of at most `most_pinned_bytes`. The rest as in `Stats`.
    """

    directory: str | None
    owner: str | None
    block_tokens: int
    blocks: int
    tokens: int
    tiers: dict[str, TierStats]
    identities: tuple[IdentityStatus, ...]
    pins: tuple[PinStatus, ...]
    pinned_bytes: int
    most_pinned_bytes: int
    quarantined: int
    index: str | None
    waiting: int
    counts: dict[str, int]
    refusals: dict[str, int]
    misses: dict[str, int]
    bad_records: dict[str, int]


def identity_statuses(
    entries: Iterable[Entry], identities: Mapping[bytes, Identity], verdicts: Mapping[bytes, Verdict]
) -> tuple[IdentityStatus, ...]:
    """Of each identity that is described or has blocks, most tokens first."""
    blocks, tokens, flash, hits = Counter[bytes](), Counter[bytes](), Counter[bytes](), Counter[bytes]()
    for entry in entries:
        blocks[entry.identity] += 1
        tokens[entry.identity] += len(entry.tokens)
        flash[entry.identity] += entry.flash_bytes
        hits[entry.identity] += entry.hits
    found = []
    for digest in sorted({*blocks, *identities}, key=lambda digest: (-tokens[digest], digest)):
        identity = identities.get(digest)
        verdict = verdicts.get(digest if identity is None else _measured(identity))
        found.append(
            IdentityStatus(
                digest.hex(),
                "nobody described this identity" if identity is None else str(identity),
                tenant_of(identity),
                () if identity is None else tuple(each.digest for each in identity.adapters),
                "?" if identity is None else identity.tokenizer,
                "?" if identity is None else identity.codec,
                blocks[digest],
                tokens[digest],
                None if identity is None else identity.layout.block_bytes(tokens[digest]),
                flash[digest],
                hits[digest],
                {} if verdict is None else in_use(verdict),
            )
        )
    return tuple(found)


def _measured(identity: Identity) -> bytes:
    """Whose verdict counts for an identity under whatever codec."""
    return msgspec.structs.replace(identity, codec="lossless").digest()


def pin_statuses(pins: Iterable[Pin]) -> tuple[PinStatus, ...]:
    return tuple(
        PinStatus(pin.identity.hex(), len(pin.tokens) // 4, tuple(pin.token_ids()[:48].tolist()))
        for pin in pins
    )
