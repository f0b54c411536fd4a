"""The daemon's part in a client's load: blocks that only flash holds, read into shared memory tile by tile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from kvstore.pipeline.stages import Flow
from kvstore.reading import TierReading

from .wire import Tiles


class Bringing:
    """Reads `tiles`, (block, layer group), in order, and has `announce` called with what lies there since the last.

    `announce` comes in one of the pool's threads. A block of which all `groups` layer groups were read stays in memory.
    """

    def __init__(
        self,
        load: int,
        reading: TierReading,
        tiles: Sequence[tuple[int, int]],
        groups: int,
        pool: Executor,
        announce: Callable[[Tiles], None],
    ) -> None:
        self._load = load
        self._reading = reading
        self._groups = groups
        self._announce = announce
        self._lock = threading.Lock()
        self._read: dict[int, set[int]] = {}  # block -> layer groups
        self._damaged: set[int] = set()
        self._ended = False
        self._left = len(tiles)
        self._flow = Flow(pool, list(enumerate(tiles)), self._bring)

    def _bring(self, tile: tuple[int, tuple[int, int]]) -> None:
        number, (block, group) = tile
        failure = self._damaged_before(block) or self._no_room(block)
        if failure is None:
            try:
                with self._reading.timed(block, group):
                    self._reading.raw(block, group)
            except Exception as error:  # whatever it was, the client can compute these tokens
                with self._lock:
                    first = block not in self._damaged
                    self._damaged.add(block)
                if first:
                    self._reading.lost(block, error)
                failure = f"{type(error).__name__}: {error}"
                error.__traceback__ = None
            else:
                with self._lock:
                    self._read.setdefault(block, set()).add(group)
        with self._lock:
            self._left -= 1
        there, failed = ([number], {}) if failure is None else ([], {number: failure})
        self._announce(Tiles(self._load, there, failed, self._reading.bytes_read))

    def _damaged_before(self, block: int) -> str | None:
        with self._lock:
            return "a part of this block is damaged" if block in self._damaged else None

    def _no_room(self, block: int) -> str | None:
        if self._reading.residence(block) is None:
            return "warm memory is full of what is leased or waits for flash"
        return None

    @property
    def is_done(self) -> bool:
        """Whether `end` has nothing to wait for."""
        with self._lock:
            return not self._left

    def end(self) -> int:
        """Stop, wait for what is just being read, and let go of what did not come whole. Bytes read from flash."""
        self._flow.stop()
        with self._lock:
            if self._ended:
                return 0
            self._ended = True
            whole = {
                block
                for block, groups in self._read.items()
                if len(groups) == self._groups and block not in self._damaged
            }
        return self._reading.end(whole)
