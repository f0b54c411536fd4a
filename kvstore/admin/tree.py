"""Held prompts as a tree: where they begin alike, and what each branch holds.

A node is a stretch of tokens that everything below it shares, cut where prompts part, which may be in the middle of a
block. So tokens that many prompts have in common are counted once, as they are held once up to the last whole block.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequestError
from kvstore.identity import Identity

from .entry import Entry, tenant_of

_SHOWN = 48  # tokens of a node that are given


class Node(msgspec.Struct, frozen=True):
    """`tokens` tokens from position `start` on that all prompts below have in common.

    first: the first of these tokens, at most 48. blocks, flash_bytes: of this node and below; a block in which prompts
    part counts where it begins. hits: the most that a block of this stretch has. pinned: whether any of these is.
    children: where prompts go on differently, most blocks first; `hidden` more are left out.
    """

    start: int
    tokens: int
    first: tuple[int, ...]
    blocks: int
    flash_bytes: int
    hits: int
    pinned: bool
    children: tuple[Node, ...]
    hidden: int


class Tree(msgspec.Struct, frozen=True):
    """All prompts of one identity (hex) that begin with `prefix` tokens.

    orphans: exact blocks whose parent is not held, inexact: those computed behind moved runs; no prefix leads there.
    """

    identity: str
    description: str
    tenant: str
    prefix: int
    nodes: tuple[Node, ...]
    hidden: int
    orphans: int
    inexact: int


def tree(
    entries: Sequence[Entry],
    digest: bytes,
    identity: Identity | None,
    block_tokens: int,
    prefix: NDArray[np.int32],
    depth: int = 4,
    width: int = 20,
) -> Tree:
    """The tree of one identity, down to `depth` branchings and `width` branches each. Raises InvalidRequestError."""
    if not 1 <= depth <= 64 or width < 1:
        raise InvalidRequestError(f"depth {depth} must lie between 1 and 64, width {width} be at least 1")
    ours = [entry for entry in entries if entry.identity == digest]
    exact = [entry for entry in ours if entry.exact]
    held = {entry.key: entry for entry in exact}
    children: dict[bytes, list[Entry]] = {}
    for entry in exact:
        above = held.get(entry.parent_key)
        follows = not entry.parent_key or (above is not None and len(above.tokens) == block_tokens)
        children.setdefault(entry.parent_key if follows else b"orphan", []).append(entry)
    orphans = len(children.pop(b"orphan", []))
    growth = _Growth(children, depth, width)
    nodes, hidden = growth.below([(entry, 0) for entry in children.get(b"", [])], prefix, 0, 0)
    return Tree(
        digest.hex(),
        "nobody described this identity" if identity is None else str(identity),
        tenant_of(identity),
        len(prefix),
        nodes,
        hidden,
        orphans + _unreached(children),
        len(ours) - len(exact),
    )


_Part = tuple[Entry, int]
"""A block, and how many of its tokens lie before this point."""


class _Growth:
    def __init__(self, children: dict[bytes, list[Entry]], depth: int, width: int) -> None:
        self._children = children
        self._depth = depth
        self._width = width

    def below(
        self, parts: Sequence[_Part], prefix: NDArray[np.int32], at: int, level: int
    ) -> tuple[tuple[Node, ...], int]:
        """Branches that go on with `parts` at position `at`, along prefix[at:]; and how many are left out."""
        groups: dict[int, list[_Part]] = {}
        for part in parts:
            groups.setdefault(int(part[0].tokens[part[1]]), []).append(part)
        if at < len(prefix):
            groups = {first: each for first, each in groups.items() if first == prefix[at]}
        if level == self._depth:
            return (), len(groups)
        nodes = [node for group in groups.values() if (node := self._node(group, prefix, at, level))]
        nodes.sort(key=lambda node: (-node.blocks, node.first))
        return tuple(nodes[: self._width]), max(0, len(nodes) - self._width)

    def _node(self, parts: Sequence[_Part], prefix: NDArray[np.int32], at: int, level: int) -> Node | None:
        """The stretch that `parts`, which agree in their next token, share; None where it leaves the prefix."""
        shown: list[int] = []
        length, hits, pinned = 0, 0, False
        here = list(parts)
        while True:
            hits = max(hits, *(entry.hits for entry, _ in here))
            pinned = pinned or any(entry.pinned for entry, _ in here)
            shared = _shared(here)
            wanted = prefix[at + length : at + length + len(shared)]
            if not np.array_equal(shared[: len(wanted)], wanted):
                return None
            shown += shared[: _SHOWN - len(shown)].tolist()
            length += len(shared)
            ahead = [(entry, inside + len(shared)) for entry, inside in here]
            going = [part for part in ahead if part[1] < len(part[0].tokens)]
            for entry, inside in ahead:
                if inside == len(entry.tokens):
                    going += [(child, 0) for child in self._children.get(entry.key, ())]
            if len({int(entry.tokens[inside]) for entry, inside in going}) != 1:
                break
            here = going
        children, hidden = self.below(going, prefix, at + length, level + 1)
        blocks, nbytes = self._totals(parts)
        return Node(at, length, tuple(shown), blocks, nbytes, hits, pinned, children, hidden)

    def _totals(self, parts: Sequence[_Part]) -> tuple[int, int]:
        """Blocks that begin with one of `parts` or behind it, and their bytes."""
        blocks, nbytes = 0, 0
        waiting = [(entry, not inside) for entry, inside in parts]
        while waiting:
            entry, begins = waiting.pop()
            if begins:
                blocks += 1
                nbytes += entry.flash_bytes
            waiting += [(child, True) for child in self._children.get(entry.key, ())]
        return blocks, nbytes


def _unreached(children: dict[bytes, list[Entry]]) -> int:
    """Blocks behind those whose parent is not held."""
    reached, waiting = 0, list(children.get(b"", ()))
    while waiting:
        entry = waiting.pop()
        reached += 1
        waiting += children.get(entry.key, ())
    return sum(map(len, children.values())) - reached


def _shared(parts: Sequence[_Part]) -> NDArray[np.int32]:
    """The tokens that all parts go on with, at least one."""
    entry, inside = parts[0]
    shared = entry.tokens[inside:]
    for entry, inside in parts[1:]:
        other = entry.tokens[inside : inside + len(shared)]
        differ = np.flatnonzero(shared[: len(other)] != other)
        shared = shared[: int(differ[0]) if len(differ) else len(other)]
    return shared
