"""What the tokens that have to be computed cost in static-graph calls, by the way the calls are chosen.

    python -m bench.scheduler [--data DIR] [--quick] [--check] [--json FILE]

Lengths are real with --data: prompts of azure-llm-2023, of which nothing is reused, and the streams of
`bench.workloads`, in which a segment shown before is reused and some of its tokens are computed again: the first 8, or
15 % in spans as attention would choose them (here: by chance). Ways to choose calls:

    one graph           a single static graph, C x S: S is the largest context, whatever a prompt needs; each piece is
                        padded by itself: a stack without a scheduler
    one size, apart     a single C, each piece padded by itself, but of each context length S
    one size, merged    a single C over all pieces together
    one S a prompt      as scheduled, but every call reads all slots of the prompt's context length
    pieces apart        the cheapest calls for each piece by itself
    greedy              the better of two: calls of the largest size while they are full, then the smallest that holds
                        the rest; or always the call that costs least per token it takes; from the front or to it
    scheduled           kvstore.pipeline.schedule
    any order           merged without regard to order: what no way to merge beats
    call-free           tokens at the best seconds per token: what nothing beats

A single C is the best one in hindsight, workload by workload. From `pieces apart` on, a call reads the slots up to the
window that its last token needs, and no more. Calls of this engine take any ascending tokens, so merging in order
should reach the bound for any order: whatever calls there are, sorted tokens need the least windows.

Costs are this machine's: SmolLM2-135M-Instruct on ONNX Runtime CPU, at two context lengths. They are processor seconds
of a call divided by the threads, which other work on the machine hardly changes; wall time stands beside them.
With --quick they are wall times, as the engine measured them earlier.
"""

from __future__ import annotations

import bisect
import csv
import itertools
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
from kvstore.pipeline.graphs import EMPTY
from kvstore.pipeline.kv_allocation import KvAllocation
from kvstore.pipeline.onnx_runtime import OnnxRuntime
from kvstore.pipeline.recompute import Attended, Evidence, FirstTokens, MovedRun, select
from kvstore.pipeline.schedule import WINDOWED, CallCosts, Windows, interpolate, suggest_sizes
from kvstore.pipeline.tokenizer import Tokenizer

CONTEXTS = (1024, 2048)
REPAIRS = {"first 8": FirstTokens(8), "attended 15 %": Attended(0.15)}
REUSING = ("notes-1000", "notes-2000", "hops", "phone", "tools", "meeting")
HELD_TO = ("azure", "log-normal", "notes", "hops")  # requests of a service, and RAG; the others are shown
THREADS = len(os.sched_getaffinity(0))


class Prompt(NamedTuple):
    """The tokens of a prompt that have to be computed: what stands together as [begin, end), in order; over what S."""

    slots: int
    pieces: tuple[tuple[int, int], ...]

    @property
    def tokens(self) -> int:
        return sum(end - begin for begin, end in self.pieces)

    @property
    def places(self) -> Places:
        return np.concatenate([np.arange(begin, end) for begin, end in self.pieces])


Places = NDArray[np.int64]
Workload = Counter[Prompt]
Costs = Mapping[int, CallCosts]
"""By context length S."""
Calls = Sequence[tuple[int, Places]]
"""Size of each call, and where its tokens stand."""
Choose = Callable[[Prompt, CallCosts], Calls]


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
        costs = _kept(report, engine) if args.quick else _measured(report, engine, 3, progress)
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
    return {slots: CallCosts(each.seconds, each.windows) for slots, each in costs.items()}


def _measured(report: Report, engine: StaticGraphEngine, rounds: int, progress: Progress) -> Costs:
    """The least of `rounds` calls, all sizes, windows and context lengths in turns."""
    walls: dict[tuple[int, int, int], list[float]] = {}
    costs: dict[tuple[int, int, int], list[float]] = {}
    memory = {slots: engine.allocate(slots - 1) for slots in CONTEXTS}
    windows = {slots: _windows(engine, slots) for slots in CONTEXTS}
    for turn in progress.track(range(rounds + 1), description="costs"):
        for slots, kv in memory.items():
            for size in engine.sizes:
                for window in [each for each in windows[slots][size >= WINDOWED] if each >= size]:
                    end = min(window, kv.capacity)
                    wall, cost = _timed(engine, kv, [(size, np.arange(max(0, end - size), end))])
                    if turn:  # the first compiles
                        walls.setdefault((slots, size, window), []).append(wall)
                        costs.setdefault((slots, size, window), []).append(cost)
    found: dict[int, CallCosts] = {}
    for slots in CONTEXTS:
        rows = report.table(
            f"S={slots}: ms of a call, least of {rounds}; a token: of it; wall: far above cost the machine was busy",
            ("C", "cost", "a token", "wall", *(f"W={window}, share" for window in windows[slots][True][:-1])),
        )
        shares: dict[int, list[float]] = {window: [] for window in windows[slots][True]}
        for size in engine.sizes:
            whole = min(costs[slots, size, slots])
            row = []
            for window in windows[slots][True]:
                if each := costs.get((slots, size, window)):
                    shares[window].append(min(each) / whole)
                row.append(f"{min(each) / whole:.3f}" if each else "")
            wall = min(walls[slots, size, slots])
            rows.append((size, whole * 1e3, whole * 1e3 / size, wall * 1e3, *row[:-1]))
        median = [min(1.0, statistics.median(each)) for each in shares.values()]
        rising = dict(zip(shares, itertools.accumulate(median, max), strict=True)) | {slots: 1.0}
        seconds = {size: min(costs[slots, size, slots]) for size in engine.sizes}
        found[slots] = CallCosts(seconds, Windows(rising))
        line = Windows.on_a_line(list(rising), next(iter(rising.values())))
        off = max(abs(line.shares[window] / share - 1) for window, share in rising.items())
        rows.append(("median", "", "", "", *(f"{share:.3f}" for share in list(rising.values())[:-1])))
        rows.append(
            (
                f"on a line, {off:.1%} off",
                "",
                "",
                "",
                *(f"{share:.3f}" for share in list(line.shares.values())[:-1]),
            )
        )
    return found


