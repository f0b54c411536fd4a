"""How the raw bytes of held blocks come to where a load can place them from, in this process or the daemon."""

from __future__ import annotations

import contextlib
import logging
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from .block import Block, HeldBlock, Residence
from .flash.record import BadRecordError, RecordReader
from .tiers.tiers import Tiers

log = logging.getLogger(__name__)


class Reading(Protocol):
    """Blocks that a load reads, by their number in the order in which it named them; tiles are (block, layer group).

    `raw` may be called by several threads, the rest by the one that loads.
    """

    def is_far(self, number: int) -> bool:
        """Whether its bytes have to be read first."""

    def includes(self, number: int, group: int) -> bool:
        """Whether this group of its layers is brought, wanted or not."""

    def start(self, tiles: Sequence[tuple[int, int]]) -> None:
        """These tiles, of blocks that are far, are asked for from now on, in this order."""

    def raw(self, number: int, group: int) -> NDArray[np.uint8]:
        """The bytes of a tile, once they are there. Any exception means that they will not be."""

    def timed(self, number: int, group: int) -> contextlib.AbstractContextManager[None]:
        """Around the bringing of one tile, from `raw` to its place in the buffer."""

    def is_intact(self) -> bool:
        """Whether all that `raw` gave until now was still itself just now."""

    def lost(self, number: int, error: Exception) -> None:
        """A tile of this block could not be brought."""

    def end(self, kept: Collection[int]) -> int:
        """Nothing is read any more; the blocks `kept` came whole and right. How many bytes came from flash."""


class Need(NamedTuple):
    """A block that a load reads; of the layer groups `unread` no token to be computed reads anything."""

    block: HeldBlock
    unread: frozenset[int] = frozenset()


@dataclass
class _Source:
    block: Block
    unread: frozenset[int]
    staging: Residence | None = None
    raw: NDArray[np.uint8] | None = None
    reader: RecordReader | None = None
    opening: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_far(self) -> bool:
        return self.staging is not None or self.raw is None


class TierReading:
    """From the tiers of this process. What comes whole from flash stays in warm memory, as far as there is room.

    Of a block used for the first time, flash gives only what is read; one used again is read whole, so that memory
    serves it from then on. The blocks are leased. Called under the lock; so is no method.
    """

    def __init__(self, tiers: Tiers, needs: Sequence[Need]) -> None:
        self._tiers = tiers
        self._sources = [self._source(need) for need in needs]

    def _source(self, need: Need) -> _Source:
        block = need.block
        assert isinstance(block, Block), "leased from this process's tiers"
        source = _Source(block, need.unread)
        if block.memory is not None:
            source.raw = self._tiers.raw(block)
        elif (
            not (need.unread and block.hits <= 1)
            and (room := self._tiers.allocate_warm(block.nbytes, block.namespace)) is not None
        ):
            source.staging = room
            source.raw = room.tier.view(room.extent, block.nbytes)
        return source

    def is_far(self, number: int) -> bool:
        return self._sources[number].is_far

    def includes(self, number: int, group: int) -> bool:
        source = self._sources[number]
        return source.staging is not None or group not in source.unread

    def residence(self, number: int) -> Residence | None:
        """Where in memory a block lies, or will lie when all its tiles were read; None: there is no room for it."""
        source = self._sources[number]
        return source.staging or source.block.memory

    def start(self, tiles: Sequence[tuple[int, int]]) -> None:
        pass

    def raw(self, number: int, group: int) -> NDArray[np.uint8]:
        """Raises BadRecordError."""
        source = self._sources[number]
        block = source.block
        frame = block.namespace.frame(group, block.length)
        raw = np.empty(frame.stop - frame.start, dtype=np.uint8) if source.raw is None else source.raw[frame]
        if source.is_far:
            with source.opening:
                if source.reader is None:
                    source.reader = self._tiers.open_record(block, ahead=frame.start == 0)
            source.reader.read(block.namespace.layout, frame.start, raw)
        return raw

    @contextlib.contextmanager
    def timed(self, number: int, group: int) -> Iterator[None]:
        """Tell how fast flash is, and for metrics how long a tile takes."""
        source, stage = self._sources[number], self._tiers.timings.stage
        if not source.is_far:
            with stage("place"):
                yield
            return
        nbytes, flash = 0, self._tiers.flash
        flash.begin()
        try:
            with stage("read"):
                yield
            block = source.block
            frame = block.namespace.frame(group, block.length)
            nbytes = block.cold_bytes * (frame.stop - frame.start) // max(1, block.nbytes)
        finally:
            flash.end(nbytes)

    def is_intact(self) -> bool:
        return True

    def lost(self, number: int, error: Exception) -> None:
        """Forget a block that is damaged; count why any other was not read."""
        with self._tiers.lock:
            if isinstance(error, BadRecordError):
                self._tiers.quarantine(self._sources[number].block, error)
            else:
                self._tiers.misses[f"not loaded: {type(error).__name__}"] += 1
                told = "".join(traceback.format_exception(error))
                log.warning("a block was not loaded, its tokens are computed instead\n%s", told)

    @property
    def bytes_read(self) -> int:
        """From flash, until now."""
        return sum(each.reader.bytes_read for each in self._sources if each.reader is not None)

    def end(self, kept: Collection[int]) -> int:
        read = self.bytes_read
        for source in self._sources:
            if source.reader is not None:
                source.reader.close()
        with self._tiers.lock:
            for number, source in enumerate(self._sources):
                if source.staging is None:
                    continue
                if number in kept:
                    self._tiers.settle(source.block, source.staging)
                else:
                    self._tiers.give_back(source.staging, wiped=source.block.purged)
            self._tiers.counts["bytes_read"] += read
        return read
