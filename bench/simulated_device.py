"""The store's flash at the speed of another device, for benchmarks and tests; see `pipeline.simulated`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest import mock

import numpy as np
from numpy.typing import NDArray

from kvstore.flash import record
from kvstore.flash.flash_file import FlashReader
from kvstore.pipeline.simulated import SimulatedFlash


@contextmanager
def reads_take(flash: SimulatedFlash) -> Iterator[None]:
    """As long as this lasts, records that are opened are read as fast as `flash` is."""

    class Reader(FlashReader):
        def read(self, pieces: Sequence[NDArray[np.uint8]], offset: int) -> int:
            return flash.slow(super().read)(pieces, offset)

    with mock.patch.object(record, "FlashReader", Reader):
        yield
