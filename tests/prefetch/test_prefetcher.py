"""What to read next and what became of it: budgets, accounts, and what hints lead to."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvstore.prefetch.candidates import Read, Sign
from kvstore.prefetch.prefetcher import LASTS, Prefetcher

TOKENS = Sign("tokens")


class Shelf:
    """Blocks of 10 bytes on flash, and a prefetcher with a memory for them."""

    def __init__(self, budget: int, blocks: Iterable[int] = range(100)) -> None:
        self.flash = dict.fromkeys(blocks, 10)
        self.memory: set[int] = set()
        self.now = 0.0
        self.prefetcher = Prefetcher(budget, self.read_of, self.memory.__contains__, lambda: self.now)

    def read_of(self, block: int) -> Read | None:
        if block in self.memory or block not in self.flash:
            return None
        size = self.flash[block]
        return Read(size, size, size / 10, size / 10)

    def read_all(self) -> list[int]:
        """Read until there is nothing left that is worth it; what was read, in order."""
        order = []
        while (step := self.prefetcher.next()) is not None:
            self.memory.difference_update(step.drop)
            self.prefetcher.begin(step)
            self.memory.add(step.block)
            self.prefetcher.arrived(self.flash[step.block])
            order.append(step.block)
        return order

    def use(self, blocks: list[int]) -> None:
        self.prefetcher.used(blocks)
        self.memory.update(blocks)


def test_hinted_blocks_are_read_in_order_up_to_the_budget() -> None:
    shelf = Shelf(30)
    shelf.prefetcher.hint("chat", [(block, TOKENS) for block in (4, 2, 9, 7, 1)])
    assert shelf.read_all() == [4, 2, 9]


def test_a_newer_hint_replaces_the_older_and_takes_its_room() -> None:
    shelf = Shelf(30)
    shelf.prefetcher.hint(None, [(block, TOKENS) for block in (1, 2, 3)])
    shelf.read_all()
    shelf.prefetcher.hint(None, [(block, TOKENS) for block in (3, 8, 9)])
    assert shelf.read_all() == [8, 9]
    assert shelf.memory == {3, 8, 9}
    assert shelf.prefetcher.usefulness()._asdict() == {
        "read": 50,
        "used": 0,
        "wasted": 20,
        "waiting": 30,
        "cancelled": 0,
    }


def test_what_is_worth_more_is_not_dropped_for_what_is_worth_less() -> None:
    shelf = Shelf(20)
    shelf.prefetcher.hint("a", [(1, TOKENS), (2, TOKENS)])
    shelf.read_all()
    shelf.prefetcher.hint("b", [(3, Sign("near", 1, 9))])
    assert shelf.read_all() == []
    assert shelf.memory == {1, 2}


def test_what_is_demanded_comes_first_and_beside_the_budget() -> None:
    shelf = Shelf(10)
    shelf.prefetcher.hint(None, [(1, TOKENS), (2, TOKENS)])
    shelf.prefetcher.demand([50, 51, 52])
    assert shelf.prefetcher.is_coming(51)
    assert shelf.read_all() == [50, 51, 52, 1]
    assert not shelf.prefetcher.is_coming(51)


def test_a_demand_after_the_block_left_memory_is_heard() -> None:
    """Fault of this kind: the loss was noticed after the new demand, and took it along."""
    shelf = Shelf(10)
    for _ in range(3):
        shelf.prefetcher.demand([5])
        assert shelf.read_all() == [5]
        shelf.memory.clear()


def test_a_hint_after_the_block_left_memory_is_heard() -> None:
    shelf = Shelf(10)
    for _ in range(3):
        shelf.prefetcher.hint(None, [(5, TOKENS)])
        assert shelf.read_all() == [5]
        shelf.memory.clear()


def test_what_was_evicted_is_not_brought_back_by_the_same_hint() -> None:
    shelf = Shelf(30)
    shelf.prefetcher.hint(None, [(1, TOKENS), (2, TOKENS)])
    shelf.read_all()
    shelf.memory.discard(1)
    assert shelf.read_all() == []
    assert shelf.prefetcher.usefulness().wasted == 10


def test_a_request_that_uses_what_was_fetched_makes_it_useful_and_ends_the_hint() -> None:
    shelf = Shelf(30)
    shelf.prefetcher.hint(None, [(1, TOKENS), (2, TOKENS), (3, TOKENS)])
    step = shelf.prefetcher.next()
    assert step is not None
    shelf.prefetcher.begin(step)
    shelf.memory.add(step.block)
    shelf.prefetcher.arrived(10)
    shelf.use([1])
    assert shelf.prefetcher.usefulness().used == 10
    assert shelf.prefetcher.next() is None, "the hint was answered"


def test_a_source_that_is_always_wrong_is_no_longer_read() -> None:
    shelf = Shelf(1000, range(1000))
    for turn in range(30):
        shelf.prefetcher.hint(
            None, [(block, Sign("near", 0, 9)) for block in range(turn * 10, turn * 10 + 5)]
        )
        last = shelf.read_all()
        shelf.use([900 + turn])
    assert last == []


def test_waste_makes_reading_dearer_until_something_useful_is_read() -> None:
    shelf = Shelf(10_000, range(10_000))
    seldom, sure = Sign("near", 0, 9), Sign("tokens")
    blocks = count(step=4)

    def ask(sign: Sign, used: int) -> list[int]:
        first = next(blocks)
        shelf.prefetcher.hint(None, [(first + at, sign) for at in range(4)])
        read = shelf.read_all()
        shelf.use([first + at for at in range(used)])
        shelf.memory.clear()
        return read

    for _ in range(150):
        last = ask(seldom, 1)
    assert last == [], "a quarter is above the price, but three quarters are wasted"
    for _ in range(150):
        last = ask(sure, 4)
        ask(seldom, 1)
    assert len(last) == 4
    assert ask(seldom, 1) != []


def test_what_followed_before_is_read_without_a_hint() -> None:
    shelf = Shelf(1000)
    for _ in range(6):
        shelf.use([1, 2])
        shelf.use([7, 8])
        shelf.memory.clear()
    shelf.use([1, 2])
    assert set(shelf.read_all()) == {7, 8}


def test_a_hint_that_nobody_answers_expires() -> None:
    shelf = Shelf(10)
    shelf.prefetcher.hint("a", [(1, TOKENS)])
    shelf.now += LASTS + 1
    assert shelf.read_all() == []


def test_a_block_that_cannot_be_brought_is_not_tried_again_and_a_stopped_one_is() -> None:
    shelf = Shelf(30)
    shelf.prefetcher.hint(None, [(1, TOKENS), (2, TOKENS)])
    for for_good in (False, True):
        step = shelf.prefetcher.next()
        assert step is not None
        assert step.block == 1
        shelf.prefetcher.begin(step)
        shelf.prefetcher.stopped(4, for_good=for_good)
    assert shelf.read_all() == [2]
    assert shelf.prefetcher.usefulness().cancelled == 8


def test_two_reads_at_a_time_are_refused() -> None:
    shelf = Shelf(30)
    shelf.prefetcher.hint(None, [(1, TOKENS), (2, TOKENS)])
    step = shelf.prefetcher.next()
    assert step is not None
    shelf.prefetcher.begin(step)
    with pytest.raises(AssertionError, match="one read at a time"):
        shelf.prefetcher.begin(step)


blocks = st.integers(0, 30)
signs = st.builds(
    Sign,
    st.sampled_from(["tokens", "session", "near", "beside", "follows"]),
    st.integers(0, 3),
    st.integers(0, 9),
)


class Traffic(RuleBasedStateMachine):
    """Random hints, requests, evictions and reads of blocks of different sizes."""

    @rule(sizes=st.lists(st.integers(1, 20), min_size=31, max_size=31), budget=st.integers(0, 80))
    @precondition(lambda self: not hasattr(self, "shelf"))
    def begin(self, sizes: list[int], budget: int) -> None:
        self.shelf = Shelf(budget)
        self.shelf.flash = dict(enumerate(sizes))
        self.fetched: dict[int, int] = {}  # by the model: within the budget, unused
        self.read = 0

    @rule(key=st.integers(0, 2), hinted=st.lists(st.tuples(blocks, signs), max_size=8))
    @precondition(lambda self: hasattr(self, "shelf"))
    def hint(self, key: int, hinted: list[tuple[int, Sign]]) -> None:
        self.shelf.prefetcher.hint(key, hinted)

    @rule(demanded=st.lists(blocks, max_size=4))
    @precondition(lambda self: hasattr(self, "shelf"))
    def demand(self, demanded: list[int]) -> None:
        self.shelf.prefetcher.demand(demanded)

    @rule(used=st.lists(blocks, min_size=1, max_size=6, unique=True))
    @precondition(lambda self: hasattr(self, "shelf"))
    def request(self, used: list[int]) -> None:
        self.shelf.use(used)
        for block in used:
            self.fetched.pop(block, None)

    @rule(block=blocks)
    @precondition(lambda self: hasattr(self, "shelf"))
    def evict(self, block: int) -> None:
        self.shelf.memory.discard(block)
        self.fetched.pop(block, None)

    @rule(part=st.floats(0, 1), whole=st.booleans(), for_good=st.booleans())
    @precondition(lambda self: hasattr(self, "shelf"))
    def read_one(self, part: float, whole: bool, for_good: bool) -> None:
        shelf = self.shelf
        step = shelf.prefetcher.next()
        if step is None:
            return
        assert step.block not in shelf.memory
        assert set(step.drop) <= self.fetched.keys(), "only what was fetched ahead and not used makes room"
        for block in step.drop:
            shelf.memory.discard(block)
            del self.fetched[block]
        size = shelf.flash[step.block]
        if not step.demanded:
            assert size + sum(self.fetched.values()) <= shelf.prefetcher.budget
        shelf.prefetcher.begin(step)
        if whole:
            shelf.memory.add(step.block)
            shelf.prefetcher.arrived(size)
            self.read += size
            if not step.demanded:
                self.fetched[step.block] = size
        else:
            shelf.prefetcher.stopped(int(part * size), for_good=for_good)
            self.read += int(part * size)

    @invariant()
    def accounts_add_up(self) -> None:
        if not hasattr(self, "shelf"):
            return
        found = self.shelf.prefetcher.usefulness()
        assert found.read == self.read == found.used + found.wasted + found.waiting + found.cancelled
        assert min(found) >= 0
        assert self.shelf.prefetcher.spared >= self.fetched.keys()
        assert sum(self.fetched.values()) <= self.shelf.prefetcher.budget


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
