"""Which blocks to keep when not all fit: policies replayed over traces, beside the optimum.

The room is a share of all different blocks of the trace. What is replayed how, and what the optimum is, says `replay`.

    python -m bench.eviction [--data DIR] [--only replay,flash,overhead] [--plot FILE] [--quick] [--check]

replay: all policies and the optimum over all traces and capacities. Two processes at a time.
flash: what of all that is worth a write, see `flash_writes`. The same two.
overhead: what an access costs the processor, in tiers of up to a million blocks. By itself, after the others.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import Progress

from bench import flash_writes
from bench.replay import Prepared, Result, made, optimum, replay
from bench.report import Report, arguments
from bench.traces import Clock, Trace, traces
from kvstore.prefetch.eviction import DEFAULT, POLICIES
from kvstore.prefetch.policy import Facts

SHARES = (1, 2, 5, 10, 25)
OPTIMUM = "Belady + bypass"

_PARTS = ("replay", "flash", "overhead")
_WORKERS = 2

Told = TypeVar("Told")
Cell = tuple[int, str, int]
"""Number of the trace, name of the policy, percent of the different blocks that fit."""
Results = Mapping[Cell, Result]

# -- cells, by two workers -------------------------------------------------------------------------------------------

_prepared: list[Prepared] = []  # of a worker


def _begin(found: list[Trace]) -> None:
    """What a worker does first. What replays leave behind is collected between them, so without looking at traces."""
    _prepared[:] = map(Prepared, found)
    gc.disable()
    gc.freeze()


def _cell(cell: Cell) -> Result:
    gc.collect()
    number, name, share = cell
    prepared = _prepared[number]
    room = max(1, prepared.trace.unique * share // 100)
    if name == OPTIMUM:
        return optimum(prepared, room)
    clock = Clock()
    return replay(prepared, made(name, room, clock), room, clock)


def _flash_cell(cell: flash_writes.Cell) -> flash_writes.Outcome:
    gc.collect()
    number, way, share, per_day = cell
    return flash_writes.replay(_prepared[number].trace, share, way, per_day)


def _told(results: Iterable[Told], cells: Sequence[Any], what: str) -> dict[Any, Told]:
    """The results by cell; tells on stderr how far it is."""
    found = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for cell, result in progress.track(zip(cells, results, strict=True), len(cells), description=what):
            found[cell] = result
            if not progress.console.is_terminal and len(found) % 25 == 0:
                print(f"{what}: {len(found)} of {len(cells)}", file=sys.stderr, flush=True)
    return found


def measure_traces(report: Report, args: argparse.Namespace, parts: Sequence[str]) -> None:
    """The parts `replay` and `flash`."""
    found = traces(args.data, quick=args.quick)
    names = [OPTIMUM, *POLICIES]
    cells = list(product(range(len(found)), names, SHARES)) if "replay" in parts else []
    flash_cells = flash_writes.cells(found) if "flash" in parts else []
    with ProcessPoolExecutor(
        _WORKERS, mp_context=get_context("spawn"), initializer=_begin, initargs=(found,)
    ) as workers:
        replayed, written = workers.map(_cell, cells), workers.map(_flash_cell, flash_cells)
        results = _told(replayed, cells, "policies")
        writes = _told(written, flash_cells, "writes to flash")
    if "replay" in parts:
        tabulate(report, found, results)
        compare(report, found, results)
    if "flash" in parts:
        flash_writes.compare(report, found, writes)
    if args.plot:
        plot(args.plot, found, results, writes)


def tabulate(report: Report, found: Sequence[Trace], results: Results) -> None:
    """A table a trace."""
    for number, trace in enumerate(found):
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
        for name in [OPTIMUM, *POLICIES]:
            row = [results[number, name, share] for share in SHARES]
            rows.append(
                (name, *(f"{each.hits:.2f}" for each in row), *(f"{each.saved:,.0f}" for each in row))
            )


def compare(report: Report, found: Sequence[Trace], results: Results) -> None:
    """The default beside the best of the others, in each cell and over all."""
    baselines = [name for name in POLICIES if name != DEFAULT]
    cells = list(product(range(len(found)), SHARES))

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
                [sum(results[n, each, share].saved for share in SHARES) for n in range(len(found))]
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
    for number, trace in enumerate(found):
        mine = [f"{m:+.2f}" for (n, _), m in zip(cells, margins, strict=True) if n == number]
        rows.append((trace.name, *mine))
    where = f"{found[cells[worst][0]].name} at {cells[worst][1]} %"
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


def plot(path: Path, found: Sequence[Trace], results: Results, writes: flash_writes.Outcomes) -> None:
    """Hits by capacity, and below it hits by writes to flash, a picture a trace, as PNG and SVG."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)")
        return
    figure, axes = pyplot.subplots(
        2, len(found), figsize=(3.6 * len(found), 7.0), squeeze=False, layout="constrained"
    )
    for number, (trace, axis) in enumerate(zip(found, axes[1], strict=True)):
        flash_writes.draw(axis, number, trace, writes)
    axes[1][0].set_ylabel("hits, % of those when all is written")
    for number, (trace, axis) in enumerate(zip(found, axes[0], strict=True)):
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
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name in progress.track(list(POLICIES), description="overhead"):
            rows.append((name, *(_overhead(name, size) for size in sizes)))
    large, small = (float(rows[0][1 + sizes.index(size)]) for size in (max(sizes), min(sizes)))
    report.bar(f"{DEFAULT}, an access at {max(sizes):,} blocks", large, "<=", 20, "µs")
    report.bar(
        f"{DEFAULT}, {max(sizes):,} blocks over {min(sizes):,}, log n grows",
        large / small,
        "<=",
        float(np.log(max(sizes)) / np.log(min(sizes))),
        "times",
    )


def _overhead(name: str, size: int, paths: int = 1000, rounds: int = 3) -> float:
    """The median of `rounds` rounds of `paths` paths each: another process may disturb one of them."""
    rng = np.random.default_rng(3)
    clock = Clock()
    policy = made(name, size, clock)
    roots: list[list[int]] = []
    number = 0
    gc.disable()
    while len(policy) < size:
        path = list(range(number, number + 16))
        number += 16
        for at, block in enumerate(path):
            policy.insert(block, Facts(path[at - 1] if at else None, 1000, 1.0, 16, session=path[0] % 64))
        clock.now += 0.5
        roots.append(path)
    gc.enable()
    gc.collect()
    taken = [0.0] * rounds
    for turn in range(rounds * paths):
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
        taken[turn // paths] += time.process_time() - started
        number += 16
    return statistics.median(taken) / (paths * 32) * 1e6


def main() -> int:
    args = arguments(__doc__ or "", _options)
    parts = args.only.split(",")
    if unknown := {*parts} - {*_PARTS}:
        sys.exit(f"unknown part {', '.join(unknown)}; there are {', '.join(_PARTS)}")
    if args.plot and not {"replay", "flash"} <= {*parts}:
        sys.exit("--plot draws what the parts replay and flash found: it needs both")
    report = Report("Eviction", "replayed traces; saved time by cost model, profile mid, simulated")
    if {"replay", "flash"} & {*parts}:
        measure_traces(report, args, parts)
    if "overhead" in parts:
        measure_overhead(report, (10_000, 100_000) if args.quick else (10_000, 100_000, 1_000_000))
    return report.finish(args)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(_PARTS), metavar="PARTS", help="some of these parts")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw FILE.png and FILE.svg")


if __name__ == "__main__":
    sys.exit(main())
