"""The measurement itself, on a model so small that its figures mean nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.progress import Progress

from bench.moved import MODES, Bench, report_facts, report_workload
from bench.report import Report
from bench.texts import Question
from bench.workloads import Request
from kvstore.pipeline.recompute import Attended, FirstTokens
from kvstore.quality.reuse import Verdict
from tests.tiny_models import write_tiny_gguf

_PASSAGES = [
    "".join(chr(97 + (index * (number + 3) + index // 7) % 26) for index in range(90)) for number in range(4)
]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setenv("KVSTORE_CACHE_DIR", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "tiny.gguf", layers=6)
    return Bench(tmp_path / "tiny.gguf")


def test_all_modes_answer_the_same_prompt(bench: Bench, tmp_path: Path) -> None:
    bench.verdict = Verdict(fast=FirstTokens(6), careful=Attended(0.10))  # this model is never sure
    one, two, three, four = _PASSAGES
    question = Question("What?", ("",))  # any answer holds it
    requests = [
        Request("Say.", (one, two, three), question, measured=False),
        Request("Say.", (three, four, one), question),
        Request("Say.", (four, two, one), question),
    ]
    runs = bench.measure("tiny", requests, tmp_path / "kv", Progress(disable=True))
    assert list(runs) == list(MODES)
    assert all(len(some) == 2 for some in runs.values())
    for none, *others in zip(*runs.values(), strict=True):
        assert none.found
        assert len(none.due) == none.computed > 300
        for run in others:
            assert run.prefix + run.moved + run.recomputed + run.computed == none.computed
            assert run.computed <= len(run.due) <= run.computed + run.recomputed
            assert 0 < run.graphs < run.seconds
    for prefix, full, fast, careful in zip(*list(runs.values())[1:], strict=True):
        assert prefix.moved == prefix.recomputed == full.recomputed == 0
        assert prefix.close.kl.max() < 1e-6
        assert full.moved > fast.moved > 150
        assert careful.recomputed > 0
    assert runs["fast"][1].moved > runs["fast"][0].moved  # the fourth passage was captured in between

    report = Report("tiny", "made up")
    report_workload(report, bench, "notes", runs)
    report_facts(report, [runs])
    by_name = {bar.name: bar.figure for bar in report.bars}
    assert by_name["B1 notes, fast: mean KL over 16 tokens"] == pytest.approx(
        sum(run.close.kl.mean() for run in runs["fast"]) / 2
    )
    assert by_name["B2 recall of careful, of 2 prompts that none answers"] == 1
    assert 1 <= by_name["B3 notes, TTFT fast / its graph calls"] < 1000


def test_the_watch_counts_whole_calls_alone(bench: Bench) -> None:
    """Graphs that end in the middle of the depth, for attention, must not pass for fast calls."""
    kv = bench.engine.allocate(100)
    bench.engine.prefill(range(100), kv)
    bench.engine.probe([1, 2], [100, 101], [100, 101], kv)
    groups, seen = set(bench.engine.layer_groups), dict[int, set[range]]()
    for size, *_, layers in bench.watch.samples:
        seen.setdefault(size, set()).add(layers)
    assert any(parts - groups for parts in seen.values())
    counted = {size for size, *_ in bench.calls()}
    assert counted == {size for size, parts in seen.items() if groups <= parts}


def test_graphs_of_whole_width_read_all_slots(tmp_path: Path, bench: Bench) -> None:
    """Then the best rate of any graph is that of one which sees every token."""
    whole = Bench(tmp_path / "tiny.gguf", whole_width=True)
    for each in (bench, whole):
        each.engine.prefill(range(300), each.engine.allocate(1000))
    assert any(window < slots for _, slots, window, *_ in bench.calls())
    assert all(window == slots for _, slots, window, *_ in whole.calls())
