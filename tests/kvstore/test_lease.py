"""Leases: what they name stays put, loads right in every form, and is let go exactly once."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.errors import BufferTooSmallError, InvalidRequestError, LayoutMismatchError, LeaseReleasedError
from kvstore.layout import LayerLayout, Layout
from kvstore.pipeline.rope import Rope
from kvstore.store import KVStore, open_store
from tests.known_kv import (
    LAYOUT,
    Arrays,
    empty,
    identity,
    known_kv,
    load,
    matches,
    prompt,
    put,
    quiet,
    small_profile,
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as opened:
        yield opened
        quiet(opened)
        stats = opened.stats()
        assert (stats.hot.leased, stats.warm.leased, stats.cold.leased) == (0, 0, 0), "a lease was leaked"
        opened.check()


def on_flash_only(store: KVStore, tokens: np.ndarray) -> None:
    put(store, tokens)
    store.flush()
    store.demote(store.lookup(tokens))
    stats = store.stats()
    assert stats.hot.blocks + stats.warm.blocks == 0


# -- loading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["memory", "flash"])
def test_groups_come_in_order_and_each_is_complete(store: KVStore, where: str) -> None:
    tokens = prompt(1, 50)
    on_flash_only(store, tokens)
    if where == "memory":
        store.promote(store.lookup(tokens))
    right = known_kv(tokens, store.identity)
    buffer = empty(50)
    with store.lease(store.lookup(tokens)) as lease:
        seen = []
        for group in lease.layer_groups(buffer):
            assert group.tokens == 50
            for layer in group.layers:
                for have, want in ((buffer.keys, right.keys), (buffer.values, right.values)):
                    assert np.array_equal(have[layer], want[layer])  # type: ignore[arg-type]
            seen.append((group.number, group.layers))
    assert [number for number, _ in seen] == [0, 1]
    assert [layer for _, layers in seen for layer in layers] == [0, 1]


@pytest.mark.parametrize("where", ["memory", "flash"])
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 49])
def test_fewer_tokens_than_are_leased(store: KVStore, length: int, where: str) -> None:
    tokens = prompt(1, 50)
    on_flash_only(store, tokens)
    if where == "memory":
        store.promote(store.lookup(tokens))
    buffer = empty(50)
    untouched = empty(50)
    with store.lease(store.lookup(tokens)) as lease:
        assert lease.load_into(buffer, length=length) == length
        assert lease.length == 50
    assert matches(buffer, tokens, store.identity, length)
    for have, want in zip(buffer.each(), untouched.each(), strict=True):
        assert have[:, length:].tobytes() == want[:, length:].tobytes(), "cells past the prefix were written"


@pytest.mark.parametrize("where", ["memory", "flash"])
def test_slots_place_each_token(store: KVStore, where: str) -> None:
    tokens = prompt(1, 50)
    on_flash_only(store, tokens)
    if where == "memory":
        store.promote(store.lookup(tokens))
    slots = np.random.default_rng(1).permutation(80)[:50].astype(np.int64)
    others = np.setdiff1d(np.arange(80), slots)
    buffer = empty(80)
    with store.lease(store.lookup(tokens)) as lease:
        assert lease.load_into(buffer, slots=slots) == 50
    assert matches(buffer.rows(slots), tokens, store.identity, 50)
    for have, want in zip(buffer.each(), empty(80).each(), strict=True):
        assert have[:, others].tobytes() == want[:, others].tobytes(), "slots of others were written"


@pytest.mark.parametrize("slotted", [False, True])
def test_arrays_of_any_strides(store: KVStore, slotted: bool) -> None:
    tokens = prompt(1, 50)
    on_flash_only(store, tokens)
    slots = np.random.default_rng(1).permutation(64)[:50].astype(np.int64)
    wide = [np.full((64, 2, 3, 8), 7, np.float32) for _ in range(4)]  # an engine that keeps [slot, head, ...]
    turned = [array[:, :, 1].transpose(1, 0, 2) for array in wide]
    buffer = Arrays(list(turned[:2]), list(turned[2:]))
    with store.lease(store.lookup(tokens)) as lease:
        assert lease.load_into(buffer, slots=slots if slotted else None) == 50
    assert matches(buffer.rows(slots) if slotted else buffer, tokens, store.identity, 50)
    assert all((array[:, :, (0, 2)] == 7).all() for array in wide)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_layers_of_different_shapes_and_dtypes(tmp_path: Path, dtype: str) -> None:
    """Layers that share another's KV or hold none, MLA with keys and values of unequal width, NoPE."""
    rope = Rope(8, 1e4, 8)
    layout = Layout(
        (
            LayerLayout(kv_heads=2, head_dim=8, rope=rope),
            LayerLayout(attention="shared"),
            LayerLayout(kv_heads=1, head_dim=8, value_head_dim=4, rope=rope),
            LayerLayout(kv_heads=3, head_dim=16),
            LayerLayout(kv_heads=2, head_dim=8, attention="sliding", window=8, rope=rope),
        ),
        dtype,  # type: ignore[arg-type]
    )
    owner = identity("a", layout=layout)
    tokens = prompt(1, 50)
    for _ in range(2):
        with open_store(tmp_path / dtype, identity=owner, profile=small_profile(layout=layout)) as store:
            put(store, tokens)
            assert load(store, tokens) == 50
            store.demote(store.lookup(tokens))
            assert load(store, tokens) == 50


