"""A put through a daemon: only what it lacks is packed, as much at a time as the staging memory takes."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvstore.buffer import KvBuffer
from kvstore.layout import Layout
from kvstore.moved import SHORTEST
from kvstore.put import PutResult

from . import wire
from .client import Channel, View
from .shared_memory import MappedStaging
from .staging import pack

_NO_STAGING = "the daemon has no staging memory left for this client; raise staging_bytes"
_USUAL = 12 << 20  # bytes of staging that are asked for at least: it is asked for once
_AGAIN = 0.01  # seconds until a put that waits for room asks again


class Putting:
    """KV of one prompt, checked before: row i of `kv` is token `start` + i, or row slots[i] is.

    guess: how many of its tokens the daemon is believed to hold, which saves asking.
    """

    def __init__(
        self,
        channel: Channel,
        view: View,
        layout: Layout,
        kv: KvBuffer,
        start: int,
        slots: NDArray[np.int64] | None,
        guess: int | None = None,
    ) -> None:
        self._channel = channel
        self._view = view
        self._layout = layout
        self._kv = kv
        self._start = start
        self._slots = slots
        self._guess = guess
        self._block = channel.welcome.block_tokens

    def prefix(self, ids: NDArray[np.int32], wait: float) -> PutResult:
        """As `KVStore.put`. Raises DaemonError."""
        deadline = time.monotonic() + wait
        stored, held = 0, None
        while True:
            done = self._once(ids)
            stored += done.stored
            held = done.held if held is None else held
            if not done.refused or time.monotonic() >= deadline:
                return PutResult(stored, held, done.refused, done.reason)
            time.sleep(_AGAIN)

    def _once(self, ids: NDArray[np.int32]) -> PutResult:
        tokens = ids.astype("<i4", copy=False).tobytes()
        held, guessed = self._guess, self._guess is not None
        self._guess = None
        if held is None:
            held = self._channel.call(
                lambda number: wire.Held(number, self._view.number, tokens), wire.HeldTokens
            ).tokens
        if held >= len(ids):
            return PutResult(0, len(ids), 0)
        first = max(self._start, held // self._block * self._block)
        fresh = -(-len(ids) // self._block) - first // self._block
        with self._channel.staging_lock:
            staging = self._staging(len(ids) - first)
            stored, begun = 0, first
            while first < len(ids):
                at, room = self._part(staging)
                end = self._end(first, len(ids), room)
                if staging is None or end <= first:
                    return PutResult(stored, held, len(ids) - max(first, held), _NO_STAGING)
                self._pack(first, end, staging.bytes[at:])
                put = partial(
                    wire.Put,
                    view=self._view.number,
                    tokens=tokens[: 4 * end],
                    start=first,
                    offset=at,
                    fresh=fresh,
                )
                done = self._channel.call(put, wire.Stored)
                stored += done.stored
                if first == begun and guessed:
                    if done.refused and not done.stored:  # perhaps because less is held
                        return self._once(ids)
                    held = done.held
                if done.refused:
                    refused = done.refused + len(ids) - end
                    return PutResult(stored, held, refused, done.reason)
                first = end
        return PutResult(stored, held, 0)

    def span(self, ids: NDArray[np.int32], begin: int, end: int) -> PutResult:
        """As `KVStore.put_inexact` of one span. Raises DaemonError."""
        stored = held = 0
        with self._channel.staging_lock:
            staging = self._staging(end - begin)
            _, room = self._whole(staging)  # it is answered when all is read
            while begin < end:
                until = self._end(begin, end, room, begin)
                if end - SHORTEST < until < end:  # so little is not kept by itself
                    until -= -(-SHORTEST // self._block) * self._block
                if staging is None or until <= begin:
                    return PutResult(stored, held, end - begin, _NO_STAGING)
                self._pack(begin, until, staging.bytes)
                tokens = ids[:until].astype("<i4", copy=False).tobytes()
                put = partial(wire.PutInexact, view=self._view.number, tokens=tokens, start=begin, offset=0)
                done = self._channel.call(put, wire.Stored)
                stored, held = stored + done.stored, held + done.held
                if done.refused:
                    return PutResult(stored, held, done.refused + end - until, done.reason)
                begin = until
        return PutResult(stored, held, 0)

    def _staging(self, tokens: int) -> MappedStaging | None:
        return self._channel.staging(max(_USUAL, self._layout.block_bytes(tokens)))

    def _part(self, staging: MappedStaging | None) -> tuple[int, int]:
        """(offset, bytes) of staging memory that the daemon reads no more: a half if that takes a block, else all."""
        if staging is not None and staging.half >= self._layout.block_bytes(self._block):
            return staging.next_half(), staging.half
        return self._whole(staging)

    def _whole(self, staging: MappedStaging | None) -> tuple[int, int]:
        if staging is None:
            return 0, 0
        self._channel.call(partial(wire.GetVerdict, view=self._view.number), wire.Answer)  # any reply will do
        return 0, len(staging.bytes)

    def _end(self, first: int, last: int, room: int, origin: int = 0) -> int:
        """How far `room` bytes reach from `first` on: to `last`, or to the end of a block counted from `origin`."""
        reach = first + room // self._layout.token_bytes
        if reach >= last:
            return last
        return reach - (reach - origin) % self._block

    def _pack(self, first: int, end: int, into: NDArray[np.uint8]) -> None:
        begin = first - self._start
        pack(self._kv, begin, end - first, self._slots, into[: self._layout.block_bytes(end - first)])
