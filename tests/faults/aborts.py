"""Requests aborted at random points, and a count of all that an aborted request could leave behind.

A request is aborted where it calls what belongs to its owner: an exception out of a graph run or out of `on_token` goes
through all that the request holds. Besides, a load is broken off after some groups, in each way in which one can be.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import kvstore
from kvstore.load import Load
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.graphs import Graph
from kvstore.pipeline.kv_allocation import KvAllocation
from kvstore.pipeline.onnx_runtime import OnnxRuntime
from kvstore.pipeline.recompute import Attended, FirstTokens
from kvstore.pipeline.runtime import Binding, CompiledGraph, Execution, Tensors
from kvstore.quality.reuse import Policy, Verdict
from kvstore.session import Session, identity_of
from kvstore.store import KVStore
from tests.tiny_models import write_tiny_gguf

PROFILE = kvstore.Profile(
    block_tokens=32,
    hot_bytes=1 << 20,
    warm_bytes=2 << 20,
    cold_bytes=8 << 20,
    arena_bytes=1 << 20,
    frame_bytes=4096,
)
_POLICIES: tuple[Policy, ...] = ("exact", "careful", "fast")
_EVERY = 50  # requests between two counts

Tokens = NDArray[np.int32]


class AbortedError(Exception):
    """What the owner of a request raises."""


@dataclass
class Aborts:
    """What a series of requests came to: aborts by where they struck, and what was left behind."""

    where: Counter[str] = field(default_factory=Counter)
    completed: int = 0
    leaks: list[str] = field(default_factory=list)


class AbortingRuntime:
    """ONNX Runtime whose graph runs raise AbortedError once `left` of them have run; None: never."""

    def __init__(self) -> None:
        self._runtime = OnnxRuntime(threads=1)
        self.name = self._runtime.name
        self.left: int | None = None

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        return self._runtime.allocate(nbytes)

    def prepare(self, example: Graph) -> None:
        self._runtime.prepare(example)

    def compile(self, graph: Graph) -> CompiledGraph:
        return _Graph(self, self._runtime.compile(graph))

    def count(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise AbortedError


class _Graph:
    def __init__(self, runtime: AbortingRuntime, graph: CompiledGraph) -> None:
        self._runtime, self._graph = runtime, graph

    def bind(self, tensors: Tensors) -> Binding:
        return _Binding(self._runtime, self._graph.bind(tensors))


class _Binding:
    def __init__(self, runtime: AbortingRuntime, binding: Binding) -> None:
        self._runtime, self._binding = runtime, binding

    def rebind(self, tensors: Tensors) -> None:
        self._binding.rebind(tensors)

    def start(self) -> Execution:
        self._runtime.count()
        return self._binding.start()


def abort_runs(
    folder: Path, aborts: int, seed: int, seen: Callable[[int], object] = lambda _: None
) -> Aborts:
    """Serve random requests of a tiny model until `aborts` of them were aborted; tells `seen` how many were."""
    folder.mkdir(parents=True, exist_ok=True)
    write_tiny_gguf(folder / "tiny.gguf", layers=6)
    runtime = AbortingRuntime()
    engine = StaticGraphEngine(
        folder / "tiny.gguf",
        runtime=runtime,
        cache=folder / "cache",
        sizes=(1, 32),
        contexts=(256, 512),
        groups=3,
    )
    for context in (200, 400):
        engine.warm_up(context)
    result, random_ = Aborts(), random.Random(seed)
    with kvstore.open(folder / "kv", identity=identity_of(engine, "00" * 32), profile=PROFILE) as store:
        store.keep_verdict(Verdict(fast=FirstTokens(4), careful=Attended(0.15)))
        requests = _Requests(engine, runtime, store, random_)
        requests.bring_up()
        for _ in range(12):
            requests.serve(result, abort=False)
        result = Aborts()
        before = Footprint.now(store)
        while result.where.total() < aborts and not result.leaks:
            for _ in range(_EVERY):
                requests.serve(result)
            result.leaks += Footprint.now(store).more_than(before)
            seen(result.where.total())
    return result


class _Requests:
    """Prompts over a few segments, in any order, from any tier."""

    def __init__(
        self, engine: StaticGraphEngine, runtime: AbortingRuntime, store: KVStore, random_: random.Random
    ) -> None:
        self._engine, self._runtime, self._store, self._random = engine, runtime, store, random_
        self._segments = [self._tokens(random_.randrange(33, 90)) for _ in range(10)]
        self._sessions = {policy: Session(engine, store, policy) for policy in _POLICIES}

    def bring_up(self) -> None:
        """Whatever stays up: idle allocations, bound graphs, the threads that read flash."""
        prompt = self._segments[0]
        self._sessions["exact"].generate(prompt, 1)
        self._store.flush()
        self._store.demote(self._store.lookup(prompt))
        self._sessions["exact"].generate(prompt, 1)

    def serve(self, result: Aborts, *, abort: bool = True) -> None:
        random_, store = self._random, self._store
        prompt = np.concatenate(
            [*random_.sample(self._segments, random_.randrange(1, 5)), self._tokens(random_.randrange(1, 20))]
        )
        if random_.random() < 0.3:
            store.flush()
            store.demote(store.lookup(prompt))
        if abort and random_.random() < 0.3:
            result.where[self._break_off(prompt)] += 1
            return
        policy = random_.choice(_POLICIES)
        where = random_.choice(("graph run", "token"))
        self._runtime.left = random_.randrange(60) if abort and where == "graph run" else None
        stop_after = random_.randrange(6) if abort and where == "token" else 6
        taken = 0

        def on_token(_: int) -> None:
            nonlocal taken
            taken += 1
            if taken > stop_after:
                raise AbortedError

        try:
            self._sessions[policy].generate(
                prompt, random_.randrange(1, 6), on_token=on_token, keep=random_.random() < 0.7
            )
        except AbortedError:
            result.where[f"{where}, {policy}"] += 1
        else:
            result.completed += 1
        finally:
            self._runtime.left = None

    def _break_off(self, prompt: Tokens) -> str:
        """Load a lease in part, then end it in one of the ways there are."""
        engine, random_ = self._engine, self._random
        kv = engine.allocate(len(prompt))
        lease = self._store.lease(self._store.lookup(prompt, moved=True))
        load: Load | None = lease.layer_groups(kv, first=random_.choice((0, 40)))
        assert load is not None
        time.sleep(random_.choice((0.0, 0.0, random_.random() * 0.002)))
        for _ in range(random_.randrange(3)):
            next(load, None)
        way = random_.choice(("closed", "released", "collected", "abandoned"))
        if way == "closed":
            load.close()
        if way != "abandoned":
            lease.release()
        if way == "abandoned":
            load = None
            del lease
            self._store.stats()  # gives back what was abandoned
        del load
        engine.recycle(kv)
        return f"load {way}"

    def _tokens(self, count: int) -> Tokens:
        vocab = self._engine.config.vocab
        return np.array([self._random.randrange(vocab) for _ in range(count)], np.int32)


@dataclass
class Footprint:
    """All that an aborted request could have kept."""

    leased: int
    in_memory: int
    """Bytes of memory tiers that belong to no block."""
    threads: int
    descriptors: int
    loads: int
    allocations: int

    @classmethod
    def now(cls, store: KVStore) -> Footprint:
        for _ in range(2):  # moves to hot memory wait for writes
            store.flush(60)
        gc.collect()
        store.check()
        stats, tiers = store.stats(), store._tiers
        with tiers.lock:
            owned = sum(
                block.memory.extent.size for block in tiers.blocks.values() if block.memory is not None
            )
        things = gc.get_objects()
        return cls(
            leased=stats.hot.leased + stats.warm.leased + stats.cold.leased,
            in_memory=stats.hot.used + stats.warm.used - owned,
            threads=threading.active_count(),
            descriptors=_descriptors(),
            loads=sum(isinstance(thing, Load) for thing in things),
            allocations=sum(isinstance(thing, KvAllocation) for thing in things),
        )

    def more_than(self, before: Footprint) -> list[str]:
        pairs = ((name, getattr(before, name), getattr(self, name)) for name in self.__dataclass_fields__)
        return [f"{name}: {then} before, {now} now" for name, then, now in pairs if now > then]


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
