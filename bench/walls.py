"""Whether the time of a look-up tells one tenant of a daemon what another holds.

    python -m bench.walls [--check] [--quick]

One client asks for prompts that another tenant holds, and for prompts that nobody holds, in turns whose order is drawn.
What is compared is the difference of the medians, with the interval that 99 % of bootstrap samples fall into; beside it
the same for two kinds of prompts that nobody holds, which is what noise alone gives.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.report import Report, arguments
from kvstore.daemon import wire
from kvstore.daemon.remote_store import connect
from tests.daemon.raw_client import RawClient, raw_client
from tests.daemon.running import daemon
from tests.known_kv import identity, prompt, put, small_profile

_PROMPTS = 64  # of each kind
_TOKENS = 1024
_SAMPLES = 1000

Times = NDArray[np.float64]


def main() -> int:
    args = arguments(__doc__ or "")
    probes = 2_000 if args.quick else 10_000
    report = Report("bench.walls", f"Unix socket, {os.cpu_count()} cores; {probes:,} probes of each kind")
    rows = report.table(
        f"look-ups of {_TOKENS:,} tokens by another salt", ("", "p50 µs", "difference µs", "99 % from", "to")
    )
    profile = small_profile(warm_bytes=_PROMPTS * (_TOKENS // 16) * 4096, cold_bytes=0)
    with (
        tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder,
        daemon(Path(folder) / "kv", profile) as running,
        connect(running.socket, identity=identity(salt=b"one"), fallback="none") as store,
    ):
        for which in range(_PROMPTS):
            assert put(store, prompt(which, _TOKENS)).refused == 0  # type: ignore[arg-type]
        for name, request in (("lookup", wire.Lookup), ("before a put", wire.Held)):
            with raw_client(running.socket) as client:
                client.greet()
                view = client.open(identity(salt=b"two"))
                held, nobodys, control = _probe(client, view, request, probes)
            low, high = _interval(held, nobodys)
            for what, times in (("held by another", held), ("held by nobody", control)):
                median = float(np.median(times))
                difference = median - float(np.median(nobodys))
                rows.append((f"{name}, {what}", median, difference, *_interval(times, nobodys)))
            report.bar(f"E6 {name}: how far noise is from no difference", max(low, -high, 0.0), "<=", 0, "µs")
    return report.finish(args)


def _probe(client: RawClient, view: int, kind: type, probes: int) -> tuple[Times, ...]:
    """Microseconds of look-ups of what another tenant holds, of what nobody does, and of other prompts of nobody."""
    requests = []
    for which in range(3 * _PROMPTS):
        tokens = prompt(which, _TOKENS).astype("<i4").tobytes()
        request = wire.Held(2, view, tokens)
        if kind is wire.Lookup:
            request = wire.Lookup(2, view, tokens, False, [], False)
        requests.append(wire.frame(request))
    draw = np.random.default_rng(0)
    times = np.empty((3, probes))
    for turn in range(-200, probes):
        for which in draw.permutation(3):
            asked = requests[which * _PROMPTS + int(draw.integers(_PROMPTS))]
            started = time.perf_counter()
            client.send_bytes(asked)
            client.receive()
            times[which, turn] = (time.perf_counter() - started) * 1e6
    return tuple(times)


def _interval(one: Times, other: Times) -> tuple[float, float]:
    """Of the difference of the medians."""
    draw = np.random.default_rng(1)
    found = [
        np.median(draw.choice(one, len(one))) - np.median(draw.choice(other, len(other)))
        for _ in range(_SAMPLES)
    ]
    low, high = np.percentile(found, (0.5, 99.5))
    return float(low), float(high)


if __name__ == "__main__":
    raise SystemExit(main())
