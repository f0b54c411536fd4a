"""What the tokens that have to be computed cost in static-graph calls, by the way the calls are chosen.

    python -m bench.scheduler [--data DIR] [--quick] [--check] [--json FILE]

Lengths are real with --data: prompts of azure-llm-2023, of which nothing is reused, and the streams of
`bench.workloads`, in which a segment shown before is reused and some of its tokens are computed again: the first 8, or
15 % in spans as attention would choose them (here: by chance). Ways to choose calls:

    one graph           a single static graph, C x S: S is the largest context, whatever a prompt needs; each piece is
                        padded by itself: a stack without a scheduler
    one size, apart     a single C, each piece padded by itself, but of each context length S
    one size, merged    a single C over all pieces together
    pieces apart        the cheapest calls for each piece by itself
    greedy              the better of two: calls of the largest size while they are full, then the smallest that holds
                        the rest; or always the call that costs least per token it takes
    scheduled           kvstore.pipeline.schedule
    any order           merged without regard to order, an unbounded knapsack: what no way to merge beats
    call-free           tokens at the best seconds per token: what nothing beats

A single C is the best one in hindsight, workload by workload. Calls of this engine take any ascending tokens, so
merging in order should reach the bound for any order.

Costs are this machine's: SmolLM2-135M-Instruct on ONNX Runtime CPU, at two context lengths. They are processor seconds
of a call divided by the threads, which other work on the machine hardly changes; wall time stands beside them.
With --quick they are wall times, as the engine measured them earlier.
"""

from __future__ import annotations

import csv
import math
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from bench.report import Report, arguments
from bench.workloads import Request, workload
from kvstore import models
from kvstore.moved import SHORTEST
from kvstore.pipeline.call import Call
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.kv_allocation import KvAllocation
from kvstore.pipeline.onnx_runtime import OnnxRuntime
from kvstore.pipeline.recompute import Attended, Evidence, FirstTokens, MovedRun, select
from kvstore.pipeline.schedule import CallCosts, interpolate, suggest_sizes
from kvstore.pipeline.tokenizer import Tokenizer

CONTEXTS = (1024, 2048)
REPAIRS = {"first 8": FirstTokens(8), "attended 15 %": Attended(0.15)}
REUSING = ("notes-1000", "notes-2000", "hops", "phone", "tools", "meeting")
HELD_TO = ("azure", "log-normal", "notes", "hops")  # requests of a service, and RAG; the others are shown
THREADS = len(os.sched_getaffinity(0))


class Prompt(NamedTuple):
    """The tokens of a prompt that have to be computed: lengths of what stands together, in order, and over what S."""

    slots: int
    pieces: tuple[int, ...]


Workload = Counter[Prompt]
Costs = Mapping[int, CallCosts]
"""By context length S."""
Sizes = Sequence[int]
Choose = Callable[[Prompt, CallCosts], Sizes]


def main() -> int:
    args = arguments(__doc__ or "")
    path = models.smollm2()
    engine = StaticGraphEngine(
        path, runtime=OnnxRuntime(threads=THREADS), cache=models.cache_directory() / "engine"
    )
    encode = Tokenizer.from_gguf(path).encode
    report = Report(
        "bench.scheduler", "ONNX Runtime CPU; costs of calls x lengths, run only where it says so"
    )
    with Progress(transient=True) as progress:
        costs = _kept(report, engine) if args.quick else _measured(report, engine, 5, progress)
        workloads = _azure(args.data)
        for name in progress.track(REUSING, description="workloads"):
            workloads |= _reused(name, encode, args.data, 40 if args.quick else 150)
        _compare(report, workloads, costs)
        _suggest(report, workloads, costs[CONTEXTS[0]])
        _refresh(report, workloads["notes-1000, first 8"], costs[CONTEXTS[0]])
        if not args.quick:
            _run(report, engine, workloads["notes-1000, first 8"], costs[CONTEXTS[0]], progress)
    return report.finish(args)


