"""What is written to flash, and what it is good for: admission beside writing all, and beside waiting for a second use.

Memory has room for a share of all different blocks, flash for all of them: so writing everything hits all that can be
hit, which is what the others are measured by. As in the store, a new block stays in memory undecided, until three
quarters of it are; then the one used longest ago is written, with what precedes it, or may be dropped. When no request
comes for ten minutes all are decided on. Blocks are of one size here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Literal, NamedTuple

from bench.report import Report
from bench.traces import TOKEN_BYTES, Clock, Request, Trace
from kvstore.prefetch.admission import Admission
from kvstore.prefetch.cost import DEVICES
from kvstore.prefetch.eviction import LeastWorth
from kvstore.prefetch.policy import Facts

Way = Literal["second use", "admission"]
SHARES = (5, 10, 20)
_PHONE = 10  # what a phone's profile has: 448 MiB of memory before 4 GiB of flash
MID = DEVICES["mid"]

_IDLE = 600.0
_DAY = 86_400.0


class Outcome(NamedTuple):
    """Blocks hit, of these on flash alone, and written; the most of a day's budget that was written, 0 without one."""

    hits: int
    from_flash: int
    written: int
    most_of_budget: float


class Replay:
    """Memory of `room` blocks over flash that has room for all, at most `per_day` blocks written a day."""

    def __init__(self, trace: Trace, room: int, way: Way, per_day: int | None = None) -> None:
        self._trace, self._room, self._way = trace, max(2, room), way
        self._size = trace.block_tokens * TOKEN_BYTES
        self._per_day = per_day
        self._clock = Clock()
        self._warm = LeastWorth(self._room, self._clock)
        self._admission = Admission(None if per_day is None else per_day * self._size, self._clock)
        self._flash: set[int] = set()
        self._undecided: OrderedDict[int, None] = OrderedDict()
        self._facts: dict[int, Facts] = {}
        self._seen: set[int] = set()
        self._below: dict[int, int] = {}  # held blocks that hang on a block
        self._load = MID.load_seconds(self._size, "cold")
        self._hits = self._from_flash = self._written = self._today = 0
        self._day = self._most = 0

    def run(self) -> Outcome:
        for request in self._trace.requests:
            if request.seconds - self._clock.now > _IDLE:
                self._clock.now += _IDLE
                self._decide(limit=0)
            self._clock.now = request.seconds
            self._serve(request)
        of_budget = self._most / self._per_day if self._per_day else 0.0
        return Outcome(self._hits, self._from_flash, self._written, of_budget)

    def _holds(self, block: int) -> bool:
        return block in self._flash or block in self._warm

    def _serve(self, request: Request) -> None:
        path = request.path
        held = next((at for at, block in enumerate(path) if not self._holds(block)), len(path))
        self._hits += held
        self._from_flash += sum(block not in self._warm for block in path[:held])
        for at, block in enumerate(path):
            self._note(block, path[at - 1] if at else None, at, len(path) - held, new=at >= held)
        self._warm.touch(path[:held])
        leased = set(path)
        for at, block in enumerate(path):
            if block in self._warm:
                continue
            if not self._make_room(leased):
                return
            if at >= held and at:
                self._below[path[at - 1]] = self._below.get(path[at - 1], 0) + 1
            self._warm.insert(
                block, self._facts[block]._replace(last_use=None if at >= held else self._clock.now)
            )
            if at >= held:
                if self._way == "admission":
                    self._to_be_decided(block)
                elif block in self._seen:
                    self._write(block)
                self._seen.add(block)
        self._decide(limit=self._room * 3 // 4)

    def _note(self, block: int, parent: int | None, depth: int, fresh: int, *, new: bool) -> None:
        before = self._facts.get(block)
        whole = (depth + 1) * self._trace.block_tokens
        self._facts[block] = facts = Facts(
            parent,
            self._size,
            self._load if block in self._flash else MID.recompute_seconds(whole) / (depth + 1),
            fresh if new or before is None else before.fresh,
            name=block,
            last_use=self._clock.now,
            uses=1 if new or before is None else before.uses + 1,
        )
        if self._way == "admission":
            self._admission.used(facts, missed=new)
        if block in self._warm and block not in self._flash:
            if self._way == "admission":
                self._to_be_decided(block)
            else:
                self._write(block)

    def _make_room(self, leased: set[int]) -> bool:
        while len(self._warm) >= self._room:
            victim = self._warm.victim(lambda block: block not in leased and self._may_leave(block))
            if victim is None:
                oldest = next((block for block in self._undecided if block not in leased), None)
                if oldest is None:
                    return False
                self._decide_on(oldest)
                continue
            self._warm.remove(victim)
            if victim not in self._flash and (parent := self._facts[victim].parent) is not None:
                self._below[parent] -= 1
        return True

    def _may_leave(self, block: int) -> bool:
        return block in self._flash or (block not in self._undecided and not self._below.get(block))

    def _to_be_decided(self, block: int) -> None:
        self._undecided[block] = None
        self._undecided.move_to_end(block)
        self._warm.keep(block)

    def _decide(self, limit: int) -> None:
        while len(self._undecided) > limit:
            self._decide_on(next(iter(self._undecided)))

    def _decide_on(self, block: int) -> None:
        if self._way == "admission" and self._admission.admits(
            self._facts[block], self._spent() * self._size
        ):
            self._write(block)
        self._undecided.pop(block, None)
        self._warm.offer(block)

    def _write(self, block: int) -> None:
        """Write a block, and before it what precedes it."""
        path = []
        at: int | None = block
        while at is not None and at not in self._flash:
            path.append(at)
            at = self._facts[at].parent
        for each in reversed(path):
            self._undecided.pop(each, None)
            self._warm.offer(each)
            if self._per_day is not None and self._spent() >= self._per_day:
                return
            self._flash.add(each)
            self._written += 1
            self._admission.wrote(1)
            self._today += 1
            self._most = max(self._most, self._today)
            facts = self._facts[each] = self._facts[each]._replace(saved=self._load)
            self._warm.update(each, facts.parent, facts.nbytes, facts.saved)

    def _spent(self) -> int:
        """Blocks written today."""
        if self._clock.now // _DAY != self._day:
            self._day, self._today = int(self._clock.now // _DAY), 0
        return self._today


def everything(trace: Trace) -> Outcome:
    """All is written: each block once, and found whenever it comes again."""
    blocks = sum(len(request.path) for request in trace.requests)
    return Outcome(blocks - trace.unique, blocks - trace.unique, trace.unique, 0.0)


def replay(trace: Trace, share: int, way: Way, per_day: int | None = None) -> Outcome:
    """With memory for `share` percent of the different blocks."""
    return Replay(trace, trace.unique * share // 100, way, per_day).run()


Cell = tuple[int, Way, int, int | None]
"""Number of the trace, way, percent of the different blocks that fit in memory, blocks that may be written a day."""
Outcomes = Mapping[Cell, Outcome]


def cells(traces: Sequence[Trace]) -> list[Cell]:
    """What `compare` needs: both ways without a budget, and admission within a quarter of all blocks a day."""
    ways: tuple[Way, ...] = ("second use", "admission")
    free: list[Cell] = [(*cell, None) for cell in product(range(len(traces)), ways, SHARES)]
    return free + [(number, "admission", _PHONE, _per_day(trace)) for number, trace in enumerate(traces)]


def compare(report: Report, traces: Sequence[Trace], outcomes: Outcomes) -> None:
    """Hits and written bytes beside those of writing everything, and the bars."""
    rows = report.table(
        "Writes to flash, % of what writing everything has; memory for % of the different blocks",
        [
            "trace",
            "memory",
            "way",
            "hits",
            "written bytes",
            "GB written",
            "writes a hit",
            "hits from flash",
        ],
    )
    for number, trace in enumerate(traces):
        size = trace.block_tokens * TOKEN_BYTES / 1e9
        all_of_it = everything(trace)
        rows.append((trace.name, "any", "everything", *_row(all_of_it, all_of_it, size)))
        for (at, way, share, per_day), outcome in outcomes.items():
            if at == number:
                named = way if per_day is None else f"{way}, {per_day * size:,.0f} GB a day"
                rows.append((trace.name, f"{share} %", named, *_row(outcome, all_of_it, size)))
    hits, written = [], []
    for number, trace in enumerate(traces):
        outcome, all_of_it = outcomes[number, "admission", _PHONE, None], everything(trace)
        hits.append(100 * outcome.hits / all_of_it.hits)
        written.append(100 * outcome.written / all_of_it.written)
    of_all = f"memory {_PHONE} %, mean of traces"
    report.bar(f"hits with admission, of those when all is written, {of_all}", _mean(hits), ">=", 90, "%")
    report.bar(f"bytes that it writes, of all, {of_all}", _mean(written), "<=", 50, "%")
    of_budget = 100 * max(outcome.most_of_budget for outcome in outcomes.values())
    report.bar("written in a day, of its budget", of_budget, "<=", 100, "%")


def draw(axis: Any, number: int, trace: Trace, outcomes: Outcomes) -> None:
    """Hits by written bytes into a matplotlib axis, a mark a size of memory."""
    all_of_it = everything(trace)
    for way, style in (("second use", "C0-s"), ("admission", "C3-o")):
        found = [outcomes[number, way, share, None] for share in SHARES]
        axis.plot(
            [100 * each.written / all_of_it.written for each in found],
            [100 * each.hits / all_of_it.hits for each in found],
            style,
            markersize=4,
            label=way,
        )
    axis.plot([100], [100], "k*", label="everything")
    axis.set(xlabel="written bytes, % of all", xlim=(0, 104), ylim=(0, 104))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=7, loc="lower right")


def _mean(figures: Sequence[float]) -> float:
    return sum(figures) / len(figures)


def _per_day(trace: Trace) -> int:
    return max(1, trace.unique // 4)


def _row(outcome: Outcome, all_of_it: Outcome, size: float) -> tuple[str, ...]:
    return (
        f"{100 * outcome.hits / all_of_it.hits:.1f}",
        f"{100 * outcome.written / all_of_it.written:.1f}",
        f"{outcome.written * size:,.1f}",
        f"{outcome.written / max(1, outcome.hits):.3f}",
        f"{100 * outcome.from_flash / max(1, outcome.hits):.1f} %",
    )
