"""kill -9 of the daemon under load; `bench.daemon --kills` runs 200."""

from __future__ import annotations

from pathlib import Path

from .killed_daemon import kill_daemon


def test_clients_of_a_killed_daemon_go_on_and_come_back(tmp_path: Path) -> None:
    result = kill_daemon(tmp_path, kills=8, seed=1)
    assert result.failures == []
    assert result.kills == 8
    assert result.reconnected == 24
    assert result.tokens > 0
    assert result.durable > 0, "something was durable, so something was verified"
