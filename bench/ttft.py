"""Time to first token with the store and without, on a real model and real text.

    python -m bench.ttft [--workload NAMES] [--data DIR] [--quick] [--check] [--json FILE]

SmolLM2-135M-Instruct on ONNX Runtime CPU, static graphs. All variants of a workload run in turns in one process;
figures are medians. Workloads, several with commas between: `prefix` (the default: held prefixes, over Python's own
documentation; "cold" is flash with the page cache dropped before), or what `bench.workloads` names, measured as
`bench.moved` says; `moved` means all of these. `recall` counts the facts that policies keep, over 200 prompts, as
`bench.recall` says.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

import kvstore
from bench.moved import Bench, report_facts, report_verdict, report_workload
from bench.recall import measure_recall, report_recall, with_facts
from bench.report import Report, arguments
from bench.workloads import KINDS, workload
from kvstore import models
from kvstore.language_model import LanguageModel
from kvstore.session import Generation, Session

_PROMPT, _HELD = 1000, 900


def main() -> int:
    args = arguments(__doc__ or "", _options)
    names = [name for part in args.workload.split(",") for name in (KINDS if part == "moved" else [part])]
    if unknown := {*names} - {"prefix", "recall", *KINDS}:
        known = ", ".join(("prefix", "moved", "recall", *KINDS))
        sys.exit(f"unknown workload {', '.join(unknown)}; there are {known}")
    report = Report(
        "bench.ttft",
        "ONNX Runtime CPU, static graphs; cold: files, page cache dropped by posix_fadvise; moved: held in RAM",
    )
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder, Progress(transient=True) as progress:
        if "prefix" in names:
            _prefix(report, Path(folder), args, progress)
        _moved(report, Path(folder), args, [name for name in names if name != "prefix"], progress)
    return report.finish(args)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workload", default="prefix", metavar="NAMES", help="prefix, moved, recall, or some of these"
    )
    parser.add_argument("--prompts", type=int, metavar="N", help="measured prompts of each other workload")
    parser.add_argument(
        "--calibrate",
        type=int,
        metavar="N",
        help="what `fast` does is found on N (48) other prompts of each workload; 0, as in a quick run: by hand",
    )
    parser.add_argument(
        "--whole-width",
        action="store_true",
        help="graphs without windows: each reads all slots of its context",
    )


def _moved(
    report: Report, folder: Path, args: argparse.Namespace, names: Sequence[str], progress: Progress
) -> None:
    """Workloads with moved tokens, and `recall`."""
    if not names:
        return
    bench = Bench(models.smollm2(), whole_width=args.whole_width)
    kinds = [name for name in names if name != "recall"]
    own = args.calibrate if args.calibrate is not None else 0 if args.quick else 48
    everything = []
    for name in kinds:
        if own:
            bench.calibrate(workload(name, args.data, bench.size, own, seed=2), progress)
            report_verdict(report, name, bench.verdict)
        requests = workload(name, args.data, bench.size, args.prompts or (6 if args.quick else 100))
        runs = bench.measure(name, requests, folder / name, progress)
        report_workload(report, bench, name, runs)
        everything.append(runs)
    report_facts(report, everything)
    if "recall" in names:
        count = args.prompts or (6 if args.quick else 200)
        report_recall(report, bench, measure_recall(bench, with_facts(bench, count), progress, count))


def _prefix(report: Report, folder: Path, args: argparse.Namespace, progress: Progress) -> None:
    """Workloads in which what is held is always a prefix."""
    repeats = 3 if args.quick else 7
    model = LanguageModel(models.smollm2())
    for context in (
        400,
        600,
        _PROMPT + 20,
    ):  # compile all graphs, and measure their costs if they are not known
        model.engine.warm_up(context)
    _held_prefix(report, model, folder / "prefix", repeats, progress)
    _system_prompt(report, model, folder / "system", repeats, progress)
    _chat(report, model, folder / "chat", 4 if args.quick else 6, progress)


def _held_prefix(
    report: Report, model: LanguageModel, folder: Path, repeats: int, progress: Progress
) -> None:
    """A prompt of 1,000 tokens of which 900 are held in one tier; after a restart they are cold."""
    text = model.tokenizer.encode("\n\n".join(topics.values()))
    prefix = text[:_HELD]
    runs: dict[str, list[Generation]] = {"off": [], "hot": [], "warm": [], "cold": [], "restart": []}
    with kvstore.open(folder, identity=model.identity) as store:
        Session(model.engine, store).generate(prefix, 1)
    task = progress.add_task("900 of 1,000 tokens held", total=len(runs) * (repeats + 1))
    for turn in range(repeats + 1):
        begin = _HELD + (turn + 1) * _PROMPT
        prompt = np.concatenate([prefix, text[begin : begin + _PROMPT - _HELD]])
        answers = set()
        with kvstore.open(folder, identity=model.identity) as store:
            for name in runs:
                if name == "restart":
                    break
                _bring(store, prefix, name)
                used = None if name == "off" else store
                generation = Session(model.engine, used).generate(prompt, 1, keep=False)
                answers.add(tuple(generation.tokens))
                if turn:  # the first turn compiles graphs and warms up
                    runs[name].append(generation)
                progress.advance(task)
        _drop_page_cache(folder)
        with kvstore.open(folder, identity=model.identity) as store:
            generation = Session(model.engine, store).generate(prompt, 1, keep=False)
            answers.add(tuple(generation.tokens))
            if turn:
                runs["restart"].append(generation)
            progress.advance(task)
        if len(answers) != 1:
            raise AssertionError(f"first tokens differ between the variants: {answers}")
    rows = report.table(
        f"prompt of {_PROMPT} tokens, {_HELD} held (medians of {repeats})",
        (
            "store",
            "TTFT ms",
            "share of off",
            "store ms",
            "store share",
            "reused",
            "computed",
            "padded",
            "read MB",
        ),
    )
    off = _median(runs["off"], lambda run: run.ttft_seconds)
    for name, generations in runs.items():
        ttft = _median(generations, lambda run: run.ttft_seconds)
        added = _median(generations, lambda run: run.store_seconds)
        last = generations[-1]
        rows.append(
            (
                name,
                ttft * 1e3,
                ttft / off,
                added * 1e3,
                f"{added / off:.2%}",
                last.hot + last.warm + last.cold,
                last.computed,
                last.padded,
                last.bytes_read / 1e6,
            )
        )
        if name != "off":
            report.bar(f"A4 TTFT with 90 % held, {name} / off", ttft / off, "<=", 0.20)
        if name in ("hot", "cold", "restart"):
            limit = 0.01 if name == "hot" else 0.05
            report.bar(f"A4 look-up + lease + load, {name} / TTFT off", added / off, "<=", limit)


def _system_prompt(
    report: Report, model: LanguageModel, folder: Path, repeats: int, progress: Progress
) -> None:
    """One system prompt of about 600 tokens, another question each time."""
    system = "Answer from the following.\n\n" + topics["class"][:2600]
    names = sorted(topics)[: repeats + 2]
    with kvstore.open(folder, identity=model.identity) as store:
        prompts = [model.chat_prompt(system, f"What do you know about {name}?") for name in names]
        runs = _alternate(model, store, prompts, progress, "system prompt")
    _compare(report, f"system prompt of about 600 tokens, {len(prompts) - 2} questions", runs)


def _chat(report: Report, model: LanguageModel, folder: Path, turns: int, progress: Progress) -> None:
    """A chat that grows turn by turn; each prompt is all that was said before plus one question."""
    messages = [{"role": "system", "content": "You explain Python. " + topics["assignment"][:1500]}]
    runs: dict[str, list[Generation]] = {"off": [], "on": []}
    prompts = []
    task = progress.add_task("chat", total=2 * turns)
    with kvstore.open(folder, identity=model.identity) as store:
        for turn in range(turns):
            messages.append({"role": "user", "content": f"Say more about {sorted(topics)[turn]}."})
            prompt = model.render(messages)
            prompts.append(prompt)
            off = Session(model.engine, None).generate(prompt, 24, stop=model.stop)
            on = Session(model.engine, store).generate(prompt, 24, stop=model.stop)
            if off.tokens != on.tokens:
                raise AssertionError(f"turn {turn}: answers differ")
            runs["off"].append(off)
            runs["on"].append(on)
            messages.append({"role": "assistant", "content": model.tokenizer.decode(on.tokens)})
            progress.advance(task, 2)
    rows = report.table(
        f"chat of {turns} turns, answers equal",
        ("turn", "prompt", "reused", "computed", "TTFT off ms", "TTFT on ms", "on / off"),
    )
    for turn, (off, on) in enumerate(zip(runs["off"], runs["on"], strict=True)):
        rows.append(
            (
                turn + 1,
                on.prompt_tokens,
                on.prompt_tokens - on.computed,
                on.computed,
                off.ttft_seconds * 1e3,
                on.ttft_seconds * 1e3,
                on.ttft_seconds / off.ttft_seconds,
            )
        )


def _alternate(
    model: LanguageModel,
    store: kvstore.KVStore,
    prompts: list[NDArray[np.int32]],
    progress: Progress,
    title: str,
) -> dict[str, list[Generation]]:
    """Each prompt without and with the store, in turns; the first two fill the store and warm up."""
    runs: dict[str, list[Generation]] = {"off": [], "on": []}
    for number, prompt in enumerate(progress.track(prompts, description=title)):
        off = Session(model.engine, None).generate(prompt, 1)
        on = Session(model.engine, store).generate(prompt, 1)
        if off.tokens != on.tokens:
            raise AssertionError("first tokens differ")
        if number > 1:
            runs["off"].append(off)
            runs["on"].append(on)
    return runs


def _compare(report: Report, title: str, runs: dict[str, list[Generation]]) -> None:
    rows = report.table(title, ("store", "TTFT ms", "share of off", "reused", "computed", "padded"))
    off = _median(runs["off"], lambda run: run.ttft_seconds)
    for name, generations in runs.items():
        ttft = _median(generations, lambda run: run.ttft_seconds)
        computed = int(_median(generations, lambda run: run.computed))
        reused = int(_median(generations, lambda run: run.prompt_tokens - run.computed))
        padded = int(_median(generations, lambda run: run.padded))
        rows.append((name, ttft * 1e3, ttft / off, reused, computed, padded))


def _bring(store: kvstore.KVStore, prefix: NDArray[np.int32], tier: str) -> None:
    """See to it that the prefix lies in this tier and nowhere nearer."""
    store.flush()
    match = store.lookup(prefix)
    store.demote(match)
    if tier in ("hot", "warm"):
        store.promote(match, to=tier)  # type: ignore[arg-type]
    elif tier == "cold":
        assert store.path is not None
        _drop_page_cache(store.path)
    if tier != "off":
        found = {block.tier for block in store.lookup(prefix).blocks}
        assert found == {tier}, f"wanted {tier}, found {found}"


def _drop_page_cache(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _median(generations: list[Generation], of: Callable[[Generation], float]) -> float:
    return statistics.median(of(generation) for generation in generations)


if __name__ == "__main__":
    sys.exit(main())
