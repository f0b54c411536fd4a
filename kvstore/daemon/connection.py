"""One client as the daemon sees it: its socket, and all that it owns and that goes with it.

Nothing here waits: bytes come when the loop says that there are some, and replies that the socket does not take at once
are kept, up to a bound. A client that does not read its replies is given up at that bound; it delays nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.lease import Lease
from kvstore.store import KVStore

from . import wire
from .bringing import Bringing
from .shared_memory import StagingMemory
from .tenant import Tenant

if TYPE_CHECKING:
    import msgspec

_buffer = memoryview(bytearray(64 * 1024))
"""What was just received, of whichever client: the loop handles one at a time, and allocates nothing for it."""

_FIRST_FRAME = 4096
_MOST_WAITING = 8 << 20  # bytes of replies
_MOST_AT_WORK = 64  # requests that threads are busy with, or that wait for them

log = logging.getLogger(__name__)


def peer(sock: socket.socket) -> tuple[int, int]:
    """(uid, pid) of the process at the other end, as the system knows them; pid 0 where it does not say."""
    if hasattr(socket, "SO_PEERCRED"):
        pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return uid, pid
    if sys.platform == "darwin":
        _, uid = struct.unpack("II", sock.getsockopt(0, 1, 76)[:8])  # LOCAL_PEERCRED: struct xucred
        return uid, 0
    raise OSError("this system does not say who is at the other end of a socket")


@dataclass
class View:
    """An identity that a client opened."""

    store: KVStore
    tenant: Tenant


@dataclass
class OwnedLease:
    """A lease of one client. `used`: when it was taken, used or renewed, by time.monotonic."""

    lease: Lease
    store: KVStore
    used: float
    loads: dict[int, Bringing] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Whether `end` has nothing to wait for."""
        return all(load.is_done for load in self.loads.values())

    def end(self) -> None:
        """Waits for tiles that are just being read."""
        for load in self.loads.values():
            load.end()
        self.loads.clear()
        with contextlib.suppress(Exception):  # the store may have been closed meanwhile
            self.lease.release()


class Connection:
    """`frame_came` is called with each message, good during the call; `closed` once, after the socket was closed."""

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        frame_came: Callable[[Connection, wire.Payload], None],
        closed: Callable[[Connection, str], None],
    ) -> None:
        self.uid, self.pid = peer(sock)
        self.name = ""
        self.greeted = False
        self.since = time.monotonic()
        self.views: dict[int, View | None] = {}
        """None: is being opened."""
        self.leases: dict[int, OwnedLease] = {}
        self.arenas: set[int] = set()
        """Those that it was given."""
        self.staging: StagingMemory | None = None
        self.at_work = 0
        self.sent_bad_frame = False
        self.is_open = True
        self._socket = sock
        self._loop = loop
        self._frame_came = frame_came
        self._closed = closed
        self._frames = wire.Frames(_FIRST_FRAME)
        self._waiting: deque[tuple[memoryview, list[int]]] = deque()
        self._waiting_bytes = 0
        self._reading = False
        sock.setblocking(False)
        self._read_on()

    def welcome(self) -> None:
        """The client greeted: from now on it may send long frames."""
        self.greeted = True
        self._frames.limit = wire.MAX_FRAME

    def send(self, message: msgspec.Struct, descriptors: list[int] | None = None) -> None:
        """Send now or as soon as the client reads. Takes `descriptors`, which go with the message, and closes them."""
        descriptors = descriptors or []
        if not self.is_open:
            _close_all(descriptors)
            return
        data = memoryview(wire.frame(message))
        if not self._waiting:
            try:
                sent = self._write(data, descriptors)
            except BlockingIOError:
                sent = 0
            except OSError as error:
                _close_all(descriptors)
                self.close(str(error))
                return
            if sent:
                _close_all(descriptors)
                descriptors = []
            data = data[sent:]
            if not data:
                return
            self._loop.add_writer(self._socket.fileno(), self._writable)
        self._waiting.append((data, descriptors))
        self._waiting_bytes += len(data)
        if self._waiting_bytes > _MOST_WAITING:
            self.close("does not read its replies")

    def begin_work(self) -> None:
        """A thread is to work for this client; too many of these, and nothing more is read until some are done."""
        self.at_work += 1
        if self.at_work >= _MOST_AT_WORK:
            self._read_no_more()

    def end_work(self) -> None:
        self.at_work -= 1
        if self.is_open:
            self._read_on()
        elif not self.at_work:
            self._free_staging()

    def close(self, reason: str = "closed") -> None:
        """Close the socket first: from then on the client knows that nothing it was given is its own any more."""
        if not self.is_open:
            return
        self.is_open = False
        self._read_no_more()
        self._loop.remove_writer(self._socket.fileno())
        self._socket.close()
        while self._waiting:
            _close_all(self._waiting.popleft()[1])
        if not self.at_work:
            self._free_staging()
        self._closed(self, reason)

    def _free_staging(self) -> None:
        if self.staging is not None:
            self.staging.close()
            self.staging = None

    def _read_on(self) -> None:
        if not self._reading:
            self._reading = True
            self._loop.add_reader(self._socket.fileno(), self._readable)

    def _read_no_more(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._socket.fileno())

    def _readable(self) -> None:
        try:
            count = self._socket.recv_into(
                _buffer
            )  # and not recvmsg: descriptors that a client sends go nowhere
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error))
            return
        if not count:
            self.close("the client is gone")
            return
        try:
            for payload in self._frames.feed(_buffer[:count]):
                self._frame_came(self, payload)
                if not self.is_open:
                    return
        except wire.FrameError as error:
            self.sent_bad_frame = True
            self.refuse(str(error))

    def refuse(self, reason: str) -> None:
        """Say why, and close."""
        log.warning("client %d (%s): %s", self.pid, self.name, reason)
        self.send(wire.Refused(reason[:1000], [wire.PROTOCOL]))
        self.close(f"refused: {reason}")

    def _writable(self) -> None:
        try:
            while self._waiting:
                data, descriptors = self._waiting[0]
                sent = self._write(data, descriptors)
                _close_all(descriptors)
                self._waiting_bytes -= sent
                if sent < len(data):
                    self._waiting[0] = data[sent:], []
                    return
                self._waiting.popleft()
        except BlockingIOError:
            return
        except OSError as error:
            self.close(str(error))
            return
        self._loop.remove_writer(self._socket.fileno())

    def _write(self, data: memoryview, descriptors: list[int]) -> int:
        if descriptors:
            return socket.send_fds(self._socket, [data], descriptors)
        return self._socket.send(data)


def _close_all(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
