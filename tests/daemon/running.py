"""A daemon in a process of its own, for tests and benches."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvstore.daemon.client import Channel
from kvstore.daemon.service import serve
from kvstore.errors import DaemonError
from kvstore.profile import Profile
from tests.faults.child import Child, ChildDied
from tests.known_kv import small_profile


class Daemon:
    """Serves the directory `path` on a socket beside it, from `start` until `stop` or `kill`."""

    def __init__(self, path: Path, profile: Profile | None = None, **options: Any) -> None:
        self.path = path
        self.socket = path.with_name(path.name + ".run") / "d.sock"
        self._profile = small_profile() if profile is None else profile
        self._options = options
        self._child: Child | None = None
        self.pid = 0

    def start(self) -> None:
        """Return once it takes clients. Raises ChildDied with what it said in the end."""
        child = self._child = Child(_serve, str(self.path), self._profile, str(self.socket), self._options)
        self.pid = child.receive()
        deadline = time.monotonic() + 60
        while True:
            try:
                Channel(self.socket, "is it there").close()
                return
            except DaemonError:
                if (said := child.said()) or time.monotonic() > deadline:
                    raise ChildDied(str(said)) from None
                time.sleep(0.01)

    def start_and_see(self) -> None:
        """Start where something else listens on the socket. Raises ChildDied with what it said."""
        child = self._child = Child(_serve, str(self.path), self._profile, str(self.socket), self._options)
        self.pid = child.receive()
        raise ChildDied(str(child.receive()))

    def stop(self) -> int | None:
        """SIGTERM; the exit code."""
        assert self._child is not None
        os.kill(self.pid, signal.SIGTERM)
        return self._child.exit_code()

    def kill(self) -> None:
        """SIGKILL."""
        assert self._child is not None
        self._child.kill()


def _serve(connection: Connection, path: str, profile: Profile, socket: str, options: dict[str, Any]) -> None:
    connection.send(os.getpid())
    try:
        serve(path, profile, socket, **options)
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        sys.exit(1)


def descriptors(pid: int, *, arenas: bool = False) -> int:
    """How many a daemon has open; or of its arenas, which it makes when they are needed, within its budgets."""
    named = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            named.append(os.readlink(each).startswith(("/memfd:kvstore-hot", "/memfd:kvstore-warm")))
    return sum(is_arena == arenas for is_arena in named)


@contextmanager
def daemon(path: Path, profile: Profile | None = None, **options: Any) -> Iterator[Daemon]:
    running = Daemon(path, profile, **options)
    running.start()
    try:
        yield running
    finally:
        running.kill()
