"""Chunk table: which held blocks hold parts of these tokens, at any offset of either.

A run is the longest stretch of a prompt that stands alike in held blocks: inside one, or across one and the
blocks that follow it. Which copy serves is the caller's to decide, who knows what each block was captured
behind: hence every piece comes with all copies that hold it. One rule is the table's, since it decides which
pieces there are: a copy from the very start of a prompt was captured behind nothing, and serves only where no
other copy does, however long it is. The caller chooses the block numbers, the same as in its trie, and inserts
and removes in both at once. One table serves one identity. Not thread-safe.

What is found: of each held block the windows of `window` tokens at its offsets 0, window, 2 window … are kept
by hash, so each run of 2 window - 1 tokens or more holds one of them. Window hashes of the prompt are looked
up, all at once, and each hit is an *alignment*: this block may stand from this position of the prompt on. Its
tokens are compared one by one with the prompt's, and so are those of the blocks before and behind.

What bounds the work when texts repeat: of each window the newest `copies` blocks that hold it are tried, of the
blocks that follow one the newest `copies`, and of all alignments 1,024 and one for eight tokens of the prompt,
with as many again of neighbours. Within these bounds every run of 2 window - 1 tokens is found, whole; beyond
them some are missed or cut short.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .cover import between, cover
from .errors import BlockRefused, UnknownBlock
from .tokens import token_ids
from .windows import WindowHash, WindowTable

AT_START = 16
"""A copy captured with fewer tokens before it took the place of the attention sink."""

_SETTLED = 256
"""What a copy from the start holds behind so many tokens was captured in context: behind these. So a whole prompt
that stands a few tokens further on is not cut up by each sentence that others have, too."""

_NONE = -1

_BATCH = 1 << 14
"""Windows hashed at a time when a table is filled, so that what is in between stays within 2 MiB."""


class Held(NamedTuple):
    """A block for `ChunkTable.fill`, as `ChunkTable.insert` takes it."""

    block: int
    tokens: NDArray[np.int32]
    parent: int | None
    start: int


class Source(NamedTuple):
    """Where held tokens stand: from `offset` in the first of `blocks`, each of which follows the one before."""

    blocks: tuple[int, ...]
    offset: int


class Run(NamedTuple):
    """Tokens [target, target + length) of the prompt and the copies that hold all of them.

    First come the sources that agree with the prompt furthest to the left of `target`.
    """

    target: int
    length: int
    sources: list[Source]


class _Matches(NamedTuple):
    """Stretches of equal tokens: in the block at `slot` from `offset` on, in the prompt from `begin` to `end`.

    Ascending by `alignment`, which says of which block the first token stands where in the prompt, in one
    number: slot * width + position + block_tokens, with width = length of the prompt + block_tokens.
    """

    alignment: NDArray[np.int64]
    slot: NDArray[np.int64]
    offset: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]


class ChunkTable:
    """Blocks of one identity by any part of their tokens. See the module's text for what is found."""

    def __init__(self, block_tokens: int, *, window: int = 16, copies: int = 8, room: int = 1024) -> None:
        """A table for blocks of up to `block_tokens` tokens, a multiple of `window`.

        `room`: blocks to make room for at once; the system gives memory only as it is used. A table that
        outgrows its room doubles it, which stalls one insertion (tenths of a second at 100,000 blocks).
        """
        if block_tokens < window or block_tokens % window:
            raise ValueError(f"block_tokens is a multiple of the window of {window}, got {block_tokens}")
        if copies < 1:
            raise ValueError(f"at least one copy of a window is tried, got copies={copies}")
        if room < 1:
            raise ValueError(f"a table has room for at least one block, got room={room}")
        self.block_tokens = block_tokens
        self.window = window
        self.copies = copies
        self._hash = WindowHash(window)
        self._windows = WindowTable()  # entry = slot * windows a block + number of the window in the block
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._blocks: list[int] = []  # by slot, as everything below
        self._tokens = np.empty((0, block_tokens), np.int32)
        self._length = np.empty(0, np.int32)
        self._start = np.empty(0, np.int32)
        self._parent = np.empty(0, np.int32)
        self._child = np.empty(0, np.int32)  # the newest; the others follow in a list
        self._older = np.empty(0, np.int32)
        self._newer = np.empty(0, np.int32)
        self._make_room(room)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, block: object) -> bool:
        return block in self._slots

    def insert(
        self,
        block: int,
        tokens: ArrayLike,
        parent: int | None = None,
        children: Collection[int] = (),
        start: int | None = None,
    ) -> None:
        """Hold `block`, tokens [1..block_tokens]. It follows `parent` where that is held here.

        `children`: held blocks without a parent that follow this one, as a block that fills a hole in the trie
        has them. `start`: position of the first token in the prompt that it was captured from; None is right
        behind the parent, or 0 where that is not held. Fewer than `window` tokens are found only behind their
        parent's. Raises TokenError, UnknownBlock for a child that is not held, BlockRefused.
        """
        ids = token_ids(tokens)
        if not 1 <= len(ids) <= self.block_tokens:
            raise BlockRefused(f"a block holds 1 to {self.block_tokens} tokens, got {len(ids)}")
        if block in self._slots:
            raise BlockRefused(f"block {block} is held already; remove it first, or choose another number")
        above = _NONE if parent is None else self._slots.get(parent, _NONE)
        if above != _NONE and self._length[above] < self.block_tokens:
            raise BlockRefused(
                f"block {parent} is a tail of {self._length[above]} tokens and takes no children"
            )
        below = [self._slot(child) for child in children]
        for child, slot in zip(children, below, strict=True):
            if self._parent[slot] != _NONE:
                raise BlockRefused(f"block {child} follows another block already")
        if below and len(ids) < self.block_tokens:
            raise BlockRefused(f"block {block} is a tail of {len(ids)} tokens and takes no children")
        if start is None:
            start = 0 if above == _NONE else int(self._start[above]) + self.block_tokens
        if self._free:
            slot = self._free.pop()
            self._blocks[slot] = block
        else:
            slot = len(self._blocks)
            if slot == len(self._tokens):
                self._make_room(2 * slot)
            self._blocks.append(block)
        self._slots[block] = slot
        self._tokens[slot, : len(ids)] = ids
        self._tokens[slot, len(ids) :] = _NONE
        self._length[slot] = len(ids)
        self._start[slot] = start
        self._parent[slot] = self._child[slot] = _NONE
        if above != _NONE:
            self._link(slot, above)
        for child_slot in below:
            self._link(child_slot, slot)
        first = self._entry(slot)
        whole = ids[: len(ids) // self.window * self.window].reshape(-1, self.window)
        for i, value in enumerate(self._hash.of(whole).tolist()):
            self._windows.add(first + i, value)

    def fill(self, blocks: Sequence[Held]) -> None:
        """Hold `blocks`, in a table that holds none: as to insert them one by one, and ten times faster.

        Parents may come behind their children. Raises TokenError, BlockRefused.
        """
        if self._slots:
            raise BlockRefused(f"the table holds {len(self)} blocks already; insert more one by one")
        if not blocks:
            return
        ids = token_ids(np.concatenate([block.tokens for block in blocks]))
        length = np.array([len(block.tokens) for block in blocks], np.int32)
        for block, tokens in zip(blocks, length.tolist(), strict=True):
            if not 1 <= tokens <= self.block_tokens:
                raise BlockRefused(
                    f"block {block.block}: a block holds 1 to {self.block_tokens} tokens, got {tokens}"
                )
        slots = {block.block: slot for slot, block in enumerate(blocks)}
        if len(slots) < len(blocks):
            raise BlockRefused(f"{len(blocks)} blocks have {len(slots)} numbers; each needs its own")
        above = [_NONE if block.parent is None else slots.get(block.parent, _NONE) for block in blocks]
        for block, parent in zip(blocks, above, strict=True):
            if parent != _NONE and length[parent] < self.block_tokens:
                raise BlockRefused(
                    f"block {block.parent} is a tail of {length[parent]} tokens and takes no children"
                )
        count = len(blocks)
        if count > len(self._tokens):
            self._make_room(count)
        self._slots = slots
        self._free = []
        self._blocks = [block.block for block in blocks]
        held = self._tokens[:count]
        held.fill(_NONE)
        held[np.arange(self.block_tokens) < length[:, None]] = ids
        self._length[:count] = length
        self._start[:count] = [block.start for block in blocks]
        self._parent[:count] = self._child[:count] = _NONE
        for slot, parent in enumerate(above):
            if parent != _NONE:
                self._link(slot, parent)
        a_block = self.block_tokens // self.window
        entries = np.flatnonzero(np.arange(a_block) < length[:, None] // self.window)
        windows = held.reshape(-1, self.window)
        hashes = [self._hash.of(windows[entries[i : i + _BATCH]]) for i in range(0, len(entries), _BATCH)]
        self._windows.fill(entries.astype(np.int32), np.concatenate([np.empty(0, np.uint64), *hashes]))

    def remove(self, block: int) -> None:
        """Forget `block`. Blocks that follow it stay, without a parent. Raises UnknownBlock."""
        slot = self._slot(block)
        first = self._entry(slot)
        for entry in range(first, first + int(self._length[slot]) // self.window):
            self._windows.discard(entry)
        if self._parent[slot] != _NONE:
            self._unlink(slot)
        child = int(self._child[slot])
        while child != _NONE:
            self._parent[child] = _NONE
            child = int(self._older[child])
        del self._slots[block]
        self._free.append(slot)

    def find(
        self, tokens: ArrayLike, *, start: int = 0, shortest: int = 32, boundaries: Sequence[int] = ()
    ) -> list[Run]:
        """Runs of `shortest` tokens or more from `start` on: disjoint, ascending, as much as can be covered.

        `tokens`: integers [n], of which the first `start` are not looked at: the prefix that the trie found.
        Covered are as many tokens as possible with as few runs as possible, by copies that were captured in
        context; then what these leave, by copies from the start of a prompt. `boundaries`: positions at which
        segments of the prompt begin; where two runs meet and might do so at several places, it is at one of
        these. At most `copies` sources a run. No side effects. Raises TokenError; ValueError
        for a negative start or a `shortest` below 1.
        """
        if shortest < 1 or start < 0:
            raise ValueError(f"start is 0 or more and shortest 1 or more, got {start} and {shortest}")
        prompt = token_ids(tokens)[start:]
        matches = self._matches(prompt, shortest)
        before = self._before(matches, len(prompt) + self.block_tokens)
        root = _roots(before)
        begins = matches.begin[root]
        captured = self._start[matches.slot[root]] + matches.offset[root]
        alone = captured < AT_START
        segments = sorted(boundary - start for boundary in boundaries)
        # First the copies in context, beside them what the others hold behind a beginning of their own; of that
        # nothing is taken yet, so that it comes in one piece with its beginning where that is wanted, too.
        pieces = cover(np.where(alone, begins + _SETTLED - captured, begins), matches.end, shortest, segments)
        in_context = np.where(alone, len(prompt), begins)  # as if the others held nothing
        copies = self._sources(pieces, matches, before, in_context)
        found = [(piece, sources) for piece, sources in zip(pieces, copies, strict=True) if sources]
        if alone.any():
            taken = [piece for piece, _ in found]
            pieces = cover(*between(begins[alone], matches.end[alone], taken), shortest, segments)
            found += zip(pieces, self._sources(pieces, matches, before, begins), strict=True)
            found.sort(key=itemgetter(0))
        return [Run(begin + start, end - begin, sources) for (begin, end), sources in found]

    def _sources(
        self,
        pieces: list[tuple[int, int]],
        matches: _Matches,
        before: NDArray[np.int64],
        begins: NDArray[np.int64],
    ) -> Iterator[list[Source]]:
        """For each piece the copies that hold all of it."""
        order = np.argsort(matches.end, kind="stable")
        ends = matches.end[order]
        last = np.array([end for _, end in pieces], np.int64)
        first_near = np.searchsorted(ends, last).tolist()
        after_near = np.searchsorted(ends, last + self.block_tokens).tolist()
        # Lists, since what follows takes single elements.
        by_end, from_ = order.tolist(), begins.tolist()
        slot, offset, match_begin, previous = (
            column.tolist() for column in (matches.slot, matches.offset, matches.begin, before)
        )
        for (begin, end), low, high in zip(pieces, first_near, after_near, strict=True):
            holding = [at for at in by_end[low:high] if match_begin[at] < end and from_[at] <= begin]
            holding.sort(key=from_.__getitem__)
            sources = []
            for at in holding[: self.copies]:
                blocks = [self._blocks[slot[at]]]
                while match_begin[at] > begin:
                    at = previous[at]
                    blocks.append(self._blocks[slot[at]])
                sources.append(Source(tuple(blocks[::-1]), offset[at] + begin - match_begin[at]))
            yield sources

    def _matches(self, prompt: NDArray[np.int32], shortest: int) -> _Matches:
        """Compare each alignment that a window speaks for, or a match in a neighbour."""
        size = self.block_tokens
        width = len(prompt) + size
        limit = 1024 + len(prompt) // 8
        padded = np.full(len(prompt) + 2 * size, -2, np.int32)
        padded[size:-size] = prompt
        stretches = np.lib.stride_tricks.sliding_window_view(padded, size)
        fresh = known = self._hits(prompt, limit)
        parts = []
        while len(fresh):
            slot, shift = np.divmod(fresh, width)
            equal = np.zeros((len(fresh), size + 1), np.bool_)  # the last column ends each row's matches
            np.equal(self._tokens[slot], stretches[shift], out=equal[:, :size])
            edges = np.flatnonzero(np.diff(equal.ravel(), prepend=False))
            row, offset = np.divmod(edges[::2], size + 1)
            stop = offset + edges[1::2] - edges[::2]
            joins = (offset == 0) | (stop == size) | (stop - offset >= shortest)
            row, offset, stop = row[joins], offset[joins], stop[joins]
            origin = shift[row] - size
            part = _Matches(fresh[row], slot[row], offset, origin + offset, origin + stop)
            parts.append(part)
            fresh = _without(self._neighbours(part, prompt), known)
            fresh = fresh[: max(0, 2 * limit - len(known))]
            known = _sorted(known, fresh)
        if not parts:
            return _Matches(*np.empty((5, 0), np.int64))
        joined = [np.concatenate(column) for column in zip(*parts, strict=True)]
        order = np.lexsort((joined[2], joined[0]))
        return _Matches(*(column[order] for column in joined))

    def _hits(self, prompt: NDArray[np.int32], limit: int) -> NDArray[np.int64]:
        """At most `limit` alignments by equal windows, of the newest copies first; sorted."""
        width = len(prompt) + self.block_tokens
        at, entries = self._windows.find(self._hash(prompt))
        known = np.empty(0, np.int64)
        for _ in range(self.copies):
            slot, number = np.divmod(entries.astype(np.int64), self.block_tokens // self.window)
            alignments = slot * width + at - number * self.window + self.block_tokens
            fresh = _without(_sorted(alignments), known)
            room = limit - len(known)
            if len(fresh) > room:
                return _sorted(known, fresh[:: -(-len(fresh) // room)] if room else fresh[:0])
            known = _sorted(known, fresh)
            entries = self._windows.older(entries)
            more = entries >= 0
            at, entries = at[more], entries[more]
            if not len(at):
                break
        return known

    def _neighbours(self, matches: _Matches, prompt: NDArray[np.int32]) -> NDArray[np.int64]:
        """Alignments of blocks whose nearest token goes on with a match that ends at the edge of its block."""
        width = len(prompt) + self.block_tokens
        at_head = (matches.offset == 0) & (matches.begin > 0)
        begin = matches.begin[at_head]
        parent = self._parent[matches.slot[at_head]].astype(np.int64)
        agrees = (parent != _NONE) & (self._tokens[parent, -1] == prompt[begin - 1])
        found = [parent[agrees] * width + begin[agrees]]
        at_tail = (matches.end - matches.begin + matches.offset == self.block_tokens) & (
            matches.end < len(prompt)
        )
        end = matches.end[at_tail]
        child = self._child[matches.slot[at_tail]]
        for _ in range(self.copies):
            held = child != _NONE
            child, end = child[held], end[held]
            if not len(child):
                break
            agrees = self._tokens[child, 0] == prompt[end]
            found.append(child[agrees] * width + end[agrees] + self.block_tokens)
            child = self._older[child]
        return _sorted(*found)

    def _before(self, matches: _Matches, width: int) -> NDArray[np.int64]:
        """For each match the one that it continues, in the parent of its block; negative where there is none."""
        parent = self._parent[matches.slot].astype(np.int64)
        wanted = parent * width + matches.begin
        at = np.searchsorted(matches.alignment, wanted, side="right") - 1
        continues = (matches.offset == 0) & (parent != _NONE) & (at >= 0)
        continues &= (matches.alignment[at] == wanted) & (matches.end[at] == matches.begin)
        return np.where(continues, at, _NONE)

    def _slot(self, block: int) -> int:
        slot = self._slots.get(block)
        if slot is None:
            raise UnknownBlock(f"block {block} is not in the chunk table")
        return slot

    def _entry(self, slot: int) -> int:
        return slot * (self.block_tokens // self.window)

    def _make_room(self, slots: int) -> None:
        held = len(self._tokens)
        for name in ("_tokens", "_length", "_start", "_parent", "_child", "_older", "_newer"):
            old = getattr(self, name)
            new = np.empty((slots, *old.shape[1:]), np.int32)
            new[:held] = old
            setattr(self, name, new)
        self._windows.grow(self._entry(slots))

    def _link(self, slot: int, above: int) -> None:
        """Let `slot` be the newest child of `above`."""
        sibling = int(self._child[above])
        self._parent[slot] = above
        self._older[slot] = sibling
        self._newer[slot] = _NONE
        if sibling != _NONE:
            self._newer[sibling] = slot
        self._child[above] = slot

    def _unlink(self, slot: int) -> None:
        older, newer = int(self._older[slot]), int(self._newer[slot])
        if older != _NONE:
            self._newer[older] = newer
        if newer != _NONE:
            self._older[newer] = older
        else:
            self._child[self._parent[slot]] = older


def _sorted(*parts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Each number in any of `parts`, once."""
    numbers = np.concatenate(parts)
    numbers.sort()
    first = np.ones(len(numbers), np.bool_)
    np.not_equal(numbers[1:], numbers[:-1], out=first[1:])
    return numbers[first]


def _without(some: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """What of `some` is not in `others`; both sorted."""
    if not len(others):
        return some
    at = np.searchsorted(others, some)
    there: NDArray[np.bool_] = others[np.minimum(at, len(others) - 1)] == some
    return some[~there]


def _roots(before: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first match of each one's chain."""
    root = np.where(before == _NONE, np.arange(len(before)), before)
    while True:
        further = root[root]
        if np.array_equal(further, root):
            return root
        root = further
