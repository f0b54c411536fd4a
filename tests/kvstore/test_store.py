"""The store as an engine uses it: what is put is found, bit for bit, and nothing else is.

Names of kinds of faults in the docstrings are those that other stores had in the field.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kvstore.block import block_key
from kvstore.errors import BufferTooSmallError, StoreClosedError
from kvstore.identity import Adapter
from kvstore.layout import LayerLayout, Layout
from kvstore.pipeline.rope import DynamicNtk, Rope
from kvstore.store import KVStore, Match, open_store
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
    small_profile,
)

BLOCK = 16


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as opened:
        yield opened


def again(path: Path, name: str = "a") -> KVStore:
    return open_store(path / "kv", identity=identity(name), profile=small_profile())


def in_memory(store: KVStore) -> int:
    """Blocks in hot or warm memory; the background thread may move them between the two."""
    stats = store.stats()
    return stats.hot.blocks + stats.warm.blocks


# -- put, look up, load ----------------------------------------


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 100])
def test_what_was_put_is_loaded_bit_for_bit(store: KVStore, length: int) -> None:
    tokens = prompt(1, length)
    result = put(store, tokens)
    assert (result.stored, result.held, result.refused, result.reason) == (length, 0, 0, None)
    assert load(store, tokens) == length


def test_a_look_up_changes_nothing_but_its_own_counters(store: KVStore) -> None:
    tokens = prompt(1, 50)
    put(store, tokens)
    store.flush()
    before = store.stats()
    for _ in range(5):
        store.lookup(tokens)
    after = store.stats()
    assert (after.hot, after.warm, after.cold) == (before.hot, before.warm, before.cold)
    assert after.counts["lookups"] == before.counts.get("lookups", 0) + 5


def test_a_second_put_of_the_same_tokens_stores_nothing(store: KVStore) -> None:
    tokens = prompt(1, 50)
    put(store, tokens)
    used = store.stats().warm.used
    result = put(store, tokens)
    assert (result.stored, result.held, result.refused) == (0, 50, 0)
    assert store.stats().warm.used == used


def test_a_put_in_the_shadow_of_something_else(store: KVStore) -> None:
    tokens = prompt(1, 50)
    kv = known_kv(tokens, store.identity, slots=60)
    later = store.put_later(tokens[:40], kv)
    for keys, values in zip(kv.keys, kv.values, strict=True):  # an engine decodes meanwhile
        assert keys is not None
        assert values is not None
        keys[:, 50:], values[:, 50:] = 1, 2
    assert later.result(30).stored == 40
    assert load(store, tokens) == 40
    with pytest.raises(BufferTooSmallError):
        store.put_later(prompt(1, 70), kv)


def test_puts_that_wait_are_done_before_the_store_closes(tmp_path: Path) -> None:
    with again(tmp_path) as store:
        waiting = [
            store.put_later(tokens, known_kv(tokens, store.identity))
            for tokens in (prompt(number, 40) for number in range(8))
        ]
    assert sum(each.result(0).stored for each in waiting) == 8 * 40
    with again(tmp_path) as store:
        assert all(load(store, prompt(number, 40)) == 40 for number in range(8))
    with pytest.raises(StoreClosedError):
        store.put_later(prompt(1, 40), known_kv(prompt(1, 40), store.identity))


def test_a_hit_leaves_the_entry_in_place(store: KVStore) -> None:
    """A cache that dropped an entry when it was hit."""
    tokens = prompt(1, 40)
    put(store, tokens)
    assert [load(store, tokens) for _ in range(50)] == [40] * 50


def test_only_the_real_tokens_of_a_padded_buffer_are_kept(store: KVStore) -> None:
    """Padding saved as if it were KV."""
    tokens = prompt(1, 37)
    store.put(tokens, known_kv(tokens, store.identity, slots=256))
    assert store.lookup(np.concatenate([tokens, prompt(2, 60)])).length == 37
    assert load(store, tokens) == 37


@pytest.mark.parametrize("shared", [1, 5, 15, 16, 17, 31, 47])
def test_a_block_is_used_as_far_as_its_tokens_agree(store: KVStore, shared: int) -> None:
    """Block alignment that costs short prefixes their hit; a time stamp in a prompt that costs all of it."""
    held = prompt(1, 48)
    put(store, held)
    asked = held.copy()
    asked[shared] += 1
    assert load(store, asked) == shared


def test_a_prefix_shorter_than_a_block_is_found(store: KVStore) -> None:
    put(store, prompt(1, 5))
    assert load(store, np.concatenate([prompt(1, 5), prompt(2, 100)])) == 5


def test_a_longer_block_takes_the_place_of_a_tail(store: KVStore) -> None:
    tokens = prompt(1, 47)
    for length in (5, 9, 20, 47):
        put(store, tokens[:length])
    store.flush()
    assert load(store, tokens) == 47
    assert in_memory(store) == 3
    assert store.stats().cold.blocks == 3


def test_a_tail_does_not_take_the_place_of_a_longer_block(store: KVStore) -> None:
    tokens = prompt(1, 47)
    put(store, tokens)
    result = put(store, tokens[:40])
    assert (result.stored, result.held) == (0, 40)
    assert load(store, tokens) == 47


def test_siblings_share_what_precedes_them(store: KVStore) -> None:
    stem = prompt(1, 32)
    for seed in range(2, 8):
        put(store, np.concatenate([stem, prompt(seed, 16)]))
    assert in_memory(store) == 2 + 6
    for seed in range(2, 8):
        assert load(store, np.concatenate([stem, prompt(seed, 16)])) == 48


def test_unrelated_prompts_never_get_each_others_kv(store: KVStore) -> None:
    """A slot of a RAM cache filled from an unrelated conversation."""
    sessions = [prompt(seed, 60) for seed in range(3)]
    held = [0, 0, 0]
    order = np.random.default_rng(7)
    for step in range(300):
        which = int(order.integers(3))
        if step % 3 == 0:
            held[which] = max(held[which], int(order.integers(1, 60)))
            put(store, sessions[which][: held[which]])
        assert load(store, sessions[which]) == held[which]


def test_equal_bytes_each_time(store: KVStore) -> None:
    """A third answer that differed from the first, since loading changed what was held."""
    tokens = prompt(1, 60)
    put(store, tokens)
    seen = set()
    for length in [60, 3, 41, 60, 17] * 10:
        buffer = empty(60)
        with store.lease(store.lookup(tokens[:length])) as lease:
            lease.load_into(buffer)
        seen.add(b"".join(array[:, :3].tobytes() for array in buffer.each()))
    assert len(seen) == 1


# -- put from within a prompt, slots, strides ----------------------------------------


@pytest.mark.parametrize("where", ["memory", "flash"])
@pytest.mark.parametrize("start", [16, 20, 31, 36, 40])
def test_put_from_within_a_block_takes_the_rest_from_what_is_held(
    store: KVStore, start: int, where: str
) -> None:
    stem, end = prompt(1, 40), prompt(2, 30)
    put(store, stem)
    if where == "flash":
        store.flush()
        store.demote(store.lookup(stem))
        assert in_memory(store) == 0
    tokens = np.concatenate([stem[:start], end])
    result = put(store, tokens, start=start)
    assert (result.stored, result.refused) == (30, 0)
    assert load(store, tokens) == start + 30
    assert load(store, stem) == 40


def test_put_behind_what_is_not_held_is_refused_with_a_reason(store: KVStore) -> None:
    tokens = prompt(1, 60)
    put(store, tokens[:20])
    result = put(store, tokens, start=21)
    assert (result.stored, result.refused) == (0, 39)
    assert result.reason is not None
    assert "20 of the 21" in result.reason
    assert store.stats().refusals == {"prefix not held": 39}
    assert load(store, tokens) == 20


def test_put_takes_rows_from_slots(store: KVStore) -> None:
    tokens = prompt(1, 50)
    slots = np.random.default_rng(1).permutation(80)[:50]
    buffer = empty(80)
    for scattered, right in zip(buffer.each(), known_kv(tokens, store.identity).each(), strict=True):
        scattered[:, slots] = right
    store.put(tokens[:20], buffer, slots=slots[:20])
    store.put(tokens, buffer, start=20, slots=slots[20:])
    assert load(store, tokens) == 50


def test_put_takes_arrays_of_any_strides(store: KVStore) -> None:
    tokens = prompt(1, 40)
    right = known_kv(tokens, store.identity)
    turned = known_kv(tokens, store.identity)
    for side, source in ((turned.keys, right.keys), (turned.values, right.values)):
        for layer, array in enumerate(source):
            assert array is not None
            wide = np.zeros((40, 2, 3, 8), np.float32)  # an engine that keeps [slot, head, ...]
            wide[:, :, 1] = array.transpose(1, 0, 2)
            side[layer] = wide[:, :, 1].transpose(1, 0, 2)
    store.put(tokens, turned)
    assert load(store, tokens) == 40


def test_the_buffer_is_the_callers_again_after_put(store: KVStore) -> None:
    tokens = prompt(1, 40)
    buffer = known_kv(tokens, store.identity)
    store.put(tokens, buffer)
    for array in buffer.each():
        array.fill(7)
    store.flush()
    store.demote(store.lookup(tokens))
    assert load(store, tokens) == 40


def test_the_token_array_is_the_callers_again_after_put(store: KVStore) -> None:
    tokens = prompt(1, 40)
    given = tokens.copy()
    store.put(given, known_kv(tokens, store.identity))
    given.fill(0)
    assert load(store, tokens) == 40
    assert store.lookup(given).length == 0


# -- restart ----------------------------------------


def test_after_a_restart_all_is_found_and_really_read_from_flash(tmp_path: Path) -> None:
    """A restore that reported success while the next request reused nothing."""
    tokens = prompt(1, 100)
    with again(tmp_path) as store:
        put(store, tokens)
    with again(tmp_path) as store:
        assert store.stats().index == "sealed"
        with store.lease(store.lookup(tokens)) as lease:
            buffer = empty(100)
            assert lease.tokens_by_tier() == {"hot": 0, "warm": 0, "cold": 100}
            assert lease.load_into(buffer) == 100
            assert lease.bytes_read > 0.5 * LAYOUT.block_bytes(100)
        assert matches(buffer, tokens, store.identity, 100)
        assert store.stats().counts["bytes_read"] == lease.bytes_read


def test_restart_after_restart_keeps_all(tmp_path: Path) -> None:
    held = 0
    for round_ in range(6):
        with again(tmp_path) as store:
            assert load(store, prompt(1, 120)) == held
            held = 20 * (round_ + 1)
            put(store, prompt(1, held))
    with again(tmp_path) as store:
        assert store.stats().cold.blocks == -(-held // BLOCK)
        store.check()


def test_nothing_is_deleted_by_opening_with_another_identity(tmp_path: Path) -> None:
    """A scan at start-up that deleted what a wrong model configuration could not read."""
    tokens = prompt(1, 60)
    with again(tmp_path) as store:
        put(store, tokens)
    with again(tmp_path, "b") as store:
        assert load(store, tokens) == 0
        assert store.stats().cold.blocks == 4
    with again(tmp_path) as store:
        assert load(store, tokens) == 60


def test_nothing_is_lost_by_opening_with_another_frame_size(tmp_path: Path) -> None:
    """Blocks set aside as damaged because a setting had changed."""
    tokens = prompt(1, 60)
    for frame_bytes in (1, 1 << 30, 2048):
        profile = small_profile(frame_bytes=frame_bytes)
        with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
            put(store, tokens)
            assert load(store, tokens) == 60
            assert store.stats().misses == {}


def test_without_a_path_everything_stays_in_memory() -> None:
    tokens = prompt(1, 60)
    with open_store(None, identity=identity(), profile=small_profile()) as store:
        put(store, tokens)
        store.flush()
        assert load(store, tokens) == 60
        assert store.stats().cold.total == 0
        assert store.stats().index is None
        assert store.stats().waiting == 0


# -- identities and tenants ----------------------------------------


def test_kv_never_crosses_identities(tmp_path: Path) -> None:
    """KV of one adapter, one tenant or one set of weights served for another."""
    adapter = Adapter("ad" * 32)
    owners = [
        identity("a"),
        identity("b"),
        identity("a", adapters=(adapter,)),
        identity("a", adapters=(Adapter("ad" * 32, 0.5),)),
        identity("a", adapters=(Adapter("ae" * 32),)),
        identity("a", salt=b"one"),
        identity("a", salt=b"two"),
        identity(
            "a",
            layout=Layout.uniform(layers=2, kv_heads=2, head_dim=8, rope=Rope(8, 2e4, 8), dtype="float32"),
        ),
    ]
    tokens = prompt(1, 60)
    with open_store(tmp_path / "kv", identity=owners[0], profile=small_profile()) as first:
        views = [first, *(first.view(owner) for owner in owners[1:])]
        for held, view in enumerate(views):
            assert [load(other, tokens) for other in views[held:]] == [0] * (len(views) - held)
            put(view, tokens)
            assert [load(other, tokens) for other in views[: held + 1]] == [60] * (held + 1)
    for owner in owners:
        with open_store(tmp_path / "kv", identity=owner, profile=small_profile()) as store:
            assert load(store, tokens) == 60


def test_equal_identities_share(store: KVStore) -> None:
    put(store, prompt(1, 60))
    assert load(store.view(identity("a")), prompt(1, 60)) == 60


def test_a_match_of_one_identity_is_worth_nothing_to_another(store: KVStore) -> None:
    tokens = prompt(1, 60)
    put(store, tokens)
    other = store.view(identity("b"))
    match = store.lookup(tokens)
    with other.lease(match) as lease:
        assert lease.length == 0
        assert lease.load_into(empty(60)) == 0


@pytest.mark.parametrize("bits", [1, 3, 5, 8])
def test_equal_keys_never_give_wrong_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Blocks found by hash alone: with a hash of a few bits many collide, and tokens still decide."""

    def few_bits(identity_: bytes, parent: bytes, tokens: np.ndarray, *, exact: bool = True) -> bytes:
        return bytes([block_key(identity_, parent, tokens, exact=exact)[0] % (1 << bits)]) * 32

    monkeypatch.setattr("kvstore.put.block_key", few_bits)
    monkeypatch.setattr("kvstore.store.block_key", few_bits)
    order = np.random.default_rng(3)
    loaded = 0
    with again(tmp_path) as store:
        views = [store, store.view(identity("b"))]
        for _ in range(200):
            view = views[int(order.integers(2))]
            tokens = prompt(int(order.integers(6)), 60, vocabulary=3)[: order.integers(1, 60)]
            put(view, tokens)
            loaded += load(view, tokens)
            if order.integers(10) == 0:
                store.flush()
                store.demote(view.lookup(tokens))
        assert store.stats().refusals["another block has its key"] > 0
        assert loaded > 0
        store.check()


