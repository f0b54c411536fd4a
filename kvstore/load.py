"""One load of a lease, over tiles, (block x layer group), group by group, beside whatever the engine computes.

The engine can start on the first layers while the KV of later ones is still being read. A tile comes from memory or
from flash; from flash it is checked, decoded into warm memory (so that the next request finds it there) and placed in
the engine's buffer. A block that goes to several places of the prompt is read once. From where bytes come, this
process's tiers or the daemon's, is `reading`'s matter.

What comes from flash is brought by the pool's threads, side by side. What lies in memory is placed by one thread at a
time: one of the pool's, beside the graphs, or who waits for it. A copy takes microseconds, and threads that share an
interpreter for such work take twice as long as one (measured).
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline import kernels
from kvstore.pipeline.rope import Rope
from kvstore.pipeline.stages import Direct, Flow, FlowStopped

from .block import HeldBlock
from .buffer import KvBuffer
from .layout import Dtype, Layout
from .moved import MovedRun, Piece
from .reading import Need, Reading

if TYPE_CHECKING:
    from .lease import Lease


class LoadedGroup(NamedTuple):
    """One layer group is in the buffer.

    `tokens` is how many tokens of the prefix are good so far, `runs` which moved runs. Both only shrink: when a
    block turns out to be damaged, a later group says so, and the engine computes those tokens instead.
    """

    number: int
    layers: range
    tokens: int
    runs: tuple[MovedRun, ...]


class Wanted(NamedTuple):
    """What to load: the first `tokens` tokens and `runs`, for the rest see `Lease.layer_groups`.

    buffer None: into warm memory alone.
    """

    tokens: int
    runs: tuple[MovedRun, ...]
    buffer: KvBuffer | None = None
    slots: NDArray[np.int64] | None = None
    computed_from: int | None = None
    hole: tuple[int, int] = (0, 0)
    first: int = 0


class Load(Iterator[LoadedGroup]):
    """Under way from when it is made until it is closed: by the last group, `close`, the lease's end, or collection.

    Raises LeaseReleasedError and StoreClosedError.
    """

    def __init__(self, lease: Lease, wanted: Wanted) -> None:
        self._lease = lease
        self._closed = True  # nothing to close yet
        self._good = good = _Good(wanted.tokens, wanted.runs)
        self._groups = groups = lease.groups if lease.blocks else ()
        self._given = 0
        lease.check_usable()
        self._sources = sources = _sources(lease, wanted)
        self._reading = reading = lease.reading([Need(each.block, each.unread) for each in sources])
        far = [reading.is_far(source.number) for source in sources]
        from_flash: list[_Tile] = []
        in_memory: list[_Tile] = []
        self._flash_until = [0]
        """How many of the first n tiles come from flash."""

        def order(group: int, some: Sequence[_Source]) -> list[int]:
            """Put tiles behind those that are there; where they go to."""
            targets = []
            for source in some:
                if source.unread and not reading.includes(source.number, group):
                    continue
                (from_flash if far[source.number] else in_memory).append(_Tile(group, source))
                self._flash_until.append(len(from_flash))
                targets.append(source.target)
            return targets

        near = [source for source in sources if source.target < wanted.first]
        for group in range(len(groups)):
            order(group, near)
        self._first = len(self._flash_until) - 1
        rest = [source for source in sources if source.target >= wanted.first]
        self._targets = [order(group, rest) for group in range(len(groups))]
        self._ends = [*itertools.accumulate(map(len, self._targets), initial=self._first)][1:]

        def bring(tile: _Tile) -> None:  # knows nothing of this load, whose collection ends it
            if good.includes_any(tile.source):
                bring_tile(tile, reading, wanted, layout, groups)

        layout = lease.layout
        reading.start([(tile.source.number, tile.group) for tile in from_flash])
        self._flow = Flow(lease.pool, from_flash, bring)
        self._placing = Direct(lease.pool, in_memory, bring)
        self._closed = False

    def __next__(self) -> LoadedGroup:
        if self._given == len(self._groups):
            self._lease.check_usable()
            raise StopIteration
        number = self._given
        self._wait(self._ends[number])
        self._given += 1
        if self._given == len(self._groups):  # who has the last group need not ask for more
            self.close()
        return LoadedGroup(number, self._groups[number], self._good.tokens, self._good.runs)

    def bring_first(self) -> bool:
        """Wait until what stands before `first` is in place in all layers; whether all of the load is still good."""
        return self._bring(self._first)

    def bring(self, layer: int, position: int) -> bool:
        """Wait until what stands up to `position` is in place in all layers before `layer`; the rest as above."""
        group = next(number for number, layers in enumerate(self._groups) if layers.stop >= layer)
        behind = len(self._targets[group]) - bisect.bisect_right(self._targets[group], position)
        return self._bring(self._ends[group] - behind)

    def close(self) -> None:
        """End the load; what was not given by then is not in the buffer."""
        if self._closed:
            return
        self._closed = True
        self._placing.stop()
        self._flow.stop()
        self._settle()
        good = self._good
        if good.lost or good.tokens < good.wanted:
            self._lease.shrink(good.tokens if good.tokens < good.wanted else self._lease.length, good.lost)

    def __del__(self) -> None:
        self.close()

    def _bring(self, count: int) -> bool:
        self._wait(count)
        return not self._good.lost and self._good.tokens == self._good.wanted

    def _wait(self, count: int) -> None:
        self._lease.check_usable()
        from_flash = self._flash_until[count]
        try:
            failures = [*self._placing.wait(count - from_flash), *self._flow.wait(from_flash)]
        except FlowStopped:
            self._lease.check_usable()  # says what ended it
            raise
        for tile, error in failures:
            if self._good.includes_any(tile.source):
                self._lose(tile.source, error)
        if not self._reading.is_intact():
            for source in self._sources:
                if self._good.includes_any(source):
                    self._lose(source, NotIntactError("what was read may have changed meanwhile"))

    def _lose(self, source: _Source, error: Exception) -> None:
        """A block could not be brought: its tokens are no good any more, nor is the block where it is damaged."""
        for place in source.places:
            if self._good.includes(place):
                self._good.exclude(place, whole=self._lease.whole)
        self._reading.lost(source.number, error)
        error.__traceback__ = None  # its frames hold this load

    def _settle(self) -> None:
        """What came whole may stay in memory."""
        kept = set[int]()
        if self._given == len(self._groups):
            kept.update(source.number for source in self._sources if self._good.includes_any(source))
        self._lease.bytes_read += self._reading.end(kept)


class NotIntactError(Exception):
    """The lease ended while it was read."""


class _Place(NamedTuple):
    """Where a piece of a block goes. `run` is the moved run that it belongs to, None in the prefix."""

    piece: Piece
    run: MovedRun | None = None


@dataclass
class _Source:
    """A block while it is being loaded, once for all the places that it goes to."""

    number: int
    block: HeldBlock
    places: list[_Place]
    unread: frozenset[int] = frozenset()  # layer groups of which no token to be computed reads anything

    @property
    def target(self) -> int:
        """The first of the places."""
        return self.places[0].piece.target


def _sources(lease: Lease, wanted: Wanted) -> list[_Source]:
    """What to load."""
    places = [
        _Place(Piece(block, 0, min(block.length, wanted.tokens - block.start), block.start))
        for block in lease.prefix
        if block.start < wanted.tokens and not wanted.hole[0] <= block.start < wanted.hole[1]
    ]
    places += [_Place(piece, run) for run in wanted.runs for piece in run.pieces]
    sources: dict[int, _Source] = {}
    for place in places:
        block = place.piece.block
        sources.setdefault(block.number, _Source(len(sources), block, [])).places.append(place)
    if wanted.computed_from is not None:
        for source in sources.values():
            source.unread = frozenset.intersection(
                *(_unread(place.piece, wanted.computed_from, lease) for place in source.places)
            )
    return list(sources.values())


def bring_tile(
    tile: _Tile, reading: Reading, wanted: Wanted, layout: Layout, groups: Sequence[range]
) -> None:
    """Bring one block's layers of one group to all its places. Any exception means that it is not there."""
    group, source = tile
    with reading.timed(source.number, group):
        raw = reading.raw(source.number, group)
        buffer, slots, computed_from = wanted.buffer, wanted.slots, wanted.computed_from
        if buffer is None:
            return
        for layer, key, value in layout.layer_views(raw, groups[group], source.block.length):
            first = 0 if computed_from is None else layout.layers[layer].read_from(computed_from)
            keys, values = buffer.keys[layer], buffer.values[layer]
            assert keys is not None, "checked with the buffer"
            assert values is not None, "checked with the buffer"
            for piece, _ in source.places:
                unread = max(0, first - piece.target)
                if unread >= piece.length:
                    continue
                held = slice(piece.offset + unread, piece.offset + piece.length)
                span = slice(piece.target + unread, piece.target + piece.length)
                into = _Target(
                    layout.dtype, span, None if slots is None else np.ascontiguousarray(slots[span], np.int64)
                )
                into.place(key[:, held], keys, layout.layers[layer].rope, piece.shift)
                into.place(value[:, held], values, None, 0)


def _unread(piece: Piece, computed_from: int, lease: Lease) -> frozenset[int]:
    """Layer groups of a piece of which no token at `computed_from` or behind it reads anything."""
    layers, end = lease.layout.layers, piece.target + piece.length
    return frozenset(
        number
        for number, group in enumerate(lease.groups)
        if all(not layers[at].holds_kv or layers[at].read_from(computed_from) >= end for at in group)
    )


class _Tile(NamedTuple):
    group: int
    source: _Source


class _Good:
    """What of a load is good so far."""

    def __init__(self, tokens: int, runs: tuple[MovedRun, ...]) -> None:
        self.wanted = tokens
        self.tokens = tokens
        self.runs = runs
        self.lost: set[int] = set()
        """Targets of the runs that are not good."""

    def includes(self, place: _Place) -> bool:
        return place.piece.target < self.tokens if place.run is None else place.run in self.runs

    def includes_any(self, source: _Source) -> bool:
        return any(self.includes(place) for place in source.places)

    def exclude(self, place: _Place, *, whole: bool) -> None:
        if place.run is None:
            self.tokens = 0 if whole else place.piece.target
        else:
            self.lost.add(place.run.target)
            self.runs = tuple(run for run in self.runs if run is not place.run)


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
