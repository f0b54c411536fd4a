"""What a cold hit costs beside a hot one: the two-dimensional pipeline, for real and at the speeds of phones.

    python -m bench.pipeline [--quick] [--check] [--only real,simulated,aborts] [--json FILE]

real: SmolLM2-135M-Instruct on ONNX Runtime CPU. A prompt of 2,000 tokens, 10 % a held prefix, 75 % held passages in
another order; cold is flash, the page cache dropped. Simulated: an NPU and a flash part that sleep as long as a device
class takes (`prefetch.cost.DEVICES`), for a model with the KV of Qwen3-1.7B in int8; nothing is computed. Aborts: a
tiny model's requests, each aborted at a random point, then everything counted that could leak.

    hot            everything in memory that the NPU reads
    cold           everything on flash; graphs start layer group by layer group, flash is asked for what pays
    no overlap     everything on flash, one layer group: nothing starts before all is in place
    load all       cold, but everything is loaded, whatever flash takes
    recompute      nothing is loaded

Busy is the share of TTFT in which graphs ran. Compared figures come from one run, in turns; figures are medians.
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

import kvstore
from bench.report import Report, arguments
from bench.simulated_device import reads_take
from bench.timed_runtime import TimedRuntime
from bench.ttft import _drop_page_cache
from kvstore import models
from kvstore.language_model import LanguageModel
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.onnx_runtime import OnnxRuntime
from kvstore.pipeline.recompute import FirstTokens
from kvstore.pipeline.simulated import IdleRuntime, SimulatedFlash, SimulatedNpu, roofline
from kvstore.prefetch.cost import DEVICES, DeviceCosts
from kvstore.prefetch.load_or_recompute import Throughput
from kvstore.prefill import Prefilled, prefill
from kvstore.session import identity_of
from kvstore.store import KVStore, Match
from tests.faults.aborts import abort_runs
from tests.tiny_models import write_tiny_gguf

_PARTS = ("real", "simulated", "aborts")
_REPAIR = FirstTokens(8)
_REAL_GROUPS = 10  # layer groups of 3 layers
_SIMULATED_LAYERS = 28  # of Qwen3-1.7B, for each of which one layer of a tiny model stands
_SIMULATED_GROUPS = 16  # the first three of 1 layer, the others of 2
_KV_BYTES = 56 * 1024  # a token of Qwen3-1.7B in int8
_WEIGHT_BYTES = 0.9e9  # of Qwen3-1.7B in 4 bits
_MEMORY = 60e9  # bytes a second
_LAUNCH = 0.3e-3  # seconds a graph; on this CPU splitting graphs costs 0.2 ms a part
_EVERYTHING_PAYS = ("flagship", "mid", "paper", "laptop")
_WEAK = ("low", "aged")

Tokens = NDArray[np.int32]


class Run(NamedTuple):
    """One prefill. `graphs`, `flash`: seconds in which graphs ran and in which the medium read (0: not known)."""

    seconds: float
    graphs: float
    flash: float
    done: Prefilled | None


def main() -> int:
    args = arguments(__doc__ or "", _options)
    sys.setswitchinterval(0.0005)  # this and `_freeze`: as docs/engine.md advises
    parts = args.only.split(",")
    if unknown := {*parts} - {*_PARTS}:
        sys.exit(f"unknown part {', '.join(unknown)}; there are {', '.join(_PARTS)}")
    report = Report(
        "bench.pipeline",
        "real: ONNX Runtime CPU and files, page cache dropped; simulated: sleeps, see each table",
    )
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder, Progress(transient=True) as progress:
        if "real" in parts:
            _real(report, Path(folder) / "real", 3 if args.quick else 9, progress)
        if "simulated" in parts:
            _simulated(report, Path(folder), args, progress)
        if "aborts" in parts:
            _aborts(report, Path(folder) / "aborts", 500 if args.quick else 10_000, progress)
    return report.finish(args)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", default=",".join(_PARTS), metavar="PARTS", help="some of these parts")
    parser.add_argument(
        "--devices", default=",".join(DEVICES), metavar="NAMES", help="device classes to simulate"
    )


# -- prompts ---------------------------------------------------------------------------------------------------------


class Prompts:
    """Prompts of `tokens` tokens with a system prompt and passages in common. `draw(n)` gives n tokens never seen."""

    def __init__(self, tokens: int, draw: Callable[[int], Tokens]) -> None:
        self._draw = draw
        self._fresh = tokens * 15 // 100
        self._system = draw(tokens // 10)
        self._passages = [draw(tokens * 3 // 4 // 6) for _ in range(6)]

    def first(self) -> Tokens:
        """What fills the store."""
        return np.concatenate([self._system, self._draw(self._fresh), *self._passages, self._draw(16)])

    def next(self) -> Tokens:
        """10 % prefix, 75 % passages in another order with something new before each, then a question."""
        seams = self._fresh // 15
        middle = [part for at in (3, 0, 5, 1, 4, 2) for part in (self._draw(seams), self._passages[at])]
        return np.concatenate([self._system, *middle, self._draw(self._fresh - 6 * seams)])


# -- for real --------------------------------------------------------------------------------------------------------


def _real(report: Report, folder: Path, repeats: int, progress: Progress) -> None:
    path = models.smollm2()
    model = LanguageModel(path)
    text = iter(np.array_split(_text(model), 4096))
    prompts = Prompts(2000, lambda count: _take(text, count))
    watches = {groups: TimedRuntime(OnnxRuntime()) for groups in (1, _REAL_GROUPS)}
    engines = {
        groups: StaticGraphEngine(
            path, runtime=watch, groups=groups, contexts=(2048,), cache=models.cache_directory() / "engine"
        )
        for groups, watch in watches.items()
    }
    modes = {"hot": _REAL_GROUPS, "cold": _REAL_GROUPS, "no overlap, hot": 1, "no overlap": 1}
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    task = progress.add_task("for real", total=(repeats + 1) * len(modes))
    with kvstore.open(folder, identity=model.identity) as store:
        _fill(store, engines[1], prompts.first())
        for turn in range(repeats + 1):
            prompt = prompts.next()
            if turn == 1:
                _freeze()
            for mode, groups in modes.items():
                _bring(store, prompt, "hot" if "hot" in mode else "cold")
                run = _measured(engines[groups], store, prompt, lambda: watches[groups].seconds)  # noqa: B023
                if turn:  # the first turn compiles graphs and warms up
                    runs[mode].append(run)
                progress.advance(task)
    rows = report.table(
        f"SmolLM2-135M, 2,000 tokens, 10 % prefix, 75 % moved (medians of {repeats})",
        ("", "TTFT ms", "of hot", "busy", "store ms", "prefix", "moved", "computed", "read MB"),
    )
    hot = _median(runs["hot"])
    for mode, each in runs.items():
        done = each[-1].done
        assert done is not None
        rows.append(
            (
                mode,
                _median(each) * 1e3,
                _median(each) / hot,
                _busy(each),
                statistics.median(run.done.store_seconds for run in each if run.done) * 1e3,
                done.prefix,
                done.moved,
                done.recomputed + done.computed,
                done.bytes_read / 1e6,
            )
        )
    ratio = statistics.median(
        cold.seconds / hot.seconds for cold, hot in zip(runs["cold"], runs["hot"], strict=True)
    )
    report.bar("C1 TTFT cold / hot", ratio, "<=", 1.10)
    report.bar("C1 cold: graphs busy", _busy(runs["cold"]), ">=", 0.95)


def _text(model: LanguageModel) -> Tokens:
    return model.tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))


def _take(pieces: Iterator[Tokens], count: int) -> Tokens:
    taken = [next(pieces)]
    while sum(map(len, taken)) < count:
        taken.append(next(pieces))
    return np.concatenate(taken)[:count]


# -- at the speed of phones ------------------------------------------------------------------------------------------


class Device:
    """A simulated device with a store on its flash: two engines, of many layer groups and of one."""

    def __init__(self, costs: DeviceCosts, folder: Path, tokens: int) -> None:
        self.costs = costs
        self.npus = {}
        self.engines = {}
        seconds = roofline(
            costs.recompute.tokens_per_second,
            weight_bytes=_WEIGHT_BYTES,
            memory_bytes_per_second=_MEMORY,
            double_at=costs.recompute.double_at,
        )
        write_tiny_gguf(
            folder / "tiny.gguf",
            layers=_SIMULATED_LAYERS,
            hidden=64,
            heads=2,
            kv_heads=2,
            head_dim=32,
            ffn=32,
            context=4096,
        )
        for groups in (1, _SIMULATED_GROUPS):
            npu = SimulatedNpu(
                IdleRuntime(), _SIMULATED_LAYERS, seconds, launch_seconds=_LAUNCH, name=costs.name
            )
            self.npus[groups] = npu
            self.engines[groups] = StaticGraphEngine(
                folder / "tiny.gguf",
                runtime=npu,
                sizes=(1, 32, 128, 512),
                contexts=(2048,),
                groups=groups,
                cache=folder / "cache",
            )
        engine = self.engines[_SIMULATED_GROUPS]
        noise = np.random.default_rng(1)
        self.prompts = Prompts(tokens, lambda count: noise.integers(0, 300, count).astype(np.int32))
        identity = identity_of(engine, "00" * 32)
        block = identity.layout.block_bytes(128)
        profile = kvstore.Profile(frame_bytes=block // _SIMULATED_GROUPS)
        self.store = kvstore.open(folder / "kv", identity=identity, profile=profile)
        held = self.prompts.first()
        kv = engine.allocate(len(held))
        for array in (*kv.keys, *kv.values):
            array[:] = noise.standard_normal(array.shape)
        self.store.put(held, kv, wait=60)
        self.store.flush()
        on_flash = self.store.stats().cold
        stored = sum(block.cold_bytes for block in self.store.lookup(held).blocks) / len(held)
        assert on_flash.blocks
        self.flash = SimulatedFlash(lambda nbytes: costs.load_seconds(nbytes, "cold"), _KV_BYTES / stored)

    def run(self, mode: str, prompt: Tokens) -> Run:
        """One prefill in one mode, everything on flash before, or in memory for `hot`."""
        groups = 1 if mode == "no overlap" else _SIMULATED_GROUPS
        engine, npu = self.engines[groups], self.npus[groups]
        _bring(self.store, prompt, "hot" if mode == "hot" else "cold")
        before = self.flash.busy_seconds
        with reads_take(self.flash):
            if mode == "recompute":
                graphs, started = npu.busy_seconds, time.perf_counter()
                engine.prefill(prompt, engine.allocate(len(prompt) + 1))
                return Run(time.perf_counter() - started, npu.busy_seconds - graphs, 0.0, None)
            with _unknown_flash(self.store, mode in ("load all", "no overlap")):
                run = _measured(engine, self.store, prompt, lambda: npu.busy_seconds)
        return run._replace(flash=self.flash.busy_seconds - before)


@contextmanager
def _unknown_flash(store: KVStore, unknown: bool) -> Iterator[None]:
    """A store that does not know yet how fast its flash is loads all that it holds."""
    tiers = store._tiers
    known = tiers.flash
    if unknown:
        tiers.flash = Throughput()
    try:
        yield
    finally:
        tiers.flash = known


def _simulated(report: Report, folder: Path, args: argparse.Namespace, progress: Progress) -> None:
    rows = report.table(
        "SIMULATED devices: Qwen3-1.7B int8, 10 % prefix, 75 % moved (medians)",
        (
            "device",
            "flash",
            "prompt",
            "mode",
            "TTFT ms",
            "busy",
            "flash ms",
            "loaded tokens",
            "computed",
            "TTFT / max(load, compute)",
        ),
    )
    for name in args.devices.split(","):
        weak = name in _WEAK
        tokens = 600 if args.quick and weak else 1000 if weak else 2000
        repeats = (1 if weak else 2) if args.quick else (3 if weak else 15)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            device = Device(DEVICES[name], Path(place), tokens)
            with device.store:
                for slowdown in (1.0, 20.0) if args.quick and weak else (1.0, 20.0, 60.0) if weak else (1.0,):
                    device.flash.slowdown = slowdown
                    _one_device(report, rows, device, slowdown, repeats, progress)


def _one_device(
    report: Report,
    rows: list[Sequence[object]],
    device: Device,
    slowdown: float,
    repeats: int,
    progress: Progress,
) -> None:
    name = device.costs.name
    modes = ("cold", "load all", "recompute") if name in _WEAK else ("hot", "cold", "no overlap")
    runs: dict[str, list[Run]] = {mode: [] for mode in modes}
    prompts = [device.prompts.next() for _ in range(repeats + 1)]
    device.store._tiers.flash = Throughput()
    for mode in modes:  # also shows how fast flash is now
        device.run(mode, prompts[0])
    _freeze()
    for prompt in progress.track(prompts[1:], description=f"simulated {name}, flash / {slowdown:g}"):
        for mode in modes:
            runs[mode].append(device.run(mode, prompt))
    for mode, each in runs.items():
        done = each[-1].done
        reused = 0 if done is None else done.prefix + done.moved + done.recomputed
        rows.append(
            (
                name,
                f"1 / {slowdown:g}",
                len(prompts[0]),
                mode,
                _median(each) * 1e3,
                _busy(each),
                statistics.median(run.flash for run in each) * 1e3,
                reused,
                len(prompts[0]) - reused + (0 if done is None else done.recomputed),
                _over_bound(each),
            )
        )
    if name in _WEAK:
        better = min(_median(runs["load all"]), _median(runs["recompute"]))
        over = _median(runs["cold"]) / better
        report.bar(f"C2 simulated {name}, flash / {slowdown:g}: TTFT / better of the two", over, "<=", 1.05)
    elif name != "laptop":
        report.bar(f"C2 simulated {name}: graphs busy", _busy(runs["cold"]), ">=", 0.95)
        report.bar(f"C2 simulated {name}: TTFT / max(load, compute)", _over_bound(runs["cold"]), "<=", 1.10)


def _over_bound(runs: Sequence[Run]) -> float:
    return statistics.median(run.seconds / max(run.graphs, run.flash) for run in runs)


# -- aborts ----------------------------------------------------------------------------------------------------------


def _aborts(report: Report, folder: Path, count: int, progress: Progress) -> None:
    logging.getLogger("kvstore").setLevel(logging.ERROR)  # each abandoned lease is worth a warning
    task = progress.add_task("aborts", total=count)
    result = abort_runs(folder, count, seed=2026, seen=lambda done: progress.update(task, completed=done))
    rows = report.table("requests aborted at random points", ("where", "aborts"))
    rows += result.where.most_common()
    for leak in result.leaks[:5]:
        print(leak, file=sys.stderr)
    report.bar("C5 aborted requests", result.where.total(), ">=", count)
    report.bar("C5 leaks of leases, buffers, threads, descriptors, staging bytes", len(result.leaks), "<=", 0)


# -- measuring -------------------------------------------------------------------------------------------------------


def _freeze() -> None:
    """What is loaded for good is not looked through again by the garbage collector, which takes tens of ms."""
    gc.collect()
    gc.freeze()


def _fill(store: KVStore, engine: StaticGraphEngine, tokens: Tokens) -> None:
    kv = engine.allocate(len(tokens))
    engine.prefill(tokens, kv)
    store.put(tokens, kv, wait=60)
    engine.recycle(kv)


def _bring(store: KVStore, prompt: Tokens, tier: str) -> None:
    """See to it that all that the prompt reuses lies in this tier and nowhere nearer."""
    for _ in range(2):  # moves to hot memory wait for writes
        store.flush()
    found = store.lookup(prompt, moved=True)
    blocks = dict.fromkeys([*found.blocks, *(piece.block for run in found.runs for piece in run.pieces)])
    store.demote(Match(found.length, tuple(blocks)))
    if tier == "hot":
        store.promote(found)
    elif store.path is not None:
        _drop_page_cache(store.path)
    assert {block.tier for block in blocks} == {tier}, f"wanted all in {tier} memory"


def _measured(
    engine: StaticGraphEngine, store: KVStore, prompt: Tokens, graph_seconds: Callable[[], float]
) -> Run:
    graphs, started = graph_seconds(), time.perf_counter()
    kv = engine.allocate(len(prompt) + 1)
    done = prefill(engine, store, prompt, kv, _REPAIR)
    done.logits.argmax()
    run = Run(time.perf_counter() - started, graph_seconds() - graphs, 0.0, done)
    engine.recycle(kv)
    return run


def _median(runs: Sequence[Run]) -> float:
    return statistics.median(run.seconds for run in runs)


def _busy(runs: Sequence[Run]) -> float:
    return statistics.median(run.graphs / run.seconds for run in runs)


if __name__ == "__main__":
    sys.exit(main())
