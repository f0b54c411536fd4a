"""What an engine does with a store, wherever that is: `KVStore` in its own process, or a daemon's `RemoteStore`."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.index.embedder import Embedder
from kvstore.pipeline.schedule import CallCosts

from .buffer import KvBuffer
from .explain import Explanation
from .identity import Identity
from .layout import Capabilities, Layout
from .lease import Lease
from .match import Match
from .presence import Presence
from .put import PutResult
from .quality.reuse import Policy, Verdict
from .semantics import Neighbour, TextOfTokens
from .watch.snapshot import Snapshot
from .watch.stats import Stats


class Store(Protocol):
    """See `KVStore`, where each method is described."""

    @property
    def identity(self) -> Identity: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def path(self) -> Path | None: ...

    shift_refused: str | None

    def lookup(self, tokens: ArrayLike, *, moved: bool = False, boundaries: Sequence[int] = ()) -> Match: ...

    def lease(self, match: Match) -> Lease: ...

    def find(self, tokens: ArrayLike, *, moved: bool = False, boundaries: Sequence[int] = ()) -> Lease: ...

    def put(
        self,
        tokens: ArrayLike,
        kv: KvBuffer,
        start: int = 0,
        slots: NDArray[np.int64] | None = None,
        *,
        wait: float = 0.0,
    ) -> PutResult: ...

    def put_later(
        self,
        tokens: ArrayLike,
        kv: KvBuffer,
        start: int = 0,
        slots: NDArray[np.int64] | None = None,
    ) -> Future[PutResult]: ...

    def put_inexact(
        self,
        tokens: ArrayLike,
        kv: KvBuffer,
        spans: Sequence[tuple[int, int]],
        slots: NDArray[np.int64] | None = None,
    ) -> PutResult: ...

    @property
    def verdict(self) -> Verdict: ...

    def keep_verdict(self, verdict: Verdict) -> None: ...

    def use_semantics(self, embedder: Embedder, text_of_tokens: TextOfTokens) -> None: ...

    def neighbours(self, query: str | ArrayLike, k: int = 16) -> list[Neighbour]: ...

    def hint(
        self,
        *,
        tokens: ArrayLike | None = None,
        text: str | None = None,
        session: Hashable = None,
    ) -> None: ...

    def prefetch(self, match: Match, timeout: float | None = 0.0) -> Presence: ...

    def presence(self, match: Match) -> Presence: ...

    def view(self, identity: Identity) -> Store: ...

    def under(self, policy: Policy) -> Store: ...

    def invalidate(
        self,
        *,
        prefix: ArrayLike | None = None,
        adapter: str | None = None,
        older_than: float | None = None,
        everything: bool = False,
    ) -> int: ...

    def promote(self, match: Match, to: Literal["warm", "hot"] = "hot") -> None: ...

    def demote(self, match: Match) -> int: ...

    def flush(self, timeout: float | None = None) -> None: ...

    def stats(self) -> Stats: ...

    def snapshot(self) -> Snapshot: ...

    def served(
        self,
        *,
        prefix: int,
        moved: int,
        recomputed: int,
        computed: int,
        unsure: bool = False,
        seconds: float = 0.0,
        waited: float = 0.0,
        without: float | None = None,
    ) -> None: ...

    def explain(
        self,
        tokens: ArrayLike,
        policy: Policy = "careful",
        *,
        boundaries: Sequence[int] = (),
        costs: CallCosts | None = None,
        layer_groups: int = 1,
    ) -> Explanation: ...

    def check(self) -> None: ...

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