# -- forgetting ----------------------------------------


def test_invalidate_a_prefix(tmp_path: Path) -> None:
    stem = prompt(1, 32)
    left, right = np.concatenate([stem, prompt(2, 20)]), np.concatenate([stem, prompt(3, 20)])
    with again(tmp_path) as store:
        put(store, left)
        put(store, right)
        store.flush()
        assert store.invalidate(prefix=left[:34]) == 2
        assert load(store, left) == 32
        assert load(store, right) == 52
        assert store.invalidate(prefix=prompt(9, 3)) == 0
    with again(tmp_path) as store:
        assert load(store, left) == 32
        assert load(store, right) == 52
        assert (
            store.invalidate(prefix=stem) == 3
        )  # a block that ends within the prefix does not start with it
        assert load(store, right) == 16


def test_invalidate_a_prefix_leaves_other_identities_alone(store: KVStore) -> None:
    tokens = prompt(1, 40)
    other = store.view(identity("b"))
    put(store, tokens)
    put(other, tokens)
    store.invalidate(prefix=tokens[:1])
    assert (load(store, tokens), load(other, tokens)) == (0, 40)


def test_invalidate_an_adapter(tmp_path: Path) -> None:
    """An adapter loaded again under its old name, answered from KV of the old content."""
    old, new = Adapter("0d" * 32), Adapter("4e" * 32)
    tokens = prompt(1, 40)
    with again(tmp_path) as store:
        put(store, tokens)
        put(store.view(identity("a", adapters=(old,))), tokens)
        put(store.view(identity("b", adapters=(old, new))), tokens)
        put(store.view(identity("a", adapters=(new,))), tokens)
    with again(tmp_path) as store:  # identities that nobody has opened since are covered too
        assert store.invalidate(adapter=old.digest) == 6
        assert load(store, tokens) == 40
        assert load(store.view(identity("a", adapters=(new,))), tokens) == 40
        assert load(store.view(identity("a", adapters=(old,))), tokens) == 0
        assert load(store.view(identity("b", adapters=(old, new))), tokens) == 0


