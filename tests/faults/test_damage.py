"""Damaged files: right KV or a miss with a reason, never anything else. `bench.faults` tries more than 2,000."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.store import open_store
from tests.known_kv import LAYOUT, empty, identity, load, matches, prompt, put, small_profile

from .damage import build, damage_runs


@pytest.mark.parametrize("while_open", [False, True], ids=["while closed", "while open"])
def test_random_damage_of_any_file(tmp_path: Path, while_open: bool) -> None:
    """Truncated sessions read out of bounds, values listed but empty, a broken file that crashed its reader."""
    build(tmp_path / "pristine")
    seen = damage_runs(tmp_path / "pristine", tmp_path, trials=80, seed=1, while_open=while_open)
    assert seen.failures == []
    assert seen.trials == 80
    assert seen.outcomes["missed, reason counted"] > 10
    assert seen.outcomes["all loaded"] > 10
    assert {"blocks", "index", "FORMAT"} <= seen.files.keys()


def test_damage_in_a_late_layer_group_shortens_the_prefix(tmp_path: Path) -> None:
    """A transfer that failed while the block was already marked as loaded."""
    tokens = prompt(1, 64)
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        put(store, tokens)
        store.flush()
        store.demote(store.lookup(tokens))
        buffer = empty(64)
        with store.lease(store.lookup(tokens)) as lease:
            record = tmp_path / "kv" / "blocks" / lease.blocks[2].key[:16].hex()
            with record.open("r+b") as file:  # the last byte is in the last frame
                file.seek(-1, 2)
                last = file.read(1)[0]
                file.seek(-1, 2)
                file.write(bytes([last ^ 1]))
            good = [group.tokens for group in lease.layer_groups(buffer)]
            # A load runs ahead of who draws, so the damage may be known before the first group is given.
            assert good in ([64, 32], [32, 32])
            assert lease.length == 32
        assert matches(buffer, tokens, store.identity, 32)
        assert store.lookup(tokens).length == 32
        assert store.stats().misses == {"bad record: frame checksum": 1}
        assert [path.name for path in (tmp_path / "kv" / "quarantine").iterdir()] == [
            f"{record.name}.frame-checksum"
        ]
        put(store, tokens)
        assert load(store, tokens) == 64
        store.check()


def test_blocks_behind_a_damaged_one_serve_again_when_it_is_put_again(tmp_path: Path) -> None:
    tokens = prompt(1, 64)
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        put(store, tokens)
        store.flush()
        damaged = tmp_path / "kv" / "blocks" / store.lookup(tokens).blocks[1].key[:16].hex()
    damaged.write_bytes(b"nothing of use")
    for _ in range(2):
        with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
            assert load(store, tokens) == 16
            assert store.stats().cold.blocks == 3
            store.check()
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        result = put(store, tokens[:32])
        assert (result.held, result.stored) == (16, 16)
        assert load(store, tokens) == 64
        store.check()


def test_without_an_index_records_speak_for_themselves(tmp_path: Path) -> None:
    """Data on disk that was not found after a restart."""
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        for which in range(10):
            put(store, prompt(which, 60), wait=10)
    for path in (tmp_path / "kv" / "index").iterdir():
        path.unlink()
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        assert [load(store, prompt(which, 60)) for which in range(10)] == [60] * 10
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        assert store.stats().index == "sealed"
        assert [load(store, prompt(which, 60)) for which in range(10)] == [60] * 10


def test_quarantine_stays_within_the_budget(tmp_path: Path) -> None:
    """Files set aside for inspection that nobody ever removed."""
    profile = small_profile(hot_bytes=0, warm_bytes=8 * 4096, cold_bytes=600 * 1024)
    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        for which in range(60):
            put(store, prompt(which, 64), wait=10)
            store.flush()
            store.demote(store.lookup(prompt(which, 64)))
            (
                tmp_path / "kv" / "blocks" / store.lookup(prompt(which, 64)).blocks[0].key[:16].hex()
            ).write_bytes(bytes(LAYOUT.block_bytes(16)))
            assert load(store, prompt(which, 64)) == 0
            stats = store.stats()
            assert 0 <= stats.cold.used <= stats.cold.total
        assert stats.misses["bad record: magic"] == 60
        assert 0 < len(list((tmp_path / "kv" / "quarantine").iterdir())) < 60
        store.check()