def _windows(engine: StaticGraphEngine, slots: int) -> tuple[list[int], list[int]]:
    """Of small graphs, and of larger ones."""
    return [slots], [*engine.windows.get(slots, ()), slots]


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
        found[name] = Counter(Prompt(_slots(tokens), ((0, tokens),)) for tokens in cut)
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
                found[f"{name}, {repair}"][Prompt(_slots(end), _pieces(~held_now))] += 1
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


def _pieces(chosen: NDArray[np.bool_]) -> tuple[tuple[int, int], ...]:
    """What chosen tokens stand together, as [begin, end)."""
    edges = np.flatnonzero(np.diff(chosen.astype(np.int8), prepend=0, append=0)).tolist()
    return tuple(zip(edges[::2], edges[1::2], strict=True))


class Sum(NamedTuple):
    """All calls of a workload. `size`: of the only graph, where there is one."""

    seconds: float
    padding: int = 0
    size: int | None = None


def _compare(report: Report, workloads: Mapping[str, Workload], costs: Costs) -> None:
    """Every way to choose calls over every workload, and the bars."""
    whole = {slots: CallCosts(each.seconds) for slots, each in costs.items()}  # without windows
    dearest, any_order = 0.0, 0.0
    ways = (
        "one graph", "one size, apart", "one size, merged", "one S a prompt", "pieces apart", "greedy", "any order",
        "call-free",
    )  # fmt: skip
    times = report.table(
        "seconds, as multiples of what is scheduled (single size)",
        ("workload", "prompts", "tokens", "pieces", "scheduled s", *ways),
    )
    paddings = report.table("padding, share of all places", ("workload", *ways[:6], "scheduled"))
    for name, prompts in workloads.items():
        sizes = costs[CONTEXTS[0]].seconds
        largest = Workload()
        for each, n in prompts.items():
            largest[Prompt(CONTEXTS[-1], each.pieces)] += n
        covers = {each: costs[each.slots].cover_at(each.places) for each in prompts}
        least = {each: _any_order(each, costs[each.slots]) for each in prompts}
        sums = {
            ways[0]: min(_total(largest, whole, _one_size(size), size) for size in sizes),
            ways[1]: min(_total(prompts, whole, _one_size(size), size) for size in sizes),
            ways[2]: min(_total(prompts, whole, _merged(size), size) for size in sizes),
            ways[3]: _total(prompts, whole, _scheduled),
            ways[4]: _total(prompts, costs, _pieces_apart),
            ways[5]: _total(prompts, costs, _greedy),
            ways[6]: Sum(sum(n * least[each] for each, n in prompts.items())),
            ways[7]: Sum(sum(n * covers[each].bound for each, n in prompts.items())),
        }
        ours = _total(prompts, costs, _scheduled)
        tokens, count = sum(each.tokens * n for each, n in prompts.items()), prompts.total()
        pieces = sum(len(each.pieces) * n for each, n in prompts.items())
        multiples = [
            f"{each.seconds / ours.seconds:.3f}" + (f" ({each.size})" if each.size else "")
            for each in sums.values()
        ]
        times.append((name, count, round(tokens / count), f"{pieces / count:.1f}", ours.seconds, *multiples))
        padded = [*(sums[way].padding for way in ways[:6]), ours.padding]
        paddings.append((name, *(f"{each / (tokens + each):.1%}" for each in padded)))
        if name.startswith(HELD_TO):
            single = sums["one graph"].seconds
            report.bar(f"B4 {name}: scheduled / best single graph", ours.seconds / single, "<=", 0.80)
        any_order = max(any_order, ours.seconds / sums["any order"].seconds)
        for each in prompts:
            greedy, scheduled = (choose(each, costs[each.slots]) for choose in (_greedy, _scheduled))
            dearest = max(dearest, _cost(scheduled, costs[each.slots]) / _cost(greedy, costs[each.slots]))
    report.bar("B4 scheduled / greedy, worst prompt of all", dearest, "<=", 1 + 1e-9)
    report.bar("B4 scheduled / any order, worst workload", any_order, "<=", 1.08)


