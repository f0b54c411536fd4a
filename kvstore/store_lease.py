"""A lease in a store of this process."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from .block import Block, own_blocks
from .errors import LeaseReleasedError, StoreClosedError
from .lease import Lease
from .moved import MovedRun
from .namespace import Namespace
from .open_directory import OpenDirectory
from .reading import Need, Reading, TierReading


class StoreLease(Lease):
    """Holds blocks that were acquired for it. One that is never released counts as `leases_abandoned`."""

    def __init__(
        self,
        shared: OpenDirectory,
        namespace: Namespace,
        blocks: Sequence[Block],
        length: int,
        runs: Sequence[MovedRun],
        *,
        whole: bool,
    ) -> None:
        super().__init__(
            namespace.layout, namespace.layer_groups, shared.pool, blocks, length, runs, whole=whole
        )
        self._tiers = shared.tiers
        self._worker = shared.worker
        self._held = [*blocks, *(block for run in runs for block in own_blocks(run.blocks))]
        self._abandoned = weakref.finalize(self, self._tiers.abandoned.append, self._held)
        self._abandoned.atexit = False

    @property
    def flash_bytes_per_second(self) -> float | None:
        return self._tiers.flash.bytes_per_second()

    def release(self) -> None:
        self.end_loads()
        with self._tiers.lock:
            if self.is_released:
                raise LeaseReleasedError("this lease was released before")
            self.is_released = True
            self._abandoned.detach()
            self._tiers.release(self._held)
            for block in self._held:
                if block.memory is not None and block.memory.tier is self._tiers.warm and block.hits > 1:
                    self._worker.promote(block)

    def check_usable(self) -> None:
        if self.is_released:
            raise LeaseReleasedError("this lease was released; take a new one")
        if self._tiers.closed:
            raise StoreClosedError("the store of this lease was closed; open it again")

    def reading(self, needs: Sequence[Need]) -> Reading:
        with self._tiers.lock:
            self.check_usable()
            return TierReading(self._tiers, needs)
