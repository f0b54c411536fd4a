"""In which order blocks leave: each owner's by themselves in memory, all together on flash."""

from __future__ import annotations

import pytest

from kvstore.block import Block
from kvstore.namespace import Namespace
from kvstore.prefetch.eviction import POLICIES
from kvstore.prefetch.load_or_recompute import Throughput
from kvstore.tiers.appraisal import Appraisal
from kvstore.tiers.orders import Orders
from tests.known_kv import prompt

OWNERS = (b"one", b"two")


def orders(policy: str) -> Orders:
    return Orders(policy, Appraisal("laptop", Throughput()), lambda space: space.tenant)


def blocks(owner: bytes, first: int) -> list[Block]:
    """Four of a tenant, that hang on nothing."""
    space = Namespace(owner, 16)
    space.tenant = owner
    return [
        Block(
            number,
            b"%32d" % number,
            b"",
            space,
            prompt(number, 16),
            0,
            4096,
            cold_bytes=4096,
            last_use=number,
        )
        for number in range(first, first + 4)
    ]


@pytest.mark.parametrize("policy", POLICIES)
def test_who_makes_room_in_memory_never_goes_through_what_others_have(policy: str) -> None:
    """A tenant whose blocks were younger than another's went through all of those for each block that he put."""
    order = orders(policy)
    theirs, ours = (blocks(owner, 1 + 10 * at) for at, owner in enumerate(OWNERS))
    for block in (*theirs, *ours):
        order.insert_new("warm", block)
    asked: list[int] = []
    assert order.in_memory("warm", OWNERS[1], lambda number: asked.append(number) is not None) is None
    assert set(asked) == {block.number for block in ours}
    victim = order.in_memory("warm", OWNERS[1], lambda _: True)
    assert victim in {block.number for block in ours}
    assert order.in_memory("hot", OWNERS[1], lambda _: True) is None
    assert order.in_memory("warm", b"nobody", lambda _: True) is None
    assert order.count("warm") == 8


@pytest.mark.parametrize("policy", POLICIES)
def test_on_flash_the_blocks_of_all_owners_are_in_one_order(policy: str) -> None:
    order = orders(policy)
    held = [block for at, owner in enumerate(OWNERS) for block in blocks(owner, 1 + 10 * at)]
    for block in held:
        order.insert("cold", block)
    left = list[int]()
    while (victim := order.on_flash(lambda _: True)) is not None:
        left.append(victim)
        order.remove("cold", next(block for block in held if block.number == victim))
    assert sorted(left) == [block.number for block in held]
    assert order.count("cold") == 0


def test_a_use_counts_where_the_block_lies() -> None:
    order = orders("lru")
    first, second, *_ = mine = blocks(OWNERS[0], 1)
    for block in mine[:2]:
        order.insert_new("warm", block)
    order.use([first])
    order.use([])
    assert order.in_memory("warm", OWNERS[0], lambda _: True) == second.number
