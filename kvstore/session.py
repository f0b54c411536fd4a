"""An engine and a store together: generation that reuses what is held and keeps what is new.

Time to first token (TTFT) runs from the prompt's token ids to the first generated token: look-up, lease and load
included. Storing happens after the answer, in the shadow of nothing that anyone waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.kv_allocation import KvAllocation
from kvstore.pipeline.sampling import Sampler

from .identity import Identity
from .layout import Layout
from .lease import Lease, LoadedGroup
from .store import KVStore


class Generation(msgspec.Struct, frozen=True):
    """One answer, and where the KV of its prompt came from, in tokens.

    `store_seconds` is what look-up, lease and load took out of `ttft_seconds`. `bytes_read` came from flash.
    """

    tokens: list[int]
    prompt_tokens: int
    hot: int
    warm: int
    cold: int
    computed: int
    padded: int
    bytes_read: int
    store_seconds: float
    ttft_seconds: float
    total_seconds: float


def identity_of(engine: StaticGraphEngine, tokenizer_digest: str, *, tenant_salt: bytes = b"") -> Identity:
    """The identity of KV that this engine computes."""
    config = engine.config
    layout = Layout.uniform(
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        rope=config.rope,
        dtype=engine.kv_dtype,
    )
    return Identity(
        weights=engine.weights.digest,
        quantisation=config.quantization,
        tokenizer=tokenizer_digest,
        layout=layout,
        tenant_salt=tenant_salt,
    )


class Session:
    """Generates with `engine`, reusing and feeding `store`; without a store it is the baseline to compare with."""

    def __init__(self, engine: StaticGraphEngine, store: KVStore | None) -> None:
        self._engine = engine
        self._store = store

    def generate(
        self,
        prompt: NDArray[np.int32],
        max_new: int,
        *,
        choose: Callable[[NDArray[np.float32]], int] | None = None,
        stop: Sequence[int] = (),
        on_token: Callable[[int], None] | None = None,
        keep: bool = True,
    ) -> Generation:
        """Answer `prompt` (int32 [n]) with at most `max_new` tokens, ending before a token of `stop`.

        `keep` False reuses without storing. Raises the engine's error when prompt and answer exceed its context.
        """
        engine = self._engine
        padding_before = engine.statistics.padding
        started = time.perf_counter()
        kv = engine.allocate(len(prompt) + max_new)
        logits, lease, known, store_seconds = self._prefill(prompt, kv)
        ttft, padded = 0.0, engine.statistics.padding - padding_before
        answer: list[int] = []
        stopped = False
        for token in engine.decode(logits, kv, len(prompt), choose or Sampler()):
            ttft = ttft or time.perf_counter() - started
            if stopped := token in stop:
                break
            answer.append(token)
            if on_token is not None:
                on_token(token)
            if len(answer) == max_new:
                break
        if self._store is not None and keep:
            computed = answer if stopped else answer[:-1]  # KV of the last token taken was never computed
            self._store.put(np.concatenate([prompt, np.array(computed, dtype=np.int32)]), kv)
        tiers = lease.tokens_by_tier(known) if lease is not None else {"hot": 0, "warm": 0, "cold": 0}
        return Generation(
            tokens=answer,
            prompt_tokens=len(prompt),
            hot=tiers["hot"],
            warm=tiers["warm"],
            cold=tiers["cold"],
            computed=len(prompt) - known,
            padded=padded,
            bytes_read=lease.bytes_read if lease is not None else 0,
            store_seconds=store_seconds,
            ttft_seconds=ttft,
            total_seconds=time.perf_counter() - started,
        )

    def _prefill(
        self, prompt: NDArray[np.int32], kv: KvAllocation
    ) -> tuple[NDArray[np.float32], Lease | None, int, float]:
        """Logits of the last prompt token, the lease, tokens loaded of it, and seconds that the store took."""
        if self._store is None:
            return self._engine.prefill(prompt, kv, start=0), None, 0, 0.0
        started = time.perf_counter()
        match = self._store.lookup(prompt)
        with self._store.lease(match) as lease:
            known = min(lease.length, len(prompt) - 1)  # the last token is computed: its logits are wanted
            loading = _Loading(lease, kv, known)
            store_seconds = time.perf_counter() - started
            try:
                logits = self._engine.prefill(prompt, kv, start=known, before_group=self._bring(loading))
            except _ShrunkError:
                known = loading.finish()
                logits = self._engine.prefill(prompt, kv, start=known)
            return logits, lease, known, store_seconds + loading.seconds

    def _bring(self, loading: _Loading) -> Callable[[int], None]:
        """What the engine calls before it runs a layer group: brings that group's KV in place."""
        groups = self._engine.layer_groups

        def before(group: int) -> None:
            loading.until(groups[group].stop)

        return before


class _ShrunkError(Exception):
    """A block turned out to be damaged after the engine began to build on it."""


class _Loading:
    """The load of one lease, drawn forward as far as the engine needs it."""

    def __init__(self, lease: Lease, kv: KvAllocation, known: int) -> None:
        self._groups = lease.layer_groups(kv, length=known)
        self._layers = 0
        self._known = known
        self.seconds = 0.0

    def until(self, layer: int) -> None:
        """Return when all layers before `layer` are in place. Raises _ShrunkError when fewer tokens are good."""
        started = time.perf_counter()
        while self._layers < layer and (group := next(self._groups, None)) is not None:
            self._take(group)
            if group.tokens < self._known:
                raise _ShrunkError
        self.seconds += time.perf_counter() - started

    def finish(self) -> int:
        """Load what is left; how many tokens are good in every layer."""
        for group in self._groups:
            self._take(group)
        return self._good

    def _take(self, group: LoadedGroup) -> None:
        self._layers = group.layers.stop
        self._good = group.tokens
