"""Puts, and the memory that they come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequestError
from kvstore.open_directory import OpenDirectory
from kvstore.put import PutResult
from kvstore.store import KVStore, checked_tokens

from . import wire
from .answers import Answered, BeforeWork, Handler, Later, tokens_of, view_of
from .connection import Connection
from .staging import Grants

_AT_ONCE = 8 << 20
"""Bytes that the loop copies itself, after the reply: a millisecond or two. Handing them to a thread takes as long."""


class WritingRequests:
    """Requests of a client that put, and those before and behind."""

    def __init__(self, shared: OpenDirectory) -> None:
        self.handlers: dict[type, Handler] = {
            wire.Held: self._held,
            wire.Staging: self._give_staging,
            wire.Put: self._put,
            wire.PutInexact: self._put_inexact,
            wire.Flush: self._flush,
        }
        self._shared = shared
        self._counts = shared.tiers.counts
        self._grants = Grants(shared.tiers.profile.staging_bytes)

    def _held(self, client: Connection, request: wire.Held) -> msgspec.Struct:
        held = view_of(client, request.view).held_for_put(tokens_of(request.tokens))
        return wire.HeldTokens(request.id, held)

    def _give_staging(self, client: Connection, request: wire.Staging) -> Answered:
        if client.staging is not None:
            raise InvalidRequestError("this connection has its staging memory already")
        client.staging = memory = self._grants.grant(request.nbytes)
        if memory is None:
            return wire.StagingGiven(request.id, 0)
        client.send(wire.StagingGiven(request.id, memory.size), [memory.take_descriptor()])
        return None

    def _put(self, client: Connection, request: wire.Put) -> Answered:
        store, ids = view_of(client, request.view), checked_tokens(tokens_of(request.tokens))
        raw = self._staged(client, store, ids, request.start, request.offset)
        incoming = store.accept_put(ids, request.start, fresh=request.fresh)

        def copy() -> PutResult:
            with self._shared.tiers.timings.stage("put"):
                return incoming.copy(_Staged(store.layout.views(raw, len(ids) - request.start)), None)

        if len(raw) > _AT_ONCE or incoming.reads_flash:
            return lambda: wire.Stored(request.id, *copy())
        return BeforeWork(wire.Stored(request.id, *incoming.result), copy)

    def _put_inexact(self, client: Connection, request: wire.PutInexact) -> Later:
        store, tokens = view_of(client, request.view), tokens_of(request.tokens)
        raw = self._staged(client, store, tokens, request.start, request.offset)
        slots = np.zeros(len(tokens), np.int64)
        slots[request.start :] = np.arange(len(tokens) - request.start)

        def work() -> msgspec.Struct:
            span = (request.start, len(tokens))
            staged = _Staged(store.layout.views(raw, len(tokens) - request.start))
            return wire.Stored(request.id, *store.put_inexact(tokens, staged, [span], slots))

        return work

    def _staged(
        self, client: Connection, store: KVStore, tokens: NDArray[np.int32], start: int, offset: int
    ) -> NDArray[np.uint8]:
        """What the client left in its staging memory."""
        if not start < len(tokens):
            raise InvalidRequestError(f"start {start} must lie in the {len(tokens)} tokens given")
        given = len(tokens) - start
        nbytes = store.layout.block_bytes(given)
        size = 0 if client.staging is None else client.staging.size
        if client.staging is None or offset + nbytes > size:
            raise InvalidRequestError(f"{nbytes} bytes at {offset} of staging memory that has {size}")
        self._counts["daemon_bytes_copied"] += nbytes
        return client.staging.bytes[offset : offset + nbytes]

    def _flush(self, client: Connection, request: wire.Flush) -> Answered:  # noqa: ARG002
        return self._shared.worker.flush()


class _Staged:
    """KV in staging memory; a `KvBuffer`."""

    def __init__(self, views: Sequence[tuple[NDArray[Any], NDArray[Any]] | None]) -> None:
        self.keys = [None if view is None else view[0] for view in views]
        self.values = [None if view is None else view[1] for view in views]
