"""The static-graph engine against an independent transformer, and against itself however the work is split."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.pipeline.call import Call
from kvstore.pipeline.engine import InvalidTokens, StaticGraphEngine
from kvstore.pipeline.graphs import EMPTY, Graph
from kvstore.pipeline.kv_allocation import ContextExceeded
from kvstore.pipeline.layer_groups import layer_groups
from kvstore.pipeline.onnx_runtime import OnnxRuntime, ProviderUnavailable
from kvstore.pipeline.runtime import Binding, CompiledGraph
from kvstore.pipeline.simulated import IdleRuntime, SimulatedExecution, SimulatedNpu
from kvstore.pipeline.tokenizer import Tokenizer
from kvstore.pipeline.weights import UnsupportedModel
from tests.reference import Reference
from tests.tiny_models import write_tiny_gguf

TOLERANCE = 1e-3  # the bar; what is measured stays below 2e-5 on the tiny models
N = 60
TOKENS = np.random.default_rng(5).integers(0, 300, N)
PLACES = np.arange(N)
LONG = np.random.default_rng(6).integers(0, 300, 200)
WINDOWED_ENGINE: dict[str, Any] = {
    "sizes": (1, 16, 64, 128), "contexts": (256,), "windows": ((256, (64, 96, 128, 192)),),
}  # fmt: skip

Make = Callable[..., StaticGraphEngine]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Path:
    write_tiny_gguf(folder / "tiny.gguf", layers=3)
    return folder / "tiny.gguf"


@pytest.fixture(scope="module")
def make(folder: Path, tiny: Path) -> Make:
    """An engine on the tiny model (or on `model`); the same engine for the same arguments."""

    @cache
    def make(model: Path = tiny, **options: Any) -> StaticGraphEngine:
        options = {"sizes": (1, 8, 16, 32), "contexts": (64, 128)} | options
        if "windows" in options:  # pairs, since dictionaries are no keys of a cache
            options["windows"] = dict(options["windows"])
        return StaticGraphEngine(model, cache=folder / "cache", **options)

    return make


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> NDArray[np.float32]:
    """Logits of the reference after each of TOKENS, [N, vocab]."""
    return Reference(tiny).logits(TOKENS)


def calls_of(sizes: Sequence[int], slots: NDArray[Any] = PLACES, counts: Sequence[int] = ()) -> list[Call]:
    """TOKENS in order by calls of `sizes`, each filled, or with `counts` tokens in it."""
    calls, start = [], 0
    for size, count in itertools.zip_longest(sizes, counts, fillvalue=None):
        end = min(start + (count or size or 0), N)
        at = np.arange(start, end, dtype=np.int32)
        calls.append(Call(size or 0, TOKENS[at].astype(np.int32), at, slots[at].astype(np.int32)))
        start = end
    assert start == N
    return calls


MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-untied-quantised": {"tied": False, "quantise": "Q4_1"},
    "llama-one-kv-head": {"kv_heads": 1, "head_dim": 32},
    "llama-no-groups": {"kv_heads": 4},
    "llama3-scaling": {
        "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "linear-scaling": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    "qwen2": {"arch": "qwen2", "qkv_bias": True, "tied": False},
    "qwen3": {"arch": "qwen3", "qk_norm": True, "head_dim": 32},
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_greedy_tokens_equal_the_reference(make: Make, folder: Path, name: str) -> None:
    path = folder / f"{name}.gguf"
    write_tiny_gguf(path, **MODELS[name])
    engine, reference = make(path), Reference(path)
    kv = engine.allocate(N + 16)
    logits = engine.run(engine.plan(TOKENS, PLACES, PLACES, kv), kv, logits_of=range(N))
    assert np.abs(logits - reference.logits(TOKENS)).max() <= TOLERANCE
    chosen = list(itertools.islice(engine.decode(logits[-1], kv, N), 16))
    assert chosen == reference.greedy(TOKENS, 16)


def test_keys_and_values_equal_the_reference(make: Make, tiny: Path) -> None:
    engine = make()
    kv = engine.allocate(N)
    engine.prefill(TOKENS, kv)
    for layer, (keys, values) in enumerate(Reference(tiny).kv(TOKENS)):
        np.testing.assert_allclose(kv.keys[layer][:, :N], keys, atol=1e-4)
        np.testing.assert_allclose(kv.values[layer][:, :N], values, atol=1e-4)


@pytest.mark.parametrize("form", ["in_place", "read_only_past"])
@pytest.mark.parametrize("groups", [1, 2, 3])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_split_into_calls_and_slots_gives_the_same(
    make: Make, oracle: NDArray[np.float32], form: str, groups: int, data: st.DataObject
) -> None:
    engine = make(form=form, groups=groups)
    sizes, counts = list[int](), list[int]()
    while sum(counts) < N:
        sizes.append(data.draw(st.sampled_from(engine.sizes)))
        counts.append(data.draw(st.integers(1, min(sizes[-1], N - sum(counts)))))
    kv = engine.allocate(N)
    slots = np.random.default_rng(data.draw(st.integers(0, 999))).permutation(kv.capacity)[:N]
    logits = engine.run(calls_of(sizes, slots, counts), kv, logits_of=range(N))
    assert np.abs(logits - oracle).max() <= TOLERANCE
    assert kv.slot_positions[kv.padding_slot] == EMPTY


@pytest.fixture(scope="module")
def long_oracle(tiny: Path) -> NDArray[np.float32]:
    return Reference(tiny).logits(LONG)


@pytest.mark.parametrize("form", ["in_place", "read_only_past"])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_every_split_over_windows_gives_the_same(
    make: Make, long_oracle: NDArray[np.float32], form: str, data: st.DataObject
) -> None:
    """Tokens at any slots, calls with padding, and some tokens computed a second time over spoilt KV."""
    engine = make(form=form, groups=2, **WINDOWED_ENGINE)
    count = data.draw(st.integers(1, len(LONG)))
    slots = np.arange(len(LONG), dtype=np.int32)
    for _ in range(data.draw(st.integers(0, 3))):  # some change places
        a, b = data.draw(st.tuples(*[st.integers(0, count - 1)] * 2))
        slots[[a, b]] = slots[[b, a]]
    kv, at, calls = engine.allocate(len(LONG)), np.arange(count, dtype=np.int32), list[Call]()
    while (start := sum(len(call.token_ids) for call in calls)) < count:
        size = data.draw(st.sampled_from(engine.sizes))
        part = at[start : start + data.draw(st.integers(1, size))]
        calls.append(Call(size, LONG[part].astype(np.int32), part, slots[part]))
    logits = engine.run(calls, kv, logits_of=range(count))
    assert np.abs(logits - long_oracle[:count]).max() <= TOLERANCE

    again = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), max_size=90)) | {count - 1}))
    for array in kv.keys + kv.values:
        array[:, slots[again]] = 7
    repaired = engine.step(LONG[again], again, slots[again], kv)
    assert repaired is not None
    assert np.abs(repaired - long_oracle[count - 1]).max() <= TOLERANCE


def test_every_window_is_read_where_it_is_enough_and_only_there(tiny: Path, tmp_path: Path) -> None:
    read: list[tuple[int, int]] = []

    def seconds(tokens: int, window: int) -> float:
        read.append((tokens, window))
        return 1e-6

    npu = SimulatedNpu(IdleRuntime(), 3, seconds)
    engine = StaticGraphEngine(
        tiny, runtime=npu, cache=tmp_path, **WINDOWED_ENGINE | {"windows": dict(WINDOWED_ENGINE["windows"])}
    )

    def windows(at: Sequence[int], slots: Sequence[int], size: int = 64) -> list[int]:
        """Those of a call for tokens at these positions into these slots."""
        kv = engine.allocate(200)
        kv.slot_positions[:50] = np.arange(50)
        kv.slot_positions[150:170] = np.arange(100, 120)  # in sight of tokens from 100 on
        read.clear()
        places, into = np.array(at, np.int32), np.array(slots, np.int32)
        engine.run([Call(size, np.zeros_like(places), places, into)], kv)
        return [window for _, window in read]

    assert windows([50, 51], [50, 51]) == [64]
    assert windows([63], [63]) == [64]
    assert windows([64], [64]) == [96]
    assert windows([64], [63]) == [64]
    assert windows([99], [99]) == [128]
    assert windows([100], [99]) == [192], "a held token that it sees lies in slot 150"
    assert windows([50], [195]) == [256]
    assert windows([50], [50], size=128) == [128], "no window is narrower than its calls are long"
    assert windows([50], [50], size=16) == [256], "small graphs have one window"


@pytest.mark.parametrize("kv_dtype", ["float32", "float16"])
def test_windows_change_the_time_and_nothing_else(make: Make, kv_dtype: str) -> None:
    narrow = make(**WINDOWED_ENGINE, kv_dtype=kv_dtype)
    whole = make(**(WINDOWED_ENGINE | {"windows": ()}), kv_dtype=kv_dtype)
    at = np.arange(len(LONG), dtype=np.int32)
    calls = [Call(64, LONG[part].astype(np.int32), part, part) for part in np.array_split(at, 4)]
    found, expected = (
        engine.run(calls, engine.allocate(220), logits_of=range(len(LONG))) for engine in (narrow, whole)
    )
    np.testing.assert_allclose(found, expected, atol=1e-4 if kv_dtype == "float32" else 2e-2)


def test_no_more_layer_groups_than_layers(make: Make) -> None:
    assert make(groups=9).layer_groups == [range(1), range(1, 2), range(2, 3)]


@given(st.integers(1, 100), st.data())
def test_the_first_layer_groups_are_half_as_long_as_the_others(layers: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, layers))
    groups = layer_groups(layers, count)
    assert [layer for group in groups for layer in group] == list(range(layers))
    assert all(len(group) >= 1 for group in groups)
    short = max(1, min(3, count // 4))
    part = layers / (2 * count - short)
    if part >= 1:
        assert all(abs(len(group) - part) <= 1 for group in groups[:short])
        assert all(abs(len(group) - 2 * part) <= 1 for group in groups[short:])


def test_layer_groups_do_not_change_a_bit(make: Make) -> None:
    held = []
    for groups in (1, 2, 3):
        kv = make(groups=groups).allocate(N)
        logits = make(groups=groups).run(calls_of([32, 32]), kv, logits_of=[-1])
        held.append((logits, *kv.keys, *kv.values))
    for other in held[1:]:
        for mine, theirs in zip(held[0], other, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_float16_kv_is_close_and_half_as_large(make: Make, oracle: NDArray[np.float32]) -> None:
    full, half = make(), make(kv_dtype="float16")
    kv = half.allocate(N)
    assert np.abs(half.prefill(TOKENS, kv) - oracle[-1]).max() < 0.05
    assert kv.keys[0].dtype == np.float16
    assert half.allocate(N).memory.nbytes * 2 == full.allocate(N).memory.nbytes


@given(
    recomputed=st.sets(st.integers(0, N - 2), max_size=N - 1),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_scattered_tokens_recomputed_over_damaged_kv_repair_it(
    make: Make, oracle: NDArray[np.float32], recomputed: set[int], seed: int
) -> None:
    """Spoil the KV of any tokens, compute just these and the last again: all is as before, at any placement."""
    engine = make()
    kv = engine.allocate(N)
    slots = np.random.default_rng(seed).permutation(kv.capacity)[:N]
    engine.step(TOKENS, PLACES, slots, kv, last=None)
    again = np.array(sorted(recomputed | {N - 1}))
    for array in kv.keys + kv.values:
        array[:, slots[again]] = 7
    logits = engine.step(TOKENS[again], again, slots[again], kv)
    assert logits is not None
    assert np.abs(logits - oracle[-1]).max() <= TOLERANCE


@pytest.mark.parametrize("start", [1, 17, N - 1])
def test_prefill_behind_held_kv_is_bit_equal_to_the_same_split_without(make: Make, start: int) -> None:
    engine = make(groups=3)
    cold = engine.allocate(N)
    engine.prefill(TOKENS[:start], cold)
    expected = engine.prefill(TOKENS, cold, start=start)

    warm, brought = engine.allocate(N), list[int]()

    def load(group: int) -> None:
        brought.append(group)
        for layer in engine.layer_groups[group]:
            warm.keys[layer][:, :start] = cold.keys[layer][:, :start]
            warm.values[layer][:, :start] = cold.values[layer][:, :start]

    logits = engine.prefill(TOKENS, warm, start=start, before_group=load)
    assert brought == [0, 1, 2]
    np.testing.assert_array_equal(logits, expected)
    for mine, theirs in zip(warm.keys + warm.values, cold.keys + cold.values, strict=True):
        np.testing.assert_array_equal(mine[:, :N], theirs[:, :N])


def test_a_group_is_brought_only_when_the_groups_before_it_are_done(make: Make) -> None:
    engine = make(groups=3)
    kv = engine.allocate(N)

    def check(group: int) -> None:
        for layer in range(engine.config.layers):
            done = layer < engine.layer_groups[group].start
            assert bool(kv.keys[layer][:, : N - 1].any()) == done, (group, layer)

    engine.run(calls_of([32, 16, 16]), kv, before_group=check)


def test_prefill_forgets_what_the_allocation_held_behind_start(
    make: Make, oracle: NDArray[np.float32]
) -> None:
    engine = make()
    kv = engine.allocate(N)
    engine.prefill(np.concatenate([TOKENS[:30], TOKENS[:33]]), kv)
    assert np.abs(engine.prefill(TOKENS, kv, start=30) - oracle[-1]).max() <= TOLERANCE
    np.testing.assert_array_equal(kv.slot_positions[:N], PLACES)
    assert (kv.slot_positions[N:] == EMPTY).all()


def test_a_load_that_fails_leaves_the_allocation_empty(make: Make, oracle: NDArray[np.float32]) -> None:
    engine = make(groups=3)
    kv = engine.allocate(N)

    def fail(group: int) -> None:
        if group == 1:
            raise OSError("flash is gone")

    with pytest.raises(OSError, match="flash is gone"):
        engine.prefill(TOKENS, kv, start=20, before_group=fail)
    assert (kv.slot_positions == EMPTY).all()
    assert np.abs(engine.prefill(TOKENS, kv) - oracle[-1]).max() <= TOLERANCE


def test_the_first_call_waits_for_as_few_positions_as_can_be(tiny: Path, tmp_path: Path) -> None:
    npu = SimulatedNpu(IdleRuntime(), 3, lambda tokens, _: tokens * 1e-4, launch_seconds=2e-3)
    engine = StaticGraphEngine(tiny, runtime=npu, sizes=(16, 32), contexts=(64,), cache=tmp_path)
    kv, asked = engine.allocate(48), list[int]()
    calls = engine.plan(TOKENS[:48], PLACES[:48], PLACES[:48], kv)
    engine.run(calls, kv, before_call=lambda _, position: asked.append(position))
    assert asked == [15, 47]


def test_decoding_step_by_step_equals_prefill_of_the_whole(make: Make) -> None:
    engine = make()
    kv = engine.allocate(N)
    logits = engine.prefill(TOKENS[:20], kv)
    chosen = list(itertools.islice(engine.decode(logits, kv, 20), 25))
    assert np.count_nonzero(kv.slot_positions != EMPTY) == 20 + 24, "the last token taken is not computed"
    again = engine.step([chosen[-1]], [44], [44], kv)
    whole = engine.prefill([*TOKENS[:20], *chosen], engine.allocate(N))
    assert again is not None
    assert np.abs(again - whole).max() <= TOLERANCE


def test_decode_takes_what_the_chooser_chooses(make: Make, oracle: NDArray[np.float32]) -> None:
    engine = make()
    kv = engine.allocate(N)
    logits = engine.prefill(TOKENS[:30], kv)
    forced = iter(TOKENS[30:])
    taken = list(itertools.islice(engine.decode(logits, kv, 30, choose=lambda _: int(next(forced))), 30))
    assert taken == TOKENS[30:].tolist()
    last = engine.step([taken[-1]], [N - 1], [N - 1], kv)
    assert last is not None
    assert np.abs(last - oracle[-1]).max() <= TOLERANCE


def test_many_logits_are_computed_by_blocks(make: Make, oracle: NDArray[np.float32]) -> None:
    engine = make()
    kv = engine.allocate(N)
    for rows in ([], [-1], [3, 0, -2], list(range(15)), list(range(17)), list(range(N))):
        logits = engine.run(calls_of([32, 32]), kv, logits_of=rows)
        assert logits.shape == (len(rows), 300)
        np.testing.assert_allclose(logits, oracle[rows], atol=TOLERANCE)


def test_the_smallest_sufficient_context_is_allocated(make: Make) -> None:
    engine = make()
    assert [engine.allocate(n).slots for n in (0, 1, 63, 64, 127)] == [64, 64, 64, 128, 128]
    kv = engine.allocate(100)
    assert (kv.capacity, kv.padding_slot) == (127, 127)
    assert {array.shape for array in kv.keys + kv.values} == {(2, 128, 16)}
    for array in kv.keys + kv.values:
        assert array.ctypes.data % 4096 == 0
        assert np.shares_memory(array, kv.memory)
        assert not array.any()


def test_a_grown_allocation_goes_on_where_the_small_one_ended(
    make: Make, oracle: NDArray[np.float32]
) -> None:
    engine = make(contexts=(32, 64))
    small = engine.allocate(31)
    engine.prefill(TOKENS[:31], small)
    grown = engine.grow(small, N)
    assert grown.slots == 64
    assert np.abs(engine.prefill(TOKENS, grown, start=31) - oracle[-1]).max() <= TOLERANCE
    assert small.slot_positions[30] == 30


def test_too_many_tokens_are_refused_with_the_limit_and_a_way_out(make: Make, folder: Path) -> None:
    engine = make()
    with pytest.raises(ContextExceeded, match=r"needs 128 tokens.*128 slots holds 127.*contexts"):
        engine.allocate(128)
    kv = engine.allocate(63)
    with pytest.raises(ContextExceeded, match=r"needs 64 tokens.*holds 63.*grow"):
        engine.prefill(np.ones(64, int), kv)
    with pytest.raises(ContextExceeded, match=r"slot 63.*holds 63.*grow"):
        engine.step([1], [63], [63], kv)
    tokens = engine.decode(engine.prefill(np.ones(62, int), kv), kv, 62)
    assert len(list(itertools.islice(tokens, 2))) == 2
    with pytest.raises(ContextExceeded, match="needs 64 tokens"):
        next(tokens)

    write_tiny_gguf(folder / "short.gguf", context=48)
    short = make(folder / "short.gguf")
    with pytest.raises(ContextExceeded, match=r"needs 49 tokens.*made for 48"):
        short.allocate(49)
    with pytest.raises(ContextExceeded, match=r"position 48.*48"):
        short.step([1], [48], [0], short.allocate(40))


@pytest.mark.parametrize(
    ("ids", "positions", "slots", "said"),
    [
        ([], [], [], "at least one"),
        ([-1], [0], [0], "token id -1"),
        ([300], [0], [0], "vocabulary of 300"),
        ([2**40], [0], [0], "out of range"),
        ([1.5], [0], [0], "integers"),
        ([[1]], [0], [0], "shape"),
        ([1, 2], [0], [0, 1], "2 token ids, 1 positions"),
        ([1, 2], [1, 0], [0, 1], "ascending"),
        ([1, 2], [1, 1], [0, 1], "ascending"),
        ([1], [-1], [0], "not negative"),
        ([1, 2], [0, 1], [4, 4], "share a slot"),
        ([1], [EMPTY], [0], "out of range"),
    ],
)
def test_tokens_that_cannot_be_computed_change_nothing(
    make: Make, ids: Any, positions: Any, slots: Any, said: str
) -> None:
    engine = make()
    kv = engine.allocate(10)
    before = kv.memory.copy(), kv.slot_positions.copy(), engine.statistics.tokens
    with pytest.raises(InvalidTokens, match=said):
        engine.step(ids, positions, slots, kv)
    np.testing.assert_array_equal(kv.memory, before[0])
    np.testing.assert_array_equal(kv.slot_positions, before[1])
    assert engine.statistics.tokens == before[2]


@pytest.mark.parametrize("start", [-1, 5, 6])
def test_prefill_always_computes_a_token(make: Make, start: int) -> None:
    with pytest.raises(InvalidTokens, match="at least one token"):
        make().prefill([1, 2, 3, 4, 5], make().allocate(10), start=start)


def test_statistics_count_calls_tokens_and_padding(folder: Path, tiny: Path) -> None:
    engine = StaticGraphEngine(tiny, sizes=(1, 16), contexts=(64,), cache=folder / "cache")
    kv = engine.allocate(N)
    engine.run(calls_of([16, 16, 16, 16]), kv)
    engine.step([1], [N], [N], kv)
    assert engine.statistics.calls == {16: 4, 1: 1}
    assert (engine.statistics.tokens, engine.statistics.padding) == (N + 1, 4)


def test_statistics_say_how_well_sizes_fit_what_was_planned(folder: Path, tiny: Path) -> None:
    engine = StaticGraphEngine(tiny, sizes=(1, 16), contexts=(64,), cache=folder / "cache")
    kv = engine.allocate(N)
    engine.prefill(TOKENS[:40], kv)
    engine.prefill(TOKENS[:40], kv)
    engine.step([1], [40], [40], kv)
    engine.deviation(TOKENS[:40], PLACES[:40], PLACES[:40], kv)  # one layer of a plan is none
    assert engine.statistics.lengths == {40: 2}
    cover = engine.costs(64).cover(40)
    assert engine.statistics.planned_seconds == pytest.approx(2 * cover.seconds)
    assert engine.statistics.bound_seconds == pytest.approx(2 * cover.bound)


@pytest.fixture
def impatient_threads() -> Iterator[None]:
    """Threads give way to one another as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[], None], count: int = 4) -> None:
    """Do the same in `count` threads; raises what one of them raised."""
    with ThreadPoolExecutor(count) as threads:
        for each in [threads.submit(work) for _ in range(count)]:
            each.result()


