"""Frames that no client of ours would send, as many as asked for, to one daemon; it must not crash, hang or grow.

    python -m tests.daemon.fuzz --frames 1000000 [--seed N]

Three kinds: valid requests with random fields, valid frames with bytes changed, and bytes at random. A connection that
the daemon closes is made anew. Beside it, a client that behaves measures how long its look-ups take.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvstore.daemon import wire
from kvstore.daemon.remote_store import connect
from tests.known_kv import identity, load, prompt, put, small_profile

from .raw_client import RawClient
from .running import Daemon, daemon, descriptors
from .test_wire import MESSAGES

_BATCH = 30  # frames sent at a time, at most; the first that is no request ends a batch, and the connection
_OWNERS = [identity(name).to_bytes() for name in "abc"]


@dataclass
class Fuzzed:
    """What came of it; growth in bytes and descriptors, after the first tenth.

    requests: those that the daemon took for one. internal: those that failed in a way that nobody foresaw.
    """

    frames: int = 0
    requests: int = 0
    closed: int = 0
    internal: int = 0
    slowest: float = 0.0
    growth: int = 0
    descriptors: int = 0


def fuzz(running: Daemon, frames: int, seed: int) -> Fuzzed:
    """Raises AssertionError, TimeoutError when the daemon does not go on as if nothing had been."""
    order = random.Random(seed)
    result = Fuzzed()
    before = (0, 0)
    with connect(running.socket, identity=identity("good"), fallback="none") as good:
        put(good, prompt(1, 50))  # type: ignore[arg-type]
        client = _greeted(running)
        batches = 0
        while result.frames < frames:
            requests, bad = _batch(order)
            try:
                client.send_bytes(b"".join([*requests, bad]))
                if bad:
                    client.socket.shutdown(socket.SHUT_WR)  # it may be the beginning of a longer frame
                wanted = sum(wire.request(each[wire.HEADER :]).id != wire.NO_REPLY for each in requests)
                _read(client, wanted, result, until_closed=bool(bad))
            except TimeoutError as error:
                raise AssertionError("the daemon hangs") from error
            except (OSError, EOFError):
                result.closed += 1
                client.close()
                client = _greeted(running)
            result.frames += len(requests) + bool(bad)
            result.requests += len(requests)
            batches += 1
            if batches % 20 == 0:
                started = time.perf_counter()
                found = load(good, prompt(1, 50))  # type: ignore[arg-type]
                result.slowest = max(result.slowest, time.perf_counter() - started)
                if not found:  # what the frames put is newer
                    put(good, prompt(1, 50))  # type: ignore[arg-type]
            if result.frames <= frames // 10:
                before = _resident(running.pid), descriptors(running.pid)
        client.close()
        good.flush()
        good.check()
        result.growth = _resident(running.pid) - before[0]
        result.descriptors = descriptors(running.pid) - before[1]
    return result


def _batch(order: random.Random) -> tuple[list[bytes], bytes]:
    """Frames that are requests, and behind them perhaps one that is none."""
    requests: list[bytes] = []
    while len(requests) < _BATCH:
        frame = _frame(order)
        try:
            assert int.from_bytes(frame[: wire.HEADER], "little") == len(frame) - wire.HEADER
            wire.request(frame[wire.HEADER :])
        except (wire.FrameError, AssertionError):
            return requests, frame
        requests.append(frame)
    return requests, b""


def _greeted(running: Daemon) -> RawClient:
    client = RawClient(running.socket)
    client.greet()
    client.send(wire.Open(1, _OWNERS[0]))
    client.receive()
    client.send(wire.Staging(2, 1 << 16))
    client.receive()
    return client


def _read(client: RawClient, wanted: int, result: Fuzzed, *, until_closed: bool) -> None:
    """Take the answers. Raises OSError or EOFError when the connection is closed."""
    while wanted or until_closed:
        answer = client.receive()
        if isinstance(answer, wire.Failed):
            result.internal += answer.kind == "internal"
        if not isinstance(answer, wire.Tiles):
            wanted -= 1


def _frame(order: random.Random) -> bytes:
    kind = order.random()
    if kind < 0.6:
        return bytes(wire.frame(_varied(order, order.choice(MESSAGES[1:]))))
    frame = bytearray(wire.frame(_varied(order, order.choice(MESSAGES))))
    if kind < 0.97:  # the length stays right, so that what follows is still frames
        for _ in range(order.randrange(1, 4)):
            frame[order.randrange(wire.HEADER, len(frame))] = order.randrange(256)
        return bytes(frame)
    return order.randbytes(order.randrange(1, 200))


def _varied(order: random.Random, message: Any) -> Any:
    """The message with some fields changed, each to something of its kind."""
    changes = {}
    for name in message.__struct_fields__:
        if order.random() < 0.5:
            continue
        changes[name] = _value(order, name, getattr(message, name))
    return msgspec.structs.replace(message, **changes)


def _value(order: random.Random, name: str, old: Any) -> Any:
    if name == "identity":
        return order.choice([*_OWNERS, order.randbytes(order.randrange(60))])
    if name in ("everything", "older_than"):  # who runs the daemon may forget all of everybody's
        return old
    if isinstance(old, bool):
        return order.random() < 0.5
    if isinstance(old, int):
        return order.choice([0, 1, 2, 3, order.randrange(100), order.randrange(1 << 53)])
    if isinstance(old, float):
        return order.choice([0.0, -1.0, 1e300, float("nan")])
    if isinstance(old, bytes):
        return prompt(order.randrange(4), order.randrange(1, 80)).astype("<i4").tobytes()
    if isinstance(old, str) and name in ("text", "verb", "adapter", "client"):
        return "".join(chr(order.randrange(1, 500)) for _ in range(order.randrange(8)))
    if isinstance(old, list) and old and isinstance(old[0], msgspec.Struct):
        return [_varied(order, each) for each in old]
    return old


def _resident(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, daemon(Path(folder) / "kv", small_profile()) as running:
        started = time.perf_counter()
        result = fuzz(running, args.frames, args.seed)
        took = time.perf_counter() - started
        code = running.stop()
    print(
        f"{result.frames:,} frames in {took:.0f} s: {result.requests:,} of them requests, {result.closed:,} "
        f"connections closed, {result.internal} answers of an error within; a client that behaves waited "
        f"{result.slowest * 1e3:.0f} ms at most; memory grew by {result.growth / 1e6:.1f} MB, descriptors by "
        f"{result.descriptors}; the daemon ended with {code}"
    )
    bad = result.internal or result.slowest > 1 or result.growth > 32e6 or result.descriptors > 2
    return int(code != 0 or bool(bad))


if __name__ == "__main__":
    sys.exit(main())
