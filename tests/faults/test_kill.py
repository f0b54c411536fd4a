"""kill -9 anywhere: what is left is whole or absent, and what a flush confirmed is there. `bench.faults` runs 200."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.profile import Profile

from .killing import ROOMY, TIGHT, kill_runs


@pytest.mark.parametrize("profile", [ROOMY, TIGHT], ids=["nothing evicted", "demotions and evictions"])
def test_kill_at_random_moments(tmp_path: Path, profile: Profile) -> None:
    """Index rows of failed writes; restarts that found less than was promised."""
    killed = kill_runs(tmp_path / "kv", runs=10, seed=1, profile=profile)
    assert killed.failures == []
    assert killed.runs == 10
    assert killed.tokens > 0, "something survived, so something was verified"
    if profile == ROOMY:
        assert killed.durable > 0
