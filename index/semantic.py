"""Semantic index: which held blocks speak of what this text speaks of.

It proposes, and never decides: what is prefetched on its advice is used only if a prompt then holds those tokens,
which the trie and the chunk table find out. For look-ups it adds nothing: whatever two texts share in 32 tokens or
more the chunk table finds by itself (`bench.near_duplicates`).

A block is in the index from `add` to `remove`. Its text is embedded by a background thread, as late as that gets
to it; until then nobody finds the block. The queue is bounded: what comes when it is full is refused and counted.
`search` embeds its query itself, in the caller's thread, but finds nothing before the background thread has loaded
the embedder and FAISS: a request never waits for that. One index serves one identity. Any thread may call.

Vectors are normalised, so that the inner product is the cosine, and rounded to float16, so that those read back
from the file are those that were written.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from . import vector_file, vectors
from .embedder import Embedder
from .errors import BlockRefused

log = logging.getLogger(__name__)

Text = str | Callable[[], str]
"""A text, or what makes it: called in the background thread, as turning tokens into text takes time too."""


class Neighbour(NamedTuple):
    """A held block and the cosine of its text and the query's, -1 to 1."""

    block: int
    similarity: float


class SemanticStats(NamedTuple):
    """A snapshot. `refusals` count blocks not indexed and searches not done, by reason.

    `backend`, which searches: "faiss x.y.z", "numpy", or "not loaded yet" while there was nothing to find.
    `opened`: "new", "whole", or "rebuilt: " and why the file was not used.
    """

    embedder: str
    backend: str
    opened: str
    blocks: int
    waiting: int
    embedded: int
    refusals: dict[str, int]


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """A block to embed. Compared by identity: a number may be removed and added again meanwhile."""

    block: int
    key: bytes
    text: Text


