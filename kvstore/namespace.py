"""All blocks of one identity: the walls that KV never crosses.

One layout; trie, chunk table and, where an engine gave an embedder, a semantic index with one lifetime.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.index.chunks import ChunkTable, Held
from kvstore.index.trie import Trie
from kvstore.prefetch.cost import Recompute

from .block import Block, HeldBlock
from .codec import Codec
from .identity import Identity
from .layout import Layout
from .moved import SHORTEST, MovedRun, moved_run
from .semantics import Semantics

ROOT_KEY = b""
"""Parent key of a block at position 0."""

_WINDOW = 16

_ROOM = 1024  # blocks that a chunk table has room for at least


class Namespace:
    """Blocks of one identity digest, findable by tokens. Called under the store's lock.

    Until someone opens the identity only its digest is known: its blocks count against the budget and age, but
    nobody can read them. A prefix reaches the blocks in the trie. Not there, and found only as moved runs, are
    orphans, whose parent is not held, and blocks that are not exact.
    """

    def __init__(self, digest: bytes, block_tokens: int) -> None:
        self.digest = digest
        self.identity: Identity | None = None
        self.tenant = b""
        """The salt that its identity has; known before somebody opens it where the directory says so."""
        self.flash_bytes = 0
        """What its blocks occupy on flash."""
        self.layer_groups: tuple[range, ...] = ()
        self.semantics: Semantics | None = None
        self.recompute: Recompute | None = None
        """What computing takes, where an engine has told."""
        self.trie = Trie(block_tokens)
        self.by_key: dict[bytes, Block] = {}
        self._by_number: dict[int, Block] = {}
        self._orphans: dict[bytes, list[Block]] = {}
        self._chunks: ChunkTable | None = None  # made by the first search: prefix reuse alone needs none

    def open(self, identity: Identity, frame_bytes: int) -> None:
        """Make the blocks readable. A block is cut into as many layer groups as leave each about `frame_bytes`."""
        self.identity = identity
        self.tenant = identity.tenant_salt
        layout = identity.layout
        holding = sum(layer.holds_kv for layer in layout.layers)
        whole = layout.block_bytes(self.trie.block_tokens)
        self.layer_groups = layout.groups(min(holding, max(1, whole // frame_bytes)))
        for block in self.by_key.values():
            block.nbytes = layout.block_bytes(block.length)

    @property
    def layout(self) -> Layout:
        """How the bytes of a block are laid out. Only for a namespace that was opened."""
        assert self.identity is not None, "a namespace is read only through a store opened with its identity"
        return self.identity.layout

    @property
    def codec(self) -> Codec:
        """How its blocks are written to flash. Only for a namespace that was opened."""
        assert self.identity is not None, (
            "a namespace is written only through a store opened with its identity"
        )
        return self.identity.codec

    def frame(self, group: int, tokens: int) -> slice:
        """Where a layer group lies in the raw bytes of a block of `tokens` tokens."""
        return self.layout.span(self.layer_groups[group], tokens)

    def frames(self, tokens: int) -> list[slice]:
        """Where each layer group lies in the raw bytes of a block of `tokens` tokens."""
        return [self.layout.span(group, tokens) for group in self.layer_groups]

    def match(self, tokens: ArrayLike) -> tuple[list[Block], int]:
        """Blocks from the root down and the number of tokens they cover, for the longest held prefix."""
        found = self.trie.lookup(tokens)
        return [self._by_number[number] for number in found.blocks], found.length

    def moved(
        self, tokens: NDArray[np.int32], start: int, boundaries: Sequence[int], shortest: int = SHORTEST
    ) -> list[MovedRun]:
        """Runs of tokens[start:] that are held anywhere, disjoint and ascending, each from its best copy."""
        if self._chunks is None:
            self._chunks = self._table()
        runs = self._chunks.find(tokens, start=start, shortest=shortest, boundaries=boundaries)
        return [moved_run(run, tokens, self._by_number.__getitem__, self._before) for run in runs]

    def use_semantics(self, semantics: Semantics) -> Semantics | None:
        """Index all that is held, what was used last first, and what comes from now on; returns what did so before."""
        before, self.semantics = self.semantics, semantics
        for block in sorted(self.by_key.values(), key=lambda block: block.last_use, reverse=True):
            semantics.add(block)
        return before

    def block(self, number: int) -> Block | None:
        """The findable block of this number."""
        return self._by_number.get(number)

    def below(self, tokens: NDArray[np.int32]) -> list[Block]:
        """All blocks that this prefix leads to, leaves first; for no tokens, every block."""
        found = [self._by_number[number] for number in self.trie.below(tokens)]
        if not len(tokens):
            found += [block for block in self.by_key.values() if block.number not in self.trie]
        return found

    def orphans(self) -> list[Block]:
        """Exact blocks that no prefix reaches, since their parent is not held."""
        return [block for waiting in self._orphans.values() for block in waiting]

    def parent(self, block: Block) -> Block | None:
        """The held block whose tokens come right before this one's in a prefix."""
        return self._above(block) if block.exact else None

    def path(self, block: Block) -> list[Block]:
        """The blocks of a prefix from the root down to `block`; none when no prefix reaches it."""
        if block.number not in self.trie:
            return []
        found = [block]
        while (above := self._above(found[-1])) is not None:
            found.append(above)
        return found[::-1]

    def children(self, block: Block) -> list[Block]:
        """The held blocks right behind `block`."""
        if block.number not in self.trie:
            return []
        return [self._by_number[number] for number in self.trie.children(block.number)]

    def holds(self, block: HeldBlock) -> bool:
        """Whether this very block is still findable."""
        return self.by_key.get(block.key) is block

    def is_leaf(self, block: Block) -> bool:
        """Whether dropping it would leave no held block without its prefix."""
        return block.number not in self.trie or self.trie.is_leaf(block.number)

    def add(self, block: Block) -> tuple[Block | None, Block | None]:
        """Make a complete block findable: (the block that stands for its tokens now, a tail that it replaces).

        When an older block holds the same tokens, or continues them, that one is returned and nothing is added;
        when a block of other tokens has the same key, None is.
        """
        above = self._above(block)
        twin = self.by_key.get(block.key)
        if twin is not None:
            return (twin if self._is_same(twin, block, above) else None), None
        if not block.exact:
            self._hold(block, self._before(block), ())
            return block, None
        if block.parent_key != ROOT_KEY and above is None:
            self._orphans.setdefault(block.parent_key, []).append(block)
            self._hold(block, self._before(block), ())
            return block, None
        inserted = self.trie.insert(block.number, block.tokens, above.number if above is not None else None)
        if inserted.block != block.number:
            return self._by_number[inserted.block], None
        replaced = None
        if inserted.replaced is not None:
            replaced = self._by_number[inserted.replaced]
            self._release(replaced)
        self._hold(block, above, inserted.rejoined)
        return block, replaced

    def adopt_orphans(self, block: Block) -> list[Block]:
        """Make findable as a prefix what waited for `block`, to any depth; returns blocks found to be doubles."""
        doubles = []
        waiting = [block]
        while waiting:
            for orphan in self._orphans.pop(waiting.pop().key, ()):
                self._release(orphan)
                standing, replaced = self.add(orphan)
                doubles += [replaced] if replaced else []
                if standing is orphan:
                    waiting.append(orphan)
                else:
                    doubles.append(orphan)
        return doubles

    def forget(self, block: Block) -> None:
        """Make a block unfindable. What hangs on it stays held, and is found again once its tokens are back."""
        if self.by_key.get(block.key) is not block:
            return
        self._release(block)
        if block.number in self.trie:
            self.trie.remove(block.number)
        elif block.exact:
            siblings = self._orphans[block.parent_key]
            siblings.remove(block)
            if not siblings:
                del self._orphans[block.parent_key]

    def _hold(self, block: Block, above: Block | None, children: Sequence[int]) -> None:
        self.by_key[block.key] = block
        self._by_number[block.number] = block
        if self._chunks is not None:
            parent = None if above is None else above.number
            self._chunks.insert(block.number, block.tokens, parent, children, block.start)
        if self.semantics is not None:
            self.semantics.add(block)

    def _release(self, block: Block) -> None:
        del self.by_key[block.key]
        del self._by_number[block.number]
        if self._chunks is not None:
            self._chunks.remove(block.number)
        if self.semantics is not None:
            self.semantics.remove(block)

    def _table(self) -> ChunkTable:
        """A chunk table of all that is held."""
        size = self.trie.block_tokens
        window = min(_WINDOW, size & -size)  # the largest power of two that divides a block
        table = ChunkTable(size, window=window, room=max(_ROOM, 2 * len(self.by_key)))
        held = []
        for block in self.by_key.values():
            above = self._before(block)
            parent = None if above is None else above.number
            held.append(Held(block.number, block.tokens, parent, block.start))
        table.fill(held)
        return table

    def _before(self, block: Block) -> Block | None:
        """The held block whose tokens come right before this one's, whether or not a prefix reaches them."""
        above = self.by_key.get(block.parent_key)
        if (
            above is None
            or above.start + above.length != block.start
            or above.length != self.trie.block_tokens
        ):
            return None
        return above

    def _above(self, block: Block) -> Block | None:
        """The held block in the trie that `block` follows."""
        above = self._before(block)
        return above if above is not None and above.number in self.trie else None

    def _is_same(self, held: Block, block: Block, above: Block | None) -> bool:
        """Whether two blocks of one key stand for the same tokens behind the same prefix: tokens decide."""
        follows = self.trie.parent(held.number) if held.number in self.trie else None
        return (
            follows == (None if above is None or not block.exact else above.number)
            and (held.start, held.parent_key, held.exact) == (block.start, block.parent_key, block.exact)
            and np.array_equal(held.tokens, block.tokens)
        )