@pytest.mark.usefixtures("impatient_threads")
def test_no_allocation_is_in_two_hands_and_few_are_kept(tiny: Path, tmp_path: Path) -> None:
    npu, used = _SlowCompiler(), set[int]()
    engine = StaticGraphEngine(tiny, runtime=npu, sizes=(1,), contexts=(64,), cache=tmp_path)

    def work() -> None:
        for _ in range(1000):
            kv = engine.allocate(10)
            assert id(kv) not in used
            used.add(id(kv))
            used.remove(id(kv))
            engine.recycle(kv)

    in_threads(work)
    held = [engine.allocate(10) for _ in range(3)]
    before = npu.allocations
    for kv in held:
        engine.recycle(kv)
    held = [engine.allocate(10) for _ in range(3)]
    assert npu.allocations == before + 1


class _YieldingIds(NDArray[np.int32] if TYPE_CHECKING else np.ndarray):
    """Lets other threads run whenever it is asked for its length."""

    def __len__(self) -> int:
        time.sleep(1e-5)
        return self.shape[0]


def test_calls_of_all_threads_are_counted(tiny: Path, tmp_path: Path) -> None:
    """The fault this excludes: two threads that added to the same number at once, of which one counted for nothing."""
    engine = StaticGraphEngine(tiny, runtime=IdleRuntime(), sizes=(1,), contexts=(64,), cache=tmp_path)
    zero = np.zeros(1, np.int32)

    def work() -> None:
        kv = engine.allocate(10)
        for _ in range(50):
            engine.run([Call(1, zero.view(_YieldingIds), zero, zero)], kv)

    in_threads(work)
    assert engine.statistics.tokens == engine.statistics.calls[1] == 4 * 50


