"""Aborted requests leave nothing behind; `bench.pipeline --only aborts` does the same with 10,000 of them."""

from __future__ import annotations

from pathlib import Path

from .aborts import abort_runs


def test_aborted_requests_leave_nothing_behind(tmp_path: Path) -> None:
    result = abort_runs(tmp_path, 300, seed=1)
    assert result.leaks == []
    assert result.where.total() >= 300
    assert {where.split(",")[0] for where in result.where} == {
        "graph run",
        "token",
        "load closed",
        "load released",
        "load collected",
        "load abandoned",
    }
    assert result.completed > 0
