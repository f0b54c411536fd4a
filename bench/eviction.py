"""Which blocks to keep when not all fit: policies replayed over traces, beside the optimum.

A request hits the blocks of its path that are held, from the root on without a gap; then the rest of its path is put,
as far as there is room or the policy makes it. The blocks of a request are leased while it runs. The room is a share of
all different blocks of the trace.

The optimum knows the future: Belady's (1966) farthest next use, over the blocks held and those that want in, so that a
block may also be refused (bypass). A parent's next use is never later than its child's, so that with ties broken
towards the deeper block this never gives up a parent first: for blocks of one size it is exact under the prefix
constraint. What it shows is hits; saved milliseconds at the optimum of hits are no bound of saved milliseconds.

Milliseconds are those of the device profile `mid` and a model of 56 KiB a token (Qwen3-1.7B, int8): recompute at the
block's depth less the load from flash.

What of all that is worth a write to flash is another question, see `flash_writes`.

    python -m bench.eviction --data DIR --plot eviction --check

It takes about 20 minutes of two cores; `--quick` a fifth of that, and less without `--data`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from heapq import heappop, heappush
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.progress import Progress

from bench import flash_writes
from bench.report import Report, arguments
from bench.traces import TOKEN_BYTES, Clock, Request, Trace, traces
from kvstore.prefetch.cost import DEVICES
from kvstore.prefetch.eviction import DEFAULT, POLICIES, LeastWorth
from kvstore.prefetch.policy import Facts, Policy

SHARES = (1, 2, 5, 10, 25)
MID = DEVICES["mid"]
OPTIMUM = "Belady + bypass"


class Result(NamedTuple):
    """Share of tokens hit in percent, seconds saved, seconds that the policy and the replay took."""

    hits: float
    saved: float
    took: float


@cache
def block_saved(tokens: int, depth: int, block_tokens: int) -> float:
    """Seconds that a hit on a block saves, `depth` whole blocks down."""
    return MID.saved_seconds(tokens, depth * block_tokens, tokens * TOKEN_BYTES, "cold")


def replay(trace: Trace, policy: Policy, room: int, clock: Clock) -> Result:
    """Hits and savings of a policy in `room` blocks."""
    started = time.perf_counter()
    hit = asked = 0
    saved = 0.0
    for request in trace.requests:
        clock.now = request.seconds
        path = request.path
        held = 0
        while held < len(path) and path[held] in policy:
            held += 1
        sizes = trace.block_sizes(request)
        worth = [block_saved(size, depth, trace.block_tokens) for depth, size in enumerate(sizes)]
        hit += sum(sizes[:held])
        asked += request.tokens
        saved += sum(worth[:held])
        fresh = len(path) - held
        policy.touch(path[:held])
        if fresh:
            _put(policy, room, trace, request, held, sizes, sum(worth) / request.tokens)
    return Result(100 * hit / asked, saved, time.perf_counter() - started)


def _put(
    policy: Policy, room: int, trace: Trace, request: Request, held: int, sizes: Sequence[int], saved: float
) -> None:
    """Put what of a request is not held; `saved` seconds a token of it."""
    path, leased = request.path, set(request.path)
    refused = False
    for at in range(held, len(path)):
        facts = Facts(
            parent=path[at - 1] if at else None,
            nbytes=sizes[at] * TOKEN_BYTES,
            saved=sizes[at] * saved,
            fresh=len(path) - held,
            whole=sizes[at] == trace.block_tokens,
            session=request.session,
            name=path[at],
        )
        if not refused and len(policy) >= room:
            victim = policy.victim(lambda block: block not in leased, facts)
            refused = victim is None
            if victim is not None:
                policy.remove(victim)
        if refused:  # and with it all that would hang on it
            policy.passed(facts)
        else:
            policy.insert(path[at], facts)


def optimum(trace: Trace, room: int) -> Result:
    """Belady's choice among what is held and what wants in."""
    started = time.perf_counter()
    never = len(trace.requests)
    following: list[list[int]] = [[]] * never
    uses: dict[int, int] = {}
    for number in range(never - 1, -1, -1):
        path = trace.requests[number].path
        following[number] = [uses.get(block, never) for block in path]
        uses.update(dict.fromkeys(path, number))
    held: dict[int, tuple[int, int]] = {}
    farthest: list[tuple[int, int, int]] = []
    hit = asked = 0
    saved = 0.0
    for request, nexts in zip(trace.requests, following, strict=True):
        sizes = trace.block_sizes(request)
        asked += request.tokens
        for depth, block in enumerate(request.path):
            if block not in held:
                break
            hit += sizes[depth]
            saved += block_saved(sizes[depth], depth, trace.block_tokens)
        for depth, (block, use) in enumerate(zip(request.path, nexts, strict=True)):
            if use == never:
                held.pop(block, None)
                continue
            held[block] = (-use, -depth)
            heappush(farthest, (-use, -depth, block))
        while len(held) > room:
            use, depth, block = heappop(farthest)
            if held.get(block) == (use, depth):
                del held[block]
    return Result(100 * hit / asked, saved, time.perf_counter() - started)


