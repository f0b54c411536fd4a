"""The semantic index: who is found and when, what is refused and counted, and what a file brings back."""

from __future__ import annotations

import logging
import random
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.index.errors import BlockRefused
from kvstore.index.semantic import SemanticIndex
from kvstore.index.token_embedder import TokenEmbedder

SECONDS = 60  # until a test gives up waiting for the background thread


def tokenize(text: str) -> list[int]:
    """A word is a token; the same in every process."""
    return [sum(word.encode()) * 37 % 5000 for word in text.split()]


@cache
def token_embedder(seed: int) -> TokenEmbedder:
    return TokenEmbedder(np.random.default_rng(seed).standard_normal((5000, 32), np.float32), tokenize)


class Gate:
    """An embedder as slow and as broken as the test wants: it waits while closed, and fails on the word "poison"."""

    name = "gate"

    def __init__(self, seed: int = 0) -> None:
        self._inner = token_embedder(seed)
        self.digest = self._inner.digest
        self.dimension = self._inner.dimension
        self.opened = threading.Event()
        self.opened.set()
        self.entered = threading.Event()
        self.broken = False
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.entered.set()
        assert self.opened.wait(SECONDS)
        if self.broken or any("poison" in text for text in texts):
            raise RuntimeError("out of order")
        self.texts += texts
        return self._inner.embed(texts)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def index(gate: Gate) -> Iterator[SemanticIndex]:
    with_queue = SemanticIndex(gate, queue=4, batch=2)
    yield with_queue
    gate.opened.set()
    with_queue.close()


@pytest.fixture(scope="module")
def passages(pydoc_text: str) -> list[str]:
    words = pydoc_text.split()
    return [" ".join(words[i : i + 80]) for i in range(0, 8000, 80)]


def key(block: int) -> bytes:
    return block.to_bytes(32)


def blocks(index: SemanticIndex, query: str, k: int = 8) -> list[int]:
    return [neighbour.block for neighbour in index.search(query, k)]


class TestFinding:
    def test_the_nearest_come_first(self, gate: Gate, passages: list[str]) -> None:
        index = SemanticIndex(gate)
        for block, text in enumerate(passages):
            assert index.add(block, key(block), text)
        assert index.drain(SECONDS)
        for block, text in enumerate(passages):
            found = index.search(text, 5)
            assert (found[0].block, len(found)) == (block, 5)
            assert found[0].similarity == pytest.approx(1, abs=2e-3)
            assert [f.similarity for f in found] == sorted((f.similarity for f in found), reverse=True)
        for text, found in zip(passages[:9], index.search_all(passages[:9], 3), strict=True):
            assert [f.block for f in found] == blocks(index, text, 3)
        assert index.search_all(gate.embed(passages[:2]), 3) == index.search_all(passages[:2], 3)
        [vector] = gate.embed(passages[:1])
        assert [f.block for f in index.search(vector * 7, 3)] == blocks(index, passages[0], 3)
        index.close()

    def test_all_blocks_are_found_when_more_are_asked_for(self, index: SemanticIndex) -> None:
        for block in (1, 2, 3):
            index.add(block, key(block), f"text {block}")
        index.drain(SECONDS)
        assert sorted(blocks(index, "text", 50)) == [1, 2, 3]
        assert len(index) == 3

    def test_text_may_be_made_later_in_the_background(self, index: SemanticIndex) -> None:
        made_by: list[str] = []

        def text() -> str:
            made_by.append(threading.current_thread().name)
            return "a text"

        index.add(1, key(1), text)
        index.drain(SECONDS)
        assert blocks(index, "a text") == [1]
        assert made_by == ["kvstore-semantic"]

    def test_an_empty_index_finds_nothing_and_embeds_nothing(self, index: SemanticIndex, gate: Gate) -> None:
        assert index.search("anything") == []
        assert index.search_all(["one", "two"]) == [[], []]
        assert gate.texts == []

    def test_a_query_without_content_finds_nothing(self, index: SemanticIndex, gate: Gate) -> None:
        index.add(1, key(1), "text")
        index.drain(SECONDS)
        assert index.search("") == []
        assert index.search_all([]) == []
        assert index.search(np.full(gate.dimension, np.nan, np.float32)) == []

    def test_wrong_questions_are_errors(self, index: SemanticIndex) -> None:
        index.add(1, key(1), "text")
        index.drain(SECONDS)
        with pytest.raises(ValueError, match="got k=0"):
            index.search("text", 0)
        with pytest.raises(ValueError, match=r"vectors \[1, 32\] are needed, got \[1, 3\]"):
            index.search(np.ones(3, np.float32))


