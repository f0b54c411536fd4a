"""How layers are cut into the groups that are loaded and computed one after another.

The first groups, a quarter of them, at least one and at most three, are half as long as the others: nothing else runs
beside the load of the first, and little beside that of the next. Of 16 groups 1/29 of a load is waited for instead of
1/16.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise


def shares(count: int) -> list[Fraction]:
    """Which share of the whole each of `count` >= 1 groups is, in order."""
    short = max(1, min(3, count // 4))
    lengths = [1] * short + [2] * (count - short)
    return [Fraction(length, sum(lengths)) for length in lengths]


def layer_groups(layers: int, count: int) -> list[range]:
    """Cut `layers` equal layers into `count` <= `layers` groups of one layer or more."""
    cuts, share = [0], Fraction(0)
    for left, each in zip(range(count - 1, -1, -1), shares(count), strict=True):
        share += each
        cuts.append(min(max(round(layers * share), cuts[-1] + 1), layers - left))
    return [range(start, stop) for start, stop in pairwise(cuts)]
