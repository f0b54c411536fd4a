"""Every policy under random traffic: leaf first, pins, budgets, accounting; and what makes each what it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.prefetch.eviction import DEFAULT, POLICIES, LeastWorth
from kvstore.prefetch.policy import Facts, Policy

ALL = sorted(POLICIES)
FREE: Callable[[int], bool] = lambda _: True  # noqa: E731


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(name: str, room: int, clock: Clock | None = None) -> Policy:
    return LeastWorth(room, clock or Clock()) if name == DEFAULT else POLICIES[name](room)


# A block is its path: (1,), (1, 2), (1, 2, 1). Numbered by a dictionary, so that a dropped one comes back as the same.
paths = st.lists(st.integers(1, 3), min_size=1, max_size=5).map(tuple)
requests = st.lists(
    st.tuples(paths, st.floats(0, 100), st.integers(0, 2), st.sampled_from(["use", "use", "use", "drop"])),
    max_size=60,
)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=60, deadline=None)
@given(requests=requests, room=st.integers(1, 12), pinned=st.sets(st.integers(1, 3), max_size=1))
def test_random_traffic(
    name: str, requests: list[tuple[tuple[int, ...], float, int, str]], room: int, pinned: set[int]
) -> None:
    """A model of the tier beside the policy: what it gives up is held, a leaf, neither pinned nor leased."""
    clock = Clock()
    policy = make(name, room, clock)
    numbers: dict[tuple[int, ...], int] = {}
    held: dict[int, int | None] = {}

    def is_leaf(block: int) -> bool:
        return block not in held.values()

    def is_pinned(block: int) -> bool:
        return any(block == numbers.get((root,)) for root in pinned)

    for path, wait, session, what in requests:
        clock.now += wait
        prefixes = [path[: end + 1] for end in range(len(path))]
        blocks = [numbers.setdefault(prefix, len(numbers)) for prefix in prefixes]
        if what == "drop":  # by someone else, whatever the policy thinks of it
            if blocks[-1] in held and is_leaf(blocks[-1]):
                del held[blocks[-1]]
            policy.remove(blocks[-1]) if blocks[-1] not in held else None
            continue
        policy.touch([block for block in blocks if block in held])
        for at, block in enumerate(blocks):
            if block in held:
                continue
            parent = blocks[at - 1] if at else None
            facts = Facts(
                parent,
                nbytes=10 + at,
                saved=0.5 * at - 0.2,
                fresh=len(blocks) - at,
                kind=("chat", "document")[session % 2],
                session=session,
                name=block,
            )
            if len(held) >= room:
                victim = policy.victim(lambda one: one not in blocks and not is_pinned(one), facts)  # noqa: B023
                if victim is None:
                    policy.passed(facts)
                    break
                assert victim in held
                assert is_leaf(victim)
                assert victim not in blocks
                assert not is_pinned(victim)
                del held[victim]
                policy.remove(victim)
            held[block] = parent
            policy.insert(block, facts)
        assert len(policy) == len(held) <= room
        assert all(block in policy for block in held)

    # Whatever the traffic was, all that is not pinned can be had back, children before their parents.
    free = [block for block in held if not is_pinned(block)]
    for _ in free:
        victim = policy.victim(lambda one: not is_pinned(one))
        assert victim is not None
        assert is_leaf(victim)
        del held[victim]
        policy.remove(victim)
    assert policy.victim(lambda one: not is_pinned(one)) is None
    assert len(policy) == len(held)


@pytest.mark.parametrize("name", ALL)
def test_asking_takes_nothing_away(name: str) -> None:
    policy = make(name, 4)
    for block in range(4):
        policy.insert(block)
    assert policy.victim(lambda _: False) is None
    assert policy.victim(lambda block: block == 2) == 2
    assert len(policy) == 4
    policy.remove(2)
    policy.remove(2)
    policy.remove(99)
    assert len(policy) == 3
    assert policy.victim(lambda block: block == 2) is None


@pytest.mark.parametrize("name", ALL)
def test_a_child_that_comes_before_its_parent_is_still_given_up_first(name: str) -> None:
    policy = make(name, 4)
    policy.insert(2, Facts(parent=1))
    policy.insert(1, Facts())
    assert policy.victim(FREE) == 2


@pytest.mark.parametrize("name", ALL)
def test_a_block_inserted_twice_counts_once(name: str) -> None:
    policy = make(name, 4)
    policy.insert(1, Facts())
    policy.insert(2, Facts(parent=1))
    policy.insert(2, Facts(parent=1))
    policy.remove(2)
    assert policy.victim(FREE) == 1


@pytest.mark.parametrize("name", ALL)
def test_what_is_kept_is_not_thought_of(name: str) -> None:
    policy = make(name, 4)
    policy.insert(1)
    policy.insert(2, Facts(parent=1))
    policy.insert(3)
    asked: list[int] = []

    def may_leave(block: int) -> bool:
        asked.append(block)
        return True

    policy.keep(2)
    policy.touch([1, 2])
    assert policy.victim(may_leave) == 3
    policy.remove(3)
    assert policy.victim(may_leave) is None, "one is kept, the other carries it"
    assert 2 not in asked
    policy.offer(2)
    assert policy.victim(may_leave) == 2
    policy.keep(2)
    policy.remove(2)
    policy.offer(2)
    assert policy.victim(may_leave) == 1
    policy.keep(99)
    policy.offer(99)
    assert len(policy) == 1


@pytest.mark.parametrize("name", ALL)
def test_a_block_can_be_hung_on_another_parent(name: str) -> None:
    """As when the tokens of a dropped parent come back under a new number."""
    policy = make(name, 4)
    policy.insert(1)
    policy.insert(2, Facts(parent=1))
    policy.remove(1)
    policy.insert(3)
    policy.update(2, 3, nbytes=1, saved=1.0)
    assert policy.victim(FREE) == 2
    policy.update(2, None, nbytes=1, saved=1.0)
    assert policy.victim(lambda block: block == 3) == 3, "nothing hangs on it any more"
    policy.update(99, 3, nbytes=1, saved=1.0)
    assert len(policy) == 2


def order(policy: Policy) -> list[int]:
    """All blocks in the order in which they would go."""
    found = []
    while (victim := policy.victim(FREE)) is not None:
        found.append(victim)
        policy.remove(victim)
    return found


def test_lru_order() -> None:
    policy = make("lru", 8)
    for block in range(4):
        policy.insert(block)
    policy.touch([0])
    policy.touch([2, 1])
    assert order(policy) == [3, 0, 1, 2]


def test_lfu_order() -> None:
    policy = make("lfu", 8)
    for block in range(3):
        policy.insert(block)
    for used in (0, 0, 1):
        policy.touch([used])
    assert order(policy) == [2, 1, 0]


def test_frequency_weighs_less_as_time_goes_by() -> None:
    policy = make("frequency-weighted lru", 4)
    for block in (0, 1):
        policy.insert(block)
    for _ in range(3):
        policy.touch([0])
    policy.insert(2)
    assert order(policy)[-1] == 0
    policy = make("frequency-weighted lru", 4)
    for block in (0, 1):
        policy.insert(block)
    for _ in range(3):
        policy.touch([0])
    for _ in range(40):
        policy.touch([1])
    assert order(policy) == [0, 1]


def test_gdsf_weighs_seconds_and_bytes() -> None:
    policy = make("gdsf", 8)
    policy.insert(0, Facts(nbytes=100, saved=1.0))
    policy.insert(1, Facts(nbytes=100, saved=3.0))
    policy.insert(2, Facts(nbytes=400, saved=3.0))
    assert order(policy) == [2, 0, 1]


def test_arc_keeps_what_was_used_again_from_a_scan() -> None:
    policy = make("arc", 4)
    for block in (0, 1):
        policy.insert(block)
    policy.touch([0, 1])
    for block in range(10, 30):
        if len(policy) >= 4:
            victim = policy.victim(FREE)
            assert victim is not None
            policy.remove(victim)
        policy.insert(block)
    assert 0 in policy
    assert 1 in policy


def test_s3_fifo_takes_back_what_it_dropped_too_early() -> None:
    policy = make("s3-fifo", 20)
    for block in range(20):
        policy.insert(block, Facts(name=block))
    dropped = policy.victim(FREE)
    assert dropped == 0
    policy.remove(dropped)
    policy.insert(dropped, Facts(name=0))  # to the main queue: now a scan passes it by
    for block in range(100, 160):
        victim = policy.victim(FREE)
        assert victim not in (None, 0)
        policy.remove(victim)
        policy.insert(block, Facts(name=block))


def test_pinned_lru_keeps_what_two_sessions_use() -> None:
    policy = make("pinned + lru", 8)
    policy.insert(0, Facts(session=1))
    policy.insert(1, Facts(parent=0, session=1))
    policy.insert(2, Facts(parent=0, session=2))
    policy.remove(1)
    policy.remove(2)
    policy.insert(3, Facts(session=3))
    assert order(policy) == [3, 0]


def test_session_lru_takes_from_the_largest() -> None:
    policy = make("per-session lru", 8)
    policy.insert(0, Facts(session=1))
    for block in (1, 2, 3):
        policy.insert(block, Facts(session=2))
    assert order(policy) == [1, 2, 0, 3]


# -- the default ----------------------------------------------------------------------------------------------


def test_before_anything_is_known_it_is_lru() -> None:
    clock = Clock()
    policy = make(DEFAULT, 8, clock)
    for block in range(4):
        clock.now += 10
        policy.insert(block)
    clock.now += 10
    policy.touch([1])
    assert order(policy) == [0, 2, 3, 1]


def test_what_saves_more_for_its_bytes_stays_longer() -> None:
    policy = make(DEFAULT, 8)
    policy.insert(0, Facts(kind="a", nbytes=100, saved=4.0))
    policy.insert(1, Facts(kind="b", nbytes=100, saved=1.0))
    policy.insert(2, Facts(kind="c", nbytes=100, saved=-1.0))
    assert order(policy) == [2, 1, 0]


def test_it_learns_which_kind_comes_back() -> None:
    """Notes are asked for again after a minute, one-shots never: then a new one-shot does not displace old notes."""
    clock = Clock()
    policy = make(DEFAULT, 40, clock)
    number = 0
    notes: list[int] = []
    for turn in range(600):
        clock.now += 5
        for kind in ("note", "one-shot"):
            number += 1
            facts = Facts(kind=kind, name=number)
            if len(policy) >= 40:
                victim = policy.victim(FREE, facts)
                if victim is None:
                    policy.passed(facts)
                    continue
                policy.remove(victim)
            policy.insert(number, facts)
            if kind == "note":
                notes.append(number)
        if turn >= 12:
            policy.touch([notes[-12]])
    held = [block for block in notes[-12:] if block in policy]
    assert len(held) >= 10
    assert policy.victim(FREE, Facts(kind="one-shot", name=-1)) not in notes[-10:]


def test_a_dropped_block_that_comes_back_is_known() -> None:
    """Its uses are remembered by name, though its number is new; so it is of the class of blocks used again."""
    clock = Clock()
    policy = make(DEFAULT, 4, clock)
    assert isinstance(policy, LeastWorth)
    policy.insert(1, Facts(name="a"))
    policy.remove(1)
    policy.insert(2, Facts(name="a"))
    policy.insert(3, Facts(name="b"))
    assert policy.uses(2) == 2
    assert policy.uses(3) == 1


def test_a_block_from_another_tier_brings_its_past() -> None:
    """Moving is no use: it makes no block younger, nor seen to be used."""
    clock = Clock()
    clock.now = 1000.0
    policy = make(DEFAULT, 8, clock)
    assert isinstance(policy, LeastWorth)
    for block, (last_use, uses) in enumerate([(990.0, 3), (500.0, 3), (800.0, 3)]):
        policy.insert(block, Facts(name=block, last_use=last_use, uses=uses))
    assert [policy.uses(block) for block in range(3)] == [3, 3, 3]
    policy.remove(1)
    policy.insert(1, Facts(name=1, last_use=500.0, uses=3))
    assert policy.uses(1) == 3
    assert order(policy) == [1, 2, 0]


def test_what_a_hit_saves_may_change() -> None:
    kinds = [Facts(kind=str(block), nbytes=100, saved=1.0) for block in range(3)]
    policy = make(DEFAULT, 8)
    for block, facts in enumerate(kinds):
        policy.insert(block, facts)
    policy.update(1, None, nbytes=100, saved=0.01)  # the next tier has it now
    policy.update(2, None, nbytes=100, saved=0.1)
    assert order(policy) == [1, 2, 0]