class _SlowCompiler(IdleRuntime):
    """Names what it compiles, slowly enough for other threads to come to the same point, and counts allocations."""

    def __init__(self) -> None:
        self.names = list[str]()
        self.allocations = 0

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        self.allocations += 1
        return super().allocate(nbytes)

    def compile(self, graph: Graph) -> CompiledGraph:
        self.names.append(graph.name)
        time.sleep(0.05)
        return super().compile(graph)


def test_threads_compile_each_graph_of_a_probe_and_of_a_deviation_once(tiny: Path, tmp_path: Path) -> None:
    npu = _SlowCompiler()
    engine = StaticGraphEngine(tiny, runtime=npu, sizes=(16,), contexts=(64,), cache=tmp_path)
    engine.costs(64)

    def work() -> None:
        kv = engine.allocate(16)
        engine.probe(TOKENS[:16], PLACES[:16], PLACES[:16], kv)
        engine.deviation(TOKENS[:16], PLACES[:16], PLACES[:16], kv)

    in_threads(work)
    assert sorted(npu.names) == sorted(set(npu.names))


def test_what_was_warmed_up_is_not_compiled_by_a_request(tiny: Path, tmp_path: Path) -> None:
    """The fault this excludes: the first question whose attention was looked at waited for a compiler."""
    npu = _SlowCompiler()
    engine = StaticGraphEngine(tiny, runtime=npu, sizes=(1, 16, 64), contexts=(128,), cache=tmp_path)
    engine.warm_up(100)
    compiled, kv = list(npu.names), engine.allocate(100)
    assert (kv.slot_positions == EMPTY).all()
    engine.prefill(TOKENS[:40], kv)
    engine.probe(TOKENS[40:56], PLACES[40:56], PLACES[40:56], kv)
    next(engine.decode(engine.prefill(TOKENS, kv, start=40), kv, N))
    assert npu.names == compiled


