"""How every benchmark starts and ends: its arguments, its tables, the bars it is held to.

A benchmark is a module with `main()`: it calls `arguments`, measures, adds rows and bars to a `Report`, and
returns `report.finish(args)` as exit code. Figures that are compared come from one run, alternating.
"""

from __future__ import annotations

import argparse
import json
import operator
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table


def arguments(
    description: str, more: Callable[[argparse.ArgumentParser], object] = lambda _: None
) -> argparse.Namespace:
    """Parse the options that all benchmarks share, and those that `more` adds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to FILE")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="real traces and texts; without it, synthetic or bundled"
    )
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, smaller sizes")
    parser.add_argument(
        "--check", action="store_true", help="print each bar beside its figure, exit 1 if one falls short"
    )
    more(parser)
    return parser.parse_args()


def median_seconds(call: Callable[[], object], repeats: int) -> float:
    """Median wall time of `call` over `repeats` runs, after one that warms up."""
    call()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def alternate(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median seconds of each call, measured in turns so that drift of a shared machine hits all alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(repeats):
        for name, call in calls.items():
            started = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in times.items()}


_RELATIONS = {"<=": operator.le, ">=": operator.ge, ">": operator.gt}


@dataclass(frozen=True)
class Bar:
    """A promise: `figure` is to be at most, at least, or more than `limit`."""

    name: str
    figure: float
    relation: Literal["<=", ">=", ">"]
    limit: float
    unit: str = ""

    @property
    def holds(self) -> bool:
        return bool(_RELATIONS[self.relation](self.figure, self.limit))


@dataclass
class Report:
    """Tables and bars of one run. `medium` says what the figures came from (page cache, device, simulated)."""

    title: str
    medium: str
    tables: list[tuple[str, Sequence[str], list[Sequence[Any]]]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    def table(self, title: str, columns: Sequence[str]) -> list[Sequence[Any]]:
        """Add a table; append rows to what this returns."""
        rows: list[Sequence[Any]] = []
        self.tables.append((title, columns, rows))
        return rows

    def bar(
        self, name: str, figure: float, relation: Literal["<=", ">=", ">"], limit: float, unit: str = ""
    ) -> None:
        self.bars.append(Bar(name, figure, relation, limit, unit))

    def finish(self, args: argparse.Namespace) -> int:
        """Print everything, write --json, and return the exit code that --check asks for."""
        console = Console(width=None if sys.stdout.isatty() else 140)
        console.print(f"[bold]{self.title}[/bold]  ({self.medium}; {platform.machine()}, {_cpu()})")
        for title, columns, rows in self.tables:
            table = Table(title=title, title_justify="left")
            for number, column in enumerate(columns):
                table.add_column(column, justify="left" if number == 0 else "right")
            for row in rows:
                table.add_row(*(_cell(value) for value in row))
            console.print(table)
        if args.check:
            table = Table(title="bars", title_justify="left")
            for column in ("bar", "figure", "limit", ""):
                table.add_column(column)
            for bar in self.bars:
                verdict = "[green]holds[/green]" if bar.holds else "[red]FALLS SHORT[/red]"
                table.add_row(
                    bar.name,
                    f"{bar.figure:.4g} {bar.unit}",
                    f"{bar.relation} {bar.limit:g} {bar.unit}",
                    verdict,
                )
            console.print(table)
        if args.json:
            args.json.write_text(json.dumps(self._document(), indent=1) + "\n")
        return int(args.check and not all(bar.holds for bar in self.bars))

    def _document(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "medium": self.medium,
            "machine": f"{platform.machine()}, {_cpu()}",
            "tables": [
                {"title": title, "rows": [dict(zip(columns, row, strict=True)) for row in rows]}
                for title, columns, rows in self.tables
            ],
            "bars": [
                {
                    "name": b.name,
                    "figure": b.figure,
                    "relation": b.relation,
                    "limit": b.limit,
                    "holds": b.holds,
                }
                for b in self.bars
            ],
        }


def _cell(value: Any) -> str:
    return (
        f"{value:,.4g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"
