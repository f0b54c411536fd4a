"""Clients killed with kill -9 while they hold leases, load from flash and stage puts: nothing of them is left.

Beside them a client that behaves goes on; what its look-ups take is measured with and without the killing.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from kvstore.daemon.remote_store import RemoteStore, connect
from kvstore.watch.stats import Stats
from tests.daemon.running import Daemon, descriptors
from tests.known_kv import empty, identity, load, prompt, put, small_profile

from .child import Child

_PROMPTS = 12
_TOKENS = 200
_POOLS = 8  # threads that the daemon may still start for its work, however many clients there are

PROFILE = small_profile(
    hot_bytes=32 * 4096, warm_bytes=512 * 4096, cold_bytes=32 << 20, staging_bytes=4 << 20
)


@dataclass
class KilledClients:
    """What came of it. `p99`, `unkilled_p99`: seconds of another client's look-ups beside these, killed or alive."""

    killed: int = 0
    leases: int = 0
    """Held by clients when they were killed, as the daemon counted."""
    p99: float = 0.0
    unkilled_p99: float = 0.0
    leaks: list[str] = field(default_factory=list)


def kill_clients(folder: Path, clients: int, seed: int, at_once: int = 4) -> KilledClients:
    """Kill so many clients, a few at a time, and look at what is left of them."""
    running = Daemon(folder / "kv", PROFILE)
    running.start()
    order, result = random.Random(seed), KilledClients()
    try:
        with connect(running.socket, identity=identity(), fallback="none") as store:
            for which in range(_PROMPTS):
                put(store, prompt(which, _TOKENS))  # type: ignore[arg-type]
            store.flush()
            children = _start_some(running, order, at_once)  # brings up whatever stays up
            unkilled = Prober(running)
            time.sleep(max(2.0, clients / 50))  # about as many look-ups as beside those that are killed
            result.unkilled_p99 = unkilled.stop()
            for child in children:
                child.kill()
            before = Left.of(running, store)
            prober = Prober(running)
            while result.killed < clients:
                count = min(at_once, clients - result.killed)
                _kill_some(running, order, count)
                result.killed += count
            result.p99 = prober.stop()
            result.leases = store.stats().counts["leases_of_lost_clients"]
            result.leaks = before.leaks(Left.of(running, store))
            for which in range(_PROMPTS):
                if load(store, prompt(which, _TOKENS)) != _TOKENS:  # type: ignore[arg-type]
                    result.leaks.append(f"prompt {which} is gone")
        if (code := running.stop()) != 0:
            result.leaks.append(f"the daemon ended with {code}")
    finally:
        running.kill()
    return result


def _start_some(running: Daemon, order: random.Random, count: int) -> list[Child]:
    children = [Child(_busy, str(running.socket), order.randrange(1 << 30)) for _ in range(count)]
    for child in children:
        assert child.receive() == "busy"
    return children


def _kill_some(running: Daemon, order: random.Random, count: int) -> None:
    children = _start_some(running, order, count)
    time.sleep(order.uniform(0, 0.05))
    for child in children:
        child.kill()


def _busy(connection: Connection, socket: str, seed: int) -> None:
    """Hold leases, load, and put, until killed."""
    order = random.Random(seed)
    store = connect(socket, identity=identity(), fallback="none")
    held, buffer = [], empty(_TOKENS)
    for which in order.sample(range(_PROMPTS), 3):
        lease = store.lease(store.lookup(prompt(which, _TOKENS)))
        load_ = lease.layer_groups(buffer)
        next(load_)
        held.append((lease, load_))
    connection.send("busy")
    while True:
        which = order.randrange(_PROMPTS)
        action = order.randrange(4)
        if action == 0:
            put(store, prompt(1000 + order.randrange(1 << 20), _TOKENS))  # type: ignore[arg-type]
        elif action == 1:
            store.demote(store.lookup(prompt(which, _TOKENS)))
        else:
            load(store, prompt(which, _TOKENS))  # type: ignore[arg-type]


class Prober:
    """A process that looks up, over and over."""

    def __init__(self, running: Daemon) -> None:
        self._child = Child(_probe, str(running.socket))
        assert self._child.receive() == "ready"

    def stop(self) -> float:
        """The 99th percentile, in seconds."""
        self._child.send("stop")
        p99: float = self._child.receive()
        self._child.join()
        return p99


def _probe(connection: Connection, socket: str) -> None:
    times = []
    with connect(socket, identity=identity(), fallback="none") as store:
        tokens = prompt(0, _TOKENS)
        store.lookup(tokens)
        connection.send("ready")
        while not connection.poll(0.001):
            started = time.perf_counter()
            store.lookup(tokens)
            times.append(time.perf_counter() - started)
    connection.send(sorted(times)[int(len(times) * 0.99)])


@dataclass
class Left:
    """What a daemon has of its clients."""

    descriptors: int
    threads: int
    maps: int
    """Mappings of staging memory."""
    leased: int

    @classmethod
    def of(cls, running: Daemon, store: RemoteStore) -> Left:
        """Once it has seen that clients are gone."""
        stats: Stats = store.stats()
        deadline = time.monotonic() + 20
        while stats.hot.leased + stats.warm.leased + stats.cold.leased and time.monotonic() < deadline:
            time.sleep(0.02)
            stats = store.stats()
        store.flush()
        store.check()
        process = Path(f"/proc/{running.pid}")
        maps = (process / "maps").read_text().count("kvstore-staging")
        return cls(
            descriptors=descriptors(running.pid),
            threads=len(os.listdir(process / "task")),
            maps=maps,
            leased=stats.hot.leased + stats.warm.leased + stats.cold.leased,
        )

    def leaks(self, after: Left) -> list[str]:
        pairs = ((name, getattr(self, name), getattr(after, name)) for name in self.__dataclass_fields__)
        spare = {"threads": _POOLS}
        return [
            f"{name}: {then} before, {now} now"
            for name, then, now in pairs
            if now > then + spare.get(name, 0)
        ]
