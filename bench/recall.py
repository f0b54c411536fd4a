"""Which facts are still found: what `fast` and `careful` do to prompts whose facts full prefill finds.

The prompts are those of calibration (see `kvstore.quality.trials`): notes with several similar facts, one of which is
asked for, captured before as traffic captures them. Each is answered as in use, calls filled and second looks
included, where calibration takes no more than a repair needs. A policy without a repair falls back to exact prefixes,
and is measured all the same.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from pydoc_data.topics import topics
from typing import NamedTuple

from rich.progress import Progress

import kvstore
from bench.moved import Bench, does
from bench.report import Report
from kvstore.api import Store
from kvstore.prefill import prefill
from kvstore.quality.calibrate import Answered, answer_in_full
from kvstore.quality.fidelity import FORCED, greedy
from kvstore.quality.reuse import LEAST_RECALL, Policy
from kvstore.quality.trials import TASKS, Task, trials
from kvstore.session import Session

POLICIES: tuple[Policy, ...] = ("fast", "careful")
_TRIED = 10  # facts asked for, at most, for each that full prefill finds


class Found(NamedTuple):
    """What one policy did to one prompt. `again`: tokens computed again, of `covered` that were held elsewhere."""

    task: Task
    found: bool
    again: int
    covered: int
    unsure: bool


def with_facts(bench: Bench, count: int, *, tokens: int = 450) -> Iterator[Answered]:
    """`count` prompts of about `tokens` tokens; fewer where full prefill finds few facts."""
    found, text = 0, "\n\n".join(topics.values())
    for trial in trials(bench.model, text, 2 * _TRIED * count, tokens=tokens, seed=3):
        asked = None if trial.fact is None else answer_in_full(bench.model, trial)
        if asked is not None:
            yield asked
            found += 1
        if found == count:
            return


def measure_recall(
    bench: Bench, prompts: Iterable[Answered], progress: Progress, total: int | None = None
) -> dict[Policy, list[Found]]:
    """Answer each prompt, whose fact is in the answer of full prefill, under each policy. total: how many there are."""
    measured: dict[Policy, list[Found]] = {policy: [] for policy in POLICIES}
    task = progress.add_task("recall", total=total)
    for asked in prompts:
        with kvstore.open(None, identity=bench.model.identity) as store:
            exact = Session(bench.engine, store, "exact")
            for capture in asked.trial.captures["traffic"]:
                exact.generate(capture, 1)
            for policy, some in measured.items():
                some.append(_answer(bench, store, policy, asked))
        progress.advance(task)
    return measured


def report_recall(report: Report, bench: Bench, measured: dict[Policy, list[Found]]) -> None:
    """What each policy does, how many facts it keeps, by task, and the bar."""
    tasks = [task for task in TASKS if task != "open"]
    count = len(measured["careful"])
    rows = report.table(
        f"recall over {count} generated prompts whose facts full prefill finds",
        ("mode", "what it does", "again", "second looks", "recall", *tasks),
    )
    for policy, some in measured.items():
        covered = sum(each.covered for each in some)
        by_task = ([each.found for each in some if each.task == task] for task in tasks)
        rows.append(
            (
                policy,
                does(bench.verdict, policy),
                sum(each.again for each in some) / covered if covered else 0.0,
                sum(each.unsure for each in some),
                statistics.fmean(each.found for each in some) if some else 0.0,
                *(f"{sum(found)}/{len(found)}" for found in by_task),
            )
        )
    if count:
        kept = statistics.fmean(each.found for each in measured["careful"])
        what = "" if bench.verdict.careful else ", which falls back to exact"
        name = f"B2 recall of careful{what}, of {count} prompts that full prefill answers"
        report.bar(name, kept, ">=", LEAST_RECALL)


def _answer(bench: Bench, store: Store, policy: Policy, asked: Answered) -> Found:
    engine, trial = bench.engine, asked.trial
    assert trial.fact is not None
    end = len(trial.prompt)
    kv = engine.allocate(end + FORCED)
    done = prefill(engine, store, trial.prompt, kv, bench.verdict.repair(policy))
    said = bench.model.tokenizer.decode(greedy(engine, kv, done.logits, end))
    engine.recycle(kv)
    covered = done.moved + done.recomputed
    return Found(trial.task, trial.fact in said, done.recomputed, covered, done.unsure)
