"""Simulated devices: right answers, and the time that the profile says. Times have lower bounds only."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.onnx_runtime import OnnxRuntime
from kvstore.pipeline.simulated import IdleRuntime, SimulatedFlash, SimulatedNpu, roofline
from tests.tiny_models import write_tiny_gguf


def test_answers_are_the_runtimes_and_times_the_profiles(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", layers=4)
    settings = {"sizes": (32,), "contexts": (128,), "groups": 2}
    plain = StaticGraphEngine(tmp_path / "tiny.gguf", cache=tmp_path / "plain", **settings)  # type: ignore[arg-type]
    npu = SimulatedNpu(OnnxRuntime(), 4, lambda tokens, slots: tokens * slots * 1e-6, launch_seconds=1e-3)
    slow = StaticGraphEngine(
        tmp_path / "tiny.gguf",
        runtime=npu,
        cache=tmp_path / "slow",
        **settings,  # type: ignore[arg-type]
    )
    tokens = np.arange(50)
    kv = slow.allocate(100)
    slow.costs(kv.slots)
    before, started = npu.busy_seconds, time.perf_counter()
    logits = slow.prefill(tokens, kv)
    seconds, busy = time.perf_counter() - started, npu.busy_seconds - before
    assert np.array_equal(logits, plain.prefill(tokens, plain.allocate(100)))
    due = 2 * (32 * 128 * 1e-6 + 2 * 1e-3)  # two calls through two groups each
    assert seconds >= busy >= due


def test_a_graph_in_the_queue_begins_when_the_one_before_is_over() -> None:
    """What the host does between two starts takes none of the device's time."""
    npu = SimulatedNpu(IdleRuntime(), 1, lambda *_: 0.0)
    binding = IdleRuntime().bind({})
    executions = []
    for _ in range(3):
        executions.append(npu.start(binding, 60.0))
        time.sleep(0.01)
    moments = [execution.over_at for execution in executions]
    assert np.diff(moments) == pytest.approx(60.0)
    assert npu.busy_seconds == pytest.approx(180.0)


def test_with_an_idle_runtime_only_time_passes(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "tiny.gguf", layers=2)
    npu = SimulatedNpu(IdleRuntime(), 2, lambda *_: 0.0)
    engine = StaticGraphEngine(
        tmp_path / "tiny.gguf", runtime=npu, cache=tmp_path / "cache", sizes=(16,), contexts=(64,)
    )
    kv = engine.allocate(20)
    kv.keys[0][:] = 3
    engine.prefill(np.arange(20), kv)
    assert (kv.keys[0] == 3).all()


def test_flash_serves_one_read_after_the_other() -> None:
    flash = SimulatedFlash(lambda nbytes: nbytes * 1e-7)
    read = flash.slow(lambda nbytes, _: nbytes)
    started = time.perf_counter()
    threads = [threading.Thread(target=read, args=(100_000, 0)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.perf_counter() - started >= 0.04
    assert flash.busy_seconds == pytest.approx(0.04)


def test_flash_scales_reads_but_for_heads_of_records() -> None:
    flash = SimulatedFlash(lambda nbytes: float(nbytes), scale=10)
    assert flash.seconds(4096, 0) == 4096
    assert flash.seconds(5000, 0) == 4096 + 9040
    assert flash.seconds(5000, 4096) == 50_000
    flash.slowdown = 3
    assert flash.seconds(5000, 8192) == 150_000


def test_a_call_is_bound_by_its_tokens_or_by_the_weights() -> None:
    seconds = roofline(1000, weight_bytes=1e9, memory_bytes_per_second=1e10, double_at=1000)
    assert seconds(1, 0) == pytest.approx(0.1)
    assert seconds(500, 0) == pytest.approx(0.5)
    assert seconds(500, 1000) == pytest.approx(1.0)
