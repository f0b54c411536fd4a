"""`kvstore top`: every figure of a snapshot is there, in any width, for any source."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len
from rich.console import Console

from kvstore.store import KVStore, open_store
from kvstore.watch import top
from kvstore.watch.snapshot import Snapshot
from tests.known_kv import identity, load, prompt, put, small_profile


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    profile = small_profile(cold_bytes_per_day=1 << 24)
    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        store.snapshot()
        put(store, prompt(1, 50))
        load(store, prompt(1, 50))
        yield store


def drawn(*seen: Snapshot, width: int = 100) -> str:
    console = Console(file=StringIO(), width=width)
    with console.capture() as captured:
        console.print(top.Picture(seen))
    return captured.get()


def test_one_picture(store: KVStore) -> None:
    console = Console(file=StringIO(), width=110, record=True)
    top.run(store.snapshot, once=True, console=console)
    text = console.export_text()
    stats = store.stats()
    assert str(store.path) in text
    for line in (
        f"{stats.warm.blocks} blocks",
        "of 16.0 MiB",
        "100.0% of 50",
        "written today",
        store.snapshot().prefixes[0].key,
        "nothing read ahead yet",
    ):
        assert line in text


def test_it_goes_on_until_interrupted(store: KVStore) -> None:
    found = [store.snapshot() for _ in range(3)]

    def source() -> Snapshot:
        if not found:
            raise KeyboardInterrupt
        return found.pop()

    output = StringIO()
    top.run(source, interval=0, console=Console(file=output, width=100, force_terminal=True))
    assert found == []
    assert output.getvalue().count("hottest prefixes") >= 3


def test_reuse_over_time_and_what_was_saved(store: KVStore) -> None:
    seen = [store.snapshot()]
    for prefix, computed in ((0, 50), (25, 25), (50, 0)):
        store.served(prefix=prefix, moved=0, recomputed=0, computed=computed, seconds=1.0, without=1.5)
        seen.append(store.snapshot())
    seen.append(store.snapshot())
    text = drawn(*seen)
    assert top.sparkline([0, 0.5, 1, None]) == "▁▄█·"
    assert "▁▄█·" in text
    assert "50.0% of 150" in text
    assert "3 requests, 1.5 s to first tokens saved" in text


@pytest.mark.parametrize("width", [20, 40, 79, 80, 100, 140, 250])
def test_in_any_width_each_line_fits(store: KVStore, width: int) -> None:
    told = msgspec.structs.replace(store.snapshot(), path="/ひらがな/" + 30 * "深い/")
    for line in drawn(told, width=width).splitlines():
        assert cell_len(line) <= width


def test_overlap_is_what_the_engine_need_not_wait_for(store: KVStore) -> None:
    first = store.snapshot()
    store.served(prefix=1, moved=0, recomputed=0, computed=1, seconds=1.0, waited=1000.0)
    load(store, prompt(1, 50))
    assert "0% of loading was not waited for" in drawn(first, store.snapshot())


def test_prefetch_and_reasons(store: KVStore) -> None:
    now = store.snapshot()
    counts = now.stats.counts | {"bytes_prefetched_read": 4 << 20, "bytes_prefetched_used": 3 << 20}
    stats = msgspec.structs.replace(now.stats, counts=counts, misses={"evicted between look-up and lease": 7})
    text = drawn(msgspec.structs.replace(now, stats=stats))
    assert "4.0 MiB read ahead, 75% of it used" in text
    assert "evicted between look-up and lease" in text
