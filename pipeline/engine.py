"""A language model on static graphs: prefill and decode over KV that the host owns.

The engine compiles a graph for each (C, S, W) it needs, C tokens over the first W of S slots, split into `groups` of
consecutive layers. Any set of tokens is computed by calls of these graphs (see `graphs` for why that needs no other
graph), the cheapest calls by measured cost (see `schedule`). Calls run group by group: all of them through the first
layers, then all through the next, so that whoever loads KV from elsewhere has to bring a group's layers only when it is
due.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import numpy as np
import platformdirs
from numpy.typing import ArrayLike, NDArray

from .ahead import Ahead
from .call import BoundCall, Call
from .engine_statistics import Statistics
from .graphs import EMPTY, Form, KvDtype, head_graph, layer_graph
from .kv_allocation import ContextExceeded, KvAllocation
from .layer_groups import layer_groups
from .onnx_runtime import OnnxRuntime
from .recompute import PROBED, QUESTION
from .runtime import CompiledGraph, NpuRuntime, Tensors
from .schedule import WINDOWED, CallCosts, CostTable, Cover, Windows
from .weights import open_weights

SIZES = (1, 16, 32, 64, 128, 256, 512)
CONTEXTS = (512, 1024, 2048, 4096)
WINDOWS = {1024: (512,), 2048: (512, 1024, 1536), 4096: (1024, 2048, 3072)}
"""A full prefill of 2,000 tokens takes a fifth less time with them, one of 1,000 a tenth."""

_IDLE_ALLOCATIONS = 2  # kept of each context length
_HEAD_ROWS = 16  # logits of many tokens at once are computed by blocks of so many

_KeysValues = tuple[NDArray[np.float32], NDArray[np.float32]]


class InvalidTokens(ValueError):
    """Token ids, positions or slots that no call can compute; the message names the first thing wrong."""


class StaticGraphEngine:
    """The model in the GGUF at `model`, llama family (see `weights`).

    sizes: the C for which graphs may be compiled; contexts: the S; windows: the W below S by S, for calls of at
    least `WINDOWED` tokens. Only those that are used are compiled, 0.3 s and 8 MB each (SmolLM2-135M).
    groups: how many parts the layers are split into (a model of fewer layers has one for each), so the first can run
    while KV of later ones is being loaded; `layer_groups` gives their ranges. A single call of the smallest size, as
    decoding makes, runs in one part: it is so short that the seams between parts would show.
    kv_dtype: float32 is exact; float16 halves the memory of the KV (logits move by about 0.02 for SmolLM2-135M).
    form: `read_only_past` for compilers that cannot update an input in place; the same results, a few % slower.
    cache: where converted weights and measured costs are kept, about 7 bytes a parameter (default: `engine` in
    $KVSTORE_CACHE_DIR, else in the user's cache directory).

    One allocation must not be used by two threads at once; different allocations may.
    Raises UnsupportedModel, OSError, ValueError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        runtime: NpuRuntime | None = None,
        sizes: Sequence[int] = SIZES,
        contexts: Sequence[int] = CONTEXTS,
        windows: Mapping[int, Sequence[int]] = WINDOWS,
        groups: int = 1,
        kv_dtype: KvDtype = "float32",
        form: Form = "in_place",
        cache: Path | None = None,
    ) -> None:
        self.runtime = runtime or OnnxRuntime()
        self.weights = open_weights(
            Path(model),
            cache or _default_cache(),
            variant=self.runtime.name,
            prepare=lambda weights: self.runtime.prepare(
                layer_graph(weights, tokens=16, slots=64, layers=range(weights.config.layers))
            ),
        )
        self.config = self.weights.config
        if groups < 1:
            raise ValueError(f"{groups} layer groups: at least 1 is needed")
        groups = min(groups, self.config.layers)
        self.layer_groups = layer_groups(self.config.layers, groups)
        self.sizes = sorted(set(sizes))
        self.contexts = sorted(set(contexts))
        if min(self.sizes, default=0) < 1 or min(self.contexts, default=0) < 2:
            raise ValueError(f"sizes {sizes} must be at least 1, contexts {contexts} at least 2, none empty")
        self.windows = {slots: sorted(set(each)) for slots, each in windows.items()}
        if not all(0 < window < slots for slots, each in self.windows.items() for window in each):
            raise ValueError(f"windows {windows} must be at least 1 and below their context")
        self.kv_dtype = kv_dtype
        self.form = form
        self.statistics = Statistics()
        # Held while a graph is compiled or costs are measured, and for what threads share; not while a graph runs.
        self._lock = threading.RLock()
        self._whole = [range(self.config.layers)]
        self._parts: dict[tuple[int, int, int, int], list[CompiledGraph]] = {}
        self._heads: dict[int, CompiledGraph] = {}
        self._costs = CostTable(self.weights.folder / f"costs-{kv_dtype}-{form}-{groups}.json")
        begin, end = (int(share * self.config.layers) for share in PROBED)
        middle = range(begin, max(end, begin + 1))
        self._probe_layers = [part for part in (range(middle.start), middle) if part]
        self._probe_parts: dict[tuple[int, int], list[CompiledGraph]] = {}
        self._probes: WeakKeyDictionary[KvAllocation, dict[int, tuple[BoundCall, NDArray[np.float32]]]] = (
            WeakKeyDictionary()
        )
        self._peeks: WeakKeyDictionary[KvAllocation, dict[int, tuple[BoundCall, _KeysValues]]] = (
            WeakKeyDictionary()
        )
        self._peek_parts: dict[tuple[int, int], CompiledGraph] = {}
        self._idle: dict[int, list[KvAllocation]] = {}
        self._bound: WeakKeyDictionary[KvAllocation, dict[tuple[int, int, int, int], BoundCall]] = (
            WeakKeyDictionary()
        )

    def allocate(self, context_tokens: int) -> KvAllocation:
        """Empty KV for at least `context_tokens` tokens: of the smallest context length that holds them.

        Raises ContextExceeded.
        """
        if context_tokens > self.config.context_length:
            raise ContextExceeded(
                f"needs {context_tokens} tokens, the model was made for {self.config.context_length}: "
                "shorten the prompt or ask for fewer new tokens"
            )
        for slots in self.contexts:
            if context_tokens < slots:
                with self._lock:
                    if idle := self._idle.get(slots):
                        return idle.pop()
                return self._allocate(slots)
        raise ContextExceeded(
            f"needs {context_tokens} tokens, the largest context of {self.contexts[-1]} slots holds "
            f"{self.contexts[-1] - 1}: shorten the prompt or open the engine with a longer one in `contexts`"
        )

    def recycle(self, kv: KvAllocation) -> None:
        """Give an allocation back, to be handed out again: fresh memory costs as much as loading the KV into it.

        Nobody may use it or its arrays any more.
        """
        kv.slot_positions[:] = EMPTY
        with self._lock:
            idle = self._idle.setdefault(kv.slots, [])
            if len(idle) < _IDLE_ALLOCATIONS and kv not in idle:
                idle.append(kv)

    def grow(self, kv: KvAllocation, context_tokens: int) -> KvAllocation:
        """A larger allocation that holds what `kv` holds, slot for slot. `kv` stays as it is."""
        grown = self.allocate(max(context_tokens, kv.capacity))
        grown.copy_from(kv)
        return grown

    def prefill(
        self,
        tokens: ArrayLike,
        kv: KvAllocation,
        start: int = 0,
        before_group: Callable[[int], None] | None = None,
    ) -> NDArray[np.float32]:
        """Compute tokens[start:]; returns the logits after the last token, float32 [vocab].

        Token i has position i and slot i. The KV of tokens[:start] must be in its slots, for the layers of group g
        at the latest when before_group(g) returns. At least one token is always computed: start < len(tokens).
        Raises InvalidTokens and ContextExceeded before anything is changed, and what before_group raises (then
        `kv` is left empty).
        """
        ids = _int32("token ids", tokens)
        if not 0 <= start < len(ids):
            raise InvalidTokens(
                f"start {start} with {len(ids)} tokens: at least one token has to be computed for its logits"
            )
        _check_capacity(len(ids), kv)
        places = np.arange(start, len(ids), dtype=np.int32)
        calls = self.plan(ids[start:], places, places, kv)
        self._check(calls, kv)
        kv.slot_positions[:start] = np.arange(start)
        kv.slot_positions[start:] = EMPTY
        logits: NDArray[np.float32] = self.run(calls, kv, logits_of=[-1], before_group=before_group)[0]
        return logits

    def step(
        self,
        token_ids: ArrayLike,
        positions: ArrayLike,
        slots: ArrayLike,
        kv: KvAllocation,
        last: int | None = -1,
    ) -> NDArray[np.float32] | None:
        """Compute any tokens at any ascending positions into any slots; see `graphs` for what they see.

        Returns the logits after token number `last` of them, float32 [vocab], or None if `last` is None.
        Raises InvalidTokens and ContextExceeded before anything is changed.
        """
        calls = self.plan(token_ids, positions, slots, kv)
        logits = self.run(calls, kv, logits_of=[] if last is None else [last])
        return None if last is None else logits[0]

    def decode(
        self,
        logits: NDArray[np.float32],
        kv: KvAllocation,
        position: int,
        choose: Callable[[NDArray[np.float32]], int] = lambda logits: int(logits.argmax()),
    ) -> Iterator[int]:
        """Generate tokens without end, the first from `logits`; its position and slot are `position`.

        A token is computed only when its successor is asked for, so the last one taken is not in `kv`.
        Raises ContextExceeded when the allocation is full.
        """
        while True:
            token = choose(logits)
            yield token
            _check_capacity(position + 1, kv)
            logits = cast(NDArray[np.float32], self.step([token], [position], [position], kv))
            position += 1

    def plan(
        self,
        token_ids: ArrayLike,
        positions: ArrayLike,
        slots: ArrayLike,
        kv: KvAllocation,
        *,
        shortest_first: bool = False,
    ) -> list[Call]:
        """The cheapest calls for these tokens, in their order. Raises InvalidTokens.

        Costs are those of tokens that see no slot behind their own; where they do, calls are right but may not be the
        cheapest. shortest_first: these calls in the order of their sizes; may cost a tenth more, and waits for less
        of the KV that is still on its way.
        """
        calls, cover = self._planned(token_ids, positions, slots, kv, shortest_first)
        if cover is not None:
            with self._lock:
                self.statistics.planned(sum(len(call.token_ids) for call in calls), cover)
        return calls

    def _planned(
        self,
        token_ids: ArrayLike,
        positions: ArrayLike,
        slots: ArrayLike,
        kv: KvAllocation,
        shortest_first: bool = False,
    ) -> tuple[list[Call], Cover | None]:
        """The calls of `plan`, and by which cover; None for a single token in a graph of one."""
        ids, at = _int32("token ids", token_ids), _int32("positions", positions)
        into = _int32("slots", slots)
        if not len(ids) == len(at) == len(into):
            raise InvalidTokens(f"{len(ids)} token ids, {len(at)} positions, {len(into)} slots")
        if len(ids) == 1 and self.sizes[0] == 1:
            return [Call(1, ids, at, into)], None
        cover = self.costs(kv.slots).cover_at(np.maximum.accumulate(into))
        sizes, padding = list(cover.sizes), cover.padding
        if shortest_first:
            sizes.sort()
            # It went into the first call, and calls over later windows may be shorter.
            while padding >= sizes[0]:
                padding -= sizes.pop(0)
        calls, start, end = [], 0, -padding
        for size in sizes:
            end += size
            calls.append(Call(size, ids[start:end], at[start:end], into[start:end]))
            start = end
        return calls, cover

    def run(
        self,
        calls: Sequence[Call],
        kv: KvAllocation,
        logits_of: Sequence[int] = (),
        before_group: Callable[[int], None] | None = None,
        before_call: Callable[[int, int], None] | None = None,
    ) -> NDArray[np.float32]:
        """Run calls whose positions ascend from each to the next, layer group by layer group.

        before_group(g) is called before the first call reads the KV of group g, before_call(g, p) before a call reads
        that of tokens up to position p: one call may run while what later ones see is still on its way. But
        `kv.slot_positions` says beforehand where it will lie, as it decides which slots a call reads. `logits_of`
        numbers tokens through all calls (negative: from the end); returns their logits, float32
        [len(logits_of), vocab].
        Raises InvalidTokens and ContextExceeded before anything is changed. Raises what these two raise; then
        some layers hold the new tokens and others do not, so the allocation is left empty.
        """
        self._check(calls, kv)
        for call in calls:
            kv.slot_positions[call.slots] = call.positions
        hidden: list[NDArray[np.float32] | None] = [None] * len(calls)
        ahead, turns = Ahead(len(calls)), itertools.cycle((0, 1))
        groups = self._groups_of(calls)
        last = [int(call.positions[-1]) for call in calls]
        try:
            windows = [self._window(kv, call) for call in calls]
            for part, layers in enumerate(groups):
                read = [g for g, each in enumerate(self.layer_groups) if each.start in layers]
                if before_group:
                    for group in read:
                        before_group(group)
                for number, call in enumerate(calls):
                    if before_call:
                        for group in read:
                            before_call(group, last[number])
                    bound = self._bind(kv, call.size, windows[number], groups, next(turns))
                    begun = time.perf_counter()
                    hidden[number], execution = bound.start(part, call, hidden[number])
                    ahead.add(number, begun, execution)
            ahead.finish()
        except BaseException:
            ahead.abandon()
            kv.slot_positions[:] = EMPTY
            raise
        with self._lock:
            sizes = [call.size for call in calls]
            self._costs.observe(kv.slots, zip(sizes, windows, ahead.seconds, strict=True))
            self.statistics.ran(calls)
        if not logits_of:
            return np.empty((0, self.config.vocab), np.float32)
        rows = [cast(Any, h)[: len(call.token_ids)] for h, call in zip(hidden, calls, strict=True)]
        return self._logits(np.concatenate(rows)[list(logits_of)])

    def probe(
        self,
        token_ids: ArrayLike,
        positions: ArrayLike,
        slots: ArrayLike,
        kv: KvAllocation,
        before_layers: Callable[[int], None] | None = None,
    ) -> NDArray[np.float32]:
        """How much these tokens, taken as a question, attend to what each slot holds: float32 [slots of kv].

        Softmax probabilities summed over the tokens, all heads and the layers in the middle that `PROBED` names; those
        behind them need not run. Their KV is written to their slots, for the layers that ran.
        before_layers(stop) is called before the KV of layers below `stop` is read; what it raises is raised.
        Raises InvalidTokens and ContextExceeded before anything is changed; no more tokens than the largest size at
        this context, the last of `costs(kv.slots).seconds`.
        """
        ids, at, into = (
            _int32(name, each)
            for name, each in (("token ids", token_ids), ("positions", positions), ("slots", slots))
        )
        sizes = self._sizes_at(kv.slots)
        size = next((size for size in sizes if size >= len(ids)), None)
        if size is None:
            raise InvalidTokens(
                f"a probe of {len(ids)} tokens, the largest graph over {kv.slots} slots takes {sizes[-1]}"
            )
        call = Call(size, ids, at, into)
        self._check([call], kv)
        kv.slot_positions[into] = at
        bound, attention = self._bind_probe(kv, size)
        hidden = None
        for part, layers in enumerate(self._probe_layers):
            if before_layers:
                before_layers(layers.stop)
            hidden = bound.run(part, call, hidden)
        seen: NDArray[np.float32] = attention[: len(ids)].sum(axis=0)
        return seen

    def deviation(
        self,
        token_ids: ArrayLike,
        positions: ArrayLike,
        slots: ArrayLike,
        kv: KvAllocation,
        before_layers: Callable[[int], None] | None = None,
    ) -> NDArray[np.float32]:
        """How far the second layer's keys and values in these slots are from what they would be here: float32 [tokens].

        Sums of squared differences, as CacheBlend takes them (arXiv 2405.16444, section 4). The first layer is computed
        for all these tokens and its KV is written; it depends on no context, so tokens whose KV was held keep it. The
        second layer's is compared and left alone. Tokens that were not held belong among them where others follow.
        before_layers(stop) is called before the KV of layers below `stop` is read; what it raises is raised.
        Raises InvalidTokens and ContextExceeded before anything is changed; ValueError for a model of one layer.
        """
        if self.config.layers < 2:
            raise ValueError("deviation is that of the second layer; the model has one")
        calls, _ = self._planned(token_ids, positions, slots, kv)
        self._check(calls, kv)
        for call in calls:
            kv.slot_positions[call.slots] = call.positions
        if before_layers:
            before_layers(2)
        found = []
        for call in calls:
            bound, fresh = self._bind_peek(kv, call.size)
            bound.run(0, call, None)
            held = kv.keys[1][:, call.slots], kv.values[1][:, call.slots]
            apart = (each[:, : len(call.slots)] - old for each, old in zip(fresh, held, strict=True))
            found.append(sum(np.square(each).sum(axis=(0, 2)) for each in apart))
        return np.concatenate(found, dtype=np.float32)

    def costs(self, slots: int) -> CallCosts:
        """Measured costs of calls of each size over `slots` slots; measured now if this device never did."""
        with self._lock:
            sizes = self._sizes_at(slots)
            windows = self._windows_at(self._windowed(sizes), slots)
            return self._costs.at(
                slots, sizes, windows if len(windows) > 1 else (), lambda: self._measure(slots)
            )

    def warm_up(self, context_tokens: int) -> None:
        """Compile every graph for this context length, measure costs if not known, and bring weights into memory.

        Without it the first calls of each size pay for that. So does a probe of `QUESTION` tokens; of other lengths it
        and `deviation`, which no calibrated repair asks for, still pay at their first call.
        """
        kv = self.allocate(context_tokens)
        self.costs(kv.slots)
        for size in self._sizes_at(kv.slots):
            for window in self._windows_at(size, kv.slots):
                self._time_call(kv, size, window)
        self._logits(np.zeros((1, self.config.hidden), np.float32))
        question = min(QUESTION, self._sizes_at(kv.slots)[-1], kv.capacity, self.config.context_length)
        places = np.arange(question)
        self.probe(np.zeros_like(places), places, places, kv)
        self.recycle(kv)

    def _allocate(self, slots: int) -> KvAllocation:
        return KvAllocation(self.runtime.allocate, self.config, slots, np.dtype(self.kv_dtype))

    def _check(self, calls: Sequence[Call], kv: KvAllocation) -> None:
        if not calls:
            raise InvalidTokens("no tokens")
        for call in calls:
            counts = {len(call.token_ids), len(call.positions), len(call.slots)}
            if len(counts) > 1 or not 0 < max(counts) <= call.size:
                raise InvalidTokens(
                    f"a call of size {call.size} was given {sorted(counts)} ids, positions, slots"
                )
        ids, positions, slots = (
            np.concatenate([getattr(call, name) for call in calls])
            for name in ("token_ids", "positions", "slots")
        )
        if ids.min() < 0 or ids.max() >= self.config.vocab:
            wrong = ids[(ids < 0) | (ids >= self.config.vocab)][0]
            raise InvalidTokens(f"token id {wrong} is not in the vocabulary of {self.config.vocab}")
        if positions[0] < 0 or (np.diff(positions) <= 0).any():
            raise InvalidTokens("positions must be ascending and not negative")
        if positions[-1] >= self.config.context_length:
            raise ContextExceeded(
                f"position {positions[-1]}: the model was made for {self.config.context_length} tokens"
            )
        if slots.min() < 0 or slots.max() >= kv.capacity:
            wrong = slots[(slots < 0) | (slots >= kv.capacity)][0]
            raise ContextExceeded(
                f"slot {wrong}: the allocation holds {kv.capacity} tokens; grow it with engine.grow"
            )
        if not np.array_equal(slots, positions) and len(np.unique(slots)) != len(slots):
            raise InvalidTokens("two tokens share a slot")

    def _groups_of(self, calls: Sequence[Call]) -> list[range]:
        """The parts of the layers in which these calls run."""
        return self._whole if [call.size for call in calls] == self.sizes[:1] else self.layer_groups

    def _windows_at(self, size: int, slots: int) -> list[int]:
        """Windows of the graphs of `size` tokens over `slots` slots; the last is all slots."""
        narrow = self.windows.get(slots, []) if size >= WINDOWED else []
        return [*(window for window in narrow if window >= size), slots]

    @staticmethod
    def _windowed(sizes: Sequence[int]) -> int:
        """The least of these sizes that has windows, or the largest."""
        return next((size for size in sizes if size >= WINDOWED), sizes[-1])

    def _window(self, kv: KvAllocation, call: Call) -> int:
        """The narrowest window that holds all that a call's tokens may see."""
        windows = self._windows_at(call.size, kv.slots)
        if len(windows) == 1:
            return kv.slots
        behind = int((kv.slot_positions <= call.positions[-1])[::-1].argmax())
        return next(window for window in windows if window >= kv.slots - behind)

    def _compiled(self, size: int, slots: int, window: int, groups: list[range]) -> list[CompiledGraph]:
        key = size, slots, window, len(groups)
        with self._lock:
            if key not in self._parts:
                self._parts[key] = [self._compile(size, slots, layers, window=window) for layers in groups]
            return self._parts[key]

    def _bind(
        self, kv: KvAllocation, size: int, window: int, groups: list[range], turn: int = 0
    ) -> BoundCall:
        """A call that is bound twice, `turn` 0 and 1, can be prepared while it runs."""
        bound, key = self._bound.setdefault(kv, {}), (size, window, len(groups), turn)
        if key not in bound:
            graphs = self._compiled(size, kv.slots, window, groups)
            bound[key] = self._bound_call(graphs, groups, kv, size)
        return bound[key]

    def _bind_probe(self, kv: KvAllocation, size: int) -> tuple[BoundCall, NDArray[np.float32]]:
        """The layers that a probe runs, and the array that gets the attention of the last of them."""
        with self._lock:
            bound = self._probes.setdefault(kv, {})
            if size not in bound:
                attention = np.zeros((size, kv.slots), np.float32)
                if (size, kv.slots) not in self._probe_parts:
                    self._probe_parts[size, kv.slots] = [
                        self._compile(size, kv.slots, layers, attention=layers == self._probe_layers[-1])
                        for layers in self._probe_layers
                    ]
                graphs, more = self._probe_parts[size, kv.slots], {"attention": attention}
                bound[size] = self._bound_call(graphs, self._probe_layers, kv, size, more), attention
            return bound[size]

    def _bind_peek(self, kv: KvAllocation, size: int) -> tuple[BoundCall, _KeysValues]:
        """The first layer, and the arrays that get the second one's keys and values."""
        with self._lock:
            bound = self._peeks.setdefault(kv, {})
            if size not in bound:
                if (size, kv.slots) not in self._peek_parts:
                    self._peek_parts[size, kv.slots] = self._compile(size, kv.slots, range(1), peek=True)
                shape = (self.config.kv_heads, size, self.config.head_dim)
                keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
                graphs, more = [self._peek_parts[size, kv.slots]], {"next_keys": keys, "next_values": values}
                bound[size] = self._bound_call(graphs, [range(1)], kv, size, more), (keys, values)
            return bound[size]

    def _compile(self, size: int, slots: int, layers: range, **options: Any) -> CompiledGraph:
        """options: further ones of `layer_graph`."""
        return self.runtime.compile(
            layer_graph(
                self.weights,
                tokens=size,
                slots=slots,
                layers=layers,
                kv_dtype=self.kv_dtype,
                form=self.form,
                **options,
            )
        )

    def _bound_call(
        self,
        graphs: list[CompiledGraph],
        layers: list[range],
        kv: KvAllocation,
        size: int,
        more: Tensors | None = None,
    ) -> BoundCall:
        return BoundCall(graphs, layers, kv, size=size, hidden=self.config.hidden, form=self.form, more=more)

    def _logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """[n, hidden] → [n, vocab]: one by one for a few rows, else by blocks."""
        logits = np.empty((len(hidden), self.config.vocab), np.float32)
        rows = 1 if len(hidden) < _HEAD_ROWS else _HEAD_ROWS
        with self._lock:
            if rows not in self._heads:
                self._heads[rows] = self.runtime.compile(head_graph(self.weights, rows))
        starts = [*range(0, len(hidden) - rows, rows), len(hidden) - rows]  # the last block may overlap
        for start in starts:
            block = slice(start, start + rows)
            self._heads[rows].bind({"hidden": hidden[block], "logits": logits[block]}).start().wait()
        return logits

    def _sizes_at(self, slots: int) -> list[int]:
        return [size for size in self.sizes if size <= slots] or self.sizes[:1]

    def _measure(self, slots: int) -> CallCosts:
        """Calls of each size over all slots; one over the narrowest window, which tells what the others save."""
        kv, sizes = self._allocate(slots), self._sizes_at(slots)
        windows = self._windows_at(self._windowed(sizes), slots)
        narrow, wide = ((self._windowed(sizes), window) for window in (windows[0], slots))
        calls = list(dict.fromkeys([*((size, slots) for size in sizes), narrow]))
        for call in calls:
            self._time_call(kv, *call)  # compiles, and brings the weights into memory
        samples: dict[tuple[int, int], list[float]] = {call: [] for call in calls}
        for _ in range(3):  # in turns, so that other work on the machine does not hit one call alone
            for call in calls:
                if sum(samples[call]) < 0.5:
                    samples[call].append(self._time_call(kv, *call))
        seconds = {size: min(samples[size, slots]) for size in sizes}
        if len(windows) == 1:
            return CallCosts(seconds)
        share = min(samples[narrow]) / min(samples[wide])
        return CallCosts(seconds, Windows.on_a_line(windows, share))

    def _time_call(self, kv: KvAllocation, size: int, window: int) -> float:
        places = np.arange(min(size, kv.capacity), dtype=np.int32)
        call, before = Call(size, np.zeros_like(places), places, places), time.perf_counter()
        hidden, groups = None, self._groups_of([call])
        for part in range(len(groups)):
            hidden = self._bind(kv, size, window, groups).run(part, call, hidden)
        return time.perf_counter() - before


def _default_cache() -> Path:
    return Path(os.environ.get("KVSTORE_CACHE_DIR") or platformdirs.user_cache_dir("kvstore")) / "engine"


def _int32(what: str, values: ArrayLike) -> NDArray[np.int32]:
    array = np.asarray(values)
    if array.ndim != 1 or len(array) == 0:
        raise InvalidTokens(f"{what}: a sequence of at least one is needed, not shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise InvalidTokens(f"{what}: integers are needed, not {array.dtype}")
    limits = np.iinfo(np.int32)
    if array.min() < limits.min or array.max() >= limits.max:
        raise InvalidTokens(
            f"{what}: {array.max() if array.max() >= limits.max else array.min()} is out of range"
        )
    return array.astype(np.int32, copy=False)


def _check_capacity(tokens: int, kv: KvAllocation) -> None:
    if tokens > kv.capacity:
        raise ContextExceeded(
            f"needs {tokens} tokens, the allocation holds {kv.capacity}: grow it with engine.grow, "
            "or shorten the prompt"
        )
