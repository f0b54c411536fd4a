"""Reuse of moved tokens over whole workloads: what each policy costs and gains, and what it does to the answers.

Traffic fills the store. What comes before the measured prompts is served with policy `exact`. Each measured prompt is
answered in all modes one after another, none of which stores anything, then served once more with policy `fast`,
which keeps what it computed, exact or not: so captures go on as they would, and no mode finds its own prompt. What a
prompt reuses is brought into memory before; writing in the background ends before a clock starts.

    none       no store: prefill of all tokens
    prefix     exact prefix runs only
    full       moved runs as they are, nothing repaired
    fast       moved runs, repaired as calibration says, on other prompts of the same workload; uncalibrated, the first
               4 tokens of each run, and all of it where the answer then hangs in the balance
    careful    exact prefix runs only, since no repair keeps this model's facts, see UNMEASURED; this is `prefix`, and
               not run a second time

All run on one engine: the same graph sizes and context lengths. Time to first token (TTFT) runs from token ids to the
first token, memory for the KV, look-up, lease and load included. Answers are compared with those of `none` as
`kvstore.quality.fidelity` says. Every token that was reused is compared with the prompt's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

import kvstore
from bench.report import Report
from bench.timed_runtime import TimedRuntime
from bench.workloads import Request
from kvstore import models
from kvstore.choice import choose, repairable, spread
from kvstore.language_model import LAYER_GROUPS, LanguageModel
from kvstore.pipeline.engine import WINDOWS, StaticGraphEngine
from kvstore.pipeline.kv_allocation import KvAllocation
from kvstore.pipeline.onnx_runtime import OnnxRuntime
from kvstore.pipeline.recompute import AnyRepair, FirstTokens, Nothing, WhenSure
from kvstore.prefill import Prefilled, prefill
from kvstore.quality.calibrate import calibrate
from kvstore.quality.fidelity import FORCED, Fidelity, Reference, fidelity, greedy, reference
from kvstore.quality.reuse import Verdict, cost, keeps_close, named
from kvstore.session import Session
from kvstore.store import KVStore

MODES = ("none", "prefix", "full", "fast", "careful")
UNMEASURED = Verdict(fast=WhenSure(FirstTokens(4), 0.5), careful=None)
"""Set by hand, for SmolLM2-135M. `fast`: over 100 prompts of notes-1000, no repair had KL .031 and changed 4 first
tokens, the first 2, 4 and 6 of each run .026, .024 and .023 and as many; with the second look, .027 to .021 and one.
`careful` is exact, since no repair tried keeps 90 % of the facts: of those in 49 generated prompts the first 6 tokens
kept 55 %, attended 8, 15 and 25 % kept 73, 71 and 78 %."""


class Run(NamedTuple):
    """One prompt in one mode. prefix + moved + recomputed + computed = its tokens.

    `graphs`: what graph calls took of `seconds`. `due` int64: where the tokens stand that had to be computed, without
    those that were computed again only because a call had room for them. `found`: whether the answer holds what it
    should; None where that is not known, or `none` did not find it either. `unsure`: a second look had the moved tokens
    computed.
    """

    seconds: float
    graphs: float
    slots: int
    prefix: int
    moved: int
    recomputed: int
    computed: int
    padded: int
    due: NDArray[np.int64]
    close: Fidelity
    found: bool | None
    unsure: bool


Runs = dict[str, list[Run]]


def does(verdict: Verdict, mode: str) -> str:
    """What a mode with a store does, in words."""
    repair = _repairs(verdict)[mode]
    if repair is not None:
        return named(repair)
    return "exact prefixes" if mode == "prefix" else "falls back to exact prefixes"


def _repairs(verdict: Verdict) -> dict[str, AnyRepair | None]:
    """What each mode with a store does to moved runs; None: it uses none."""
    return {"prefix": None, "full": Nothing(), "fast": verdict.fast, "careful": verdict.careful}


class Bench:
    """A model whose graph calls are timed, and the verdict that says what `fast` and `careful` do.

    whole_width: every graph reads all slots of its context, none a window of them.
    """

    def __init__(self, path: Path, *, whole_width: bool = False) -> None:
        self.model = LanguageModel(path)
        self.watch = TimedRuntime(OnnxRuntime())
        self.engine = StaticGraphEngine(
            path,
            runtime=self.watch,
            windows={} if whole_width else WINDOWS,
            groups=LAYER_GROUPS,
            cache=models.cache_directory() / "engine",
        )
        self.model.engine = self.engine
        self.verdict = UNMEASURED
        self._warm: set[int] = set()

    def size(self, text: str) -> int:
        return len(self.model.tokenizer.encode(text))

    def calibrate(self, own: Sequence[Request], progress: Progress) -> None:
        """Measure what `fast` does instead of assuming it, on the prompts `own`."""
        task = progress.add_task("calibration", total=1.0)
        prompts = list(map(self._prompt, own))
        with kvstore.open(None, identity=self.model.identity) as store:
            self.verdict = calibrate(
                self.model,
                store,
                "\n\n".join(topics.values()),
                own=prompts,
                trials=0,
                progress=lambda share: progress.update(task, completed=share),
            )

    def measure(self, name: str, requests: Sequence[Request], folder: Path, progress: Progress) -> Runs:
        """Serve one workload; the measured requests in all modes."""
        runs: Runs = {mode: [] for mode in MODES}
        prompts = list(map(self._prompt, requests))
        for prompt in prompts:
            self._warm_up(len(prompt) + FORCED)
        with kvstore.open(folder, identity=self.model.identity) as store:
            # All modes look into one store, so `fast` is not to keep its KV in a view of its own.
            store.keep_verdict(msgspec.structs.replace(self.verdict, codecs=()))
            exact, fast = Session(self.engine, store, "exact"), Session(self.engine, store, "fast")
            task = progress.add_task(name, total=len(requests))
            for number, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
                if request.measured:
                    first = runs["none"] == []
                    for mode, run in self._all_modes(store, request, prompt, number, rehearse=first).items():
                        runs[mode].append(run)
                (fast if request.measured else exact).generate(prompt, 1)
                store.flush()
                progress.advance(task)
        return runs

    def bounds(self, runs: Sequence[Run]) -> list[float]:
        """Seconds that no calls could beat: each token that was due at the best rate of any graph that sees its slot.

        Rates are medians of the latest workload. With graphs of whole width alone, that is the best rate of any.
        """
        calls = self.calls()
        found = []
        for run in runs:
            windows = sorted({window for _, slots, window, _, _ in calls if slots == run.slots})
            rates = [
                max(
                    size / seconds
                    for size, slots, of, seconds, _ in calls
                    if slots == run.slots and of >= window
                )
                for window in windows
            ]
            needs = np.searchsorted(windows, run.due + 1)
            found.append(float((1 / np.array(rates))[needs].sum()))
        return found

    def calls(self) -> list[tuple[int, int, int, float, int]]:
        """(C, S, W, median seconds, how many) of the graph calls in the measured part of the latest workload."""
        found = []
        shapes = sorted({shape[:3] for shape in self.watch.samples}, key=lambda shape: (*shape[1:], shape[0]))
        for size, slots, window in shapes:
            parts = [self.watch.samples[size, slots, window, layers] for layers in self.engine.layer_groups]
            if all(parts):
                seconds = sum(statistics.median(samples) for samples in parts)
                found.append((size, slots, window, seconds, len(parts[0])))
        return found

    def _prompt(self, request: Request) -> NDArray[np.int32]:
        asked = self.model.chat_prompt(request.system, request.user)
        return np.concatenate([asked, self.model.tokenizer.encode(request.opening)])

    def _all_modes(
        self, store: KVStore, request: Request, prompt: NDArray[np.int32], number: int, *, rehearse: bool
    ) -> dict[str, Run]:
        """`none` first, since the others are compared with it, then the others in an order that goes round."""
        store.promote(store.lookup(prompt, moved=True), to="warm")
        repairs = _repairs(self.verdict)
        if rehearse:  # brings into memory and makes ready whatever `warm_up` did not
            for repair in repairs.values():
                kv = self.engine.allocate(len(prompt) + FORCED)
                prefill(self.engine, store, prompt, kv, repair)
                self.engine.recycle(kv)
            self.watch.samples.clear()
        store.flush()
        run, full = self._answer(request, prompt, lambda kv: _computed(self.engine, prompt, kv), None)
        runs = {"none": run}
        others = [mode for mode in repairs if mode == "prefix" or repairs[mode] is not None]
        for mode in others[number % len(others) :] + others[: number % len(others)]:
            store.flush()
            repair = repairs[mode]
            fill = partial(prefill, self.engine, store, prompt, repair=repair)
            run, _ = self._answer(request, prompt, fill, full)
            runs[mode] = run._replace(due=self._due(store, prompt, repair, run))
        return {mode: runs.get(mode, runs["prefix"]) for mode in MODES}

    def _answer(
        self,
        request: Request,
        prompt: NDArray[np.int32],
        fill: Callable[[KvAllocation], Prefilled],
        full: Reference | None,
    ) -> tuple[Run, Reference]:
        """Answer a prompt, whose KV `fill` brings, and compare with `full`; without that, it is what this run gives."""
        engine, end = self.engine, len(prompt)
        graphs, padding = self.watch.seconds, engine.statistics.padding
        started = time.perf_counter()
        kv = engine.allocate(end + FORCED)
        done = fill(kv)
        done.logits.argmax()
        seconds = time.perf_counter() - started
        graphs, padding = self.watch.seconds - graphs, engine.statistics.padding - padding
        original = full or reference(engine, kv, done.logits, end)
        close = fidelity(engine, kv, done.logits, end, original)
        found = None
        if self._holds(request, original.answer):
            found = full is None or self._holds(request, greedy(engine, kv, done.logits, end))
        run = Run(
            seconds=seconds,
            graphs=graphs,
            slots=kv.slots,
            prefix=done.prefix,
            moved=done.moved,
            recomputed=done.recomputed,
            computed=done.computed,
            padded=padding,
            due=np.arange(done.prefix, end),
            close=close,
            found=found,
            unsure=done.unsure,
        )
        engine.recycle(kv)
        return run, original

    def _due(
        self, store: KVStore, prompt: NDArray[np.int32], repair: AnyRepair | None, done: Run
    ) -> NDArray[np.int64]:
        """Where tokens had to be computed. Raises AssertionError if a token was reused that is not the prompt's.

        What is checked is what a look-up finds now; that `done` used the same is told by the number of tokens.
        """
        if done.unsure:
            return done.due
        match = store.lookup(prompt, moved=repair is not None)
        costs = self.engine.costs(done.slots)
        choice = choose(len(prompt), match.length, match.runs, repair or Nothing(), costs)
        for block in match.blocks:
            held = block.tokens[: max(0, match.length - block.start)]
            assert np.array_equal(held, prompt[block.start : block.start + len(held)]), "another prefix"
        moved = np.zeros(len(prompt), bool)
        for run in choice.runs:
            assert sum(piece.length for piece in run.pieces) == run.length, "pieces do not make up their run"
            moved[run.target : run.target + run.length] = True
            for piece in run.pieces:
                held = piece.block.tokens[piece.offset : piece.offset + piece.length]
                wanted = prompt[piece.target : piece.target + piece.length]
                assert np.array_equal(held, wanted), f"moved tokens at {piece.target} differ"
        assert choice.prefix == done.prefix, "another prefix than is found now"
        assert moved.sum() == done.moved + done.recomputed, "other runs than are found now"
        if repair is None or not choice.runs:
            return done.due
        again = spread(np.flatnonzero(moved), min(repair.least(repairable(choice.runs)), done.recomputed))
        moved[: done.prefix], moved[again] = True, False
        return np.flatnonzero(~moved)

    def _holds(self, request: Request, answer: Sequence[int]) -> bool:
        said = self.model.tokenizer.decode(answer).lower()
        return any(expected.lower() in said for expected in request.question.answers)

    def _warm_up(self, tokens: int) -> None:
        kv = self.engine.allocate(tokens)
        self.engine.recycle(kv)
        if kv.slots not in self._warm:
            self._warm.add(kv.slots)
            self.engine.warm_up(tokens)


def _computed(engine: StaticGraphEngine, prompt: NDArray[np.int32], kv: KvAllocation) -> Prefilled:
    """What a prefill without a store comes to."""
    tiers = {"hot": 0, "warm": 0, "cold": 0}
    return Prefilled(engine.prefill(prompt, kv), 0, 0, 0, len(prompt), tiers, 0, 0.0, len(prompt))


def report_verdict(report: Report, name: str, verdict: Verdict) -> None:
    """What calibration found, cheapest first; what takes second looks and keeps not close is left out."""
    rows = report.table(
        f"{name}: calibration, on other prompts of this workload",
        ("repair", "cost", "second looks", "prompts", "KL of 16", "first equal", "surely", "policy"),
    )
    for each in sorted(verdict.measurements, key=cost):
        if isinstance(each.repair, WhenSure) and not keeps_close(each):
            continue
        rows.append(
            (
                named(each.repair),
                cost(each),
                each.looked,
                each.prompts,
                each.kl_mean,
                each.first_agrees,
                each.first_at_least,
                "fast" if each.repair == verdict.fast else "",
            )
        )
    if reason := verdict.why_none("fast"):
        rows.append((f"fast: {reason}", "", "", "", "", "", "", "exact"))


def report_workload(report: Report, bench: Bench, name: str, runs: Runs) -> None:
    """Tables and bars of one workload."""
    none, prefix, fast = runs["none"], runs["prefix"], runs["fast"]
    lengths = [run.computed for run in none]
    rows = report.table(
        f"{name}: {len(none)} prompts of {min(lengths)} to {max(lengths)} tokens; TTFT medians, tokens means",
        (
            "mode", "TTFT ms", "mean", "none / it", "prefix / it", "graphs ms", "TTFT / graphs", "TTFT / bound",
            "/ best rate", "prefix", "moved", "again", "computed", "padded",
        ),
    )  # fmt: skip
    for mode, some in runs.items():
        rows.append(
            (
                mode,
                _ttft(some) * 1e3,
                statistics.fmean(run.seconds for run in some) * 1e3,
                _ttft(none) / _ttft(some),
                _ttft(prefix) / _ttft(some),
                statistics.median(run.graphs for run in some) * 1e3,
                statistics.median(run.seconds / run.graphs for run in some),
                _over_bound(bench, some),
                _over_best_rate(bench, some),
                *(round(statistics.fmean(count(run) for run in some)) for count in _COUNTS),
            )
        )
    chosen = "set by hand" if bench.verdict == UNMEASURED else "as calibrated"
    rows = report.table(
        f"{name}: answers against none; policies {chosen}",
        (
            "mode", "what it does", "KL first", "KL of 16", "first equal", "16 equal", "found", "second looks",
            "TTFT of these / prefix",
        ),
    )  # fmt: skip
    for mode, some in runs.items():
        found = [run.found for run in some if run.found is not None]
        unsure = [run.seconds / base.seconds for run, base in zip(some, prefix, strict=True) if run.unsure]
        what = "computes all" if mode == "none" else does(bench.verdict, mode)
        slower = statistics.median(unsure) if unsure else ""
        rows.append((mode, what, *_quality(some), f"{sum(found)} of {len(found)}", len(unsure), slower))
    rows = report.table(
        f"{name}: graph calls, C tokens over the first W of S slots",
        ("S", "W", "C", "calls", "median ms", "tokens / s", "planned with ms"),
    )
    for size, slots, window, seconds, calls in bench.calls():
        planned = bench.engine.costs(slots).of(size, window)
        rows.append((slots, window, size, calls, seconds * 1e3, size / seconds, planned * 1e3))
    if name.startswith("notes"):
        _bars_of_notes(report, bench, name, runs)
    else:
        moved = [at for at, run in enumerate(runs["full"]) if run.moved]
        if moved:
            gain = _ttft([prefix[at] for at in moved]) / _ttft([fast[at] for at in moved])
            report.bar(f"B2 {name}, TTFT prefix / fast where tokens moved", gain, ">", 1.0)
    for mode in ("fast", "careful") if bench.verdict.careful is not None else ("fast",):
        slower = statistics.median(
            run.seconds / base.seconds for run, base in zip(runs[mode], prefix, strict=True)
        )
        report.bar(f"B2 {name}, TTFT {mode} / prefix", slower, "<=", 1.03)


def report_facts(report: Report, runs: Sequence[Runs]) -> None:
    """Over all workloads whose answers are known."""
    kept = [run.found for each in runs for run in each["careful"] if run.found is not None]
    if kept:
        name = f"B2 recall of careful, of {len(kept)} prompts that none answers"
        report.bar(name, statistics.fmean(kept), ">=", 0.90)


_COUNTS: tuple[Callable[[Run], int], ...] = (
    lambda run: run.prefix,
    lambda run: run.moved,
    lambda run: run.recomputed,
    lambda run: run.computed,
    lambda run: run.padded,
)


def _bars_of_notes(report: Report, bench: Bench, name: str, runs: Runs) -> None:
    careful_moves = bench.verdict.careful is not None
    none, prefix, full, fast, careful = (runs[mode] for mode in MODES)
    report.bar(f"B1 {name}, TTFT none / fast", _ttft(none) / _ttft(fast), ">=", 3.9)
    report.bar(f"B1 {name}, TTFT prefix / fast", _ttft(prefix) / _ttft(fast), ">=", 3.4)
    report.bar(f"B1 {name}, TTFT fast / full", _ttft(fast) / _ttft(full), "<=", 1.20)
    if careful_moves:
        report.bar(f"B1 {name}, TTFT none / careful", _ttft(none) / _ttft(careful), ">=", 3.2)
    for mode in ("fast", "careful") if careful_moves else ("fast",):
        _, kl, first, all_equal = _quality(runs[mode])
        report.bar(f"B1 {name}, {mode}: mean KL over 16 tokens", kl, "<=", 0.04, "nats")
        report.bar(f"B1 {name}, {mode}: first tokens equal", first, ">=", 0.97)
        report.bar(f"B1 {name}, {mode}: 16 tokens equal", all_equal, ">=", 0.93)
    over = statistics.median(run.seconds / run.graphs for run in fast)
    report.bar(f"B3 {name}, TTFT fast / its graph calls", over, "<=", 1.10)
    report.bar(f"B3 {name}, TTFT fast / call-free bound, by slot", _over_bound(bench, fast), "<=", 1.40)


def _ttft(runs: Sequence[Run]) -> float:
    return statistics.median(run.seconds for run in runs)


def _over_bound(bench: Bench, runs: Sequence[Run]) -> float:
    """Median of TTFT over that of calls without edges."""
    bounds = bench.bounds(runs)
    return statistics.median(run.seconds / bound for run, bound in zip(runs, bounds, strict=True))


def _over_best_rate(bench: Bench, runs: Sequence[Run]) -> float:
    """The same where all tokens had the best rate of any graph, also of those that do not see their slots."""
    best = {
        slots: max(size / seconds for size, of, _, seconds, _ in bench.calls() if of == slots)
        for slots in {run.slots for run in runs}
    }
    return statistics.median(run.seconds * best[run.slots] / len(run.due) for run in runs)


def _quality(runs: Sequence[Run]) -> tuple[float, float, float, float]:
    """KL at the first token, KL over 16, share of first tokens equal, share of 16 equal."""
    return (
        statistics.fmean(float(run.close.kl[0]) for run in runs),
        statistics.fmean(float(run.close.kl.mean()) for run in runs),
        statistics.fmean(bool(run.close.agrees[0]) for run in runs),
        statistics.fmean(float(run.close.agrees.mean()) for run in runs),
    )