def test_invalidate_by_age_counts_use_as_youth(store: KVStore) -> None:
    put(store, prompt(1, 40))
    put(store, prompt(2, 40))
    time.sleep(0.2)
    load(store, prompt(2, 40))
    assert store.invalidate(older_than=100) == 0
    assert store.invalidate(older_than=0.15) == 3
    assert load(store, prompt(1, 40)) == 0
    assert load(store, prompt(2, 40)) == 40


def test_invalidate_everything_frees_everything(tmp_path: Path) -> None:
    """Sizes that were counted up on writing and never down on deleting."""
    with again(tmp_path) as store:
        unused = store.stats().cold.used
        for seed in range(12):
            put(store, prompt(seed, 60))
            put(store.view(identity("b")), prompt(seed, 60))
            store.flush()
            load(store, prompt(seed, 60))
        held = store.stats()
        assert store.invalidate(everything=True) == held.cold.blocks
        stats = store.stats()
        assert (stats.hot.used, stats.warm.used) == (0, 0)
        assert (stats.hot.blocks, stats.warm.blocks, stats.cold.blocks) == (0, 0, 0)
        assert stats.cold.used < unused + 64 * 1024  # the index keeps a few pages
        assert not list((tmp_path / "kv" / "blocks").iterdir())
        assert load(store, prompt(1, 60)) == 0
        put(store, prompt(1, 60))
        assert load(store, prompt(1, 60)) == 60
    with again(tmp_path) as store:
        assert load(store, prompt(1, 60)) == 60
        assert load(store, prompt(2, 60)) == 0


