"""A client's connection to a daemon: requests and their replies, for any number of threads.

There is no thread of its own. Who waits for a reply reads from the socket, one thread at a time, and hands what belongs
to others over to them. Once anything breaks, the channel is lost for good, and says so at each request.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from kvstore import errors
from kvstore.errors import DaemonError, DaemonLostError
from kvstore.flash.keys import KeySource, secrets_of
from kvstore.identity import Identity

from . import wire
from .shared_memory import MappedArenas, MappedStaging

PATIENCE = 10.0
"""Seconds after which a daemon that does not answer counts as lost."""

_LOOK = 0.25  # seconds of waiting after which deadlines are looked at
_INT = struct.calcsize("i")
_ANCILLARY = socket.CMSG_SPACE(253 * _INT)  # of as many descriptors
_CLOSE_ON_EXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)
_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR

log = logging.getLogger(__name__)

Reply = TypeVar("Reply")


class View:
    """An identity as this connection knows it."""

    def __init__(self, number: int, layer_groups: tuple[range, ...]) -> None:
        self.number = number
        self.layer_groups = layer_groups


class Channel:
    """One connection. Raises DaemonError when there is no daemon, or one that does not want us."""

    def __init__(self, path: Path, name: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._pid = os.getpid()
        self._frames = wire.Frames()
        self._buffer = memoryview(bytearray(64 * 1024))
        self._descriptors: deque[int] = deque()
        self._free_locks()
        self._replies: dict[int, Any] = {}
        self._awaited: set[int] = set()
        self._tiles: dict[int, Progress] = {}
        self._reading = False
        self._last = 0
        self._lost: str | None = None
        self._views: dict[bytes, View] = {}
        self.arenas = MappedArenas()
        self._staging: MappedStaging | None = None
        try:
            self._socket.settimeout(PATIENCE)
            self._socket.connect(str(path))
            self._socket.settimeout(None)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                seconds = _LOOK if option == socket.SO_RCVTIMEO else PATIENCE
                packed = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
                self._socket.setsockopt(socket.SOL_SOCKET, option, packed)
            self.welcome = self._greet(name)
        except (OSError, ValueError, IndexError, wire.FrameError) as error:
            self.close()
            raise DaemonError(f"no daemon at {path}: {error}") from error
        except BaseException:
            self.close()
            raise

    def _free_locks(self) -> None:
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._opening = threading.Lock()
        self.staging_lock = threading.RLock()
        """Held by who writes to the staging memory, until the reply to the put."""

    def begin_anew(self) -> None:
        """In a child of the process that made it: it is lost there, and no thread holds it or reads from it."""
        self._free_locks()
        self._reading = False

    def _greet(self, name: str) -> wire.Welcome:
        self._socket.sendall(wire.frame(wire.Hello(wire.PROTOCOL, name, os.getpid())))
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            for payload in self._receive():
                found = wire.greeting(payload)
                if isinstance(found, wire.Refused):
                    raise DaemonError(
                        f"the daemon refuses this client: {found.reason} (it speaks {found.protocols}, "
                        f"this client {wire.PROTOCOL})"
                    )
                return found
        raise DaemonError(f"the daemon does not answer within {PATIENCE:.0f} s")

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def is_lost(self) -> bool:
        return self._lost is not None or self._pid != os.getpid()  # after a fork it is the parent's

    def is_intact(self) -> bool:
        """Whether the daemon held to this connection until just now, so that what it named was still itself."""
        if self.is_lost:
            return False
        look = select.poll()  # a new one: two threads must not use one at a time
        try:
            look.register(self._socket.fileno(), _GONE)
            gone = bool(look.poll(0))
        except (OSError, ValueError):  # closed meanwhile
            gone = True
        if gone:
            self._lose("the daemon closed the connection")
        return not gone

    def close(self) -> None:
        self._lose("closed")

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self._lost is None:
                self._lost = reason
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # wakes who reads
                if not self._reading:
                    self._free()
            self._changed.notify_all()

    def _free(self) -> None:
        """What nobody uses any more. Mapped memory goes with its last view."""
        self._socket.close()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self.arenas.close()
        if self._staging is not None:
            self._staging.close()

    # -- requests -----------------------------------------------------------------------------------------------------

    def call(
        self,
        request: Callable[[int], wire.AnyRequest],
        kind: type[Reply],
        timeout: float | None = PATIENCE,
    ) -> Reply:
        """Send what `request` makes of a number, and wait for the reply, of class `kind`.

        Raises what the daemon says, as the class of `kvstore.errors` that it names; DaemonLostError.
        """
        number = self.send(request)
        return self.reply(number, kind, timeout)

    def send(self, request: Callable[[int], wire.AnyRequest]) -> int:
        """Send a request whose reply is asked for later, by the number returned. Raises DaemonLostError."""
        with self._changed:
            self._last += 1
            number = self._last
            self._awaited.add(number)
        self.tell(request(number))
        return number

    def tell(self, request: msgspec.Struct) -> None:
        """Send a request, and care no further about it. Raises DaemonLostError, InvalidRequestError (too long)."""
        try:
            data = wire.frame(request)
        except wire.FrameError as error:
            raise errors.InvalidRequestError(f"{error}; give fewer tokens at a time") from error
        with self._sending:
            if self.is_lost:
                raise DaemonLostError(f"the daemon is lost: {self._lost}")
            try:
                self._socket.sendall(data)
            except OSError as error:
                self._lose(f"{error}")
                raise DaemonLostError(f"the daemon is lost: {error}") from error

    def reply(self, number: int, kind: type[Reply], timeout: float | None = PATIENCE) -> Reply:
        """The reply to a request that was sent before; raises as `call` does."""
        found = self._wait(lambda: self._replies.get(number), timeout)
        with self._changed:
            self._replies.pop(number, None)
            self._awaited.discard(number)
        if isinstance(found, wire.Failed):
            raise _raised(found)
        if not isinstance(found, kind):
            self._lose(f"an answer of another kind, {type(found).__name__}")
            raise DaemonLostError("the daemon answers something else than was asked")
        return found

    def view(self, identity: Identity, source: KeySource | None = None) -> View:
        """The identity, opened on this connection; `source` has its tenant's keys. Raises EncryptionError."""
        digest = identity.digest()
        if (known := self._views.get(digest)) is not None:
            return known
        with self._opening:
            if (known := self._views.get(digest)) is None:
                keys = [] if source is None else secrets_of(source, identity.tenant_salt)
                opened = self.call(lambda number: wire.Open(number, identity.to_bytes(), keys), wire.Opened)
                groups = tuple(range(first, stop) for first, stop in opened.layer_groups)
                known = self._views[digest] = View(opened.view, groups)
        return known

    def staging(self, wanted: int) -> MappedStaging | None:
        """Memory to put from, as much as the daemon gives; None when it has none left. Hold `staging_lock`."""
        if self._staging is None:
            given = self.call(lambda number: wire.Staging(number, wanted), wire.StagingGiven)
            if not given.nbytes:
                return None
            if self._staging is None:
                raise DaemonLostError(f"the daemon is lost: {self._lost}")
        return self._staging

    # -- loads --------------------------------------------------------------------------------------------------------

    def begin_load(self) -> int:
        """A number for a load, whose tiles can be waited for until `end_load`."""
        with self._changed:
            self._last += 1
            self._tiles[self._last] = Progress()
            return self._last

    def wait_tile(self, load: int, tile: int) -> str | None:
        """Until a tile of a load is there; why it will not be. Raises DaemonLostError."""
        progress = self._tiles[load]

        def known() -> tuple[str | None] | None:
            return (progress.tiles[tile],) if tile in progress.tiles else None

        return self._wait(known, PATIENCE * 3)[0]

    def end_load(self, load: int) -> Progress:
        """How far it came."""
        with self._changed:
            return self._tiles.pop(load)

    # -- reading ------------------------------------------------------------------------------------------------------

    def _wait(self, ready: Callable[[], Reply | None], timeout: float | None) -> Reply:
        """Until `ready` gives something, reading from the socket where nobody else does. Raises DaemonLostError."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            with self._changed:
                while True:
                    if (found := ready()) is not None:
                        return found
                    if self.is_lost:
                        raise DaemonLostError(f"the daemon is lost: {self._lost}")
                    late = time.monotonic() > deadline
                    if late or not self._reading:
                        break
                    self._changed.wait(_LOOK)
                self._reading = not late or self._reading
            if late:
                self._lose("no answer in time")
                continue
            try:
                while ready() is None and not self.is_lost and time.monotonic() <= deadline:
                    self._read()
            finally:
                with self._changed:
                    self._reading = False
                    if self._lost is not None:
                        self._free()
                    self._changed.notify_all()

    def _read(self) -> None:
        """What there is now, or comes within a moment."""
        try:
            for payload in self._receive():
                self._hand_over(wire.reply(payload))
        except (OSError, ValueError, IndexError) as error:  # IndexError: a descriptor that did not come
            self._lose(str(error))

    def _receive(self) -> list[wire.Payload]:
        """Messages, good until the next call. Raises OSError, FrameError."""
        try:
            count, ancillary, _, _ = self._socket.recvmsg_into([self._buffer], _ANCILLARY, _CLOSE_ON_EXEC)
        except BlockingIOError:
            return []
        for level, kind, data in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                self._descriptors.extend(memoryview(data[: len(data) // _INT * _INT]).cast("i"))
        if not count:
            raise ConnectionResetError("the daemon closed the connection")
        return list(self._frames.feed(self._buffer[:count]))

    def _hand_over(self, reply: Any) -> None:
        with self._changed:
            if isinstance(reply, wire.Refused):
                raise wire.FrameError(f"the daemon gave us up: {reply.reason}")
            self._take_memory(reply)
            if isinstance(reply, wire.Tiles):
                if (progress := self._tiles.get(reply.load)) is not None:
                    progress.come(reply)
            elif not isinstance(reply, wire.Retired) and reply.id in self._awaited:
                self._replies[reply.id] = reply
            self._changed.notify_all()

    def _take_memory(self, reply: Any) -> None:
        """Map what comes with a reply: descriptors are in the order of the replies. Raises OSError, IndexError."""
        if isinstance(reply, (wire.Leased, wire.Brought)):
            for arena in reply.arenas:
                self.arenas.add(arena, self._descriptors.popleft())
        elif isinstance(reply, wire.StagingGiven) and reply.nbytes:
            self._staging = MappedStaging(self._descriptors.popleft(), reply.nbytes)
        elif isinstance(reply, wire.Retired):
            self.arenas.remove(reply.arena)


class Progress:
    """Tiles of a load that are there (None), or will not be, and why; and what was read from flash for it."""

    def __init__(self) -> None:
        self.tiles: dict[int, str | None] = {}
        self.bytes_read = 0

    def come(self, tiles: wire.Tiles) -> None:
        self.tiles.update(dict.fromkeys(tiles.there))
        self.tiles.update(tiles.failed)
        self.bytes_read = max(self.bytes_read, tiles.bytes_read)


_KINDS: dict[str, type[Exception]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.KVStoreError)
} | {"AssertionError": AssertionError, "TimeoutError": TimeoutError, "OSError": OSError}


def _raised(failed: wire.Failed) -> Exception:
    kind = _KINDS.get(failed.kind)
    if kind is None or issubclass(kind, DaemonLostError):
        return DaemonError(f"the daemon failed: {failed.reason}")
    return kind(failed.reason)
