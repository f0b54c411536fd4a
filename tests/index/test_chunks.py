"""The chunk table against an oracle that tries every place of every held block."""

from __future__ import annotations

import copy
import random
import tracemalloc
from collections.abc import Iterator
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.index.chunks import AT_START, ChunkTable, Held, Run, Source
from kvstore.index.errors import BlockRefused, TokenError, UnknownBlock

Ids = tuple[int, ...]


class Oracle:
    """Blocks with their tokens, parents, and positions in the prompts that they were captured from."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.tokens: dict[int, Ids] = {}
        self.parent: dict[int, int | None] = {}
        self.start: dict[int, int] = {}

    def held(self) -> list[Held]:
        return [
            Held(block, np.array(tokens, np.int32), self.parent[block], self.start[block])
            for block, tokens in self.tokens.items()
        ]

    def remove(self, block: int) -> None:
        del self.tokens[block], self.parent[block], self.start[block]
        for other, parent in self.parent.items():
            if parent == block:
                self.parent[other] = None

    def reach(self, prompt: Ids, block: int, offset: int) -> int:
        """How many tokens from the first of `prompt` on stand alike from `offset` of `block` on."""
        for length, (token, held) in enumerate(zip(prompt, self.tokens[block][offset:], strict=False)):
            if token != held:
                return length
        length = min(len(prompt), len(self.tokens[block]) - offset)
        if offset + length < self.block_tokens or length == len(prompt):
            return length
        rest = [self.reach(prompt[length:], child, 0) for child in self.parent if self.parent[child] == block]
        return length + max(rest, default=0)

    def sources(self, prompt: Ids) -> set[Source]:
        """Every place that holds all of `prompt`."""

        def behind(prompt: Ids, block: int, offset: int) -> Iterator[tuple[int, ...]]:
            here = self.tokens[block][offset : offset + len(prompt)]
            if here != prompt[: len(here)]:
                return
            if len(here) == len(prompt):
                yield (block,)
            elif offset + len(here) == self.block_tokens:
                for child in self.parent:
                    if self.parent[child] == block:
                        for blocks in behind(prompt[len(here) :], child, 0):
                            yield (block, *blocks)

        return {
            Source(blocks, offset)
            for block, tokens in self.tokens.items()
            for offset in range(len(tokens))
            for blocks in behind(prompt, block, offset)
        }

    def is_alone(self, prompt: Ids, at: int, block: int, offset: int) -> bool:
        """Whether what stands alike around prompt[at] and token `offset` of `block` was captured from the start on."""
        while at:
            above = self.parent[block]
            if offset == 0 and above is None:
                break
            block, offset = (block, offset - 1) if offset or above is None else (above, self.block_tokens - 1)
            at -= 1
            if self.tokens[block][offset] != prompt[at]:
                return self.start[block] + offset + 1 < AT_START
        return self.start[block] + offset < AT_START

    def longest(self, prompt: Ids, *, alone: bool) -> list[int]:
        """How many tokens from each on one copy holds, of those from the start of a prompt or of the others."""
        return [
            max(
                (
                    self.reach(prompt[at:], block, offset)
                    for block in self.tokens
                    for offset in range(len(self.tokens[block]))
                    if self.is_alone(prompt, at, block, offset) == alone
                ),
                default=0,
            )
            for at in range(len(prompt))
        ]

    @staticmethod
    def best(longest: list[int], shortest: int) -> tuple[int, int]:
        """(tokens, -pieces) of the best cover."""

        @cache
        def up_to(end: int) -> tuple[int, int]:
            if end == 0:
                return 0, 0
            choices = [up_to(end - 1)]
            for begin in range(end - shortest + 1):
                if longest[begin] >= end - begin:
                    tokens, pieces = up_to(begin)
                    choices.append((tokens + end - begin, pieces - 1))
            return max(choices)

        return up_to(len(longest))


step = st.tuples(
    st.integers(0, 4), st.integers(0, 1000), st.lists(st.integers(0, 2), min_size=3, max_size=14).map(tuple)
)
piece = st.tuples(
    st.integers(0, 1000),
    st.integers(0, 12),
    st.integers(1, 14),
    st.lists(st.integers(0, 2), max_size=3).map(tuple),
)


def build(table: ChunkTable, oracle: Oracle, steps: list[tuple[int, int, Ids]]) -> None:
    """Insert prompts behind earlier blocks or alone, cut into blocks, and now and then remove one."""
    number = max(oracle.tokens, default=-1) + 1
    for kind, pick, tokens in steps:
        blocks = list(oracle.tokens)
        if kind == 0 and blocks:
            gone = blocks[pick % len(blocks)]
            table.remove(gone)
            oracle.remove(gone)
            continue
        full = [block for block in blocks if len(oracle.tokens[block]) == oracle.block_tokens]
        parent = [None, *full][pick % (len(full) + 1)]
        start = pick % 2 * AT_START if parent is None else oracle.start[parent] + oracle.block_tokens
        for at in range(0, len(tokens), oracle.block_tokens):
            part = tokens[at : at + oracle.block_tokens]
            table.insert(number, part, parent, start=start if parent is None else None)
            oracle.tokens[number], oracle.parent[number], oracle.start[number] = part, parent, start + at
            parent = number
            number += 1


def assemble(oracle: Oracle, pieces: list[tuple[int, int, int, Ids]]) -> Ids:
    """A prompt of stretches of what is held, across blocks, and other tokens between."""
    prompt: Ids = ()
    for pick, offset, length, other in pieces:
        block: int | None = list(oracle.tokens)[pick % len(oracle.tokens)] if oracle.tokens else None
        stream: Ids = ()
        while block is not None:
            stream = oracle.tokens[block] + stream
            block = oracle.parent[block]
        prompt += stream[offset : offset + length] + other
    return prompt


@settings(deadline=None, max_examples=300)
@given(
    sizes=st.sampled_from([(3, 1), (4, 2), (8, 2), (8, 4)]),
    steps=st.lists(step, min_size=2, max_size=10),
    pieces=st.lists(piece, min_size=1, max_size=4),
    extra=st.integers(0, 4),
    start=st.integers(0, 3),
    boundaries=st.lists(st.integers(0, 30), max_size=4),
)
def test_finds_the_best_cover_and_every_copy_first_those_in_context(
    sizes: tuple[int, int],
    steps: list[tuple[int, int, Ids]],
    pieces: list[tuple[int, int, int, Ids]],
    extra: int,
    start: int,
    boundaries: list[int],
) -> None:
    block_tokens, window = sizes
    table = ChunkTable(block_tokens, window=window, copies=100, room=2)
    oracle = Oracle(block_tokens)
    build(table, oracle, steps)
    prompt = assemble(oracle, pieces)
    shortest = 2 * window - 1 + extra
    runs = table.find(np.array(prompt, np.int32), start=start, shortest=shortest, boundaries=boundaries)
    rest = prompt[start:]
    in_context: list[Run] = []
    for run in runs:
        assert run.target >= start
        assert run.length >= shortest
        copies = oracle.sources(prompt[run.target : run.target + run.length])
        alone = {
            copy for copy in copies if oracle.is_alone(rest, run.target - start, copy.blocks[0], copy.offset)
        }
        assert len(run.sources) == len(set(run.sources))
        assert set(run.sources) == (copies - alone or alone)
        in_context += [run] if copies - alone else []
    for one, other in pairwise(runs):
        assert one.target + one.length <= other.target
    assert _extent(in_context) == oracle.best(oracle.longest(rest, alone=False), shortest)
    left = oracle.longest(rest, alone=True)
    for run in in_context:
        for at in range(run.target - start + run.length):
            left[at] = max(0, min(left[at], run.target - start - at)) if at < run.target - start else left[at]
        left[run.target - start : run.target - start + run.length] = [0] * run.length
    assert _extent([run for run in runs if run not in in_context]) == oracle.best(left, shortest)


def _extent(runs: list[Run]) -> tuple[int, int]:
    return sum(run.length for run in runs), -len(runs)


@settings(deadline=None, max_examples=150)
@given(
    sizes=st.sampled_from([(3, 1), (4, 2), (8, 4)]),
    steps=st.lists(step, min_size=2, max_size=10),
    later=st.lists(step, max_size=4),
    pieces=st.lists(piece, min_size=1, max_size=4),
    shuffled=st.randoms(use_true_random=False),
)
def test_a_table_filled_at_once_finds_the_same(
    sizes: tuple[int, int],
    steps: list[tuple[int, int, Ids]],
    later: list[tuple[int, int, Ids]],
    pieces: list[tuple[int, int, int, Ids]],
    shuffled: random.Random,
) -> None:
    block_tokens, window = sizes
    one_by_one, at_once = (ChunkTable(block_tokens, window=window, copies=100, room=2) for _ in range(2))
    oracle = Oracle(block_tokens)
    build(one_by_one, oracle, steps)
    blocks = oracle.held()
    shuffled.shuffle(blocks)  # a child before its parent, too
    at_once.fill(blocks)
    twin = copy.deepcopy(oracle)
    for step in range(2):
        prompt = assemble(oracle, pieces)
        assert len(at_once) == len(one_by_one)
        found, again = (table.find(prompt, shortest=2 * window - 1) for table in (one_by_one, at_once))
        assert [run._replace(sources=sorted(run.sources)) for run in found] == [
            run._replace(sources=sorted(run.sources)) for run in again
        ]
        if step == 0:
            build(one_by_one, oracle, later)
            build(at_once, twin, later)


def test_a_table_is_filled_once_and_with_what_insert_takes() -> None:
    def block(number: int, tokens: int, parent: int | None = None) -> Held:
        return Held(number, np.full(tokens, 7, np.int32), parent, 0)

    table = ChunkTable(32)
    for blocks, message in (
        ([block(1, 33)], "block 1: a block holds 1 to 32 tokens, got 33"),
        ([block(1, 32), block(1, 32)], "2 blocks have 1 numbers"),
        ([block(1, 4), block(2, 32, 1)], "block 1 is a tail of 4 tokens"),
    ):
        with pytest.raises(BlockRefused, match=message):
            table.fill(blocks)
    table.fill([])
    assert len(table) == 0
    table.fill([block(2, 9, 1), block(1, 32)])
    assert table.find([7] * 41) == [Run(0, 41, [Source((1, 2), 0)])]
    with pytest.raises(BlockRefused, match="holds 2 blocks already"):
        table.fill([block(3, 32)])


@settings(deadline=None, max_examples=150)
@given(
    steps=st.lists(step, min_size=2, max_size=14),
    pieces=st.lists(piece, min_size=1, max_size=4),
    shortest=st.integers(1, 5),
    copies=st.integers(1, 3),
)
def test_whatever_is_reported_has_equal_tokens(
    steps: list[tuple[int, int, Ids]], pieces: list[tuple[int, int, int, Ids]], shortest: int, copies: int
) -> None:
    """Also where few copies are tried and runs are shorter than what is sure to be found."""
    table = ChunkTable(4, window=4, copies=copies, room=1)
    oracle = Oracle(4)
    build(table, oracle, steps)
    prompt = assemble(oracle, pieces)
    for run in table.find(prompt, shortest=shortest):
        assert 1 <= len(run.sources) <= copies
        assert set(run.sources) <= oracle.sources(prompt[run.target : run.target + run.length])


def text(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 50_000, length).tolist()


def hold(table: ChunkTable, first: int, tokens: list[int], start: int = AT_START) -> None:
    for i, at in enumerate(range(0, len(tokens), table.block_tokens)):
        part = tokens[at : at + table.block_tokens]
        table.insert(first + i, part, first + i - 1 if i else None, start=start + at)


def test_a_passage_is_found_across_blocks_at_another_offset() -> None:
    table = ChunkTable(32)
    source = text(1, 150)
    hold(table, 10, source)
    prompt = text(2, 77) + source[20:120] + text(3, 41) + source[3:34]
    assert table.find(prompt, shortest=31) == [
        Run(77, 100, [Source((10, 11, 12, 13), 20)]),
        Run(218, 31, [Source((10, 11), 3)]),
    ]
    assert table.find(prompt, shortest=32) == [Run(77, 100, [Source((10, 11, 12, 13), 20)])]
    assert table.find(prompt, shortest=31, start=100) == [
        Run(100, 77, [Source((11, 12, 13), 11)]),
        Run(218, 31, [Source((10, 11), 3)]),
    ]


def test_copies_are_alternatives_and_the_one_with_most_in_front_comes_first() -> None:
    table = ChunkTable(32)
    passage = text(1, 40)
    front = text(5, 24)
    hold(table, 0, passage)
    hold(table, 10, front + passage)
    hold(table, 20, text(4, 33) + passage)
    prompt = front[-9:] + passage + text(7, 5)
    assert table.find(prompt, shortest=40) == [Run(0, 49, [Source((10, 11), 15)])]
    prompt = text(6, 9) + passage + text(7, 5)
    (run,) = table.find(prompt)
    assert (run.target, run.length) == (9, 40)
    assert set(run.sources) == {Source((0, 1), 0), Source((10, 11), 24), Source((21, 22), 1)}
    table.remove(10)
    (run,) = table.find(prompt)
    assert set(run.sources) == {Source((0, 1), 0), Source((21, 22), 1)}


def test_shorter_copies_in_context_come_before_a_longer_one_from_the_start() -> None:
    """Longest first: the copy that holds both passages was captured behind nothing, the others were not."""
    table = ChunkTable(32)
    one, other = text(1, 64), text(2, 64)
    hold(table, 0, one + other, start=0)
    assert table.find(text(9, 50) + one + other) == [Run(50, 128, [Source((0, 1, 2, 3), 0)])]
    hold(table, 10, text(3, 20) + one, start=0)
    hold(table, 20, text(4, 40) + other, start=0)
    assert table.find(text(9, 50) + one + other) == [
        Run(50, 64, [Source((10, 11, 12), 20)]),
        Run(114, 64, [Source((21, 22, 23), 8)]),
    ]
    assert table.find(text(9, 50) + one + other[:40], shortest=32) == [
        Run(50, 64, [Source((10, 11, 12), 20)]),
        Run(114, 40, [Source((21, 22), 8)]),
    ]


def test_one_token_more_does_not_bring_in_a_copy_from_the_start() -> None:
    table = ChunkTable(32)
    passage = text(1, 64)
    hold(table, 0, [*passage, 7], start=0)
    hold(table, 10, text(3, 20) + passage, start=0)
    assert table.find([*text(9, 50), *passage, 7]) == [Run(50, 64, [Source((10, 11, 12), 20)])]


def test_what_no_copy_in_context_holds_comes_from_the_start() -> None:
    table = ChunkTable(32)
    whole = text(1, 200)
    hold(table, 0, whole, start=AT_START - 1)
    hold(table, 10, text(3, 20) + whole[40:110], start=AT_START)
    found = table.find(text(9, 50) + whole, shortest=32)
    assert [(run.target, run.length) for run in found] == [(50, 40), (90, 70), (160, 90)]
    assert [run.sources[0].blocks[0] for run in found] == [0, 10, 3]
    assert [(run.target, run.length) for run in table.find(text(9, 50) + whole, shortest=50)] == [
        (90, 70),
        (160, 90),
    ]


def test_a_long_copy_from_the_start_is_in_context_behind_its_own_beginning() -> None:
    """A whole prompt that stands a few tokens further on is not cut up by each sentence that others have, too."""
    table = ChunkTable(32)
    whole = text(1, 900)
    hold(table, 0, whole, start=0)
    hold(table, 100, text(3, 32) + whole[100:150] + text(4, 32) + whole[600:650], start=0)
    found = table.find(text(9, 50) + whole)
    assert [(run.target, run.length) for run in found] == [(50, 100), (150, 50), (200, 750)]
    assert [run.sources[0].blocks[0] for run in found] == [0, 101, 4]


def test_blocks_join_again_when_the_one_between_is_back() -> None:
    table = ChunkTable(32)
    source = text(1, 96)
    hold(table, 0, source)
    table.remove(1)
    assert [run.sources for run in table.find(source)] == [[Source((0,), 0)], [Source((2,), 0)]]
    table.insert(7, source[32:64], 0, children=[2])
    assert table.find(source) == [Run(0, 96, [Source((0, 7, 2), 0)])]


def test_pieces_of_two_sources_meet_at_the_segment_boundary() -> None:
    """What the end of one passage and the beginning of the next have in common belongs to either."""
    table = ChunkTable(32)
    one, common, other = text(1, 60), text(2, 20), text(3, 60)
    hold(table, 0, one + common)
    hold(table, 10, common + other)
    prompt = one + common + other
    assert [(run.target, run.length) for run in table.find(prompt)] == [(0, 80), (80, 60)]
    assert [(run.target, run.length) for run in table.find(prompt, boundaries=[60])] == [(0, 60), (60, 80)]


def test_of_two_copies_the_one_that_agrees_further_to_the_left_comes_first() -> None:
    """Where a piece is cut at a boundary, what stood before it in each copy still tells them apart."""
    table = ChunkTable(32)
    one, other = text(1, 60), text(2, 60)
    hold(table, 0, other)
    hold(table, 10, one[-40:] + other)
    hold(table, 20, one[-5:] + other)
    hold(table, 30, one)
    first, second = table.find(one + other, shortest=60, boundaries=[60])
    assert first.sources == [Source((30, 31), 0)]
    assert second.sources == [Source((11, 12, 13), 8), Source((20, 21, 22), 5), Source((0, 1), 0)]


@pytest.mark.parametrize("gone", [1, 2, 3])
def test_removing_one_of_several_that_follow_a_block_leaves_the_others_joined(gone: int) -> None:
    table = ChunkTable(32)
    table.insert(0, text(9, 32))
    for child in (1, 2, 3):
        table.insert(child, text(child, 32), 0)
    table.remove(gone)
    for child in {1, 2, 3} - {gone}:
        assert table.find(text(9, 32) + text(child, 10)) == [Run(0, 42, [Source((0, child), 0)])]
    table.insert(gone, text(7, 32), 0)
    assert table.find(text(9, 32) + text(7, 10)) == [Run(0, 42, [Source((0, gone), 0)])]


def test_one_token_repeated_everywhere_stays_within_bounds() -> None:
    """Each of 20,000 positions matches each of 300 blocks: trying all would take gigabytes."""
    table = ChunkTable(128)
    for first in range(0, 300, 3):
        hold(table, first, [5] * 384)
    prompt = np.full(20_000, 5, np.int32)
    tracemalloc.start()
    try:
        runs = table.find(prompt)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(run.length for run in runs) > len(prompt) - table.window
    assert all(len(run.sources) <= table.copies for run in runs)
    assert peak < 100 << 20


def test_many_copies_do_not_hide_another_text() -> None:
    """A bounded number of copies is tried of each window; it must not be a bound on windows of one bucket."""
    table = ChunkTable(64)
    common, rare = text(1, 64), text(2, 64)
    hold(table, 0, rare)
    for block in range(1, 500):
        table.insert(block, common)
    assert [run.sources for run in table.find(text(3, 7) + rare)] == [[Source((0,), 0)]]
    (run,) = table.find(common + text(4, 9))
    assert len(run.sources) == table.copies
    for block in range(1, 500):
        table.remove(block)
    assert table.find(common) == []


def test_find_changes_nothing() -> None:
    table = ChunkTable(32)
    hold(table, 0, text(1, 100))
    prompt = text(2, 10) + text(1, 100)[7:90]
    first = table.find(prompt)
    assert first
    assert table.find(prompt) == first
    assert len(table) == 4


@pytest.mark.parametrize(
    ("block", "tokens", "parent", "children", "error", "message"),
    [
        (9, [], None, [], BlockRefused, "1 to 32 tokens, got 0"),
        (9, [1] * 33, None, [], BlockRefused, "1 to 32 tokens, got 33"),
        (1, [1], None, [], BlockRefused, "block 1 is held already"),
        (9, [1], 2, [], BlockRefused, "block 2 is a tail of 6 tokens"),
        (9, [1] * 32, None, [77], UnknownBlock, "block 77 is not"),
        (9, [1] * 32, None, [2], BlockRefused, "block 2 follows another"),
        (9, [1], None, [0], BlockRefused, "block 9 is a tail of 1 tokens"),
        (9, [4, -1], None, [], TokenError, "-1 at position 1"),
        (9, [4, 1 << 31], None, [], TokenError, "2147483648 at position 1"),
    ],
)
def test_a_refused_insertion_changes_nothing(
    block: int,
    tokens: list[int],
    parent: int | None,
    children: list[int],
    error: type[Exception],
    message: str,
) -> None:
    table = ChunkTable(32)
    source = text(1, 70)
    hold(table, 0, source)
    with pytest.raises(error, match=message):
        table.insert(block, tokens, parent, children)
    assert len(table) == 3
    assert 9 not in table
    assert table.find(source) == [Run(0, 70, [Source((0, 1, 2), 0)])]


def test_a_parent_that_is_not_held_is_no_parent() -> None:
    table = ChunkTable(32)
    table.insert(5, text(1, 32), 4)
    assert table.find(text(1, 32)) == [Run(0, 32, [Source((5,), 0)])]


def test_bad_requests_are_typed_errors() -> None:
    table = ChunkTable(32)
    with pytest.raises(UnknownBlock, match="block 3 is not"):
        table.remove(3)
    with pytest.raises(TokenError, match="-5 at position 1"):
        table.find([1, -5])
    with pytest.raises(ValueError, match="got -1 and 32"):
        table.find([1], start=-1)
    with pytest.raises(ValueError, match="got 0 and 0"):
        table.find([1], shortest=0)
    for bad in (
        {"block_tokens": 40},
        {"block_tokens": 8},
        {"block_tokens": 32, "window": 12},
        {"block_tokens": 32, "copies": 0},
        {"block_tokens": 32, "room": 0},
    ):
        with pytest.raises(ValueError, match="got"):
            ChunkTable(**bad)
    assert table.find([]) == []