class TestLifetime:
    def test_a_removed_block_is_not_found(self, index: SemanticIndex) -> None:
        for block in (1, 2):
            index.add(block, key(block), "the same text")
        index.drain(SECONDS)
        index.remove(1)
        assert blocks(index, "the same text") == [2]
        assert 1 not in index
        assert 2 in index

    def test_a_number_can_be_used_again(self, index: SemanticIndex) -> None:
        index.add(1, key(1), "one thing")
        index.drain(SECONDS)
        with pytest.raises(BlockRefused, match="block 1 is indexed already"):
            index.add(1, key(2), "something else")
        index.remove(1)
        index.add(1, key(2), "something else")
        index.drain(SECONDS)
        assert index.search("something else")[0].similarity == pytest.approx(1, abs=2e-3)

    def test_what_is_removed_before_its_turn_is_not_embedded(self, index: SemanticIndex, gate: Gate) -> None:
        gate.opened.clear()
        index.add(1, key(1), "first")
        assert gate.entered.wait(SECONDS)
        index.add(2, key(2), "second")
        with pytest.raises(BlockRefused, match="block 2"):
            index.add(2, key(2), "second")
        index.remove(2)
        gate.opened.set()
        index.drain(SECONDS)
        assert "second" not in gate.texts
        assert blocks(index, "second") == [1]

    def test_what_is_removed_while_it_is_embedded_does_not_come_back(
        self, index: SemanticIndex, gate: Gate
    ) -> None:
        """Kind of fault: the thread adds what it took from the queue, whatever happened meanwhile."""
        index.add(1, key(1), "warm")
        index.drain(SECONDS)
        gate.opened.clear()
        gate.entered.clear()
        index.add(2, key(2), "old text")
        assert gate.entered.wait(SECONDS)
        index.remove(2)
        index.add(2, key(3), "new")
        gate.opened.set()
        index.drain(SECONDS)
        assert {"old text", "new"} <= set(gate.texts)
        assert len(index) == 2
        assert index.search("new")[0] == (2, pytest.approx(1, abs=2e-3))

    def test_removing_what_was_never_there_is_no_error(self, index: SemanticIndex) -> None:
        index.remove(77)

    def test_traffic_from_several_threads(self, gate: Gate, passages: list[str]) -> None:
        """No block is found after its removal returned, whatever else goes on; and nothing is lost."""
        index = SemanticIndex(gate, queue=10_000)
        failures: list[str] = []

        def traffic(seed: int) -> None:
            rng = random.Random(seed)
            mine: set[int] = set()
            for step in range(150):
                block = seed * 1000 + step
                index.add(block, key(block), rng.choice(passages))
                mine.add(block)
                if rng.random() < 0.4:
                    gone = rng.choice(sorted(mine))
                    mine.remove(gone)
                    index.remove(gone)
                    if gone in blocks(index, rng.choice(passages), 1000):
                        failures.append(f"{gone} found after its removal")
            kept.update(mine)

        kept: set[int] = set()
        threads = [threading.Thread(target=traffic, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert index.drain(SECONDS)
        assert failures == []
        assert set(blocks(index, passages[0], 1000)) == kept
        index.close()


class TestRefusals:
    def test_a_full_queue_refuses_and_counts(self, index: SemanticIndex, gate: Gate) -> None:
        gate.opened.clear()
        index.add(0, key(0), "in hand")
        assert gate.entered.wait(SECONDS)
        accepted = [index.add(block, key(block), "text") for block in range(1, 10)]
        # The thread may or may not have taken block 0 out of the queue of four yet.
        assert accepted in ([True] * 4 + [False] * 5, [True] * 3 + [False] * 6)
        assert index.stats().refusals == {"queue full": accepted.count(False)}
        gate.opened.set()
        index.drain(SECONDS)
        assert len(index) == 1 + accepted.count(True)
        assert index.add(20, key(20), "text")

    def test_a_full_index_refuses_and_counts(self, gate: Gate) -> None:
        index = SemanticIndex(gate, capacity=2)
        assert [index.add(block, key(block), "text") for block in range(3)] == [True, True, False]
        index.drain(SECONDS)
        assert index.stats().refusals == {"index full": 1}
        index.remove(0)
        assert index.add(3, key(3), "text")
        index.close()

    def test_a_text_that_cannot_be_embedded_spoils_no_other(self, index: SemanticIndex, gate: Gate) -> None:
        gate.opened.clear()
        for block, text in enumerate(["good", "poison", "better", ""]):
            index.add(block, key(block), text)
        gate.opened.set()
        index.drain(SECONDS)
        assert sorted(blocks(index, "good")) == [0, 2]
        assert index.stats().refusals == {"embedder failed": 1, "text without content": 1}

    def test_text_that_cannot_be_made_is_counted(self, index: SemanticIndex) -> None:
        def text() -> str:
            raise OSError("no tokenizer")

        index.add(1, key(1), text)
        index.add(2, key(2), "text")
        index.drain(SECONDS)
        assert blocks(index, "text") == [2]
        assert index.stats().refusals == {"text not made": 1}

    def test_an_embedder_that_fails_for_a_while_is_survived(self, index: SemanticIndex, gate: Gate) -> None:
        gate.broken = True
        index.add(1, key(1), "text")
        index.drain(SECONDS)
        gate.broken = False
        index.add(2, key(2), "text")
        index.drain(SECONDS)
        assert blocks(index, "text") == [2]
        gate.broken = True
        assert index.search("text") == []
        assert index.stats().refusals == {"embedder failed": 1, "query not embedded": 1}

    def test_vectors_of_a_wrong_shape_are_not_taken(self, gate: Gate) -> None:
        gate.dimension = 5  # is not what `embed` gives
        index = SemanticIndex(gate)
        index.add(1, key(1), "text")
        index.drain(SECONDS)
        assert len(index) == 0
        assert index.stats().refusals == {"embedder failed": 1}
        index.close()

    @pytest.mark.parametrize("wrong", [{"capacity": 0}, {"queue": 0}, {"batch": 0}])
    def test_bounds_without_room_are_errors(self, gate: Gate, wrong: dict[str, int]) -> None:
        with pytest.raises(ValueError, match="are 1 or more"):
            SemanticIndex(gate, **wrong)


class TestClosing:
    def test_what_waits_is_dropped_and_counted_and_the_thread_ends(self, gate: Gate) -> None:
        others = set(threading.enumerate())
        index = SemanticIndex(gate, batch=1)
        gate.opened.clear()
        for block in range(5):
            index.add(block, key(block), "text")
        assert gate.entered.wait(SECONDS)
        closing = threading.Thread(target=index.close)
        closing.start()
        while index.add(9, key(9), "late"):  # until closing has begun
            index.remove(9)
        gate.opened.set()
        closing.join(SECONDS)
        assert not closing.is_alive()
        assert set(threading.enumerate()) <= others
        dropped = index.stats().refusals["index closed"]
        assert len(index) + dropped == 6  # five blocks and the late one
        assert index.drain(0)

    def test_a_closed_index_still_answers_and_can_be_closed_again(self, index: SemanticIndex) -> None:
        index.add(1, key(1), "text")
        index.drain(SECONDS)
        index.close()
        index.close()
        assert blocks(index, "text") == [1]
        assert not index.add(2, key(2), "text")


class TestFile:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return tmp_path / "semantic.bin"

    @pytest.fixture
    def saved(self, path: Path, passages: list[str]) -> bytes:
        index = SemanticIndex(Gate(), path)
        assert index.stats().opened == "new"
        for block, text in enumerate(passages):
            index.add(block, key(block), text)
        index.drain(SECONDS)
        assert index.save() == path.stat().st_size
        index.close()
        return path.read_bytes()

    @pytest.mark.usefixtures("saved")
    def test_comes_back_with_the_same_answers_under_other_numbers(
        self, path: Path, passages: list[str]
    ) -> None:
        before = SemanticIndex(Gate())
        gate = Gate()
        after = SemanticIndex(gate, path)
        assert (after.stats().opened, len(after)) == ("whole", 0)
        for block, text in enumerate(passages):
            before.add(block, key(block), text)
            after.add(1000 + block, key(block), lambda: pytest.fail("not to be embedded again"))
        before.drain(SECONDS)
        assert len(after) == len(passages)
        assert after.drain(SECONDS)
        found = after.search(passages[0])
        assert [(block - 1000, cosine) for block, cosine in found] == before.search(passages[0])
        assert gate.texts == [".", passages[0]]
        before.close()
        after.close()

    @pytest.mark.usefixtures("saved")
    def test_only_what_is_held_again_is_found_and_kept(self, path: Path, passages: list[str]) -> None:
        for _ in range(2):
            index = SemanticIndex(Gate(), path)
            index.add(3, key(3), passages[3])
            index.add(500, key(500), "a new one")
            index.drain(SECONDS)
            assert sorted(blocks(index, passages[3], 1000)) == [3, 500]
            index.save()
            index.close()
        assert index.stats().embedded == 0

    @pytest.mark.usefixtures("saved")
    def test_what_nobody_held_at_the_first_save_is_forgotten(self, path: Path, passages: list[str]) -> None:
        index = SemanticIndex(Gate(), path)
        for block in (3, 4):
            index.add(block, key(block), passages[block])
            index.save()
        index.drain(SECONDS)
        assert index.stats().embedded == 1
        index.close()

    @pytest.mark.usefixtures("saved")
    def test_vectors_of_another_embedder_are_not_used(self, path: Path) -> None:
        index = SemanticIndex(Gate(seed=1), path)
        assert index.stats().opened.startswith("rebuilt: vectors are of another embedder, gate ")
        index.add(0, key(0), "text")
        index.drain(SECONDS)
        assert index.stats().embedded == 1
        index.save()
        index.close()
        again = SemanticIndex(Gate(seed=1), path)
        assert again.stats().opened == "whole"
        again.close()

    def test_no_damage_is_taken_for_vectors(self, path: Path, saved: bytes) -> None:
        rng = random.Random(2)
        damaged = [saved[:length] for length in (0, 1, 15, 16, 17, len(saved) // 2, len(saved) - 1)]
        damaged += [saved + b"x", bytes(len(saved)), rng.randbytes(100)]
        for _ in range(60):
            flipped = bytearray(saved)
            flipped[rng.randrange(len(saved))] ^= 1 << rng.randrange(8)
            damaged.append(bytes(flipped))
        for data in damaged:
            path.write_bytes(data)
            index = SemanticIndex(Gate(), path)
            assert index.stats().opened == "rebuilt: semantic.bin is damaged"
            index.add(0, key(0), "text")
            index.drain(SECONDS)
            assert (len(index), index.stats().embedded) == (1, 1)
            index.close()

    def test_what_is_no_file_is_not_read_and_no_reason_to_fail(self, path: Path) -> None:
        path.mkdir()
        index = SemanticIndex(Gate(), path)
        assert index.stats().opened == "rebuilt: semantic.bin cannot be read (Is a directory)"
        index.close()

    def test_a_failed_write_leaves_the_old_file(self, path: Path, saved: bytes, passages: list[str]) -> None:
        index = SemanticIndex(Gate(), path)
        index.add(0, key(0), passages[0])
        path.with_name("semantic.bin.tmp").mkdir()  # the name that writing needs first
        with pytest.raises(OSError, match="directory"):
            index.save()
        assert path.read_bytes() == saved
        index.close()

    def test_without_path_or_blocks_nothing_is_written(self, path: Path) -> None:
        for index in (SemanticIndex(Gate()), SemanticIndex(Gate(), path)):
            assert index.save() == 0
            index.close()
        assert not path.exists()


class TestLoading:
    def test_a_search_does_not_wait_for_the_embedder_to_load(self, tmp_path: Path) -> None:
        path = tmp_path / "vectors"
        index = SemanticIndex(Gate(), path)
        index.add(1, key(1), "text")
        index.drain(SECONDS)
        index.save()
        index.close()
        slow = Gate()
        slow.opened.clear()
        index = SemanticIndex(slow, path)
        index.add(1, key(1), "text")
        assert index.search("text") == []
        assert index.stats().backend == "not loaded yet"
        assert index.stats().refusals == {"search before the embedder was loaded": 1}
        slow.opened.set()
        index.add(2, key(2), "other")
        index.drain(SECONDS)
        assert blocks(index, "text") == [1, 2]
        assert index.stats().backend.startswith("faiss")
        assert index.stats().embedder == "gate"
        index.close()

    def test_the_embedder_is_loaded_though_all_was_taken_over_before_the_thread_looked(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The thread then waited for ever for something to do, and every search was refused."""
        path = tmp_path / "vectors"
        index = SemanticIndex(Gate(), path)
        index.add(1, key(1), "text")
        index.drain(SECONDS)
        index.save()
        index.close()
        begin = threading.Event()

        class Late(threading.Thread):
            def run(self) -> None:
                assert begin.wait(SECONDS)
                super().run()

        monkeypatch.setattr(threading, "Thread", Late)
        index = SemanticIndex(Gate(), path)
        monkeypatch.undo()
        assert index.restore(1, key(1))
        begin.set()
        assert index.drain(SECONDS)
        assert blocks(index, "text") == [1]
        index.close()

    def test_importing_loads_none_of_the_heavy_libraries(self) -> None:
        modules = "semantic, vectors, sentence_embedder, token_embedder"
        code = f"import sys; from kvstore.index import {modules}; print(*sys.modules)"
        loaded = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        assert not {"faiss", "torch", "transformers", "sentence_transformers"} & set(loaded.split())


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Failures are meant here; their log would hide others."""
    caplog.set_level(logging.CRITICAL, logger="kvstore.index.semantic")