def test_a_probe_longer_than_the_graphs_of_its_context_is_refused(make: Make) -> None:
    engine = make(sizes=(1, 256), contexts=(128, 512))
    with pytest.raises(InvalidTokens, match="16 tokens, the largest graph over 128 slots takes 1"):
        engine.probe(TOKENS[:16], PLACES[:16], PLACES[:16], engine.allocate(100))
    assert engine.probe(TOKENS[:16], PLACES[:16], PLACES[:16], engine.allocate(300)).shape == (512,)


def test_threads_with_allocations_of_their_own_do_not_disturb_each_other(
    make: Make, oracle: NDArray[np.float32]
) -> None:
    engine, worst = make(groups=2), list[float]()

    def work(offset: int) -> None:
        for n in range(offset, N, 7):
            difference = engine.prefill(TOKENS[: n + 1], engine.allocate(N)) - oracle[n]
            worst.append(float(np.abs(difference).max()))

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(worst) == sum(len(range(offset, N, 7)) for offset in range(4))
    assert max(worst) <= TOLERANCE


def test_an_allocation_is_freed_although_graphs_were_bound_to_it(make: Make) -> None:
    """The fault this excludes: bindings kept for an allocation keep the allocation, 47 MB a request."""
    kv = make().allocate(N)
    make().prefill(TOKENS, kv)
    memory = weakref.ref(kv.memory)
    del kv
    gc.collect()
    assert memory() is None


