"""A few thousand frames of `fuzz`, which runs a million by itself."""

from __future__ import annotations

from pathlib import Path

from .fuzz import fuzz
from .running import daemon


def test_frames_that_no_client_sends(tmp_path: Path) -> None:
    with daemon(tmp_path / "kv") as running:
        result = fuzz(running, frames=4000, seed=1)
        assert result.closed > 10
        assert result.requests > 1000
        assert result.internal == 0
        assert result.descriptors <= 2
        assert running.stop() == 0