def test_one_lease_loads_as_often_as_it_likes(store: KVStore) -> None:
    tokens = prompt(1, 50)
    on_flash_only(store, tokens)
    with store.lease(store.lookup(tokens)) as lease:
        for _ in range(3):
            buffer = empty(50)
            assert lease.load_into(buffer) == 50
            assert matches(buffer, tokens, store.identity, 50)
        read = lease.bytes_read
    assert 0 < read < 2 * LAYOUT.block_bytes(64), "flash was read once, later loads came from memory"
    assert store.stats().counts["bytes_read"] == read


def test_loading_without_room_in_warm_memory(tmp_path: Path) -> None:
    """Everything in warm memory is leased: blocks from flash still load, they just do not stay."""
    profile = small_profile(warm_bytes=4 * 4096, hot_bytes=0)
    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        on_flash_only(store, prompt(1, 60))
        put(store, prompt(2, 60))
        with store.lease(store.lookup(prompt(2, 60))):
            assert store.stats().warm.free == 0
            assert load(store, prompt(1, 60)) == 60
            assert store.stats().warm.blocks == 4
            assert load(store, prompt(2, 60)) == 60


def test_tokens_by_tier_adds_up(store: KVStore) -> None:
    tokens = prompt(1, 50)
    on_flash_only(store, tokens)
    put(store, np.concatenate([tokens[:32], prompt(2, 40)]))
    asked = np.concatenate([tokens[:32], prompt(2, 20)])
    with store.lease(store.lookup(asked)) as lease:
        assert sum(lease.tokens_by_tier().values()) == lease.length == 52
        assert lease.tokens_by_tier()["cold"] == 32


# -- holding -----------------------------------------------------------------------------------------


def test_leased_blocks_are_neither_moved_nor_dropped(tmp_path: Path) -> None:
    """Blocks evicted while a request still used them."""
    profile = small_profile(hot_bytes=4 * 4096, warm_bytes=8 * 4096, cold_bytes=450 * 1024)
    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        tokens = prompt(0, 60)
        put(store, tokens)
        store.flush()
        load(store, tokens)
        with store.lease(store.lookup(tokens)) as lease:
            places = [(block.tier, block.memory and block.memory.extent) for block in lease.blocks]
            for seed in range(1, 60):
                put(store, prompt(seed, 60), wait=10)
                load(store, prompt(seed, 60))
            store.flush()
            assert store.stats().counts["evicted_cold"] > 0
            assert [(block.tier, block.memory and block.memory.extent) for block in lease.blocks] == places
            buffer = empty(60)
            assert lease.load_into(buffer) == 60
            assert matches(buffer, tokens, store.identity, 60)
        store.check()


