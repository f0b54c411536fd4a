"""An engine and a store together: generation that reuses what is held and keeps what is new.

Time to first token (TTFT) runs from the prompt's token ids to the first generated token: look-up, lease and load
included. The prompt is stored while the answer is decoded, the answer after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.kv_allocation import KvAllocation
from kvstore.pipeline.sampling import Sampler
from kvstore.pipeline.self_test import why_engine_does_not_shift

from .api import Store
from .errors import InvalidRequestError
from .explain import Explanation
from .identity import Identity
from .layout import Layout
from .prefill import Prefilled, prefill
from .put import PutResult
from .quality.reuse import Policy


class Generation(msgspec.Struct, frozen=True):
    """One answer, and where the KV of its prompt came from, in tokens.

    hot + warm + cold (the prefix) + moved + recomputed + computed = prompt_tokens. `store_seconds` is what look-up,
    lease and load took out of `ttft_seconds`. `bytes_read` came from flash.
    """

    tokens: list[int]
    prompt_tokens: int
    hot: int
    warm: int
    cold: int
    moved: int
    recomputed: int
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
    """Generates with `engine`, reusing and feeding `store`; without a store it is the baseline to compare with.

    `policy` says how far moved runs may stand in for computed tokens; what that means for this model is the store's
    verdict, see `reuse`. Without a verdict, or where moving keys fails its self-test, it is `exact`.
    """

    def __init__(self, engine: StaticGraphEngine, store: Store | None, policy: Policy = "careful") -> None:
        self._engine = engine
        self._store = store = None if store is None else store.under(policy)
        self._policy = policy
        self._repair = None if store is None else store.verdict.repair(policy)
        if store is not None and self._repair is not None and store.shift_refused is None:
            ropes = [layer.rope for layer in store.layout.layers]
            store.shift_refused = why_engine_does_not_shift(engine, ropes)

    def generate(
        self,
        prompt: NDArray[np.int32],
        max_new: int,
        *,
        choose: Callable[[NDArray[np.float32]], int] | None = None,
        stop: Sequence[int] = (),
        boundaries: Sequence[int] = (),
        on_token: Callable[[int], None] | None = None,
        keep: bool = True,
    ) -> Generation:
        """Answer `prompt` (int32 [n]) with at most `max_new` tokens, ending before a token of `stop`.

        0 tokens: the prompt is computed and stored, so that another finds it; there is no first token then, and
        `ttft_seconds` is 0. boundaries: positions at which segments of the prompt begin, where they are known. `keep`
        False reuses without storing. Raises the engine's error when prompt and answer exceed its context,
        InvalidRequestError for fewer than 0 tokens.
        """
        engine = self._engine
        started = time.perf_counter()
        kv = engine.allocate(_context(prompt, max_new))
        storing: list[Future[PutResult]] = []
        try:
            return self._answer(
                prompt, max_new, kv, started, choose or Sampler(), stop, boundaries, on_token, keep, storing
            )
        finally:
            wait(storing)  # a thread may still be reading the KV
            engine.recycle(kv)

    def explain(
        self, prompt: NDArray[np.int32], max_new: int = 1, *, boundaries: Sequence[int] = ()
    ) -> Explanation:
        """What `generate` with the same arguments would do now for each token of `prompt`; computes nothing.

        Raises what `generate` raises, and ValueError without a store.
        """
        if self._store is None:
            raise ValueError("this session has no store, so all is computed")
        kv = self._engine.allocate(_context(prompt, max_new))
        try:
            costs = self._engine.costs(kv.slots)
        finally:
            self._engine.recycle(kv)
        groups = len(self._engine.layer_groups)
        return self._store.explain(
            prompt, self._policy, boundaries=boundaries, costs=costs, layer_groups=groups
        )

    def _answer(
        self,
        prompt: NDArray[np.int32],
        max_new: int,
        kv: KvAllocation,
        started: float,
        choose: Callable[[NDArray[np.float32]], int],
        stop: Sequence[int],
        boundaries: Sequence[int],
        on_token: Callable[[int], None] | None,
        keep: bool,
        storing: list[Future[PutResult]],
    ) -> Generation:
        engine = self._engine
        padding_before = engine.statistics.padding
        if self._store is None:
            done = _without_store(engine.prefill(prompt, kv), len(prompt))
        else:
            done = prefill(engine, self._store, prompt, kv, self._repair, boundaries)
        ttft, padded = 0.0, engine.statistics.padding - padding_before
        answer: list[int] = []
        stopped = False
        for token in engine.decode(done.logits, kv, len(prompt), choose) if max_new else ():
            if not ttft:
                ttft = time.perf_counter() - started
                if self._store is not None and keep:
                    storing += _keep_prompt(self._store, prompt, kv, done)
            if stopped := token in stop:
                break
            answer.append(token)
            if on_token is not None:
                on_token(token)
            if len(answer) == max_new:
                break
        if self._store is not None and keep:
            for each in storing:
                each.result()
            computed = answer if stopped else answer[:-1]  # KV of the last token taken was never computed
            _keep(self._store, np.concatenate([prompt, np.array(computed, dtype=np.int32)]), kv, done)
        return Generation(
            tokens=answer,
            prompt_tokens=len(prompt),
            hot=done.tiers["hot"],
            warm=done.tiers["warm"],
            cold=done.tiers["cold"],
            moved=done.moved,
            recomputed=done.recomputed,
            computed=done.computed,
            padded=padded,
            bytes_read=done.bytes_read,
            store_seconds=done.store_seconds,
            ttft_seconds=ttft,
            total_seconds=time.perf_counter() - started,
        )


def _context(prompt: NDArray[np.int32], max_new: int) -> int:
    if max_new < 0:
        raise InvalidRequestError(f"asked for {max_new} new tokens; 0 only computes and stores the prompt")
    return len(prompt) + max_new


def _without_store(logits: NDArray[np.float32], tokens: int) -> Prefilled:
    return Prefilled(logits, 0, 0, 0, tokens, {"hot": 0, "warm": 0, "cold": 0}, 0, 0.0, tokens)


def _keep_prompt(
    store: Store, prompt: NDArray[np.int32], kv: KvAllocation, done: Prefilled
) -> list[Future[PutResult]]:
    """Begin to store the whole blocks of exact KV while the answer is decoded; its end goes with the answer."""
    whole = done.exact_until // store.block_tokens * store.block_tokens
    if whole <= done.prefix or store.capabilities.reuse == "exact":
        return []
    return [store.put_later(prompt[:whole], kv)]


def _keep(store: Store, tokens: NDArray[np.int32], kv: KvAllocation, done: Prefilled) -> None:
    """Store what was computed: exact KV as a prefix, what was computed behind moved runs as such."""
    if not done.fresh:
        store.put(tokens, kv)
        return
    if done.exact_until > done.prefix:
        store.put(tokens[: done.exact_until], kv)
    *spans, (begin, _) = done.fresh  # the last span is the end of the prompt, and the answer goes on there
    store.put_inexact(tokens, kv, [*spans, (begin, len(tokens))])
