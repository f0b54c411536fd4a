"""Prefill of one prompt with reuse: what is held is loaded, what moved is repaired, the rest is computed.

    exact      prefix ──────────── fresh ───────────────────────────
    moved      prefix ─ fresh ─ moved run ─ fresh ─ moved run ─ fresh (the question)
                                ▲▲ computed again

Loading runs beside the engine: before it computes a group of layers, that group's KV is in place. All tokens to compute
go through as few graph calls as the measured costs say, across whatever was reused between them: a graph takes any
tokens in ascending order. The last token is always computed, for its logits. Where repairing moved runs would cost more
than computing them, by the measured costs, they are left alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.graphs import EMPTY
from kvstore.pipeline.kv_allocation import KvAllocation
from kvstore.pipeline.recompute import AnyRepair, Evidence, Nothing, select
from kvstore.pipeline.recompute import MovedRun as Run

from .lease import Lease, LoadedGroup
from .moved import SHORTEST, MovedRun
from .store import KVStore

_QUESTION = 32
"""The question whose attention chooses what is recomputed: so many of the last tokens."""


class Prefilled(msgspec.Struct, frozen=True):
    """Logits after the last token, float32 [vocab], and what became of the prompt's tokens.

    prefix + moved + recomputed + computed = tokens of the prompt. `tiers` counts prefix tokens by tier. KV before
    `exact_until` is what a cold run computes, `fresh` are the spans computed behind that.
    `store_seconds`: look-up, lease and load, so far as the engine waited for them.
    """

    logits: NDArray[np.float32]
    prefix: int
    moved: int
    recomputed: int
    computed: int
    tiers: dict[str, int]
    bytes_read: int
    store_seconds: float
    exact_until: int
    fresh: tuple[tuple[int, int], ...] = ()


def prefill(
    engine: StaticGraphEngine,
    store: KVStore,
    prompt: NDArray[np.int32],
    kv: KvAllocation,
    repair: AnyRepair | None = None,
    boundaries: Sequence[int] = (),
) -> Prefilled:
    """Fill `kv`, token i in slot i, with the KV of `prompt` (int32 [n]). `repair` None: prefix runs only.

    boundaries: positions at which segments of the prompt begin, where they are known.
    """
    started = time.perf_counter()
    match = store.lookup(prompt, moved=repair is not None, boundaries=boundaries)
    with store.lease(match) as lease:
        work = _Prefill(engine, prompt, kv, repair or Nothing(), lease)
        work.store_seconds += time.perf_counter() - started
        while (logits := work.attempt()) is None:
            pass
        return work.outcome(logits)


class _Prefill:
    """One prefill; `attempt` until it gives logits: each time it does not, less is left to reuse."""

    def __init__(
        self,
        engine: StaticGraphEngine,
        prompt: NDArray[np.int32],
        kv: KvAllocation,
        repair: AnyRepair,
        lease: Lease,
    ) -> None:
        self._engine = engine
        self._prompt = prompt
        self._kv = kv
        self._repair = repair
        self._lease = lease
        self._last = len(prompt) - 1
        self._prefix = min(lease.length, self._last)
        self._runs = _worthwhile(lease.runs, self._last)
        if self._runs and not self._pays():
            self._runs = ()
        self._recomputed = 0
        self.store_seconds = 0.0

    def attempt(self) -> NDArray[np.float32] | None:
        loading = _Loading(self._lease, self._kv, self._prefix, self._runs)
        try:
            if not self._runs:
                self._recomputed = 0
                return self._engine.prefill(
                    self._prompt, self._kv, start=self._prefix, before_group=loading.before(self._engine)
                )
            return self._blend(loading)
        except _ShrunkError:
            self._prefix, self._runs = loading.finish()
            return None
        finally:
            self.store_seconds += loading.seconds

    def _pays(self) -> bool:
        """Whether moving and repairing the runs costs no more than computing them, by the measured costs of calls."""
        costs = self._engine.costs(self._kv.slots)
        moved = sum(run.length for run in self._runs)
        due = len(self._prompt) - self._prefix
        least = self._repair.least([Run(run.target, run.length) for run in self._runs])
        probe = 0.0
        if self._repair.evidence == "attention":  # runs through two thirds of the layers
            probe = costs.cover(min(_QUESTION, due - moved)).seconds * 2 / 3
        return probe + costs.cover(due - moved + least).seconds <= costs.cover(due).seconds

    def outcome(self, logits: NDArray[np.float32]) -> Prefilled:
        covered = sum(run.length for run in self._runs)
        exact_until = self._runs[0].target if self._runs else len(self._prompt)
        return Prefilled(
            logits=logits,
            prefix=self._prefix,
            moved=covered - self._recomputed,
            recomputed=self._recomputed,
            computed=len(self._prompt) - self._prefix - covered,
            tiers=self._lease.tokens_by_tier(self._prefix),
            bytes_read=self._lease.bytes_read,
            store_seconds=self.store_seconds,
            exact_until=exact_until,
            fresh=tuple((begin, end) for begin, end in self._gaps() if begin >= exact_until),
        )

    def _blend(self, loading: _Loading) -> NDArray[np.float32]:
        """Prefill over moved runs: what nobody holds and what the repair chooses, in order."""
        engine, kv = self._engine, self._kv
        kv.slot_positions[:] = EMPTY
        kv.slot_positions[: self._prefix] = np.arange(self._prefix)
        for run in self._runs:
            kv.slot_positions[run.target : run.target + run.length] = np.arange(
                run.target, run.target + run.length
            )
        fresh = np.concatenate([np.arange(begin, end) for begin, end in self._gaps()])
        runs = [Run(run.target, run.length) for run in self._runs]
        evidence = Evidence()
        if self._repair.evidence == "attention":
            loading.finish()
            loading.check()
            question = fresh[-min(_QUESTION, engine.sizes[-1]) :]
            question = question[question > self._runs[-1].target] if len(question) else question
            seen = engine.probe(self._prompt[question], question, question, kv)
            evidence = Evidence(attention=seen[: len(self._prompt)])
        least = self._repair.least(runs)
        spare = engine.costs(kv.slots).cover(len(fresh) + least).padding
        chosen = select(self._repair, runs, evidence, spare)
        todo = np.sort(np.concatenate([fresh, chosen])).astype(np.int32)
        calls = engine.plan(self._prompt[todo], todo, todo, kv)
        logits: NDArray[np.float32] = engine.run(
            calls, kv, logits_of=[-1], before_group=loading.before(engine)
        )[0]
        self._recomputed = len(chosen)
        return logits

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Spans that neither prefix nor runs cover."""
        at = self._prefix
        for run in self._runs:
            if at < run.target:
                yield at, run.target
            at = run.target + run.length
        if at < len(self._prompt):
            yield at, len(self._prompt)


