"""Prefix trie: which held blocks match the beginning of these tokens, to the token.

A node is a block: up to `block_tokens` consecutive tokens behind a parent block, or at position 0 when it has
none. The caller chooses the block numbers and keeps whatever they stand for; other indexes can hold the same
numbers, so that one insertion and one removal by the caller give all of them one lifetime. One trie serves
one identity. Not thread-safe: the caller holds a lock around each call.

Only a full block has children. A shorter one is a tail, and goes when a longer block under the same parent
starts with its tokens. So no block is a prefix of a sibling, and what `lookup` finds is the longest match.

A block removed from above others leaves a *hole*: nobody finds it, nor what is below, but its tokens stay for
as long as something is below. A block inserted later with those very tokens fills the hole, and what is below
is found again. Whether KV may be reused is so always decided by all tokens before it.

How: token ids are compared as bytes, four a token with the highest first, so that the order of bytes is the
order of ids. The children of a node are kept in that order; the one with most tokens in common with a prompt
stands next to where the prompt would be inserted. One binary search a level finds it, and tokens alone decide:
there is no hash.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import BlockRefused, UnknownBlock
from .tokens import token_ids

_TOKEN_BYTES = 4
_RUN = 512
"""A longer run of siblings is cut in two: bounds what one insertion moves, at any number of siblings."""


class Prefix(NamedTuple):
    """The longest match from position 0: its `blocks` from the root down, and its `length` in tokens.

    All blocks but the last are full, so block i covers tokens [i * block_tokens, (i + 1) * block_tokens) and
    the last one at least one token, up to `length`.
    """

    blocks: list[int]
    length: int


class Inserted(NamedTuple):
    """What an insertion did.

    block: the block that stands for these tokens now: the new one, or an older one that holds the same tokens
        or continues them. In the latter case nothing was inserted, and the new number is free.
    replaced: the tail that the new block continues, removed by this insertion, or None.
    rejoined: blocks that were cut off by the removal of a block with these tokens, and are its children now.
    """

    block: int
    replaced: int | None
    rejoined: list[int]


class _Node:
    """A block, a hole, or the root."""

    __slots__ = ("block", "children", "holes", "key", "parent", "start")

    def __init__(self, key: bytes, parent: _Node | None, start: int) -> None:
        self.block = -1  # no meaning in a hole and in the root: see `Trie._holds`
        self.key = key
        self.parent = parent
        self.start = start
        self.children: _Siblings | _Node | None = None  # a single child, the usual case, costs no container
        self.holes: dict[bytes, _Node] | None = None


_key_of = attrgetter("key")


def _first_key(run: list[_Node]) -> bytes:
    return run[0].key


class _Siblings:
    """Two or more nodes in the order of their keys, as runs of bounded length."""

    __slots__ = ("runs",)

    def __init__(self, nodes: list[_Node]) -> None:
        self.runs = [sorted(nodes, key=_key_of)]

    def __iter__(self) -> Iterator[_Node]:
        for run in self.runs:
            yield from run

    def add(self, node: _Node) -> None:
        at = max(bisect_right(self.runs, node.key, key=_first_key) - 1, 0)
        run = self.runs[at]
        run.insert(bisect_left(run, node.key, key=_key_of), node)
        if len(run) > _RUN:
            self.runs[at : at + 1] = [run[: _RUN // 2], run[_RUN // 2 :]]

    def discard(self, node: _Node) -> _Siblings | _Node:
        """Take `node` out; returns what is left, a lone node as itself."""
        at = bisect_right(self.runs, node.key, key=_first_key) - 1
        run = self.runs[at]
        del run[bisect_left(run, node.key, key=_key_of)]
        if not run:
            del self.runs[at]
        return self if len(self.runs) > 1 or len(self.runs[0]) > 1 else self.runs[0][0]

    def nearest(self, key: bytes) -> tuple[_Node, int]:
        """The node that shares most bytes with `key`, and how many; of two equals the one before `key`."""
        runs = self.runs
        at = max(bisect_right(runs, key, key=_first_key) - 1, 0) if len(runs) > 1 else 0
        run = runs[at]
        spot = bisect_left(run, key, key=_key_of)
        if spot < len(run):
            after = run[spot]
            if after.key == key:
                return after, len(key)
        elif at + 1 < len(runs):
            after = runs[at + 1][0]
        else:
            return run[-1], _shared(run[-1].key, key)
        if not spot:
            return after, _shared(after.key, key)
        before = run[spot - 1]
        below, above = _shared(before.key, key), _shared(after.key, key)
        return (before, below) if below >= above else (after, above)


def _shared(one: bytes, other: bytes) -> int:
    """Length in bytes, in whole tokens, of the longest common beginning."""
    length = min(len(one), len(other))
    differ = int.from_bytes(one[:length], "big") ^ int.from_bytes(other[:length], "big")
    return length - -(-differ.bit_length() // (8 * _TOKEN_BYTES)) * _TOKEN_BYTES


class Trie:
    """Blocks of one identity by their tokens. See the module's text for tails and holes."""

    def __init__(self, block_tokens: int) -> None:
        if block_tokens < 1:
            raise ValueError(f"a block holds at least one token, got block_tokens={block_tokens}")
        self.block_tokens = block_tokens
        self._width = block_tokens * _TOKEN_BYTES
        self._root = _Node(b"", None, -block_tokens)
        self._nodes: dict[int, _Node] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, block: object) -> bool:
        return block in self._nodes

    def lookup(self, tokens: ArrayLike) -> Prefix:
        """The longest match of `tokens`, integers [n], from position 0; without side effects.

        Where several blocks match equally far, the last one named is the nearest in order of tokens. Raises
        TokenError.
        """
        prompt = _key(token_ids(tokens))
        width = self._width
        blocks = []
        children = self._root.children
        at = 0
        while children is not None and at < len(prompt):
            if isinstance(children, _Node):
                node, shared = children, len(children.key)
                if not prompt.startswith(node.key, at):
                    shared = _shared(node.key, prompt[at : at + width])
            else:
                node, shared = children.nearest(prompt[at : at + width])
            if not shared:
                break
            blocks.append(node.block)
            at += shared
            if shared < width:
                break
            children = node.children
        return Prefix(blocks, at // _TOKEN_BYTES)

    def insert(self, block: int, tokens: ArrayLike, parent: int | None) -> Inserted:
        """Hold `block`, the tokens [1..block_tokens] that follow `parent`, or that begin a prompt (None).

        Raises TokenError; UnknownBlock for a parent that is not held; BlockRefused for a number in use, no or
        too many tokens, or a tail as parent. After an error nothing has changed.
        """
        ids = token_ids(tokens)
        if not 1 <= len(ids) <= self.block_tokens:
            raise BlockRefused(f"a block holds 1 to {self.block_tokens} tokens, got {len(ids)}")
        if block in self._nodes:
            raise BlockRefused(f"block {block} is held already; remove it first, or choose another number")
        above = self._root if parent is None else self._node(parent)
        if above is not self._root and len(above.key) < self._width:
            have = len(above.key) // _TOKEN_BYTES
            raise BlockRefused(
                f"block {parent} is a tail of {have} tokens and takes no children; "
                f"insert one of {self.block_tokens} in its place first"
            )
        key = _key(ids)
        replaced = None
        if above.children is not None:
            sibling, shared = _nearest(above.children, key)
            if shared == len(key):
                return Inserted(sibling.block, None, [])
            if shared == len(sibling.key):
                replaced = sibling.block
                self._unlink(sibling)
                del self._nodes[replaced]
        node = above.holes.pop(key, None) if above.holes else None
        if node is None:
            node = _Node(key, above, above.start + self.block_tokens)
        elif not above.holes:
            above.holes = None
        node.block = block
        self._link(node)
        self._nodes[block] = node
        return Inserted(block, replaced, [child.block for child in _each(node.children)])

    def remove(self, block: int) -> list[int]:
        """Forget `block`. Returns its children: still held, but cut off until its tokens are inserted again.

        Remove leaves first, and nothing is ever cut off. Raises UnknownBlock.
        """
        node = self._node(block)
        above = self._above(node)
        self._unlink(node)
        del self._nodes[block]
        if node.children is not None or node.holes is not None:
            above.holes = above.holes or {}
            above.holes[node.key] = node
        else:
            self._close(above)
        return [child.block for child in _each(node.children)]

    def parent(self, block: int) -> int | None:
        """The block that `block` follows; None when it is at position 0, or cut off. Raises UnknownBlock."""
        above = self._above(self._node(block))
        return above.block if self._holds(above) else None

    def children(self, block: int) -> list[int]:
        """The blocks that follow `block` at once, in order of tokens. Raises UnknownBlock."""
        return [child.block for child in _each(self._node(block).children)]

    def is_leaf(self, block: int) -> bool:
        """Whether removing `block` would cut nothing off. Raises UnknownBlock."""
        return self._node(block).children is None

    def leaves(self) -> Iterator[int]:
        """Every block that `is_leaf`, in no order; the trie must not change meanwhile."""
        return (block for block, node in self._nodes.items() if node.children is None)

    def tokens(self, block: int) -> NDArray[np.int32]:
        """The tokens of `block`, int32 [1..block_tokens]. Raises UnknownBlock."""
        return np.frombuffer(self._node(block).key, ">u4").astype(np.int32)

    def start(self, block: int) -> int:
        """Position of the first token of `block`. Raises UnknownBlock."""
        return self._node(block).start

    def below(self, tokens: ArrayLike) -> list[int]:
        """Every block that, with all before it, starts with this prefix; leaf first, cut-off ones included.

        So all that a withdrawn prefix makes stale, in an order in which removal cuts nothing off. The prefix may
        end inside a block; blocks that end before it does are not among the result. No tokens: every block.
        Raises TokenError.
        """
        prefix = _key(token_ids(tokens))
        above: _Node | None = self._root
        while above is not None and len(prefix) > self._width:
            above = _exactly(above, prefix[: self._width])
            prefix = prefix[self._width :]
        if above is None:
            return []
        tops = [node for node in _all_below(above) if node.key.startswith(prefix)]
        order = []
        while tops:  # each node before all below it; reversed at the end
            node = tops.pop()
            order.append(node)
            tops.extend(_all_below(node))
        return [node.block for node in reversed(order) if self._holds(node)]

    def _node(self, block: int) -> _Node:
        node = self._nodes.get(block)
        if node is None:
            raise UnknownBlock(f"block {block} is not in the trie")
        return node

    def _holds(self, node: _Node) -> bool:
        """Whether `node` is a block: neither a hole, whose number may be another block's by now, nor the root."""
        return self._nodes.get(node.block) is node

    def _above(self, node: _Node) -> _Node:
        return node.parent if node.parent is not None else self._root

    def _link(self, node: _Node) -> None:
        above = self._above(node)
        if above.children is None:
            above.children = node
        elif isinstance(above.children, _Node):
            above.children = _Siblings([above.children, node])
        else:
            above.children.add(node)

    def _unlink(self, node: _Node) -> None:
        above = self._above(node)
        above.children = above.children.discard(node) if isinstance(above.children, _Siblings) else None

    def _close(self, node: _Node) -> None:
        """Forget `node`, and its parents in turn, where it is a hole with nothing left below."""
        while node.parent is not None and not self._holds(node) and not (node.children or node.holes):
            above = node.parent
            assert above.holes is not None  # a hole is among its parent's holes
            del above.holes[node.key]
            above.holes = above.holes or None
            node = above


def _key(ids: NDArray[np.int32]) -> bytes:
    return ids.astype(">u4").tobytes()


def _nearest(children: _Siblings | _Node, key: bytes) -> tuple[_Node, int]:
    if isinstance(children, _Node):
        return children, _shared(children.key, key)
    return children.nearest(key)


def _each(children: _Siblings | _Node | None) -> Iterator[_Node]:
    if isinstance(children, _Node):
        yield children
    elif children is not None:
        yield from children


def _all_below(node: _Node) -> Iterator[_Node]:
    """Children, and holes where children were."""
    yield from _each(node.children)
    yield from (node.holes or {}).values()


def _exactly(above: _Node, key: bytes) -> _Node | None:
    """The child or hole of `above` with this very key."""
    if above.holes and key in above.holes:
        return above.holes[key]
    if above.children is None:
        return None
    node, _ = _nearest(above.children, key)
    return node if node.key == key else None
