"""What a hit on a block saves, by where it lies: worked out by hand from the costs of a device."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.prefetch.cost import DEVICES
from kvstore.prefetch.load_or_recompute import Throughput
from kvstore.store import open_store
from kvstore.tiers.appraisal import Appraisal
from tests.known_kv import identity, prompt, put, small_profile

MID = DEVICES["mid"]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_a_hit_saves_is_what_doing_without_it_would_take(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        put(store, prompt(1, 40))
        appraisal = Appraisal("mid", Throughput())
        _, second, last = store.lookup(prompt(1, 40)).blocks
        compute = MID.recompute_seconds(32) * 16 / 32
        copy = MID.load_seconds(second.nbytes, "warm")
        before = appraisal.facts(second, "warm")
        assert before.saved == pytest.approx(compute - copy), "flash has it not yet"
        assert (before.nbytes, before.whole, before.uses) == (second.nbytes, True, 1)
        store.flush()
        load = MID.load_seconds(second.cold_bytes, "cold")
        assert appraisal.facts(second, "warm").saved == pytest.approx(load - copy)
        assert appraisal.facts(second, "hot").saved == pytest.approx(copy)
        cold = appraisal.facts(second, "cold")
        assert cold.saved == pytest.approx(compute - load)
        assert cold.nbytes == second.cold_bytes
        tail = appraisal.facts(last, "cold")
        assert not tail.whole
        assert tail.parent == second.number


def test_what_was_measured_counts_instead(tmp_path: Path) -> None:
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        put(store, prompt(1, 32))
        store.flush()
        clock = Clock()
        flash = Throughput(clock)
        appraisal = Appraisal("mid", flash)
        first, _ = store.lookup(prompt(1, 32)).blocks
        flash.begin()
        clock.now += 2.0
        flash.end(1000)
        store.served(prefix=0, moved=0, recomputed=0, computed=32, seconds=8.0, without=8.0)
        saved = appraisal.facts(first, "cold").saved
        assert saved == pytest.approx(16 * 8.0 / 32 - first.cold_bytes / 500)
        store.served(prefix=0, moved=0, recomputed=0, computed=3, seconds=9.0, without=9.0)
        assert appraisal.facts(first, "cold").saved == saved, "what is short is mostly padding"