class _InTurns(SimulatedNpu):
    """Returns from starting a graph when it is over, as a runtime without a queue does."""

    def start(self, binding: Binding, seconds: float) -> SimulatedExecution:
        execution = super().start(binding, seconds)
        execution.wait()
        return execution


@pytest.mark.parametrize("kind", [SimulatedNpu, _InTurns])
def test_what_calls_take_is_learned_as_it_is(kind: type[SimulatedNpu], folder: Path, tiny: Path) -> None:
    """Also of several calls and layer groups; a call's time once went to another one, and the last cost nothing."""

    def engine() -> StaticGraphEngine:
        npu = kind(IdleRuntime(), 3, lambda tokens, _: 1e-4 * tokens + 1e-3)
        return StaticGraphEngine(tiny, runtime=npu, cache=folder, sizes=(8, 16), contexts=(64,), groups=3)

    used = engine()
    kv = used.allocate(50)
    for _ in range(3):
        used.prefill(TOKENS[:40], kv)
    costs = engine().costs(kv.slots).seconds
    # 1.8 and 2.6 ms; a host that is late makes a call look longer, never shorter.
    assert set(costs) == {8, 16}
    assert 1.3e-3 < costs[8] < 6e-3
    assert 1.9e-3 < costs[16] < 9e-3


