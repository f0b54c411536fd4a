"""Parts of the memory that an NPU reads, for clients that have it to themselves: see `client_hot`.

The device's budget, `hot_bytes` in `max_hot_arenas` pinned buffers, is one for all clients. Each gets half of what is
left, so that there is some for the next; a connection's part goes with it.
"""

from __future__ import annotations

import msgspec

from kvstore.open_directory import OpenDirectory

from . import wire
from .answers import Handler, answer, view_of
from .connection import Connection


class HotRequests:
    """Nothing is given where the daemon has the hot tier itself."""

    def __init__(self, shared: OpenDirectory) -> None:
        self.handlers: dict[type, Handler] = {
            wire.TakeHot: self._take,
            wire.KeepHot: self._keep,
            wire.LeaveHot: self._leave,
        }
        self._profile = shared.tiers.profile
        self._given: dict[Connection, wire.HotRoom] = {}

    def _take(self, client: Connection, request: wire.TakeHot) -> msgspec.Struct:
        self._given = {
            other: room for other, room in self._given.items() if other.is_open and other != client
        }
        room = self._room(request.block_bytes)
        if room.arenas:
            self._given[client] = room
        return answer(request, room)

    def _room(self, block_bytes: int) -> wire.HotRoom:
        """Arenas that take a block of so many bytes each; none where there is no such."""
        profile = self._profile
        alignment = profile.alignment
        share = max(-(-profile.hot_bytes // profile.max_hot_arenas), block_bytes)
        size = -(-share // alignment) * alignment
        count = 0
        if not profile.shares_hot and size <= profile.arena_bytes:
            arenas = profile.max_hot_arenas - sum(each.arenas for each in self._given.values())
            nbytes = profile.hot_bytes - sum(each.arenas * each.arena_bytes for each in self._given.values())
            left = min(arenas, nbytes // size)
            count = -(-left // 2)
        return wire.HotRoom(count, size, alignment, profile.eviction, profile.device)

    def _keep(self, client: Connection, request: wire.KeepHot) -> msgspec.Struct:
        held = view_of(client, request.view).blocks_of(request.keys)
        there = {block.number for block in held if block is not None}
        return answer(request, [number for number in request.numbers if number not in there])

    def _leave(self, client: Connection, request: wire.LeaveHot) -> msgspec.Struct:
        self._given.pop(client, None)
        return wire.Done(request.id)
