"""What the engine asks of whatever executes graphs: an NPU's compiler and driver, or ONNX Runtime.

Memory is the host's. A runtime allocates it (so that the device can reach it), a graph is compiled once for its
fixed shapes and bound to that memory any number of times, and running a binding moves nothing across the boundary.
A device works through what was started in order, so the host prepares the next graph while one runs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .graphs import Graph

Tensors = Mapping[str, NDArray[Any]]
"""C-contiguous arrays by the name of a graph's input or output."""


class GraphRefused(RuntimeError):
    """The device cannot run a graph; the message names the graph and says what the compiler said."""


class Execution(Protocol):
    """One run of a graph, started and perhaps not over."""

    @property
    def over_at(self) -> float:
        """When it was over, by perf_counter. Known after `wait`."""

    def wait(self) -> None:
        """Until it is over. Other threads may run meanwhile."""


class Done:
    """An execution that was over when it was started: of a runtime that does not queue."""

    def __init__(self) -> None:
        self.over_at = time.perf_counter()

    def wait(self) -> None:
        pass


class Binding(Protocol):
    """A compiled graph together with the memory of each of its inputs and outputs, which it keeps alive."""

    def rebind(self, tensors: Tensors) -> None:
        """Use other memory for some inputs or outputs from the next run on."""

    def start(self) -> Execution:
        """Execute once, behind all that was started before, reading and writing the bound memory.

        Until that is over nobody may change this memory, nor start this binding again. A runtime without a queue
        returns when it is over; other threads may run meanwhile.
        """


class CompiledGraph(Protocol):
    def bind(self, tensors: Tensors) -> Binding:
        """Bind memory to inputs and outputs; those left out must be bound by `rebind` before the first run.

        An output may share the memory of the input it extends. Raises ValueError for an array that is not
        C-contiguous.
        """


class NpuRuntime(Protocol):
    """Compiles and runs graphs on one device."""

    @property
    def name(self) -> str:
        """Device kind and version, fit for a file name: what prepared weights and measured costs depend on."""

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Zeroed, page-aligned memory that host and device both reach; freed with the last view of it."""

    def prepare(self, example: Graph) -> None:
        """Arrange the weights of `example`, a graph with every layer, once and for all graphs to come.

        Called while the weights folder is still private to this process; may append to the weights file and add
        files to the folder.
        """

    def compile(self, graph: Graph) -> CompiledGraph:
        """Ready `graph` for execution. Raises GraphRefused."""