def _kept(report: Report, engine: StaticGraphEngine) -> Costs:
    costs = {slots: engine.costs(slots) for slots in CONTEXTS}
    rows = report.table(
        "ms of a call, as the engine keeps them", ("C", *(f"S={slots}" for slots in CONTEXTS))
    )
    for size in engine.sizes:
        rows.append((size, *(costs[slots].seconds[size] * 1e3 for slots in CONTEXTS)))
    return {slots: CallCosts(each.seconds) for slots, each in costs.items()}


def _measured(report: Report, engine: StaticGraphEngine, rounds: int, progress: Progress) -> Costs:
    """The least of `rounds` calls, all sizes and context lengths in turns."""
    walls: dict[tuple[int, int], list[float]] = {}
    costs: dict[tuple[int, int], list[float]] = {}
    memory = {slots: engine.allocate(slots - 1) for slots in CONTEXTS}
    for turn in progress.track(range(rounds + 1), description="costs"):
        for slots, kv in memory.items():
            for size in engine.sizes:
                wall, cost = _timed(engine, kv, [size])
                if turn:  # the first compiles
                    walls.setdefault((slots, size), []).append(wall)
                    costs.setdefault((slots, size), []).append(cost)
    rows = report.table(
        f"ms of a call, least of {rounds}: cost, cost of a token, wall time (far above cost: the machine was busy)",
        ("C", *(f"S={slots} {what}" for what in ("cost", "a token", "wall") for slots in CONTEXTS)),
    )
    for size in engine.sizes:
        each = [min(costs[slots, size]) * 1e3 for slots in CONTEXTS]
        wall_each = [min(walls[slots, size]) * 1e3 for slots in CONTEXTS]
        rows.append((size, *each, *(ms / size for ms in each), *wall_each))
    return {slots: CallCosts({size: min(costs[slots, size]) for size in engine.sizes}) for slots in CONTEXTS}


def _azure(data: Path | None) -> dict[str, Workload]:
    """Prompts of which nothing is reused, cut to the largest context."""
    if data is None:
        rng = random.Random(3)
        lengths = {"log-normal": [round(rng.lognormvariate(math.log(700), 1.0)) for _ in range(5000)]}
    else:
        lengths = {}
        for kind in ("conv", "code"):
            with (data / f"azure-llm-2023/AzureLLMInferenceTrace_{kind}.csv").open(newline="") as file:
                lengths[f"azure {kind}"] = [int(row["ContextTokens"]) for row in csv.DictReader(file)]
    found: dict[str, Workload] = {}
    for name, some in lengths.items():
        cut = (min(max(1, tokens), CONTEXTS[-1] - 1) for tokens in some)
        found[name] = Counter(Prompt(_slots(tokens), (tokens,)) for tokens in cut)
    return found


def _reused(
    name: str, encode: Callable[[str], NDArray[np.int32]], data: Path | None, count: int
) -> dict[str, Workload]:
    """A stream of requests, once for each repair: what is left to compute when all that was shown is held."""
    memo: dict[str, int] = {}

    def size(text: str) -> int:
        if text not in memo:
            memo[text] = len(encode(text))
        return memo[text]

    rng = np.random.default_rng(1)
    found: dict[str, Workload] = {f"{name}, {repair}": Counter() for repair in REPAIRS}
    shown: set[str] = set()
    for request in workload(name, data, size, count):
        if request.measured:
            held, runs, end = _spans(request, shown, size)
            attention = np.convolve(rng.pareto(1.5, end), np.ones(5), mode="same").astype(np.float32)
            for repair, choose in REPAIRS.items():
                again = select(choose, runs, Evidence(attention=attention)) if runs else []
                held_now = held.copy()
                held_now[again] = False
                found[f"{name}, {repair}"][Prompt(_slots(end), _lengths(~held_now))] += 1
        shown |= {request.system, *request.segments}
    return found