def test_put_and_forget_a_thousand_times_leaves_no_trace(store: KVStore) -> None:
    """Cells leaked on each reuse and erase."""
    put(store, prompt(0, 40))
    store.flush()
    load(store, prompt(0, 40))
    store.invalidate(everything=True)
    store.flush()
    before = store.stats()
    for seed in range(1000):
        put(store, prompt(seed, 40), wait=10)
        if seed % 7 == 0:
            load(store, prompt(seed, 40))
        if seed % 50 == 0:
            store.flush()
        store.invalidate(prefix=prompt(seed, 40)[:1])
    store.flush()
    after = store.stats()
    assert (after.hot.free, after.warm.free) == (before.hot.free, before.warm.free)
    assert after.cold.used <= before.cold.used + 64 * 1024
    assert after.hot.blocks + after.warm.blocks + after.cold.blocks == 0
    store.check()


# -- exact reuse only ----------------------------------------

_DYNAMIC = Layout.uniform(
    layers=2, kv_heads=2, head_dim=8, rope=Rope(8, 1e4, 8, scaling=DynamicNtk(2.0, 2048)), dtype="float32"
)
_RECURRENT = Layout(
    (*LAYOUT.layers, LayerLayout(attention="none")),
    "float32",
)


exact_layouts = pytest.mark.parametrize(
    "layout", [_DYNAMIC, _RECURRENT], ids=["dynamic NTK", "recurrent layer"]
)


