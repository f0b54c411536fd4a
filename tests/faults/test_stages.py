"""A fault in any stage of a load ends in the right answer, later: affected tokens are computed again.

The answer is compared with that of a prefill without any store. Moved runs are computed again whole, as then they give
the same answer too, so that a wrong byte anywhere would show.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import kvstore
from bench.simulated_device import reads_take
from kvstore import load
from kvstore.flash import flash_file, record
from kvstore.flash.flash_file import FlashReader
from kvstore.flash.record import BadRecordError, RecordReader
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.recompute import AnyRepair, Everything
from kvstore.pipeline.simulated import SimulatedFlash
from kvstore.prefill import Prefilled, prefill
from kvstore.session import identity_of
from kvstore.store import KVStore
from tests.tiny_models import write_tiny_gguf

from .aborts import PROFILE, Footprint

Tokens = NDArray[np.int32]


def some(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 300, length).astype(np.int32)


SYSTEM, ONE, TWO = some(1, 64), some(2, 70), some(3, 50)
FIRST = np.concatenate([SYSTEM, some(4, 32), ONE, TWO])
SECOND = np.concatenate([SYSTEM, TWO, some(5, 20), ONE, some(6, 9)])
EXACT = np.concatenate([FIRST, some(7, 10)])


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> StaticGraphEngine:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_gguf(folder / "tiny.gguf", layers=6)
    return StaticGraphEngine(
        folder / "tiny.gguf", cache=folder / "cache", sizes=(1, 16, 64), contexts=(512,), groups=3
    )


@pytest.fixture
def store(tmp_path: Path, engine: StaticGraphEngine) -> Iterator[KVStore]:
    """Holds FIRST, on flash only."""
    with kvstore.open(tmp_path / "kv", identity=identity_of(engine, "00" * 32), profile=PROFILE) as opened:
        kv = engine.allocate(len(FIRST))
        engine.prefill(FIRST, kv)
        assert opened.put(FIRST, kv, wait=10).refused == 0
        opened.flush()
        opened.demote(opened.lookup(FIRST))
        assert {block.tier for block in opened.lookup(FIRST).blocks} == {"cold"}
        yield opened


PROMPTS = pytest.mark.parametrize(
    ("prompt", "repair"), [(EXACT, None), (SECOND, Everything())], ids=["prefix", "moved"]
)


def served(engine: StaticGraphEngine, store: KVStore, prompt: Tokens, repair: AnyRepair | None) -> Prefilled:
    """Prefill with the store, and the promises that hold whatever happened."""
    plain = engine.prefill(prompt, engine.allocate(len(prompt)))
    kv = engine.allocate(len(prompt))
    done = prefill(engine, store, prompt, kv, repair)
    engine.recycle(kv)
    left = Footprint.now(store)
    assert (left.leased, left.in_memory, left.loads) == (0, 0, 0)
    np.testing.assert_allclose(done.logits, plain, atol=1e-4)
    assert done.prefix + done.moved + done.recomputed + done.computed == len(prompt)
    return done


class Fault:
    """Strikes at the `at`-th call and at all that follow within `times`."""

    def __init__(self, at: int, raising: Callable[[], Exception], times: int = 1) -> None:
        self._calls = 0
        self._span = range(at, at + times)
        self._raising = raising
        self.struck = 0

    def __call__(self) -> None:
        self._calls += 1
        if self._calls - 1 in self._span:
            self.struck += 1
            raise self._raising()


@PROMPTS
@pytest.mark.parametrize("at", [0, 1, 4, 9])
def test_a_read_fails(
    engine: StaticGraphEngine,
    store: KVStore,
    monkeypatch: pytest.MonkeyPatch,
    prompt: Tokens,
    repair: AnyRepair | None,
    at: int,
) -> None:
    fault = Fault(at, lambda: OSError(errno.EIO, os.strerror(errno.EIO)))

    class Reader(FlashReader):
        def read(self, pieces: Sequence[NDArray[np.uint8]], offset: int) -> int:
            if offset:  # a frame; heads of records, the first frame with them, are tried twice
                fault()
            return super().read(pieces, offset)

    monkeypatch.setattr(record, "FlashReader", Reader)
    done = served(engine, store, prompt, repair)
    assert fault.struck == 1
    assert done.prefix + done.recomputed < (len(FIRST) if repair is None else len(SYSTEM) + 120)
    assert store.stats().misses["bad record: unreadable"] == 1


@PROMPTS
@pytest.mark.parametrize("place", [0.1, 0.5, 0.999])
def test_a_frame_is_not_what_was_written(
    engine: StaticGraphEngine,
    store: KVStore,
    tmp_path: Path,
    prompt: Tokens,
    repair: AnyRepair | None,
    place: float,
) -> None:
    for path in sorted((tmp_path / "kv" / "blocks").iterdir())[::2]:
        content = bytearray(path.read_bytes())
        content[int(len(content) * place)] ^= 0x10
        path.write_bytes(content)
    done = served(engine, store, prompt, repair)
    assert done.prefix + done.recomputed < len(FIRST)
    assert any(reason.startswith("bad record") for reason in store.stats().misses)
    again = served(engine, store, prompt, repair)  # what was damaged is not asked again
    assert again.prefix + again.recomputed <= done.prefix + done.recomputed


@PROMPTS
@pytest.mark.parametrize("at", [0, 3, 8])
@pytest.mark.parametrize(
    "raising",
    [lambda: BadRecordError("decode", "injected"), lambda: ValueError("injected"), MemoryError],
    ids=["bad record", "value", "memory"],
)
def test_decoding_fails(
    engine: StaticGraphEngine,
    store: KVStore,
    monkeypatch: pytest.MonkeyPatch,
    prompt: Tokens,
    repair: AnyRepair | None,
    at: int,
    raising: Callable[[], Exception],
) -> None:
    fault, frame = Fault(at, raising), RecordReader.frame

    def failing(*args: Any) -> None:
        fault()
        frame(*args)

    monkeypatch.setattr(RecordReader, "frame", failing)
    served(engine, store, prompt, repair)
    assert fault.struck == 1
    assert sum(store.stats().misses.values()) == 1


@PROMPTS
@pytest.mark.parametrize("at", [0, 5])
def test_placing_fails(
    engine: StaticGraphEngine,
    store: KVStore,
    monkeypatch: pytest.MonkeyPatch,
    prompt: Tokens,
    repair: AnyRepair | None,
    at: int,
) -> None:
    """Also of what lies in memory: an exception of another kind than a damaged record's ended the request."""
    store.promote(store.lookup(prompt, moved=True), to="warm")
    fault, bring_tile = Fault(at, lambda: RuntimeError("injected")), load.bring_tile

    def failing(*args: Any) -> None:
        fault()
        bring_tile(*args)

    monkeypatch.setattr(load, "bring_tile", failing)
    served(engine, store, prompt, repair)
    assert fault.struck == 1
    assert store.stats().misses["not loaded: RuntimeError"] == 1


