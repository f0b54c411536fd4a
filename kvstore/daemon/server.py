"""The daemon's loop: takes clients in, hears their greeting, and sees to it that what they hold ends with them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import time

from kvstore.open_directory import OpenDirectory

from . import wire
from .administered import Administered
from .connection import Connection
from .requests import Requests
from .shared_memory import SharedArenas

LEASE_SECONDS = 60.0
"""A lease that its client neither used nor renewed for so long ends: the client hangs."""

_MOST_CLIENTS = 256
_GREETING_SECONDS = 10.0
_SWEEP_SECONDS = 1.0
_PAUSE_SECONDS = 0.5

log = logging.getLogger(__name__)


class Server:
    """Serves `shared` to clients of `listener`, which it closes in the end. Use it within one running loop."""

    def __init__(
        self, shared: OpenDirectory, listener: socket.socket, *, lease_seconds: float = LEASE_SECONDS
    ) -> None:
        self._shared = shared
        self._listener = listener
        self._lease_seconds = lease_seconds
        self._loop = asyncio.get_running_loop()
        self._arenas = SharedArenas(shared.tiers, self._arena_retired)
        self._requests = Requests(shared, self._arenas, Administered(shared), self._loop)
        self._clients: set[Connection] = set()
        self._counts = shared.tiers.counts
        self._sweeping: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._listener.setblocking(False)
        self._listen()
        self._sweep()

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener.fileno(), self._accept)

    def stop(self) -> None:
        """Take no more clients, finish what was begun, let all clients go. Waits for threads."""
        self._loop.remove_reader(self._listener.fileno())
        self._listener.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._requests.close()

    def let_go(self) -> None:
        """Close all connections; after `stop`, once replies to what was finished are sent."""
        for client in list(self._clients):
            client.close("the daemon stops")
        self._arenas.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # the client is gone already
            return
        except OSError as error:  # no descriptor left: it would be tried over and over, and fail
            log.warning("a client was not taken in: %s", error)
            self._loop.remove_reader(self._listener.fileno())
            self._loop.call_later(_PAUSE_SECONDS, self._listen)
            return
        try:
            client = Connection(sock, self._loop, self._frame_came, self._closed)
        except OSError as error:
            log.warning("a client was not taken in: %s", error)
            sock.close()
            return
        self._clients.add(client)
        self._counts["daemon_clients"] += 1
        if len(self._clients) > _MOST_CLIENTS:
            client.refuse(f"{_MOST_CLIENTS} clients are connected already")
        elif client.uid not in (os.geteuid(), 0):
            client.refuse(f"uid {client.uid} is not the daemon's; run a daemon of your own")

    def _frame_came(self, client: Connection, payload: wire.Payload) -> None:
        if client.greeted:
            self._requests.carry_out(client, wire.request(payload))
        else:
            self._greet(client, wire.hello(payload))

    def _greet(self, client: Connection, hello: wire.Hello) -> None:
        if hello.protocol != wire.PROTOCOL:
            self._counts["daemon_other_versions"] += 1
            client.refuse(f"protocol {hello.protocol} is not spoken here, only {wire.PROTOCOL}")
            return
        client.name = hello.client
        client.pid = client.pid or hello.pid
        client.welcome()
        profile, directory = self._shared.tiers.profile, self._shared.directory
        welcome = wire.Welcome(
            wire.PROTOCOL,
            os.getpid(),
            profile.block_tokens,
            self._lease_seconds,
            profile.codec,
            None if directory is None else str(directory.path),
            not profile.shares_hot,
        )
        client.send(welcome)

    def _closed(self, client: Connection, reason: str) -> None:
        self._clients.discard(client)
        self._counts["daemon_bad_frames"] += client.sent_bad_frame
        log.info("client %d (%s): %s", client.pid, client.name, reason)
        self._requests.reading.forget(client)

    def _arena_retired(self, number: int) -> None:
        """By the thread that gave an arena up."""
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._forget_arena, number)

    def _forget_arena(self, number: int) -> None:
        self._arenas.forget(number)
        for client in list(self._clients):
            if number in client.arenas:
                client.arenas.discard(number)
                client.send(wire.Retired(number))

    def _sweep(self) -> None:
        """End what hangs."""
        now = time.monotonic()
        for client in list(self._clients):
            if not client.greeted and now - client.since > _GREETING_SECONDS:
                client.refuse(f"no greeting in {_GREETING_SECONDS:.0f} s")
            else:
                self._requests.reading.expire(client, now - self._lease_seconds)
        self._sweeping = self._loop.call_later(min(_SWEEP_SECONDS, self._lease_seconds / 4), self._sweep)
