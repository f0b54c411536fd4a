"""A client that says what it is told to: for all that `Channel` would never do."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kvstore.daemon import wire
from kvstore.identity import Identity


class RawClient:
    """Connected, not greeted."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(20)
        self.socket.connect(str(path))
        self._frames = wire.Frames()
        self._come: list[bytes] = []
        self.descriptors: list[int] = []

    def greet(self) -> wire.Welcome:
        self.send(wire.Hello(wire.PROTOCOL, "raw"))
        welcome = wire.greeting(self.payload())
        assert isinstance(welcome, wire.Welcome)
        return welcome

    def open(self, identity: Identity) -> int:
        return self.ask(wire.Open(1, identity.to_bytes())).view  # type: ignore[no-any-return]

    def send(self, message: msgspec.Struct) -> None:
        self.socket.sendall(wire.frame(message))

    def send_bytes(self, data: bytes) -> None:
        self.socket.sendall(data)

    def ask(self, message: msgspec.Struct) -> Any:
        self.send(message)
        return self.receive()

    def receive(self) -> Any:
        return wire.reply(self.payload())

    def payload(self) -> bytes:
        """The next message. Raises EOFError when the daemon has closed, TimeoutError."""
        while not self._come:
            data, descriptors, _, _ = socket.recv_fds(self.socket, 65536, 64)
            self.descriptors += descriptors
            if not data:
                raise EOFError
            self._come += self._frames.feed(data)
        return self._come.pop(0)

    def close(self) -> None:
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors = []


@contextmanager
def raw_client(path: Path) -> Iterator[RawClient]:
    client = RawClient(path)
    try:
        yield client
    finally:
        client.close()
