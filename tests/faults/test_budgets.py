"""Budgets are ceilings of what is really taken, not of a counter. `bench.faults` puts ten times the budget."""

from __future__ import annotations

from pathlib import Path

from .budgets import BLOCK_BYTES, PROFILE, SLACK, disk_bytes, overfill


def test_more_than_fits(tmp_path: Path) -> None:
    """Limits that were checked on failure only, a cap that never reached the disk, checkpoints nobody counted."""
    spent = overfill(tmp_path / "kv", times=4, seed=1)
    assert spent.failures == []
    assert spent.put >= 4 * PROFILE.cold_bytes
    assert spent.counts["evicted_cold"] > 0
    assert spent.counts["evicted_warm"] > 0
    assert spent.counts["moved_hot_warm"] > 0
    assert spent.disk <= PROFILE.cold_bytes
    assert spent.resident_growth <= PROFILE.hot_bytes + PROFILE.warm_bytes + BLOCK_BYTES + SLACK
    assert disk_bytes(tmp_path / "kv") > PROFILE.cold_bytes // 2, "the budget was made use of"
