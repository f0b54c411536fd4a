"""A snapshot says what there is, can be sent, and costs no more where more is held."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.errors import StoreClosedError
from kvstore.store import KVStore, open_store
from kvstore.watch.change import Change
from kvstore.watch.snapshot import Snapshot
from tests.known_kv import identity, load, prompt, put, small_profile


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        yield store


def test_it_can_be_sent(store: KVStore) -> None:
    put(store, prompt(1, 50))
    load(store, prompt(1, 50))
    now = store.snapshot()
    for kind in (msgspec.msgpack, msgspec.json):
        assert kind.decode(kind.encode(now), type=Snapshot) == now


def test_all_views_of_a_directory_give_one_picture(store: KVStore) -> None:
    view = store.view(identity("b"))
    put(view, prompt(1, 50))
    assert store.snapshot().stats == view.snapshot().stats
    assert store.snapshot().stats.counts["tokens_stored"] == 50


def test_none_of_a_closed_store(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        pass
    with pytest.raises(StoreClosedError):
        store.snapshot()


def _calls(work: Any) -> int:
    """How many functions are called, in Python or C: what work is done, whatever else the machine does."""
    count = 0

    def seen(frame: object, event: str, argument: object) -> None:  # noqa: ARG001
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def test_it_takes_no_more_work_where_more_is_held() -> None:
    profile = small_profile(warm_bytes=2500 * 4096, cold_bytes=0, hot_bytes=0)
    with open_store(None, identity=identity(), profile=profile) as store:
        for seed in range(50):
            put(store, prompt(seed, 64))
            load(store, prompt(seed, 64))
        store.snapshot()
        few, blocks = _calls(store.snapshot), store.stats().warm.blocks
        for seed in range(50, 500):
            put(store, prompt(seed, 64))
            load(store, prompt(seed, 64))
        assert store.stats().warm.blocks == 10 * blocks
        assert _calls(store.snapshot) <= 1.1 * few


def test_the_hottest_prefixes_are_those_that_served_the_most_tokens(store: KVStore) -> None:
    system = prompt(99, 32)
    chats = [np.concatenate([system, prompt(seed, 40)]) for seed in range(4)]
    for number, chat in enumerate(chats):
        put(store, chat)
        for _ in range(number):
            load(store, chat)
    found = store.snapshot().prefixes
    assert found[0].tokens == 32, "the system prompt, of all chats together"
    assert found[0].hits >= 6
    assert (found[1].tokens, found[1].hits) == (72, 3)
    assert found == sorted(found, key=lambda each: -each.tokens * each.hits)
    whole = store.lookup(chats[3]).blocks[-1]
    assert whole.key.hex().startswith(found[1].key)
    assert store.identity.digest().hex().startswith(found[0].identity)


def test_a_prefix_that_is_gone_is_none(store: KVStore) -> None:
    put(store, prompt(1, 40))
    load(store, prompt(1, 40))
    assert len(store.snapshot().prefixes) == 1
    store.invalidate(everything=True)
    assert store.snapshot().prefixes == []


def test_what_changed_between_two(store: KVStore) -> None:
    put(store, prompt(1, 48))
    store.lookup(prompt(1, 48))
    first = store.snapshot()
    store.lookup(np.concatenate([prompt(1, 48), prompt(2, 10)]))
    load(store, prompt(1, 48))
    change = Change(first, store.snapshot())
    assert change.count("tokens_asked") == 58 + 48
    assert change.tokens() == {"prefix": 96, "moved": 0, "recomputed": 0, "computed": 10}
    assert change.stage("lookup").count == 2
    hidden = change.hidden()
    assert hidden == 1.0, "no engine said that it waited"
    assert Change(None, first).count("tokens_asked") == 48

    store.served(prefix=40, moved=0, recomputed=0, computed=8, seconds=2.0, waited=0.0, without=3.0)
    change = Change(first, store.snapshot())
    assert change.tokens() == {"prefix": 40, "moved": 0, "recomputed": 0, "computed": 8}
    assert change.count("ttft_saved_us") == 1_000_000


def test_another_process_began_anew(store: KVStore) -> None:
    """A daemon that was restarted counts from 0: the difference to the one before would be below it."""
    put(store, prompt(1, 48))
    store.lookup(prompt(1, 48))
    now = store.snapshot()
    before = msgspec.structs.replace(
        now,
        pid=now.pid + 1,
        stats=msgspec.structs.replace(now.stats, counts={"tokens_asked": 1000}),
    )
    assert Change(before, now).count("tokens_asked") == 48
    assert Change(before, now).seconds is None
