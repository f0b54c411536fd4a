"""kill -9 of clients that hold leases and staging memory; `bench.daemon --kills` runs 1,000."""

from __future__ import annotations

from pathlib import Path

from .killed_clients import kill_clients


def test_nothing_is_left_of_killed_clients(tmp_path: Path) -> None:
    """Locks of killed clients that were kept until a time-out."""
    result = kill_clients(tmp_path, clients=40, seed=1)
    assert result.leaks == []
    assert result.killed == 40
    assert result.leases >= 120, "each held three at least"
