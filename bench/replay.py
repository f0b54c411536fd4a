"""A trace of requests replayed over a cache of so many blocks, by a policy and by the optimum.

A request hits the blocks of its path that are held, from the root on without a gap; then the rest of its path is put,
as far as there is room or the policy makes it. The blocks of a request are leased while it runs.

The optimum knows the future: Belady's (1966) farthest next use, over the blocks held and those that want in, so that a
block may also be refused (bypass). A parent's next use is never later than its child's, so that with ties broken
towards the deeper block this never gives up a parent first: for blocks of one size it is exact under the prefix
constraint. What it shows is hits; saved seconds at the optimum of hits are no bound of saved seconds.

Seconds are those of the device profile `mid` and a model of 56 KiB a token (Qwen3-1.7B, int8): recompute at the
block's depth less the load from flash.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, cached_property
from heapq import heappop, heappush
from typing import NamedTuple

from bench.traces import TOKEN_BYTES, Clock, Request, Trace
from kvstore.prefetch.cost import DEVICES
from kvstore.prefetch.eviction import POLICIES, LeastWorth
from kvstore.prefetch.policy import Facts, Policy

MID = DEVICES["mid"]


class Result(NamedTuple):
    """Share of tokens hit in percent, seconds saved."""

    hits: float
    saved: float


@cache
def block_saved(tokens: int, depth: int, block_tokens: int) -> float:
    """Seconds that a hit on a block saves, `depth` whole blocks down."""
    return MID.saved_seconds(tokens, depth * block_tokens, tokens * TOKEN_BYTES, "cold")


class Prepared:
    """A trace with what all replays of it share, a list for each request."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.sizes = [trace.block_sizes(request) for request in trace.requests]
        """Tokens of each block."""
        self.saved = [
            [block_saved(size, depth, trace.block_tokens) for depth, size in enumerate(sizes)]
            for sizes in self.sizes
        ]
        """Seconds that a hit on each block saves."""

    @cached_property
    def next_uses(self) -> list[list[int]]:
        """Of each block the number of the next request that asks for it; the number of requests where none does."""
        never = len(self.trace.requests)
        found: list[list[int]] = [[]] * never
        uses: dict[int, int] = {}
        for number in range(never - 1, -1, -1):
            path = self.trace.requests[number].path
            found[number] = [uses.get(block, never) for block in path]
            uses.update(dict.fromkeys(path, number))
        return found

    @cached_property
    def tokens(self) -> int:
        """Of all requests."""
        return sum(request.tokens for request in self.trace.requests)


def replay(prepared: Prepared, policy: Policy, room: int, clock: Clock) -> Result:
    """Hits and savings of a policy in `room` blocks."""
    hit = 0
    saved = 0.0
    whole = prepared.trace.block_tokens
    for request, sizes, worth in zip(prepared.trace.requests, prepared.sizes, prepared.saved, strict=True):
        clock.now = request.seconds
        path = request.path
        held = next((at for at, block in enumerate(path) if block not in policy), len(path))
        hit += sum(sizes[:held])
        saved += sum(worth[:held])
        policy.touch(path[:held])
        if held < len(path):
            _put(policy, room, request, held, sizes, whole, sum(worth) / request.tokens)
    return Result(100 * hit / prepared.tokens, saved)


def _put(
    policy: Policy, room: int, request: Request, held: int, sizes: Sequence[int], whole: int, saved: float
) -> None:
    """Put what of a request is not held; `saved` seconds a token of it."""
    path, leased = request.path, set(request.path)
    fresh = len(path) - held
    may_leave: Callable[[int], bool] = lambda block: block not in leased  # noqa: E731
    refused = False
    for at in range(held, len(path)):
        facts = Facts(
            parent=path[at - 1] if at else None,
            nbytes=sizes[at] * TOKEN_BYTES,
            saved=sizes[at] * saved,
            fresh=fresh,
            whole=sizes[at] == whole,
            session=request.session,
            name=path[at],
        )
        if not refused and len(policy) >= room:
            victim = policy.victim(may_leave, facts)
            refused = victim is None
            if victim is not None:
                policy.remove(victim)
        if refused:  # and with it all that would hang on it
            policy.passed(facts)
        else:
            policy.insert(path[at], facts)


def optimum(prepared: Prepared, room: int) -> Result:
    """Belady's choice among what is held and what wants in."""
    never = len(prepared.trace.requests)
    held: dict[int, tuple[int, int]] = {}
    farthest: list[tuple[int, int, int]] = []
    hit = 0
    saved = 0.0
    for request, sizes, worth, nexts in zip(
        prepared.trace.requests, prepared.sizes, prepared.saved, prepared.next_uses, strict=True
    ):
        path = request.path
        there = next((at for at, block in enumerate(path) if block not in held), len(path))
        hit += sum(sizes[:there])
        saved += sum(worth[:there])
        for depth, (block, use) in enumerate(zip(path, nexts, strict=True)):
            if use == never:
                held.pop(block, None)
                continue
            held[block] = (-use, -depth)
            heappush(farthest, (-use, -depth, block))
        while len(held) > room:
            use, depth, block = heappop(farthest)
            if held.get(block) == (use, depth):
                del held[block]
    return Result(100 * hit / prepared.tokens, saved)


def made(name: str, room: int, clock: Clock) -> Policy:
    return LeastWorth(room, clock) if name == LeastWorth.name else POLICIES[name](room)
