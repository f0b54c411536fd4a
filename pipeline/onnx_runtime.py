"""ONNX Runtime as the device: its CPU here, an NPU elsewhere through the execution provider of that name.

Weights are held once, whatever the number of graphs, and still in the arrangement that makes the CPU fast. ONNX
Runtime packs each constant matrix for its kernels when a session is made, which costs every session its own copy of
the model. But it can save a model with the packed matrices beside the plain ones, and maps these from the file when
a model names them. The packed form depends on neither C nor S. So one example graph is saved, its packed matrices
are appended to the weights file, and every later graph names them: the operating system then holds one copy for all.

Measured with SmolLM2-135M (540 MB of float32), 2 cores, S = 1024; memory is what each further graph adds (PSS), and
time is relative to the first form:

    form                              memory     C = 1   C = 16   C = 64   C = 256
    each session packs its own        +420 MB    1       1        1        1
    shared, not packed                +10 MB     1.1     1.6      1.3      1.05
    shared and packed (used here)     +10 MB     1       1        1        1

28 graphs, seven sizes at four context lengths up to 4096, take 950 MB with all weights and KV. (Judge that by PSS:
RSS counts a page once for every session that maps it.) The key of a packed matrix is a hash of its content, which
ONNX Runtime checks, so another processor costs memory, never correctness; another version gets a folder of its own.

Two more choices. The thread pool does not spin: on two cores spinning makes a session three times slower at random.
The memory arena is off: it keeps the largest activations of every session for ever, 868 instead of 257 MB beside the
weights for ten graphs, and is no faster.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray

from .graphs import Graph
from .runtime import Done, GraphRefused, Tensors

PROVIDERS = {
    "CPU": "CPUExecutionProvider",
    "QNN": "QNNExecutionProvider",
    "CoreML": "CoreMLExecutionProvider",
    "OpenVINO": "OpenVINOExecutionProvider",
    "NNAPI": "NnapiExecutionProvider",
    "VitisAI": "VitisAIExecutionProvider",
}

_PACKED = "packed.json"
_ERRORS_ONLY = 3


class ProviderUnavailable(RuntimeError):
    """This build of ONNX Runtime lacks the execution provider asked for; the message lists those it has."""


class OnnxRuntime:
    """An NpuRuntime over ONNX Runtime.

    `provider` is a key of PROVIDERS or a full provider name, `options` go to the provider as they are, `threads` is
    the size of the CPU pool (default: the CPUs this process may use). Nodes that the provider refuses run on the CPU.
    Raises ProviderUnavailable.
    """

    def __init__(
        self,
        provider: str = "CPU",
        *,
        threads: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._provider = PROVIDERS.get(provider, provider)
        available = ort.get_available_providers()
        if self._provider not in available:
            raise ProviderUnavailable(
                f"{self._provider} is not in this build of ONNX Runtime {ort.__version__}, which has "
                f"{', '.join(available)}; install the build for your device, or use one of these"
            )
        self._options = dict(options or {})
        self._threads = threads or _available_cpus()
        self.name = f"onnxruntime-{ort.__version__}-{self._provider.removesuffix('ExecutionProvider')}"

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), dtype=np.uint8, count=nbytes)

    def prepare(self, example: Graph) -> None:
        if self._provider != PROVIDERS["CPU"]:
            return
        folder, path = example.weights.folder, example.weights.path
        scratch = Path(tempfile.mkdtemp(prefix=".packing-", dir=folder))
        try:
            settings = self._settings(example)
            settings.optimized_model_filepath = str(scratch / "model.onnx")
            for key, value in {
                "optimized_model_external_initializers_file_name": "model.bin",
                "optimized_model_external_initializers_min_size_in_bytes": "1024",
                "save_external_prepacked_constant_initializers": "1",
            }.items():
                settings.add_session_config_entry(f"session.{key}", value)
            self._session(example, example.model, settings)
            saved = onnx.load(str(scratch / "model.onnx"), load_external_data=False)
            with (scratch / "model.bin").open("rb") as source, path.open("ab") as target:
                packed = {
                    tensor.name: [
                        _append(entry.value, source, target)
                        for entry in tensor.external_data
                        if entry.key.startswith("prepacked_")
                    ]
                    for tensor in saved.graph.initializer
                }
                target.flush()
                os.fsync(target.fileno())
            (folder / _PACKED).write_bytes(msgspec.json.encode({k: v for k, v in packed.items() if v}))
        finally:
            shutil.rmtree(scratch)

    def compile(self, graph: Graph) -> OnnxGraph:
        settings = self._settings(graph)
        model = graph.model
        if graph.pack and (packed := _packed(graph.weights.folder)):
            model = onnx.ModelProto()
            model.CopyFrom(graph.model)
            for tensor in model.graph.initializer:
                for number, entry in enumerate(packed.get(tensor.name, ())):
                    tensor.external_data.add(key=f"prepacked_{number}", value=entry)
        return OnnxGraph(self._session(graph, model, settings))

    def _settings(self, graph: Graph) -> ort.SessionOptions:
        settings = ort.SessionOptions()
        settings.intra_op_num_threads = self._threads
        settings.log_severity_level = _ERRORS_ONLY
        settings.enable_cpu_mem_arena = False
        for key, value in {
            "intra_op.allow_spinning": "0",
            "disable_prepacking": "0" if graph.pack else "1",
            "model_external_initializers_file_folder_path": str(graph.weights.folder),
        }.items():
            settings.add_session_config_entry(f"session.{key}", value)
        return settings

    def _session(
        self, graph: Graph, model: onnx.ModelProto, settings: ort.SessionOptions
    ) -> ort.InferenceSession:
        providers: list[Any] = [(self._provider, self._options)]
        if self._provider != PROVIDERS["CPU"]:
            providers.append(PROVIDERS["CPU"])
        try:
            return ort.InferenceSession(model.SerializeToString(), settings, providers=providers)
        except Exception as error:  # its classes have no common base of their own
            raise GraphRefused(f"{self._provider} refuses {graph.name}: {error}") from error


def _available_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):  # not everywhere; a container may have fewer than the machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _append(entry: str, source: Any, target: Any) -> str:
    """Copy the packed blobs of one entry, "key|offset;length;checksum|…", and return it with their new places."""
    key, *blobs = entry.split("|")
    moved = [key]
    for blob in blobs:
        offset, length, checksum = blob.split(";")
        target.seek(0, os.SEEK_END)
        target.write(b"\0" * (-target.tell() % mmap.PAGESIZE))
        source.seek(int(offset))
        moved.append(f"{target.tell()};{length};{checksum}")
        target.write(source.read(int(length)))
    return "|".join(moved)


@lru_cache(maxsize=8)
def _packed(folder: Path) -> dict[str, list[str]]:
    """ONNX Runtime's own description of each tensor's packed blobs; empty where nothing was packed."""
    try:
        return msgspec.json.decode((folder / _PACKED).read_bytes(), type=dict[str, list[str]])
    except FileNotFoundError:
        return {}


class OnnxGraph:
    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self._inputs = {value.name for value in session.get_inputs()}

    def bind(self, tensors: Tensors) -> OnnxBinding:
        binding = OnnxBinding(self._session, self._inputs)
        binding.rebind(tensors)
        return binding


class OnnxBinding:
    def __init__(self, session: ort.InferenceSession, inputs: set[str]) -> None:
        self._session: Any = session  # its own annotations are partial
        self._binding: Any = session.io_binding()
        self._inputs = inputs
        self._memory: dict[str, NDArray[Any]] = {}

    def rebind(self, tensors: Tensors) -> None:
        for name, array in tensors.items():
            if not array.flags.c_contiguous:
                raise ValueError(f"{name} must be C-contiguous to be bound in place")
            bind = self._binding.bind_input if name in self._inputs else self._binding.bind_output
            bind(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
            self._memory[name] = array

    def start(self) -> Done:
        self._session.run_with_iobinding(self._binding)
        return Done()
