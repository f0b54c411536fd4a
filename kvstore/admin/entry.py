"""One held block as administration sees it, be it in an open store or only on flash."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.block import Block
from kvstore.errors import InvalidRequestError
from kvstore.flash.cold_index import Row
from kvstore.identity import Identity


class Entry(NamedTuple):
    """A snapshot. `tokens` int32 [n] from position `start` on; `last_use` unix seconds; `flash_bytes` as allocated.

    `tier` is the nearest that holds it. Fields else as in `Block`.
    """

    key: bytes
    identity: bytes
    parent_key: bytes
    start: int
    tokens: NDArray[np.int32]
    exact: bool
    tier: str
    flash_bytes: int
    hits: int
    last_use: float
    pinned: bool
    leases: int


def of_block(block: Block) -> Entry:
    """Any thread may ask at any time."""
    memory, flash_bytes = block.memory, block.cold_bytes
    return Entry(
        block.key,
        block.namespace.digest,
        block.parent_key,
        block.start,
        block.tokens,
        block.exact,
        memory.tier.name if memory is not None else "cold" if flash_bytes else "none",
        flash_bytes,
        block.hits,
        block.last_use,
        block.pinned,
        block.leases,
    )


def of_row(row: Row) -> Entry:
    return Entry(
        row.key,
        row.identity,
        row.parent_key,
        row.start,
        np.frombuffer(row.tokens, "<i4").astype(np.int32),
        row.exact,
        "cold",
        row.file_bytes,
        row.hits,
        row.last_use,
        False,
        0,
    )


class BlockRow(msgspec.Struct, frozen=True):
    """A block in a list. `block`, `identity`, `parent` in hex; `kv_bytes` None for an identity nobody described.

    `tenant` as `tenant_of` gives it. The rest as in `Entry`.
    """

    block: str
    identity: str
    tenant: str
    tier: str
    start: int
    tokens: int
    kv_bytes: int | None
    flash_bytes: int
    hits: int
    last_use: float
    exact: bool
    pinned: bool
    leases: int
    parent: str


def row_of(entry: Entry, identities: Mapping[bytes, Identity]) -> BlockRow:
    identity = identities.get(entry.identity)
    return BlockRow(
        entry.key.hex(),
        entry.identity.hex(),
        tenant_of(identity),
        entry.tier,
        entry.start,
        len(entry.tokens),
        None if identity is None else identity.layout.block_bytes(len(entry.tokens)),
        entry.flash_bytes,
        entry.hits,
        entry.last_use,
        entry.exact,
        entry.pinned,
        entry.leases,
        entry.parent_key.hex(),
    )


def tenant_of(identity: Identity | None) -> str:
    """A name for whoever has this identity's salt, which does not give the salt away; "" for none, "?" if unknown."""
    if identity is None:
        return "?"
    return tenant_name(identity.tenant_salt)


def tenant_name(salt: bytes) -> str:
    """The same of a salt."""
    return salt[-32:].hex()[:16]


def chosen_identity(named: str | None, known: Iterable[bytes]) -> bytes:
    """The one digest that begins with `named` (hex), or the only one there is. Raises InvalidRequestError."""
    digests = sorted(known)
    fitting = digests if named is None else [each for each in digests if each.hex().startswith(named.lower())]
    if len(fitting) == 1:
        return fitting[0]
    names = ", ".join(each.hex()[:12] for each in (fitting or digests)[:6]) or "none"
    if named is None:
        raise InvalidRequestError(
            f"{len(digests)} identities are held ({names}); name one by its first digits"
        )
    raise InvalidRequestError(
        f"identity {named!r} names {len(fitting)} of those held ({names}); give the first digits of one"
    )


def chosen_entry(named: str, entries: Sequence[Entry]) -> Entry:
    """The one block whose key begins with `named` (hex). Raises InvalidRequestError."""
    found = [entry for entry in entries if entry.key.hex().startswith(named.lower())] if named else []
    if len(found) == 1:
        return found[0]
    if not found:
        raise InvalidRequestError(f"no held block is called {named!r}; `kvstore ls` gives their names")
    names = ", ".join(entry.key.hex()[: len(named) + 8] for entry in found[:4])
    raise InvalidRequestError(f"{named!r} names {len(found)} blocks ({names}); give more digits")


def path_to(entry: Entry, by_key: dict[bytes, Entry], block_tokens: int) -> list[Entry]:
    """Held blocks from the nearest to the root that is held down to `entry`, each the parent of the next."""
    path = [entry]
    while entry.exact and entry.parent_key and (above := by_key.get(entry.parent_key)) is not None:
        if above.start + block_tokens != entry.start or len(above.tokens) != block_tokens:
            break
        path.append(entry := above)
    return path[::-1]
