"""Moved runs: found anywhere in a prompt, turned to where they stand, never mixed up with prefixes or identities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.identity import Adapter, Identity
from kvstore.layout import Dtype, LayerLayout, Layout
from kvstore.moved import SHORTEST, MovedRun
from kvstore.pipeline.rope import Explicit, Linear, Llama3, LongRope, Rope, Yarn
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


def turned(key: NDArray[Any], rope: Rope, by: int | NDArray[np.int64]) -> NDArray[np.float64]:
    """The oracle: rotation in fp64, pair by pair, of keys [kv_heads, n, head_dim] by so many positions, each or all."""
    out = key.astype(np.float64)
    angles = np.multiply.outer(by, rope.inverse_frequencies())
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


def test_ten_thousand_reuses_leave_the_stored_bytes_as_they_were() -> None:
    """Drift: keys turned from turned keys. Up and down, and at the place of origin the bits are the first ones."""
    chunk = some(1, 32)
    first = np.concatenate([some(2, 32), chunk])
    right = kv_of(first)
    random = np.random.default_rng(0)
    profile = small_profile(block_tokens=32, frame_bytes=1 << 20)
    with open_store(None, identity=identity(), profile=profile) as store:
        put(store, first)
        matches = []
        for at in random.integers(1, 1000, 100).tolist():
            prompt = np.concatenate([some(at, at, low=5000), chunk])
            matches.append((at, store.lookup(prompt, moved=True)))
        buffer = empty(1040)
        for use, chosen in enumerate(random.integers(0, len(matches), 10_000).tolist()):
            at, match = matches[chosen]
            with store.lease(match) as lease:
                for _ in lease.layer_groups(buffer):
                    pass
            if use % 100 == 99:
                assert_moved(buffer, right, store.layout, at=at, was=32, length=32)
        buffer = empty(len(first))
        with store.lease(store.lookup(first)) as lease:
            assert lease.load_into(buffer) == len(first)
    for got, held in zip(buffer.each(), right.each(), strict=True):
        np.testing.assert_array_equal(got, held)


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


FACTORS = ((1.0, 1.1, 1.2, 1.3), (1.5, 2.0, 3.0, 4.0))
ROPES = {
    "half": Rope(8, 1e4, 8),
    "interleaved": Rope(8, 1e4, 8, "interleaved"),
    "partial": Rope(8, 1e4, 4),
    "linear": Rope(8, 1e4, 8, scaling=Linear(4.0)),
    "llama3": Rope(8, 5e5, 8, scaling=Llama3(8.0, 1.0, 4.0, 64)),
    "yarn": Rope(8, 1e4, 8, scaling=Yarn(4.0, 64)),
    "longrope, long": Rope(8, 1e4, 8, scaling=LongRope(*FACTORS, 64, 1.2, "long")),
    "longrope, short": Rope(8, 1e4, 8, scaling=LongRope(*FACTORS, 64, 1.2, "short")),
    "explicit": Rope(8, 1e4, 8, scaling=Explicit((1.0, 2.5, 8.0, 1e30))),
}


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("kind", ROPES)
def test_moved_keys_are_what_raw_keys_are_when_turned_right_there(kind: str, dtype: Dtype) -> None:
    """RoPE scaling ignored or applied twice, one geometry for all layers, keys turned where there is no RoPE.

    All within the two roundings to the dtype that a moved key has seen, against one.
    """
    rope, other = ROPES[kind], Rope(8, 1e6, 8)
    layers = tuple(LayerLayout(kv_heads=2, head_dim=8, rope=each) for each in (rope, None, other))
    layout = Layout(layers, dtype)
    chunk = some(1, 40)
    first = np.concatenate([some(2, 30), chunk])
    who = identity(layout=layout)
    raw, stored = kv_of(first, who), kv_of(first, who)
    for each, layer in zip(stored.keys, layers, strict=True):
        if each is not None and layer.rope is not None:
            each[:] = layer.rope.attention_factor * turned(each, layer.rope, np.arange(len(first)))
    with open_store(None, identity=who, profile=small_profile(layout=layout)) as store:
        store.put(first, stored)
        for at in (1, 29, 171, 5000):
            prompt = np.concatenate([some(3, at, low=2000), chunk])
            buffer = empty(len(prompt), layout)
            with store.lease(store.lookup(prompt, moved=True)) as lease:
                assert [(run.target, run.length) for run in lease.runs] == [(at, 40)]
                list(lease.layer_groups(buffer))
            for got, keys, layer in zip(buffer.keys, raw.keys, layers, strict=True):
                assert got is not None
                assert keys is not None
                here, there = got[:, at:], keys[:, 30:]
                if layer.rope is None:
                    np.testing.assert_array_equal(here, there)
                    continue
                direct = layer.rope.attention_factor * turned(there, layer.rope, at + np.arange(40))
                # A key is rounded when it is put, and again when it was turned: half a unit of the last place each.
                largest = np.abs(direct).max() * 2**0.5
                np.testing.assert_allclose(here, direct, rtol=0, atol=largest * np.finfo(dtype).eps * 1.25)
            for got, values in zip(buffer.values, raw.values, strict=True):
                assert got is not None
                assert values is not None
                np.testing.assert_array_equal(got[:, at:], values[:, 30:])


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


def test_a_long_copy_captured_at_the_start_comes_behind_shorter_ones_in_context(store: KVStore) -> None:
    """Longest first: one copy at the start holds both chunks, or one token more."""
    one, other = some(1, 64), some(2, 64)
    put(store, np.concatenate([one, other, some(9, 1)]))
    put(store, np.concatenate([some(3, 20), one]))
    put(store, np.concatenate([some(4, 50), other]))
    runs = store.lookup(np.concatenate([some(5, 33), one, other, some(9, 1)]), moved=True).runs
    assert [(run.target, run.length, run.shift) for run in runs] == [(33, 64, 13), (97, 64, 47)]


def test_a_copy_captured_behind_itself_comes_behind_others(store: KVStore) -> None:
    """Of copies in context the one nearest in place won, though it was captured behind the same words."""
    chunk = some(1, 48)
    put(store, np.concatenate([some(2, 50), chunk]))
    put(store, np.concatenate([some(4, 20), chunk, chunk]))
    (run,) = store.lookup(np.concatenate([some(5, 68), chunk]), moved=True).runs
    assert run.shift == 68 - 50


@pytest.mark.parametrize("size", [*range(1, 17), 48])
def test_blocks_of_every_size_that_a_profile_allows_are_found(size: int) -> None:
    """A block of 12 tokens was no multiple of a window of 12, which is no power of two: `lookup` raised ValueError."""
    chunk = some(1, 100)
    profile = small_profile(block_tokens=size, warm_bytes=1 << 20)
    with open_store(None, identity=identity(), profile=profile) as store:
        put(store, np.concatenate([some(2, 20), chunk]))
        prompt = np.concatenate([some(3, 31, low=2000), chunk])
        (run,) = store.lookup(prompt, moved=True).runs
        assert (run.target, run.length, run.shift) == (31, 100, 11)
        said = store.explain(prompt)
        assert said.moved + said.recomputed + said.computed == len(prompt)


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


def test_a_part_of_a_run_still_loads_where_another_part_was_lost(tmp_path: Path) -> None:
    """The lease dropped the whole run that the lost part began, and then did not know the other part any more."""
    path, chunk = tmp_path / "kv", some(1, 64)
    first, prompt = np.concatenate([some(3, 32), chunk]), np.concatenate([some(5, 11), chunk])
    with open_store(path, identity=identity(), profile=small_profile()) as store:
        put(store, first)
        (run,) = store.lookup(prompt, moved=True).runs
    record = path / "blocks" / run.blocks[0].key[:16].hex()
    content = bytearray(record.read_bytes())
    content[-5] ^= 4
    record.write_bytes(content)
    with open_store(path, identity=identity(), profile=small_profile()) as store:
        (run,) = store.lookup(prompt, moved=True).runs
        begin, end = (MovedRun(half[0].target, 32, half) for half in (run.pieces[:2], run.pieces[2:]))
        buffer = empty(len(prompt))
        with store.lease(store.lookup(prompt, moved=True)) as lease:
            *_, last = lease.layer_groups(buffer, runs=(begin, end))
            assert last.runs == (end,)
            *_, last = lease.layer_groups(buffer, runs=last.runs)
            assert last.runs == (end,)
        assert_moved(buffer, kv_of(first), store.layout, at=43, was=64, length=32)


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
    """Interleaved traffic over few chunks: each moved run holds what its own identity computed, by its KV.

    Identities of other weights, another tenant, an adapter, and the same adapter at another scale.
    """
    chunks = [some(seed, 40) for seed in range(3)]
    with open_store(None, identity=identity("a"), profile=small_profile()) as store:
        views = {
            "a": store,
            "other weights": store.view(identity("b")),
            "other tenant": store.view(identity("a", salt=b"tenant")),
            "adapter": store.view(identity("a", adapters=(Adapter("ad" * 32),))),
            "scaled": store.view(identity("a", adapters=(Adapter("ad" * 32, 0.5),))),
        }
        put_by: dict[str, list[Tokens]] = {name: [] for name in views}
        chunks_of: dict[str, set[int]] = {name: set() for name in views}
        for _ in range(data.draw(st.integers(2, 12))):
            name = data.draw(st.sampled_from(sorted(views)))
            chosen = data.draw(st.integers(0, 2))
            view, chunk = views[name], chunks[chosen]
            lead = some(data.draw(st.integers(10, 10**6)), data.draw(st.integers(0, 50)), low=9000)
            prompt = np.concatenate([lead, chunk]).astype(np.int32)
            runs = view.lookup(prompt, moved=True).runs
            if len(lead) and chosen not in chunks_of[name]:
                assert not runs
            if runs:
                buffer = empty(len(prompt))
                with view.lease(view.lookup(prompt, moved=True)) as lease:
                    list(lease.layer_groups(buffer))
                    assert lease.runs == runs
                for run in runs:
                    assert_moved_from_one_of(put_by[name], buffer, prompt, run, view.identity)
            if data.draw(st.booleans()):
                put(view, prompt)
                put_by[name].append(prompt)
                chunks_of[name].add(chosen)
        store.check()


def assert_moved_from_one_of(
    held: list[Tokens], got: Arrays, prompt: Tokens, run: MovedRun, owner: Identity
) -> None:
    """What lies at the run's place is the KV that `owner` computed for these tokens in one of the prompts `held`."""
    was = run.target - run.shift
    wanted = prompt[run.target : run.target + run.length]
    sources = [tokens for tokens in held if np.array_equal(tokens[was : was + run.length], wanted)]
    assert sources
    for tokens in sources:
        try:
            assert_moved(got, kv_of(tokens, owner), owner.layout, at=run.target, was=was, length=run.length)
        except AssertionError:
            if tokens is sources[-1]:
                raise
        else:
            return


def test_runs_shorter_than_worth_it_are_not_reported(store: KVStore) -> None:
    chunk = some(1, SHORTEST - 1)
    put(store, np.concatenate([some(2, 40), chunk, some(3, 40)]))
    assert store.lookup(np.concatenate([some(4, 6), chunk, some(5, 6)]), moved=True).runs == ()
