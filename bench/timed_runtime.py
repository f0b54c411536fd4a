"""A runtime that notes how long each graph runs: what an answer would take if there were nothing but graph calls."""

from __future__ import annotations

import re
import time
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline.graphs import Graph
from kvstore.pipeline.runtime import Binding, CompiledGraph, Done, NpuRuntime, Tensors

Shape = tuple[int, int, int, range]
"""C tokens over the first W of S slots through these layers: C, S, W, layers."""


class TimedRuntime:
    """Another runtime with a watch.

    `seconds` sums all runs. `samples` holds those of graphs that compute layers, by (C, S, W, layers): not of those
    that only turn hidden states into logits, nor of those that also give attention.
    """

    def __init__(self, runtime: NpuRuntime) -> None:
        self._runtime = runtime
        self.name = runtime.name
        self.seconds = 0.0
        self.samples: defaultdict[Shape, list[float]] = defaultdict(list)

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        return self._runtime.allocate(nbytes)

    def prepare(self, example: Graph) -> None:
        self._runtime.prepare(example)

    def compile(self, graph: Graph) -> CompiledGraph:
        return _Timed(self, self._runtime.compile(graph), graph.window)

    def note(self, shape: Shape | None, seconds: float) -> None:
        self.seconds += seconds
        if shape is not None:
            self.samples[shape].append(seconds)


class _Timed:
    def __init__(self, watch: TimedRuntime, graph: CompiledGraph, window: int | None) -> None:
        self._watch, self._graph, self._window = watch, graph, window

    def bind(self, tensors: Tensors) -> Binding:
        shape = None
        if self._window is not None and "attention" not in tensors:
            layers = [int(name[1:]) for name in tensors if re.fullmatch(r"k\d+", name)]
            shape = (
                len(tensors["positions"]),
                len(tensors["slot_positions"]),
                self._window,
                range(min(layers), max(layers) + 1),
            )
        return _TimedBinding(self._watch, self._graph.bind(tensors), shape)


class _TimedBinding:
    def __init__(self, watch: TimedRuntime, binding: Binding, shape: Shape | None) -> None:
        self._watch, self._binding, self._shape = watch, binding, shape

    def rebind(self, tensors: Tensors) -> None:
        self._binding.rebind(tensors)

    def start(self) -> Done:
        started = time.perf_counter()
        self._binding.start().wait()
        self._watch.note(self._shape, time.perf_counter() - started)
        return Done()
