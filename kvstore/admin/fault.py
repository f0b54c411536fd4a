"""What `verify` found."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal[
    "format",  # FORMAT is damaged, or contradicts what is held
    "index",  # the index file is not what its name says
    "row without record",
    "record without row",
    "row differs",  # from the record it speaks of, or from the key it stands under
    "counter",  # sizes, hits or times that cannot be, or tiers that do not add up
    "duplicate",  # two records or rows of one block
    "record",  # a record file that cannot be read: truncated, or a checksum is wrong
    "name",  # a record under another name than its own
    "identity",  # a record that says it is of another identity than its key was made for
    "key",  # a key that does not follow from identity, parent and tokens
    "tokens",  # token ids or a number of them that cannot be
    "position",
    "parent",
    "frames",  # layer groups that are missing, or are not those of the layout
    "padding",  # bytes that must be zero
    "memory",  # a block in memory that is not what flash holds of it
    "stranger",  # a file that is none of ours
    "identity note",
    "verdict",
    "vectors",
    "write count",
    "pins",
]


class Fault(msgspec.Struct, frozen=True):
    """One thing that is wrong: with which entry (a file below the directory, or a block), what was found, the way out.

    `block` is its key in hex where that is known. `repaired` says what was done; None: nothing yet.
    """

    kind: Kind
    entry: str
    found: str
    cure: str
    block: str | None = None
    repaired: str | None = None


class Verified(msgspec.Struct, frozen=True):
    """What was checked and what came of it. `notes` are worth knowing, and nothing is wrong about them."""

    blocks: int
    bytes_read: int
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong that was not repaired."""
        return all(fault.repaired is not None for fault in self.faults)
