"""What faults cost: kill -9, damaged files, more than fits, and opening a directory of 10,000 blocks.

    python -m bench.faults --check

The tests run the same code (tests/faults) with smaller counts. Everything happens in a temporary directory: set TMPDIR
to choose the medium.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from bench.report import Report, arguments
from kvstore.layout import Layout
from kvstore.profile import MIB, Profile
from kvstore.store import open_store
from tests.faults.budgets import BLOCK_BYTES, PROFILE, SLACK, overfill
from tests.faults.child import Child
from tests.faults.damage import Damaged, build, damage_runs
from tests.faults.killing import ROOMY, TIGHT, Killed, kill_runs
from tests.known_kv import identity, known_kv, load, prompt

_SEED = 2026


def main() -> int:
    args = arguments(__doc__ or "")
    report = Report("Faults", "")
    folder = Path(tempfile.mkdtemp(prefix="kvstore-faults-"))
    report.medium = f"files in {folder.parent}"
    try:
        _kills(report, folder, 10 if args.quick else 100)
        _damage(report, folder, 100 if args.quick else 2000, 50 if args.quick else 500)
        _budgets(report, folder, 10)
        _opening(report, folder, 1000 if args.quick else 10_000)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report.finish(args)


def _kills(report: Report, folder: Path, runs: int) -> None:
    rows = report.table(
        "kill -9 at random moments, then everything loaded and compared",
        [
            "budget",
            "runs",
            "killed while",
            "tokens verified",
            "durable, all there",
            "slowest opening ms",
            "failures",
        ],
    )
    results: list[Killed] = []
    for name, profile in (("roomy", ROOMY), ("tight: demotes and evicts", TIGHT)):
        killed = kill_runs(folder / f"kill-{name[:5]}", runs, _SEED, profile)
        results.append(killed)
        moments = ", ".join(f"{moment} {count}" for moment, count in killed.moments.most_common())
        rows.append(
            (
                name,
                killed.runs,
                moments,
                killed.tokens,
                killed.durable,
                killed.slowest_open * 1000,
                len(killed.failures),
            )
        )
        _print_failures(killed.failures)
    report.bar("kill -9 runs", sum(killed.runs for killed in results), ">=", 2 * runs)
    report.bar("kill -9 runs that broke a promise", sum(len(killed.failures) for killed in results), "<=", 0)


def _damage(report: Report, folder: Path, closed: int, while_open: int) -> None:
    (folder / "damage").mkdir()
    build(folder / "damage" / "pristine")
    rows = report.table(
        "random damage to any file of a data directory",
        ["when", "trials", "all loaded", "missed, reason counted", "opening refused", "failures"],
    )
    parts = report.table("damage by file and by kind", ["when", "files", "kinds"])
    reasons = report.table("reasons counted", ["when", "reasons"])
    results: list[Damaged] = []
    for name, trials in (("closed", closed), ("open", while_open)):
        seen = damage_runs(
            folder / "damage" / "pristine", folder / "damage", trials, _SEED, while_open=name == "open"
        )
        results.append(seen)
        outcomes = seen.outcomes
        rows.append(
            (
                name,
                seen.trials,
                outcomes["all loaded"],
                outcomes["missed, reason counted"],
                outcomes["opening refused"],
                outcomes["FAILED"],
            )
        )
        parts.append((name, _counts(seen.files), _counts(seen.kinds)))
        reasons.append((name, _counts(seen.reasons)))
        _print_failures(seen.failures)
    report.bar("damaged directories tried", sum(seen.trials for seen in results), ">=", closed + while_open)
    report.bar("damage that broke a promise", sum(len(seen.failures) for seen in results), "<=", 0)


def _budgets(report: Report, folder: Path, times: float) -> None:
    spent = overfill(folder / "budget", times, _SEED)
    memory = PROFILE.hot_bytes + PROFILE.warm_bytes + BLOCK_BYTES + SLACK
    rows = report.table(
        f"{times:g} times the budget, MiB", ["what", "allowed", "most ever taken", "put", "samples"]
    )
    rows.append(
        ("disk, allocated", PROFILE.cold_bytes / MIB, spent.disk / MIB, spent.put / MIB, spent.samples)
    )
    rows.append(
        ("memory, growth of RSS", memory / MIB, spent.resident_growth / MIB, spent.put / MIB, spent.samples)
    )
    _print_failures(spent.failures)
    report.bar("put, over the largest budget", spent.put / PROFILE.cold_bytes, ">=", times)
    report.bar("disk, over its budget", spent.disk / PROFILE.cold_bytes, "<=", 1)
    report.bar(
        f"RSS growth, over hot + warm + a block + {SLACK // MIB} MiB", spent.resident_growth / memory, "<=", 1
    )
    report.bar("accounts that were wrong", len(spent.failures), "<=", 0)


_MANY = Layout.uniform(layers=1, kv_heads=1, head_dim=4, rope=None, dtype="float16")
_MANY_PROFILE = Profile(warm_bytes=64 * MIB, hot_bytes=MIB, cold_bytes=1024 * MIB)
_A_PROMPT = 2000  # tokens: 16 blocks of 128


def _opening(report: Report, folder: Path, blocks: int) -> None:
    directory = folder / "many"
    owner = identity("a", layout=_MANY)
    prompts = -(-blocks // 16)
    with open_store(directory, identity=owner, profile=_MANY_PROFILE) as store:
        for which in range(prompts):
            tokens = prompt(which, _A_PROMPT)
            assert store.put(tokens, known_kv(tokens, owner), wait=60).refused == 0
        store.flush()
    rows = report.table(
        f"opening {prompts * 16:,} blocks, ms",
        ["after", "page cache", "index", "opening", "first prompt from flash"],
    )
    slowest: dict[str, float] = {}
    can_drop = _drop_page_cache()
    for after in ("clean close", "kill -9", "kill -9", "index lost"):
        for cached in ("warm", "dropped") if can_drop else ("warm",):
            if after == "kill -9":
                child = Child(_use_until_killed, str(directory))
                child.receive()
                child.kill()
            elif after == "index lost":
                for path in (directory / "index").iterdir():
                    path.unlink()
            if cached == "dropped":
                _drop_page_cache()
            started = time.perf_counter()
            store = open_store(directory, identity=owner, profile=_MANY_PROFILE)
            opened = time.perf_counter()
            with store:
                assert load(store, prompt(prompts // 2, _A_PROMPT)) == _A_PROMPT
                loaded = time.perf_counter()
                assert store.stats().cold.blocks >= prompts * 16
                index = str(store.stats().index)
            rows.append((after, cached, index, (opened - started) * 1000, (loaded - opened) * 1000))
            slowest[after] = max(slowest.get(after, 0), opened - started)
    for after in ("clean close", "kill -9"):
        report.bar(f"opening {prompts * 16:,} blocks after a {after}", slowest[after], "<=", 1, "s")


def _use_until_killed(connection: Connection, directory: str) -> None:
    """Open, put some 500 blocks more that no index will know of, and wait for the end."""
    owner = identity("a", layout=_MANY)
    with open_store(directory, identity=owner, profile=_MANY_PROFILE) as store:
        for which in range(32):
            tokens = prompt(int(np.random.default_rng().integers(1 << 40)) + 1_000_000 + which, _A_PROMPT)
            store.put(tokens, known_kv(tokens, owner), wait=60)
        store.flush()
        connection.send("busy")
        time.sleep(600)


def _drop_page_cache() -> bool:
    """Make the next read come from the medium, where this process may."""
    if os.geteuid() != 0:
        return False
    subprocess.run(["sync"], check=False)
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def _counts(counter: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items(), key=lambda item: -item[1]))


def _print_failures(failures: list[str]) -> None:
    for failure in failures[:10]:
        print(f"FAILED {failure}")


if __name__ == "__main__":
    raise SystemExit(main())
