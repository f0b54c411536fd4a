"""What the indexes refuse. After any of these errors the index is unchanged."""

from __future__ import annotations


class TokenError(ValueError):
    """These are not token ids; the message names the value and its position, or the shape or dtype."""


class UnknownBlock(LookupError):
    """The index holds no block of this number."""


class BlockRefused(ValueError):
    """This block cannot stand here; the message says what would fit."""
