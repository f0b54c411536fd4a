"""Moved runs: found anywhere in a prompt, turned to where they stand, never mixed up with prefixes or identities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.identity import Identity
from kvstore.layout import LayerLayout, Layout
from kvstore.moved import SHORTEST
from kvstore.pipeline.rope import Linear, Llama3, LongRope, Rope, Yarn
from kvstore.store import KVStore, open_store
from tests.known_kv import Arrays, empty, identity, known_kv, put, small_profile

Tokens = NDArray[np.int32]


def some(seed: int, length: int, low: int = 0) -> Tokens:
    return np.random.default_rng(seed).integers(low, low + 1000, length).astype(np.int32)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as opened:
        yield opened
        opened.check()


def kv_of(tokens: Tokens, owner: Identity | None = None) -> Arrays:
    return known_kv(tokens, owner or identity())


def turned(key: NDArray[np.float32], rope: Rope, shift: int) -> NDArray[np.float64]:
    """The oracle: rotation in fp64, pair by pair."""
    out = key.astype(np.float64)
    angles = shift * rope.inverse_frequencies()
    half = rope.rotary_dim // 2
    first = np.arange(half) if rope.pairing == "half" else np.arange(0, rope.rotary_dim, 2)
    second = first + (half if rope.pairing == "half" else 1)
    a, b = out[..., first].copy(), out[..., second].copy()
    out[..., first] = a * np.cos(angles) - b * np.sin(angles)
    out[..., second] = b * np.cos(angles) + a * np.sin(angles)
    return out


def assert_moved(got: Arrays, source: Arrays, layout: Layout, *, at: int, was: int, length: int) -> None:
    for number, layer in enumerate(layout.layers):
        keys, values = got.keys[number], got.values[number]
        old_keys, old_values = source.keys[number], source.values[number]
        assert keys is not None
        assert values is not None
        assert old_keys is not None
        assert old_values is not None
        np.testing.assert_array_equal(values[:, at : at + length], old_values[:, was : was + length])
        expected = old_keys[:, was : was + length]
        if layer.rope is not None:
            expected = turned(expected, layer.rope, at - was)
        np.testing.assert_allclose(keys[:, at : at + length], expected, rtol=2e-6, atol=2e-6)


def test_a_chunk_is_found_at_a_new_place_and_turned(store: KVStore) -> None:
    """ "Non-prefix" look-up that is prefix only; chunks joined without rotation; V changed by a move."""
    chunk = some(1, 100)
    first = np.concatenate([some(2, 60), chunk, some(3, 20)])
    put(store, first)
    second = np.concatenate([some(4, 77), chunk, some(5, 30)])
    match = store.lookup(second, moved=True)
    assert match.length == 0
    (run,) = match.runs
    assert (run.target, run.length, run.shift) == (77, 100, 17)
    buffer = empty(len(second))
    with store.lease(match) as lease:
        groups = list(lease.layer_groups(buffer))
    assert groups[-1].runs == (run,)
    assert_moved(buffer, kv_of(first), store.layout, at=77, was=60, length=100)


def test_prefix_and_moved_runs_come_together(store: KVStore) -> None:
    system, chunk = some(1, 50), some(2, 64)
    first = np.concatenate([system, some(3, 40), chunk])
    put(store, first)
    second = np.concatenate([system, some(4, 7), chunk, some(5, 9)])
    match = store.lookup(second, moved=True)
    assert match.length == 50
    assert [(run.target, run.length) for run in match.runs] == [(57, 64)]
    buffer = empty(len(second))
    with store.lease(match) as lease:
        assert [group.tokens for group in lease.layer_groups(buffer)] == [50, 50]
    source = kv_of(first)
    for got, held in zip(buffer.each(), source.each(), strict=True):
        np.testing.assert_array_equal(got[:, :50], held[:, :50])
    assert_moved(buffer, source, store.layout, at=57, was=90, length=64)


def test_reuse_leaves_the_stored_bytes_as_they_were(store: KVStore) -> None:
    """Drift: keys turned from turned keys. Up and down, and at the place of origin the bits are the first ones."""
    chunk = some(1, 48)
    first = np.concatenate([some(2, 33), chunk])
    put(store, first)
    random = np.random.default_rng(0)
    for _ in range(100):
        at = int(random.integers(1, 300))
        prompt = np.concatenate([some(int(random.integers(1 << 30)), at, low=5000), chunk])
        buffer = empty(len(prompt))
        with store.lease(store.lookup(prompt, moved=True)) as lease:
            list(lease.layer_groups(buffer))
        assert_moved(buffer, kv_of(first), store.layout, at=at, was=33, length=48)
    buffer = empty(len(first))
    with store.lease(store.lookup(first)) as lease:
        lease.load_into(buffer)
    for got, held in zip(buffer.each(), kv_of(first).each(), strict=True):
        np.testing.assert_array_equal(got[:, : len(first)], held)


@pytest.mark.parametrize("where", ["warm", "cold", "hot"])
def test_moved_from_every_tier_into_chosen_slots(store: KVStore, where: str) -> None:
    chunk = some(1, 70)
    first = np.concatenate([some(2, 20), chunk])
    put(store, first)
    store.flush()
    if where == "cold":
        store.demote(store.lookup(first))
    elif where == "hot":
        store.promote(store.lookup(first))
    prompt = np.concatenate([some(3, 41), chunk])
    slots = np.random.default_rng(1).permutation(200)[: len(prompt)].astype(np.int64)
    buffer = empty(200)
    with store.lease(store.lookup(prompt, moved=True)) as lease:
        list(lease.layer_groups(buffer, slots))
    in_order = buffer.rows(slots)
    assert_moved(in_order, kv_of(first), store.layout, at=41, was=20, length=70)


ROPES = {
    "half": Rope(8, 1e4, 8),
    "interleaved": Rope(8, 1e4, 8, "interleaved"),
    "partial": Rope(8, 1e4, 4),
    "linear": Rope(8, 1e4, 8, scaling=Linear(4.0)),
    "llama3": Rope(8, 5e5, 8, scaling=Llama3(8.0, 1.0, 4.0, 64)),
    "yarn": Rope(8, 1e4, 8, scaling=Yarn(4.0, 64)),
    "longrope": Rope(
        8, 1e4, 8, scaling=LongRope((1.0, 1.1, 1.2, 1.3), (1.5, 2.0, 3.0, 4.0), 64, 1.2, "long")
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_every_rope_kind_and_nope_layers(tmp_path: Path, kind: str) -> None:
    """RoPE scaling ignored; one geometry assumed for all layers."""
    rope, other = ROPES[kind], Rope(8, 1e6, 8)
    layers = tuple(LayerLayout(kv_heads=2, head_dim=8, rope=each) for each in (rope, None, other))
    layout = Layout(layers, "float32")
    chunk = some(1, 40)
    first = np.concatenate([some(2, 30), chunk])
    prompt = np.concatenate([some(3, 171), chunk])
    who = identity(layout=layout)
    with open_store(tmp_path / "kv", identity=who, profile=small_profile(layout=layout)) as store:
        put(store, first)
        buffer = empty(len(prompt), layout)
        with store.lease(store.lookup(prompt, moved=True)) as lease:
            list(lease.layer_groups(buffer))
        assert_moved(buffer, kv_of(first, who), layout, at=171, was=30, length=40)


def test_a_layout_that_cannot_shift_finds_no_moved_runs() -> None:
    """M-RoPE shifted as if it had one axis: refused with a reason, prefixes go on working."""
    layout = Layout.uniform(
        layers=2, kv_heads=2, head_dim=8, rope=Rope(8, 1e4, 8), dtype="float32", positions="mrope"
    )
    first = some(1, 90)
    with open_store(None, identity=identity(layout=layout), profile=small_profile()) as store:
        put(store, first)
        assert "M-RoPE" in (store.shift_refused or "")
        assert store.lookup(np.concatenate([some(2, 9), first]), moved=True).runs == ()
        assert store.lookup(first, moved=True).length == 90


def test_a_copy_captured_at_the_start_comes_last(store: KVStore) -> None:
    chunk = some(1, 64)
    put(store, chunk)
    put(store, np.concatenate([some(2, 48), chunk]))
    (run,) = store.lookup(np.concatenate([some(3, 5), chunk]), moved=True).runs
    assert run.shift == 5 - 48


def test_a_copy_with_the_same_words_before_it_comes_first(store: KVStore) -> None:
    chunk, before = some(1, 64), some(9, 20)
    put(store, np.concatenate([some(2, 48), chunk]))
    put(store, np.concatenate([some(3, 60), before, chunk]))
    put(store, np.concatenate([some(4, 52), chunk]))
    (run,) = store.lookup(np.concatenate([some(5, 30), before, chunk]), moved=True).runs
    assert (run.target, run.shift) == (30, 30 - 60)


def test_inexact_blocks_serve_as_moved_runs_never_as_a_prefix(store: KVStore) -> None:
    prompt = some(1, 120)
    kv = kv_of(prompt)
    assert store.put_inexact(prompt, kv, [(0, 60), (70, 120)]).stored == 110
    assert store.lookup(prompt).length == 0
    shifted = np.concatenate([some(2, 17), prompt])
    runs = store.lookup(shifted, moved=True).runs
    assert [(run.target, run.length) for run in runs] == [(17, 60), (87, 50)]
    put(store, prompt)
    assert store.lookup(prompt).length == 120  # an exact block of the same tokens is another block


def test_inexact_blocks_survive_a_restart_as_what_they_are(tmp_path: Path) -> None:
    prompt = some(1, 96)
    for _ in range(2):
        with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
            store.put_inexact(prompt, kv_of(prompt), [(0, 96)])
            assert store.lookup(prompt).length == 0
            assert store.lookup(np.concatenate([some(2, 3), prompt]), moved=True).runs[0].length == 96


def test_damage_in_a_moved_run_takes_that_run_alone(tmp_path: Path) -> None:
    one, two = some(1, 48), some(2, 48)
    path = tmp_path / "kv"
    with open_store(path, identity=identity(), profile=small_profile()) as store:
        put(store, np.concatenate([some(3, 32), one]))
        put(store, np.concatenate([some(4, 32), two]))
        prompt = np.concatenate([some(5, 11), one, two])
        store.flush()
        match = store.lookup(prompt, moved=True)
        assert [run.length for run in match.runs] == [48, 48]
        victim = match.runs[0].pieces[1].block
        for run in match.runs:
            for piece in run.pieces:
                assert store.demote(store.lookup(piece.block.tokens)) >= 0
    record = path / "blocks" / victim.key[:16].hex()
    content = bytearray(record.read_bytes())
    content[-5] ^= 4
    record.write_bytes(content)
    with open_store(path, identity=identity(), profile=small_profile()) as store:
        match = store.lookup(prompt, moved=True)
        buffer = empty(len(prompt))
        with store.lease(match) as lease:
            *_, last = lease.layer_groups(buffer)
            assert last.runs == lease.runs == match.runs[1:]
        assert store.stats().misses["bad record: frame checksum"] == 1
        assert [run.target for run in store.lookup(prompt, moved=True).runs][-1] == 59


def test_what_vanished_before_the_lease_is_left_out(store: KVStore) -> None:
    one, two = some(1, 48), some(2, 48)
    put(store, np.concatenate([some(3, 32), one]))
    put(store, np.concatenate([some(4, 32), two]))
    match = store.lookup(np.concatenate([some(5, 11), one, two]), moved=True)
    store.invalidate(prefix=some(3, 32))
    with store.lease(match) as lease:
        assert lease.runs == match.runs[1:]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_identities_and_tenants_never_see_each_others_runs(data: st.DataObject) -> None:
    """Interleaved traffic of two identities over few chunks: each moved run holds what its own identity computed."""
    chunks = [some(seed, 40) for seed in range(3)]
    with open_store(None, identity=identity("a"), profile=small_profile()) as store:
        views = {"a": store, "b": store.view(identity("b")), "t": store.view(identity("a", salt=b"tenant"))}
        put_by: dict[str, set[int]] = {name: set() for name in views}
        for _ in range(data.draw(st.integers(2, 12))):
            name = data.draw(st.sampled_from(sorted(views)))
            chosen = data.draw(st.integers(0, 2))
            view, chunk = views[name], chunks[chosen]
            lead = some(data.draw(st.integers(10, 10**6)), data.draw(st.integers(0, 50)), low=9000)
            prompt = np.concatenate([lead, chunk]).astype(np.int32)
            runs = view.lookup(prompt, moved=True).runs
            if len(lead) and chosen not in put_by[name]:
                assert not runs
            for run in runs:
                assert all(piece.block.namespace.digest == view.identity.digest() for piece in run.pieces)
            if data.draw(st.booleans()):
                put(view, prompt)
                put_by[name].add(chosen)
        store.check()


def test_runs_shorter_than_worth_it_are_not_reported(store: KVStore) -> None:
    chunk = some(1, SHORTEST - 1)
    put(store, np.concatenate([some(2, 40), chunk, some(3, 40)]))
    assert store.lookup(np.concatenate([some(4, 6), chunk, some(5, 6)]), moved=True).runs == ()
