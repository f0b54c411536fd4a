"""Functions run in processes of their own, so that a killed or crashed one is a result and not the end."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_CONTEXT = multiprocessing.get_context("forkserver")  # a fork of a process without threads: quick, and clean
_CONTEXT.set_forkserver_preload(["kvstore.store", "kvstore.daemon.service", "tests.known_kv"])


class ChildDied(Exception):
    """The process ended, or hung, before it answered."""


class Child:
    """A process that runs `work(connection, *arguments)`; talk to it by `receive` and `send`."""

    def __init__(self, work: Callable[..., None], *arguments: Any) -> None:
        self._ours, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=work, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, message: Any) -> None:
        try:
            self._ours.send(message)
        except OSError as error:
            raise ChildDied(self._end()) from error

    def receive(self, timeout: float = 60.0) -> Any:
        """The next message. Raises ChildDied when there will be none."""
        try:
            if self._ours.poll(timeout):
                return self._ours.recv()
        except (EOFError, OSError) as error:
            raise ChildDied(self._end()) from error
        self.kill()
        raise ChildDied(f"no answer in {timeout} s")

    def kill(self) -> list[Any]:
        """SIGKILL, wait, and return what was said until then."""
        self._process.kill()
        self._process.join()
        said = []
        try:
            while self._ours.poll():
                said.append(self._ours.recv())
        except (EOFError, OSError):
            pass
        self._ours.close()
        return said

    def join(self) -> None:
        self._process.join(60)

    def exit_code(self) -> int | None:
        """Wait for the end; None when it does not come."""
        self._process.join(60)
        return self._process.exitcode

    def said(self) -> list[Any]:
        """What it said by now and nobody received."""
        said = []
        try:
            while self._ours.poll():
                said.append(self._ours.recv())
        except (EOFError, OSError):
            pass
        return said

    def _end(self) -> str:
        self._process.join(10)
        return f"process ended with {self._process.exitcode}"


def served(connection: Connection, work: Callable[[Any], Any]) -> None:
    """Answer each message with `work(message)` until the other side closes."""
    while True:
        try:
            message = connection.recv()
        except EOFError:
            return
        connection.send(work(message))
