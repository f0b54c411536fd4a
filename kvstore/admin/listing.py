"""Held blocks page by page, in an order and with filters. A page names where the next one begins.

What is put or dropped between two pages may or may not appear; what is held all the while appears once, unless it is
used in between and the order goes by use.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol, TypeVar, cast, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequestError
from kvstore.identity import Identity

from .entry import BlockRow, Entry, row_of, tenant_of

Order = Literal["key", "recent", "hits", "size"]

_MOST = 10_000  # blocks a page
_Place = tuple[float, bytes]


class Listed(Protocol):
    """What lists go by; `Block` and `Entry` have it."""

    @property
    def key(self) -> bytes: ...
    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def tier(self) -> str: ...
    @property
    def hits(self) -> int: ...
    @property
    def last_use(self) -> float: ...
    @property
    def pinned(self) -> bool: ...


Found = TypeVar("Found", bound=Listed)


class Filters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which blocks are meant; what is None does not matter.

    identity, block: first digits in hex. tenant: as lists show it, "" for blocks of none. tier: hot, warm or cold.
    Ages in seconds since the last use. Sizes in tokens.
    """

    identity: str | None = None
    block: str | None = None
    tenant: str | None = None
    tier: str | None = None
    min_age: float | None = None
    max_age: float | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    min_hits: int | None = None
    max_hits: int | None = None
    pinned: bool | None = None

    def __post_init__(self) -> None:
        if self.tier not in (None, "hot", "warm", "cold"):
            raise InvalidRequestError(f"tier {self.tier!r} is not hot, warm or cold")

    def test(
        self, describe: Callable[[Listed], Entry], identities: Mapping[bytes, Identity]
    ) -> Callable[[Listed], bool] | None:
        """Whether a block is meant; None where all are."""
        now = time.time()
        newest = None if self.min_age is None else now - self.min_age
        oldest = None if self.max_age is None else now - self.max_age
        tests: list[Callable[[Listed], bool]] = []
        if self.block is not None:
            digits = self.block.lower()
            tests.append(lambda block: block.key.hex().startswith(digits))
        if self.tier is not None:
            tests.append(lambda block: block.tier == self.tier)
        if self.pinned is not None:
            tests.append(lambda block: block.pinned == self.pinned)
        for least, most, of in (
            (oldest, newest, _last_use),
            (self.min_tokens, self.max_tokens, _length),
            (self.min_hits, self.max_hits, _hits),
        ):
            if least is not None or most is not None:
                tests.append(_between(least, most, of))
        if self.identity is not None:
            first = self.identity.lower()
            tests.append(lambda block: describe(block).identity.hex().startswith(first))
        if self.tenant is not None:
            theirs = {digest for digest, each in identities.items() if tenant_of(each) == self.tenant}
            tests.append(lambda block: describe(block).identity in theirs)
        return (lambda block: all(test(block) for test in tests)) if tests else None


class Page(msgspec.Struct, frozen=True):
    """Some blocks in order. `after` asks for the next page; None on the last one."""

    blocks: tuple[BlockRow, ...]
    after: str | None


def page(
    blocks: Sequence[Found],
    describe: Callable[[Found], Entry],
    identities: Mapping[bytes, Identity],
    filters: Filters,
    order: Order = "key",
    after: str | None = None,
    limit: int = 100,
) -> Page:
    """At most `limit` blocks behind the place `after`. Raises InvalidRequestError.

    Only blocks of the page are described, and those whose identity matters. order: key; recent, used last first; hits,
    most first; size, most tokens first.
    """
    if order not in get_args(Order):
        raise InvalidRequestError(f"order {order!r} is not {', '.join(get_args(Order))}")
    if not 1 <= limit <= _MOST:
        raise InvalidRequestError(f"limit {limit} must lie between 1 and {_MOST}")
    meant = filters.test(cast(Callable[[Listed], Entry], describe), identities)
    chosen = blocks if meant is None else [block for block in blocks if meant(block)]
    place = _ORDERS[order]
    if after is not None:
        behind = _place(after, order)
        chosen = [block for block in chosen if place(block) > behind]
    found = heapq.nsmallest(limit + 1, chosen, key=place)
    more = len(found) > limit
    rows = tuple(row_of(describe(block), identities) for block in found[:limit])
    return Page(rows, _cursor(place(found[limit - 1])) if more else None)


_ORDERS: dict[Order, Callable[[Listed], _Place]] = {
    "key": lambda block: (0.0, block.key),
    "recent": lambda block: (-block.last_use, block.key),
    "hits": lambda block: (-float(block.hits), block.key),
    "size": lambda block: (-float(len(block.tokens)), block.key),
}


def _cursor(place: _Place) -> str:
    return f"{place[0]!r}:{place[1].hex()}"


def _place(cursor: str, order: str) -> _Place:
    number, colon, key = cursor.partition(":")
    try:
        if colon:
            return float(number), bytes.fromhex(key)
    except ValueError:
        pass
    raise InvalidRequestError(
        f"{cursor!r} is no place in a list; give what the page before said (order {order})"
    )


def _last_use(block: Listed) -> float:
    return block.last_use


def _length(block: Listed) -> float:
    return len(block.tokens)


def _hits(block: Listed) -> float:
    return block.hits


def _between(
    least: float | None, most: float | None, of: Callable[[Listed], float]
) -> Callable[[Listed], bool]:
    return lambda block: (least is None or of(block) >= least) and (most is None or of(block) <= most)
