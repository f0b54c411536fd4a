"""The cold tier by itself: past the page cache, within a day's write budget, forced to the medium in groups."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.errors import BudgetError
from kvstore.flash import flash_file, record
from kvstore.flash.flash_file import PAGE, FlashReader
from kvstore.flash.write_budget import WriteBudget
from kvstore.profile import Profile
from kvstore.store import open_store
from tests.faults.child import Child
from tests.known_kv import identity, load, prompt, put, small_profile

DAY = 86_400.0
SPENT = "today's write budget is spent"
BLOCK_ON_DISK = 3 * PAGE  # at most: a record of 4 KiB of KV and its header


# -- files past the page cache ------------------------------------------------------------------------


@pytest.fixture(params=["O_DIRECT", "page cache"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways, whatever the file system of the test offers."""
    if request.param == "page cache":
        monkeypatch.setattr(flash_file, "_O_DIRECT", 0)
    return request.param


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_what_is_read_is_what_was_written(tmp_path: Path, way: str, data: st.DataObject) -> None:
    """Any pieces, any part of them, scattered anyhow: offsets that no medium has as its own."""
    order = np.random.default_rng(data.draw(st.integers(0, 1000)))
    lengths = data.draw(st.lists(st.integers(0, 3 * PAGE), max_size=5))
    padding = -sum(lengths) % PAGE
    pieces = [order.bytes(length) for length in (*lengths, padding)]
    whole = b"".join(pieces)
    path = tmp_path / way
    status = flash_file.write(path, [memoryview(piece) for piece in pieces])
    assert status.st_size == len(whole)
    flash_file.sync(path)
    assert path.read_bytes() == whole
    reader = FlashReader(path)
    try:
        offset = data.draw(st.integers(0, len(whole)))
        wanted = data.draw(st.lists(st.integers(0, 2 * PAGE), max_size=4))
        found = [np.zeros(length, np.uint8) for length in wanted]
        right = whole[offset : offset + sum(wanted)]
        assert reader.read(found, offset) == len(right)
        assert b"".join(each.tobytes() for each in found)[: len(right)] == right
    finally:
        reader.close()


def test_a_file_larger_than_one_transfer(tmp_path: Path, way: str) -> None:
    content = np.random.default_rng(1).bytes(9 * (1 << 20))
    flash_file.write(tmp_path / way, [content[:5], content[5:]])
    reader = FlashReader(tmp_path / way)
    found = np.empty(len(content) - 77, np.uint8)
    assert reader.read([found], 77) == len(found)
    assert found.tobytes() == content[77:]
    reader.close()


def test_lengths_that_cannot_be_direct_are_written_all_the_same(tmp_path: Path, way: str) -> None:
    flash_file.write(tmp_path / way, [b"abc", bytes(5000)])
    assert (tmp_path / way).read_bytes() == b"abc" + bytes(5000)


def test_records_are_not_kept_in_the_page_cache_as_well(tmp_path: Path) -> None:
    """Memory that filled twice, once by the cache and once by the page cache."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(PAGE))
    flash_file.sync(probe)
    if _is_cached(probe):
        pytest.skip("needs a file system whose page cache can be dropped")
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        put(store, prompt(1, 64))
        store.flush()
        records = list((tmp_path / "kv" / "blocks").iterdir())
        assert len(records) == 4
        assert not any(_is_cached(record) for record in records), "after writing"
        store.demote(store.lookup(prompt(1, 64)))
        assert load(store, prompt(1, 64)) == 64
        assert not any(_is_cached(record) for record in records), "after reading"


def _is_cached(path: Path) -> bool:
    """Whether the page cache holds any page of a file. Asks without touching it."""
    size = path.stat().st_size
    resident = (ctypes.c_ubyte * -(-size // PAGE))()
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        view = np.frombuffer(mapped, np.uint8)
        address = ctypes.c_void_p(view.ctypes.data)
        assert ctypes.CDLL(None).mincore(address, ctypes.c_size_t(size), resident) == 0
        del view
    return any(each & 1 for each in resident)


# -- what may be written in a day --------------------------------------------------------------------


class Clock:
    """Unix seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 1000 * DAY

    def __call__(self) -> float:
        return self.now


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["take", "close", "kill"]), st.integers(0, 400)), max_size=40)
)
def test_a_day_never_sees_more_than_its_budget(tmp_path: Path, steps: list[tuple[str, int]]) -> None:
    """However often the store is closed or killed in between."""
    file, clock = tmp_path / "writes", Clock()
    file.unlink(missing_ok=True)
    budget, written = WriteBudget(file, 1000, clock), 0
    for step, nbytes in steps:
        if step == "take":
            before = budget.spent
            if budget.take(nbytes):
                written += nbytes
            else:
                assert before + nbytes > 1000, "refused only where there was no room"
        else:
            if step == "close":
                budget.close()
            budget = WriteBudget(file, 1000, clock)
            assert budget.spent == written if step == "close" else budget.spent >= written
            written = budget.spent
        assert written <= budget.spent <= 1000


