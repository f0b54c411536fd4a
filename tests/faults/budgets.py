"""Ten times more KV than fits: what disk and memory really take, next to what was allowed and what is accounted for."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from kvstore.layout import Layout
from kvstore.pipeline.rope import Rope
from kvstore.profile import MIB, Profile
from kvstore.store import KVStore, open_store
from tests.known_kv import empty, identity, known_kv, matches, prompt

from .child import Child

SLACK = 16 * MIB
"""What memory may grow by beyond the tiers and one block: code, threads, encoding and decoding of blocks in flight."""

_LAYOUT = Layout.uniform(layers=4, kv_heads=4, head_dim=64, rope=Rope(64, 1e4, 64), dtype="float16")
PROFILE = Profile(
    block_tokens=64,
    hot_bytes=4 * MIB,
    warm_bytes=8 * MIB,
    cold_bytes=16 * MIB,
    frame_bytes=64 * 1024,
)
BLOCK_BYTES = _LAYOUT.block_bytes(PROFILE.block_tokens)


@dataclass
class Spent:
    """The most that was seen at any moment, in bytes; `failures` is empty when all accounts were right."""

    put: int = 0
    disk: int = 0
    resident_growth: int = 0
    samples: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def overfill(directory: Path, times: float, seed: int) -> Spent:
    """Put `times` the largest budget in a process of its own; everything else is used as well meanwhile."""
    child = Child(_overfill, str(directory), times, seed)
    spent = child.receive(600)
    child.join()
    assert isinstance(spent, Spent)
    return spent


def disk_bytes(directory: Path) -> int:
    """Bytes that a directory really takes: allocated blocks of all files and folders in it, itself included."""
    total = _blocks(directory)
    for folder, folders, files in os.walk(directory):
        total += sum(_blocks(Path(folder, name)) for name in (*folders, *files))
    return total


def _blocks(path: Path) -> int:
    try:
        return path.lstat().st_blocks * 512
    except FileNotFoundError:  # renamed or removed meanwhile
        return 0


def _overfill(connection: Connection, directory: str, times: float, seed: int) -> None:
    spent = Spent()
    owner = identity("a", layout=_LAYOUT)
    buffers = {length: known_kv(prompt(0, length), owner) for length in (200,)}  # warm up before measuring
    del buffers
    before = _resident()
    with open_store(directory, identity=owner, profile=PROFILE) as store:
        done = threading.Event()

        def sample() -> None:
            while not done.is_set():
                spent.disk = max(spent.disk, disk_bytes(Path(directory)))
                spent.resident_growth = max(spent.resident_growth, _resident() - before)
                spent.samples += 1
                time.sleep(0.001)

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            _fuzz(store, spent, times * max(PROFILE.hot_bytes, PROFILE.warm_bytes, PROFILE.cold_bytes), seed)
        except AssertionError as error:
            spent.failures.append(str(error))
        done.set()
        sampler.join()
        stats = store.stats()
        spent.counts, spent.refusals = stats.counts, stats.refusals
    spent.disk = max(spent.disk, disk_bytes(Path(directory)))
    with open_store(directory, identity=owner, profile=PROFILE) as store:
        store.check()
        spent.disk = max(spent.disk, disk_bytes(Path(directory)))
    connection.send(spent)


def _fuzz(store: KVStore, spent: Spent, target: float, seed: int) -> None:
    order = random.Random(seed)
    owner = store.identity
    while spent.put < target:
        which = order.randrange(200)
        tokens = prompt(which, order.randrange(1, 300))
        result = store.put(tokens, known_kv(tokens, owner), wait=5)
        spent.put += result.stored * _LAYOUT.token_bytes
        other = prompt(order.randrange(max(0, which - 3), which + 1), order.randrange(1, 300))
        buffer = empty(len(other), _LAYOUT)
        with store.lease(store.lookup(other)) as lease:
            length = lease.load_into(buffer)
        assert matches(buffer, other, owner, length), f"wrong KV within {length} tokens"
        if order.random() < 0.1:
            store.promote(store.lookup(tokens))
        if order.random() < 0.05:
            store.invalidate(prefix=tokens)
        if order.random() < 0.05:
            store.demote(store.lookup(other))
        store.check()
        stats = store.stats()
        for name, tier in (("hot", stats.hot), ("warm", stats.warm), ("cold", stats.cold)):
            assert tier.free + tier.used == tier.total, f"{name}: {tier}"
            assert min(tier.free, tier.used) >= 0, f"{name}: {tier}"


def _resident() -> int:
    """Resident memory of this process in bytes, shared pages included."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
