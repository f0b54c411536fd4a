"""What flash holds is findable again: when its directory is opened, and when a key comes later."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from kvstore.flash.encryption import Key
from kvstore.open_directory import OpenDirectory
from kvstore.store import KVStore
from tests.known_kv import identity, load, prompt, put, small_profile


def test_what_another_key_opens_serves_identities_that_are_open_already(tmp_path: Path) -> None:
    """Blocks of those had no size: their records failed the check of their shape, and were set aside."""
    older, newer = Key(b"o" * 32), Key(b"n" * 32)
    first, second = identity("a", salt=b"one"), identity("b", salt=b"one")
    tokens = prompt(1, 70)
    with closing(OpenDirectory(tmp_path / "kv", small_profile())) as opened:
        put(KVStore(opened, first, [older]), tokens)
    with closing(OpenDirectory(tmp_path / "kv", small_profile())) as opened:
        store = KVStore(opened, first, [newer])
        assert load(store, tokens) == 0
        KVStore(opened, second, [older, newer])
        assert load(store, tokens) == len(tokens)
        assert store.stats().misses == {}
        store.check()


def test_what_waited_for_a_parent_under_another_key_is_found_behind_it(tmp_path: Path) -> None:
    """It stayed an orphan, which no prefix reaches, until the next restart."""
    older, newer = Key(b"o" * 32), Key(b"n" * 32)
    tenant, tokens = identity(salt=b"one"), prompt(1, 70)
    for keys, length in (([older], 32), ([older, newer], 70)):
        with closing(OpenDirectory(tmp_path / "kv", small_profile())) as opened:
            put(KVStore(opened, tenant, keys), tokens[:length])
    with closing(OpenDirectory(tmp_path / "kv", small_profile())) as opened:
        assert load(KVStore(opened, tenant, [newer]), tokens) == 0
        store = KVStore(opened, tenant, [older, newer])
        assert load(store, tokens) == len(tokens)
        store.check()