class _ShrunkError(Exception):
    """A block turned out to be damaged after the engine began to build on it."""


class _Loading:
    """The load of one lease, drawn forward as far as the engine needs it."""

    def __init__(self, lease: Lease, kv: KvAllocation, prefix: int, runs: tuple[MovedRun, ...]) -> None:
        self._groups = lease.layer_groups(kv, length=prefix, runs=runs)
        self._layers = 0
        self._wanted = prefix, runs
        self._good = prefix, runs
        self.seconds = 0.0

    def before(self, engine: StaticGraphEngine) -> Callable[[int], None]:
        """What the engine calls before it runs a layer group. Raises _ShrunkError when less is good than wanted."""

        def bring(group: int) -> None:
            self._draw(engine.layer_groups[group].stop)
            self.check()

        return bring

    def finish(self) -> tuple[int, tuple[MovedRun, ...]]:
        """Load what is left; what is good in every layer."""
        self._draw(None)
        return self._good

    def check(self) -> None:
        if self._good != self._wanted:
            raise _ShrunkError

    def _draw(self, layer: int | None) -> None:
        """Load until all layers before `layer` are in place, or to the end."""
        started = time.perf_counter()
        while layer is None or self._layers < layer:
            group: LoadedGroup | None = next(self._groups, None)
            if group is None:
                break
            self._layers, self._good = group.layers.stop, (group.tokens, group.runs)
        self.seconds += time.perf_counter() - started


def _worthwhile(runs: Sequence[MovedRun], end: int) -> tuple[MovedRun, ...]:
    """Runs as far as they lie before position `end`, without remnants that are too short."""
    parts = (run.before(end) for run in runs)
    return tuple(part for part in parts if part is not None and part.length >= SHORTEST)
