"""Look-ups, leases, and loads of what only flash holds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable
from concurrent.futures import Executor

import msgspec

from kvstore.errors import BudgetError, InvalidRequestError, LeaseReleasedError
from kvstore.match import Match
from kvstore.open_directory import OpenDirectory
from kvstore.reading import Need, TierReading
from kvstore.store import KVStore

from . import wire
from .answers import Answered, Handler, WithArenas, tokens_of, view_of
from .bringing import Bringing
from .connection import Connection, OwnedLease
from .described import match_of, references, table
from .shared_memory import NOWHERE, SharedArenas

_MOST_LEASES = 4096  # of one client
_MOST_LOADS = 64  # of one lease

log = logging.getLogger(__name__)


class ReadingRequests:
    """`threads` end loads that are broken off: a tile may just be read, and the loop does not wait for it."""

    def __init__(
        self,
        shared: OpenDirectory,
        arenas: SharedArenas,
        loop: asyncio.AbstractEventLoop,
        threads: Executor,
    ) -> None:
        self.handlers: dict[type, Handler] = {
            wire.Lookup: self._lookup,
            wire.TakeLease: self._take_lease,
            wire.Renew: self._renew,
            wire.Release: self._release,
            wire.Bring: self._bring,
            wire.EndBring: self._end_bring,
        }
        self._shared = shared
        self._counts = shared.tiers.counts
        self._arenas = arenas
        self._loop = loop
        self._threads = threads
        self._last_lease = 0

    def forget(self, client: Connection) -> None:
        """A client is gone: all that it held is free. Its socket is closed already."""
        held, client.leases = list(client.leases.values()), {}
        client.views.clear()
        self._counts["leases_of_lost_clients"] += len(held)
        for lease in held:
            self._end(lease)

    def expire(self, client: Connection, before: float) -> None:
        """End leases that were not used since `before`."""
        for handle, lease in list(client.leases.items()):
            if lease.used < before:
                del client.leases[handle]
                self._counts["leases_expired"] += 1
                log.warning("client %d (%s) let a lease expire", client.pid, client.name)
                self._end(lease)

    def _lookup(self, client: Connection, request: wire.Lookup) -> Answered:
        store = view_of(client, request.view)
        tokens = tokens_of(request.tokens)
        match = store.lookup(tokens, moved=request.moved, boundaries=request.boundaries)
        if request.lease:
            return self._leased(client, request.id, store, match)
        blocks, runs = table(match)
        return wire.Found(request.id, match.length, references(blocks), len(match.blocks), runs)

    def _take_lease(self, client: Connection, request: wire.TakeLease) -> Answered:
        store = view_of(client, request.view)
        return self._leased(client, request.id, store, match_of(store, request))

    def _leased(self, client: Connection, number: int, store: KVStore, match: Match) -> Answered:
        if len(client.leases) >= _MOST_LEASES:
            raise BudgetError(f"this connection holds {_MOST_LEASES} leases; release some")
        lease = store.lease(match)
        self._last_lease += 1
        blocks, runs = table(lease)
        places = [self._arenas.place(block.memory) for block in blocks]
        client.leases[self._last_lease] = OwnedLease(lease, store, time.monotonic())
        fresh = _unknown(client, places)
        leased = wire.Leased(
            number,
            self._last_lease,
            lease.length,
            references(blocks),
            len(lease.prefix),
            runs,
            places,
            lease.whole,
            lease.flash_bytes_per_second,
            self._arenas.arenas(fresh),
        )
        return WithArenas(leased, fresh) if fresh else leased

    def _owned(self, client: Connection, handle: int) -> OwnedLease:
        lease = client.leases.get(handle)
        if lease is None:
            raise LeaseReleasedError(f"this connection holds no lease {handle}: it was released, or expired")
        lease.used = time.monotonic()
        return lease

    def _renew(self, client: Connection, request: wire.Renew) -> msgspec.Struct:
        self._owned(client, request.lease)
        return wire.Done(request.id)

    def _release(self, client: Connection, request: wire.Release) -> Answered:
        lease = self._owned(client, request.lease)
        del client.leases[request.lease]

        def work() -> msgspec.Struct:
            lease.end()
            return wire.Done(request.id)

        return work() if lease.is_idle else work

    def _end(self, lease: OwnedLease) -> None:
        """Of a client that does not ask for it."""
        if not lease.is_idle:  # a tile may just be read: nobody waits for it here
            with contextlib.suppress(RuntimeError):  # no threads any more: the daemon stops
                self._threads.submit(lease.end)
                return
        lease.end()

    def _bring(self, client: Connection, request: wire.Bring) -> Answered:
        """Tiles are announced after this reply: the loop sends both, and is busy with this one until it is sent."""
        owned = self._owned(client, request.lease)
        if request.load in owned.loads:
            raise InvalidRequestError(f"load {request.load} of lease {request.lease} is under way")
        if len(owned.loads) >= _MOST_LOADS:
            raise BudgetError(f"{_MOST_LOADS} loads of one lease are under way")
        blocks = table(owned.lease)[0]  # as the client was given it with its lease
        groups = len(owned.store.layer_groups)
        for block, group in request.tiles:
            if block >= len(blocks) or group >= groups:
                raise InvalidRequestError(f"no tile {group} of block {block} in lease {request.lease}")
        asked = sorted({block for block, _ in request.tiles})
        place_of = {block: number for number, block in enumerate(asked)}
        tiers = self._shared.tiers
        with tiers.lock:
            reading = TierReading(tiers, [Need(blocks[block]) for block in asked])
        places = {block: self._arenas.place(reading.residence(place_of[block])) for block in asked}
        announce = _Announcer(client, self._loop)
        tiles = [(place_of[block], group) for block, group in request.tiles]
        self._counts["daemon_tiles"] += len(tiles)
        owned.loads[request.load] = Bringing(
            request.load, reading, tiles, groups, self._shared.pool, announce.tiles
        )
        fresh = _unknown(client, places.values())
        brought = wire.Brought(request.id, places, self._arenas.arenas(fresh))
        return WithArenas(brought, fresh) if fresh else brought

    def _end_bring(self, client: Connection, request: wire.EndBring) -> Answered:
        owned = self._owned(client, request.lease)
        load = owned.loads.pop(request.load, None)
        if load is None:
            raise InvalidRequestError(f"no load {request.load} of lease {request.lease} is under way")

        def work() -> msgspec.Struct:
            read = load.end()
            with self._shared.tiers.lock:
                self._counts["daemon_bytes_copied"] += read
            return wire.Done(request.id)

        return work() if load.is_done else work


def _unknown(client: Connection, places: Iterable[tuple[int, int]]) -> list[int]:
    """The arenas of these places that a client was not given before."""
    return sorted({arena for arena, _ in places} - client.arenas - {NOWHERE[0]})


class _Announcer:
    """Tells a client of tiles, from any thread."""

    def __init__(self, client: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    def tiles(self, tiles: wire.Tiles) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._client.send, tiles)
