"""The part `sessions` of `bench.prefetch`: what of a session's blocks is in RAM when its user comes back."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

import kvstore
from bench import traces
from bench.report import Report
from kvstore.prefetch.cost import DEVICES
from tests.known_kv import LAYOUT, empty, identity

_DEVICE = DEVICES["mid"]
_KV_BYTES = 56 * 1024  # a token of Qwen3-1.7B in int8
_SETTLED = 60.0

Tokens = NDArray[np.int32]


def sessions_ahead(report: Report, folder: Path, args: argparse.Namespace, progress: Progress) -> None:
    if args.data is None:
        found = [traces.assistant(400 if args.quick else 1500)]
    else:
        found = [
            traces.agents(args.data, sessions=8 if args.quick else 24),
            _first(traces.dialogues(args.data), 300 if args.quick else 1500),
        ]
    table = report.table(
        f"SIMULATED clock, {_DEVICE.name} phone: sessions, warm memory a tenth of all blocks. "
        "Of the blocks that a request finds",
        (
            "trace",
            "fetched ahead",
            "requests",
            "in RAM",
            "of those only on flash",
            "flash a request, ms",
            "read / used",
            "s ahead, p99",
        ),
    )
    for trace in found:
        for mode in ("nothing", "what follows", "and resume"):
            run = _replay(trace, mode, folder / f"{trace.name} {mode}".replace(" ", "-"), progress)
            table.append(
                (
                    trace.name,
                    mode,
                    run.requests,
                    f"{run.in_ram:.1%}",
                    f"{run.in_time:.1%}",
                    run.left * 1e3,
                    run.ratio,
                    run.ahead,
                )
            )
        report.bar(f"D4 sessions: read / used, {trace.name}", run.ratio, "<=", 2.5)


def _first(trace: traces.Trace, count: int) -> traces.Trace:
    return traces.Trace(trace.name, trace.block_tokens, trace.requests[:count])


class Replayed(NamedTuple):
    requests: int
    in_ram: float
    in_time: float  # of what was on flash before anything was read for this request
    left: float  # seconds of flash left for the request, in the mean
    ratio: float
    ahead: float  # seconds of flash between two requests, p99


def _replay(trace: traces.Trace, mode: str, folder: Path, progress: Progress) -> Replayed:
    """Requests one after the other; between them there is time to read ahead."""
    size = 128
    page = -(-LAYOUT.block_bytes(size) // 4096) * 4096
    longest = max(len(request.path) for request in trace.requests)
    warm = max(2 * longest * page, trace.unique * page // 10)
    profile = kvstore.Profile(
        hot_bytes=0,
        warm_bytes=warm,
        cold_bytes=max(64 << 20, 3 * trace.unique * page),
        arena_bytes=max(warm, 1 << 20),
        frame_bytes=page // 2,
        device="mid",
    )
    kv = empty(longest * size)
    noise = np.random.default_rng(2)
    for array in kv.each():
        array[:] = noise.standard_normal(array.shape, np.float32)
    there = held = far = near = 0
    ahead = []
    scale = _KV_BYTES * size / page
    with kvstore.open(folder, identity=identity(), profile=profile) as store:
        store.stand_back_when(lambda: None)
        for request in progress.track(trace.requests, description=f"{trace.name}, {mode}"):
            tokens = np.concatenate([_tokens_of(number, size) for number in request.path])
            before = [block.in_memory for block in store.lookup(tokens).blocks]
            read = store.stats().counts.get("bytes_prefetched_read", 0)
            if mode == "and resume":
                store.hint(session=request.session)
            if mode != "nothing":
                assert store._shared.prefetching.settled(_SETTLED)
            match = store.lookup(tokens)
            now = [block.in_memory for block in match.blocks]
            held += len(now)
            there += sum(now)
            far += before.count(False)
            near += sum(is_there and not was for is_there, was in zip(now, before, strict=True))
            ahead.append(
                _DEVICE.load_seconds(
                    round((store.stats().counts.get("bytes_prefetched_read", 0) - read) * scale), "cold"
                )
            )
            with store.lease(match) as lease:
                lease.warm_up()
            store.put(tokens, kv, wait=1.0)
            if mode != "nothing":
                store.hint(tokens=tokens, session=request.session)
                assert store._shared.prefetching.settled(_SETTLED)
        counts = store.stats().counts
    read = counts.get("bytes_prefetched_read", 0)
    used = counts.get("bytes_prefetched_used", 0)
    left = _DEVICE.load_seconds(round((held - there) * page * scale / len(trace.requests)), "cold")
    return Replayed(
        len(trace.requests),
        there / max(1, held),
        near / max(1, far),
        left,
        read / used if used else float("inf" if read else "nan"),
        float(np.percentile(ahead, 99)),
    )


def _tokens_of(number: int, size: int) -> Tokens:
    """Tokens that stand for a block of a trace."""
    return np.random.default_rng(number).integers(0, 50_000, size).astype(np.int32)