def _total(prompts: Workload, costs: Costs, choose: Choose, size: int | None = None) -> Sum:
    seconds, padding = 0.0, 0
    for prompt, times in prompts.items():
        calls = choose(prompt, costs[prompt.slots])
        seconds += times * _cost(calls, costs[prompt.slots])
        padding += times * (sum(size for size, _ in calls) - prompt.tokens)
    return Sum(seconds, padding, size)


def _cost(calls: Calls, costs: CallCosts) -> float:
    return sum(costs.of(size, int(places[-1]) + 1) for size, places in calls)


def _in_order(sizes: Iterable[int], places: Places, padding: int = 0) -> Calls:
    """Calls of these sizes over tokens from the first on; `padding` of the first call, the rest of the last one."""
    ends = [max(0, end - padding) for end in itertools.accumulate(sizes, initial=0)]
    return [(size, places[a:b]) for size, (a, b) in zip(sizes, itertools.pairwise(ends), strict=True)]


def _equal(size: int, places: Places) -> Calls:
    return _in_order([size] * -(-len(places) // size), places)


def _one_size(size: int) -> Choose:
    return lambda prompt, _: [call for piece in prompt.pieces for call in _equal(size, np.arange(*piece))]


def _merged(size: int) -> Choose:
    return lambda prompt, _: _equal(size, prompt.places)


def _cheapest(places: Places, costs: CallCosts) -> Calls:
    cover = costs.cover_at(places)
    return _in_order(cover.sizes, places, cover.padding)


def _pieces_apart(prompt: Prompt, costs: CallCosts) -> Calls:
    return [call for piece in prompt.pieces for call in _cheapest(np.arange(*piece), costs)]


def _scheduled(prompt: Prompt, costs: CallCosts) -> Calls:
    return _cheapest(prompt.places, costs)


def _greedy(prompt: Prompt, costs: CallCosts) -> Calls:
    places = prompt.places
    largest, left = max(costs.seconds), len(places)
    full = [largest] * (left // largest)
    if rest := left % largest:
        full.append(min(size for size in costs.seconds if size >= rest))
    cheap: list[int] = []
    while left > 0:
        cheap.append(min(costs.seconds, key=lambda size: costs.seconds[size] / min(size, left)))
        left -= cheap[-1]
    ways = [
        way
        for sizes in (full, cheap)
        for way in (_in_order(sizes, places), _in_order(sizes[::-1], places, sum(sizes) - len(places)))
    ]
    return min(ways, key=lambda calls: _cost(calls, costs))


def _any_order(prompt: Prompt, costs: CallCosts) -> float:
    """The cheapest calls with room for all tokens: size after size behind every token."""
    best, windows = [0.0], sorted(costs.windows.shares) if costs.windows else [prompt.slots]
    prices = {window: [(size, costs.of(size, window)) for size in costs.seconds] for window in windows}
    for token, place in enumerate(prompt.places.tolist(), start=1):
        window = windows[bisect.bisect_left(windows, place + 1)]
        best.append(min(best[max(0, token - size)] + seconds for size, seconds in prices[window]))
    return best[-1]


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
            lengths[prompt.tokens] += times
        own = _histogram(lengths, CallCosts(costs.seconds))
        least = _histogram(lengths, CallCosts(candidates))
        for count in (2, 4, 6):
            sizes = suggest_sizes(lengths, candidates, count)
            taken = _histogram(lengths, CallCosts({size: candidates[size] for size in sizes}))
            rows.append((name, count, ", ".join(map(str, sizes)), f"{taken / own:.3f}", f"{least / own:.3f}"))


def _histogram(lengths: Mapping[int, int], costs: CallCosts) -> float:
    return sum(times * costs.cover(tokens).seconds for tokens, times in lengths.items())


def _refresh(report: Report, prompts: Workload, best: CallCosts) -> None:
    """What wrong costs cost until calls have corrected them. Simulated: measured costs as truth, load by chance.

    All calls over all slots.
    """
    best = CallCosts(best.seconds)
    lengths = [prompt.tokens for prompt in prompts.elements()]
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
        taken += sum(best.seconds[size] for size in sizes)
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
        costs.seconds, key=lambda size: sum(_cost(_merged(size)(each, costs), costs) for each in some)
    )
    ways: dict[str, Choose] = {
        f"one size, merged ({single})": _merged(single),
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


def _timed(engine: StaticGraphEngine, kv: KvAllocation, calls: Calls) -> tuple[float, float]:
    """Calls for some tokens behind others that are held: wall seconds, processor seconds a thread."""
    run = []
    for size, places in calls:
        at = places.astype(np.int32)
        run.append(Call(size, np.zeros_like(at), at, at))
    kv.slot_positions[:] = EMPTY
    kv.slot_positions[: run[-1].slots[-1]] = np.arange(run[-1].slots[-1])
    wall, processor = time.perf_counter(), time.process_time()
    engine.run(run, kv)
    return time.perf_counter() - wall, (time.process_time() - processor) / THREADS


if __name__ == "__main__":
    sys.exit(main())
