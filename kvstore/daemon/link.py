"""What a client's views of one daemon share: the connection, made anew when it breaks, and what serves meanwhile."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from kvstore.errors import DaemonError, DaemonLostError, StoreClosedError
from kvstore.flash.keys import KeySource
from kvstore.identity import Identity
from kvstore.profile import Profile
from kvstore.store import KVStore, open_store

from . import wire
from .client import Channel
from .client_hot import ClientHot
from .texts import Texts

if TYPE_CHECKING:
    from .remote_lease import RemoteLease

Fallback = Literal["embedded", "none"]

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0  # seconds between attempts to reach a daemon that is away
_LOAD_THREADS = 2

log = logging.getLogger(__name__)

_links: weakref.WeakSet[Link] = weakref.WeakSet()


class Link:
    """Thread-safe. `profile` is that of the store which serves while the daemon is away, with `fallback` embedded."""

    def __init__(
        self, path: Path, profile: Profile, fallback: Fallback, source: KeySource | None = None
    ) -> None:
        self.path = path
        self.source = source
        """Has the keys of tenants who give theirs to the daemon."""
        self.profile = profile
        self.pool = ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix="kvstore-remote-load")
        self.is_closed = False
        self._fallback = fallback
        self._lock = threading.Lock()
        self._channel: Channel | None = None
        self._pause = 0.0
        self._next_attempt = 0.0
        self._away: str | None = None
        self._embedded: KVStore | None = None
        self._hot: ClientHot | None = None
        self._texts: dict[bytes, Texts] = {}
        self._abandoned: deque[tuple[Channel, int]] = deque()
        self._finalizers: weakref.WeakKeyDictionary[RemoteLease, Any] = weakref.WeakKeyDictionary()
        _links.add(self)

    def begin_anew(self) -> None:
        """In a child of the process that made it, whose threads do not exist here: what they held is free.

        What was the parent's stays as it is; the next request makes a connection of its own.
        """
        self._lock = threading.Lock()
        self.pool = ThreadPoolExecutor(_LOAD_THREADS, thread_name_prefix="kvstore-remote-load")
        if self._channel is not None:
            self._channel.begin_anew()
        if self._hot is not None:
            self._hot.begin_anew()

    def channel(self) -> Channel:
        """The connection, made if there is none. Raises DaemonLostError when the daemon is away, StoreClosedError."""
        with self._lock:
            if self.is_closed:
                raise StoreClosedError("this store was closed; connect again")
            if self._channel is not None and not self._channel.is_lost:
                self._end_abandoned()
                return self._channel
            if time.monotonic() < self._next_attempt:
                raise DaemonLostError(f"the daemon is away: {self._away}")
            try:
                self._channel = Channel(self.path, Path(sys.argv[0]).name)
            except DaemonError as error:
                self._pause = min(_LONGEST_PAUSE, max(_FIRST_PAUSE, self._pause * 2))
                self._next_attempt = time.monotonic() + self._pause
                if self._away is None:
                    instead = "a store of this process" if self._fallback == "embedded" else "no cache"
                    log.warning("%s; %s serves until there is one", error, instead)
                self._away = str(error)
                raise DaemonLostError(str(error)) from error
            if self._away is not None:
                log.warning("the daemon at %s is back", self.path)
            self._pause, self._away = 0.0, None
            return self._channel

    def embedded(self, identity: Identity) -> KVStore | None:
        """The store that serves while the daemon is away; None for no cache."""
        if self._fallback == "none":
            return None
        with self._lock:
            if self.is_closed:
                raise StoreClosedError("this store was closed; connect again")
            if self._embedded is None:
                self._embedded = open_store(None, identity=identity, profile=self.profile)
        return self._embedded.view(identity)

    def hot(self, channel: Channel) -> ClientHot | None:
        """This process's own hot tier, one a connection; None where the daemon shares its."""
        if not channel.welcome.hot_in_client:
            return None
        with self._lock:
            before = self._hot
            if before is not None and before.channel is channel:
                return before
            self._hot = ClientHot(channel)
        if before is not None:
            before.close()
        return self._hot

    def texts(self, identity: Identity) -> Texts | None:
        """What reads this identity's tokens to the daemon."""
        return self._texts.get(identity.digest())

    def read_with(self, identity: Identity, made: Callable[[], Texts]) -> None:
        """Read this identity's tokens to the daemon from now on, with what `made` gives; the first one counts."""
        with self._lock:
            if self.is_closed:
                raise StoreClosedError("this store was closed; connect again")
            if identity.digest() not in self._texts:
                self._texts[identity.digest()] = made()

    def holds(self, lease: RemoteLease, channel: Channel, handle: int) -> None:
        """A lease begins. One that is collected without a release ends with the next request."""
        finalizer = weakref.finalize(lease, self._abandoned.append, (channel, handle))
        finalizer.atexit = False
        self._finalizers[lease] = finalizer

    def releases(self, lease: RemoteLease) -> None:
        self._finalizers.pop(lease).detach()

    def close(self) -> None:
        """The first close counts."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            channel, embedded = self._channel, self._embedded
        if channel is not None and not channel.is_lost:
            channel.close()
        for texts in self._texts.values():
            texts.close()
        if self._hot is not None:
            self._hot.close()
        self.pool.shutdown(wait=True)
        if embedded is not None:
            embedded.close()

    def _end_abandoned(self) -> None:
        while self._abandoned:
            channel, handle = self._abandoned.popleft()
            log.warning("a lease was never released; use `with`")
            with contextlib.suppress(DaemonError):
                channel.tell(wire.Release(wire.NO_REPLY, handle))


def _in_child() -> None:
    for link in list(_links):
        link.begin_anew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
