"""What a daemon explains is what a store of this process explains, by the same costs."""

from __future__ import annotations

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.admin.remote import connected as administered
from kvstore.daemon.remote_store import connect
from kvstore.errors import InvalidRequestError
from kvstore.explain import Explanation
from kvstore.pipeline.recompute import Attended
from kvstore.pipeline.schedule import CallCosts, Windows
from kvstore.quality.reuse import Verdict
from kvstore.sent_costs import SentCosts
from kvstore.store import open_store
from tests.known_kv import identity, prompt, put, small_profile

from .running import daemon

HELD = prompt(1, 100)
ASKED = np.concatenate([prompt(9, 10), HELD[20:80], prompt(8, 20)])
PLAIN = CallCosts({64: 1.0})
WINDOWED = CallCosts({64: 1.0}, Windows({64: 0.1, 128: 1.0}))
"""Two calls compute all of it, 1.1 s with windows and 2 s without; one, and a probe of half a call, what the repair
leaves."""


def told(explanation: Explanation) -> list[Any]:
    return [(span.start, span.length, span.kind, span.reason) for span in explanation.spans]


def test_windows_of_the_engines_graphs_count_in_the_daemon_too(tmp_path: Path) -> None:
    """Only the seconds of whole calls were sent: what was explained could contradict the request."""
    verdict = Verdict(None, Attended(0.15))
    with (
        open_store(None, identity=identity(), profile=small_profile()) as own,
        daemon(tmp_path / "kv") as running,
        connect(running.socket, identity=identity(), fallback="none") as remote,
    ):
        for store in (own, remote):
            put(store, HELD)  # type: ignore[arg-type]
            store.keep_verdict(verdict)
        for costs in (PLAIN, WINDOWED):
            explained = own.explain(ASKED, costs=costs)
            assert (explained.moved > 0) == (costs is PLAIN)
            assert told(remote.explain(ASKED, costs=costs)) == told(explained)
        with closing(administered(running.socket)) as admin:
            for costs in (PLAIN, WINDOWED):
                asked = admin.explain(ASKED.tolist(), costs=SentCosts.of(costs))
                assert told(asked.explanation) == told(own.explain(ASKED, costs=costs))
            assert asked.cost.compute_seconds == pytest.approx(1.1)
            for wrong in (
                {"seconds": {}},
                {"seconds": {64: 1.0}, "shares": {64: 2.0}},
                {"seconds": {64: 1.0}, "shares": {1 << 62: 0.5, 1 << 63: 1.0}},  # was an OverflowError
                {"seconds": {64: 1.0, 128: math.nan}},
                {"seconds": {64: math.inf}},
                {"size": 64},
            ):
                with pytest.raises(InvalidRequestError, match="costs: "):
                    admin.explain(ASKED.tolist(), costs=wrong)
