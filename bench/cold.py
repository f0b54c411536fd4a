"""The cold tier at a steady state, three ways to keep payloads, and what a put costs its caller.

    python -m bench.cold --check

All candidates hold records of the same mixed sizes, full blocks and tails of models from SmolLM2-135M to Qwen3-4B, in
the same budget, which is turned over again and again: least recently used records go, half of the puts use a random
one. They take turns, one turnover each, so that a drift of the medium hits all alike. Reading is compared with plain
large reads of a file just before, one sample against the other. The bars hold for the product's layout, one file a
block. Everything happens in a temporary directory: set TMPDIR to choose the medium.

A put as its caller sees it is one of a block of 128 tokens that is new, from the call to its return, while the
background thread encodes, writes and syncs the blocks before it. `put_later` is what an engine calls that goes on
decoding, as `Session` does; `put` copies the block before it returns, so larger models take longer.
"""

from __future__ import annotations

import os
import random
import shutil
import statistics
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.progress import track

from bench.cold_candidates import CANDIDATES, Candidate, DamagedError, Frames, disk_bytes, drop_page_cache
from bench.report import Report, arguments
from kvstore.flash import flash_file
from kvstore.layout import Layout
from kvstore.pipeline.rope import Rope
from kvstore.profile import MIB, Profile
from kvstore.store import open_store
from tests.faults.child import Child
from tests.known_kv import Arrays, identity

PRODUCT = "one file a block"

_BUDGET = 256 * MIB
_THREADS = 2  # as many as the store loads with
_COMMIT = 32 * MIB
_SLICE = 64 * MIB  # of one measurement of plain reading
_SAMPLE = 128 * MIB  # of records, so that the last one, which a thread reads alone, weighs little

_LAYERS_AND_BLOCK = {  # layers, MiB of a block of 128 tokens as int8, which is about what a codec leaves of it
    "SmolLM2-135M": (30, 1.4),
    "SmolLM2-360M": (32, 2.5),
    "Llama-3.2-1B": (16, 2.0),
    "Qwen2.5-1.5B": (28, 1.75),
    "Qwen3-0.6B": (28, 7.0),
    "SmolLM2-1.7B": (24, 12.0),
    "Qwen3-4B": (36, 9.0),
    "Phi-4-mini": (32, 8.0),
    "a block of 256 tokens": (32, 16.0),
}
_TAILS = 0.25  # of all records: about one a prompt of 400 tokens
_SMALLEST = 0.3  # MiB


# -- records -----------------------------------------------------------------------------------------------


class Records:
    """Records that follow from their numbers, so that what is found after a kill can be compared."""

    def __init__(self) -> None:
        self._bytes = memoryview(np.random.default_rng(2026).bytes(32 * MIB))

    def frames(self, number: int) -> Frames:
        """One to 32 frames a record, each half a MiB at least where the record is that large."""
        order = random.Random(number)
        layers, mib = order.choice(list(_LAYERS_AND_BLOCK.values()))
        groups = min(layers, max(1, int(mib * 2)))
        if order.random() < _TAILS:
            mib *= order.randrange(1, 128) / 128
        size = int(max(mib, _SMALLEST) * MIB) // groups // 256 * 256
        start = order.randrange(len(self._bytes) - groups * size)
        return [self._bytes[start + group * size : start + (group + 1) * size] for group in range(groups)]


def _key(number: int) -> bytes:
    return number.to_bytes(8, "big") * 4