@exact_layouts
def test_a_layout_for_exact_reuse_gives_all_that_was_stored_or_nothing(
    tmp_path: Path, layout: Layout
) -> None:
    """A recurrent state cut back to fewer tokens, which it cannot be."""
    owner = identity("a", layout=layout)
    tokens = prompt(1, 40)
    for stored in (40, 0):  # and again after a restart
        with open_store(tmp_path / "kv", identity=owner, profile=small_profile()) as store:
            assert store.capabilities.reuse == "exact"
            assert put(store, tokens).stored == stored
            assert load(store, tokens) == 40
            assert load(store, np.concatenate([tokens, prompt(2, 9)])) == 40
            for part in (tokens[:39], tokens[:32], tokens[:16], np.append(tokens[:39], 1)):
                assert load(store, part) == 0
                assert store.explain(part).spans[0].source == "compute"
                assert "exact" in str(store.explain(part).spans[0].reason)
            assert store.stats().misses["layout permits exact reuse only"] > 0


@exact_layouts
def test_a_layout_for_exact_reuse_never_mixes_prompts(tmp_path: Path, layout: Layout) -> None:
    """KV of the same tokens differs with what followed them, so two prompts cannot share a block."""
    owner = identity("a", layout=layout)
    stem = prompt(1, 32)
    left, right = np.concatenate([stem, prompt(2, 20)]), np.concatenate([stem, prompt(3, 20)])

    def kv(tokens: np.ndarray) -> Arrays:
        """As such a model has it: of a prompt that began with the number of its tokens and its last one."""
        marked = np.concatenate([[len(tokens), tokens[-1]], tokens])
        return known_kv(marked, owner).rows(slice(2, None))

    with open_store(tmp_path / "kv", identity=owner, profile=small_profile()) as store:
        stored: list[np.ndarray] = []
        for tokens in (left, right, stem, left, left[:40], prompt(9, 20), right):
            result = store.put(tokens, kv(tokens))
            assert result.refused == 0
            stored.append(tokens)
            for asked in (*stored, np.concatenate([tokens, prompt(5, 5)])):
                buffer = empty(len(asked), layout)
                with store.lease(store.lookup(asked)) as lease:
                    length = lease.load_into(buffer)
                assert length == len(tokens) or asked is not tokens
                assert length == 0 or any(len(each) == length for each in stored)
                if length:
                    for have, want in zip(buffer.each(), kv(asked[:length]).each(), strict=True):
                        assert have[:, :length].tobytes() == want.tobytes()
        result = store.put(np.concatenate([right, prompt(6, 6)]), kv(prompt(6, 6)), start=len(right))
        assert result.refused == 6
        assert "from its start" in str(result.reason)
        assert load(store, left) == 0


