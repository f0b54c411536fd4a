"""Prefill of one prompt with reuse: what is held is loaded, what moved is repaired, the rest is computed.

    exact      prefix ──────────── fresh ───────────────────────────
    moved      prefix ─ fresh ─ moved run ─ fresh ─ moved run ─ fresh (the question)
                                ▲▲ computed again

Loading runs beside the engine: before it computes a group of layers, that group's KV is in place. All tokens to compute
go through as few graph calls as the measured costs say, across whatever was reused between them: a graph takes any
tokens in ascending order. The last token is always computed, for its logits. Where repairing moved runs would cost more
than computing them, by the measured costs, they are left alone. A repair may ask for a second look (`WhenSure`): where
the answer hangs in the balance, all from the first moved token on is computed after all.
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
from kvstore.pipeline.recompute import QUESTION, AnyRepair, Evidence, Nothing, WhenSure, first_of, select

from .api import Store
from .choice import choose, repairable, spare
from .flash_choice import against_flash
from .lease import Lease
from .load import LoadedGroup
from .moved import MovedRun


class Prefilled(msgspec.Struct, frozen=True):
    """Logits after the last token, float32 [vocab], and what became of the prompt's tokens.

    prefix + moved + recomputed + computed = tokens of the prompt. `tiers` counts prefix tokens by tier. KV before
    `exact_until`, where the first moved token stands, is what a cold run computes; `fresh` are the spans behind that
    which nobody held. `unsure`: moved runs were loaded, and a second look had them computed.
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
    unsure: bool = False