def test_a_new_day_has_a_new_budget(tmp_path: Path) -> None:
    clock = Clock()
    budget = WriteBudget(tmp_path / "writes", 1000, clock)
    assert budget.take(1000)
    assert not budget.take(1)
    clock.now += DAY
    assert budget.take(400)
    budget.close()
    again = WriteBudget(tmp_path / "writes", 1000, clock)
    assert again.spent == 400
    clock.now += DAY
    assert again.take(1000)


def test_a_clock_that_is_set_back_buys_nothing(tmp_path: Path) -> None:
    """A counter by day that a wrong clock reset, or locked for years."""
    clock = Clock()
    budget = WriteBudget(tmp_path / "writes", 1000, clock)
    assert budget.take(900)
    clock.now -= 3 * DAY
    assert not budget.take(200)
    budget.close()
    again = WriteBudget(tmp_path / "writes", 1000, clock)
    assert not again.take(200)
    clock.now += 2 * DAY
    assert again.take(1000), "what a wrong clock said holds for a day, not until that day"


def test_what_was_taken_and_not_written_is_given_back(tmp_path: Path) -> None:
    budget = WriteBudget(tmp_path / "writes", 1000, Clock())
    assert budget.take(900)
    budget.give_back(800)
    assert budget.take(900)
    assert not budget.take(1)


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\0" * 100])
def test_a_damaged_count_starts_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "writes").write_bytes(content)
    budget = WriteBudget(tmp_path / "writes", 1000, Clock())
    assert budget.take(1000)


def test_a_count_that_cannot_be_kept_lets_nothing_be_written(tmp_path: Path) -> None:
    budget = WriteBudget(tmp_path / "gone" / "writes", 1000, Clock())
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            budget.take(10)
    assert budget.spent == 0


def test_without_a_limit_nothing_is_kept(tmp_path: Path) -> None:
    budget = WriteBudget(tmp_path / "writes", None, Clock())
    assert budget.take(1 << 60)
    budget.close()
    assert not (tmp_path / "writes").exists()


# -- the store within it -----------------------------------------------------------------------------


def test_a_spent_budget_is_counted_and_memory_goes_on(tmp_path: Path) -> None:
    profile = small_profile(cold_bytes_per_day=1 << 20)
    written = 0
    for opening in range(3):
        with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
            before = store.stats().counts["bytes_written_today"]
            assert before >= written, "counted across restarts"
            for seed in range(60):
                assert put(store, prompt(1000 * opening + seed, 64), wait=10).refused == 0
                assert load(store, prompt(1000 * opening + seed, 64)) == 64
            store.flush()
            stats = store.stats()
            written = stats.counts["bytes_written_today"]
            assert written <= 1 << 20
            assert stats.refusals[SPENT] > 0
            assert stats.refusals.keys() <= {SPENT, "index not written"}
            assert stats.cold.blocks > 0
            store.check()
    assert written > (1 << 20) - (256 << 10), "the budget is used, but for what a record may need at most"


def test_no_writes_to_flash_at_all(tmp_path: Path) -> None:
    with open_store(
        tmp_path / "kv", identity=identity(), profile=small_profile(cold_bytes_per_day=0)
    ) as store:
        put(store, prompt(1, 64))
        store.flush()
        assert load(store, prompt(1, 64)) == 64
        assert store.stats().cold.blocks == 0
        assert store.stats().refusals == {SPENT: 4}
    with pytest.raises(BudgetError, match="cold_bytes_per_day -1"):
        Profile(cold_bytes_per_day=-1)


def test_a_kill_gives_no_budget_back(tmp_path: Path) -> None:
    child = Child(_write_and_die, str(tmp_path / "kv"))
    written = child.receive()
    child.join()
    assert written > 0
    with open_store(tmp_path / "kv", identity=identity(), profile=_LIMITED) as store:
        assert store.stats().counts["bytes_written_today"] >= written
        assert load(store, prompt(1, 64)) == 64


_LIMITED = small_profile(cold_bytes_per_day=16 << 20)


def _write_and_die(connection: Connection, directory: str) -> None:
    store = open_store(directory, identity=identity(), profile=_LIMITED)
    put(store, prompt(1, 64))
    store.flush()
    connection.send(store.stats().counts["bytes_written_today"])
    connection.close()
    os._exit(1)


# -- groups ------------------------------------------------------------------------------------------


