"""What the daemon does at each request, for the client that asks.

What takes microseconds is done at once, in the loop: look-ups, leases, releases; and the copy of a put, unless it is
a long one: a thread that copies keeps the interpreter from the loop nearly as long. The rest goes to threads, puts to
some of their own, so that no explanation stands before them.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import msgspec

from kvstore.open_directory import OpenDirectory

from . import wire
from .administered import Administered
from .answers import Answered, BeforeWork, WithArenas, failed
from .connection import Connection
from .hot_requests import HotRequests
from .meaning_requests import MeaningRequests
from .other_requests import OtherRequests
from .reading_requests import ReadingRequests
from .shared_memory import SharedArenas
from .writing_requests import WritingRequests

_PUTS = (wire.Put, wire.PutInexact)

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Requests:
    """Carries out requests on `shared`. All methods are called by the loop's thread."""

    def __init__(
        self,
        shared: OpenDirectory,
        arenas: SharedArenas,
        administered: Administered,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._counts = shared.tiers.counts
        self._arenas = arenas
        self._loop = loop
        self._puts = ThreadPoolExecutor(2, thread_name_prefix="kvstore-put")
        self._others = ThreadPoolExecutor(4, thread_name_prefix="kvstore-request")
        self.reading = ReadingRequests(shared, arenas, loop, self._others)
        self._handlers = (
            self.reading.handlers
            | WritingRequests(shared).handlers
            | OtherRequests(shared, administered, loop).handlers
            | HotRequests(shared).handlers
            | MeaningRequests(shared).handlers
        )

    def carry_out(self, client: Connection, request: wire.AnyRequest) -> None:
        """Answer `request`, now or later. Raises nothing."""
        self._counts["daemon_requests"] += 1
        try:
            answered: Answered = self._handlers[type(request)](client, request)
        except Exception as error:
            answered = failed(request, error)
        if isinstance(answered, WithArenas):
            self._give(client, request, answered)
        elif isinstance(answered, BeforeWork):
            self._answer(client, request, answered.reply)
            os.sched_yield()  # the client first, where it waits for this very core
            try:
                answered.work()
            except Exception:  # what was promised is not there, as after an eviction
                log.exception("a put of client %d (%s) failed", client.pid, client.name)
        elif isinstance(answered, msgspec.Struct):
            self._answer(client, request, answered)
        elif isinstance(answered, Future):
            done = wire.Done(request.id)
            self._when_done(client, request, asyncio.wrap_future(answered, loop=self._loop), lambda _: done)
        elif answered is not None:
            pool = self._puts if isinstance(request, _PUTS) else self._others
            self._when_done(client, request, self._loop.run_in_executor(pool, answered), lambda reply: reply)

    def close(self) -> None:
        """Finish what was begun."""
        self._puts.shutdown(wait=True)
        self._others.shutdown(wait=True)

    def _answer(self, client: Connection, request: wire.AnyRequest, reply: msgspec.Struct) -> None:
        if request.id != wire.NO_REPLY:
            try:
                client.send(reply)
            except wire.FrameError as error:
                client.send(wire.Failed(request.id, "InvalidRequestError", f"the reply is too long: {error}"))

    def _give(self, client: Connection, request: wire.AnyRequest, answered: WithArenas) -> None:
        """Arenas go with the reply; without one the client knows of none."""
        if request.id == wire.NO_REPLY:
            return
        try:
            client.send(answered.reply, self._arenas.descriptors(answered.arenas))
        except OSError as error:
            client.close(f"no descriptors left: {error}")  # and all that it leased is free
        else:
            client.arenas.update(answered.arenas)

    def _when_done(
        self,
        client: Connection,
        request: wire.AnyRequest,
        waiting: Awaitable[Result],
        reply_of: Callable[[Result], msgspec.Struct],
    ) -> None:
        future = asyncio.ensure_future(waiting, loop=self._loop)
        client.begin_work()

        def done(future: asyncio.Future[Result]) -> None:
            if future.cancelled():
                reply: msgspec.Struct = wire.Failed(request.id, "StoreClosedError", "the daemon stops")
            elif (error := future.exception()) is not None:
                reply = failed(request, error)
            else:
                reply = reply_of(future.result())
            client.end_work()
            self._answer(client, request, reply)

        future.add_done_callback(done)