@PROMPTS
def test_everything_fails(
    engine: StaticGraphEngine,
    store: KVStore,
    monkeypatch: pytest.MonkeyPatch,
    prompt: Tokens,
    repair: AnyRepair | None,
) -> None:
    fault = Fault(0, lambda: OSError(errno.EIO, "injected"), times=10_000)

    class Reader(FlashReader):
        def __init__(self, path: str | os.PathLike[str]) -> None:
            fault()
            super().__init__(path)

    monkeypatch.setattr(record, "FlashReader", Reader)
    done = served(engine, store, prompt, repair)
    assert done.computed == len(prompt)


@PROMPTS
def test_a_slow_medium_is_waited_for_once_and_then_left_alone(
    engine: StaticGraphEngine, store: KVStore, prompt: Tokens, repair: AnyRepair | None
) -> None:
    flash = SimulatedFlash(lambda _: 0.1)
    with reads_take(flash):
        first = served(engine, store, prompt, repair)
        read = flash.busy_seconds
        store.flush()
        store.flush()
        store.demote(store.lookup(FIRST))
        second = served(engine, store, prompt, repair)
    assert first.bytes_read > 0
    assert flash.busy_seconds - read < read / 2
    assert second.computed > first.computed


@PROMPTS
def test_a_full_disk(
    engine: StaticGraphEngine,
    store: KVStore,
    monkeypatch: pytest.MonkeyPatch,
    prompt: Tokens,
    repair: AnyRepair | None,
) -> None:
    """What cannot be written stays in memory and serves from there."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(flash_file, "write", full)
    kv = engine.allocate(len(prompt))
    done = prefill(engine, store, prompt, kv, repair)
    assert store.put(prompt, kv, wait=10).refused == 0
    store.flush()
    again = served(engine, store, prompt, None)
    assert again.prefix == len(prompt) - 1
    assert again.prefix > done.prefix
    assert store.stats().refusals["disk full or not writable"] > 0
