"""Requests found by a fuzzer that sees which code they reach, carried out by a daemon's loop in this process.

    pip install atheris
    python -m tests.daemon.guided_fuzz -runs=1000000 [-seed=N]

Each input is the payload of one frame. Behind it goes a request that is sound: it has to be answered within a second,
or the connection closed. No error may come that nobody foresaw. `fuzz` sends what it makes up to a daemon of its own.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import tempfile
import time
from pathlib import Path

import atheris  # type: ignore[import-not-found,import-untyped,unused-ignore]

with atheris.instrument_imports(include=["kvstore"]):
    import socket

    from kvstore.daemon import wire
    from kvstore.daemon.server import Server
    from kvstore.open_directory import OpenDirectory
    from tests.known_kv import identity, small_profile

    from .test_wire import MESSAGES

_SECONDS = 1.0  # of processor time: other work may keep this process waiting
_MOST_WAITED = 60
_ASKED = 1 << 40  # id of the sound request


class InProcess:
    """A daemon and its client on one loop, which runs only while an answer is awaited."""

    def __init__(self, folder: Path) -> None:
        self._loop = asyncio.new_event_loop()
        self._path = folder / "d.sock"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self._path))
        listener.listen()
        shared = OpenDirectory(folder / "kv", small_profile(), walled=True)
        self._loop.run_until_complete(self._serve(shared, listener))
        self._connect()

    async def _serve(self, shared: OpenDirectory, listener: socket.socket) -> None:
        self._server = Server(shared, listener)
        self._server.start()

    def _connect(self) -> None:
        self._client = socket.socket(socket.AF_UNIX)
        self._client.connect(str(self._path))
        self._frames, self._answers, self._closed = wire.Frames(), list[bytes](), False
        self._loop.add_reader(self._client.fileno(), self._came)
        for message in (
            wire.Hello(wire.PROTOCOL, "guided"),
            wire.Open(1, identity().to_bytes()),
            wire.Staging(2, 1 << 16),
        ):
            self._client.sendall(wire.frame(message))
            self._run()
            self._answers.clear()

    def give(self, payload: bytes) -> None:
        """Send one frame. Raises AssertionError for an answer that none should get, or for none."""
        sound = wire.frame(wire.Held(_ASKED, 1, b"\1\0\0\0"))
        self._client.sendall(len(payload).to_bytes(wire.HEADER, "little") + payload + sound)
        while not self._closed:
            self._run()
            answers = [wire.reply(each) for each in self._answers]
            for answer in answers:
                assert not (isinstance(answer, wire.Failed) and answer.kind == "internal"), answer
            self._answers.clear()
            if any(getattr(answer, "id", None) == _ASKED for answer in answers):
                return
        self._client.close()
        self._connect()

    def _run(self) -> None:
        """Until something comes."""
        used, waited = time.process_time(), 0

        def late() -> None:
            nonlocal waited, timer
            waited += 1
            if time.process_time() - used > _SECONDS or waited > _MOST_WAITED:
                self._loop.stop()
            else:
                timer = self._loop.call_later(_SECONDS, late)

        timer = self._loop.call_later(_SECONDS, late)
        self._loop.run_forever()
        timer.cancel()
        assert self._answers or self._closed, f"no answer after {waited} s"

    def _came(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._client, 1 << 16, 64)
        for descriptor in descriptors:
            socket.close(descriptor)
        if not data:
            self._closed = True
            self._loop.remove_reader(self._client.fileno())
        self._answers += self._frames.feed(data)
        if self._answers or self._closed:
            self._loop.stop()


def main() -> None:
    logging.getLogger("kvstore").setLevel(logging.CRITICAL)  # each refusal is worth a warning
    with tempfile.TemporaryDirectory() as folder:
        seeds = Path(folder) / "seeds"
        seeds.mkdir()
        for message in MESSAGES[1:]:
            (seeds / type(message).__name__).write_bytes(wire.frame(message)[wire.HEADER :])
        daemon = InProcess(Path(folder))

        def one_input(payload: bytes) -> None:
            if payload:
                daemon.give(payload)

        atheris.Setup([sys.argv[0], str(seeds), "-max_len=512", *sys.argv[1:]], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
