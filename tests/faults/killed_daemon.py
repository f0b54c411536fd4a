"""The daemon killed at random points under load: clients go on and come back, and nothing durable is lost.

Each client knows the KV of its tokens, so every read is compared bit for bit.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from kvstore.daemon import wire
from kvstore.daemon.client import Channel
from kvstore.daemon.remote_store import RemoteStore, connect
from kvstore.errors import DaemonError
from tests.daemon.running import Daemon
from tests.known_kv import identity, load, prompt, put, small_profile

from .child import Child, ChildDied

_PROMPTS = 30
_LONGEST = 120
_CLIENTS = 3

PROFILE = small_profile(warm_bytes=96 * 4096, cold_bytes=64 << 20)
"""Flash holds all that is ever flushed."""


@dataclass
class KilledDaemon:
    """What a series of kills came to; `failures` is empty when every promise was kept."""

    kills: int = 0
    reads: int = 0
    tokens: int = 0
    durable: int = 0
    reconnected: int = 0
    slowest_return: float = 0.0
    """Seconds from when a new daemon took clients until the last client was connected to it."""
    failures: list[str] = field(default_factory=list)


def kill_daemon(folder: Path, kills: int, seed: int) -> KilledDaemon:
    """Kill and restart the daemon `kills` times under the same clients."""
    order, result = random.Random(seed), KilledDaemon()
    running = Daemon(folder / "kv", PROFILE)
    running.start()
    clients = [Child(_client, str(running.socket), seed * 100 + number) for number in range(_CLIENTS)]
    try:
        for client in clients:
            assert client.receive() == "something is durable"
        for _ in range(kills):
            time.sleep(order.uniform(0.0, 0.3))
            running.kill()
            result.kills += 1
            time.sleep(order.uniform(0.0, 0.05))
            running.start()
            _see_clients_return(running, clients, result)
            if result.failures:
                break
        for client in clients:
            client.send("stop")
        durable: dict[int, int] = {}
        for client in clients:
            _collect(client, result, durable)
        with connect(running.socket, identity=identity(), fallback="none") as store:
            for which, length in durable.items():
                found = load(store, prompt(which, _LONGEST))  # type: ignore[arg-type]
                result.durable += length
                if found < length:
                    result.failures.append(
                        f"{length} tokens of prompt {which} were durable, {found} are left"
                    )
            store.check()
        if (code := running.stop()) != 0:
            result.failures.append(f"the daemon ended with {code}")
    finally:
        running.kill()
        for client in clients:
            client.kill()
    return result


def _see_clients_return(running: Daemon, clients: list[Child], result: KilledDaemon) -> None:
    started = time.monotonic()
    with connect(running.socket, identity=identity(), fallback="none") as store:
        while (
            store.stats().counts.get("daemon_clients", 0) < len(clients) + 2
        ):  # the one that waited, and this
            time.sleep(0.005)
            if time.monotonic() - started > 30:
                result.failures.append("a client did not come back")
                return
    result.reconnected += len(clients)
    result.slowest_return = max(result.slowest_return, time.monotonic() - started)


def _collect(client: Child, result: KilledDaemon, durable: dict[int, int]) -> None:
    try:
        said: Counter[str] | str = client.receive()
        if isinstance(said, str):
            result.failures.append(said)
            return
        for which, length in client.receive().items():
            durable[which] = max(durable.get(which, 0), length)
        result.reads += said["reads"]
        result.tokens += said["tokens"]
    except ChildDied as error:
        result.failures.append(f"a client died: {error}")


def _client(connection: Connection, socket: str, seed: int) -> None:
    """Look up, load, put and flush, whatever the daemon does; every read is compared."""
    order, counts = random.Random(seed), Counter[str]()
    durable: dict[int, int] = {}
    taken: dict[int, int] = {}
    taker: Channel | None = (
        None  # the connection over which `taken` was put: what a killed daemon took is gone with it
    )
    try:
        with connect(socket, identity=identity(), fallback="none") as store:
            which = seed % _PROMPTS
            put(store, prompt(which, _LONGEST))  # type: ignore[arg-type]
            store.flush()
            durable[which] = _LONGEST
            connection.send("something is durable")
            while not connection.poll():
                which, length = order.randrange(_PROMPTS), order.randrange(1, _LONGEST)
                action = order.randrange(8)
                if action < 3:
                    before = _channel(store)
                    refused = put(store, prompt(which, length)).refused  # type: ignore[arg-type]
                    if before is not taker:
                        taken, taker = {}, before
                    if not refused and before is not None and _channel(store) is before:
                        taken[which] = max(taken.get(which, 0), length)
                elif action == 3 and taker is not None:
                    try:
                        taker.call(wire.Flush, wire.Done, 30)
                    except DaemonError:
                        taken = {}
                    for key, value in taken.items():
                        durable[key] = max(durable.get(key, 0), value)
                elif action == 4:
                    store.demote(store.lookup(prompt(which, length)))
                else:
                    counts["tokens"] += load(store, prompt(which, length))  # type: ignore[arg-type]
                    counts["reads"] += 1
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(counts)
    connection.send(durable)


def _channel(store: RemoteStore) -> Channel | None:
    try:
        return store._link.channel()
    except DaemonError:
        return None
