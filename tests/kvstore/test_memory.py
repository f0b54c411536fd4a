"""Memory of a tier: pages are there before they are handed out."""

from __future__ import annotations

import os

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.tiers.arena import Extent
from kvstore.tiers.memory import MemoryTier

PAGE = 4096
ARENA = 64 * PAGE


def tier() -> MemoryTier:
    return MemoryTier("warm", 4 * ARENA, arena_bytes=ARENA, alignment=PAGE, pin=False)


def pages(memory: MemoryTier) -> int:
    """How many pages the system has made for a tier."""
    files = {memory.handle(Extent(number, 0, 0))[0] for number in range(4)}
    return sum(os.fstat(file).st_blocks * 512 for file in files) // PAGE


def test_what_is_handed_out_next_is_there_already() -> None:
    """A put that waited milliseconds for the system to find its pages."""
    memory = tier()
    assert pages(memory) == 0
    memory.touch_ahead(16 * PAGE)
    assert pages(memory) == 16
    extent = memory.allocate(16 * PAGE)
    assert extent is not None
    memory.view(extent, 16 * PAGE)[:] = 7
    assert pages(memory) == 16
    memory.touch_ahead(16 * PAGE)
    assert pages(memory) == 32
    assert (memory.view(extent, 16 * PAGE) == 7).all()
    memory.release(extent)
    memory.touch_ahead(32 * PAGE)
    assert pages(memory) == 32, "what was given back is there"
    memory.close()


@settings(max_examples=50, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["allocate", "release", "touch"]), st.integers(1, 80)), max_size=30
    )
)
def test_no_more_is_touched_than_asked_for(steps: list[tuple[str, int]]) -> None:
    memory = tier()
    held: list[tuple[Extent, int]] = []
    most = 0
    for step, count in steps:
        if step == "allocate" and (extent := memory.allocate(count * PAGE)) is not None:
            memory.view(extent, count * PAGE)[:] = count
            held.append((extent, count))
        elif step == "release" and held:
            memory.release(held.pop(count % len(held))[0])
        elif step == "touch":
            before = pages(memory)
            memory.touch_ahead(count * PAGE)
            assert pages(memory) - before <= count
        memory.check()
        most = max(most, pages(memory))
        for extent, number in held:
            assert np.all(memory.view(extent, number * PAGE) == number)
    assert most * PAGE <= memory.total
    memory.close()


@settings(max_examples=200, deadline=None)
@given(
    most=st.integers(1, 12),
    arena=st.integers(6, 64),
    steps=st.lists(st.tuples(st.sampled_from("aaar"), st.integers(0, 5), st.integers(1, 8)), max_size=60),
)
def test_a_device_never_has_more_arenas_than_it_pins_nor_longer_ones(
    most: int, arena: int, steps: list[tuple[str, int, int]]
) -> None:
    """Owners had arenas of their own, as many as there were owners."""
    budget = min(most * arena, 64) * PAGE
    memory = MemoryTier(
        "hot", budget, arena_bytes=arena * PAGE, alignment=PAGE, pin=False, walled=True, most_arenas=most
    )
    held: list[Extent] = []
    for step, owner, pages in steps:
        if step == "r" and held:
            memory.release(held.pop(pages % len(held)))
        elif (extent := memory.allocate(pages * PAGE, bytes([owner]), 3 * PAGE)) is not None:
            held.append(extent)
        memory.check()
        assert len(memory.arenas) <= most
        assert all(each.size <= arena * PAGE for each in memory.arenas.values())
        assert sum(each.size for each in memory.arenas.values()) <= budget
    for extent in held:
        memory.release(extent)
    while memory.allocate(PAGE, b"one of many") is not None:
        assert len(memory.arenas) <= most
    assert memory.used >= 0.75 * memory.total, "that many are enough for about the whole budget"
    memory.close()