@exact_layouts
def test_a_damaged_part_makes_exact_reuse_impossible(tmp_path: Path, layout: Layout) -> None:
    owner = identity("a", layout=layout)
    tokens = prompt(1, 60)
    with open_store(tmp_path / "kv", identity=owner, profile=small_profile()) as store:
        put(store, tokens)
        store.flush()
        store.demote(store.lookup(tokens))
        record = tmp_path / "kv" / "blocks" / store.lookup(tokens).blocks[2].key[:16].hex()
        record.write_bytes(bytes(100))
        assert load(store, tokens) == 0
        assert load(store, tokens) == 0
        assert put(store, tokens).stored == 60
        assert load(store, tokens) == 60


# -- explain ----------------------------------------


def test_explain_covers_each_token_once_and_agrees_with_lookup(store: KVStore) -> None:
    """Prompts silently recomputed, with nothing to say why."""
    order = np.random.default_rng(5)
    for _ in range(60):
        tokens = prompt(int(order.integers(5)), 90, vocabulary=2)[: order.integers(1, 90)]
        if order.integers(2):
            put(store, tokens)
        if order.integers(4) == 0:
            store.flush()
            store.demote(store.lookup(tokens))
        explained = store.explain(tokens)
        assert explained.spans[0].start == 0
        ends = [span.start + span.length for span in explained.spans]
        assert [span.start for span in explained.spans[1:]] == ends[:-1]
        assert ends[-1] == len(tokens)
        assert all(span.length > 0 for span in explained.spans)
        match = store.lookup(tokens)
        loaded = [span for span in explained.spans if span.source != "compute"]
        reused = min(match.length, len(tokens) - 1)
        assert sum(span.length for span in loaded) == explained.prefix == reused
        tiers = [block.tier for block in match.blocks if block.start < reused]
        assert [span.source for span in loaded] == tiers
        assert all(span.reason for span in explained.spans if span.source == "compute")


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (prompt(9, 20), "no held prompt begins"),
        (np.append(prompt(1, 10), 7), "diverges at 10"),
        (np.append(prompt(1, 48), 7), "what is held ends at 48"),
        (np.append(prompt(1, 32), 7), "diverge at 32"),
    ],
)
def test_explain_says_why_not_further(store: KVStore, asked: np.ndarray, reason: str) -> None:
    put(store, prompt(1, 48))
    assert reason in str(store.explain(asked).spans[-1].reason)


