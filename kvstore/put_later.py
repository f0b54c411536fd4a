"""Puts in the shadow of what the caller does next: a thread copies while an engine decodes."""

from __future__ import annotations

import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .buffer import KvBuffer
from .put import PutResult

if TYPE_CHECKING:
    from .api import Store


class LaterPuts:
    """One after another, in the order in which they came."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kvstore-put")
        self._stop = weakref.finalize(self, self._thread.shutdown, wait=False)

    def put(
        self,
        store: Store,
        tokens: NDArray[np.int32],
        kv: KvBuffer,
        start: int,
        slots: NDArray[np.int64] | None,
    ) -> Future[PutResult]:
        """Returns at once. What `store.put` raises is in the future."""
        return self._thread.submit(partial(store.put, tokens, kv, start, slots))

    def close(self) -> None:
        """Return once all that was given is put."""
        self._thread.shutdown(wait=True)
