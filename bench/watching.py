"""What it costs to watch a store: a snapshot, and what `kvstore top`, the web page and a scraper make of it.

Of a store that holds many blocks, and of one that holds few, since a snapshot must not grow with what is held.
Milliseconds of the processor, so that other work on the machine does not count; at one refresh a second, 10 of them are
1 % of a core.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from io import StringIO

import msgspec
import numpy as np
from rich.console import Console

from bench.report import Report, arguments
from kvstore.identity import Identity
from kvstore.layout import Layout
from kvstore.pipeline.rope import Rope
from kvstore.profile import Profile
from kvstore.store import KVStore, open_store
from kvstore.watch import top
from kvstore.watch.metrics import exposition
from kvstore.watch.timings import Timings

BLOCK = 16
PROMPT = 20 * BLOCK
LAYOUT = Layout.uniform(layers=1, kv_heads=1, head_dim=2, rope=Rope(2, 1e4, 2), dtype="float16")


class _Kv:
    def __init__(self, tokens: int) -> None:
        self.keys = [np.zeros((1, tokens, 2), np.float16)]
        self.values = [np.zeros((1, tokens, 2), np.float16)]


def filled(blocks: int) -> KVStore:
    """A store in memory that holds so many blocks, of prompts of 20 blocks that share the first, and serves some."""
    nbytes = max(1 << 24, 2 * blocks * 256)
    profile = Profile(
        block_tokens=BLOCK,
        hot_bytes=0,
        warm_bytes=nbytes,
        cold_bytes=0,
        arena_bytes=nbytes,
        alignment=64,
        frame_bytes=1,
    )
    store = open_store(
        None,
        identity=Identity(weights="0" * 64, tokenizer="0" * 64, quantisation="none", layout=LAYOUT),
        profile=profile,
    )
    rng = np.random.default_rng(1)
    kv = _Kv(PROMPT)
    made = []
    while store.stats().warm.blocks < blocks:
        tokens = rng.integers(0, 50_000, PROMPT)
        tokens[:BLOCK] = 7
        store.put(tokens, kv)
        made.append(tokens)
    for tokens in made[-40:]:
        with store.find(tokens):
            pass
        store.served(
            prefix=PROMPT - 1, moved=0, recomputed=0, computed=1, seconds=0.1, waited=0.01, without=1.0
        )
    return store


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Processor time of one call, the median of many."""
    call()
    taken = []
    for _ in range(repeats):
        started = time.process_time()
        call()
        taken.append(time.process_time() - started)
    return statistics.median(taken) * 1e3


def measure(report: Report, blocks: tuple[int, int], repeats: int) -> None:
    rows = report.table("Processor ms a refresh", ["what", *(f"{count:,} blocks" for count in blocks)])
    found: dict[str, list[float]] = {}
    for count in blocks:
        with filled(count) as store:
            seen = [store.snapshot() for _ in range(120)]
            console = Console(file=StringIO(), width=120, force_terminal=True)
            for name, call in (
                ("snapshot", store.snapshot),
                ("snapshot as JSON (web page)", lambda store=store: msgspec.json.encode(store.snapshot())),
                (
                    "snapshot and picture (top)",
                    lambda store=store, seen=seen, console=console: console.print(
                        top.Picture([*seen, store.snapshot()])
                    ),
                ),
                ("scrape (metrics)", lambda store=store: exposition(store.snapshot)),
            ):
                found.setdefault(name, []).append(milliseconds(call, repeats))
    for name, each in found.items():
        rows.append((name, *each))
        report.bar(f"{name}, {blocks[-1]:,} blocks", each[-1], "<=", 10, "ms")
    few, many = found["snapshot"]
    report.bar(f"snapshot of {blocks[-1]:,} blocks over {blocks[0]:,}", many / few, "<=", 2, "times")


def measure_stage(report: Report) -> None:
    """Nanoseconds that a stage costs that is timed, and one that is not since nobody looks."""
    timings = Timings()

    def many() -> None:
        for _ in range(2000):
            with timings.stage("lookup"):
                pass

    off = milliseconds(many, 50) / 2
    timings.look()
    on = milliseconds(many, 50) / 2
    report.table("Processor µs a stage", ["nobody looks", "timed"]).append((off, on))
    report.bar("a timed stage", on, "<=", 5, "µs")


def main() -> int:
    args = arguments(__doc__ or "")
    report = Report("Watching", "RAM")
    measure(report, (1000, 20_000 if args.quick else 100_000), 20 if args.quick else 60)
    measure_stage(report)
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main())