def test_explain_names_the_difference_to_an_identity_that_holds_more(store: KVStore) -> None:
    tokens = prompt(1, 40)
    other = store.view(identity("b"))
    assert "nothing is held" in str(other.explain(tokens).spans[0].reason)
    put(store, tokens)
    (note,) = other.explain(tokens).notes
    assert "40 tokens" in note
    assert "weights" in note
    assert store.explain(tokens).notes == ()


def test_explain_tells_a_tenant_nothing_of_another(store: KVStore) -> None:
    tenants = [store.view(identity("a", salt=salt)) for salt in (b"one", b"two")]
    put(tenants[0], prompt(1, 40))
    for other in (store, tenants[1]):
        explained = other.explain(prompt(1, 40))
        assert explained.notes == ()
        assert "nothing is held" in str(explained.spans[0].reason)


# -- closing ----------------------------------------


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    tokens = prompt(1, 20)
    store = again(tmp_path)
    put(store, tokens)
    view = store.view(identity("b"))
    match = store.lookup(tokens)
    lease = store.lease(match)
    groups = store.lease(match).layer_groups(empty(20))
    next(groups)
    store.close()
    store.close()
    for call in (
        lambda: store.lookup(tokens),
        lambda: view.lookup(tokens),
        lambda: store.lease(match),
        lambda: put(store, tokens),
        lambda: store.invalidate(everything=True),
        lambda: store.flush(),
        lambda: store.stats(),
        lambda: store.explain(tokens),
        lambda: store.view(identity("c")),
        lambda: store.promote(match),
        lambda: store.demote(match),
        lambda: store.check(),
        lambda: lease.load_into(empty(20)),
        lambda: next(groups),
    ):
        with pytest.raises(StoreClosedError):
            call()
    lease.release()  # ending a lease late is no fault


def test_closing_writes_what_waits(tmp_path: Path) -> None:
    """A full queue dropped at exit."""
    with again(tmp_path) as store:
        for seed in range(16):
            assert put(store, prompt(seed, 60), wait=10).refused == 0
    with again(tmp_path) as store:
        assert [load(store, prompt(seed, 60)) for seed in range(16)] == [60] * 16


def test_an_empty_match_makes_an_empty_lease(store: KVStore) -> None:
    with store.lease(Match(0, ())) as lease:
        assert lease.length == 0
        assert list(lease.layer_groups(empty(1))) == []
