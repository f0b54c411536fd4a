"""The trie against an oracle that keeps each block's tokens from position 0 and compares them one by one."""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.index.errors import BlockRefused, TokenError, UnknownBlock
from kvstore.index.trie import Inserted, Prefix, Trie

Path = tuple[int, ...]

ALPHABET = (0, 255, 256, 2**31 - 1)  # the ends of the range, and neighbours across two bytes


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


class Oracle:
    """Blocks by number, each with all tokens from position 0 to its end."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.paths: dict[int, Path] = {}

    def start(self, path: Path) -> int:
        return (len(path) - 1) // self.block_tokens * self.block_tokens

    def held(self, path: Path) -> int | None:
        return next((block for block, other in self.paths.items() if other == path), None)

    def above(self, block: int) -> int | None:
        path = self.paths[block]
        return self.held(path[: self.start(path)]) if self.start(path) else None

    def children(self, block: int) -> set[int]:
        path = self.paths[block]
        return {
            other
            for other, longer in self.paths.items()
            if self.start(longer) == len(path) and longer[: len(path)] == path
        }

    def cut_off(self) -> list[int]:
        return [block for block, path in self.paths.items() if self.start(path) and self.above(block) is None]

    def found(self, path: Path) -> bool:
        """Whether each full block before the last one is held."""
        return all(
            self.held(path[:end]) is not None
            for end in range(self.block_tokens, len(path), self.block_tokens)
        )

    def longest(self, prompt: Sequence[int]) -> int:
        return max((common(path, prompt) for path in self.paths.values() if self.found(path)), default=0)

    def insert(self, block: int, path: Path) -> Inserted:
        siblings = [other for other in self.paths if self.start(self.paths[other]) == self.start(path)]
        for other in siblings:
            if self.paths[other][: len(path)] == path:
                return Inserted(other, None, [])
        replaced = [other for other in siblings if path[: len(self.paths[other])] == self.paths[other]]
        assert len(replaced) <= 1
        for other in replaced:
            del self.paths[other]
        self.paths[block] = path
        rejoined = sorted(self.children(block)) if len(path) % self.block_tokens == 0 else []
        return Inserted(block, replaced[0] if replaced else None, rejoined)


PICK = st.integers(0, 2**16)
TOKENS = st.lists(st.sampled_from(ALPHABET), max_size=9).map(tuple)


class Machine(RuleBasedStateMachine):
    @initialize(block_tokens=st.sampled_from([1, 2, 4, 5]))
    def begin(self, block_tokens: int) -> None:
        self.oracle = Oracle(block_tokens)
        self.trie = Trie(block_tokens)
        self.numbers = count()

    def picked(self, pick: int) -> int | None:
        return [None, *self.oracle.paths][pick % (len(self.oracle.paths) + 1)]

    def prompt(self, pick: int, change: int, cut: int, more: Path) -> Path:
        """What a held path and a few tokens make, often with a change in the middle."""
        block = self.picked(pick)
        prompt = [*(() if block is None else self.oracle.paths[block]), *more]
        if prompt and change % 3:
            prompt[change % len(prompt)] = ALPHABET[change % len(ALPHABET)]
        return tuple(prompt[: cut % (len(prompt) + 1) if cut % 2 else None])

    def insert_one(self, path: Path, parent: int | None) -> int:
        block = next(self.numbers)
        inserted = self.trie.insert(block, np.array(path[self.oracle.start(path) :], np.int32), parent)
        expected = self.oracle.insert(block, path)
        if expected.block == block:
            assert (inserted.block, inserted.replaced, sorted(inserted.rejoined)) == expected
        else:  # of several that continue these tokens, any stands for them
            assert self.oracle.paths[inserted.block][: len(path)] == path
            assert inserted[1:] == (None, [])
        return inserted.block

    @rule(pick=PICK, tokens=TOKENS)
    def insert(self, pick: int, tokens: Path) -> None:
        """A prompt that goes on behind some block, findable or not, or begins anew; a tail grows."""
        parent = self.picked(pick)
        path: Path = () if parent is None else self.oracle.paths[parent]
        if parent is not None and len(path) % self.oracle.block_tokens:
            with pytest.raises(BlockRefused, match="is a tail"):
                self.trie.insert(next(self.numbers), [1], parent)
            parent, start = self.oracle.above(parent), self.oracle.start(path)
            if start and parent is None:
                return
            path, tokens = path[:start], path[start:] + tokens
        for at in range(0, len(tokens), self.oracle.block_tokens):
            path += tokens[at : at + self.oracle.block_tokens]
            parent = self.insert_one(path, parent)

    @precondition(lambda self: self.oracle.cut_off())
    @rule(pick=PICK)
    def fill(self, pick: int) -> None:
        """The prompt before something that is cut off is inserted again, under new numbers."""
        cut_off = self.oracle.cut_off()
        path = self.oracle.paths[cut_off[pick % len(cut_off)]]
        parent = None
        for end in range(self.oracle.block_tokens, self.oracle.start(path) + 1, self.oracle.block_tokens):
            parent = self.insert_one(path[:end], parent)
        assert self.trie.lookup(path).length == len(path)

    @rule(picks=st.lists(PICK, min_size=1, max_size=3))
    def remove(self, picks: list[int]) -> None:
        for block in {self.picked(pick) for pick in picks} - {None}:
            children = self.oracle.children(block)
            assert set(self.trie.remove(block)) == children
            del self.oracle.paths[block]

    @rule(pick=PICK, change=PICK, cut=PICK, more=TOKENS)
    def lookup(self, pick: int, change: int, cut: int, more: Path) -> None:
        prompt = self.prompt(pick, change, cut, more)
        blocks, length = self.trie.lookup(np.array(prompt, np.int32))
        assert length == self.oracle.longest(prompt)
        assert len(blocks) == -(-length // self.oracle.block_tokens)
        for i, block in enumerate(blocks):
            end = min((i + 1) * self.oracle.block_tokens, length)
            assert self.oracle.paths[block][:end] == prompt[:end]
            assert self.oracle.start(self.oracle.paths[block]) == i * self.oracle.block_tokens

    @rule(pick=PICK, change=PICK, cut=PICK, withdraw=PICK)
    def below(self, pick: int, change: int, cut: int, withdraw: int) -> None:
        prefix = self.prompt(pick, change, cut, ())
        order = self.trie.below(prefix)
        paths = self.oracle.paths
        assert sorted(order) == sorted(block for block in paths if paths[block][: len(prefix)] == prefix)
        for i, block in enumerate(order):
            assert not self.oracle.children(block) & set(order[i:])
        if len(order) < 5 and withdraw % 4 == 0:
            for block in order:
                assert self.trie.is_leaf(block)
                assert self.trie.remove(block) == []
                del self.oracle.paths[block]

    @invariant()
    def same_blocks(self) -> None:
        assert len(self.trie) == len(self.oracle.paths)
        leaves = set(self.trie.leaves())
        for block, path in self.oracle.paths.items():
            assert block in self.trie
            assert self.trie.start(block) == self.oracle.start(path)
            assert tuple(self.trie.tokens(block)) == path[self.oracle.start(path) :]
            assert self.trie.parent(block) == self.oracle.above(block)
            children = self.trie.children(block)
            assert set(children) == self.oracle.children(block)
            assert sorted(children, key=self.oracle.paths.__getitem__) == children
            assert self.trie.is_leaf(block) == (not children) == (block in leaves)


Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)
TestMachine = Machine.TestCase


def conversation() -> Trie:
    """0 → 1 → {2, tail 3}, and the tail 4 at position 0; blocks of 4."""
    trie = Trie(4)
    trie.insert(0, [1, 2, 3, 4], None)
    trie.insert(1, [5, 6, 7, 8], 0)
    trie.insert(2, [9, 10, 11, 12], 1)
    trie.insert(3, [9, 9], 1)
    trie.insert(4, [1, 2, 9], None)
    return trie


@pytest.mark.parametrize(
    ("prompt", "blocks", "length"),
    [
        ([], [], 0),
        ([2], [], 0),
        ([1], [0], 1),
        ([1, 2, 9], [4], 3),
        ([1, 2, 9, 9, 9], [4], 3),
        ([1, 2, 4], [0], 2),
        (list(range(1, 9)), [0, 1], 8),
        ([*range(1, 12), 0, 0], [0, 1, 2], 11),
        ([*range(1, 13), 13], [0, 1, 2], 12),
        ([*range(1, 9), 9, 9, 9], [0, 1, 3], 10),
    ],
)
def test_lookup_is_exact_to_the_token(prompt: list[int], blocks: list[int], length: int) -> None:
    assert conversation().lookup(prompt) == Prefix(blocks, length)


def test_equal_tokens_behind_different_parents_are_different_blocks() -> None:
    trie = Trie(2)
    for block, tokens, parent in [(0, [1, 1], None), (1, [2, 2], None), (2, [7, 7], 0), (3, [7, 7], 1)]:
        assert trie.insert(block, tokens, parent) == (block, None, [])
    assert trie.lookup([1, 1, 7, 7]).blocks == [0, 2]
    assert trie.lookup([2, 2, 7, 7]).blocks == [1, 3]


def test_a_longer_block_replaces_the_tail_that_it_continues() -> None:
    trie = conversation()
    assert trie.insert(5, [9, 9, 3], 1) == (5, 3, [])
    assert 3 not in trie
    assert trie.insert(3, [9, 9, 3, 1], 1) == (3, 5, [])
    assert trie.insert(6, [9, 9], 1) == (3, None, [])
    assert trie.insert(6, [9], 1).block in (2, 3)
    assert 6 not in trie
    assert trie.lookup([*range(1, 9), 9, 9, 3, 1]) == ([0, 1, 3], 12)


def test_only_the_very_tokens_make_what_was_cut_off_findable_again() -> None:
    trie = conversation()
    prompt = list(range(1, 13))
    assert set(trie.remove(1)) == {2, 3}
    assert trie.lookup(prompt) == ([0], 4)
    assert trie.parent(2) is None
    assert trie.start(2) == 8
    assert trie.insert(1, [5, 6, 7, 9], 0).rejoined == []  # the number alone proves nothing
    assert trie.lookup(prompt) == ([0, 1], 7)
    assert trie.remove(0) == [1]
    assert trie.lookup(prompt).length == 2  # from the tail
    assert trie.insert(10, [1, 2, 3, 4], None).rejoined == [1]
    assert set(trie.insert(11, [5, 6, 7, 8], 10).rejoined) == {2, 3}
    assert trie.lookup(prompt) == ([10, 11, 2], 12)


def test_filling_one_hole_leaves_the_others_under_the_same_parent() -> None:
    trie = Trie(2)
    trie.insert(0, [5, 5], None)
    for block in (1, 2, 3):
        trie.insert(block, [block, block], 0)
        trie.insert(10 + block, [8, 8], block)
    for block in (1, 2, 3):
        assert trie.remove(block) == [10 + block]
    assert trie.is_leaf(0)
    assert trie.remove(11) == []
    assert trie.insert(21, [1, 1], 0).rejoined == []
    assert trie.insert(22, [2, 2], 0).rejoined == [12]
    assert trie.insert(23, [3, 3], 0).rejoined == [13]
    assert trie.lookup([5, 5, 3, 3, 8, 8]) == ([0, 23, 13], 6)


def test_removal_from_the_top_down_leaves_nothing_behind() -> None:
    """A hole that outlives what is below it would be a leak that no lookup shows."""
    depth = 2000

    def chain(trie: Trie) -> None:
        for block in range(depth):
            trie.insert(block, [block % 7, 1], block - 1 if block else None)

    trie = Trie(2)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        chain(trie)
        held = tracemalloc.get_traced_memory()[0] - before
        for block in range(depth):
            trie.remove(block)
        left = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert len(trie) == 0
    assert trie.below([]) == []
    assert left < held / 3  # the dictionary of numbers keeps its capacity
    chain(trie)
    assert trie.lookup([0, 1]) == ([0], 2)


def test_lookup_changes_nothing() -> None:
    trie = conversation()
    before = {block: (trie.children(block), trie.parent(block), trie.is_leaf(block)) for block in range(5)}
    first = [trie.lookup([*range(1, n), 77]) for n in range(1, 13)]
    assert [trie.lookup([*range(1, n), 77]) for n in range(1, 13)] == first
    assert {b: (trie.children(b), trie.parent(b), trie.is_leaf(b)) for b in range(5)} == before


def test_many_children_of_one_block() -> None:
    """Thousands of siblings live in several runs: neither finding nor emptying a run may show the seams."""
    rng = np.random.default_rng(0)
    rows = np.unique(rng.integers(1, 40, (9000, 4), dtype=np.int32), axis=0)
    rows = rng.permutation(rows)
    trie = Trie(6)
    trie.insert(-1, [7] * 6, None)
    for block, row in enumerate(rows):
        assert trie.insert(block, [*row, 1, 1][: 4 + block % 3], -1).block == block
    held = {tuple(row): block for block, row in enumerate(rows)}
    for row in rows[(rng.random(len(rows)) < 0.4) | ((rows[:, 0] > 10) & (rows[:, 0] < 20))]:
        trie.remove(held.pop(tuple(row)))
    assert len(trie) == len(held) + 1
    assert [tuple(trie.tokens(block)[:4]) for block in trie.children(-1)] == sorted(held)
    left = np.array(list(held))
    numbers = list(held.values())
    just_before = left - [0, 0, 0, 1]  # where the nearest may be the first of the next run
    for prompt in np.concatenate([just_before, rng.integers(1, 40, (300, 4))]):
        equal = np.cumprod(left == prompt, axis=1).sum(axis=1)
        blocks, length = trie.lookup([7] * 6 + prompt.tolist())
        assert length == 6 + equal.max()
        assert equal.max() == 0 or equal[numbers.index(blocks[-1])] == equal.max()


def test_ids_are_ordered_as_numbers_up_to_the_largest() -> None:
    trie = Trie(3)
    ids = [0, 1, 255, 256, 65535, 65536, 2**24, 2**31 - 1]
    for block, token in enumerate(ids):
        trie.insert(block, [5, token, token], None)
    assert trie.lookup([5, 2**31 - 1, 2**31 - 1]) == ([7], 3)
    for block, token in enumerate(ids):
        assert trie.lookup([5, token, 3]) == ([block], 2)
    assert trie.lookup([5, 2, 2]) == ([1], 1)


@pytest.mark.parametrize(
    ("block", "tokens", "parent", "error", "message"),
    [
        (9, [], None, BlockRefused, "1 to 4 tokens, got 0"),
        (9, [1, 2, 3, 4, 5], None, BlockRefused, "1 to 4 tokens, got 5"),
        (2, [8], None, BlockRefused, "block 2 is held already"),
        (9, [8], 3, BlockRefused, "block 3 is a tail of 2 tokens"),
        (9, [8], 77, UnknownBlock, "block 77 is not"),
        (9, [8, -1], None, TokenError, "-1 at position 1"),
        (9, np.array([2**31]), None, TokenError, "2147483648 at position 0"),
        (9, [0.5], None, TokenError, "float64"),
    ],
)
def test_a_refused_insertion_changes_nothing(
    block: int, tokens: list[int], parent: int | None, error: type[Exception], message: str
) -> None:
    trie = conversation()
    with pytest.raises(error, match=message):
        trie.insert(block, tokens, parent)
    assert len(trie) == 5
    assert trie.children(0) == [1]
    assert trie.below([]) == conversation().below([])
    assert trie.lookup(range(1, 13)) == ([0, 1, 2], 12)


def test_unknown_blocks_and_bad_prompts_are_typed_errors() -> None:
    trie = conversation()
    for ask in (trie.remove, trie.parent, trie.children, trie.is_leaf, trie.tokens, trie.start):
        with pytest.raises(UnknownBlock, match="block 50 is not"):
            ask(50)
    for ask in (trie.lookup, trie.below):
        with pytest.raises(TokenError, match="-5 at position 2"):
            ask([1, 2, -5])
    with pytest.raises(ValueError, match="at least one token"):
        Trie(0)
