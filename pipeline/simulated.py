"""A device that takes the time of another one: an NPU and its flash, at the speeds of a profile, on any machine.

Whatever is measured with it is a simulation: label it so. What really runs underneath, a tiny model and small records,
has to take less time than what is simulated, and happens within that time; then overlap, waiting and cancelling behave
as on the device. Whoever waits is woken by a sleep, which comes about 0.1 ms late: of a graph or a read that nothing
overlaps it seems so much longer than it says. What stands in the device's queue behind it begins on time.
"""

from __future__ import annotations

import mmap
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .graphs import Graph
from .runtime import Binding, CompiledGraph, Done, NpuRuntime, Tensors

CallSeconds = Callable[[int, int], float]
"""Seconds of a call of C tokens that reads W slots through all layers, without what it takes to launch a graph."""


class SimulatedNpu:
    """An NpuRuntime that takes as long as `seconds` says, of which a graph of n of `layers` layers takes its part.

    The graphs really run on `runtime` when they are started, so answers are right; the rest of the time is slept. With
    `IdleRuntime` nothing runs, and time is all there is. One graph after the other, as in an NPU's queue, also for
    several threads. Each run of a graph takes `launch_seconds` on top. `busy_seconds` sums what graphs took, those
    included that are still in the queue.
    """

    def __init__(
        self,
        runtime: NpuRuntime,
        layers: int,
        seconds: CallSeconds,
        *,
        launch_seconds: float = 0.0,
        name: str = "simulated",
    ) -> None:
        self._runtime = runtime
        self._layers = layers
        self._seconds = seconds
        self._launch_seconds = launch_seconds
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.name = f"{name}-{runtime.name}"
        self.busy_seconds = 0.0

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        return self._runtime.allocate(nbytes)

    def prepare(self, example: Graph) -> None:
        self._runtime.prepare(example)

    def compile(self, graph: Graph) -> CompiledGraph:
        return _Graph(self, self._runtime.compile(graph), graph.window)

    def seconds(self, tensors: Tensors, window: int | None) -> float:
        """What one run of a graph of this window, bound to these tensors, takes; 0 for one without layers."""
        if window is None:
            return 0.0
        layers = sum(re.fullmatch(r"k\d+", name) is not None for name in tensors)
        whole = self._seconds(len(tensors["positions"]), window)
        return self._launch_seconds + whole * layers / self._layers

    def start(self, binding: Binding, seconds: float) -> SimulatedExecution:
        with self._lock:
            begun = max(time.perf_counter(), self._free_at)
            binding.start().wait()
            self._free_at = max(begun + seconds, time.perf_counter())
            self.busy_seconds += self._free_at - begun
            return SimulatedExecution(self._free_at)


class _Graph:
    def __init__(self, npu: SimulatedNpu, graph: CompiledGraph, window: int | None) -> None:
        self._npu, self._graph, self._window = npu, graph, window

    def bind(self, tensors: Tensors) -> Binding:
        return _Binding(self._npu, self._graph.bind(tensors), self._npu.seconds(tensors, self._window))


class _Binding:
    def __init__(self, npu: SimulatedNpu, binding: Binding, seconds: float) -> None:
        self._npu, self._binding, self._seconds = npu, binding, seconds

    def rebind(self, tensors: Tensors) -> None:
        self._binding.rebind(tensors)

    def start(self) -> SimulatedExecution:
        return self._npu.start(self._binding, self._seconds)


class SimulatedExecution:
    """Over at the moment `over_at`, by the clock of perf_counter."""

    def __init__(self, over_at: float) -> None:
        self.over_at = over_at

    def wait(self) -> None:
        _sleep_until(self.over_at)


class IdleRuntime:
    """An NpuRuntime whose graphs do nothing: what they should write stays as it was."""

    name = "idle"

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=np.uint8, count=nbytes)

    def prepare(self, example: Graph) -> None:
        pass

    def compile(self, graph: Graph) -> CompiledGraph:  # noqa: ARG002 the names are the protocol's
        return self

    def bind(self, tensors: Tensors) -> Binding:  # noqa: ARG002
        return self

    def rebind(self, tensors: Tensors) -> None:
        pass

    def start(self) -> Done:
        return Done()


class SimulatedFlash:
    """A medium that serves one read after the other, each in the seconds that `seconds` says for its bytes.

    A read is served from when it is asked for, or when the one before it is done.

    `scale` bytes of the device stand behind each byte that is really read: so a tiny model's records take as long as
    those of the model that is simulated. A read from a record's start begins with a page that is what it is, the
    header. Any thread may read: a flash part has one command queue, and so has this.
    `busy_seconds` sums what reads took. `slowdown` may be changed while it serves: a flash that ages or is busy.
    """

    def __init__(self, seconds: Callable[[int], float], scale: float = 1.0) -> None:
        self._read_seconds = seconds
        self._scale = scale
        self._lock = threading.Lock()
        self._free_at = 0.0
        self.slowdown = 1.0
        self.busy_seconds = 0.0

    def seconds(self, nbytes: int, offset: int) -> float:
        """What a read of so many real bytes takes, `offset` bytes from the start of a record."""
        header = min(nbytes, max(0, mmap.PAGESIZE - offset))
        return self._read_seconds(header + round((nbytes - header) * self._scale)) * self.slowdown

    def slow(self, read: Callable[[Any, int], int]) -> Callable[[Any, int], int]:
        """`read(where, offset)`, which returns how many bytes it read, at the speed of this medium."""

        def slowed(where: Any, offset: int) -> int:
            asked = time.perf_counter()
            count = read(where, offset)
            with self._lock:
                begin = max(self._free_at, asked)
                took = self.seconds(count, offset)
                self._free_at = begin + took
                self.busy_seconds += took
                end = self._free_at
            _sleep_until(end)
            return count

        return slowed


def roofline(
    tokens_per_second: float,
    *,
    weight_bytes: float,
    memory_bytes_per_second: float,
    double_at: float = 12_000,
) -> CallSeconds:
    """Seconds of a call: what its tokens take to compute, but no less than the weights take to be read once.

    tokens_per_second at an empty context; a call that reads W slots attends to all of them, so a token costs twice that
    at W = `double_at`.
    """
    least = weight_bytes / memory_bytes_per_second

    def seconds(tokens: int, window: int) -> float:
        return max(least, tokens / tokens_per_second * (1 + window / double_at))

    return seconds


def _sleep_until(moment: float) -> None:
    """By the clock of perf_counter."""
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)
