"""Which prefixes are used the most, of those used lately: known without a look at all blocks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from ..block import Block

_REMEMBERED = 32


class HotPrefix(msgspec.Struct, frozen=True):
    """The first `tokens` tokens of prompts of one identity (the start of its digest), served `hits` times.

    `key` begins the key of the last block, where `tier` is the nearest that holds it.
    """

    identity: str
    key: str
    tokens: int
    hits: int
    tier: str


class RecentPrefixes:
    """The last blocks of the prefixes used last. Called under the store's lock; costs no more where more is held."""

    def __init__(self) -> None:
        self._last: OrderedDict[int, Block] = OrderedDict()

    def used(self, path: Sequence[Block]) -> None:
        """A request used these blocks, root first."""
        if not path:
            return
        last = path[-1]
        self._last[last.number] = last
        self._last.move_to_end(last.number)
        if len(self._last) > _REMEMBERED:
            self._last.popitem(last=False)

    def hottest(self, limit: int) -> list[HotPrefix]:
        """Those that served the most tokens first. A prefix ends where what follows it was used less often."""
        found: dict[int, Block] = {}
        for number, last in list(self._last.items()):
            if not last.namespace.holds(last):
                del self._last[number]
                continue
            path = last.namespace.path(last)
            for at, block in enumerate(path):
                if at + 1 == len(path) or path[at + 1].hits < block.hits:
                    found[block.number] = block
        best = sorted(
            (block for block in found.values() if block.hits),
            key=lambda block: (-block.hits * (block.start + block.length), block.number),
        )
        return [
            HotPrefix(
                identity=block.namespace.digest.hex()[:12],
                key=block.key.hex()[:16],
                tokens=block.start + block.length,
                hits=block.hits,
                tier=block.tier,
            )
            for block in best[:limit]
        ]