def test_costs_are_measured_once_for_a_device(folder: Path, tiny: Path) -> None:
    options: dict[str, Any] = {"sizes": (1, 4), "contexts": (32,), "cache": folder / "costs"}
    first = StaticGraphEngine(tiny, **options)
    first.warm_up(20)
    second = StaticGraphEngine(tiny, **options)
    assert second.costs(32).seconds == first.costs(32).seconds
    assert set(first.costs(32).seconds) == {1, 4}


def test_settings_that_make_no_sense_are_refused(folder: Path, tiny: Path) -> None:
    for options, said in (
        ({"groups": 0}, "0 layer groups"),
        ({"sizes": ()}, "sizes"),
        ({"sizes": (0, 16)}, "sizes"),
        ({"contexts": (1,)}, "contexts"),
        ({"windows": {64: (64,)}}, "windows"),
        ({"windows": {64: (0,)}}, "windows"),
    ):
        with pytest.raises(ValueError, match=said):
            StaticGraphEngine(tiny, cache=folder / "cache", **options)  # type: ignore[arg-type]
    write_tiny_gguf(folder / "phi.gguf", arch="phi3")
    with pytest.raises(UnsupportedModel, match="phi3"):
        StaticGraphEngine(folder / "phi.gguf", cache=folder / "cache")


