"""kill -9 at random points of opening, putting, demoting, evicting, flushing and closing; then a look at what is left.

Runs follow one another on the same directory, mostly without a clean close between them, so damage would pile up.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvstore.profile import Profile
from kvstore.store import KVStore, open_store
from tests.known_kv import identity, load, prompt, put, small_profile

from .child import Child, ChildDied

_PROMPTS = 40
_LONGEST = 100

ROOMY = small_profile(cold_bytes=64 << 20)
"""Nothing is ever evicted from flash: what was flushed must be there."""

TIGHT = small_profile(hot_bytes=4 * 4096, warm_bytes=24 * 4096, cold_bytes=800 * 1024)
"""Demotions and evictions all the time."""


@dataclass
class Killed:
    """What a series of runs came to; `failures` is empty when every promise was kept."""

    runs: int = 0
    moments: Counter[str] = field(default_factory=Counter)  # what the child was about when it was killed
    tokens: int = 0  # survived, summed over the runs; each verified bit for bit
    durable: int = 0  # tokens that a flush had confirmed, summed over the runs; each was there
    bad: Counter[str] = field(default_factory=Counter)  # what opening found, by reason
    slowest_open: float = 0.0  # seconds
    failures: list[str] = field(default_factory=list)


def kill_runs(directory: Path, runs: int, seed: int, profile: Profile) -> Killed:
    """Run a busy child `runs` times on `directory`, kill it at a random moment, and verify what survived."""
    order = random.Random(seed)
    result = Killed()
    durable: dict[int, int] = {}  # prompt -> tokens
    for run in range(runs):
        child = Child(_busy, str(directory), seed * 1000 + run, profile)
        said = [child.receive()]  # about to open
        if order.random() < 0.7:
            said.append(child.receive())  # opened
            time.sleep(order.uniform(0, 0.25))
        else:
            time.sleep(order.uniform(0, 0.015))
        said += child.kill()
        result.runs += 1
        result.moments[[value for kind, value in said if kind == "at"][-1]] += 1
        if profile == ROOMY:
            for which, length in (pair for kind, value in said if kind == "durable" for pair in value):
                durable[which] = max(durable.get(which, 0), length)
            result.durable += sum(durable.values())
        looker = Child(_look, str(directory), profile, durable, order.random() < 0.2)
        try:
            found = looker.receive()
            looker.join()
        except ChildDied as error:
            result.failures.append(f"run {run}: nothing can be read after the kill: {error}")
            continue
        if found["error"]:
            result.failures.append(f"run {run}: {found['error']}")
        result.tokens += found["tokens"]
        result.bad.update(found["bad"])
        result.slowest_open = max(result.slowest_open, found["seconds"])
    return result


def _busy(connection: Connection, directory: str, seed: int, profile: Profile) -> None:
    """Use a store hard until killed, and say what is going on and what a flush confirmed."""
    order = random.Random(seed)
    while True:
        connection.send(("at", "opening"))
        with open_store(directory, identity=identity(), profile=profile) as store:
            connection.send(("at", "work"))
            unconfirmed: list[tuple[int, int]] = []
            for _ in range(order.randrange(1, 40)):
                which, length = order.randrange(_PROMPTS), order.randrange(1, _LONGEST)
                action = order.randrange(8)
                if action < 4:
                    if put(store, prompt(which, length), wait=1).refused == 0:
                        unconfirmed.append((which, length))
                elif action == 4:
                    connection.send(("at", "flush"))
                    store.flush()
                    connection.send(("durable", unconfirmed))
                    connection.send(("at", "work"))
                    unconfirmed = []
                elif action == 5:
                    store.demote(store.lookup(prompt(which, length)))
                elif action == 6 and profile != ROOMY:
                    store.invalidate(prefix=prompt(which, 20))
                else:
                    load(store, prompt(which, length))
            connection.send(("at", "closing"))


def _look(
    connection: Connection, directory: str, profile: Profile, durable: dict[int, int], close: bool
) -> None:
    """Open after the kill, load everything, and leave as rudely as the child did unless told to close."""
    found: dict[str, Any] = {"error": "", "tokens": 0}
    started = time.perf_counter()
    store = open_store(directory, identity=identity(), profile=profile)
    found["seconds"] = time.perf_counter() - started
    found["bad"] = store.stats().bad_records
    try:
        found["tokens"] = _verify(store, durable)
    except AssertionError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    if close:
        store.close()
    connection.send(found)
    connection.close()
    os._exit(0)


def _verify(store: KVStore, durable: dict[int, int]) -> int:
    """Tokens that are there, all of them right. AssertionError for anything else."""
    before = store.stats()
    store.check()
    tokens = 0
    for which in range(_PROMPTS):
        length = load(store, prompt(which, _LONGEST))
        confirmed = durable.get(which, 0)
        assert length >= confirmed, f"{confirmed} tokens of prompt {which} were durable, {length} are left"
        tokens += length
    store.check()
    after = store.stats()
    damaged = {*before.bad_records, *after.misses} - {"missing"}  # evicted after the index was written
    assert not damaged, f"a kill damaged records: {damaged}"
    return tokens
