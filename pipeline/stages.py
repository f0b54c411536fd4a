"""Tiles of KV brought in beside the engine, in the order in which its graphs need them.

A tile is one piece of a block in one group of layers. Read, check, decode, turn, place: one thread does all of it for a
tile, in one go, and two threads take turns: while one waits for flash, the other decodes.

    graphs            ······[ group 0 ][ group 1 ][ group 2 ]
    thread 1    [0.0 ][0.2 ][1.1 ][2.0 ][2.2 ]
    thread 2     [0.1 ][1.0 ][1.2 ][2.1 ]                        (group.piece)

So no stage waits in a queue for another, and what is loaded piles up nowhere: a tile ends in the engine's own memory,
which has room for all of them. In flight are one tile's bytes a thread; that is the bound, and the back-pressure: a
thread asks for the next tile when it has placed its last.

Tiles that lie in memory are another matter: `Direct`.

A thread per stage was the other way. It needs buffers between the stages, and its threads idle: on two cores the
stages take turns whatever they are called.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Generic, TypeVar

Tile = TypeVar("Tile")

WIDTH = 2
"""Tiles in flight: one waits for flash while the other is decoded."""

_PAUSE = 100e-6
"""Seconds between two tiles that are placed ahead. Without it the interpreter stays with who places for 5 ms at a time,
and graphs that could begin wait for it (measured)."""


class FlowStopped(RuntimeError):
    """What was waited for will not come: the flow was stopped, or its pool was shut down."""


class Flow(Generic[Tile]):
    """Does `work` for each of `tiles`, in order, `width` at a time, in the threads of `pool`; begins at once.

    A pool may serve many flows: after each tile the next in line gets its turn. An exception of `work` fails its tile
    and stops nothing: `wait` says which. Threads may call `stop` while others wait.
    """

    def __init__(
        self, pool: Executor, tiles: Sequence[Tile], work: Callable[[Tile], None], width: int = WIDTH
    ) -> None:
        self._pool = pool
        self._tiles = tiles
        self._work = work
        self._next = 0
        self._running: set[int] = set()
        self._failures: list[tuple[Tile, Exception]] = []
        self._stopped = False
        self._awaited = (
            0  # the count that `wait` is woken for: each wake-up takes the interpreter from the work
        )
        self._changed = threading.Condition()
        for _ in range(min(width, len(tiles))):
            self._go_on()

    def wait(self, count: int) -> list[tuple[Tile, Exception]]:
        """Until the first `count` tiles are done; those that failed since the last wait. For one thread at a time.

        Raises FlowStopped when the flow was stopped before that.
        """
        with self._changed:
            self._awaited = count
            self._changed.wait_for(lambda: self._stopped or self._done() >= count)
            if self._done() < count:
                raise FlowStopped(f"stopped after {self._done()} of {count} tiles")
            failures, self._failures = self._failures, []
        return failures

    def stop(self) -> None:
        """Begin no further tile, and return when none runs any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._running)

    def _done(self) -> int:
        """So many tiles from the first on are done."""
        return min(self._running, default=self._next)

    def _go_on(self) -> None:
        if self._next == len(self._tiles):
            return
        try:
            self._pool.submit(self._step)
        except RuntimeError:  # the pool is shut down
            with self._changed:
                self._stopped = True
                self._changed.notify_all()

    def _step(self) -> None:
        with self._changed:
            if self._stopped or self._next == len(self._tiles):
                return
            number = self._next
            self._next += 1
            self._running.add(number)
        failure = None
        try:
            self._work(self._tiles[number])
        except Exception as error:  # whatever it was, these tokens can be computed instead
            failure = error
        finally:
            with self._changed:
                self._running.discard(number)
                if failure is not None:
                    self._failures.append((self._tiles[number], failure))
                if self._stopped or self._done() >= self._awaited:
                    self._changed.notify_all()
            failure = None  # its traceback holds this frame: a cycle that would keep all tiles alive
        self._go_on()


class Direct(Generic[Tile]):
    """Does `work` for each of `tiles`, in order, one at a time; else as `Flow`.

    For work of microseconds, a copy within memory: threads that share an interpreter for it take twice as long as one.
    A thread of `pool` goes ahead while nobody waits, so that tiles are placed beside the graphs; who waits takes over,
    since waking another thread takes longer than a tile.
    """

    def __init__(self, pool: Executor, tiles: Sequence[Tile], work: Callable[[Tile], None]) -> None:
        self._pool = pool
        self._tiles = tiles
        self._work = work
        self._done = 0
        self._awaited = 0
        self._failures: list[tuple[Tile, Exception]] = []
        self._stopped = False
        self._ahead = False  # a thread of the pool is, or will be, at it
        self._working = threading.Lock()
        with self._working:
            self._go_ahead()

    def wait(self, count: int) -> list[tuple[Tile, Exception]]:
        """Do what of the first `count` tiles is not done; those that failed since the last wait. Raises FlowStopped."""
        if self._done < count:
            self._awaited = count
            while self._done < count:
                with self._working:
                    if self._stopped:
                        raise FlowStopped(f"stopped after {self._done} of {count} tiles")
                    if self._done < count:
                        self._next()
            with self._working:
                self._go_ahead()
        if not self._failures:
            return []
        with self._working:
            failures, self._failures = self._failures, []
        return failures

    def stop(self) -> None:
        """Begin no further tile, and return when none is being done any more."""
        self._stopped = True
        with self._working:
            pass

    def _next(self) -> None:
        tile = self._tiles[self._done]
        try:
            self._work(tile)
        except Exception as error:
            self._failures.append((tile, error))
        self._done += 1

    def _go_ahead(self) -> None:
        if self._ahead or self._stopped or self._done == len(self._tiles):
            return
        with contextlib.suppress(RuntimeError):  # the pool is shut down: who waits does it all
            self._pool.submit(self._step)
            self._ahead = True

    def _step(self) -> None:
        time.sleep(_PAUSE)
        with self._working:
            self._ahead = False
            if self._stopped or self._done < self._awaited:
                return
            if self._done < len(self._tiles):
                self._next()
            self._go_ahead()