def _spans(
    request: Request, shown: set[str], size: Callable[[str], int]
) -> tuple[NDArray[np.bool_], list[MovedRun], int]:
    """Which tokens of a prompt are held (bool [tokens]), the moved runs among them, and how many tokens it has."""
    lengths = [size(request.system) + 8, *(size(segment) + 1 for segment in request.segments)]
    lengths.append(size(request.question.text) + 8)  # the chat template's tokens are at both ends
    ends = np.cumsum(lengths).tolist()
    held, runs = np.zeros(ends[-1], bool), []
    if request.system in shown:
        held[: ends[0]] = True
    for segment, begin, end in zip(request.segments, ends, ends[1:], strict=False):
        if segment in shown and end - begin >= SHORTEST:
            held[begin:end] = True
            runs.append(MovedRun(begin, end - begin))
    return held, runs, ends[-1]


def _slots(tokens: int) -> int:
    return next(slots for slots in CONTEXTS if tokens < slots)


def _lengths(chosen: NDArray[np.bool_]) -> tuple[int, ...]:
    """How many chosen tokens stand together, piece by piece."""
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0))
    return tuple((edges[1::2] - edges[::2]).tolist())


class Sum(NamedTuple):
    """All calls of a workload. `size`: of the only graph, where there is one."""

    seconds: float
    padding: int = 0
    size: int | None = None


def _compare(report: Report, workloads: Mapping[str, Workload], costs: Costs) -> None:
    """Every way to choose calls over every workload, and the bars."""
    knapsacks = {slots: _any_order(each.seconds) for slots, each in costs.items()}
    dearest, any_order = 0.0, 0.0
    ways = (
        "one graph", "one size, apart", "one size, merged", "pieces apart", "greedy", "any order", "call-free",
    )  # fmt: skip
    times = report.table(
        "seconds, as multiples of what is scheduled (single size)",
        ("workload", "prompts", "tokens", "pieces", "scheduled s", *ways),
    )
    paddings = report.table("padding, share of all places", ("workload", *ways[:5], "scheduled"))
    for name, prompts in workloads.items():
        sizes = costs[CONTEXTS[0]].seconds
        largest = Workload()
        for each, n in prompts.items():
            largest[Prompt(CONTEXTS[-1], each.pieces)] += n
        sums = {
            ways[0]: min(_total(largest, costs, _one_size(size), size) for size in sizes),
            ways[1]: min(_total(prompts, costs, _one_size(size), size) for size in sizes),
            ways[2]: min(_total(prompts, costs, _merged(_one_size(size)), size) for size in sizes),
            ways[3]: _total(prompts, costs, _pieces_apart),
            ways[4]: _total(prompts, costs, _greedy),
            ways[5]: Sum(sum(n * knapsacks[each.slots][sum(each.pieces)] for each, n in prompts.items())),
            ways[6]: Sum(
                sum(n * costs[each.slots].cover(sum(each.pieces)).bound for each, n in prompts.items())
            ),
        }
        ours = _total(prompts, costs, _scheduled)
        tokens, count = sum(sum(each.pieces) * n for each, n in prompts.items()), prompts.total()
        pieces = sum(len(each.pieces) * n for each, n in prompts.items())
        multiples = [
            f"{each.seconds / ours.seconds:.3f}" + (f" ({each.size})" if each.size else "")
            for each in sums.values()
        ]
        times.append((name, count, round(tokens / count), f"{pieces / count:.1f}", ours.seconds, *multiples))
        padded = [*(sums[way].padding for way in ways[:5]), ours.padding]
        paddings.append((name, *(f"{each / (tokens + each):.1%}" for each in padded)))
        if name.startswith(HELD_TO):
            least = sums["one graph"].seconds
            report.bar(f"B4 {name}: scheduled / best single graph", ours.seconds / least, "<=", 0.80)
        any_order = max(any_order, ours.seconds / sums["any order"].seconds)
        for each in prompts:
            greedy, scheduled = (choose(each, costs[each.slots]) for choose in (_greedy, _scheduled))
            dearest = max(dearest, _cost(scheduled, costs[each.slots]) / _cost(greedy, costs[each.slots]))
    report.bar("B4 scheduled / greedy, worst prompt of all", dearest, "<=", 1 + 1e-9)
    report.bar("B4 scheduled / any order, worst workload", any_order, "<=", 1.08)


