"""A client's own hot tier, where no process can map memory that an NPU reads through another one (ANE).

The daemon then keeps warm and cold alone, and gives each client a part of the device's pinned buffers to have in its
own memory. What a client uses again is copied there from the daemon's warm arena, which it maps anyway, once its lease
has served its purpose; from then on loads read the copy.

    who decides what may be served   the daemon: a copy is found only by the number of a block that a reply just named,
                                     and no two blocks of a daemon's life have one number
    who decides what stays           the eviction policy of the daemon's profile, told what an embedded store tells it
    how long a copy outlives its     the daemon is asked every 2 s which blocks are still held. Copies of others are
    block                            overwritten then; all are, when it does not answer, or the connection is lost
    a client that rests              gives its part back after a minute without a use

What leaves this tier is overwritten at once, so that free room never holds anything of what is purged later. A copy
that a load just reads is, when that ends.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.block import HeldBlock
from kvstore.errors import DaemonError
from kvstore.prefetch.cost import DEVICES
from kvstore.prefetch.eviction import POLICIES
from kvstore.prefetch.policy import Facts, Policy
from kvstore.tiers.arena import Extent
from kvstore.tiers.memory import MemoryTier
from kvstore.watch.stats import TierStats

from . import wire
from .client import Channel
from .shared_memory import NOWHERE

ASK_SECONDS = 2.0
"""After so long the daemon is asked again whether it holds what there are copies of."""

_REST_SECONDS = 60.0
_AGAIN_SECONDS = 30.0  # until a client that got no room asks again
_USES = 2  # of a block by this client, from which on it is copied: as an embedded store promotes
_REMEMBERED = 4096  # blocks whose uses are counted
_MOST_WAITING = 4  # leases that are kept for their blocks to be copied

log = logging.getLogger(__name__)


class Wanted(NamedTuple):
    """A block to be copied from its place in the daemon's memory, and the block of its prompt before it."""

    block: HeldBlock
    place: tuple[int, int]
    parent: int | None


class _Fill(NamedTuple):
    view: int
    wanted: Sequence[Wanted]
    is_intact: Callable[[], bool]
    release: Callable[[], None]


@dataclass(slots=True, eq=False)
class _Copy:
    number: int
    key: bytes
    view: int
    nbytes: int
    extent: Extent
    holds: int = 0
    dropped: bool = False


