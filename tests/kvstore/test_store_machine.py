"""Random histories against a model that just remembers what was put.

Whatever was put, evicted, flushed, leased, dropped or reopened before: KV that a load returns is that of its tokens,
and a look-up finds no more than was put. Where nothing had to go it finds exactly that.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from kvstore.lease import Lease
from kvstore.store import KVStore, open_store
from tests.known_kv import empty, identity, known_kv, matches, quiet, small_profile

BLOCK = 4
KIB = 1024  # what a full block takes in memory


def _prompt(family: int, length: int, change: int) -> np.ndarray:
    """One of a few texts up to some length, with one token changed: prompts share beginnings of any length."""
    tokens = np.full(length, family)
    tokens[change:][:1] = 9
    return tokens


prompts = st.builds(_prompt, st.integers(0, 1), st.integers(1, 18), st.integers(0, 40))
owners = st.sampled_from([0, 0, 1])

ROOMY: dict[str, Any] = {"hot_bytes": 8 * KIB, "warm_bytes": 4096 * KIB, "cold_bytes": 64 << 20}
TIGHT: dict[str, Any] = {"hot_bytes": 2 * KIB, "warm_bytes": 6 * KIB, "cold_bytes": 340 * KIB}


class Histories(RuleBasedStateMachine):
    """The rules; the two classes below say how much room there is."""

    budgets: dict[str, Any]
    in_memory = False
    leases = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.put: list[list[tuple[int, ...]]] = [[], []]
        self.views: list[KVStore] = []
        self.held: list[Lease] = []
        self.open()

    def open(self) -> None:
        profile = small_profile(block_tokens=BLOCK, alignment=KIB, **self.budgets)
        path = None if self.in_memory else self.folder / "kv"
        first = open_store(path, identity=identity("a"), profile=profile)
        self.views = [first, first.view(identity("b"))]

    def longest(self, owner: int, tokens: np.ndarray) -> int:
        """The longest beginning of `tokens` that was put."""
        return max((_common(tokens, put) for put in self.put[owner]), default=0)

    @property
    def lossless(self) -> bool:
        return self.budgets is ROOMY

    @initialize()
    def nothing(self) -> None:
        assert self.views[0].stats().cold.blocks == 0

    @rule(owner=owners, tokens=prompts, start=st.integers(0, 18))
    def put_(self, owner: int, tokens: np.ndarray, start: int) -> None:
        store = self.views[owner]
        start = min(start, len(tokens) - 1, store.lookup(tokens).length)
        result = store.put(tokens, known_kv(tokens, store.identity, start), start=start)
        assert result.stored + result.held + result.refused == len(tokens) or result.reason
        self.put[owner].append(tuple(tokens))
        if self.lossless:
            assert result.refused == 0

    @rule(owner=owners, tokens=prompts)
    def load(self, owner: int, tokens: np.ndarray) -> None:
        store = self.views[owner]
        match = store.lookup(tokens)
        limit = self.longest(owner, tokens)
        assert match.length == limit if self.lossless else match.length <= limit
        spans = store.explain(tokens).spans
        assert sum(span.length for span in spans) == len(tokens)
        buffer = empty(len(tokens))
        with store.lease(match) as lease:
            assert lease.load_into(buffer) == lease.length
        assert lease.length == match.length or not self.lossless
        assert matches(buffer, tokens, store.identity, lease.length)

    @rule(target=leases, owner=owners, tokens=prompts)
    def lease(self, owner: int, tokens: np.ndarray) -> Any:
        if len(self.held) >= 3:
            return multiple()
        store = self.views[owner]
        lease = store.lease(store.lookup(tokens))
        self.held.append(lease)
        return lease, owner, tokens, lease.length

    @rule(held=leases, count=st.integers(0, 18))
    def load_held(self, held: tuple[Lease, int, np.ndarray, int], count: int) -> None:
        lease, owner, tokens, length = held
        if lease not in self.held:
            return
        assert lease.length == length, "what is leased does not vanish"
        buffer = empty(len(tokens))
        count = min(count, length)
        assert lease.load_into(buffer, length=count) == count
        assert matches(buffer, tokens, self.views[owner].identity, count)

    @rule(held=consumes(leases))
    def release(self, held: tuple[Lease, int, np.ndarray, int]) -> None:
        if held[0] in self.held:
            held[0].release()
            self.held.remove(held[0])

    @rule()
    def flush(self) -> None:
        self.views[0].flush(60)

    @rule(owner=owners, tokens=prompts, nearer=st.booleans())
    def move(self, owner: int, tokens: np.ndarray, nearer: bool) -> None:
        store = self.views[owner]
        if nearer:
            store.promote(store.lookup(tokens))
        else:
            store.demote(store.lookup(tokens))

    @rule(dice=st.integers(0, 5))
    def forget_everything(self, dice: int) -> None:
        if dice:
            return
        self.views[0].invalidate(everything=True)
        self.put = [[], []]
        for store in self.views:
            assert store.lookup([0]).length == store.lookup([1]).length == 0

    @precondition(lambda self: not self.lossless)
    @rule(owner=owners, tokens=prompts)
    def forget_prefix(self, owner: int, tokens: np.ndarray) -> None:
        store = self.views[owner]
        store.invalidate(prefix=tokens)
        assert store.lookup(tokens).length < len(tokens)

    @precondition(lambda self: not self.in_memory)
    @rule()
    def restart(self) -> None:
        for lease in self.held:
            lease.release()
        self.held = []
        self.views[0].close()
        self.open()
        assert self.views[0].stats().bad_records == {}

    @invariant()
    def accounts(self) -> None:
        self.views[0].check()

    def teardown(self) -> None:
        for lease in self.held:
            lease.release()
        quiet(self.views[0])
        stats = self.views[0].stats()
        assert (stats.hot.leased, stats.warm.leased, stats.cold.leased) == (0, 0, 0)
        self.views[0].invalidate(everything=True)
        stats = self.views[0].stats()
        assert (stats.hot.used, stats.warm.used, stats.cold.blocks) == (0, 0, 0)
        self.views[0].check()
        self.views[0].close()
        shutil.rmtree(self.folder)


def _common(tokens: np.ndarray, put: tuple[int, ...]) -> int:
    length = min(len(tokens), len(put))
    differ = np.flatnonzero(tokens[:length] != np.array(put[:length]))
    return int(differ[0]) if len(differ) else length


class Roomy(Histories):
    budgets = ROOMY


class Tight(Histories):
    budgets = TIGHT


class TightMemory(Histories):
    budgets = TIGHT
    in_memory = True


@pytest.mark.parametrize("machine", [Roomy, Tight, TightMemory])
def test_random_histories(machine: type[Histories]) -> None:
    case = machine.TestCase
    case.settings = settings(
        max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
    )
    case().runTest()