def _total(prompts: Workload, costs: Costs, choose: Choose, size: int | None = None) -> Sum:
    seconds, padding = 0.0, 0
    for prompt, times in prompts.items():
        sizes = choose(prompt, costs[prompt.slots])
        seconds += times * _cost(sizes, costs[prompt.slots])
        padding += times * (sum(sizes) - sum(prompt.pieces))
    return Sum(seconds, padding, size)


def _cost(sizes: Iterable[int], costs: CallCosts) -> float:
    return sum(costs.seconds[size] for size in sizes)


def _one_size(size: int) -> Choose:
    return lambda prompt, _: [size] * sum(-(-piece // size) for piece in prompt.pieces)


def _merged(choose: Choose) -> Choose:
    return lambda prompt, costs: choose(Prompt(prompt.slots, (sum(prompt.pieces),)), costs)


def _pieces_apart(prompt: Prompt, costs: CallCosts) -> Sizes:
    return [size for piece in prompt.pieces for size in costs.cover(piece).sizes]


def _scheduled(prompt: Prompt, costs: CallCosts) -> Sizes:
    return costs.cover(sum(prompt.pieces)).sizes


def _greedy(prompt: Prompt, costs: CallCosts) -> Sizes:
    largest, left = max(costs.seconds), sum(prompt.pieces)
    full = [largest] * (left // largest)
    if rest := left % largest:
        full.append(min(size for size in costs.seconds if size >= rest))
    cheap: list[int] = []
    while left > 0:
        cheap.append(min(costs.seconds, key=lambda size: costs.seconds[size] / min(size, left)))
        left -= cheap[-1]
    return min(full, cheap, key=lambda sizes: _cost(sizes, costs))


def _any_order(seconds: Mapping[int, float]) -> list[float]:
    """The cheapest multiset of calls with room for n tokens, by n: size after size, however often each."""
    best = [0.0] + [math.inf] * CONTEXTS[-1]
    for size, cost in seconds.items():
        for tokens in range(1, len(best)):
            best[tokens] = min(best[tokens], best[max(0, tokens - size)] + cost)
    return best


def _suggest(report: Report, workloads: Mapping[str, Workload], costs: CallCosts) -> None:
    """Which graphs would serve a workload best, by costs on the line between measured ones."""
    candidates = {size: interpolate(costs.seconds, size) for size in range(32, max(costs.seconds) + 1, 32)}
    rows = report.table(
        f"suggested sizes, S={CONTEXTS[0]}, multiples of 32; seconds as share of the engine's {len(costs.seconds)}",
        ("workload", "graphs", "sizes", "seconds", "with all of them"),
    )
    for name in (next(iter(workloads)), "notes-1000, first 8", "phone, first 8"):
        lengths = Counter[int]()
        for prompt, times in workloads[name].items():
            lengths[sum(prompt.pieces)] += times
        own = _histogram(lengths, costs)
        least = _histogram(lengths, CallCosts(candidates))
        for count in (2, 4, 6):
            sizes = suggest_sizes(lengths, candidates, count)
            taken = _histogram(lengths, CallCosts({size: candidates[size] for size in sizes}))
            rows.append((name, count, ", ".join(map(str, sizes)), f"{taken / own:.3f}", f"{least / own:.3f}"))


def _histogram(lengths: Mapping[int, int], costs: CallCosts) -> float:
    return sum(times * costs.cover(tokens).seconds for tokens, times in lengths.items())


def _refresh(report: Report, prompts: Workload, best: CallCosts) -> None:
    """What wrong costs cost until calls have corrected them. Simulated: measured costs as truth, load by chance."""
    lengths = [sum(prompt.pieces) for prompt in prompts.elements()]
    rows = report.table(
        "refreshed costs (simulated): seconds above the best; a third of the calls take 1 to 3 times as long",
        ("table measured", "never refreshed", "prompts 1-20", "21-100", "101-300"),
    )
    for name, load in (("in quiet", (1.0,)), ("under load, 1 to 4 times as long", (1.0, 1.5, 2.0, 3.0, 4.0))):
        excess: list[list[float]] = []
        for seed in range(5):
            rng = random.Random(seed)
            wrong = {size: each * rng.choice(load) for size, each in best.seconds.items()}
            fixed, costs = CallCosts(wrong), CallCosts(wrong)
            parts = [_excess(best, fixed, lengths)]
            for count in (20, 80, 200):
                some = rng.choices(lengths, k=count)
                parts.append(_excess(best, costs, some, rng))
            excess.append(parts)
        rows.append((name, *(f"{statistics.mean(column):.1%}" for column in zip(*excess, strict=True))))


def _excess(
    best: CallCosts, costs: CallCosts, lengths: Sequence[int], load: random.Random | None = None
) -> float:
    """What prompts of these lengths take above the best, by `costs`, which learn from the calls where there is load."""
    taken = least = 0.0
    for tokens in lengths:
        sizes = costs.cover(tokens).sizes
        taken += _cost(sizes, best)
        least += best.cover(tokens).seconds
        if load:
            costs.observe([(size, best.seconds[size] * _slowness(load)) for size in sizes])
    return taken / least - 1


def _slowness(rng: random.Random) -> float:
    return rng.uniform(1, 3) if rng.random() < 1 / 3 else rng.uniform(1, 1.05)


def _run(
    report: Report, engine: StaticGraphEngine, prompts: Workload, costs: CallCosts, progress: Progress
) -> None:
    """Some prompts really run, in turns: whether the costs of single calls add up."""
    kv = engine.allocate(CONTEXTS[0] - 1)
    some = [prompt for prompt in prompts.elements() if prompt.slots == CONTEXTS[0]][:6]
    single = min(
        costs.seconds,
        key=lambda size: sum(_cost(_merged(_one_size(size))(each, costs), costs) for each in some),
    )
    ways: dict[str, Choose] = {
        f"one size, merged ({single})": _merged(_one_size(single)),
        "pieces apart": _pieces_apart,
        "scheduled": _scheduled,
    }
    taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for prompt in progress.track(some, description="runs"):
        for way, choose in ways.items():
            taken[way].append(_timed(engine, kv, choose(prompt, costs)))
    rows = report.table(
        f"{len(some)} prompts of notes-1000 run, in turns: seconds",
        ("calls", "by the costs", "measured", "wall"),
    )
    for way, choose in ways.items():
        walls, measured = zip(*taken[way], strict=True)
        rows.append((way, sum(_cost(choose(each, costs), costs) for each in some), sum(measured), sum(walls)))


def _timed(engine: StaticGraphEngine, kv: KvAllocation, sizes: Sizes) -> tuple[float, float]:
    """Full calls of these sizes, one after the other from position 0: wall seconds, processor seconds a thread."""
    calls, begin = [], 0
    for size in sizes:
        places = np.arange(begin, begin + size, dtype=np.int32)
        calls.append(Call(size, np.zeros_like(places), places, places))
        begin += size
    wall, processor = time.perf_counter(), time.process_time()
    engine.run(calls, kv)
    return time.perf_counter() - wall, (time.process_time() - processor) / THREADS


if __name__ == "__main__":
    sys.exit(main())