class SemanticIndex:
    """Over one embedder, kept in the file `path`, encrypted by `cipher`, from `save` to the next start.

    At most `capacity` blocks (4 * dimension bytes each, three times that for a moment while room is doubled) and
    `queue` texts that wait; `batch` of these are embedded at once, which is how long a search may have to wait for
    an embedder that does one thing at a time.
    """

    def __init__(
        self,
        embedder: Embedder,
        path: Path | None = None,
        *,
        capacity: int = 100_000,
        queue: int = 1024,
        batch: int = 8,
        cipher: vector_file.Cipher | None = None,
    ) -> None:
        if min(capacity, queue, batch) < 1:
            raise ValueError(f"capacity, queue and batch are 1 or more, got {capacity}, {queue}, {batch}")
        self._embedder = embedder
        self._path = path
        self._cipher = cipher
        self._capacity = capacity
        self._queue_limit = queue
        self._batch = batch
        opened = (
            vector_file.Opened("new", {}) if path is None else vector_file.read(path, embedder.digest, cipher)
        )
        self._opened = opened.state
        self._kept = opened.vectors  # by key: of the last run, and not added again yet
        self._vectors: vectors.Vectors | None = None  # None until the dimension is known
        self._keys: dict[int, bytes] = {}  # of blocks that have a vector
        self._queue: OrderedDict[int, _Waiting] = OrderedDict()  # removed from anywhere, at once
        self._pending: dict[int, _Waiting] = {}  # queued or being embedded
        self._refusals: Counter[str] = Counter()
        self._warned: set[str] = set()
        self._embedded = 0
        self._changes = 0  # of what has a vector, since the file was read or written
        self._writing = threading.Lock()  # one writes the file at a time; taken before `_changed`
        self._tried = False  # to load
        self._loaded = False
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvstore-semantic", daemon=True)
        self._thread.start()

    def __len__(self) -> int:
        """Blocks that `search` can find."""
        with self._changed:
            return len(self._keys)

    def __contains__(self, block: object) -> bool:
        with self._changed:
            return block in self._keys

    def add(self, block: int, key: bytes, text: Text) -> bool:
        """Index a held block. Returns at once; False when it was refused, which is counted.

        `key` names the block's tokens and context beyond this process, as block numbers do not. A vector that the
        file holds for it is taken over; else `text` is queued. Raises BlockRefused when `block` is there already.
        """
        with self._changed:
            if block in self._keys or block in self._pending:
                raise BlockRefused(f"block {block} is indexed already; remove it first")
            if self._closing:
                return self._refuse("index closed")
            if len(self._keys) + len(self._pending) >= self._capacity:
                return self._refuse("index full")
            kept = self._kept.pop(key, None)
            if kept is not None:
                self._hold(block, key, kept.astype(np.float32))
                return True
            if len(self._queue) >= self._queue_limit:
                return self._refuse("queue full")
            waiting = _Waiting(block, key, text)
            self._pending[block] = waiting
            self._queue[block] = waiting
            self._changed.notify_all()
            return True

    def restore(self, block: int, key: bytes) -> bool:
        """As `add`, of a block whose text is not known here: False unless the file holds a vector for it."""
        with self._changed:
            if self._closing or block in self._keys or block in self._pending or key not in self._kept:
                return False
            self._hold(block, key, self._kept.pop(key).astype(np.float32))
            return True

    def remove(self, block: int) -> None:
        """Forget a block, wherever it is on its way in. No error for one that is not here: it may have been refused."""
        with self._changed:
            self._pending.pop(block, None)
            self._queue.pop(block, None)
            if self._keys.pop(block, None) is not None and self._vectors is not None:
                self._vectors.remove(block)
                self._changes += 1

    def search(self, query: Text | NDArray[np.floating], k: int = 16) -> list[Neighbour]:
        """The at most `k` blocks nearest to a text, or to a vector [dimension]; nearest first."""
        return self.search_all(query[None] if isinstance(query, np.ndarray) else [query], k)[0]

    def search_all(
        self, queries: Sequence[Text] | NDArray[np.floating], k: int = 16
    ) -> list[list[Neighbour]]:
        """The same for n texts, or vectors [n, dimension] as `embedder.embed` gives them.

        Where the embedder is not loaded yet or fails, nothing is found and the reason is counted. Raises
        ValueError for a `k` below 1 and for vectors of another dimension.
        """
        if k < 1:
            raise ValueError(f"at least one neighbour is asked for, got k={k}")
        nothing: list[list[Neighbour]] = [[] for _ in queries]
        with self._changed:
            if self._vectors is None or not nothing:
                return nothing
            dimension = self._vectors.dimension
            if not self._loaded:
                self._refuse("search before the embedder was loaded")
                return nothing
        given = queries if isinstance(queries, np.ndarray) else self._embed_queries(queries)
        if given is None:
            with self._changed:
                self._refuse("query not embedded")
            return nothing
        if given.shape != (len(queries), dimension):
            raise ValueError(f"vectors [{len(queries)}, {dimension}] are needed, got {list(given.shape)}")
        units, usable = _normalised(given)
        with self._changed:
            blocks, products = self._vectors.nearest(units, k)
        return [
            [Neighbour(*pair) for pair in zip(near, cosines, strict=True)] if use else []
            for near, cosines, use in zip(blocks.tolist(), products.tolist(), usable.tolist(), strict=True)
        ]

    def drain(self, timeout: float | None = None) -> bool:
        """Wait, at most `timeout` seconds, until all that was added can be found or was refused; whether that came."""

        def settled() -> bool:
            return self._closing or not (self._pending or (self._keys and not self._tried))

        with self._changed:
            return self._changed.wait_for(settled, timeout)

    @property
    def unsaved(self) -> int:
        """How many vectors the file lacks, or has of blocks that are not here."""
        with self._changed:
            return self._changes + len(self._kept)

    @property
    def file_bytes(self) -> int:
        """No fewer than `save` would write now."""
        with self._changed:
            return 0 if self._vectors is None else vector_file.size(len(self._keys), self._vectors.dimension)

    def save(self) -> int:
        """Write the file, if there is a path and anything unsaved; returns the bytes written.

        What the last run knew and nobody added again until now is forgotten. Without a vector there is no file.
        Raises OSError (disk full); the old file stays then.
        """
        with self._writing:
            with self._changed:
                changes = self._changes + len(self._kept)
                if self._path is None or not changes:
                    return 0
                self._changes = 0
                self._kept.clear()
                keys = list(self._keys.values())
                rows = None
                if self._vectors is not None and keys:
                    rows = self._vectors.rows(list(self._keys)).astype(np.float16)
            try:
                if rows is None:
                    self._path.unlink(missing_ok=True)
                    return 0
                return vector_file.write(
                    self._path, self._embedder.name, self._embedder.digest, keys, rows, self._cipher
                )
            except OSError:
                with self._changed:
                    self._changes += changes
                raise

    def delete_file(self) -> None:
        """Leave nothing on the medium, at once; the next `save` writes what is held then. Raises OSError."""
        with self._writing:
            if self._path is not None:
                self._path.unlink(missing_ok=True)
            with self._changed:
                self._kept.clear()
                self._changes = len(self._keys)

    def stats(self) -> SemanticStats:
        with self._changed:
            return SemanticStats(
                embedder=self._embedder.name,
                backend=vectors.backend() if self._loaded else "not loaded yet",
                opened=self._opened,
                blocks=len(self._keys),
                waiting=len(self._pending),
                embedded=self._embedded,
                refusals=dict(self._refusals),
            )

    def close(self) -> None:
        """Stop the thread after the batch in hand, and drop what still waits, counted. Does not save."""
        with self._changed:
            self._closing = True
            self._refusals["index closed"] += len(self._queue)
            for block in self._queue:
                del self._pending[block]
            self._queue.clear()
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        """The background thread: load as soon as there is something, then embed until closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._kept or self._keys or self._queue or self._closing)
        if not self._closing:
            vectors.backend()  # loads it
            self._loaded = self._try_embed(["."]) is not None
        with self._changed:
            self._tried = True
            self._changed.notify_all()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closing)
                if self._closing:
                    return
                batch = [
                    self._queue.popitem(last=False)[1] for _ in range(min(self._batch, len(self._queue)))
                ]
            found = self._embed_batch(batch)
            with self._changed:
                for waiting, vector in zip(batch, found, strict=True):
                    if self._pending.get(waiting.block) is not waiting:
                        continue  # removed meanwhile
                    del self._pending[waiting.block]
                    if isinstance(vector, str):
                        self._refusals[vector] += 1
                    else:
                        self._hold(waiting.block, waiting.key, vector)
                        self._embedded += 1
                        self._changes += 1
                self._changed.notify_all()

    def _embed_batch(self, batch: list[_Waiting]) -> list[NDArray[np.float32] | str]:
        """For each its normalised vector, or the reason why it has none."""
        texts = [self._try_text(waiting.text) for waiting in batch]
        given = self._try_embed([text for text in texts if text is not None])
        if given is None and len(batch) > 1:  # one text can spoil it for all
            return [found for waiting in batch for found in self._embed_batch([waiting])]
        if given is None:
            return ["embedder failed"]
        self._loaded = True
        units, usable = _normalised(given)
        rows = iter(zip(units, usable, strict=True))
        found: list[NDArray[np.float32] | str] = []
        for text in texts:
            if text is None:
                found.append("text not made")
                continue
            unit, use = next(rows)
            found.append(unit if use else "text without content")
        return found

    def _embed_queries(self, queries: Sequence[Text]) -> NDArray[np.float32] | None:
        texts = [text for query in queries if (text := self._try_text(query)) is not None]
        return self._try_embed(texts) if len(texts) == len(queries) else None

    def _try_text(self, text: Text) -> str | None:
        if isinstance(text, str):
            return text
        try:
            return text()
        except Exception:
            self._warn("text not made")
            return None

    def _try_embed(self, texts: Sequence[str]) -> NDArray[np.float32] | None:
        """Vectors of the right shape, or None: whatever an embedder does, thread and request go on."""
        try:
            given = np.asarray(self._embedder.embed(texts), np.float32)
            dimension = self._embedder.dimension if self._vectors is None else self._vectors.dimension
            if given.shape != (len(texts), dimension):
                raise ValueError(f"{len(texts)} texts gave vectors of shape {given.shape}")
            return given
        except Exception:
            self._warn(f"embedder {self._embedder.name} failed")
            return None

    def _warn(self, what: str) -> None:
        """Log the error in hand; in full the first time, for each block it would fill the log."""
        log.log(logging.DEBUG if what in self._warned else logging.WARNING, what, exc_info=True)
        self._warned.add(what)

    def _hold(self, block: int, key: bytes, vector: NDArray[np.float32]) -> None:
        if self._vectors is None:
            self._vectors = vectors.Vectors(len(vector))
        self._vectors.add(block, vector.astype(np.float16).astype(np.float32))
        self._keys[block] = key

    def _refuse(self, reason: str) -> bool:
        self._refusals[reason] += 1
        return False


def _normalised(given: NDArray[np.floating]) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """`given` [n, d] with rows of length 1, and which rows have a direction: neither zeros nor NaN."""
    rows = np.asarray(given, np.float32)
    length = np.linalg.norm(rows, axis=1)
    usable = np.isfinite(length) & (length > 0)
    rows = np.divide(rows, np.where(usable, length, 1)[:, None], dtype=np.float32)
    return rows, usable