def made(name: str, room: int, clock: Clock) -> Policy:
    return LeastWorth(room, clock) if name == LeastWorth.name else POLICIES[name](room)


_TRACES: list[Trace] = []


def _cell(cell: tuple[int, str, int]) -> Result:
    number, name, share = cell
    trace = _TRACES[number]
    room = max(1, trace.unique * share // 100)
    if name == OPTIMUM:
        return optimum(trace, room)
    clock = Clock()
    return replay(trace, made(name, room, clock), room, clock)


def _flash_cell(cell: tuple[int, flash_writes.Way, int, int | None]) -> flash_writes.Outcome:
    number, way, share, per_day = cell
    return flash_writes.replay(_TRACES[number], share, way, per_day)


def measure_traces(report: Report, args: argparse.Namespace) -> None:
    _TRACES[:] = traces(args.data, quick=args.quick)
    names = [OPTIMUM, *POLICIES]
    cells = list(product(range(len(_TRACES)), names, SHARES))
    flash_cells = flash_writes.cells(_TRACES)
    with (
        ProcessPoolExecutor(2, mp_context=get_context("fork")) as workers,
        Progress(transient=True) as progress,
    ):
        told = progress.track(workers.map(_cell, cells), len(cells), description="policies")
        results = dict(zip(cells, told, strict=True))
        told_too = progress.track(
            workers.map(_flash_cell, flash_cells), len(flash_cells), description="writes to flash"
        )
        writes = dict(zip(flash_cells, told_too, strict=True))
    for number, trace in enumerate(_TRACES):
        blocks = sum(len(request.path) for request in trace.requests)
        rows = report.table(
            f"{trace.name}: {len(trace.requests):,} requests, {blocks:,} blocks of {trace.block_tokens} tokens, "
            f"{trace.unique:,} different",
            [
                "policy, at % of the different blocks",
                *(f"hits {share}" for share in SHARES),
                *(f"saved s {share}" for share in SHARES),
            ],
        )
        for name in names:
            row = [results[number, name, share] for share in SHARES]
            rows.append(
                (name, *(f"{each.hits:.2f}" for each in row), *(f"{each.saved:,.0f}" for each in row))
            )
    compare(report, results)
    flash_writes.compare(report, _TRACES, writes)
    if args.plot:
        plot(args.plot, results, writes)


def compare(report: Report, results: dict[tuple[int, str, int], Result]) -> None:
    """The default beside the best of the others, in each cell and over all."""
    baselines = [name for name in POLICIES if name != DEFAULT]
    cells = list(product(range(len(_TRACES)), SHARES))

    def hits(name: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array([results[number, name, share].hits for number, share in cells])

    best = max(baselines, key=lambda name: float(hits(name).mean()))
    rows = report.table(
        "All cells",
        ["policy", "mean hits", "gap closed, mean of cells", "gap closed, of the mean", "saved over lru"],
    )
    gap = hits(OPTIMUM) - hits(best)
    gains = {}
    for name in [OPTIMUM, *POLICIES]:
        won = hits(name) - hits(best)
        closed = float(np.mean(won[gap > 0.01] / gap[gap > 0.01]))
        saved = {
            each: np.array(
                [sum(results[n, each, share].saved for share in SHARES) for n in range(len(_TRACES))]
            )
            for each in (name, "lru")
        }
        more = float((saved[name] / saved["lru"]).mean()) - 1
        gains[name] = closed, more
        rows.append(
            (
                name,
                float(hits(name).mean()),
                f"{closed:.1%}",
                f"{won.mean() / gap.mean():.1%}",
                f"{more:+.1%}",
            )
        )
    margins = hits(DEFAULT) - np.max([hits(name) for name in baselines], axis=0)
    worst = int(margins.argmin())
    rows = report.table("Default less the best of the others, points of hits", ["trace", *map(str, SHARES)])
    for number, trace in enumerate(_TRACES):
        mine = [f"{m:+.2f}" for (n, _), m in zip(cells, margins, strict=True) if n == number]
        rows.append((trace.name, *mine))
    where = f"{_TRACES[cells[worst][0]].name} at {cells[worst][1]} %"
    report.bar(
        f"hits less those of the best other policy, worst cell ({where})",
        float(margins[worst]),
        ">=",
        -1,
        "points",
    )
    report.bar(
        f"gap between {best} and the optimum closed, mean of cells", 100 * gains[DEFAULT][0], ">=", 15, "%"
    )
    report.bar("saved over lru, mean of traces", 100 * gains[DEFAULT][1], ">=", 5, "%")


def plot(path: Path, results: dict[tuple[int, str, int], Result], writes: flash_writes.Outcomes) -> None:
    """Hits by capacity, and below it hits by writes to flash, a picture a trace, as PNG and SVG."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    figure, axes = pyplot.subplots(
        2, len(_TRACES), figsize=(3.6 * len(_TRACES), 7.0), squeeze=False, layout="constrained"
    )
    for number, (trace, axis) in enumerate(zip(_TRACES, axes[1], strict=True)):
        flash_writes.draw(axis, number, trace, writes)
    axes[1][0].set_ylabel("hits, % of those when all is written")
    for number, (trace, axis) in enumerate(zip(_TRACES, axes[0], strict=True)):
        for name in [OPTIMUM, *POLICIES]:
            style = {OPTIMUM: ("k--", 1.5), DEFAULT: ("C3-o", 2.2)}.get(name, ("-", 1.0))
            hits = [results[number, name, share].hits for share in SHARES]
            axis.plot(SHARES, hits, style[0], linewidth=style[1], markersize=4, label=name)
        axis.set(title=trace.name, xscale="log", xlabel="room, % of different blocks")
        axis.set_xticks(SHARES, [str(share) for share in SHARES])
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("tokens hit, %")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    for kind in ("png", "svg"):
        figure.savefig(path.with_suffix(f".{kind}"), dpi=130)
    print(f"plots: {path.with_suffix('.png')}, {path.with_suffix('.svg')}")


def measure_overhead(report: Report, sizes: Sequence[int]) -> None:
    """Microseconds of the processor an access in a full tier: paths of 32 blocks, half of each held, half put."""
    rows = report.table("Overhead in µs an access", ["policy", *(f"{size:,} blocks" for size in sizes)])
    for name in POLICIES:
        rows.append((name, *(_overhead(name, size) for size in sizes)))
    large, small = (float(rows[0][1 + sizes.index(size)]) for size in (max(sizes), min(sizes)))
    report.bar(f"{DEFAULT}, an access at {max(sizes):,} blocks", large, "<=", 20, "µs")
    report.bar(
        f"{DEFAULT}, {max(sizes):,} blocks over {min(sizes):,}, log n grows",
        large / small,
        "<=",
        2 * float(np.log(max(sizes)) / np.log(min(sizes))),
        "times",
    )


def _overhead(name: str, size: int, paths: int = 1000) -> float:
    rng = np.random.default_rng(3)
    clock = Clock()
    policy = made(name, size, clock)
    roots: list[list[int]] = []
    number = 0
    while len(policy) < size:
        path = list(range(number, number + 16))
        number += 16
        for at, block in enumerate(path):
            policy.insert(block, Facts(path[at - 1] if at else None, 1000, 1.0, 16, session=path[0] % 64))
        clock.now += 0.5
        roots.append(path)
    taken = 0.0
    for _ in range(paths):
        path = roots[int(rng.integers(len(roots) // 2, len(roots)))]
        path = [block for block in path if block in policy]
        clock.now += 0.5
        started = time.process_time()
        policy.touch(path)
        above = path[-1] if path else None
        for block in range(number, number + 16):
            facts = Facts(above, 1000, 1.0, 16, session=block % 64, name=block)
            victim = policy.victim(lambda _: True, facts)
            if victim is not None:
                policy.remove(victim)
            policy.insert(block, facts)
            above = block
        taken += time.process_time() - started
        number += 16
    return taken / (paths * 32) * 1e6


def main() -> int:
    args = arguments(
        __doc__ or "",
        lambda parser: parser.add_argument(
            "--plot", type=Path, metavar="FILE", help="draw FILE.png and FILE.svg"
        ),
    )
    report = Report("Eviction", "replayed traces; saved time by cost model, profile mid, simulated")
    measure_traces(report, args)
    measure_overhead(report, (10_000, 100_000) if args.quick else (10_000, 100_000, 1_000_000))
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main())
