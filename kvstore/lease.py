"""A lease: while it lives, the KV of a match is neither moved nor dropped, and can be loaded.

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
from functools import lru_cache
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline import kernels
from kvstore.pipeline.rope import Rope

from .block import Block, Residence
from .buffer import KvBuffer, check_buffer
from .errors import BufferTooSmallError, InvalidRequestError, LeaseReleasedError, StoreClosedError
from .layout import Dtype
from .moved import MovedRun, Piece
from .record import BadRecordError, RecordReader
from .tiers import Tiers
from .write_behind import WriteBehind

_AHEAD = 6  # tiles in flight: enough for two threads, few enough to bound staging


class LoadedGroup(NamedTuple):
    """One layer group is in the buffer.

    `tokens` is how many tokens of the prefix are good so far, `runs` which moved runs. Both only shrink: when a
    block turns out to be damaged, a later group says so, and the engine computes those tokens instead.
    """

    number: int
    layers: range
    tokens: int
    runs: tuple[MovedRun, ...]


@dataclass
class _Source:
    """A piece of a block while it is being loaded. `run` is the moved run that it belongs to, None in the prefix."""

    piece: Piece
    run: MovedRun | None = None
    staging: Residence | None = None
    raw: NDArray[np.uint8] | None = None
    reader: RecordReader | None = None
    opening: threading.Lock = field(default_factory=threading.Lock)


class Lease:
    """Holds the first `length` tokens of a prompt, and moved runs of it. A context manager; `release` ends it once."""

    def __init__(
        self,
        tiers: Tiers,
        worker: WriteBehind,
        pool: Executor,
        blocks: Sequence[Block],
        length: int,
        runs: Sequence[MovedRun] = (),
        *,
        whole: bool = False,  # a part is of no use
    ) -> None:
        self._tiers = tiers
        self._worker = worker
        self._pool = pool
        self._prefix = list(blocks)
        self._blocks = [*blocks, *(piece.block for run in runs for piece in run.pieces)]
        self._whole = whole
        self._released = False
        self.length = length
        """Tokens of the prefix that were held when the lease was taken, less those lost to damage since."""
        self.runs = tuple(runs)
        """Moved runs that were held, less those lost to damage since."""
        self.bytes_read = 0
        """Bytes read from flash by this lease."""
        self._found_in = {block.number: block.tier for block in self._blocks}

    def load_into(
        self, buffer: KvBuffer, slots: NDArray[np.int64] | None = None, length: int | None = None
    ) -> int:
        """Load the prefix into `buffer`; returns how many tokens are good, `length` unless something was damaged."""
        good = self.length if length is None else length
        for group in self.layer_groups(buffer, slots, length, runs=()):
            good = group.tokens
        return good

    def layer_groups(
        self,
        buffer: KvBuffer,
        slots: NDArray[np.int64] | None = None,
        length: int | None = None,
        runs: Sequence[MovedRun] | None = None,
    ) -> Iterator[LoadedGroup]:
        """Load group after group of layers into `buffer`, yielding each when it is in place.

        buffer: arrays a layer, keys and values [kv_heads, slots, head_dim]. slots: int64, the slot of each token of
        the prompt, as far as anything is loaded; None means token i goes to slot i. length: load fewer tokens of the
        prefix than are leased. runs: moved runs to load, of `self.runs` or parts of them; all of them by default.
        Their keys are turned from the stored original to where they stand now.

        Raises LayoutMismatchError, BufferTooSmallError, InvalidRequestError, LeaseReleasedError, StoreClosedError.
        Damage on flash raises nothing, see LoadedGroup.
        """
        self._check_usable()
        wanted = self.length if length is None else length
        moved = self.runs if runs is None else tuple(runs)
        if wanted < 0:
            raise InvalidRequestError(f"asked to load {wanted} tokens")
        if wanted > self.length:
            raise BufferTooSmallError(f"asked to load {wanted} tokens, the lease holds {self.length}")
        leased = {piece.block.number for run in self.runs for piece in run.pieces}
        if any(piece.block.number not in leased for run in moved for piece in run.pieces):
            raise InvalidRequestError("asked to load a moved run that this lease does not hold")
        if not self._blocks:
            return iter(())
        end = max([wanted, *(run.target + run.length for run in moved)])
        check_buffer(buffer, self._blocks[0].namespace.layout, end, slots, written=True)
        return self._load(buffer, slots, wanted, moved)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(self._blocks)

    def tokens_by_tier(self, length: int | None = None) -> dict[str, int]:
        """How many of the first `length` tokens of the prefix lay in each tier when the lease was taken."""
        left = self.length if length is None else length
        counts = {"hot": 0, "warm": 0, "cold": 0}
        for block in self._prefix:
            counts[self._found_in[block.number]] += min(block.length, left)
            left -= min(block.length, left)
        return counts

    def warm_up(self) -> None:
        """Bring what only flash holds into warm memory, as far as there is room, without an engine's buffer."""
        self._check_usable()
        if self._blocks:
            for _ in self._load(None, None, self.length, self.runs):
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
        self,
        buffer: KvBuffer | None,
        slots: NDArray[np.int64] | None,
        wanted: int,
        runs: tuple[MovedRun, ...],
    ) -> Iterator[LoadedGroup]:
        sources = self._sources(wanted, runs)
        groups = self._blocks[0].namespace.layer_groups
        tiles = ((group, source) for group in range(len(groups)) for source in sources)
        running: deque[tuple[int, _Source, Future[None]]] = deque()
        good, done = _Good(wanted, runs), 0
        try:
            while running or done < len(groups):
                self._check_usable()
                while len(running) < _AHEAD and (tile := next(tiles, None)) is not None:
                    group, source = tile
                    if good.includes(source):
                        work = self._submit(group, source, buffer, slots)
                        running.append((group, source, work))
                if running and running[0][0] == done:
                    _, source, work = running.popleft()
                    try:
                        work.result()
                    except BadRecordError as error:
                        if good.includes(source):
                            good.exclude(source, whole=self._whole)
                            with self._tiers.lock:
                                self._tiers.quarantine(source.piece.block, error)
                    continue
                yield LoadedGroup(done, groups[done], good.tokens, good.runs)
                done += 1
        finally:
            for _, _, work in running:
                work.cancel()
            for _, _, work in running:
                if not work.cancelled():
                    work.exception()
            self._settle(sources, good if done == len(groups) else None)
            if good.tokens < wanted:
                self.length = min(self.length, good.tokens)
            lost = {run.target for run in runs} - {run.target for run in good.runs}
            self.runs = tuple(run for run in self.runs if run.target not in lost)

    def _submit(
        self, group: int, source: _Source, buffer: KvBuffer | None, slots: NDArray[np.int64] | None
    ) -> Future[None]:
        try:
            return self._pool.submit(self._load_tile, group, source, buffer, slots)
        except RuntimeError:  # the pool is shut down
            self._check_usable()
            raise

    def _sources(self, wanted: int, runs: tuple[MovedRun, ...]) -> list[_Source]:
        """What to load, with room in warm memory for what comes from flash. A block read twice is staged once."""
        sources = [
            _Source(Piece(block, 0, min(block.length, wanted - block.start), block.start))
            for block in self._prefix
            if block.start < wanted
        ]
        sources += [_Source(piece, run) for run in runs for piece in run.pieces]
        staged: set[int] = set()
        with self._tiers.lock:
            self._check_usable()
            for source in sources:
                block = source.piece.block
                if block.memory is not None:
                    source.raw = self._tiers.raw(block)
                elif (
                    block.number not in staged
                    and (room := self._tiers.allocate_warm(block.nbytes)) is not None
                ):
                    staged.add(block.number)
                    source.staging = room
                    source.raw = room.tier.view(room.extent, block.nbytes)
        return sources

    def _settle(self, sources: list[_Source], good: _Good | None) -> None:
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
                if good is not None and good.includes(source):
                    self._tiers.settle(source.piece.block, source.staging)
                else:
                    self._tiers.give_back(source.staging)
            self._tiers.counts["bytes_read"] += read

    def _load_tile(
        self, group: int, source: _Source, buffer: KvBuffer | None, slots: NDArray[np.int64] | None
    ) -> None:
        """Bring one piece's layers of one group into the buffer. Runs in the pool. Raises BadRecordError."""
        piece = source.piece
        block, namespace = piece.block, piece.block.namespace
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
        held = slice(piece.offset, piece.offset + piece.length)
        span = slice(piece.target, piece.target + piece.length)
        into = _Target(
            layout.dtype, span, None if slots is None else np.ascontiguousarray(slots[span], np.int64)
        )
        for layer, key, value in layout.layer_views(raw, namespace.layer_groups[group], block.length):
            keys, values = buffer.keys[layer], buffer.values[layer]
            assert keys is not None, "checked with the buffer"
            assert values is not None, "checked with the buffer"
            into.place(key[:, held], keys, layout.layers[layer].rope, piece.shift)
            into.place(value[:, held], values, None, 0)


