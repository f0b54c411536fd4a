"""Which pieces of the runs that were found shall be used, chosen for the prompt as a whole.

Runs overlap: copies of different length, coincidences at their edges, one text inside another. Pieces do not;
each lies within one run and has a least length, since using one costs something. Covered are as many tokens as
possible, and with as few pieces as that allows.

How: a run inside another is useless, and without those, starts and ends ascend together. Runs that overlap
form a cluster, and clusters are independent. Within one, reaching as far as possible with every run gives the
fewest runs for the whole cluster. That is the answer unless some piece would get too short: then a dynamic
program over the tokens of the cluster decides.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_NO_END = np.iinfo(np.int64).max


class _Piece(NamedTuple):
    """Tokens [begin, end), of a run that holds [least, most)."""

    begin: int
    end: int
    least: int
    most: int


def cover(
    begins: NDArray[np.int64], ends: NDArray[np.int64], shortest: int, boundaries: list[int]
) -> list[tuple[int, int]]:
    """Disjoint pieces [(begin, end)], ascending, of the runs [begins[i], ends[i]), `shortest` tokens or longer.

    Where two pieces meet and might do so at several tokens, they meet at the last of the ascending
    `boundaries` among these, or else as late as possible: what goes on behind its own context fits better than
    what begins anew.
    """
    long = ends - begins >= shortest
    begins, ends = _outermost(begins[long], ends[long])
    if not len(begins):
        return []
    cuts = [0, *(np.flatnonzero(begins[1:] >= ends[:-1]) + 1).tolist(), len(begins)]
    first, last = begins.tolist(), ends.tolist()
    pieces: list[tuple[int, int]] = []
    for i, j in pairwise(cuts):
        if j - i == 1:
            pieces.append((first[i], last[i]))
            continue
        chosen = _fewest(first[i:j], last[i:j], shortest) or _best(first[i:j], last[i:j], shortest)
        pieces += _meet(chosen, shortest, boundaries)
    return pieces


def between(
    begins: NDArray[np.int64], ends: NDArray[np.int64], pieces: list[tuple[int, int]]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(begins, ends) of what of the runs [begins[i], ends[i]) lies between `pieces`, ascending and disjoint."""
    begins, ends = _outermost(begins, ends)
    opens = np.array([0, *(end for _, end in pieces)], np.int64)
    closes = np.array([*(begin for begin, _ in pieces), _NO_END], np.int64)
    first = np.searchsorted(closes, begins, side="right")  # gaps that a run reaches into are consecutive
    count = np.maximum(np.searchsorted(opens, ends) - first, 0)
    run = np.repeat(np.arange(len(begins)), count)
    gap = np.arange(len(run)) + np.repeat(first - (np.cumsum(count) - count), count)
    return np.maximum(begins[run], opens[gap]), np.minimum(ends[run], closes[gap])


def _outermost(
    begins: NDArray[np.int64], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The runs that lie within no other, each once: their begins and their ends ascend."""
    order = np.lexsort((-ends, begins))
    begins, ends = begins[order], ends[order]
    furthest = np.maximum.accumulate(ends)
    useful = np.ones(len(ends), np.bool_)
    np.greater(ends[1:], furthest[:-1], out=useful[1:])
    return begins[useful], ends[useful]


def _fewest(begins: list[int], ends: list[int], shortest: int) -> list[_Piece]:
    """The fewest runs that cover the whole cluster, each begun as early as possible; [] if one is too short."""
    pieces: list[_Piece] = []
    at = begins[0]
    run = 0
    while run < len(begins) - 1:
        following = bisect_right(begins, ends[run]) - 1
        end = max(at + shortest, begins[following])
        if end > ends[run]:
            return []
        pieces.append(_Piece(at, end, begins[run], ends[run]))
        at, run = end, following
    if at + shortest > ends[-1]:
        return []
    return [*pieces, _Piece(at, ends[-1], begins[-1], ends[-1])]


def _best(begins: list[int], ends: list[int], shortest: int) -> list[_Piece]:
    """Most tokens, then fewest pieces, by what is best for the tokens before each position.

    Of all runs that reach up to a position the first to begin allows every piece that another does. So pieces
    that end there begin in a window whose two ends only ever move forward: one deque holds its best.
    """
    origin, length = begins[0], ends[-1] - begins[0]
    token = length + 1  # one token outweighs any number of pieces
    score = [0] * (length + 1)
    source = [-1] * (length + 1)  # where the piece that ends here begins
    window: deque[tuple[int, int]] = deque()  # (gain of beginning at, position), best first
    run = 0
    for end in range(1, length + 1):
        while ends[run] - origin < end:
            run += 1
        start = end - shortest
        if start >= 0:
            gain = score[start] - start * token
            while window and window[-1][0] <= gain:
                window.pop()
            window.append((gain, start))
        while window and window[0][1] < begins[run] - origin:
            window.popleft()
        score[end] = score[end - 1]
        if window and window[0][0] + end * token - 1 > score[end]:
            score[end] = window[0][0] + end * token - 1
            source[end] = window[0][1]
    pieces = []
    end = length
    while end > 0:
        begin = source[end]
        if begin < 0:
            end -= 1
            continue
        run = bisect_left(ends, end + origin)
        pieces.append(_Piece(begin + origin, end + origin, begins[run], ends[run]))
        end = begin
    return pieces[::-1]


def _meet(pieces: list[_Piece], shortest: int, boundaries: list[int]) -> list[tuple[int, int]]:
    """Move the places where pieces meet, the last one first."""
    bounds = [[piece.begin, piece.end] for piece in pieces]
    for i, piece in enumerate(pieces[1:], 1):  # meet as early as possible: leaves all freedom to what follows
        if bounds[i - 1][1] == bounds[i][0]:
            at = max(bounds[i - 1][0] + shortest, piece.least)
            bounds[i - 1][1] = bounds[i][0] = at
    for i in range(len(pieces) - 1, 0, -1):
        if bounds[i - 1][1] == bounds[i][0]:
            early = bounds[i][0]
            late = min(pieces[i - 1].most, bounds[i][1] - shortest)
            boundary = bisect_right(boundaries, late) - 1
            at = boundaries[boundary] if boundary >= 0 and boundaries[boundary] >= early else late
            bounds[i - 1][1] = bounds[i][0] = at
    return [(begin, end) for begin, end in bounds]
