"""Layers that attend within a window or a chunk: only what can be read is loaded, and nothing changes for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.errors import InvalidRequestError
from kvstore.layout import LayerLayout, Layout
from kvstore.pipeline.rope import Rope
from kvstore.store import KVStore, open_store
from tests.known_kv import Arrays, empty, identity, known_kv, load, prompt, put, small_profile

_ROPE = Rope(8, 1e4, 8)
LAYOUT = Layout(
    (
        LayerLayout(kv_heads=2, head_dim=8, attention="sliding", window=20, rope=_ROPE),
        LayerLayout(kv_heads=2, head_dim=8, attention="sliding", window=7, rope=_ROPE),
        LayerLayout(kv_heads=2, head_dim=8, rope=_ROPE),
        LayerLayout(kv_heads=1, head_dim=8, attention="chunked", window=24, rope=_ROPE),
    ),
    "float32",
)
OWNER = identity("a", layout=LAYOUT)


def opened(path: Path | None) -> KVStore:
    return open_store(path, identity=OWNER, profile=small_profile(layout=LAYOUT, frame_bytes=1024))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with opened(tmp_path / "kv") as store:
        yield store
        store.check()


def readable(layer: LayerLayout, position: int) -> range:
    """The oracle: the positions that a token reads, itself included."""
    if layer.attention == "sliding":
        assert layer.window is not None
        return range(max(0, position - layer.window + 1), position + 1)
    if layer.attention == "chunked":
        assert layer.window is not None
        return range(position // layer.window * layer.window, position + 1)
    return range(position + 1)


def attended(buffer: Arrays, number: int, position: int) -> NDArray[np.float32]:
    """What a token at `position` with a query of ones takes from one layer: [kv_heads, head_dim]."""
    keys, values = buffer.keys[number], buffer.values[number]
    assert keys is not None
    assert values is not None
    seen = readable(LAYOUT.layers[number], position)
    rows = slice(seen.start, position)  # it adds its own
    scores = keys[:, rows].sum(axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, initial=0, keepdims=True))
    taken: NDArray[np.float32] = np.einsum("hn,hnd->hd", weights, values[:, rows])
    return taken


@settings(max_examples=60, deadline=None)
@given(
    held=st.integers(1, 90),
    moved=st.integers(32, 60),
    gap=st.integers(0, 30),
    first=st.integers(0, 40),
)
def test_every_later_token_sees_what_it_would_see_of_a_whole_load(
    held: int, moved: int, gap: int, first: int
) -> None:
    """A prefix, new tokens and a moved run behind them; the first computed token lies anywhere behind the prefix."""
    system, chunk = prompt(1, held), prompt(2, moved)
    asked = np.concatenate([system, prompt(3, gap), chunk, prompt(4, 3)])
    with opened(None) as store:
        put(store, system)
        put(store, np.concatenate([prompt(5, 40), chunk]))
        whole, partial = empty(len(asked), LAYOUT), empty(len(asked), LAYOUT)
        for array in partial.each():
            array.fill(np.nan)
        with store.lease(store.lookup(asked, moved=True)) as lease:
            begin = lease.length + min(first, gap) if gap else lease.length
            list(lease.layer_groups(whole))
            list(lease.layer_groups(partial, computed_from=begin))
            covered = {at for run in lease.runs for at in range(run.target, run.target + run.length)}
            for at in range(lease.length, len(asked)):  # what the engine computes is in both
                if at not in covered:
                    for one, other in zip(whole.each(), partial.each(), strict=True):
                        one[:, at] = other[:, at] = 1.0
        for number in range(len(LAYOUT.layers)):
            for at in range(begin, len(asked)):
                np.testing.assert_array_equal(attended(whole, number, at), attended(partial, number, at))


@pytest.mark.parametrize("where", ["memory", "flash"])
def test_exactly_what_is_readable_is_written(store: KVStore, where: str) -> None:
    tokens = prompt(1, 100)
    put(store, tokens)
    if where == "flash":
        store.flush()
        store.demote(store.lookup(tokens))
    buffer, untouched, right = empty(100, LAYOUT), empty(100, LAYOUT), known_kv(tokens, OWNER)
    with store.lease(store.lookup(tokens)) as lease:
        list(lease.layer_groups(buffer, computed_from=100))
    for number, layer in enumerate(LAYOUT.layers):
        begin = readable(layer, 100).start
        for have, want, before in (
            (buffer.keys[number], right.keys[number], untouched.keys[number]),
            (buffer.values[number], right.values[number], untouched.values[number]),
        ):
            assert have is not None
            assert want is not None
            assert before is not None
            assert have[:, begin:].tobytes() == want[:, begin:].tobytes()
            assert have[:, :begin].tobytes() == before[:, :begin].tobytes()


def test_flash_is_spared_what_nobody_reads_until_a_block_is_used_again(tmp_path: Path) -> None:
    tokens = prompt(1, 160)
    with opened(tmp_path / "kv") as store:
        put(store, tokens)
    read = []
    with opened(tmp_path / "kv") as store:
        for _ in range(3):
            with store.lease(store.lookup(tokens)) as lease:
                list(lease.layer_groups(empty(160, LAYOUT), computed_from=160))
            read.append(lease.bytes_read)
        assert load(store, tokens) == 160
        store.check()
    with opened(tmp_path / "other") as store:
        put(store, tokens)
    with opened(tmp_path / "other") as store, store.lease(store.lookup(tokens)) as lease:
        list(lease.layer_groups(empty(160, LAYOUT)))
        everything = lease.bytes_read
    assert read[0] < 0.6 * everything
    assert read[2] == 0, "from the second use on memory has it"


def test_a_put_behind_a_partial_load_keeps_what_is_held(store: KVStore) -> None:
    """Cells that were never loaded stored as if they were KV."""
    head, tokens = prompt(1, 43), np.concatenate([prompt(1, 43), prompt(2, 30)])
    put(store, head)
    right = known_kv(tokens, OWNER)
    buffer = empty(73, LAYOUT)
    with store.lease(store.lookup(tokens)) as lease:
        list(lease.layer_groups(buffer, computed_from=lease.length))
    for array, source in zip(buffer.each(), right.each(), strict=True):
        array[:, 43:73] = source[:, 43:]
    assert store.put(tokens, buffer.rows(slice(43, None)), start=43).stored == 30
    assert load(store, tokens) == 73


def test_a_position_that_is_none(store: KVStore) -> None:
    put(store, prompt(1, 40))
    with store.lease(store.lookup(prompt(1, 40))) as lease, pytest.raises(InvalidRequestError, match="-1"):
        lease.layer_groups(empty(40, LAYOUT), computed_from=-1)
