"""Client processes of `bench.daemon`: what they do, and what they saw."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.api import Store
from kvstore.daemon.remote_store import connect
from kvstore.identity import Identity
from kvstore.layout import Layout
from kvstore.pipeline.rope import Rope
from tests.faults.child import Child
from tests.known_kv import empty, identity, known_kv, matches, prompt

SMALL = identity("small", layout=Layout.uniform(layers=1, kv_heads=1, head_dim=4, rope=None, dtype="float16"))
"""16 bytes a token: many blocks in little memory."""

REAL = identity(
    "real",
    layout=Layout.uniform(layers=30, kv_heads=3, head_dim=64, rope=Rope(64, 1e4, 64), dtype="float16"),
)
"""SmolLM2-135M's layout, 23 KB a token."""

Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class Use:
    """What one client does: `seconds` of operations by their shares, on `prompts` prompts of `length` tokens."""

    owner: Identity
    seconds: float
    lookups: float = 1.0
    leases: float = 0.0
    puts: float = 0.0
    prompts: int = 64
    length: int = 8192
    verify: bool = False


@dataclass
class Seen:
    """Seconds of each operation, by kind, and what went wrong."""

    lookup: NDArray[np.float64]
    lease: NDArray[np.float64]
    put: NDArray[np.float64]
    hits: int
    tokens: int
    wrong: int
    seconds: float


def run(
    socket: Path, uses: list[Use], watch: Callable[[], None] | None = None, every: float = 1.0
) -> list[Seen]:
    """A client, a process of its own, for each use, all at once; `watch` is called now and then meanwhile."""
    clients = [Child(_client, str(socket), use, seed) for seed, use in enumerate(uses)]
    try:
        for client in clients:
            assert client.receive(120) == "ready"
        for client in clients:
            client.send("go")
        until = time.monotonic() + max(use.seconds for use in uses)
        while watch is not None and time.monotonic() < until:
            watch()
            time.sleep(every)
        return [client.receive(max(use.seconds for use in uses) * 4 + 120) for client in clients]
    finally:
        for client in clients:
            client.kill()


def _client(connection: Connection, socket: str, use: Use, seed: int) -> None:
    with connect(socket, identity=use.owner, fallback="none") as store:
        work = Work(store, use, seed)
        work.step()
        connection.send("ready")
        connection.recv()
        connection.send(work.run())


class Work:
    """Operations on a store, in this process or a daemon, in a closed loop."""

    def __init__(self, store: Store, use: Use, seed: int) -> None:
        self._store = store
        self._use = use
        self._random = np.random.default_rng(seed)
        self._times: dict[str, list[float]] = {"lookup": [], "lease": [], "put": []}
        self._buffer = empty(use.length, use.owner.layout) if use.leases else None
        self._hits = self._tokens = self._wrong = 0
        self._prompts: dict[int, Tokens] = {}

    def run(self) -> Seen:
        for times in self._times.values():
            times.clear()
        started = time.perf_counter()
        while time.perf_counter() - started < self._use.seconds:
            self.step()
        took = time.perf_counter() - started
        arrays = {kind: np.array(times) for kind, times in self._times.items()}
        return Seen(**arrays, hits=self._hits, tokens=self._tokens, wrong=self._wrong, seconds=took)

    def step(self) -> None:
        use = self._use
        which = int(self._random.integers(use.prompts))
        if which not in self._prompts:
            self._prompts[which] = prompt(which, use.length)
        tokens = self._prompts[which]
        kind = float(self._random.random()) * (use.lookups + use.leases + use.puts)
        if kind < use.lookups:
            self._timed("lookup", lambda: self._store.lookup(tokens))
        elif kind < use.lookups + use.leases:
            self._lease(tokens)
        else:
            count = int(self._random.integers(1, use.length // 256 + 1)) * 256
            self._put(tokens[:count])

    def _lease(self, tokens: Tokens) -> None:
        buffer = self._buffer
        assert buffer is not None

        def work() -> int:
            with self._store.find(tokens) as lease:
                return lease.load_into(buffer)

        length = self._timed("lease", work)
        self._hits += length > 0
        self._tokens += length
        if self._use.verify and not matches(buffer, tokens, self._use.owner, length):
            self._wrong += 1

    def _put(self, tokens: Tokens) -> None:
        kv = known_kv(tokens, self._use.owner)
        self._timed("put", lambda: self._store.put(tokens, kv))

    def _timed(self, kind: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        self._times[kind].append(time.perf_counter() - started)
        return result


def cpu_seconds(pid: int) -> float:
    """Of a process, user and system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int) -> dict[str, float]:
    """Rss and Pss of a process, in MiB; shared memory counts in Pss by the share of each process that maps it."""
    found = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("Rss", "Pss", "Private_Dirty"):
            found[name] = int(rest.split()[0]) / 1024
    return found


def shared_mib(pid: int) -> float:
    """What a process maps of memory that it shares, as far as it is there, in MiB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssShmem"):
            return int(line.split()[1]) / 1024
    return 0.0
