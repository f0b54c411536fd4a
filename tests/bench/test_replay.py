"""Replays of traces: the optimum is one, and no budget is overdrawn."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import flash_writes
from bench.replay import Prepared, made, optimum, replay
from bench.traces import Clock, Request, Trace, assistant, chat_service
from kvstore.prefetch.eviction import POLICIES

WHOLE = 4  # tokens of a block


def prepared(paths: list[tuple[int, ...]]) -> Prepared:
    """Requests a second apart; a block is known by what precedes it, too."""
    numbers: dict[tuple[int, ...], int] = {}
    requests = []
    for second, path in enumerate(paths):
        blocks = tuple(numbers.setdefault(path[: end + 1], len(numbers)) for end in range(len(path)))
        requests.append(Request(float(second), blocks, WHOLE * len(blocks), 0))
    return Prepared(Trace("made up", WHOLE, requests))


def most_hits(trace: Trace, room: int) -> int:
    """The most blocks that any choice hits which keeps children no longer than their parents, by trying them all."""
    parents = {
        block: request.path[at - 1] if at else None
        for request in trace.requests
        for at, block in enumerate(request.path)
    }

    def keeps_to_trees(held: frozenset[int]) -> bool:
        return all(parents[block] is None or parents[block] in held for block in held)

    @cache
    def best(number: int, held: frozenset[int]) -> int:
        if number == len(trace.requests):
            return 0
        path = trace.requests[number].path
        hit = next((at for at, block in enumerate(path) if block not in held), len(path))
        return hit + max(
            best(number + 1, kept)
            for kept in _subsets(held.union(path))
            if len(kept) <= room and keeps_to_trees(kept)
        )

    return best(0, frozenset())


@cache
def _subsets(blocks: frozenset[int]) -> list[frozenset[int]]:
    found = [frozenset[int]()]
    for block in blocks:
        found += [each | {block} for each in found]
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=2).map(tuple), min_size=1, max_size=7),
    st.integers(1, 4),
)
def test_the_optimum_is_what_trying_everything_finds(paths: list[tuple[int, ...]], room: int) -> None:
    trace = prepared(paths)
    hits = most_hits(trace.trace, room) * WHOLE
    assert optimum(trace, room).hits == pytest.approx(100 * hits / trace.tokens)


@pytest.mark.parametrize("name", POLICIES)
def test_no_policy_hits_more_than_the_optimum(name: str) -> None:
    trace = Prepared(chat_service(400))
    for room in (1, 20, trace.trace.unique // 4):
        clock = Clock()
        result = replay(trace, made(name, room, clock), room, clock)
        assert 0 <= result.hits <= optimum(trace, room).hits


@pytest.mark.parametrize("name", POLICIES)
def test_with_room_for_all_each_block_is_missed_once(name: str) -> None:
    trace = Prepared(assistant(200))
    clock = Clock()
    result = replay(trace, made(name, trace.trace.unique, clock), trace.trace.unique, clock)
    first = 128 * trace.trace.unique
    assert result.hits == pytest.approx(100 * (trace.tokens - first) / trace.tokens)
    assert result == pytest.approx(optimum(trace, trace.trace.unique))


def test_writes_to_flash_stay_within_the_budget_of_a_day() -> None:
    trace = chat_service(600)
    everything = flash_writes.everything(trace)
    per_day = trace.unique // 10
    scarce = flash_writes.replay(trace, 10, "admission", per_day)
    assert 0 < scarce.written < everything.written
    assert scarce.most_of_budget <= 1
    assert flash_writes.replay(trace, 10, "admission").hits <= everything.hits