def test_a_provider_that_is_missing_is_named_with_those_there_are() -> None:
    missing = next(p for p in ("QNN", "CoreML") if f"{p}ExecutionProvider" not in available())
    with pytest.raises(ProviderUnavailable, match=rf"{missing}ExecutionProvider.*CPUExecutionProvider"):
        OnnxRuntime(missing)
    assert OnnxRuntime("CPUExecutionProvider").name == OnnxRuntime().name


def available() -> list[str]:
    return list(onnxruntime.get_available_providers())


@pytest.fixture(scope="module")
def real(smollm2: Path) -> StaticGraphEngine:
    return StaticGraphEngine(smollm2, sizes=(1, 64, 256), contexts=(1024,), groups=3)


def test_smollm2_equals_the_reference_over_512_tokens_of_text(
    real: StaticGraphEngine, smollm2: Path, smollm2_reference: Reference, pydoc_text: str
) -> None:
    tokens = np.array(Tokenizer.from_gguf(smollm2).encode(pydoc_text[:4000])[:512])
    assert len(tokens) == 512
    kv, places = real.allocate(600), np.arange(512, dtype=np.int32)
    calls = [
        Call(size, tokens[part].astype(np.int32), places[part], places[part])
        for size, part in ((256, slice(0, 256)), (256, slice(256, 448)), (64, slice(448, 512)))
    ]
    logits = real.run(calls, kv, logits_of=range(512))
    chosen = list(itertools.islice(real.decode(logits[-1], kv, 512), 64))
    expected = smollm2_reference.logits([*tokens, *chosen])
    assert np.abs(logits - expected[:512]).max() <= TOLERANCE
    assert chosen == expected[511:-1].argmax(axis=1).tolist(), (
        "each is the reference's choice after the others"
    )


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux")
def test_a_further_graph_of_a_real_model_costs_no_further_weights(real: StaticGraphEngine) -> None:
    kv = real.allocate(600)
    call = Call(1, *(np.zeros(1, np.int32),) * 3)
    real.run([call], kv, logits_of=[0])
    before = private_memory()
    real.run([Call(64, call.token_ids, call.positions, call.slots)], kv)
    assert private_memory() - before < 100_000_000, "the model's matrices are 420 MB"


def private_memory() -> int:
    """Bytes that only this process holds."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))
