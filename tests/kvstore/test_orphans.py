"""Forgetting a prefix reaches what lost the block before it, and comes back no more when that returns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.block import Block, block_key
from kvstore.namespace import ROOT_KEY, Namespace
from kvstore.orphans import continuing
from kvstore.store import KVStore, open_store
from tests.known_kv import identity, load, prompt, put, small_profile

BLOCK = 16


def opened(path: Path) -> KVStore:
    return open_store(path / "kv", identity=identity(), profile=small_profile())


def lose(path: Path, store: KVStore, tokens: np.ndarray, number: int) -> None:
    """Close the store, and take a block of `tokens` away from flash."""
    key = store.lookup(tokens).blocks[number].key
    store.close()
    (path / "kv" / "blocks" / key[:16].hex()).unlink()


@pytest.mark.parametrize(
    ("lost", "forgotten", "gone"),
    [
        (1, 20, 2),  # the prefix ends in the lost block: its continuations cannot be told apart
        (1, 40, 2),  # it ends in an orphan
        (0, 16, 3),  # it is the lost block
        (0, 5, 3),
        (2, 16, 3),  # it leads up to the lost block by what is held
    ],
)
def test_what_lost_its_parent_is_forgotten_with_its_prefix(
    tmp_path: Path, lost: int, forgotten: int, gone: int
) -> None:
    """A withdrawn system prompt whose continuations came back after a restart had lost a block in between."""
    tokens = prompt(1, 64)
    store = opened(tmp_path)
    put(store, tokens)
    lose(tmp_path, store, tokens, lost)
    with opened(tmp_path) as store:
        assert load(store, tokens) == lost * BLOCK
        assert store.invalidate(prefix=tokens[:forgotten]) == gone
        put(store, tokens[: (lost + 1) * BLOCK])
        assert load(store, tokens) == (lost + 1) * BLOCK
        store.check()


def test_a_put_takes_what_lost_its_parent_as_held(tmp_path: Path) -> None:
    tokens = prompt(1, 70)
    store = opened(tmp_path)
    put(store, tokens)
    lose(tmp_path, store, tokens, 1)
    with opened(tmp_path) as store:
        assert put(store, tokens) == (BLOCK, 70 - BLOCK, 0, None)
        assert load(store, tokens) == 70
        store.check()


def test_orphans_of_other_prompts_stay(tmp_path: Path) -> None:
    mine, other = prompt(1, 64), prompt(2, 64)
    store = opened(tmp_path)
    put(store, mine)
    put(store, other)
    lose(tmp_path, store, other, 0)
    with opened(tmp_path) as store:
        assert store.invalidate(prefix=mine[:32]) == 3
        put(store, other[:16])
        assert load(store, other) == 64


def test_what_cannot_be_told_apart_goes(tmp_path: Path) -> None:
    """The lost block alone said whether the prefix, shorter than a block, was its beginning."""
    mine, other = prompt(1, 64), prompt(2, 64)
    store = opened(tmp_path)
    put(store, other)
    lose(tmp_path, store, other, 0)
    with opened(tmp_path) as store:
        assert store.invalidate(prefix=mine[:10]) == 3
        assert store.stats().cold.blocks == 0


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_continuation_is_missed(data: st.DataObject) -> None:
    """Whatever subset of the blocks of a few prompts is left: those that start with a prefix are found."""
    space, size = Namespace(b"seed", 4), 4
    words = st.lists(st.integers(0, 1), min_size=1, max_size=16)
    prompts = data.draw(st.lists(words, min_size=1, max_size=4))
    prefix = np.array(data.draw(words), np.int32)
    left: dict[bytes, tuple[Block, list[int]]] = {}
    for tokens in prompts:
        parent = ROOT_KEY
        for at in range(0, len(tokens), size):
            piece = np.array(tokens[at : at + size], np.int32)
            key = block_key(b"seed", parent, piece)
            if data.draw(st.booleans()):
                block = Block(len(left), key, parent, space, piece, at, 0)
                left.setdefault(key, (block, tokens[: at + len(piece)]))
            parent = key
    found = {block.key for block in continuing([each for each, _ in left.values()], prefix, b"seed", size)}
    for key, (block, tokens) in left.items():
        starts = tokens[: len(prefix)] == prefix.tolist()
        if starts:
            assert key in found
        elif block.start <= len(prefix) // size * size:
            assert key not in found