class _Good:
    """What of a load is good so far."""

    def __init__(self, tokens: int, runs: tuple[MovedRun, ...]) -> None:
        self.tokens = tokens
        self.runs = runs

    def includes(self, source: _Source) -> bool:
        return source.piece.target < self.tokens if source.run is None else source.run in self.runs

    def exclude(self, source: _Source, *, whole: bool) -> None:
        if source.run is None:
            self.tokens = 0 if whole else source.piece.target
        else:
            self.runs = tuple(run for run in self.runs if run is not source.run)


class _Target(NamedTuple):
    """Where tokens go in an engine's arrays: to consecutive slots `span`, or to `slots`."""

    dtype: Dtype
    span: slice
    slots: NDArray[np.int64] | None

    def place(self, held: NDArray[Any], into: NDArray[Any], rope: Rope | None, shift: int) -> None:
        """Copy `held` [heads, tokens, channels] into `into` [heads, slots, channels], turned by `shift` positions."""
        turned = rope is not None and shift != 0
        cos, sin = _rotation(rope, shift) if rope is not None and turned else (None, None)
        kernels.place(
            held,
            into if self.slots is not None else into[:, self.span],
            src_dtype=self.dtype,
            dst_dtype=self.dtype,
            cos=cos,
            sin=sin,
            pairing="half" if rope is None else rope.pairing,
            slots=self.slots,
        )


@lru_cache(maxsize=1024)
def _rotation(rope: Rope, shift: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin of a move by `shift` positions; the same for all layers of one geometry."""
    return rope.table([shift])