def _number(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


# -- steady state ------------------------------------------------------------------------------------------


@dataclass
class Turnover:
    """One turnover: bytes of KV put, seconds, and what the process and the whole medium wrote meanwhile."""

    put: int = 0
    seconds: float = 0.0
    written: int = 0
    medium_written: int = 0

    @property
    def speed(self) -> float:
        """MB/s of KV put."""
        return self.put / self.seconds / 1e6


@dataclass
class Run:
    """One candidate, in use, and what was seen of it."""

    kind: type[Candidate]
    folder: Path
    budget: int
    candidate: Candidate = field(init=False)
    held: OrderedDict[bytes, int] = field(
        default_factory=OrderedDict
    )  # key -> bytes, least recently used first
    turnovers: list[Turnover] = field(default_factory=list)
    puts: list[float] = field(default_factory=list)  # seconds, the share of a commit included
    reads: list[float] = field(default_factory=list)  # seconds of a frame, one thread, page cache dropped
    read_speed: dict[str, list[float]] = field(default_factory=dict)  # MB/s
    disk: list[tuple[int, int]] = field(default_factory=list)  # bytes on disk, live bytes
    opening: dict[str, list[float]] = field(default_factory=dict)  # seconds, after what
    plain: dict[str, list[dict[str, float]]] = field(default_factory=dict)  # MB/s of plain reads, just before
    lost: int = 0
    damaged: int = 0
    confirmed: int = 0

    def __post_init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.candidate = self.kind(self.folder, self.budget)

    def close(self) -> None:
        self.candidate.close()

    @property
    def live(self) -> int:
        return sum(self.held.values())


def turn_over(run: Run, records: Records, numbers: Callable[[], int], order: random.Random) -> None:
    """Put as much as the budget holds."""
    turnover = Turnover()
    written, medium = _written_by_process(), _written_to_medium(run.folder)
    pending: list[float] = []
    since_commit = 0
    while turnover.put < run.budget:
        number = numbers()
        frames = records.frames(number)
        size = sum(len(frame) for frame in frames)
        if run.held and order.random() < 0.5:
            run.held.move_to_end(order.choice(list(run.held)))
        started = time.perf_counter()
        while not run.candidate.fits(size):
            run.candidate.delete(run.held.popitem(last=False)[0])
        run.candidate.put(_key(number), frames)
        pending.append(time.perf_counter() - started)
        run.held[_key(number)] = size
        turnover.put += size
        turnover.seconds += pending[-1]
        since_commit += size
        if since_commit >= _COMMIT or turnover.put >= run.budget:
            started = time.perf_counter()
            run.candidate.commit()
            taken = time.perf_counter() - started
            turnover.seconds += taken
            run.puts += [each + taken / len(pending) for each in pending]
            run.disk.append((disk_bytes(run.folder), run.live))
            pending, since_commit = [], 0
    turnover.written = _written_by_process() - written
    turnover.medium_written = _written_to_medium(run.folder) - medium
    run.turnovers.append(turnover)


def _written_by_process() -> int:
    """Bytes that this process made dirty or wrote directly, of files and of the file system's own pages."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("write_bytes"):
            return int(line.split()[1])
    raise OSError("/proc/self/io has no write_bytes")


def _written_to_medium(folder: Path) -> int:
    """Bytes that anyone wrote to the device under `folder`, its journal included; 0 where that is not told."""
    device = folder.stat().st_dev
    try:
        stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()
    except OSError:
        return 0
    return int(stat[6]) * 512


# -- raw speed of the medium -------------------------------------------------------------------------------


_WAYS = {"page cache": 0, "O_DIRECT": getattr(os, "O_DIRECT", 0)}


class Raw:
    """A large file, written and read in plain large pieces: what the medium can do."""

    _PIECE = 8 * MIB

    def __init__(self, path: Path, size: int) -> None:
        self._path = path
        self._size = size
        self._memory = flash_file.aligned(self._PIECE)
        self._memory[:] = np.random.default_rng(1).integers(0, 256, self._PIECE, np.uint8)
        self.write_speed: list[float] = []
        self.read_speed: dict[str, list[float]] = {}
        self._write(size)

    def write(self) -> None:
        self.write_speed.append(_speed(2 * _SLICE, lambda: self._write(2 * _SLICE)))

    def read(self, order: random.Random) -> dict[str, float]:
        """MB/s of each way to read, each of another part: what was just read lies in caches below the page cache."""
        flash_file.sync(self._path)
        parts = order.sample(range(self._size // _SLICE), len(_WAYS))
        speeds = {
            name: _speed(_SLICE, partial(self._read, part * _SLICE, flag))
            for (name, flag), part in zip(_WAYS.items(), parts, strict=True)
        }
        for name, speed in speeds.items():
            self.read_speed.setdefault(name, []).append(speed)
        return speeds

    @property
    def faster(self) -> str:
        """The way to read that is faster."""
        return max(self.read_speed, key=lambda name: statistics.median(self.read_speed[name]))

    def share(
        self, speeds: Sequence[float], plain: Sequence[dict[str, float]], way: str | None = None
    ) -> float:
        """Of the speed of plain reads, the faster way if none is named: the median over pairs, one after the other."""
        return statistics.median(
            speed / just_before[way or self.faster] for speed, just_before in zip(speeds, plain, strict=True)
        )

    def _write(self, size: int) -> None:
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_DIRECT", 0))
        for _ in range(0, size, self._PIECE):
            os.write(fd, self._memory.data)
        os.fsync(fd)
        os.close(fd)

    def _read(self, start: int, flag: int) -> None:
        fd = os.open(self._path, os.O_RDONLY | flag)
        for at in range(start, start + _SLICE, self._PIECE):
            os.preadv(fd, [self._memory.data], at)
        os.close(fd)


def _speed(nbytes: int, work: Callable[[], object]) -> float:
    """MB/s."""
    started = time.perf_counter()
    work()
    return nbytes / (time.perf_counter() - started) / 1e6


# -- reading -----------------------------------------------------------------------------------------------


Pools = dict[int, ThreadPoolExecutor]
"""By their number, threads that live on, as those of the store do: each has a buffer."""


def read(run: Run, raw: Raw, pools: Pools, order: random.Random) -> None:
    """Read random records by one thread and by as many as the store has: whole, at once again, and frame by frame."""
    for threads in pools:
        keys = _some(run, order)
        nbytes = sum(run.held[key] for key in keys)
        run.close()  # a file that is mapped stays in the page cache
        drop_page_cache(run.folder)
        run.open()
        plain = raw.read(order)
        for how in ("dropped", "read before", "by frames"):
            name = f"{threads} thread{'s' * (threads > 1)}, {how}"
            work = run.candidate.read
            if how == "by frames":
                run.close()
                drop_page_cache(run.folder)
                run.open()
                work = partial(_read_frames, run.candidate, run.reads if threads == 1 else [])
            started = time.perf_counter()
            for reading in [pools[threads].submit(work, key) for key in keys]:
                reading.result()
            speed = nbytes / (time.perf_counter() - started) / 1e6
            run.read_speed.setdefault(name, []).append(speed)
            run.plain.setdefault(name, []).append(plain)


def _some(run: Run, order: random.Random) -> list[bytes]:
    keys, size = [], 0
    for key in order.sample(list(run.held), len(run.held)):
        keys.append(key)
        size += run.held[key]
        if size >= _SAMPLE:
            break
    return keys


def _read_frames(candidate: Candidate, times: list[float], key: bytes) -> int:
    last = time.perf_counter()

    def timed() -> None:
        nonlocal last
        now = time.perf_counter()
        times.append(now - last)
        last = now

    return candidate.read_frames(key, timed)


# -- stops -------------------------------------------------------------------------------------------------


def stop(run: Run, records: Records, kills: int, seed: int) -> None:
    """Close and open again; then kill -9 in the middle of writing, open, and compare all that is found."""
    order = random.Random(seed)
    run.close()
    for _ in range(3):
        _open_timed(run, "clean close")
        run.close()
    for kill in range(kills):
        child = Child(_write_until_killed, run.kind, str(run.folder), run.budget, (kill + 1) << 40)
        child.receive()
        time.sleep(order.uniform(0.1, 0.8))
        said = child.kill()
        gone = {key for what, keys in said for key in keys if what == "goes"}
        durable = {key for what, keys in said for key in keys if what == "durable"} | set(run.held)
        _open_timed(run, "kill -9")
        found = set(run.candidate.keys())
        run.lost += len(durable - gone - found)
        run.confirmed += len(durable - gone)
        run.held.clear()
        for key in run.candidate.keys():  # noqa: SIM118  (a candidate is no mapping)
            frames = records.frames(_number(key))
            try:
                whole = run.candidate.read(key) == sum(len(frame) for frame in frames)
            except DamagedError:
                whole = False
            run.damaged += not whole
            run.held[key] = sum(len(frame) for frame in frames)
        run.close()
    run.open()


def _open_timed(run: Run, after: str) -> None:
    drop_page_cache(run.folder)
    started = time.perf_counter()
    run.open()
    run.opening.setdefault(after, []).append(time.perf_counter() - started)


def _write_until_killed(
    connection: Connection, kind: type[Candidate], folder: str, budget: int, first: int
) -> None:
    """Put records and say which ones go and which ones are durable."""
    candidate, records = kind(Path(folder), budget), Records()
    order = random.Random(first)
    held = candidate.keys()
    connection.send("busy")
    for number in count(first, 8):
        group = range(number, number + 8)
        for each in group:
            frames = records.frames(each)
            while not candidate.fits(sum(len(frame) for frame in frames)):
                victim = held.pop(order.randrange(len(held)))
                connection.send(("goes", [victim]))
                candidate.delete(victim)
            candidate.put(_key(each), frames)
            held.append(_key(each))
        candidate.commit()
        connection.send(("durable", [key for key in map(_key, group) if key in held]))


# -- a put as its caller sees it ---------------------------------------------------------------------------

_MODELS = {
    "SmolLM2-135M": Layout.uniform(
        layers=30, kv_heads=3, head_dim=64, rope=Rope(64, 1e4, 64), dtype="float16"
    ),
    "Llama-3.2-1B": Layout.uniform(
        layers=16, kv_heads=8, head_dim=64, rope=Rope(64, 5e5, 64), dtype="float16"
    ),
    "Qwen3-4B": Layout.uniform(
        layers=36, kv_heads=8, head_dim=128, rope=Rope(128, 1e6, 128), dtype="float16"
    ),
}


def caller_puts(folder: Path, layout: Layout, puts: int, gap: float, *, later: bool) -> NDArray[np.float64]:
    """Milliseconds of each put of a block of 128 tokens, about one every `gap` seconds, written to flash meanwhile."""
    order = np.random.default_rng(7)
    rows = 1024
    kv = Arrays()
    for layer in range(len(layout.layers)):
        for arrays, shape in (
            (kv.keys, layout.key_shape(layer, rows)),
            (kv.values, layout.value_shape(layer, rows)),
        ):
            arrays.append(order.standard_normal(shape, np.float32).astype(layout.numpy_dtype))
    times = []
    profile = Profile(hot_bytes=0, warm_bytes=256 * MIB, cold_bytes=512 * MIB)
    with (
        open_store(folder, identity=identity("bench", layout=layout), profile=profile) as store,
        ThreadPoolExecutor(1) as pool,
    ):
        flushing = pool.submit(store.flush)
        for _ in range(puts):
            tokens = order.integers(0, 50_000, 128).astype(np.int32)
            at = int(order.integers(0, rows - 128))
            block = kv.rows(slice(at, at + 128))
            started = time.perf_counter()
            done = store.put_later(tokens, block) if later else store.put(tokens, block)
            times.append((time.perf_counter() - started) * 1000)
            time.sleep(gap)
            result = done.result() if isinstance(done, Future) else done
            assert result.refused == 0, result.reason
            if flushing.done():  # what was put meanwhile is written, whether or not it is worth that
                flushing.result()
                flushing = pool.submit(store.flush)
    shutil.rmtree(folder)
    return np.array(times)


# -- the whole ---------------------------------------------------------------------------------------------


def main() -> int:
    args = arguments(__doc__ or "")
    turnovers, rounds, kills, puts = (6, 4, 2, 100) if args.quick else (50, 12, 8, 300)
    folder = Path(tempfile.mkdtemp(prefix="kvstore-cold-"))
    report = Report("Cold tier", _medium(folder))
    try:
        order, records, numbers = random.Random(2026), Records(), count(1)
        raw = Raw(folder / "raw", _BUDGET)
        runs = {
            name: Run(kind, folder / name.replace(" ", "-"), _BUDGET) for name, kind in CANDIDATES.items()
        }
        for run in runs.values():  # fill
            turn_over(run, records, lambda: next(numbers), order)
            run.turnovers.clear()
            run.puts.clear()
            run.disk.clear()
        for _ in track(range(turnovers), "turnovers"):
            raw.write()
            for run in order.sample(list(runs.values()), len(runs)):
                turn_over(run, records, lambda: next(numbers), order)
        pools = {threads: ThreadPoolExecutor(threads) for threads in (1, _THREADS)}
        for _ in track(range(rounds), "reading"):
            for run in order.sample(list(runs.values()), len(runs)):
                read(run, raw, pools, order)
        for run in track(runs.values(), "stopping", len(runs)):
            stop(run, records, kills, seed=11)
            run.close()
        _report(report, runs, raw, turnovers)
        _caller(report, folder, puts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return report.finish(args)


def _medium(folder: Path) -> str:
    """The file system and the disk under `folder`."""
    mounts = [line.split()[:3] for line in Path("/proc/mounts").read_text().splitlines()]
    device, _, kind = max(
        (mount for mount in mounts if folder.is_relative_to(mount[1])), key=lambda mount: len(mount[1])
    )
    virtual = (
        ", a virtual disk: its host may cache and ration"
        if Path(device).name.startswith(("vd", "xvd"))
        else ""
    )
    return f"files in {folder.parent}, {kind} on {device}{virtual}"


def _report(report: Report, runs: dict[str, Run], raw: Raw, turnovers: int) -> None:
    early, late = _early_and_late(turnovers)
    writing = report.table(
        f"writing, budget full, {turnovers} turnovers (MB/s; ms: of the background thread)",
        [
            "candidate",
            "all",
            f"turnover {early.start + 1}-{early.stop}",
            f"turnover {late.start + 1}-{late.stop}",
            "p50 record ms",
            "p99 record ms",
            "written / KV",
            "medium written / KV",
        ],
    )
    writing.append(
        (
            "raw",
            statistics.median(raw.write_speed),
            statistics.median(raw.write_speed[early]),
            statistics.median(raw.write_speed[late]),
            *[""] * 4,
        )
    )
    disk = report.table(
        "bytes on disk (allocated; live: KV of the records held)",
        ["candidate", "median disk / live", "most disk / live", "most disk / budget", "live / budget"],
    )
    reading_columns = ["candidate", *next(iter(runs.values())).read_speed, "p50 frame ms", "p99 frame ms"]
    reading = report.table(
        f"reading, checksums on (MB/s; in brackets: of plain reads of 8 MiB, {raw.faster}, just before)",
        reading_columns,
    )
    for name, speeds in raw.read_speed.items():
        reading.append(
            (f"plain reads, {name}", f"{statistics.median(speeds):,.0f}", *[""] * (len(reading_columns) - 2))
        )
    stopping = report.table(
        "stops (opening: page cache dropped, slowest)",
        [
            "candidate",
            "opening after clean close ms",
            "after kill -9 ms",
            "durable records",
            "lost",
            "damaged",
        ],
    )
    for name, run in runs.items():
        put = sum(each.put for each in run.turnovers)
        ms = np.array(run.puts) * 1000
        writing.append(
            (
                name,
                _median_speed(run.turnovers),
                _median_speed(run.turnovers[early]),
                _median_speed(run.turnovers[late]),
                *map(float, np.percentile(ms, [50, 99])),
                sum(each.written for each in run.turnovers) / put,
                sum(each.medium_written for each in run.turnovers) / put,
            )
        )
        ratios = [taken / live for taken, live in run.disk]
        disk.append(
            (
                name,
                statistics.median(ratios),
                max(ratios),
                max(taken for taken, _ in run.disk) / run.budget,
                statistics.median(live for _, live in run.disk) / run.budget,
            )
        )
        reading.append(
            (
                name,
                *(
                    f"{statistics.median(speeds):,.0f} ({raw.share(speeds, run.plain[way]):.0%})"
                    for way, speeds in run.read_speed.items()
                ),
                *map(float, np.percentile(np.array(run.reads) * 1000, [50, 99])),
            )
        )
        stopping.append(
            (
                name,
                max(run.opening["clean close"]) * 1000,
                max(run.opening["kill -9"]) * 1000,
                run.confirmed,
                run.lost,
                run.damaged,
            )
        )
    _bars(report, runs[PRODUCT], raw, early, late)


def _bars(report: Report, run: Run, raw: Raw, early: slice, late: slice) -> None:
    put = sum(each.put for each in run.turnovers)
    for way in (f"{_THREADS} threads, dropped", f"{_THREADS} threads, by frames"):
        share = raw.share(run.read_speed[way], run.plain[way], "page cache")
        report.bar(f"reading ({way}), of plain reads with the page cache dropped", share, ">=", 0.8)
    report.bar("written / KV", sum(each.written for each in run.turnovers) / put, "<=", 1.3)
    report.bar("bytes on disk / live", max(taken / live for taken, live in run.disk), "<=", 1.15)
    report.bar("bytes on disk / budget", max(taken for taken, _ in run.disk) / run.budget, "<=", 1)
    of_raw = [each.speed / plain for each, plain in zip(run.turnovers, raw.write_speed, strict=True)]
    decay = statistics.median(of_raw[late]) / statistics.median(of_raw[early])  # the medium drifts, too
    spans = f"turnovers {late.start + 1}-{late.stop} against {early.start + 1}-{early.stop}"
    name = f"writing, of plain writes, {spans}"
    report.bar(name, decay, ">=", 0.9)
    report.bar("durable records lost after kill -9", run.lost, "<=", 0)
    report.bar("records damaged by kill -9", run.damaged, "<=", 0)


def _early_and_late(turnovers: int) -> tuple[slice, slice]:
    """Some turnovers around the fifth and the last ones; the first and the last two of a short run."""
    if turnovers < 10:
        return slice(0, 2), slice(turnovers - 2, turnovers)
    return slice(4, 14), slice(turnovers - 10, turnovers)


def _median_speed(turnovers: Sequence[Turnover]) -> float:
    return statistics.median(each.speed for each in turnovers)


def _caller(report: Report, folder: Path, puts: int) -> None:
    rows = report.table(
        "a put of 128 tokens as its caller sees it, flash written meanwhile, ms",
        ["model", "way", "MiB a block", "puts", "first 10, median", "p50", "p90", "p99", "p99 but first 10"],
    )
    for name, layout in _MODELS.items():
        block = layout.block_bytes(128)
        gap = max(0.03, block / (150 * MIB))  # what decoding 128 tokens leaves room for, and more
        for way in ("put_later", "put"):
            times = caller_puts(folder / "caller", layout, puts, gap, later=way == "put_later")
            p50, p90, p99 = map(float, np.percentile(times, [50, 90, 99]))
            steady = float(np.percentile(times[10:], 99))
            rows.append((name, way, block / MIB, puts, float(np.median(times[:10])), p50, p90, p99, steady))
            if way == "put_later":
                report.bar(f"p99 of a put_later of {name}", p99, "<=", 1, "ms")


if __name__ == "__main__":
    raise SystemExit(main())
