"""A lease in a daemon: what it names is read from memory that the daemon shares.

What the daemon frees it may give to others. So nothing counts as loaded before a look at what could have ended the
lease meanwhile: the daemon closes the connection before it frees anything of a lost client, and it frees nothing of a
client that hangs before its time, which both sides measure by the same clock. A daemon that died changes nothing more:
what is just being copied is right, and only what was not copied by then has to be computed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kvstore.block import HeldBlock
from kvstore.errors import DaemonError, LeaseReleasedError, StoreClosedError
from kvstore.layout import Layout
from kvstore.lease import Lease
from kvstore.moved import MovedRun, Piece
from kvstore.reading import Need, Reading

from . import wire
from .client import Channel, View
from .client_hot import Wanted
from .shared_memory import NOWHERE

if TYPE_CHECKING:
    from .link import Link

log = logging.getLogger(__name__)


class NotBroughtError(Exception):
    """The daemon could not read a block from flash."""


def moved_runs(runs: Sequence[wire.RunRef], blocks: Sequence[HeldBlock]) -> tuple[MovedRun, ...]:
    """Moved runs as a reply describes them."""
    found = []
    for run in runs:
        target, pieces = run.target, []
        for piece in run.pieces:
            pieces.append(Piece(blocks[piece.block], piece.offset, piece.length, target))
            target += piece.length
        found.append(MovedRun(run.target, target - run.target, tuple(pieces)))
    return tuple(found)


class RemoteLease(Lease):
    """What `leased` describes. `asked`: when it was asked for, by time.monotonic."""

    def __init__(
        self,
        link: Link,
        channel: Channel,
        view: View,
        layout: Layout,
        leased: wire.Leased,
        asked: float,
    ) -> None:
        self.hot = hot = link.hot(channel)
        """Where this process has its own hot tier."""
        blocks = leased.blocks if hot is None else hot.seen(leased.blocks)
        super().__init__(
            layout,
            view.layer_groups,
            link.pool,
            blocks[: leased.prefix],
            leased.length,
            moved_runs(leased.runs, blocks),
            whole=leased.whole,
        )
        self.copies_all = False
        """On release, copy all blocks to the hot tier, used before or not."""
        self._link = link
        self._channel = channel
        self._view = view.number
        self._handle = leased.lease
        self._places = dict(zip((block.number for block in leased.blocks), leased.places, strict=True))
        self._row = {block.number: row for row, block in enumerate(leased.blocks)}
        self._speed = leased.flash_bytes_per_second
        self._used = asked
        self._releasing = threading.Lock()
        link.holds(self, channel, leased.lease)
        if hot is not None:
            hot.used(self.blocks)

    @property
    def flash_bytes_per_second(self) -> float | None:
        return self._speed

    @property
    def channel(self) -> Channel:
        return self._channel

    @property
    def handle(self) -> int:
        return self._handle

    def place(self, number: int) -> tuple[int, int]:
        """Where block `number` lay in memory when it was leased."""
        return self._places[number]

    def row(self, number: int) -> int:
        """By which number the daemon knows block `number` in this lease."""
        return self._row[number]

    def reading(self, needs: Sequence[Need]) -> Reading:
        return RemoteReading(self, needs)

    def renew(self) -> None:
        """The lease is in use; tell the daemon now and then. Raises DaemonError, LeaseReleasedError."""
        now = time.monotonic()
        if now - self._used > self._channel.welcome.lease_seconds / 3:
            self._channel.call(lambda number: wire.Renew(number, self._handle), wire.Done)
            self._used = now

    def is_intact(self) -> bool:
        """Whether all of it was still this lease's just now."""
        return (
            time.monotonic() - self._used < self._channel.welcome.lease_seconds and self._channel.is_intact()
        )

    def release(self) -> None:
        self.end_loads()
        with self._releasing:
            if self.is_released:
                raise LeaseReleasedError("this lease was released before")
            self.is_released = True
        self._link.releases(self)
        if self.hot is None or not self.hot.fill(
            self._view, self._wanted(), self.is_intact, self._tell_released, now=self.copies_all
        ):
            self._tell_released()

    def _tell_released(self) -> None:
        with contextlib.suppress(DaemonError):  # then the daemon has freed it
            self._channel.tell(wire.Release(wire.NO_REPLY, self._handle))

    def _wanted(self) -> list[Wanted]:
        before: list[int | None] = [None, *(block.number for block in self.prefix)]
        parents = dict(zip((block.number for block in self.prefix), before, strict=False))
        found = {block.number: block for block in self.blocks}.values()
        return [Wanted(each, self._places[each.number], parents.get(each.number)) for each in found]

    def check_usable(self) -> None:
        if self.is_released:
            raise LeaseReleasedError("this lease was released; take a new one")
        if self._link.is_closed:
            raise StoreClosedError("the store of this lease was closed; connect again")