@pytest.mark.parametrize("where", ["memory", "flash"])
def test_what_is_invalidated_under_a_lease_still_loads_and_then_is_gone(tmp_path: Path, where: str) -> None:
    tokens = prompt(1, 60)
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        on_flash_only(store, tokens)
        if where == "memory":
            store.promote(store.lookup(tokens))
        lease = store.lease(store.lookup(tokens))
        assert store.invalidate(everything=True) == 4
        assert store.lookup(tokens).length == 0
        for _ in range(2):
            buffer = empty(60)
            assert lease.load_into(buffer) == 60
            assert matches(buffer, tokens, store.identity, 60)
        lease.release()
        stats = store.stats()
        assert (stats.hot.used, stats.warm.used, stats.cold.blocks) == (0, 0, 0)
        assert not list((tmp_path / "kv" / "blocks").iterdir())
        store.check()
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        assert load(store, tokens) == 0


@pytest.mark.parametrize("where", ["memory", "flash"])
def test_what_is_put_again_under_a_lease_of_what_was_invalidated(tmp_path: Path, where: str) -> None:
    """The end of the old lease deleted the record of the new block, which has the same name."""
    tokens = prompt(1, 60)
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        on_flash_only(store, tokens)
        if where == "memory":
            store.promote(store.lookup(tokens))
        lease = store.lease(store.lookup(tokens))
        store.invalidate(everything=True)
        assert put(store, tokens).stored == 60
        store.flush()
        buffer = empty(60)
        assert lease.load_into(buffer) == 60
        assert matches(buffer, tokens, store.identity, 60)
        lease.release()
        store.demote(store.lookup(tokens))
        assert load(store, tokens) == 60
        store.check()
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        assert load(store, tokens) == 60
        assert store.stats().bad_records == {}


def test_a_tail_replaced_under_a_lease_still_loads(store: KVStore) -> None:
    tokens = prompt(1, 60)
    put(store, tokens[:40])
    with store.lease(store.lookup(tokens)) as lease:
        put(store, tokens)
        buffer = empty(40)
        assert lease.load_into(buffer) == 40
        assert matches(buffer, tokens, store.identity, 40)
    assert load(store, tokens) == 60


def test_what_vanished_since_the_look_up_makes_the_lease_shorter(store: KVStore) -> None:
    tokens = prompt(1, 60)
    put(store, tokens)
    match = store.lookup(tokens)
    store.invalidate(prefix=tokens[:20])
    with store.lease(match) as lease:
        assert lease.length == 16
        assert lease.load_into(empty(60)) == 16
    assert store.stats().misses == {"evicted between look-up and lease": 44}
    store.invalidate(everything=True)
    with store.lease(match) as lease:
        assert lease.length == 0


def test_many_leases_of_one_block(store: KVStore) -> None:
    tokens = prompt(1, 20)
    put(store, tokens)
    leases = [store.lease(store.lookup(tokens)) for _ in range(50)]
    assert store.stats().warm.leased == 2
    for lease in leases[1:]:
        lease.release()
    assert store.stats().warm.leased == 2
    leases[0].release()
    quiet(store)  # a move to hot memory takes a lease of its own
    stats = store.stats()
    assert stats.warm.leased + stats.hot.leased == 0


# -- ending ------------------------------------------------------------------------------------------


def test_a_lease_is_released_once(store: KVStore) -> None:
    """A second unpin that made the count negative, and was patched to zero."""
    put(store, prompt(1, 20))
    lease = store.lease(store.lookup(prompt(1, 20)))
    other = store.lease(store.lookup(prompt(1, 20)))
    lease.release()
    with pytest.raises(LeaseReleasedError):
        lease.release()
    with pytest.raises(LeaseReleasedError):
        lease.load_into(empty(20))
    with pytest.raises(LeaseReleasedError):
        lease.layer_groups(empty(20))
    with pytest.raises(LeaseReleasedError):
        lease.warm_up()
    stats = store.stats()
    assert stats.warm.leased + stats.hot.leased == 2, "the other lease still holds"
    other.release()


