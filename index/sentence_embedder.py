"""Embedder over a sentence-transformers model in a local folder. Needs the extra `semantic`; never the network.

The libraries and the model take seconds to load and hundreds of megabytes: that happens at the first `embed`
(or `dimension`), not before.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from .embedder import EmbedderUnavailable

_OTHER_FORMATS = {"onnx", "openvino"}  # the same weights once more, for runtimes that are not used here


class SentenceEmbedder:
    """The model in `folder`, as `SentenceTransformer.save` lays it out. Computes on one core: the others serve prefill.

    What exceeds the model's longest input is cut off: 256 word pieces for MiniLM, about 200 tokens of an LLM.
    Raises EmbedderUnavailable without the extra, or where `folder` holds no such model.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        if importlib.util.find_spec("sentence_transformers") is None:
            raise EmbedderUnavailable(
                "sentence-transformers is not installed: pip install 'npu-kvstore[semantic]', or use TokenEmbedder"
            )
        if not (self.folder / "modules.json").is_file():
            raise EmbedderUnavailable(f"{self.folder} holds no sentence-transformers model: no modules.json")
        self.name = f"sentence-transformers:{self.folder.name}"
        self.digest = _digest(self.folder)
        self._lock = threading.Lock()  # one load, and one at a time to change the number of threads

    @property
    def dimension(self) -> int:
        """Raises EmbedderUnavailable as `embed` does."""
        with self._lock:
            return self._dimension

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Normalised vectors [n, dimension]. Raises EmbedderUnavailable when the model cannot be loaded."""
        with self._lock:
            if not texts:
                return np.empty((0, self._dimension), np.float32)
            return self._encode(texts)

    @cached_property
    def _dimension(self) -> int:
        return int(self._encode(["."]).shape[1])

    def _encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        model = self._model
        torch = importlib.import_module("torch")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            vectors = model.encode(
                list(texts), convert_to_numpy=True, normalize_embeddings=True, show_progress_bar=False
            )
        finally:
            torch.set_num_threads(threads)
        return np.asarray(vectors, np.float32)

    @cached_property
    def _model(self) -> Any:
        try:
            library = importlib.import_module("sentence_transformers")
            logging = importlib.import_module("transformers.utils.logging")
            shown = logging.is_progress_bar_enabled()
            logging.disable_progress_bar()
            try:
                return library.SentenceTransformer(str(self.folder), device="cpu", local_files_only=True)
            finally:
                if shown:
                    logging.enable_progress_bar()
        except Exception as error:  # broken installations and damaged models fail in every way there is
            raise EmbedderUnavailable(
                f"the model in {self.folder} could not be loaded: {type(error).__name__}: {error}"
            ) from error


def _digest(folder: Path) -> str:
    """Of the names and contents of all files that can decide what a vector is."""
    digest = xxhash.xxh3_128()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder)
        if not path.is_file() or path.suffix == ".md" or _OTHER_FORMATS & set(name.parts) or _hidden(name):
            continue
        digest.update(f"{name.as_posix()}\0{path.stat().st_size}\0".encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()


def _hidden(name: Path) -> bool:
    return any(part.startswith(".") for part in name.parts)
