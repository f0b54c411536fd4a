"""What moved reuse does to answers: each repair, over KV that was captured in each context.

What stood before a passage when its KV was captured matters as much as what is computed again, so each prompt is
answered once by full prefill, and then with repairs over each capture context (see `kvstore.quality.trials`):
closeness of the first token and of 16 teacher-forced ones, and which facts are still found, by task. Shares of recall
are of the prompts that full prefill answers. `every token` is the oracle: it must give what full prefill gives; it is
asked of every eighth prompt.

Figures of speed are not its matter: see bench.ttft.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics

from rich.progress import Progress

from bench import texts
from bench.report import Report, arguments
from kvstore import models
from kvstore.language_model import LanguageModel
from kvstore.pipeline.recompute import (
    AnyRepair,
    Attended,
    Both,
    Deviating,
    Everything,
    FirstTokens,
    Nothing,
    WhenSure,
)
from kvstore.quality.calibrate import Answered, Result, answered, attempt, measurement
from kvstore.quality.reuse import LEAST_RECALL, judge, named
from kvstore.quality.trials import CONTEXTS, TASKS, Context

REPAIRS: tuple[AnyRepair, ...] = (
    Nothing(),
    FirstTokens(4),
    WhenSure(FirstTokens(4), 0.5),
    FirstTokens(8),
    FirstTokens(16),
    Deviating(0.15),
    Attended(0.10),
    Attended(0.15),
    Attended(0.25),
    Both(FirstTokens(4), Attended(0.10)),
    Everything(),
)
_FOR_COMPARISON = frozenset(
    {Nothing(), FirstTokens(4), WhenSure(FirstTokens(4), 0.5), FirstTokens(16), Attended(0.25), Everything()}
)
"""Those tried over captures that nobody ought to make, alone and right behind the system prompt: an hour is enough."""
_ORACLE = 8  # prompts, of which one is computed again as a whole

Measured = Mapping[tuple[Context, AnyRepair], Sequence[tuple[Answered, Result]]]


def main() -> int:
    args = arguments(__doc__ or "", _options)
    model = LanguageModel(args.model or models.smollm2())
    text = "\n\n".join(topics.values()) if args.data is None else _real(args.data)
    count = args.prompts or (6 if args.quick else 112)
    report = Report("Quality of moved reuse", "ONNX Runtime CPU, static graphs")
    with Progress() as progress:
        measured = measure(model, text, count, args.tokens, progress)
    report_quality(report, measured)
    if args.plot:
        _plot(measured, args.plot)
    return report.finish(args)


def measure(model: LanguageModel, text: str, count: int, tokens: int, progress: Progress) -> Measured:
    """`count` prompts of about `tokens` tokens, answered in every way."""
    measured: dict[tuple[Context, AnyRepair], list[tuple[Answered, Result]]] = {
        (context, repair): [] for context in CONTEXTS for repair in REPAIRS
    }
    task = progress.add_task("prompts", total=count)
    for number, asked in enumerate(answered(model, text, count, tokens=tokens, seed=1)):
        for context in CONTEXTS:
            tried = [
                repair
                for repair in tried_in(context)
                if number % _ORACLE == 0 or not isinstance(repair, Everything)
            ]
            for repair, result in attempt(model, asked, context, tried).items():
                measured[context, repair].append((asked, result))
        progress.advance(task)
    return measured


def tried_in(context: Context) -> list[AnyRepair]:
    """The repairs measured over captures in `context`."""
    all_of_them = context in ("traffic", "filler")
    return [repair for repair in REPAIRS if all_of_them or repair in _FOR_COMPARISON]


def report_quality(report: Report, measured: Measured) -> None:
    """A table for each capture context, what the policies would do with traffic's, and bars."""
    recalled = [task for task in TASKS if task != "open"]
    for context in CONTEXTS:
        prompts = [asked for asked, _ in measured[context, REPAIRS[0]]]
        lengths = [len(asked.trial.prompt) for asked in prompts] or [0]
        rows = report.table(
            f"captured {_WHERE[context]}: {len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens",
            (
                "computed again",
                "share",
                "KL first",
                "KL of 16",
                "first equal",
                "16 equal",
                "recall",
                *recalled,
            ),
        )
        for repair in REPAIRS:
            some = measured[context, repair]
            if not some:
                continue
            result = measurement(repair, [each for _, each in some])
            by_task = ([each.found for asked, each in some if asked.trial.task == task] for task in recalled)
            rows.append(
                (
                    named(repair),
                    result.recomputed,
                    result.kl_first,
                    result.kl_mean,
                    result.first_agrees,
                    result.all_agree,
                    f"{result.recall:.2f} of {result.recall_prompts}",
                    *(f"{sum(map(bool, found))}/{len(found)}" for found in by_task),
                )
            )
    verdict = judge(
        tuple(
            measurement(repair, [each for _, each in measured["traffic", repair]])
            for repair in REPAIRS
            if not isinstance(repair, Everything) and measured["traffic", repair]
        )
    )
    rows = report.table("verdict over traffic's captures", ("policy", "computes again", "why not"))
    for policy in ("fast", "careful"):
        chosen = verdict.repair(policy)
        rows.append((policy, "-" if chosen is None else named(chosen), verdict.why_none(policy) or ""))
    exact = [result for context in CONTEXTS for _, result in measured[context, Everything()]]
    report.bar(
        "every token computed again: largest mean KL",
        max((float(result.close.kl.mean()) for result in exact), default=0.0),
        "<=",
        1e-4,
        "nats",
    )
    careful = verdict.measured("careful")
    report.bar(
        "B2 recall of careful"
        + (f", of {careful.recall_prompts} prompts" if careful else ": falls back to exact"),
        careful.recall if careful else 1.0,
        ">=",
        LEAST_RECALL,
    )


_WHERE = {
    "alone": "with nothing before",
    "system": "right behind the system prompt",
    "traffic": "as traffic does, behind the system prompt and other passages",
    "filler": "in idle time, each behind the system prompt and the same other passages",
}


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", type=Path, metavar="GGUF", help="a llama-family model; SmolLM2-135M by default"
    )
    parser.add_argument("--prompts", type=int, metavar="N", help="how many; 112 by default, 6 with --quick")
    parser.add_argument(
        "--tokens", type=int, default=450, metavar="N", help="of a prompt, about; 450 or 1000"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw KL and recall; needs matplotlib")


def _real(data: Path) -> str:
    asked, others = texts.passages(data)
    return "\n\n".join([*(passage.text for passage in asked), *others[:2000]])


def _plot(measured: Measured, path: Path) -> None:
    """KL and recall over what is computed again, a line for each capture context."""
    from matplotlib import pyplot

    figure, (close, found) = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for context in CONTEXTS:
        some = (
            measurement(repair, [each for _, each in measured[context, repair]])
            for repair in REPAIRS
            if measured[context, repair] and not isinstance(repair, Everything)
        )
        points = sorted(some, key=lambda result: result.recomputed)
        shares = [result.recomputed for result in points]
        close.plot(shares, [result.kl_mean for result in points], "o-", label=_WHERE[context])
        found.plot(shares, [result.recall for result in points], "o-")
    close.set(xlabel="share computed again", ylabel="KL over 16 tokens, nats", yscale="log")
    found.set(xlabel="share computed again", ylabel="recall of what full prefill finds", ylim=(0, 1.05))
    close.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    raise SystemExit(main())
