"""Embedder over the token embeddings that the language model has anyway: no second model, only numpy.

A text becomes the weighted mean of the directions of its tokens. That is blind to the order of words, which
near-duplicates and texts on one topic share anyway, and takes a fraction of a millisecond.

- Common tokens say little. Nobody counts tokens here, but vocabularies of byte pairs are ordered by frequency: the
  id of a token is about its rank, and by Zipf's law the log of its rank is about its information, -log p.
- A token that occurs n times counts 1 + ln n times, else markup drowns what a screen says.
- What all token vectors have in common says nothing: their mean and their few directions of largest variance are
  taken out (Mu, Bhat and Viswanath, "All-but-the-top", 2017, algorithm 1).
- Vectors longer than `dimension` are projected on that many random orthogonal directions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xxhash
from numpy.typing import ArrayLike, NDArray

from .errors import TokenError
from .tokens import token_ids

_RULE = b"token mean 1"  # changes with anything here that changes vectors
_COMMON = 16  # directions taken out
_ROUNDS = 4
_SAMPLE = 8192  # rows that these directions are got from
_ROWS = 4096  # read at once

Floats = NDArray[np.float32]


class TokenEmbedder:
    """Over `matrix`, float [vocab, width], the model's input embeddings. A memory map will do: rows are read as needed.

    `tokenize` gives the model's token ids of a text. All of `matrix` is read once here, which takes a fraction of
    a second. Immutable; any thread may call.
    """

    name = "token-embeddings"

    def __init__(
        self,
        matrix: NDArray[np.floating],
        tokenize: Callable[[str], ArrayLike],
        *,
        dimension: int = 768,
    ) -> None:
        if matrix.ndim != 2 or not matrix.size or dimension < 1:
            raise ValueError(f"a matrix [vocab, width] is needed, got shape {matrix.shape} for {dimension}")
        self._matrix = matrix
        self._tokenize = tokenize
        vocab, width = matrix.shape
        self.dimension = min(dimension, width)
        digest = xxhash.xxh3_128(_RULE)
        total = np.zeros(width)
        for start in range(0, vocab, _ROWS):
            rows = np.ascontiguousarray(matrix[start : start + _ROWS])
            digest.update(rows.data)
            total += rows.sum(axis=0, dtype=np.float64)
        self._mean = (total / vocab).astype(np.float32)
        self._common = _main_directions(self._directions(np.arange(0, vocab, -(-vocab // _SAMPLE))))
        self._projection: Floats | None = None
        if self.dimension < width:
            random = np.random.default_rng(width).standard_normal((width, self.dimension), np.float32)
            digest.update(random.data)
            self._projection = np.linalg.qr(random)[0]
        self.digest = digest.hexdigest()

    def embed(self, texts: Sequence[str]) -> Floats:
        """Normalised vectors [n, dimension]; zeros for a text without tokens. Raises TokenError for unknown ids."""
        return self.embed_tokens([self._tokenize(text) for text in texts])

    def embed_tokens(self, texts: Sequence[ArrayLike]) -> Floats:
        """The same of texts as token ids, each integers [m]."""
        vectors = np.empty((len(texts), self.dimension), np.float32)
        for i, text in enumerate(texts):
            # One by one: products of matrices wake all threads of the BLAS, and wait long for them on busy cores.
            total = self._weighted_sum(token_ids(text))
            total -= self._common @ (total @ self._common)
            vectors[i] = total if self._projection is None else total @ self._projection
        return _normalised(vectors)

    def _weighted_sum(self, ids: NDArray[np.int32]) -> Floats:
        """Proportional to the weighted mean, float32 [width]."""
        tokens, counts = np.unique(ids, return_counts=True)
        if len(tokens) and tokens[-1] >= len(self._matrix):
            raise TokenError(f"token id {tokens[-1]} is outside of the {len(self._matrix)} embeddings")
        weights = (1 + np.log(counts)) * np.log(tokens + 2)
        total: Floats = weights.astype(np.float32) @ self._directions(tokens)
        return total

    def _directions(self, tokens: NDArray[np.integer]) -> Floats:
        """Of length 1, seen from the mean, float32 [n, width]."""
        return _normalised(self._matrix[tokens].astype(np.float32) - self._mean)


def _main_directions(rows: Floats) -> Floats:
    """Orthonormal [width, c] that span about the c directions of largest variance: subspace iteration.

    From a fixed start, so that two runs agree; fewer than `_COMMON` for a small model.
    """
    width = rows.shape[1]
    count = min(_COMMON, width // 8, len(rows))
    if not count:
        return np.zeros((width, 0), np.float32)
    basis, _ = np.linalg.qr(rows[:: len(rows) // count][:count].T)
    for _ in range(_ROUNDS):
        basis, _ = np.linalg.qr(rows.T @ (rows @ basis))
    return basis


def _normalised(rows: Floats) -> Floats:
    """Rows of length 1; zeros stay zeros."""
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.divide(rows, np.where(length > 0, length, 1), dtype=np.float32)