class ClientHot:
    """Copies of blocks, for one connection. Any thread may call; one of its own copies, and asks the daemon."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._memory: MemoryTier | None = None
        self._policy: Policy | None = None
        self._device = ""
        self._copies: dict[int, _Copy] = {}
        self._reading: set[_Copy] = set()
        """Held by loads; what was dropped meanwhile among them."""
        self._uses: OrderedDict[int, int] = OrderedDict()
        self._fills: deque[_Fill] = deque()
        self._let_go: deque[Sequence[_Copy]] = deque()  # by collection, which may come within any other step
        self._thread: threading.Thread | None = None
        self._busy = False
        self._closed = False
        self._used_at = self._asked_at = time.monotonic()
        self._denied_until = -math.inf
        self._counts = Counter[str]()

    def begin_anew(self) -> None:
        """In a child of the process that made it: no thread holds it. The copies stay the parent's."""
        self._changed = threading.Condition()

    # -- by look-ups and leases ---------------------------------------------------------------------------------------

    def seen(self, blocks: Sequence[wire.BlockRef]) -> Sequence[wire.BlockRef]:
        """What a reply names, with the tier in which this client has it."""
        copies = self._copies
        if not copies:
            return blocks
        return [
            msgspec.structs.replace(block, tier="hot") if block.number in copies else block
            for block in blocks
        ]

    def used(self, path: Sequence[HeldBlock]) -> None:
        """A request leased these blocks, root first."""
        with self._changed:
            self._used_at = time.monotonic()
            for block in path:
                self._uses[block.number] = self._uses.pop(block.number, 0) + 1
            while len(self._uses) > _REMEMBERED:
                self._uses.popitem(last=False)
            if self._policy is not None:
                self._policy.touch([block.number for block in path])

    def hold(self, blocks: Iterable[HeldBlock]) -> HeldCopies:
        """Those of `blocks` that there are copies of; they stay until it is released."""
        with self._changed:
            self._reap()
            found = {
                block.number: copy
                for block in blocks
                if (copy := self._copies.get(block.number)) is not None and copy.key == block.key
            }
            for copy in found.values():
                copy.holds += 1
                self._reading.add(copy)
            memory = self._memory
            views = {} if memory is None else {n: memory.view(c.extent, c.nbytes) for n, c in found.items()}
        return HeldCopies(self, views, list(found.values()))

    def count(self, name: str, nbytes: int) -> None:
        with self._changed:
            self._counts[name] += nbytes

    def fill(
        self,
        view: int,
        wanted: Sequence[Wanted],
        is_intact: Callable[[], bool],
        release: Callable[[], None],
        *,
        now: bool = False,
    ) -> bool:
        """Copy those of a lease's blocks that are used again, or with `now` all of them; then `release` the lease.

        False when there is nothing to copy: the caller releases it.
        """
        with self._changed:
            copied = [
                each
                for each in wanted
                if each.place != NOWHERE
                and each.block.number not in self._copies
                and (now or self._uses.get(each.block.number, 0) >= _USES)
            ]
            denied = self._memory is None and time.monotonic() < self._denied_until
            if not copied or denied or self._closed or len(self._fills) >= _MOST_WAITING:
                return False
            self._fills.append(_Fill(view, copied, is_intact, release))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-client-hot", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            return True

    def forget(self, keys: Iterable[bytes]) -> None:
        """Drop the copies of these blocks, until they are used again as if they were new."""
        named = set(keys)
        with self._changed:
            for copy in [copy for copy in self._copies.values() if copy.key in named]:
                self._uses.pop(copy.number, None)
                self._drop(copy)

    def settled(self, timeout: float | None = None) -> bool:
        """Wait until all that was to be copied is; whether that came."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closed or not (self._fills or self._busy), timeout)

    def stats(self) -> tuple[TierStats, dict[str, int]]:
        """This tier, and bytes by where they were read from, and copied here."""
        with self._changed:
            total, used = (0, 0) if self._memory is None else (self._memory.total, self._memory.used)
            pinned = self._memory is not None and self._memory.pinned
            held = sum(copy.holds > 0 for copy in self._copies.values())
            tier = TierStats(total, used, total - used, len(self._copies), held, pinned)
            return tier, dict(self._counts)

    def check(self) -> None:
        """Raise AssertionError unless the bytes of all copies add up to what is used."""
        with self._changed:
            self._reap()
            if self._memory is None:
                assert not self._copies, "copies without memory"
                return
            self._memory.check()
            copies = {*self._copies.values(), *self._reading}
            if not self._busy:
                assert sum(copy.extent.size for copy in copies) == self._memory.used, "hot bytes of nobody"

    def close(self) -> None:
        """Overwrite all copies, and let the memory go. Nothing is done in a child of the process that made them."""
        if os.getpid() != self._pid:  # shared with it: they are the parent's
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        with self._changed:
            self._empty()

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except DaemonError as error:
            log.info("all copies in the hot tier of this process are dropped: %s", error)
        except Exception:  # nobody would ask any more whether they are still held
            log.exception("all copies in the hot tier of this process are dropped")
        with self._changed:
            self._closed = True  # a lost connection: the next one has a tier of its own
            fills, self._fills = list(self._fills), deque()
            self._empty()
            self._changed.notify_all()
        for fill in fills:
            fill.release()
        with contextlib.suppress(DaemonError):
            self.channel.tell(wire.LeaveHot(wire.NO_REPLY))

    def _step(self) -> bool:
        """What there is to do next; whether there is a next step. Raises DaemonError."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._fills, self._seconds_to_ask())
            if self._closed:
                return False
            self._reap()
            fill = self._fills.popleft() if self._fills else None
            self._busy = fill is not None
        if fill is not None:
            try:
                self._fill(fill)
            finally:
                fill.release()
                with self._changed:
                    self._busy = False
                    self._changed.notify_all()
        if self._memory is not None and not self._seconds_to_ask():
            self._ask()
        return True

    def _seconds_to_ask(self) -> float | None:
        if self._memory is None:
            return None
        return max(0.0, self._asked_at + ASK_SECONDS - time.monotonic())

    def _fill(self, fill: _Fill) -> None:
        if not self._has_room(max(each.block.nbytes for each in fill.wanted)):
            return
        for each in fill.wanted:
            self._copy(each, fill)

    def _has_room(self, nbytes: int) -> bool:
        """Whether the daemon gave memory. Raises DaemonError."""
        if self._memory is not None:
            return True
        answered = self.channel.call(lambda number: wire.TakeHot(number, nbytes), wire.Answer)
        room = msgspec.msgpack.decode(answered.body, type=wire.HotRoom)
        with self._changed:
            if not room.arenas:
                self._denied_until = time.monotonic() + _AGAIN_SECONDS
                return False
            self._device = room.device
            self._policy = POLICIES[room.eviction](max(1, room.arenas * room.arena_bytes // max(1, nbytes)))
            self._memory = MemoryTier(
                "hot-client",
                room.arenas * room.arena_bytes,
                arena_bytes=room.arena_bytes,
                alignment=room.alignment,
                pin=True,
            )
            self._asked_at = time.monotonic()
            return True

    def _copy(self, wanted: Wanted, fill: _Fill) -> None:
        block, memory = wanted.block, self._memory
        assert memory is not None, "asked for before"
        try:
            source = self.channel.arenas.view(wanted.place, block.nbytes)
        except ValueError:  # the connection is lost
            return
        with self._changed:
            extent = None if block.number in self._copies else self._room_for(block.nbytes)
        if extent is None:
            return
        memory.view(extent, block.nbytes)[:] = source
        good = fill.is_intact()
        with self._changed:
            copy = _Copy(block.number, block.key, fill.view, block.nbytes, extent)
            if not good or self._closed:
                self._wipe(copy)
                return
            self._counts["hot_bytes_copied"] += block.nbytes
            self._copies[block.number] = copy
            self._tell_policy(wanted)

    def _tell_policy(self, wanted: Wanted) -> None:
        assert self._policy is not None, "made with the memory"
        block, costs = wanted.block, DEVICES[self._device]
        facts = Facts(
            parent=wanted.parent,
            nbytes=block.nbytes,
            saved=costs.load_seconds(block.nbytes, "warm") * costs.load_weight,
            whole=block.length == self.channel.welcome.block_tokens,
            name=block.key,
            last_use=time.time(),
            uses=self._uses.get(block.number, 1),
        )
        self._policy.insert(block.number, facts)

    def _room_for(self, nbytes: int) -> Extent | None:
        """Room for a copy, made by dropping those of the least worth that no load reads."""
        assert self._memory is not None, "asked for before"
        assert self._policy is not None, "made with the memory"
        while nbytes <= self._memory.largest_arena:
            if (extent := self._memory.allocate(nbytes)) is not None:
                return extent
            victim = self._policy.victim(lambda number: not self._copies[number].holds)
            if victim is None:
                return None
            self._counts["hot_evicted"] += 1
            self._drop(self._copies[victim])
        return None

    def _ask(self) -> None:
        """Drop what the daemon does not hold any more; all of it, when nobody uses it. Raises DaemonError."""
        with self._changed:
            resting = time.monotonic() - self._used_at > _REST_SECONDS
            by_view: dict[int, list[_Copy]] = {}
            for copy in self._copies.values():
                by_view.setdefault(copy.view, []).append(copy)
            if resting:
                self._empty()
                if self._memory is None:
                    self.channel.tell(wire.LeaveHot(wire.NO_REPLY))
                    return
        for view, copies in {} if resting else by_view.items():
            gone = self._gone(view, copies)
            with self._changed:
                for copy in copies:
                    if copy.number in gone and self._copies.get(copy.number) is copy:
                        self._drop(copy)
        self._asked_at = time.monotonic()

    def _gone(self, view: int, copies: Sequence[_Copy]) -> set[int]:
        numbers, keys = [copy.number for copy in copies], [copy.key for copy in copies]
        answered = self.channel.call(
            lambda number: wire.KeepHot(number, view, numbers, keys), wire.Answer, ASK_SECONDS * 2
        )
        return msgspec.msgpack.decode(answered.body, type=set[int])

    # -- under the lock -----------------------------------------------------------------------------------------------

    def _drop(self, copy: _Copy) -> None:
        del self._copies[copy.number]
        if self._policy is not None:
            self._policy.remove(copy.number)
        copy.dropped = True
        if not copy.holds:
            self._wipe(copy)

    def _wipe(self, copy: _Copy) -> None:
        assert self._memory is not None, "copies lie in memory"
        self._memory.wipe(copy.extent)
        self._memory.release(copy.extent)

    def _empty(self) -> None:
        """Drop all copies; the memory goes with the last one that a load reads."""
        self._reap()
        for copy in list(self._copies.values()):
            self._drop(copy)
        if self._memory is not None and not self._reading:
            self._memory.close()
            self._memory = self._policy = None

    def _reap(self) -> None:
        while self._let_go:
            self._end_holds(self._let_go.popleft())

    def _end_holds(self, copies: Sequence[_Copy]) -> None:
        for copy in copies:
            copy.holds -= 1
            if not copy.holds:
                self._reading.discard(copy)
                if copy.dropped:
                    self._wipe(copy)
        if self._closed and not self._reading and not self._copies and self._memory is not None:
            self._memory.close()
            self._memory = self._policy = None


class HeldCopies:
    """`bytes` by block number, uint8, for reading. One that is collected without a release lets them go, too."""

    def __init__(self, hot: ClientHot, views: dict[int, NDArray[np.uint8]], copies: Sequence[_Copy]) -> None:
        self.bytes = views
        self._hot = hot
        self._copies = copies
        self._collected = weakref.finalize(self, hot._let_go.append, copies)
        self._collected.atexit = False

    def release(self) -> None:
        """Nothing is read any more. A second call does nothing."""
        if self._collected.detach() is None:
            return
        self.bytes = {}
        with self._hot._changed:
            self._hot._end_holds(self._copies)
