"""Flipped bits, truncations and worse in every file of a data directory, and in files of an open store.

Each trial runs in a long-lived child on a copy of its own, so that a crash or a hang is noticed and goes with the
child. The child says what it saw; `verdict` says whether that is allowed.
"""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from kvstore.errors import DirectoryUnusableError, FormatMismatchError
from kvstore.store import KVStore, open_store
from tests.known_kv import empty, identity, load, matches, prompt, put, small_profile

from .child import Child, ChildDied, served

PROFILE = small_profile(hot_bytes=4 * 4096, warm_bytes=96 * 4096, cold_bytes=8 << 20)
_PROMPTS = 6
_LENGTH = 56
_OWNERS = ("a", "b")


@dataclass
class Damaged:
    """What a series of trials came to; `failures` is empty when every promise was kept."""

    trials: int = 0
    files: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    outcomes: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


# -- what is damaged -----------------------------------------------------------------------------------


def build(directory: Path) -> None:
    """A closed directory with records of two identities, shared prefixes, tails, and an index."""
    with open_store(directory, identity=identity(_OWNERS[0]), profile=PROFILE) as store:
        for name in _OWNERS:
            view = store.view(identity(name))
            for which in range(_PROMPTS):
                put(view, _prompt(which), wait=10)


@cache
def _prompt(which: int) -> np.ndarray:
    return np.concatenate([prompt(which // 3, 24), prompt(100 + which, _LENGTH - 24)])


def _flip(path: Path, order: random.Random) -> None:
    _change(path, order, lambda old: bytes([old[0] ^ (1 << order.randrange(8))]) + old[1:], 1)


def _blank(path: Path, order: random.Random) -> None:
    _change(path, order, lambda old: bytes(len(old)), 512)


def _scramble(path: Path, order: random.Random) -> None:
    _change(path, order, lambda old: order.randbytes(len(old)), 64)


def _change(path: Path, order: random.Random, change: Callable[[bytes], bytes], length: int) -> None:
    """Change up to `length` bytes somewhere, in place."""
    size = path.stat().st_size
    if size:
        at = order.randrange(size)
        with path.open("r+b", buffering=0) as file:
            file.seek(at)
            old = file.read(length)
            file.seek(at)
            file.write(change(old))


def _truncate(path: Path, order: random.Random) -> None:
    os.truncate(path, order.randrange(max(1, path.stat().st_size)))


def _empty(path: Path, _: random.Random) -> None:
    os.truncate(path, 0)


def _append(path: Path, order: random.Random) -> None:
    with path.open("ab") as file:
        file.write(order.randbytes(order.choice((1, 100, 5000))))


def _exchange(path: Path, order: random.Random) -> None:
    """Give a file the content of one of its neighbours: whole, but not what its name says."""
    others = sorted(other for other in path.parent.iterdir() if other.is_file())
    shutil.copyfile(order.choice(others), path.with_suffix(".other"))
    path.with_suffix(".other").replace(path)


def _remove(path: Path, _: random.Random) -> None:
    path.unlink()


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "flip a bit": _flip,
    "truncate": _truncate,
    "empty": _empty,
    "blank a sector": _blank,
    "scramble": _scramble,
    "append": _append,
    "exchange": _exchange,
    "remove": _remove,
}
IN_PLACE = ("flip a bit", "truncate", "empty", "blank a sector", "scramble", "append")

_WEIGHTS = {"flip a bit": 10, "truncate": 5}  # others count 1


# -- trials --------------------------------------------------------------------------------------------


def damage_runs(
    pristine: Path, scratch: Path, trials: int, seed: int, *, while_open: bool = False
) -> Damaged:
    """Damage a copy of `pristine` in `trials` random ways and see what a store makes of it."""
    result = Damaged()
    guard = threading.Lock()
    numbers = iter(range(trials))

    def work(worker: int) -> None:
        child = Child(_serve_open if while_open else _serve_closed)
        while True:
            with guard:
                number = next(numbers, None)
            if number is None:
                child.kill()
                return
            order = random.Random(seed * 1_000_003 + number)
            copy = scratch / f"trial-{worker}"
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(pristine, copy)
            kinds = IN_PLACE if while_open else tuple(DAMAGES)
            kind = order.choices(kinds, [_WEIGHTS.get(kind, 1) for kind in kinds])[0]
            files = sorted(path for path in copy.rglob("*") if path.is_file())
            parts = sorted({_part(copy, path) for path in files})
            part = order.choices(parts, [4 if part in ("blocks", "index") else 1 for part in parts])[0]
            path = order.choice([path for path in files if _part(copy, path) == part])
            if not while_open:
                DAMAGES[kind](path, order)
            try:
                child.send((str(copy), str(path), kind, order.getrandbits(32)))
                seen = child.receive()
            except ChildDied as error:
                seen = {"failure": str(error)}
                child = Child(_serve_open if while_open else _serve_closed)
            with guard:
                result.trials += 1
                result.kinds[kind] += 1
                result.files[part] += 1
                result.reasons.update(seen.get("reasons", {}))
                outcome = verdict(seen, part)
                result.outcomes[outcome] += 1
                if outcome == "FAILED":
                    result.failures.append(f"trial {number}: {kind}, {path.relative_to(copy)}: {seen}")

    with ThreadPoolExecutor(2) as pool:
        for worker in [pool.submit(work, number) for number in range(2)]:
            worker.result()
    return result


def verdict(seen: dict[str, Any], part: str) -> str:
    """What one trial showed; FAILED for anything that must not be."""
    if seen.get("failure"):
        return "FAILED"
    if seen.get("refused"):
        return "opening refused" if part == "FORMAT" else "FAILED"
    if not seen["lost"]:
        return "all loaded"
    return "missed, reason counted" if sum(seen["reasons"].values()) else "FAILED"


def _part(directory: Path, path: Path) -> str:
    return path.relative_to(directory).parts[0]


def _serve_closed(connection: Connection) -> None:
    served(connection, _examine)


def _serve_open(connection: Connection) -> None:
    served(connection, _examine_while_open)


def _examine(message: tuple[str, str, str, int]) -> dict[str, Any]:
    """Open what was damaged while closed, use it, and open it again."""
    directory = message[0]
    seen: dict[str, Any] = {"failure": "", "lost": 0, "reasons": Counter()}
    try:
        for _ in range(2):
            with open_store(directory, identity=identity(_OWNERS[0]), profile=PROFILE) as store:
                seen["lost"] += _use(store)
                _note_reasons(store, seen["reasons"])
    except (FormatMismatchError, DirectoryUnusableError) as error:
        seen["refused"] = str(error)
    except Exception as error:  # whatever comes through the API is the finding
        seen["failure"] = f"{type(error).__name__}: {error}"
    return seen


def _examine_while_open(message: tuple[str, str, str, int]) -> dict[str, Any]:
    """Damage a file of an open store between look-up and load, or between two layer groups; go on, and reopen."""
    directory, name, kind, seed = message
    order = random.Random(seed)
    seen: dict[str, Any] = {"failure": "", "lost": 0, "reasons": Counter()}
    try:
        with open_store(directory, identity=identity(_OWNERS[0]), profile=PROFILE) as store:
            matches_ = [store.lookup(_prompt(which)) for which in range(_PROMPTS)]
            leases = [store.lease(match) for match in matches_]
            buffers = [empty(_LENGTH) for _ in leases]
            loads = [lease.layer_groups(buffer) for lease, buffer in zip(leases, buffers, strict=True)]
            started = [next(groups) if order.random() < 0.5 else None for groups in loads]
            DAMAGES[kind](Path(name), order)
            for which, (lease, groups, first) in enumerate(zip(leases, loads, started, strict=True)):
                good = [group.tokens for group in ([first] if first else []) + list(groups)]
                assert good == sorted(good, reverse=True), f"good tokens grew: {good}"
                right = matches(buffers[which], _prompt(which), store.identity, good[-1])
                assert right, f"wrong KV within {good[-1]} tokens"
                seen["lost"] += _LENGTH - good[-1]
                lease.release()
            seen["lost"] += _use(store)
            store.invalidate(prefix=_prompt(1))
            put(store, _prompt(1), wait=10)
            store.flush()
            _note_reasons(store, seen["reasons"])
        with open_store(directory, identity=identity(_OWNERS[1]), profile=PROFILE) as store:
            seen["lost"] += _use(store)
            _note_reasons(store, seen["reasons"])
    except (FormatMismatchError, DirectoryUnusableError) as error:
        seen["refused"] = str(error)
    except Exception as error:
        seen["failure"] = f"{type(error).__name__}: {error}"
    return seen


def _use(store: KVStore) -> int:
    """Look up and load everything under both identities, put what is lost again; tokens that were lost."""
    lost = 0
    for name in _OWNERS:
        view = store.view(identity(name))
        for which in range(_PROMPTS):
            view.explain(_prompt(which))
            if missing := _LENGTH - load(view, _prompt(which)):
                lost += missing
                assert put(view, _prompt(which), wait=10).refused == 0
                assert load(view, _prompt(which)) == _LENGTH, "what was put again is there"
        put(view, np.append(_prompt(0)[:30], 5), wait=10)
    store.flush()
    store.check()
    return lost


def _note_reasons(store: KVStore, reasons: Counter[str]) -> None:
    stats = store.stats()
    reasons.update(stats.bad_records)
    reasons.update(stats.misses)
    if stats.index == "rebuilt":
        reasons["index rebuilt"] += 1