class NothingLeased(Lease):
    """A lease of nothing: no daemon, no cache."""

    def __init__(self, layout: Layout, pool: Executor) -> None:
        super().__init__(layout, (), pool, (), 0, (), whole=False)

    @property
    def flash_bytes_per_second(self) -> float | None:
        return None

    def reading(self, needs: Sequence[Need]) -> Reading:
        assert not needs, "nothing is leased"
        return _NothingRead()

    def release(self) -> None:
        self.end_loads()
        self.check_usable()
        self.is_released = True

    def check_usable(self) -> None:
        if self.is_released:
            raise LeaseReleasedError("this lease was released before; take a new one")


class _NothingRead:
    """No blocks."""

    def is_far(self, number: int) -> bool:
        raise IndexError(number)

    def includes(self, number: int, group: int) -> bool:
        raise IndexError(number, group)

    def start(self, tiles: Sequence[tuple[int, int]]) -> None:
        pass

    def raw(self, number: int, group: int) -> NDArray[np.uint8]:
        raise IndexError(number, group)

    def timed(self, number: int, group: int) -> contextlib.AbstractContextManager[None]:
        raise IndexError(number, group)

    def is_intact(self) -> bool:
        return True

    def lost(self, number: int, error: Exception) -> None:
        raise IndexError(number) from error

    def end(self, kept: Collection[int]) -> int:  # noqa: ARG002
        return 0


class RemoteReading:
    """Blocks in the daemon's memory. What only flash holds, the daemon reads, in the order that `start` gives."""

    def __init__(self, lease: RemoteLease, needs: Sequence[Need]) -> None:
        self._lease = lease
        self._channel = lease.channel
        self._needs = needs
        self._places = [lease.place(need.block.number) for need in needs]
        self._copies = None if lease.hot is None else lease.hot.hold(need.block for need in needs)
        self._near = {} if self._copies is None else self._copies.bytes
        self._load: int | None = None
        self._tiles: dict[tuple[int, int], int] = {}
        self._asked = 0
        self._answering = threading.Lock()
        self._brought: dict[int, tuple[int, int]] | None = None

    def is_far(self, number: int) -> bool:
        return self._places[number] == NOWHERE and self._needs[number].block.number not in self._near

    def includes(self, number: int, group: int) -> bool:
        return self.is_far(number) or group not in self._needs[number].unread

    def start(self, tiles: Sequence[tuple[int, int]]) -> None:
        if not tiles:
            return
        self._tiles = {tile: at for at, tile in enumerate(tiles)}
        rows = [self._lease.row(need.block.number) for need in self._needs]
        asked = [(rows[number], group) for number, group in tiles]
        load = self._load = self._channel.begin_load()
        with contextlib.suppress(DaemonError):  # each tile will say so
            self._asked = self._channel.send(
                lambda request: wire.Bring(request, self._lease.handle, load, asked)
            )

    def raw(self, number: int, group: int) -> NDArray[np.uint8]:
        """Raises DaemonError, NotBroughtError."""
        self._lease.renew()
        need, place = self._needs[number], self._places[number]
        lease = self._lease
        frame = lease.layout.span(lease.groups[group], need.block.length)
        if (copy := self._near.get(need.block.number)) is not None:
            return self._counted("bytes_from_hot", copy[frame])
        if place == NOWHERE:
            place = self._place(self._lease.row(need.block.number))
            assert self._load is not None
            failure = self._channel.wait_tile(self._load, self._tiles[number, group])
            if failure is not None:
                raise NotBroughtError(failure)
        return self._counted("bytes_from_warm", self._channel.arenas.view(place, need.block.nbytes)[frame])

    def _counted(self, name: str, raw: NDArray[np.uint8]) -> NDArray[np.uint8]:
        if self._lease.hot is not None:
            self._lease.hot.count(name, raw.nbytes)
        return raw

    def _place(self, row: int) -> tuple[int, int]:
        with self._answering:
            if self._brought is None:
                self._brought = {}  # a failure counts for all
                self._brought = self._channel.reply(self._asked, wire.Brought).places
        place = self._brought.get(row, NOWHERE)
        if place == NOWHERE:
            raise NotBroughtError("the daemon has no room for it, or failed")
        return place

    def timed(self, number: int, group: int) -> contextlib.AbstractContextManager[None]:  # noqa: ARG002
        return contextlib.nullcontext()  # the daemon knows how fast its flash is

    def is_intact(self) -> bool:
        return self._lease.is_intact()

    def lost(self, number: int, error: Exception) -> None:
        block = self._needs[number].block
        log.info("block %s was not loaded, its tokens are computed instead: %s", block.key.hex()[:16], error)

    def end(self, kept: Collection[int]) -> int:  # noqa: ARG002
        if self._copies is not None:
            self._copies.release()
        if self._load is None:
            return 0
        load, handle = self._load, self._lease.handle
        came = self._channel.end_load(load)
        with contextlib.suppress(DaemonError, LeaseReleasedError):
            if len(came.tiles) == len(self._tiles):
                self._channel.tell(wire.EndBring(wire.NO_REPLY, handle, load))
            else:  # broken off: return when nothing is read for it any more
                self._channel.call(lambda number: wire.EndBring(number, handle, load), wire.Done)
        return came.bytes_read
