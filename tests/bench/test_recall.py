"""Counting the facts that policies keep, on a model so small that it finds none by itself."""

from __future__ import annotations

from pydoc_data.topics import topics

import pytest
from rich.progress import Progress

from bench.moved import Bench
from bench.recall import measure_recall, report_recall, with_facts
from bench.report import Report
from kvstore.pipeline.recompute import Everything, FirstTokens, Nothing, WhenSure
from kvstore.quality.calibrate import Answered, answered
from kvstore.quality.reuse import Verdict
from tests.tiny_models import write_tiny_gguf


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_gguf(folder / "tiny.gguf", layers=6, context=1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_CACHE_DIR", str(folder / "cache"))
        return Bench(folder / "tiny.gguf")


@pytest.fixture(scope="module")
def asked(bench: Bench) -> list[Answered]:
    """Prompts that are said to ask for what full prefill answers."""
    some = answered(bench.model, "\n\n".join(topics.values()), 3, tokens=600)
    return [
        Answered(
            each.trial._replace(task="end", fact=bench.model.tokenizer.decode(each.full.answer)), each.full
        )
        for each in some
    ]


@pytest.mark.parametrize(
    ("careful", "words", "bar"),
    [
        (None, "falls back to exact prefixes", "B2 recall of careful, which falls back to exact, of 3"),
        (Everything(), "every token", "B2 recall of careful, of 3"),
        (
            WhenSure(Nothing(), 1e9),
            "no repair; all from the first run on where the answer leads by less than 1e+09 nats",
            "B2 recall of careful, of 3",
        ),
    ],
)
def test_what_computes_all_or_reuses_exactly_finds_all(
    bench: Bench, asked: list[Answered], careful: Everything | WhenSure | None, words: str, bar: str
) -> None:
    bench.verdict = Verdict(fast=FirstTokens(6), careful=careful)
    measured = measure_recall(bench, asked, Progress(disable=True))
    assert [each.found for each in measured["careful"]] == [True] * 3
    assert [each.unsure for each in measured["careful"]] == [isinstance(careful, WhenSure)] * 3
    assert not all(each.found for each in measured["fast"])  # or the facts do not serve to tell
    for each in measured["fast"]:
        assert 0 < each.again < each.covered
    report = Report("tiny", "made up")
    report_recall(report, bench, measured)
    (name, columns, rows), (held,) = report.tables[0], report.bars
    assert "over 3 generated prompts" in name
    fast, safe = (dict(zip(columns, row, strict=True)) for row in rows)
    assert fast["what it does"] == "first 6 tokens of each run"
    assert (safe["what it does"], safe["recall"], safe["end"], safe["start"]) == (words, 1.0, "3/3", "0/0")
    assert held.name.startswith(bar)
    assert (held.figure, held.limit) == (1.0, 0.90)


def test_prompts_whose_fact_full_prefill_does_not_find_are_not_asked(bench: Bench) -> None:
    assert list(with_facts(bench, 1, tokens=600)) == []  # random weights find none