def test_one_of_many_threads_releases(store: KVStore) -> None:
    put(store, prompt(1, 20))
    for _ in range(30):
        lease = store.lease(store.lookup(prompt(1, 20)))
        start = threading.Barrier(4)
        refused: list[int] = []

        def release(lease=lease, start=start, refused=refused) -> None:  # type: ignore[no-untyped-def]
            start.wait()
            try:
                lease.release()
            except LeaseReleasedError:
                refused.append(1)

        threads = [threading.Thread(target=release) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(refused) == 3


def test_leaving_the_block_releases_even_after_an_error(store: KVStore) -> None:
    put(store, prompt(1, 20))
    with pytest.raises(ZeroDivisionError), store.lease(store.lookup(prompt(1, 20))):
        1 / 0  # noqa: B018
    with store.lease(store.lookup(prompt(1, 20))) as lease:
        lease.release()


def _used_after_demotion(store: KVStore, tokens: NDArray[np.int32]) -> int:
    store.demote(store.lookup(tokens))
    stats = store.stats()
    return stats.hot.used + stats.warm.used


@pytest.mark.parametrize("where", ["memory", "flash"])
def test_loading_may_be_broken_off_at_any_group(store: KVStore, where: str) -> None:
    """Staging memory of a broken-off load that nobody gave back."""
    tokens = prompt(1, 60)
    on_flash_only(store, tokens)
    if where == "memory":
        store.promote(store.lookup(tokens))
    for groups in (0, 1, 2):
        with store.lease(store.lookup(tokens)) as lease:
            loading = lease.layer_groups(empty(60))
            for _ in range(groups):
                next(loading)
            loading.close()  # type: ignore[attr-defined]
        store.check()
        deadline = time.monotonic() + 20
        while _used_after_demotion(store, tokens) and time.monotonic() < deadline:
            time.sleep(0.01)  # a daemon's threads may still be at a tile, or move a block
        assert _used_after_demotion(store, tokens) == 0
    assert load(store, tokens) == 60


def test_a_lease_released_while_loading_yields_nothing_more(store: KVStore) -> None:
    """What is no longer held may be overwritten: it must not be handed out as KV of this prompt."""
    tokens = prompt(1, 60)
    put(store, tokens)
    lease = store.lease(store.lookup(tokens))
    loading = lease.layer_groups(empty(60))
    next(loading)
    lease.release()
    with pytest.raises(LeaseReleasedError):
        next(loading)


# -- bad input ---------------------------------------------------------------------------------------


def test_a_buffer_that_does_not_fit_is_refused_and_untouched(store: KVStore) -> None:
    tokens = prompt(1, 40)
    put(store, tokens)
    before = store.stats()
    read_only = empty(40)
    for array in read_only.each():
        array.flags.writeable = False
    no_array = empty(40)
    no_array.keys[1] = None
    listed = empty(40)
    listed.values[0] = [[1.0]]  # type: ignore[call-overload]
    narrow = empty(40)
    narrow.values[1] = np.zeros((2, 40, 7), np.float32)
    fewer_heads = empty(40)
    fewer_heads.keys[0] = np.zeros((1, 40, 8), np.float32)
    flat = empty(40)
    flat.keys[0] = np.zeros((2, 320), np.float32)
    half = empty(40)
    half.keys[0] = np.zeros((2, 40, 8), np.float16)
    more_layers = empty(40)
    more_layers.keys.append(more_layers.keys[0])
    short = empty(40)
    short.values[1] = np.zeros((2, 39, 8), np.float32)
    with store.lease(store.lookup(tokens)) as lease:
        for buffer, error, text in (
            (read_only, LayoutMismatchError, "read-only"),
            (no_array, LayoutMismatchError, "keys of layer 1 is None"),
            (listed, LayoutMismatchError, "values of layer 0"),
            (narrow, LayoutMismatchError, r"values of layer 1 has shape \(2, 40, 7\)"),
            (fewer_heads, LayoutMismatchError, "keys of layer 0"),
            (flat, LayoutMismatchError, "keys of layer 0"),
            (half, LayoutMismatchError, "float16"),
            (more_layers, LayoutMismatchError, "3 layers, the layout has 2"),
            (short, BufferTooSmallError, "needs 40 tokens, values of layer 1 holds 39"),
            (empty(39), BufferTooSmallError, "needs 40 tokens, keys of layer 0 holds 39"),
        ):
            copies = [array.copy() for array in buffer.each() if isinstance(array, np.ndarray)]
            with pytest.raises(error, match=text):
                lease.load_into(buffer)
            for array, copy in zip(
                (array for array in buffer.each() if isinstance(array, np.ndarray)), copies, strict=True
            ):
                assert array.tobytes() == copy.tobytes()
        for length in (41, -1):
            with pytest.raises((BufferTooSmallError, InvalidRequestError)):
                lease.load_into(empty(40), length=length)
        assert lease.load_into(empty(40)) == 40
    after = store.stats()
    assert (after.hot.used + after.warm.used, after.cold.blocks, after.misses, after.refusals) == (
        before.hot.used + before.warm.used,
        after.cold.blocks,
        before.misses,
        before.refusals,
    )


@pytest.mark.parametrize(
    ("slots", "error", "text"),
    [
        (np.arange(39), BufferTooSmallError, "needs slots for 40 tokens, got 39"),
        (np.arange(-1, 39), LayoutMismatchError, "negative"),
        (np.arange(1, 41), BufferTooSmallError, "needs slot 40, keys of layer 0 holds 40"),
        (np.arange(40.0), LayoutMismatchError, "integers"),
        (np.arange(40).reshape(2, 20), LayoutMismatchError, "one-dimensional"),
        (list(range(40)), LayoutMismatchError, "one-dimensional array"),
        (np.full(40, 2**40), BufferTooSmallError, "needs slot"),
    ],
)
def test_slots_that_do_not_fit_are_refused(
    store: KVStore, slots: np.ndarray, error: type[Exception], text: str
) -> None:
    tokens = prompt(1, 40)
    put(store, tokens)
    with store.lease(store.lookup(tokens)) as lease, pytest.raises(error, match=text):
        lease.load_into(empty(40), slots=slots)
    assert load(store, tokens) == 40
    other = prompt(2, 40)
    with pytest.raises(error, match=text):
        store.put(other, known_kv(other, store.identity), slots=slots)
    assert store.lookup(other).length == 0


def test_a_lease_that_nobody_released_gives_back_what_it_held(store: KVStore) -> None:
    """Blocks pinned for ever by a request that was dropped half-way."""
    tokens = prompt(1, 50)
    put(store, tokens)
    quiet(store)
    lease = store.lease(store.lookup(tokens))
    groups = lease.layer_groups(empty(50))
    next(groups)
    assert store.invalidate(prefix=tokens[:1]) == 4
    assert store.stats().warm.blocks == 4
    del lease, groups
    gc.collect()
    stats = store.stats()
    assert (stats.warm.blocks, stats.hot.leased, stats.warm.leased, stats.cold.leased) == (0, 0, 0, 0)
    assert stats.counts["leases_abandoned"] == 1
    store.check()


def test_a_lease_that_was_released_is_not_abandoned(store: KVStore) -> None:
    put(store, prompt(1, 50))
    store.lease(store.lookup(prompt(1, 50))).release()
    gc.collect()
    assert "leases_abandoned" not in store.stats().counts


def test_an_abandoned_lease_makes_room_for_the_next_put() -> None:
    profile = small_profile(warm_bytes=4 * 4096, hot_bytes=0)
    with open_store(None, identity=identity(), profile=profile) as store:
        put(store, prompt(1, 64))
        lease = store.lease(store.lookup(prompt(1, 64)))
        assert put(store, prompt(2, 64)).stored == 0
        del lease
        gc.collect()
        assert put(store, prompt(2, 64)).stored == 64
