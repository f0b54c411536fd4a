"""Vectors of blocks, and which of them are nearest to a query: exact, by inner product.

Every query is compared with every vector. Blocks are large: 100,000 of 128 tokens are 300 GB of KV even for a
model of 135M parameters, and a device holds some thousands. There an exact search takes about a millisecond,
needs no training and forgets a block at once; an approximate index would begin to pay beyond 100,000.

How: one array without gaps; the last vector moves into the place of one that is removed. FAISS searches it
where it lies (`faiss.knn`, what its flat index does), in one thread: the others have a prefill to serve, and a
team of threads waits for its slowest. A FAISS index that owned the vectors would copy half of them at each
removal, and rebuild its map of ids. Without FAISS numpy does the same search.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from .errors import BlockRefused, UnknownBlock

_FEWEST_ROWS = 64
_TOGETHER = 8
"""From so many queries on one product of matrices takes less: a fifth for 32 queries of 10,000 vectors."""


class Vectors:
    """float32 vectors [dimension] by block number. Not thread-safe."""

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self._rows = np.empty((_FEWEST_ROWS, dimension), np.float32)
        self._blocks = np.empty(_FEWEST_ROWS, np.int64)  # by row
        self._row: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._row)

    def __contains__(self, block: object) -> bool:
        return block in self._row

    def rows(self, blocks: Sequence[int]) -> NDArray[np.float32]:
        """A copy of the vectors of `blocks`, [n, dimension]. Raises UnknownBlock."""
        return self._rows[np.array([self._find(block) for block in blocks], np.intp)]

    def add(self, block: int, vector: NDArray[np.float32]) -> None:
        """Raises BlockRefused when `block` is held."""
        if block in self._row:
            raise BlockRefused(f"block {block} has a vector already; remove it first")
        row = len(self._row)
        if row == len(self._rows):
            self._rows = np.concatenate([self._rows, np.empty_like(self._rows)])
            self._blocks = np.concatenate([self._blocks, np.empty_like(self._blocks)])
        self._rows[row] = vector
        self._blocks[row] = block
        self._row[block] = row

    def remove(self, block: int) -> None:
        """Raises UnknownBlock."""
        row = self._find(block)
        del self._row[block]
        last = len(self._row)
        if row != last:
            moved = int(self._blocks[last])
            self._rows[row] = self._rows[last]
            self._blocks[row] = moved
            self._row[moved] = row

    def nearest(self, queries: NDArray[np.float32], k: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Blocks and inner products of the min(k, len) nearest to each of `queries` [q, dimension], best first."""
        held = self._rows[: len(self._row)]
        k = min(k, len(held))
        if not k or not len(queries):
            return np.empty((len(queries), k), np.int64), np.empty((len(queries), k), np.float32)
        products, rows = _knn(np.ascontiguousarray(queries, np.float32), held, k)
        return self._blocks[rows], products

    def _find(self, block: int) -> int:
        row = self._row.get(block)
        if row is None:
            raise UnknownBlock(f"block {block} has no vector")
        return row


def backend() -> str:
    """What searches: "faiss" and its version, or "numpy". Loads FAISS, which takes a moment the first time."""
    faiss = _faiss()
    return "numpy" if faiss is None else f"faiss {faiss.__version__}"


def _knn(
    queries: NDArray[np.float32], held: NDArray[np.float32], k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Largest products [q, k] and rows of `held`, best first."""
    faiss = _faiss()
    if faiss is None:
        products = queries @ held.T
        rows = np.argpartition(-products, k - 1, axis=1)[:, :k]
        chosen = np.take_along_axis(products, rows, axis=1)
        order = np.argsort(-chosen, axis=1, kind="stable")
        return np.take_along_axis(chosen, order, axis=1), np.take_along_axis(rows, order, axis=1)
    threads, alone = faiss.omp_get_max_threads(), faiss.cvar.distance_compute_blas_threshold
    faiss.omp_set_num_threads(1)
    faiss.cvar.distance_compute_blas_threshold = _TOGETHER
    try:
        products, rows = faiss.knn(queries, held, k, metric=faiss.METRIC_INNER_PRODUCT)
    finally:
        faiss.omp_set_num_threads(threads)
        faiss.cvar.distance_compute_blas_threshold = alone
    return products, rows


def _faiss() -> ModuleType | None:
    """The library, loaded when it is first needed. None where it is missing or cannot be loaded."""
    try:
        return importlib.import_module("faiss")
    except ImportError:
        return None