def prefill(
    engine: StaticGraphEngine,
    store: Store,
    prompt: NDArray[np.int32],
    kv: KvAllocation,
    repair: AnyRepair | None = None,
    boundaries: Sequence[int] = (),
) -> Prefilled:
    """Fill `kv`, token i in slot i, with the KV of `prompt` (int32 [n]). `repair` None: prefix runs only.

    boundaries: positions at which segments of the prompt begin, where they are known.
    """
    started = time.perf_counter()
    with store.find(prompt, moved=repair is not None, boundaries=boundaries) as lease:
        work = _Prefill(engine, prompt, kv, repair or Nothing(), lease)
        work.store_seconds += time.perf_counter() - started
        while (logits := work.attempt()) is None:
            pass
        done = work.outcome(logits)
    store.served(
        prefix=done.prefix,
        moved=done.moved,
        recomputed=done.recomputed,
        computed=done.computed,
        unsure=done.unsure,
        seconds=time.perf_counter() - started,
        waited=done.store_seconds,
        without=engine.costs(kv.slots).cover_at(np.arange(len(prompt))).seconds,
    )
    return done


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
        self._repair = first_of(repair)
        self._second_look = repair if isinstance(repair, WhenSure) else None
        self._unsure = False
        self._lease = lease
        costs, groups = engine.costs(kv.slots), len(engine.layer_groups)
        choice = choose(len(prompt), lease.length, lease.runs, self._repair, costs)
        if not lease.whole:
            choice = against_flash(
                choice, len(prompt), lease.prefix, self._repair, costs, lease.flash_bytes_per_second, groups
            )
        self._prefix, self._runs = choice.prefix, choice.runs
        self._hole, self._ahead = choice.hole, choice.ahead
        self._again = np.empty(0, dtype=np.int64)  # positions in the runs that were computed again
        self._reads_flash = not all(block.in_memory for block in lease.blocks)
        self.store_seconds = 0.0

    def attempt(self) -> NDArray[np.float32] | None:
        loading = _Loading(self._lease, self._kv, self._prefix, self._runs, self._hole, self._ahead)
        try:
            if not self._runs and not self._hole[1] and not self._ahead:
                return self._engine.prefill(
                    self._prompt, self._kv, start=self._prefix, before_group=loading.before(self._engine)
                )
            logits = self._blend(loading)
            exact_until = self._exact_until()
            approximate = exact_until < len(self._prompt)
            if self._second_look and approximate and not self._second_look.is_sure(logits):
                return self._compute_after_all(exact_until)
            return logits
        except _ShrunkError:
            # All is loaded anew, less what was damaged in any layer, and nothing is computed ahead of it.
            self._prefix, self._runs = loading.finish()
            self._ahead = 0
            if self._prefix <= self._hole[1]:
                self._prefix, self._hole = min(self._prefix, self._hole[0]), (0, 0)
            return None
        finally:
            self.store_seconds += loading.seconds

    def outcome(self, logits: NDArray[np.float32]) -> Prefilled:
        covered = sum(run.length for run in self._runs)
        prefix = self._prefix - (self._hole[1] - self._hole[0])
        exact_until = self._exact_until()
        return Prefilled(
            logits=logits,
            prefix=prefix,
            moved=covered - len(self._again),
            recomputed=len(self._again),
            computed=len(self._prompt) - prefix - covered,
            tiers=self._lease.tokens_by_tier(self._prefix, self._hole),
            bytes_read=self._lease.bytes_read,
            store_seconds=self.store_seconds,
            exact_until=exact_until,
            fresh=tuple((begin, end) for begin, end in self._gaps() if begin >= exact_until),
            unsure=self._unsure,
        )

    def _blend(self, loading: _Loading) -> NDArray[np.float32]:
        """Prefill over moved runs: what nobody holds and what the repair chooses, in order."""
        engine, kv, costs = self._engine, self._kv, self._engine.costs(self._kv.slots)
        kv.slot_positions[:] = EMPTY
        kv.slot_positions[: self._prefix] = np.arange(self._prefix)
        kv.slot_positions[self._hole[0] : self._hole[1]] = EMPTY
        for run in self._runs:
            kv.slot_positions[run.target : run.target + run.length] = np.arange(
                run.target, run.target + run.length
            )
        fresh = np.concatenate([np.arange(begin, end) for begin, end in self._gaps()])
        ahead, fresh = fresh[fresh < self._ahead], fresh[fresh >= self._ahead]
        if len(ahead):
            loading.bring_first()
            engine.run(engine.plan(self._prompt[ahead], ahead, ahead, kv), kv)
        runs, repair, evidence = repairable(self._runs), self._repair, Evidence()
        if runs and repair.evidence == "attention":
            question = fresh[-min(QUESTION, max(costs.seconds)) :]
            question = question[question > self._runs[-1].target]
            seen = engine.probe(self._prompt[question], question, question, kv, before_layers=loading.bring)
            evidence = Evidence(attention=seen[: len(self._prompt)])
        elif runs and repair.evidence == "deviation":
            places = np.concatenate([np.arange(run.target, run.target + run.length) for run in self._runs])
            places = np.sort(np.concatenate([fresh[fresh < places[-1]], places]))
            apart = np.zeros(len(self._prompt), np.float32)
            apart[places] = engine.deviation(
                self._prompt[places], places, places, kv, before_layers=loading.bring
            )
            evidence = Evidence(deviation=apart)
        room = spare(len(fresh), runs, repair, costs)
        chosen = select(repair, runs, evidence, room)
        todo = np.sort(np.concatenate([fresh, chosen])).astype(np.int32)
        calls = engine.plan(self._prompt[todo], todo, todo, kv, shortest_first=self._reads_flash)
        logits: NDArray[np.float32] = engine.run(
            calls, kv, logits_of=[-1], before_call=loading.before_call(engine)
        )[0]
        self._again = chosen
        return logits

    def _exact_until(self) -> int:
        """Where the first moved token stands that was not computed again: what is before it saw nothing else."""
        for run in self._runs:
            kept = np.setdiff1d(np.arange(run.target, run.target + run.length), self._again)
            if len(kept):
                return int(kept[0])
        return len(self._prompt)

    def _compute_after_all(self, exact_until: int) -> NDArray[np.float32]:
        """Compute all from the first moved token on: what is before it is exact, and in place."""
        engine, kv = self._engine, self._kv
        places = np.arange(exact_until, len(self._prompt), dtype=np.int32)
        calls = engine.plan(self._prompt[places], places, places, kv)
        logits: NDArray[np.float32] = engine.run(calls, kv, logits_of=[-1])[0]
        self._runs, self._again, self._unsure = (), self._again[:0], True
        return logits

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Spans that neither prefix nor runs cover."""
        if self._hole[1]:
            yield self._hole
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

    def __init__(
        self,
        lease: Lease,
        kv: KvAllocation,
        prefix: int,
        runs: tuple[MovedRun, ...],
        hole: tuple[int, int],
        ahead: int,
    ) -> None:
        self._groups = lease.layer_groups(kv, length=prefix, runs=runs, hole=hole, first=ahead)
        self._layers = 0
        self._end = max([prefix, *(run.target + run.length for run in runs)])
        self._wanted = prefix, runs
        self._good = prefix, runs
        self.seconds = 0.0

    def before(self, engine: StaticGraphEngine) -> Callable[[int], None]:
        """What the engine calls before it runs a layer group."""
        return lambda group: self.bring(engine.layer_groups[group].stop)

    def bring(self, layer: int) -> None:
        """Until all layers before `layer` are in place. Raises _ShrunkError when less is good than wanted."""
        self._draw(layer)
        if self._good != self._wanted:
            raise _ShrunkError

    def before_call(self, engine: StaticGraphEngine) -> Callable[[int, int], None]:
        """What the engine calls before a call through a layer group, with the last position that it sees."""

        def bring(group: int, position: int) -> None:
            layer = engine.layer_groups[group].stop
            if position < self._end:
                self._wait(lambda: self._groups.bring(layer, position))
            else:
                self.bring(layer)

        return bring

    def bring_first(self) -> None:
        """Until what is needed to compute ahead is in place. Raises _ShrunkError."""
        self._wait(self._groups.bring_first)

    def _wait(self, bring: Callable[[], bool]) -> None:
        started = time.perf_counter()
        good = bring()
        self.seconds += time.perf_counter() - started
        if not good:
            raise _ShrunkError

    def finish(self) -> tuple[int, tuple[MovedRun, ...]]:
        """Load what is left; what is good in every layer."""
        self._draw(None)
        return self._good

    def _draw(self, layer: int | None) -> None:
        """Load until all layers before `layer` are in place, or to the end."""
        started = time.perf_counter()
        while layer is None or self._layers < layer:
            group: LoadedGroup | None = next(self._groups, None)
            if group is None:
                break
            self._layers, self._good = group.layers.stop, (group.tokens, group.runs)
        self.seconds += time.perf_counter() - started