def test_records_are_forced_to_the_medium_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unasked, by amount; not one by one. What an interrupted write may cost stays bounded without a flush."""
    monkeypatch.setattr("kvstore.flash.cold._COMMIT", 20 * BLOCK_ON_DISK)
    synced: list[str] = []
    real = flash_file.sync

    def sync(path: Path) -> None:
        synced.append(Path(path).name)
        real(path)

    monkeypatch.setattr(flash_file, "sync", sync)
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        for seed in range(3):
            put(store, prompt(seed, 64), wait=10)
        while store.stats().waiting:
            pass
        few = len(synced)
        for seed in range(3, 60):
            put(store, prompt(seed, 64), wait=10)
        while store.stats().waiting:
            pass
        assert few == 0
        assert len(synced) > 100
        assert len(set(synced)) == len(synced), "each once"
        store.flush()
        assert len(synced) == 240


def test_a_record_is_checked_whole_and_by_groups(tmp_path: Path) -> None:
    """Also where a group is cut by the end of a transfer, and where the file ends too early."""
    order = np.random.default_rng(4)
    stored = [order.bytes(length) for length in (3 << 20, 3 << 20, 1, 70_000)]
    table, offset = [], 0
    for each in stored:
        checksum = xxhash.xxh3_64_intdigest(each)
        table.append(record.Frame(offset, (0, 1), "", (len(each),), len(each), checksum))
        offset += len(each)
    header = record.Header(bytes(32), bytes(32), b"", 0, bytes(512), True, tuple(table))
    whole = b"".join(record.assemble(header, stored))

    def check(content: bytes) -> None:
        path = tmp_path / "record"
        path.write_bytes(content)
        reader = record.RecordReader(path)
        try:
            reader.check_frames()
            for number in range(len(stored)):
                reader.check_frame(number)
        finally:
            reader.close()

    check(whole)
    start = len(whole) - offset
    for at in (start, start + (4 << 20), start + (6 << 20), len(whole) - 1):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        with pytest.raises(record.BadRecordError, match="frame checksum"):
            check(bytes(damaged))
    reader = record.RecordReader(_file(tmp_path / "cut", whole))
    os.truncate(tmp_path / "cut", len(whole) - PAGE)
    with pytest.raises(record.BadRecordError, match="truncated: group 3"):
        reader.check_frames()
    reader.close()


@pytest.mark.parametrize("wrong", [0, 1, 4096, -1, 4097, 50_000, 10_000_000])
def test_the_first_frame_comes_with_the_header_in_one_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: int
) -> None:
    """Where it is known how long both are; where that is wrong, the same bytes come in more reads."""
    order = np.random.default_rng(4)
    stored = [order.bytes(length) for length in (70_000, 30_000)]
    checksums = [xxhash.xxh3_64_intdigest(each) for each in stored]
    table = (
        record.Frame(0, (0, 1), "", (60_000, 10_000), 70_000, checksums[0]),
        record.Frame(70_000, (1, 2), "", (30_000,), 30_000, checksums[1]),
    )
    header = record.Header(bytes(32), bytes(32), b"", 0, bytes(512), True, table)
    file = _file(tmp_path / "record", b"".join(record.assemble(header, stored)))
    reads = []
    plain = record.FlashReader.read

    def read(self: record.FlashReader, pieces: Sequence[NDArray[np.uint8]], offset: int) -> int:
        reads.append(offset)
        return plain(self, pieces, offset)

    with contextlib.closing(record.RecordReader(file)) as known:
        right = known.head_bytes
    monkeypatch.setattr(record.FlashReader, "read", read)
    for ahead in (right, wrong):
        reads.clear()
        with contextlib.closing(record.RecordReader(file, None, ahead)) as reader:
            for number, content in enumerate(stored):
                pieces = [np.empty(length, np.uint8) for length in table[number].lengths]
                reader.stored(number, pieces)
                assert b"".join(piece.tobytes() for piece in pieces) == content
            assert reader.bytes_read == file.stat().st_size
        assert len(reads) == (2 if ahead >= right else 3)


def test_a_damaged_first_frame_is_found_also_when_it_comes_with_the_header(tmp_path: Path) -> None:
    content = np.random.default_rng(4).bytes(70_000)
    frame = record.Frame(0, (0, 1), "", (70_000,), 70_000, xxhash.xxh3_64_intdigest(content))
    header = record.Header(bytes(32), bytes(32), b"", 0, bytes(512), True, (frame,))
    whole = bytearray(b"".join(record.assemble(header, [content])))
    whole[-1] ^= 1
    with (
        contextlib.closing(
            record.RecordReader(_file(tmp_path / "record", bytes(whole)), None, len(whole))
        ) as reader,
        pytest.raises(record.BadRecordError, match="frame checksum"),
    ):
        reader.stored(0, [np.empty(70_000, np.uint8)])


def _file(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path
