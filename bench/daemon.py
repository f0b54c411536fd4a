"""The daemon: what a look-up, a lease and a put take through it, and what it costs beside a store of one's own.

    python -m bench.daemon [--check] [--quick]        latencies, then 1 to 64 clients against an embedded store
    python -m bench.daemon --ttft                     time to first token through it and embedded, in turns
    python -m bench.daemon --kills                    1,000 clients and 200 daemons killed with kill -9
    python -m bench.daemon --soak MINUTES             16 clients, budgets at their ceilings, every read compared

Clients are processes of their own, in closed loops: each asks as soon as it has its answer.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.daemon_clients import (
    REAL,
    SMALL,
    Seen,
    Use,
    Work,
    cpu_seconds,
    memory_mib,
    run,
    shared_mib,
)
from bench.report import Report, arguments
from kvstore.daemon.remote_store import RemoteStore, connect
from kvstore.profile import MIB, Profile
from kvstore.store import open_store
from tests.daemon.running import Daemon, daemon, descriptors
from tests.faults.killed_clients import kill_clients
from tests.faults.killed_daemon import kill_daemon
from tests.known_kv import empty, known_kv, prompt

_LOOKUP_TOKENS = 8192
_BLOCKS_A_PROMPT = _LOOKUP_TOKENS // 128
_LEASE_TOKENS = 2000
_PUT_TOKENS = 256

Times = NDArray[np.float64]


def main() -> int:
    args = arguments(__doc__ or "", _options)
    report = Report(
        "bench.daemon", f"Unix socket and memfds, {os.cpu_count()} cores; clients in closed loops"
    )
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as folder:
        path = Path(folder)
        if args.ttft:
            from bench.daemon_ttft import compare

            compare(report, path, 3 if args.quick else 15)
        elif args.kills:
            _kills(report, path, *((50, 10) if args.quick else (1000, 200)))
        elif args.soak:
            _soak(report, path, args.soak)
        else:
            _latency(report, path / "many", 20_000 if args.quick else 200_000, 2.0 if args.quick else 10.0)
            _real(report, path / "real", 100 if args.quick else 1000)
            _mixed(
                report, path, (1, 4) if args.quick else (1, 2, 4, 8, 16, 32, 64), 2.0 if args.quick else 5.0
            )
    return report.finish(args)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ttft", action="store_true", help="time to first token against an embedded store")
    parser.add_argument("--kills", action="store_true", help="kill -9 of clients and of the daemon")
    parser.add_argument("--soak", type=float, default=0.0, metavar="MINUTES", help="16 clients for so long")


# -- look-ups ----------------------------------------------------------------------------------------------------------


def _latency(report: Report, path: Path, blocks: int, seconds: float) -> None:
    """Look-ups of 8,192 tokens while many blocks are held."""
    profile = Profile(
        hot_bytes=0,
        warm_bytes=blocks * 2048 + 64 * MIB,
        cold_bytes=0,
        alignment=2048,
        arena_bytes=1 << 30,
    )
    rows = report.table(
        f"look-up of {_LOOKUP_TOKENS:,} tokens, {blocks:,} blocks held",
        ("clients", "p50 µs", "p90 µs", "p99 µs", "a second", "daemon's CPU µs each"),
    )
    with daemon(path, profile) as running:
        with connect(running.socket, identity=SMALL, fallback="none") as store:
            prompts = blocks // _BLOCKS_A_PROMPT
            for which in range(prompts):
                tokens = prompt(which, _LOOKUP_TOKENS)
                result = store.put(tokens, known_kv(tokens, SMALL))
                assert not result.refused, result.reason
            assert store.stats().warm.blocks == prompts * _BLOCKS_A_PROMPT
        found: dict[int, Times] = {}
        for clients in (1, 8):
            used = cpu_seconds(running.pid)
            uses = [Use(SMALL, seconds, prompts=min(64, prompts), length=_LOOKUP_TOKENS)] * clients
            seen = run(running.socket, uses)
            times = found[clients] = _together(seen, "lookup")
            used = (cpu_seconds(running.pid) - used) / len(times)
            rows.append((clients, *_percentiles(times), len(times) / seconds, used * 1e6))
    report.bar("E1 look-up, one client, p50", float(np.percentile(found[1], 50)) * 1e3, "<=", 0.4, "ms")
    report.bar("E1 look-up, 8 clients, p50", float(np.percentile(found[8], 50)) * 1e3, "<=", 2, "ms")
    report.bar("E1 look-up, 8 clients, p99", float(np.percentile(found[8], 99)) * 1e3, "<=", 10, "ms")


# -- leases and puts of a real layout ----------------------------------------------------------------------------------


def _real(report: Report, path: Path, repeats: int) -> None:
    """Lease of a long hot prefix, and puts of 256 new tokens, with the layout of SmolLM2-135M in float16."""
    profile = Profile(hot_bytes=128 * MIB, warm_bytes=512 * MIB, staging_bytes=128 * MIB)
    rows = report.table(
        "through the daemon, 23 KB a token",
        ("what", "p50 µs", "p90 µs", "p99 µs", "copied by the daemon, bytes"),
    )
    with daemon(path, profile) as running, connect(running.socket, identity=REAL, fallback="none") as store:
        tokens = prompt(0, _LEASE_TOKENS)
        store.put(tokens, known_kv(tokens, REAL))
        store.promote(store.lookup(tokens), to="hot")
        assert {block.tier for block in store.lookup(tokens).blocks} == {"hot"}
        buffer = empty(_LEASE_TOKENS, REAL.layout)
        before = store.stats().counts["daemon_bytes_copied"]
        lease, load = [], []
        for _ in range(repeats):
            started = time.perf_counter()
            with store.find(tokens) as held:
                lease.append(time.perf_counter() - started)
                assert held.length == _LEASE_TOKENS
        for _ in range(max(10, repeats // 10)):
            with store.find(tokens) as held:
                started = time.perf_counter()
                assert held.load_into(buffer) == _LEASE_TOKENS
                load.append(time.perf_counter() - started)
        copied = store.stats().counts["daemon_bytes_copied"] - before
        rows.append(
            (f"look-up + lease of {_LEASE_TOKENS} hot tokens", *_percentiles(np.array(lease)), copied)
        )
        rows.append(("placing them in the engine's memory", *_percentiles(np.array(load)), copied))
        put, refused = _puts(store, repeats)
        after = store.stats().counts["daemon_bytes_copied"] - before - copied
        what = f"put of {_PUT_TOKENS} tokens; refused, as flash was behind: {refused:.1%}"
        rows.append((what, *_percentiles(put), after // repeats))
    report.bar(
        "E1 look-up + lease + map, 2,000 hot tokens, p50", statistics.median(lease) * 1e3, "<=", 1, "ms"
    )
    report.bar("E1 bytes that the daemon copied for them", copied, "<=", 0)
    report.bar(f"E1 put of {_PUT_TOKENS} tokens, p99", float(np.percentile(put, 99)) * 1e3, "<=", 5, "ms")


def _puts(store: RemoteStore, repeats: int) -> tuple[Times, float]:
    """New tokens each time, with pauses as an engine makes them: it computes what it puts. Those that were kept, and
    the share of those refused, since flash was not as fast as they come: 300 MB a second, several times an engine's.
    """
    kv = known_kv(prompt(1, _PUT_TOKENS), REAL)
    times = []
    for which in range(repeats):
        tokens = prompt(1000 + which, _PUT_TOKENS)
        assert store.lookup(tokens).length < 128
        started = time.perf_counter()
        result = store.put(tokens, kv)
        took = time.perf_counter() - started
        if not result.refused:
            times.append(took)
        time.sleep(0.02)
    return np.array(times), 1 - len(times) / repeats


# -- many clients ------------------------------------------------------------------------------------------------------


def _mixed(report: Report, folder: Path, clients: Sequence[int], seconds: float) -> None:
    """Look-ups, leases with loads, and puts, mixed, against a store embedded in the one process that uses it."""
    profile = Profile(hot_bytes=32 * MIB, warm_bytes=256 * MIB, cold_bytes=1024 * MIB)
    use = Use(REAL, seconds, lookups=0.7, leases=0.25, puts=0.05, prompts=8, length=512)
    rows = report.table(
        "70 % look-ups, 25 % leases + loads, 5 % puts; prompts of 512 tokens; embedded: one process, one client",
        (
            "clients",
            "look-up p50 µs",
            "p99",
            "lease + load p50 µs",
            "p99",
            "put p50 µs",
            "p99",
            "operations a second",
            "CPU cores",
            "memory MiB",
        ),
    )
    with open_store(folder / "embedded", identity=REAL, profile=profile) as store:
        started = cpu_seconds(os.getpid())
        seen = Work(store, use, 0).run()
        used = cpu_seconds(os.getpid()) - started
        rows.append(("embedded", *_kinds([seen]), used / seconds, memory_mib(os.getpid())["Rss"]))
    for count in clients:
        with daemon(folder / f"clients-{count}", profile) as running:
            started = cpu_seconds(running.pid)
            all_seen = run(running.socket, [use] * count)
            used = cpu_seconds(running.pid) - started
            rows.append((count, *_kinds(all_seen), used / seconds, memory_mib(running.pid)["Rss"]))


def _kinds(seen: Sequence[Seen]) -> tuple[float, ...]:
    found: list[float] = []
    total = 0
    for kind in ("lookup", "lease", "put"):
        times = _together(seen, kind)
        total += len(times)
        found += [float(np.percentile(times, share)) * 1e6 if len(times) else 0.0 for share in (50, 99)]
    return (*found, total / max(each.seconds for each in seen))


def _together(seen: Sequence[Seen], kind: str) -> Times:
    return np.concatenate([getattr(each, kind) for each in seen])


def _percentiles(times: Times) -> tuple[float, float, float]:
    p50, p90, p99 = np.percentile(times, [50, 90, 99]) * 1e6
    return float(p50), float(p90), float(p99)


# -- faults and time ---------------------------------------------------------------------------------------------------


def _kills(report: Report, folder: Path, clients: int, daemons: int) -> None:
    (folder / "clients").mkdir()
    killed = kill_clients(folder / "clients", clients, seed=2026)
    rows = report.table(
        "clients killed with kill -9 while they hold leases, load and put",
        (
            "killed",
            "leases freed",
            "look-up p99 of another client ms",
            "beside as many that live",
            "left behind",
        ),
    )
    rows.append(
        (
            killed.killed,
            killed.leases,
            killed.p99 * 1e3,
            killed.unkilled_p99 * 1e3,
            "; ".join(killed.leaks) or "nothing",
        )
    )
    report.bar("E3 clients killed", killed.killed, ">=", clients)
    report.bar("E3 things left behind", len(killed.leaks), "<=", 0)
    report.bar(
        "E3 look-up p99 of another client, against none killed", killed.p99 / killed.unkilled_p99, "<=", 2
    )
    (folder / "daemons").mkdir()
    died = kill_daemon(folder / "daemons", daemons, seed=2026)
    rows = report.table(
        "the daemon killed with kill -9 under 3 clients",
        ("kills", "reads compared", "tokens", "durable, all there", "slowest return ms", "failures"),
    )
    rows.append(
        (died.kills, died.reads, died.tokens, died.durable, died.slowest_return * 1e3, len(died.failures))
    )
    for failure in died.failures:
        print(f"FAILED {failure}")
    report.bar("E4 kills", died.kills, ">=", daemons)
    report.bar("E4 promises broken", len(died.failures), "<=", 0)


_SOAK_CLIENTS = 16
_SAMPLE_SECONDS = 5.0


def _soak(report: Report, folder: Path, minutes: float) -> None:
    """All budgets are full after the first minutes; from the first quarter on nothing may grow."""
    profile = Profile(
        hot_bytes=16 * MIB,
        warm_bytes=64 * MIB,
        cold_bytes=256 * MIB,
        staging_bytes=64 * MIB,
        arena_bytes=64 * MIB,
    )
    use = Use(REAL, minutes * 60, lookups=0.4, leases=0.3, puts=0.3, prompts=64, length=512, verify=True)
    samples: list[tuple[float, int]] = []
    over: list[str] = []
    with daemon(folder / "soak", profile) as running:
        watch = _Watch(running, profile, folder / "soak", samples, over)
        seen = run(running.socket, [use] * _SOAK_CLIENTS, watch=watch.sample, every=_SAMPLE_SECONDS)
        with connect(running.socket, identity=REAL, fallback="none") as store:
            store.check()
            stats = store.stats()
    later = samples[len(samples) // 4 :]
    half = len(later) // 2
    resident = [statistics.median(value for value, _ in part) for part in (later[:half], later[half:])]
    opened = [statistics.median(value for _, value in part) for part in (later[:half], later[half:])]
    wrong, tokens = sum(each.wrong for each in seen), sum(each.tokens for each in seen)
    rows = report.table(
        f"{_SOAK_CLIENTS} clients for {minutes:g} minutes",
        (
            "operations",
            "tokens compared",
            "wrong reads",
            "RSS MiB, 2nd and last part",
            "descriptors",
            "over budget",
        ),
    )
    operations = sum(len(_together(seen, kind)) for kind in ("lookup", "lease", "put"))
    rows.append(
        (
            operations,
            tokens,
            wrong,
            f"{resident[0]:.0f} → {resident[1]:.0f}",
            f"{opened[0]:.0f} → {opened[1]:.0f}",
            "; ".join(over) or "never",
        )
    )
    print({name: count for name, count in stats.counts.items() if name.startswith(("evicted", "daemon"))})
    report.bar("E7 wrong reads", wrong, "<=", 0)
    report.bar("E7 tokens compared", tokens, ">=", 1)
    report.bar("E7 RSS, last part over the one before", resident[1] / resident[0], "<=", 1.03)
    report.bar("E7 descriptors, the same", opened[1] / opened[0], "<=", 1.03)
    report.bar("E7 samples over budget", len(over), "<=", 0)


class _Watch:
    """Looks at a daemon now and then."""

    def __init__(
        self, running: Daemon, profile: Profile, path: Path, samples: list[tuple[float, int]], over: list[str]
    ) -> None:
        self._running = running
        self._profile = profile
        self._path = path
        self._samples = samples
        self._over = over

    def sample(self) -> None:
        self._samples.append((memory_mib(self._running.pid)["Rss"], descriptors(self._running.pid)))
        profile = self._profile
        shared = shared_mib(self._running.pid)
        most = profile.hot_bytes + profile.warm_bytes + profile.staging_bytes
        if shared * MIB > most:
            self._over.append(f"shared memory {shared:.0f} MiB")
        disk = 0
        for root, _, names in os.walk(self._path):
            for name in names:
                try:
                    disk += os.lstat(os.path.join(root, name)).st_blocks * 512
                except FileNotFoundError:  # evicted just then
                    continue
        if disk > profile.cold_bytes:
            self._over.append(f"disk {disk / MIB:.0f} MiB")


if __name__ == "__main__":
    raise SystemExit(main())
