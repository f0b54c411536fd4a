"""Alignment: which stretches of a prompt stand word for word in held texts that are like it.

An edited document, or a screen whose elements were renumbered, shares with its older version many stretches of
tokens, between edits. What a bench finds here by brute force the store is measured against: every span is equal in
both, token by token, and holds `min_span` tokens or more.

How: windows of the largest power of two up to `min_span` are hashed on both sides. Each pair of equal windows
lies on a diagonal (target - offset), and pairs that overlap on one diagonal are one match. So a match of
`min_span` tokens or more is found whole; at any diagonal, hence in any order of the pieces. `cover` chooses
among overlapping matches, and what it chose is compared token by token.

A suffix automaton would find the same, one token after the other; this handles all tokens at once.

Bound: texts that repeat themselves have pairs by the square. Beyond 2^18 of them only the first few copies of
each window count, in the order given: nothing that is held becomes invisible, but spans may come in pieces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.index.cover import cover
from kvstore.index.tokens import token_ids
from kvstore.index.windows import WindowHash

SHORTEST = 8
"""Below so many tokens a span costs more than it saves, and coincidences abound."""

_MOST_PAIRS = 1 << 18
_BETWEEN = -1  # no token: stands between held texts, so that no match crosses from one into the next


class Span(NamedTuple):
    """Tokens [target, target + length) of the prompt equal those from `offset` on in `held[source]`."""

    target: int
    length: int
    source: int
    offset: int


def align(prompt: ArrayLike, held: Sequence[ArrayLike], *, min_span: int = 32) -> list[Span]:
    """Disjoint spans of `prompt`, integers [n], that stand in one of `held`, each integers [m]; ascending.

    They cover as many tokens as spans of `min_span` or more can, with as few spans as that allows. Give
    consecutive blocks as one text, so that spans can cross from one into the next. Where several texts hold a
    span, it comes from that which holds most around it, and else from the first: so put the best first.
    Raises TokenError; ValueError for a `min_span` below 8.
    """
    if min_span < SHORTEST:
        raise ValueError(f"spans of at least {SHORTEST} tokens can be asked for, got min_span={min_span}")
    ids = token_ids(prompt)
    texts = [token_ids(text) for text in held]
    starts = np.cumsum([0, *(len(text) + 1 for text in texts)])
    joined = np.full(int(starts[-1]), _BETWEEN, np.int32)
    for start, text in zip(starts.tolist(), texts, strict=False):
        joined[start : start + len(text)] = text
    target, at, length = _matches(ids, joined, 1 << (min_span.bit_length() - 1))
    order = np.lexsort((at, -length))  # longest first, and the first text first: what `argmax` below finds
    target, at, end = target[order], at[order], (target + length)[order]
    spans = []
    for begin, stop in cover(target, end, min_span, []):
        match = int(np.argmax((target <= begin) & (end >= stop)))
        place = int(at[match]) + begin - int(target[match])
        if np.array_equal(ids[begin:stop], joined[place : place + stop - begin]):  # else hashes collided
            source = int(np.searchsorted(starts, place, side="right")) - 1
            spans.append(Span(begin, stop - begin, source, place - int(starts[source])))
    return spans


def _matches(
    prompt: NDArray[np.int32], held: NDArray[np.int32], window: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """(first token in prompt, first token in held, length) of the longest matches of `window` tokens or more."""
    hash_windows = WindowHash(window)
    ours, theirs = hash_windows(prompt), hash_windows(held)
    by_hash = np.argsort(theirs, kind="stable")
    theirs = theirs[by_hash]
    first = np.searchsorted(theirs, ours, side="left")
    copies = np.searchsorted(theirs, ours, side="right") - first
    if copies.sum() > _MOST_PAIRS:
        copies = np.minimum(copies, max(1, _MOST_PAIRS // len(copies)))
    ends = np.cumsum(copies)
    target = np.repeat(np.arange(len(ours)), copies)
    rank = np.arange(len(target)) - np.repeat(ends - copies, copies)
    at = by_hash[np.repeat(first, copies) + rank]
    # One number a pair: by diagonal, then by target. Diagonals are further apart than `window`.
    width = len(prompt) + window
    pairs = np.sort((at - target + len(prompt)) * width + target)
    apart = np.diff(pairs) > window
    diagonal, target = np.divmod(pairs[np.concatenate([[True], apart])] if len(pairs) else pairs, width)
    last = pairs[np.concatenate([apart, [True]])] % width if len(pairs) else pairs
    return target, target + diagonal - len(prompt), last - target + window
