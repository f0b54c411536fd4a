"""The queue of leaves against a plain search for the lowest one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.prefetch.policies.leaves import Leaves

BLOCKS = st.integers(0, 7)
acts = st.one_of(
    st.tuples(st.just("comes"), BLOCKS, st.integers(0, 30)),
    st.tuples(st.just("is used"), BLOCKS, st.integers(0, 10)),
    st.tuples(st.just("is a leaf again"), BLOCKS, st.just(0)),
    st.tuples(st.just("is no leaf"), BLOCKS, st.just(0)),
    st.tuples(st.just("goes"), BLOCKS, st.just(0)),
    st.tuples(st.just("who is first"), st.integers(0, 3), st.just(0)),
)


@settings(deadline=None)
@given(st.lists(acts, max_size=80))
def test_first_is_the_lowest_leaf_that_may_leave(run: list[tuple[str, int, int]]) -> None:
    """Ranks come in any order, also equal ones, and rise by any amount, also by none."""
    inner: set[int] = set()
    leaves = Leaves(lambda block: block not in inner)
    for what, block, rank in run:
        held = block in leaves
        if what == "comes" and not held:
            inner.discard(block)
            leaves.rank[block] = float(rank)
            leaves.leaf(block)
        elif what == "is used" and held:
            leaves.rank[block] += float(rank)
        elif what == "is a leaf again" and held and block in inner:
            inner.discard(block)
            leaves.leaf(block)
        elif what == "is no leaf" and held:
            inner.add(block)
        elif what == "goes":
            leaves.forget(block)
        elif what == "who is first":
            free = [
                (leaves.rank[each], each) for each in leaves.rank if each not in inner and each % 4 != block
            ]
            assert leaves.first(lambda each: each % 4 != block) == (min(free)[1] if free else None)  # noqa: B023


def test_what_is_gone_is_forgotten() -> None:
    """A kind of fault: entries that stay behind, one for each block that ever came."""
    leaves = Leaves(lambda _: True)
    for block in range(10_000):
        leaves.rank[block] = block % 7, block
        leaves.leaf(block)
        if block >= 10:
            leaves.forget(block - 10)
    assert len(leaves) == 10
    assert len(leaves._line) + len(leaves._heap) < 100
