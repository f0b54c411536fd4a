"""A lease: while it lives, the KV of a matched prefix is neither moved nor dropped, and can be loaded.

Loading runs over tiles, (block x layer group), group by group: the engine can start on the first layers while the
KV of later ones is still being read. A tile comes from memory or from flash; from flash it is checked, decoded into
warm memory (so that the next request finds it there) and placed in the engine's buffer.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline import kernels

from .block import Block, Residence
from .buffer import KvBuffer, check_buffer
from .errors import BufferTooSmallError, InvalidRequestError, LeaseReleasedError, StoreClosedError
from .record import BadRecordError, RecordReader
from .tiers import Tiers
from .write_behind import WriteBehind

_AHEAD = 6  # tiles in flight: enough for two threads, few enough to bound staging


class LoadedGroup(NamedTuple):
    """One layer group is in the buffer.

    `tokens` is how many tokens of the prefix are good so far. It only shrinks: when a block turns out to be
    damaged, a later group says so, and the engine computes from there on instead.
    """

    number: int
    layers: range
    tokens: int


@dataclass
class _Source:
    """A block of this lease while it is being loaded."""

    block: Block
    take: int  # tokens used of it
    at: int  # position of its first token
    staging: Residence | None = None
    raw: NDArray[np.uint8] | None = None
    reader: RecordReader | None = None
    opening: threading.Lock = field(default_factory=threading.Lock)


class Lease:
    """Holds the first `length` tokens of a prompt. A context manager; `release` ends it once."""

    def __init__(
        self,
        tiers: Tiers,
        worker: WriteBehind,
        pool: Executor,
        blocks: Sequence[Block],
        length: int,
        *,
        whole: bool = False,  # a part is of no use
    ) -> None:
        self._tiers = tiers
        self._worker = worker
        self._pool = pool
        self._blocks = list(blocks)
        self._whole = whole
        self._released = False
        self.length = length
        """Tokens that were held when the lease was taken, less those lost to damage since."""
        self.bytes_read = 0
        """Bytes read from flash by this lease."""
        self._found_in = [block.tier for block in self._blocks]

    def load_into(
        self, buffer: KvBuffer, slots: NDArray[np.int64] | None = None, length: int | None = None
    ) -> int:
        """Load the prefix into `buffer`; returns how many tokens are good, `length` unless something was damaged."""
        good = self.length if length is None else length
        for group in self.layer_groups(buffer, slots, length):
            good = group.tokens
        return good

    def layer_groups(
        self, buffer: KvBuffer, slots: NDArray[np.int64] | None = None, length: int | None = None
    ) -> Iterator[LoadedGroup]:
        """Load group after group of layers into `buffer`, yielding each when it is in place.

        buffer: arrays a layer, keys and values [kv_heads, slots, head_dim]. slots: int64 [length], the slot of each
        token; None means token i goes to slot i. length: load fewer tokens than are leased.

        Raises LayoutMismatchError, BufferTooSmallError, InvalidRequestError, LeaseReleasedError, StoreClosedError.
        Damage on flash raises nothing, see LoadedGroup.
        """
        self._check_usable()
        wanted = self.length if length is None else length
        if wanted < 0:
            raise InvalidRequestError(f"asked to load {wanted} tokens")
        if wanted > self.length:
            raise BufferTooSmallError(f"asked to load {wanted} tokens, the lease holds {self.length}")
        if not self._blocks:
            return iter(())
        namespace = self._blocks[0].namespace
        check_buffer(buffer, namespace.layout, wanted, slots, written=True)
        return self._load(buffer, slots, wanted)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(self._blocks)

    def tokens_by_tier(self, length: int | None = None) -> dict[str, int]:
        """How many of the first `length` tokens lay in each tier when the lease was taken."""
        left = self.length if length is None else length
        counts = {"hot": 0, "warm": 0, "cold": 0}
        for block, tier in zip(self._blocks, self._found_in, strict=True):
            counts[tier] += min(block.length, left)
            left -= min(block.length, left)
        return counts

    def warm_up(self) -> None:
        """Bring what only flash holds into warm memory, as far as there is room, without an engine's buffer."""
        self._check_usable()
        if self._blocks:
            for _ in self._load(None, None, self.length):
                pass

    def release(self) -> None:
        """End the lease. Raises LeaseReleasedError the second time."""
        with self._tiers.lock:
            if self._released:
                raise LeaseReleasedError("this lease was released before")
            self._released = True
            self._tiers.release(self._blocks)
            for block in self._blocks:
                if block.memory is not None and block.memory.tier is self._tiers.warm and block.hits > 1:
                    self._worker.promote(block)

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._released:
            self.release()

    def _check_usable(self) -> None:
        if self._released:
            raise LeaseReleasedError("this lease was released; take a new one")
        if self._tiers.closed:
            raise StoreClosedError("the store of this lease was closed; open it again")

    def _load(
        self, buffer: KvBuffer | None, slots: NDArray[np.int64] | None, wanted: int
    ) -> Iterator[LoadedGroup]:
        sources = self._sources(wanted)
        groups = self._blocks[0].namespace.layer_groups
        tiles = ((group, source) for group in range(len(groups)) for source in sources)
        running: deque[tuple[int, _Source, Future[None]]] = deque()
        good = wanted
        done = 0
        try:
            while running or done < len(groups):
                self._check_usable()
                while len(running) < _AHEAD and (tile := next(tiles, None)) is not None:
                    group, source = tile
                    if source.at < good:
                        work = self._submit(group, source, buffer, slots)
                        running.append((group, source, work))
                if running and running[0][0] == done:
                    _, source, work = running.popleft()
                    try:
                        work.result()
                    except BadRecordError as error:
                        if source.at < good:
                            good = 0 if self._whole else source.at
                            with self._tiers.lock:
                                self._tiers.quarantine(source.block, error)
                    continue
                yield LoadedGroup(done, groups[done], good)
                done += 1
        finally:
            for _, _, work in running:
                work.cancel()
            for _, _, work in running:
                if not work.cancelled():
                    work.exception()
            self._settle(sources, good if done == len(groups) else 0)
            self.length = min(self.length, good) if good < wanted else self.length

    def _submit(
        self, group: int, source: _Source, buffer: KvBuffer | None, slots: NDArray[np.int64] | None
    ) -> Future[None]:
        try:
            return self._pool.submit(self._load_tile, group, source, buffer, slots)
        except RuntimeError:  # the pool is shut down
            self._check_usable()
            raise

    def _sources(self, wanted: int) -> list[_Source]:
        """What to load, with room in warm memory for what comes from flash."""
        sources, at = [], 0
        with self._tiers.lock:
            self._check_usable()
            for block in self._blocks:
                if at >= wanted:
                    break
                source = _Source(block, min(block.length, wanted - at), at)
                if block.memory is not None:
                    source.raw = self._tiers.raw(block)
                elif (room := self._tiers.allocate_warm(block.nbytes)) is not None:
                    source.staging = room
                    source.raw = room.tier.view(room.extent, block.nbytes)
                sources.append(source)
                at += block.length
        return sources

    def _settle(self, sources: list[_Source], good: int) -> None:
        """Blocks read whole from flash stay in warm memory; other staging is given back."""
        read = 0
        for source in sources:
            if source.reader is not None:
                read += source.reader.bytes_read
                source.reader.close()
        self.bytes_read += read
        with self._tiers.lock:
            for source in sources:
                if source.staging is None:
                    continue
                if source.at < good:
                    self._tiers.settle(source.block, source.staging)
                else:
                    self._tiers.give_back(source.staging)
            self._tiers.counts["bytes_read"] += read

    def _load_tile(
        self, group: int, source: _Source, buffer: KvBuffer | None, slots: NDArray[np.int64] | None
    ) -> None:
        """Bring one block's layers of one group into the buffer. Runs in the pool. Raises BadRecordError."""
        block = source.block
        namespace = block.namespace
        frame = namespace.frames(block.length)[group]
        raw = np.empty(frame.stop - frame.start, dtype=np.uint8) if source.raw is None else source.raw[frame]
        if source.staging is not None or source.raw is None:
            with source.opening:
                if source.reader is None:
                    source.reader = self._tiers.open_record(block)
            source.reader.read(frame.start, raw)
        if buffer is None:
            return
        layout = namespace.layout
        span = slice(source.at, source.at + source.take)
        target = None if slots is None else np.ascontiguousarray(slots[span], dtype=np.int64)
        for layer, key, value in layout.layer_views(raw, namespace.layer_groups[group], block.length):
            for held, into in ((key, buffer.keys[layer]), (value, buffer.values[layer])):
                assert into is not None  # checked with the buffer
                if target is None:
                    into[:, span] = held[:, : source.take]
                else:
                    kernels.place(
                        held[:, : source.take],
                        into,
                        src_dtype=layout.dtype,
                        dst_dtype=layout.dtype,
                        slots=target,
                    )
