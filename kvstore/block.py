"""A block: up to `block_tokens` consecutive tokens with their KV, the unit that is held, moved and dropped."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from .tiers.arena import Extent

if TYPE_CHECKING:
    from .namespace import Namespace
    from .tiers.memory import MemoryTier

KEY_BYTES = 32


def block_key(identity: bytes, parent: bytes, tokens: NDArray[np.int32], *, exact: bool = True) -> bytes:
    """Name of a block: BLAKE2b-256 over identity, parent's key (empty at position 0) and token ids.

    The chain makes the key speak for all that precedes the block. It is cryptographic because a child finds its
    parent by it after a restart; a lookup compares token ids besides. Blocks that are not exact have keys of their
    own kind, so that no exact block ever takes one for its parent.
    """
    digest = hashlib.blake2b(identity, digest_size=KEY_BYTES, person=b"" if exact else b"kvstore.inexact")
    digest.update(len(parent).to_bytes(1, "little"))
    digest.update(parent)
    digest.update(np.ascontiguousarray(tokens, dtype="<i4").tobytes())
    return digest.digest()


class HeldBlock(Protocol):
    """A held block as engines see it, whether it lies in this process or in the daemon's."""

    @property
    def number(self) -> int: ...
    @property
    def key(self) -> bytes: ...
    @property
    def start(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def cold_bytes(self) -> int: ...
    @property
    def tier(self) -> str: ...
    @property
    def in_memory(self) -> bool: ...


def own_blocks(blocks: Iterable[HeldBlock]) -> list[Block]:
    """Those of this process."""
    return [block for block in blocks if isinstance(block, Block)]


@dataclass(slots=True)
class Residence:
    """Where a block's raw bytes lie in memory."""

    tier: MemoryTier
    extent: Extent


@dataclass(slots=True, eq=False)
class Block:
    """One held block. Immutable but for where it lies and who uses it; the store changes those under its lock.

    `start` is the position of its first token. `cold_bytes` is what it occupies on flash, 0 when it is not there;
    `head_bytes` of these, header and first frame, are read at once, 0 when nobody said how many.
    `exact` False: its KV was computed behind KV that was itself moved; it serves as a moved run, never as a prefix.
    `leases` counts who relies on it: while above 0 it is neither moved nor dropped. `doomed` blocks are no longer
    findable and go when the last lease ends. `purged`: what it leaves in memory then is overwritten. `shared` counts
    the shared beginnings that it is a part of, see `shared_beginnings`: it is not evicted.
    """

    number: int
    key: bytes
    parent_key: bytes
    namespace: Namespace
    tokens: NDArray[np.int32]
    start: int
    nbytes: int
    exact: bool = True
    memory: Residence | None = None
    cold_bytes: int = 0
    head_bytes: int = 0
    leases: int = 0
    doomed: bool = False
    purged: bool = False
    tail: Block | None = None  # the block that this one replaced, kept while only that one is on flash
    aside: bool = False  # doomed, and its record waits under another name for the last lease to end
    waiting: bool = False  # queued for flash
    pinned: bool = False  # part of a pinned prefix: not evicted
    hits: int = 0
    last_use: float = 0.0
    told: tuple[str, int, bytes] | None = (
        None  # what a daemon says of it, while its tier and cold_bytes are these
    )
    leased_since_put: bool = False
    fresh: int = 1  # blocks of its prompt that came with it
    session: int = 0  # the block that its conversation began with
    behind: tuple[bytes, ...] = ()  # keys of the first different blocks that were put behind it
    shared: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def in_memory(self) -> bool:
        return self.memory is not None

    @property
    def tier(self) -> str:
        """Nearest tier that holds it: "hot", "warm", "cold" or "none"."""
        if self.memory is not None:
            return self.memory.tier.name
        return "cold" if self.cold_bytes else "none"
