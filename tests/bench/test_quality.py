"""The tables hold what was measured, on a model so small that its figures mean nothing."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from rich.progress import Progress

from bench.quality import measure, report_quality, tried_in
from bench.report import Report
from kvstore.language_model import LanguageModel
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.quality.trials import CONTEXTS
from tests.tiny_models import write_tiny_gguf


def test_every_context_and_what_repairs_do_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pydoc_text: str
) -> None:
    monkeypatch.setenv("KVSTORE_CACHE_DIR", str(tmp_path / "cache"))
    write_tiny_gguf(tmp_path / "tiny.gguf", layers=3, context=4096)
    model = LanguageModel(tmp_path / "tiny.gguf")
    model.engine = StaticGraphEngine(
        tmp_path / "tiny.gguf", cache=tmp_path / "cache", sizes=(16, 128), contexts=(1024, 2048)
    )
    measured = measure(model, pydoc_text, 2, 600, Progress(disable=True))
    report = Report("tiny", "made up")
    report_quality(report, measured)
    *by_context, verdict = report.tables
    assert len(by_context) == len(CONTEXTS)
    for context, (title, columns, rows) in zip(CONTEXTS, by_context, strict=True):
        assert "2 prompts" in title
        assert [len(row) for row in rows] == [len(columns)] * len(tried_in(context))
        nothing, *_, everything = rows
        assert nothing[1] == 0
        assert everything[1] == 1
        assert everything[3] < 1e-6 < nothing[3]
    assert [row[0] for row in verdict[2]] == ["fast", "careful"]
    assert report.bars[0].holds
    assert report.finish(Namespace(check=True, json=tmp_path / "figures.json")) == 0
    assert len(json.loads((tmp_path / "figures.json").read_text())["tables"]) == 1 + len(CONTEXTS)
