"""Window hashes, and the table that keeps entries by them, against a dictionary of lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.index.windows import WindowHash, WindowTable


@given(
    window=st.sampled_from([1, 2, 4, 16]),
    ids=st.lists(st.sampled_from([0, 1, 2**31 - 1]), max_size=60),
)
def test_a_hash_depends_on_the_tokens_of_its_window_alone(window: int, ids: list[int]) -> None:
    hashed = WindowHash(window)
    tokens = np.array(ids, np.int32)
    hashes = hashed(tokens)
    assert hashes.dtype == np.uint64
    assert len(hashes) == max(0, len(ids) - window + 1)
    windows = [tuple(ids[i : i + window]) for i in range(len(hashes))]
    for i, value in enumerate(hashes):
        assert hashed(tokens[i : i + window]) == value
    assert len(set(hashes.tolist())) == len(set(windows))
    apart = tokens[: len(tokens) // window * window].reshape(-1, window)
    assert hashed.of(apart).tolist() == hashes[::window].tolist()


def test_two_processes_hash_differently() -> None:
    """Fixed multipliers would let anyone prepare texts that collide in every process."""
    ids = np.arange(16, dtype=np.int32)
    assert WindowHash(16)(ids) != WindowHash(16)(ids)


@pytest.mark.parametrize("window", [0, 3, 12, -2])
def test_a_window_is_a_power_of_two(window: int) -> None:
    with pytest.raises(ValueError, match=f"power of two, got {window}"):
        WindowHash(window)


# All in one bucket but the last two, as hostile texts would have it.
VALUES = [0, 1, 2, 3, 2**63, 2**64 - 1]


@given(
    filled=st.lists(st.sampled_from(VALUES), max_size=12),
    steps=st.lists(st.tuples(st.integers(0, 30), st.sampled_from(VALUES), st.booleans()), max_size=120),
)
def test_table_equals_lists_by_hash(filled: list[int], steps: list[tuple[int, int, bool]]) -> None:
    """Whether it is filled at once or entry by entry."""
    table = WindowTable()
    capacity = len(filled)
    held = dict(enumerate(filled))
    copies: dict[int, list[int]] = {value: [] for value in VALUES}
    for entry, value in held.items():
        copies[value].insert(0, entry)
    table.grow(max(capacity, 1))
    table.fill(np.arange(capacity, dtype=np.int32), np.array(filled, np.uint64))
    check(table, copies)
    for entry, value, grow in steps:
        if entry >= capacity or grow:
            capacity = max(capacity, entry) + 1
            table.grow(capacity)
        if entry in held:
            table.discard(entry)
            copies[held.pop(entry)].remove(entry)
        else:
            table.add(entry, value)
            held[entry] = value
            copies[value].insert(0, entry)
        check(table, copies)


def check(table: WindowTable, copies: dict[int, list[int]]) -> None:
    at, entries = table.find(np.array(VALUES, np.uint64))
    assert sorted(at.tolist()) == [i for i, value in enumerate(VALUES) if copies[value]]
    for i, newest in zip(at, entries, strict=True):
        chain = [int(newest)]
        while (older := int(table.older(np.array(chain[-1:], np.int32))[0])) >= 0:
            chain.append(older)
        assert chain == copies[VALUES[i]]
