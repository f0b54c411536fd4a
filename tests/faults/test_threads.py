"""Eight threads that put, look up, load, hold, move and forget, with room for little."""

from __future__ import annotations

import faulthandler
import os
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore.errors import StoreClosedError
from kvstore.store import KVStore, open_store
from tests.known_kv import empty, identity, load, matches, prompt, put, quiet, small_profile

SECONDS = float(os.environ.get("KVSTORE_STRESS_SECONDS", "3"))
_THREADS = 8
_OWNERS = ("a", "b", "c")


@pytest.fixture
def watchdog() -> Iterator[None]:
    """A deadlock shows where it is, and ends."""
    faulthandler.dump_traceback_later(SECONDS + 120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.mark.usefixtures("watchdog")
@pytest.mark.parametrize("on_flash", [True, False], ids=["with flash", "memory only"])
def test_threads_never_see_wrong_or_moving_kv(tmp_path: Path, on_flash: bool) -> None:
    """Blocks that came back wrong under load, that were copied while in use, or mixed with another prompt's."""
    profile = small_profile(hot_bytes=8 * 4096, warm_bytes=48 * 4096, cold_bytes=900 * 1024)
    path = tmp_path / "kv" if on_flash else None
    failures: list[str] = []
    loaded = [0] * _THREADS
    with open_store(path, identity=identity(_OWNERS[0]), profile=profile) as store:
        views = [store.view(identity(name)) for name in _OWNERS]
        stop = time.monotonic() + SECONDS
        threads = [
            threading.Thread(target=_worker, args=(number, views, stop, loaded, failures))
            for number in range(_THREADS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        quiet(store)
        store.check()
        stats = store.stats()
        assert (stats.hot.leased, stats.warm.leased, stats.cold.leased) == (0, 0, 0), "a lease was leaked"
        assert stats.waiting == 0
        assert min(loaded) > 0
        assert stats.counts["evicted_warm"] > 0
        assert stats.counts["moved_hot_warm"] > 0
        assert not {reason for reason in stats.misses if reason.startswith("bad record")}
        store.invalidate(everything=True)
        stats = store.stats()
        assert (stats.hot.used, stats.warm.used, stats.cold.blocks) == (0, 0, 0)
    if on_flash:
        assert not list((tmp_path / "kv" / "blocks").iterdir())


def _worker(number: int, views: list[KVStore], stop: float, loaded: list[int], failures: list[str]) -> None:
    order = random.Random(number)
    try:
        while time.monotonic() < stop and not failures:
            view = order.choice(views)
            tokens = prompt(order.randrange(12), 90)[: order.randrange(1, 90)]
            action = order.randrange(12)
            if action < 4:
                put(view, tokens, wait=order.choice((0, 0.05)))
            elif action < 8:
                loaded[number] += load(view, tokens)
            elif action == 8:
                _hold(view, tokens, order)
            elif action == 9:
                view.invalidate(prefix=tokens)
            elif action == 10:
                view.promote(view.lookup(tokens))
                view.demote(view.lookup(tokens))
            else:
                view.explain(tokens)
                view.stats()
                view.check()
                if order.random() < 0.1:
                    view.flush(60)
    except BaseException as error:
        failures.append(f"thread {number}: {type(error).__name__}: {error}")
        raise


def _hold(view: KVStore, tokens: object, order: random.Random) -> None:
    """Hold a lease for a while: its blocks stay where they are, and load right at the end as at the start."""
    with view.lease(view.lookup(tokens)) as lease:  # type: ignore[arg-type]
        in_memory = [(block, block.memory.extent) for block in lease.blocks if block.memory is not None]
        for _ in range(2):
            buffer = empty(lease.length)
            assert lease.load_into(buffer) == lease.length
            assert matches(buffer, tokens, view.identity, lease.length), "wrong KV"  # type: ignore[arg-type]
            time.sleep(order.uniform(0, 0.02))
        for block, extent in in_memory:
            assert block.memory is not None, "a leased block left memory"
            assert block.memory.extent == extent, "a leased block moved"


def test_closing_while_others_use_it(tmp_path: Path) -> None:
    """Whoever comes late gets StoreClosedError, never a crash, a hang or another error."""
    for round_ in range(8):
        store = open_store(tmp_path / "kv", identity=identity(), profile=small_profile())
        failures: list[str] = []
        started = threading.Barrier(_THREADS + 1)

        def use(number: int, store=store, failures=failures, started=started) -> None:  # type: ignore[no-untyped-def]
            order = random.Random(number)
            started.wait()
            try:
                while True:
                    tokens = prompt(order.randrange(6), 90)[: order.randrange(1, 90)]
                    put(store, tokens, wait=order.choice((0, 0.2)))
                    load(store, tokens)
                    store.promote(store.lookup(tokens))
                    if order.random() < 0.1:
                        store.flush()
            except StoreClosedError:
                pass
            except BaseException as error:
                failures.append(f"{type(error).__name__}: {error}")
                raise

        threads = [threading.Thread(target=use, args=(number,)) for number in range(_THREADS)]
        for thread in threads:
            thread.start()
        started.wait()
        time.sleep(0.02 * round_)
        store.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert failures == []
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as store:
        for which in range(6):
            load(store, prompt(which, 90))
        assert store.stats().misses == {}
