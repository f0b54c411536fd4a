"""Vectors by block against a dictionary that is searched one by one, with FAISS and without."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray

from kvstore.index.errors import BlockRefused, UnknownBlock
from kvstore.index.vectors import Vectors, backend

DIMENSION = 8


@pytest.fixture(params=["faiss", "numpy"], autouse=True)
def searcher(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setitem(sys.modules, "faiss", None)  # importing fails, as where it is not installed
    assert backend().startswith(request.param)
    return str(request.param)


def unit(seed: int) -> NDArray[np.float32]:
    vector = np.random.default_rng(seed).standard_normal(DIMENSION, np.float32)
    return vector / np.linalg.norm(vector)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.vectors = Vectors(DIMENSION)
        self.oracle: dict[int, NDArray[np.float32]] = {}

    @rule(block=st.integers(0, 300), seed=st.integers(0, 2**32))
    def add(self, block: int, seed: int) -> None:
        if block in self.oracle:
            with pytest.raises(BlockRefused, match=f"block {block} has a vector already"):
                self.vectors.add(block, unit(seed))
        else:
            self.vectors.add(block, unit(seed))
            self.oracle[block] = unit(seed)

    @rule(first=st.integers(301, 10_000), seed=st.integers(0, 2**32))
    @precondition(lambda self: len(self.oracle) < 300)
    def add_many(self, first: int, seed: int) -> None:
        for block in range(first, first + 100):
            if block not in self.oracle:
                self.add(block, seed + block)

    @rule(data=st.data())
    @precondition(lambda self: self.oracle)
    def remove(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.oracle)))
        self.vectors.remove(block)
        del self.oracle[block]
        with pytest.raises(UnknownBlock, match=f"block {block} has no vector"):
            self.vectors.remove(block)

    @rule(seeds=st.lists(st.integers(0, 2**32), max_size=12), k=st.integers(1, 12))
    def nearest(self, seeds: list[int], k: int) -> None:
        queries = np.array([unit(seed) for seed in seeds], np.float32).reshape(-1, DIMENSION)
        blocks, products = self.vectors.nearest(queries, k)
        assert blocks.shape == products.shape == (len(seeds), min(k, len(self.oracle)))
        for query, found, given in zip(queries, blocks.tolist(), products.tolist(), strict=True):
            expected = sorted((float(query @ vector) for vector in self.oracle.values()), reverse=True)
            assert given == pytest.approx(expected[:k], abs=1e-5)
            assert given == sorted(given, reverse=True)
            assert len(set(found)) == len(found)
            assert given == pytest.approx([float(query @ self.oracle[block]) for block in found], abs=1e-5)

    @invariant()
    def holds_what_was_added(self) -> None:
        assert len(self.vectors) == len(self.oracle)
        held = list(self.oracle)
        assert all(block in self.vectors for block in held)
        expected = np.array(list(self.oracle.values()), np.float32).reshape(-1, DIMENSION)
        assert np.array_equal(self.vectors.rows(held), expected)


def test_adding_removing_and_searching_agree_with_a_dictionary() -> None:
    run_state_machine_as_test(Machine, settings=settings(max_examples=30, deadline=None))


def test_a_copy_of_the_rows_does_not_change_with_the_vectors() -> None:
    vectors = Vectors(DIMENSION)
    vectors.add(1, unit(1))
    vectors.add(2, unit(2))
    rows = vectors.rows([1])
    vectors.remove(1)
    assert np.array_equal(rows, [unit(1)])


def test_the_search_leaves_the_settings_of_faiss_as_they_were(searcher: str) -> None:
    if searcher == "numpy":
        assert backend() == "numpy"
        return
    import faiss

    def settings_of_faiss() -> tuple[int, int]:
        return faiss.omp_get_max_threads(), faiss.cvar.distance_compute_blas_threshold

    before = settings_of_faiss()
    vectors = Vectors(DIMENSION)
    vectors.add(1, unit(1))
    vectors.nearest(np.array([unit(1)] * 20), 1)
    assert settings_of_faiss() == before
