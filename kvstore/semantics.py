"""What the held blocks of one identity speak of: a semantic index with their lifetime.

It proposes blocks to fetch ahead, and is not asked at look-up. The chunk table finds every run of 32 tokens that
similar texts have in common, so that nothing is left for it to propose: `bench.near_duplicates` measures that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.index import semantic
from kvstore.index.embedder import Embedder

if TYPE_CHECKING:
    from .block import Block, HeldBlock
    from .flash.ciphers import Sealer
    from .tiers.tiers import Tiers

TextOfTokens = Callable[[NDArray[np.int32]], str]
"""The text of token ids int32 [n]; called from a background thread, too."""

_CAPACITY = 100_000
_TOLD = 64  # texts that wait at most
_SHARE = 32  # part of all vectors that has to change: so 32 times their size is written at most


class Neighbour(NamedTuple):
    """A held block, and the cosine of what it speaks of and what was asked for, -1 to 1."""

    block: HeldBlock
    similarity: float


class Semantics:
    """Blocks by what they speak of, found once a background thread has embedded them.

    text_of_tokens None: texts are told from outside, where someone can read them, see `untold`.

    Vectors are kept in the file `path`. Any thread may call; adding and removing are a matter of microseconds. Do not
    hold the store's lock around `save`, which takes it, nor around `delete_file` and `close`, which may have to wait.
    """

    def __init__(
        self,
        embedder: Embedder,
        text_of_tokens: TextOfTokens | None,
        path: Path | None,
        block_tokens: int,
        cipher: Sealer | None = None,
    ) -> None:
        self.embedder = embedder
        self._text_of_tokens = text_of_tokens
        self._block_tokens = block_tokens
        self._untold: dict[int, Block] = {}
        # As many may wait as are held: else most are refused when another embedder makes all vectors anew.
        self._index = semantic.SemanticIndex(
            embedder, path, capacity=_CAPACITY, queue=_CAPACITY, cipher=cipher
        )

    def add(self, block: Block) -> None:
        """Index a block that became findable."""
        if self._text_of_tokens is not None:
            self._index.add(block.number, block.key, partial(self._text_of_tokens, block.tokens))
        elif not self._index.restore(block.number, block.key):
            self._untold[block.number] = block

    def remove(self, block: Block) -> None:
        """Forget a block."""
        self._untold.pop(block.number, None)
        self._index.remove(block.number)

    def untold(self, most: int) -> tuple[list[Block], bool]:
        """At most `most` blocks whose text is wanted, and False; none while many wait for the embedder, and True then.

        Called under the store's lock.
        """
        if self._index.stats().waiting >= _TOLD:
            return [], bool(self._untold)
        return list(itertools.islice(self._untold.values(), most)), False

    def tell(self, block: Block, text: str) -> None:
        """The text of a block, of which nothing is kept once it is embedded. Called under the store's lock."""
        if self._untold.pop(block.number, None) is not None:
            self._index.add(block.number, block.key, text)

    def nearest(self, query: str | NDArray[np.int32], k: int) -> list[semantic.Neighbour]:
        """The at most `k` block numbers nearest to a text, or to any part of tokens int32 [n]; nearest first.

        Embeds in the caller's thread: a text as a whole, tokens a block's length at a time. Nothing while the
        embedder is not loaded or when it fails, or of tokens that nobody can read here. Raises ValueError for a `k`
        below 1.
        """
        if isinstance(query, str):
            return self._index.search(query, k)
        size, read = self._block_tokens, self._text_of_tokens
        if read is None:
            return []
        parts: list[semantic.Text] = [
            partial(read, query[at : at + size]) for at in range(0, len(query), size)
        ]
        best: dict[int, float] = {}
        for found in self._index.search_all(parts, k):
            for block, similarity in found:
                best[block] = max(similarity, best.get(block, -1.0))
        ranked = sorted(best.items(), key=lambda pair: pair[1], reverse=True)
        return [semantic.Neighbour(*pair) for pair in ranked[:k]]

    def stats(self) -> semantic.SemanticStats:
        """What waits includes blocks whose text nobody told yet."""
        found = self._index.stats()
        return found._replace(waiting=found.waiting + len(self._untold))

    def save(self, tiers: Tiers, *, all_of_it: bool) -> None:
        """Write the file of vectors anew, within the budgets of flash; unless `all_of_it`, only when enough changed.

        By the thread that writes to flash. Raises OSError (no room, today's budget spent): then blocks are embedded
        again after the next start.
        """
        cold, unsaved = tiers.cold, self._index.unsaved
        if cold is None or not unsaved or (not all_of_it and unsaved * _SHARE < len(self._index)):
            return
        needed = self._index.file_bytes
        with tiers.lock:  # the old file stays until the new one is complete
            room = tiers.reserve_cold(needed)
        if room is None:
            raise OSError("cold tier full")
        try:
            if not cold.writes.take(needed):
                raise OSError("today's write budget is spent")
            written = self._index.save()
            cold.bytes_written += written
            cold.writes.give_back(max(0, needed - written))
        finally:
            with tiers.lock:
                cold.release(room)
                cold.measure_overhead()

    def delete_file(self) -> None:
        """Leave no vector on flash; the next `save` writes those of what is held then. Raises OSError."""
        self._index.delete_file()

    def close(self) -> None:
        """Stop the background thread, after what it has in hand. What still waits has no vector then."""
        self._index.close()
