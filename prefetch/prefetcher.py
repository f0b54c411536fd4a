"""What to read from flash before it is asked for, and what became of what was read.

Hints say what the next request may need (see `candidates.Sign`); what usually follows is hinted by itself. Out of all
of them `next` names the block to read now: the one of most value per byte in the best set that fits into the budget,
with what was fetched before and nobody has used yet. A request ends the hints that it answers, and from what it used
the chances are learned. Blocks may also be demanded: those are read first, whatever they cost, outside the budget.

Bytes that were read add up, at any moment:

    read = used + wasted + waiting + cancelled

`waiting` are in memory and not used yet; `wasted` left memory unused; `cancelled` were read of blocks that were given
up half way.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from .candidates import PRICE, Candidate, Chances, Read, Sign, choose
from .followers import Followers

LASTS = 300.0
"""Seconds after which a hint that no request answered was wrong."""

USEFUL = 0.355
"""Share of the bytes read ahead that requests are to use. Where they use less reading gets dearer, where more, cheaper.

So a bad source wastes no more than a good one. With it `bench.prefetch` reads 2.2 to 2.5 times the bytes needed.
"""

_STEP = 0.05  # by which share the price moves for a request that uses nothing of as much as is usually read
_CHEAPEST, _DEAREST = 0.1, 0.5  # at the dearest a sure thing is read all the same, and brings the price down
_REQUESTS = 20  # over which is learned what is usually read
_HINTS = 16  # that are remembered at a time
_SHOWN = 1024  # signs of one hint that are learned from
_FOLLOWING = "what usually follows"  # key of the hint that comes from nobody
_ENDS = 2  # the last blocks of a request, from which is said what follows


class Step(NamedTuple):
    """Read `block` now; `drop` from memory before, to stay within the budget: fetched ahead, and worth less."""

    block: int
    drop: tuple[int, ...]
    demanded: bool


class Usefulness(NamedTuple):
    """Bytes from flash that were read ahead, and what became of them."""

    read: int = 0
    used: int = 0
    wasted: int = 0
    waiting: int = 0
    cancelled: int = 0


@dataclass
class _Hint:
    since: float
    named: frozenset[int] = frozenset()
    signs: dict[int, list[Sign]] = field(
        default_factory=dict
    )  # as said last, of blocks that are read or may be
    shown: dict[tuple[int, Sign], None] = field(default_factory=dict)  # also before

    def is_answered_by(self, request: frozenset[int]) -> bool:
        """Whether the request used half of what was hinted, or more."""
        return 2 * len(request & self.signs.keys()) >= len(self.signs) > 0


class Prefetcher:
    """Blocks go by number. Not for several threads at once: called under the store's lock.

    budget: bytes of memory for what is fetched ahead and not used yet, the block that is being read included.
    read(block): what reading it takes; None when there is nothing to read: it lies in memory, or is gone.
    in_memory(block): whether it lies there.
    """

    def __init__(
        self,
        budget: int,
        read: Callable[[int], Read | None],
        in_memory: Callable[[int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.budget = budget
        self._read = read
        self._in_memory = in_memory
        self._clock = clock
        self._chances = Chances()
        self._followers = Followers()
        self._hints: OrderedDict[Hashable, _Hint] = OrderedDict()  # the last one given at the end
        self._demanded: dict[int, None] = {}
        self._waiting: dict[int, Read] = {}  # in memory, unused; in the budget
        self._asked_for: dict[int, Read] = {}  # the same of what was demanded, outside it
        self._under_way: tuple[Step, Read] | None = None
        self._plan: list[Candidate] | None = None
        self._spare: list[int] = []  # waiting, and not in the best set: least worth first
        self._bytes = Usefulness()
        self._before = Usefulness()  # the last request
        self._price = PRICE
        self._usual = 0.0  # bytes read for a request

    # -- what may be needed -----------------------------------------------------------------------------------------

    def hint(self, key: Hashable, signs: Iterable[tuple[int, Sign]]) -> None:
        """These blocks may be needed by the next request of `key`; replaces what was hinted for it before.

        Those on flash now may be read. What is in memory now and leaves it is not brought back by this hint: whoever
        evicted it thought it worth less.
        """
        self._hint(key, signs)

    def demand(self, blocks: Iterable[int]) -> None:
        """Read these first, in this order, those that are on flash."""
        self._notice_losses()
        self._demanded.update(dict.fromkeys(blocks))

    def give_up(self, block: int) -> None:
        """A block cannot be brought."""
        self._demanded.pop(block, None)
        for hint in self._hints.values():
            hint.signs.pop(block, None)
        self._plan = None

    def used(self, blocks: Sequence[int]) -> None:
        """A request used these blocks: its prefix from the root, then the others."""
        request = frozenset(blocks)
        for fetched in (self._waiting, self._asked_for):
            for block in request & fetched.keys():
                nbytes = fetched.pop(block).nbytes
                self._count(used=nbytes, waiting=-nbytes)
        self._see_what_was_useful()
        newest = next((key for key in reversed(self._hints) if key != _FOLLOWING), None)
        for key, hint in list(self._hints.items()):
            if key in (newest, _FOLLOWING) or hint.is_answered_by(request):
                self._learn(self._hints.pop(key), request)
        self._followers.learn(blocks)
        ends = dict.fromkeys(blocks[-_ENDS:], 1.0)
        self._hint(_FOLLOWING, self._following(ends))

    # -- what to do about it ----------------------------------------------------------------------------------------

    def next(self) -> Step | None:
        """The block to read now; None when there is nothing worth it."""
        for block in list(self._demanded):
            if self._read(block) is not None:
                return Step(block, (), True)
            del self._demanded[block]  # it came some other way, or is gone
        plan = self._planned()
        while plan:
            block, _, read, _ = plan[0]
            if self._read(block) is None:
                plan.pop(0)
                continue
            drop, room = list[int](), self._room()
            for unused in self._spare:
                if room + read.room <= self.budget:
                    break
                if unused in self._waiting:
                    drop.append(unused)
                    room -= self._waiting[unused].room
            if room + read.room > self.budget:
                return None
            return Step(block, tuple(drop), False)
        return None

    def is_coming(self, block: int) -> bool:
        """Whether it is being read, or will be unless something better comes up."""
        if self._under_way is not None and self._under_way[0].block == block:
            return True
        if self._read(block) is None:
            return False
        return block in self._demanded or any(each.block == block for each in self._planned())

    def begin(self, step: Step) -> None:
        """The block of a step is being read from now on, one at a time. What the step drops has left memory."""
        read = self._read(step.block)
        assert self._under_way is None and read is not None, "one read at a time, of what is on flash"  # noqa: PT018
        for block in step.drop:
            self.left(block)
        self._under_way = (step, read)

    def arrived(self, nbytes: int) -> None:
        """The block under way lies in memory; so many bytes were read."""
        step, read = self._end()
        self._demanded.pop(step.block, None)
        (self._asked_for if step.demanded else self._waiting)[step.block] = read._replace(nbytes=nbytes)
        self._count(read=nbytes, waiting=nbytes)

    def stopped(self, nbytes: int, *, for_good: bool) -> None:
        """The block under way was given up after so many bytes. for_good: it is not to be tried again."""
        step, _ = self._end()
        self._count(read=nbytes, cancelled=nbytes)
        if for_good:
            self.give_up(step.block)

    def left(self, block: int) -> None:
        """A block left memory."""
        for fetched in (self._waiting, self._asked_for):
            read = fetched.pop(block, None)
            if read is not None:
                self._count(wasted=read.nbytes, waiting=-read.nbytes)
                self.give_up(block)

    def usefulness(self) -> Usefulness:
        """What was read ahead until now, and what became of it."""
        self._notice_losses()
        return self._bytes

    @property
    def spared(self) -> Set[int]:
        """Blocks that must not make room for others: fetched ahead, or named by a hint that has blocks to read."""
        return frozenset(self._waiting).union(*(hint.named for hint in self._hints.values() if hint.signs))

    # -- inside -----------------------------------------------------------------------------------------------------

    def _hint(self, key: Hashable, signs: Iterable[tuple[int, Sign]]) -> None:
        now = self._clock()
        self._expire(now)
        self._notice_losses()
        hint = self._hints.pop(key, None) or _Hint(now)
        hint.since = now
        hint.signs = {}
        said: dict[int, list[Sign]] = {}
        for block, sign in signs:
            said.setdefault(block, []).append(sign)
        if key != _FOLLOWING:
            starts = {block: self._chances.of_all(all_) for block, all_ in said.items()}
            for block, sign in self._following(starts):
                said.setdefault(block, []).append(sign)
        hint.named = frozenset(said)
        for block, all_ in said.items():
            if block in self._waiting or self._read(block) is not None:
                hint.signs[block] = all_
        for block, all_ in hint.signs.items():
            for sign in all_:
                if len(hint.shown) < _SHOWN:
                    hint.shown[block, sign] = None
        if hint.signs or hint.shown:
            self._hints[key] = hint
        while len(self._hints) > _HINTS:
            self._learn(self._hints.popitem(last=False)[1], frozenset())
        self._plan = None

    def _following(self, starts: dict[int, float]) -> list[tuple[int, Sign]]:
        return [
            (block, Sign("follows", 0, min(9, int(chance * 10))))
            for block, chance in self._followers.expect(starts, PRICE).items()
        ]

    def _learn(self, hint: _Hint, request: frozenset[int]) -> None:
        for block, sign in hint.shown:
            self._chances.learn(sign, block in request)
        self._plan = None

    def _expire(self, now: float) -> None:
        for key in [key for key, hint in self._hints.items() if now - hint.since > LASTS]:
            self._learn(self._hints.pop(key), frozenset())

    def _planned(self) -> list[Candidate]:
        """What to read, the most valuable per byte first; of what waits in memory, what has to make room for it."""
        self._expire(self._clock())
        self._notice_losses()
        if self._plan is not None:
            return self._plan
        signs: dict[int, list[Sign]] = {}
        for hint in self._hints.values():
            for block, all_ in hint.signs.items():
                signs.setdefault(block, []).extend(all_)
        here = [
            Candidate(block, self._chances.of_all(signs.get(block, ())), read, price=0.0)
            for block, read in self._waiting.items()
        ]
        far = [
            Candidate(block, self._chances.of_all(all_), read, self._price)
            for block, all_ in signs.items()
            if block not in self._waiting and (read := self._read(block)) is not None
        ]
        best = choose([*here, *far], self.budget - self._room_under_way())
        kept = {each.block for each in best}
        self._plan = [each for each in best if each.block not in self._waiting]
        self._spare = [
            each.block for each in sorted(here, key=lambda each: each.density) if each.block not in kept
        ]
        return self._plan

    def _see_what_was_useful(self) -> None:
        """Of what was read for the request that came now: its price follows."""
        read, used = self._bytes.read - self._before.read, self._bytes.used - self._before.used
        self._before = self._bytes
        if not read:
            return
        self._usual = self._usual + (read - self._usual) / _REQUESTS if self._usual else float(read)
        wasteful = (USEFUL * read - used) / (USEFUL * self._usual)
        self._price = min(_DEAREST, max(_CHEAPEST, self._price * math.exp(_STEP * wasteful)))

    def _notice_losses(self) -> None:
        """Others may evict what was fetched ahead."""
        for fetched in (self._waiting, self._asked_for):
            for block in [block for block in fetched if not self._in_memory(block)]:
                self.left(block)
                self._plan = None

    def _room(self) -> int:
        """Bytes of the budget in use."""
        return self._room_under_way() + sum(read.room for read in self._waiting.values())

    def _room_under_way(self) -> int:
        if self._under_way is None or self._under_way[0].demanded:
            return 0
        return self._under_way[1].room

    def _end(self) -> tuple[Step, Read]:
        assert self._under_way is not None, "nothing is being read"
        under_way, self._under_way = self._under_way, None
        self._plan = None
        return under_way

    def _count(
        self, *, read: int = 0, used: int = 0, wasted: int = 0, waiting: int = 0, cancelled: int = 0
    ) -> None:
        now = self._bytes
        self._bytes = Usefulness(
            now.read + read,
            now.used + used,
            now.wasted + wasted,
            now.waiting + waiting,
            now.cancelled + cancelled,
        )
