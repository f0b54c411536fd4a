"""A lease: while it lives, the KV of a match is neither moved nor dropped, and can be loaded (see `load`).

What differs between a store of this process and a daemon's is in `store_lease` and `daemon.remote_lease`.
"""

from __future__ import annotations

import abc
import weakref
from collections.abc import Sequence
from concurrent.futures import Executor
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from .block import HeldBlock
from .buffer import KvBuffer, check_buffer
from .errors import BufferTooSmallError, InvalidRequestError
from .layout import Layout
from .load import Load, Wanted
from .moved import MovedRun
from .reading import Need, Reading


class Lease(abc.ABC):
    """Holds the first `length` tokens of a prompt, and moved runs of it. A context manager; `release` ends it once.

    One that is collected without that gives back what it holds with the store's next call.
    """

    def __init__(
        self,
        layout: Layout,
        layer_groups: tuple[range, ...],
        pool: Executor,
        blocks: Sequence[HeldBlock],
        length: int,
        runs: Sequence[MovedRun],
        *,
        whole: bool,
    ) -> None:
        self.layout = layout
        self.groups = layer_groups
        """Into which the blocks are cut."""
        self.pool = pool
        """Brings what does not lie in memory."""
        self.whole = whole
        """A part of the prefix is of no use."""
        self.length = length
        """Tokens of the prefix that were held when the lease was taken, less those lost to damage since."""
        self.runs = tuple(runs)
        """Moved runs that were held, less those lost to damage since."""
        self.bytes_read = 0
        """Bytes read from flash by this lease."""
        self.is_released = False
        self._prefix = tuple(blocks)
        self._blocks = (*blocks, *(piece.block for run in runs for piece in run.pieces))
        self._in_runs = {piece.block.number for run in runs for piece in run.pieces}
        self._found_in = {block.number: block.tier for block in self._blocks}
        self._loads: weakref.WeakSet[Load] = weakref.WeakSet()

    @property
    @abc.abstractmethod
    def flash_bytes_per_second(self) -> float | None:
        """How fast flash is just now, from reading to the place in the buffer; None when no load has shown it yet."""

    @abc.abstractmethod
    def release(self) -> None:
        """End the lease, and loads of it that are under way. Raises LeaseReleasedError the second time."""

    @abc.abstractmethod
    def check_usable(self) -> None:
        """Raise LeaseReleasedError or StoreClosedError when nothing can be loaded any more."""

    @abc.abstractmethod
    def reading(self, needs: Sequence[Need]) -> Reading:
        """What brings these blocks, for one load. Raises as `check_usable` does."""

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
        computed_from: int | None = None,
        hole: tuple[int, int] = (0, 0),
        first: int = 0,
    ) -> Load:
        """Load group after group of layers into `buffer`, from now on; the iterator gives each when it is in place.

        buffer: arrays a layer, keys and values [kv_heads, slots, head_dim]. slots: int64, the slot of each token of
        the prompt, as far as anything is loaded; None means token i goes to slot i. length: load fewer tokens of the
        prefix than are leased. runs: moved runs to load, of those that were leased or parts of them; by default
        `self.runs`.
        Their keys are turned from the stored original to where they stand now.

        computed_from: the first position of the prompt that is going to be computed. What no token from there on
        reads, in layers that attend within a window or a chunk, is left out then: those cells of the buffer stay as
        they are. So a `put` from this buffer has to give the end of the prefix as its `start`. None loads all.

        hole: tokens of the prefix, [hole[0], hole[1]), that the caller computes. Blocks that begin in it are left out.
        first: what stands before this position comes first, in all layers; `Load.bring_first` waits for that alone.

        Raises LayoutMismatchError, BufferTooSmallError, InvalidRequestError, LeaseReleasedError, StoreClosedError.
        Damage on flash raises nothing, see `load.LoadedGroup`.
        """
        self.check_usable()
        wanted = self.length if length is None else length
        moved = self.runs if runs is None else tuple(runs)
        if wanted < 0:
            raise InvalidRequestError(f"asked to load {wanted} tokens")
        if wanted > self.length:
            raise BufferTooSmallError(f"asked to load {wanted} tokens, the lease holds {self.length}")
        if any(piece.block.number not in self._in_runs for run in moved for piece in run.pieces):
            raise InvalidRequestError("asked to load a moved run that this lease does not hold")
        if computed_from is not None and computed_from < 0:
            raise InvalidRequestError(f"nothing can be computed from position {computed_from} on")
        end = max([wanted, *(run.target + run.length for run in moved)])
        if self._blocks:
            check_buffer(buffer, self.layout, end, slots, written=True)
        return self._load(Wanted(wanted, moved, buffer, slots, computed_from, hole, first))

    @property
    def blocks(self) -> tuple[HeldBlock, ...]:
        return self._blocks

    @property
    def prefix(self) -> tuple[HeldBlock, ...]:
        """The blocks of the prefix."""
        return self._prefix

    def tokens_by_tier(self, length: int | None = None, hole: tuple[int, int] = (0, 0)) -> dict[str, int]:
        """How many of the first `length` tokens of the prefix, without `hole`, were in each tier when it was leased."""
        end = self.length if length is None else length
        counts = {"hot": 0, "warm": 0, "cold": 0}
        for block in self._prefix:
            if block.start < end and not hole[0] <= block.start < hole[1]:
                counts[self._found_in[block.number]] += min(block.length, end - block.start)
        return counts

    def warm_up(self) -> None:
        """Bring what only flash holds into warm memory, as far as there is room, without an engine's buffer."""
        self.check_usable()
        for _ in self._load(Wanted(self.length, self.runs)):
            pass

    def end_loads(self) -> None:
        for load in list(self._loads):
            load.close()

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.is_released:
            self.release()

    def shrink(self, tokens: int, lost: set[int]) -> None:
        """A load found no more than `tokens` tokens of the prefix good, and the runs with these targets lost."""
        self.length = min(self.length, tokens)
        self.runs = tuple(run for run in self.runs if run.target not in lost)

    def _load(self, wanted: Wanted) -> Load:
        load = Load(self, wanted)
        self._loads.add(load)
        return load
