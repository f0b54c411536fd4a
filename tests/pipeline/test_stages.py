"""A flow of tiles: in order, bounded, ended at once, and no failure of one tile stops another."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.pipeline.stages import Direct, Flow, FlowStopped


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 4), st.sets(st.integers(0, 39)), st.data())
def test_what_was_waited_for_is_done_and_each_failure_told_once(
    count: int, threads: int, width: int, bad: set[int], data: st.DataObject
) -> None:
    lock, done, running, most = threading.Lock(), list[int](), 0, 0

    def work(tile: int) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0)
        with lock:
            running -= 1
            done.append(tile)
        if tile in bad:
            raise ValueError(tile)

    with ThreadPoolExecutor(threads) as pool:
        flow = Flow(pool, range(count), work, width)
        told: list[int] = []
        for target in sorted(data.draw(st.lists(st.integers(0, count), max_size=4))):
            told += [tile for tile, _ in flow.wait(target)]
            with lock:
                assert set(range(target)) <= set(done)
                assert {tile for tile in bad if tile < target} <= set(told)
        told += [tile for tile, _ in flow.wait(count)]
    assert sorted(done) == list(range(count))
    assert sorted(told) == sorted(tile for tile in bad if tile < count)
    assert most <= min(width, threads)


def test_stopped_it_begins_nothing_more_and_leaves_nothing_running() -> None:
    begun, entered, go_on = list[int](), threading.Event(), threading.Event()

    def work(tile: int) -> None:
        begun.append(tile)
        entered.set()
        go_on.wait(10)

    with ThreadPoolExecutor(1) as pool:
        flow = Flow(pool, range(100), work)
        entered.wait(10)
        stopping = threading.Thread(target=flow.stop)
        stopping.start()
        stopping.join(0.05)
        assert stopping.is_alive(), "a tile was still being worked on"
        go_on.set()
        stopping.join(10)
        assert begun == [0]
        with pytest.raises(FlowStopped, match="1 of 100"):
            flow.wait(100)
        assert flow.wait(1) == []


def test_a_pool_that_shuts_down_ends_the_wait() -> None:
    """A wait that never ended, since the last tile had no thread to run on."""
    pool = ThreadPoolExecutor(1)
    gate = threading.Event()
    flow = Flow(pool, range(10), lambda _: gate.wait(10))
    pool.shutdown(wait=False)
    gate.set()
    with pytest.raises(FlowStopped):
        flow.wait(10)
    with pytest.raises(FlowStopped):
        Flow(pool, range(3), print).wait(3)


def test_flows_of_one_pool_take_turns() -> None:
    """A second request that waited until the whole load of the first was done."""
    order = list[str]()
    gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(gate.wait, 10)
        flows = [Flow(pool, [name] * 20, order.append, 1) for name in "ab"]
        gate.set()
        for flow in flows:
            flow.wait(20)
    assert order == ["a", "b"] * 20


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 20), st.sets(st.integers(0, 19)), st.lists(st.integers(0, 20), max_size=4))
def test_direct_work_is_done_in_order_one_tile_at_a_time(
    count: int, bad: set[int], targets: list[int]
) -> None:
    done, running = list[int](), threading.Lock()

    def work(tile: int) -> None:
        assert running.acquire(blocking=False), "two tiles at a time"
        time.sleep(0)
        done.append(tile)
        running.release()
        if tile in bad:
            raise ValueError(tile)

    with ThreadPoolExecutor(2) as pool:
        direct, told = Direct(pool, range(count), work), list[int]()
        for target in [*(min(target, count) for target in targets), count]:
            told += [tile for tile, _ in direct.wait(target)]
            assert done[:target] == list(range(target))
            assert {tile for tile in bad if tile < target} <= set(told)
        assert done == list(range(count))
        assert told == [tile for tile in done if tile in bad]


def test_direct_work_goes_on_while_nobody_waits() -> None:
    done, last = list[int](), threading.Event()

    def work(tile: int) -> None:
        done.append(tile)
        if tile == 9:
            last.set()

    with ThreadPoolExecutor(1) as pool:
        direct = Direct(pool, range(10), work)
        direct.wait(3)
        assert last.wait(10)
        assert direct.wait(10) == []
    assert done == list(range(10))


@pytest.mark.parametrize("closed", [False, True])
def test_who_waits_for_direct_work_needs_no_thread_of_the_pool(closed: bool) -> None:
    """A request that stood still behind the reads of others, for what lay in memory."""
    pool, gate, done = ThreadPoolExecutor(1), threading.Event(), list[int]()
    pool.submit(gate.wait, 10)
    if closed:
        pool.shutdown(wait=False)
    direct = Direct(pool, range(5), done.append)
    direct.wait(5)
    assert done == list(range(5))
    gate.set()
    pool.shutdown()


def test_stopped_direct_work_begins_nothing_more() -> None:
    begun, go_on = threading.Event(), threading.Event()

    def work(_: int) -> None:
        begun.set()
        go_on.wait()

    with ThreadPoolExecutor(3) as pool:
        direct = Direct(pool, [0, 1], work)
        waiting = pool.submit(direct.wait, 2)
        begun.wait()
        stopping = pool.submit(direct.stop)
        time.sleep(0.01)
        assert not stopping.done(), "a tile was still being worked on"
        go_on.set()
        stopping.result()
        with pytest.raises(FlowStopped):
            waiting.result()
