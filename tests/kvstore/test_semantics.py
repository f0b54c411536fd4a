"""Semantics in the store: the index holds what the store holds, is walled as KV is, and stands in nobody's way."""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.errors import InvalidRequestError, InvalidTokensError
from kvstore.identity import Adapter
from kvstore.index.semantic import SemanticStats
from kvstore.index.token_embedder import TokenEmbedder
from kvstore.language_model import LanguageModel
from kvstore.session import Session
from kvstore.store import KVStore, open_store
from tests.known_kv import identity, known_kv, prompt, put, small_profile
from tests.tiny_models import write_tiny_gguf

SECONDS = 60
VOCABULARY = 2000
BLOCK = 16

Tokens = NDArray[np.int32]


def text_of(tokens: Tokens) -> str:
    return " ".join(map(str, tokens.tolist()))


@cache
def token_embedder(seed: int = 0) -> TokenEmbedder:
    matrix = np.random.default_rng(seed).standard_normal((VOCABULARY, 32), np.float32)
    return TokenEmbedder(matrix, lambda text: [int(word) for word in text.split() if word.isdigit()])


class Recording:
    """An embedder that remembers what it was asked, waits while `go` is not set, and fails while `broken`."""

    name = "recording"

    def __init__(self, seed: int = 0) -> None:
        self._inner = token_embedder(seed)
        self.digest = self._inner.digest
        self.dimension = self._inner.dimension
        self.texts: list[str] = []
        self.broken = False
        self.go = threading.Event()
        self.go.set()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        assert self.go.wait(SECONDS)
        if self.broken:
            raise RuntimeError("out of order")
        self.texts += [text for text in texts if text != "."]  # asked to see whether all is well
        return self._inner.embed(texts)


def some(seed: int, length: int) -> Tokens:
    return prompt(seed, length, VOCABULARY)


def open_at(path: Path | None, **budgets: Any) -> KVStore:
    profile = small_profile(block_tokens=BLOCK, **budgets)
    return open_store(path, identity=identity(), profile=profile)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_at(tmp_path / "kv") as opened:
        yield opened
        opened.check()


@pytest.fixture
def quiet_log(caplog: pytest.LogCaptureFixture) -> None:
    """Failures are meant; their log would hide others."""
    caplog.set_level(logging.CRITICAL, logger="kvstore")


def semantics(store: KVStore) -> SemanticStats:
    found = store.stats().semantics
    assert found is not None
    return found


def drained(store: KVStore) -> KVStore:
    """Wait until everything held was embedded or refused, and can be searched."""
    deadline = time.monotonic() + SECONDS
    while (now := semantics(store)).waiting or (now.blocks and now.backend == "not loaded yet"):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return store


def indexed(store: KVStore) -> set[bytes]:
    """Keys of all blocks that are found by what they speak of."""
    found = drained(store).neighbours([1, 2, 3], 10_000)
    keys = {near.block.key for near in found}
    assert len(keys) == len(found) == semantics(store).blocks, "what is not held is not kept in the index"
    return keys


def held(store: KVStore, prompts: Sequence[Tokens]) -> set[bytes]:
    """Keys of all blocks that a look-up of one of `prompts` finds."""
    return {block.key for tokens in prompts for block in store.lookup(tokens).blocks}


def vectors_files(store_path: Path) -> list[Path]:
    return [path for path in store_path.rglob("*") if ".vectors" in path.name]


class TestNeighbours:
    def test_a_block_is_found_by_its_words_whatever_their_order(self, store: KVStore) -> None:
        prompts = [some(seed, 5 * BLOCK) for seed in range(8)]
        for tokens in prompts:
            put(store, tokens)
        store.use_semantics(token_embedder(), text_of)
        drained(store)
        for tokens in prompts:
            sought = tokens[2 * BLOCK : 3 * BLOCK]
            shuffled = np.random.default_rng(0).permutation(sought)
            for query in (sought, sought.tolist(), text_of(shuffled), shuffled):
                nearest, *others = store.neighbours(query, 5)
                np.testing.assert_array_equal(nearest.block.tokens, sought)
                assert nearest.similarity == pytest.approx(1, abs=2e-3)
                assert [other.similarity for other in others] == sorted(
                    (other.similarity for other in others), reverse=True
                )
                assert len(others) == 4

    def test_each_part_of_a_long_query_finds_its_own(self, store: KVStore) -> None:
        store.use_semantics(token_embedder(), text_of)
        first, second = some(1, BLOCK), some(2, BLOCK)
        for tokens in (first, second, some(3, 3 * BLOCK)):
            put(store, tokens)
        found = drained(store).neighbours(np.concatenate([second, first]), 2)
        assert {tuple(near.block.tokens) for near in found} == {tuple(first), tuple(second)}
        assert min(near.similarity for near in found) == pytest.approx(1, abs=2e-3)

    def test_kv_computed_behind_moved_runs_is_found_too(self, store: KVStore) -> None:
        store.use_semantics(token_embedder(), text_of)
        tokens = some(1, 80)
        store.put_inexact(tokens, known_kv(tokens, store.identity), [(20, 20 + 2 * BLOCK)])
        (near,) = drained(store).neighbours(tokens[20 : 20 + BLOCK], 1)
        assert (near.block.start, near.block.exact) == (20, False)

    def test_none_without_an_embedder(self, store: KVStore) -> None:
        put(store, some(1, 40))
        assert store.neighbours("1 2 3") == []
        assert store.stats().semantics is None

    def test_wrong_questions_are_errors(self, store: KVStore) -> None:
        store.use_semantics(token_embedder(), text_of)
        with pytest.raises(InvalidRequestError, match="got k=0"):
            store.neighbours("1", 0)
        with pytest.raises(InvalidTokensError):
            store.neighbours([])
        with pytest.raises(InvalidTokensError):
            store.neighbours([-1])


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int, int]]:
    action = st.sampled_from(
        ["put", "put", "put", "forget", "flush", "restart", "everything", "other embedder"]
    )
    return draw(st.lists(st.tuples(action, st.integers(0, 5), st.integers(1, 70)), min_size=5, max_size=25))


class TestLifetime:
    @pytest.mark.parametrize(
        "budgets",
        [
            {},
            {"hot_bytes": 2 * 4096, "warm_bytes": 6 * 4096, "cold_bytes": 480 << 10},
            {"hot_bytes": 2 * 4096, "warm_bytes": 6 * 4096, "cold_bytes": 0},
        ],
        ids=["roomy", "tight", "tight memory"],
    )
    @settings(max_examples=20, deadline=None)
    @given(history=histories())
    def test_what_is_indexed_is_what_is_held(
        self, budgets: dict[str, Any], history: list[tuple[str, int, int]]
    ) -> None:
        """Kind of fault: a block evicted, replaced by a longer one, or rejoined leaves a trace, or goes missing."""
        folder = Path(tempfile.mkdtemp())
        store = open_at(folder / "kv", **budgets)
        seed = 0
        store.use_semantics(token_embedder(seed), text_of)
        prompts: list[Tokens] = []
        for action, family, length in history:
            tokens = np.concatenate([some(100, 20), some(family, length)])
            if action == "put":
                put(store, tokens)
                prompts.append(tokens)
            elif action == "forget":
                store.invalidate(prefix=tokens[: 20 + length // 2])
            elif action == "flush":
                store.flush(SECONDS)
            elif action == "everything":
                store.invalidate(everything=True)
                assert vectors_files(folder) == []
            elif action == "restart":
                store.close()
                store = open_at(folder / "kv", **budgets)
                store.use_semantics(token_embedder(seed), text_of)
            else:
                seed += 1
                store.use_semantics(token_embedder(seed), text_of)
            store.check()
        store.flush(SECONDS)
        found = indexed(store)
        assert found >= held(store, prompts)
        assert semantics(store).refusals == {}
        assert store.invalidate(everything=True) == len(found)
        assert indexed(store) == set()
        store.close()
        shutil.rmtree(folder)

    def test_blocks_are_found_as_soon_as_their_prefix_is_back(self, store: KVStore) -> None:
        store.use_semantics(token_embedder(), text_of)
        tokens = some(1, 4 * BLOCK)
        put(store, tokens)
        store.flush(SECONDS)
        assert store.path is not None
        (first,) = store.lookup(tokens[:BLOCK]).blocks
        (store.path / "blocks" / first.key[:16].hex()).write_bytes(b"damaged")
        store.demote(store.lookup(tokens))
        with store.lease(store.lookup(tokens)) as lease:
            lease.warm_up()
        assert store.lookup(tokens).length == 0
        assert len(indexed(store)) == 3  # a block whose parent is gone is still a chunk
        put(store, tokens[:BLOCK])
        assert indexed(store) == held(store, [tokens])
        assert len(indexed(store)) == 4

    def test_another_embedder_takes_over(self, store: KVStore) -> None:
        tokens = some(1, 6 * BLOCK)
        put(store, tokens)
        store.use_semantics(Recording(0), text_of)
        drained(store)
        other = Recording(1)
        store.use_semantics(other, text_of)
        assert len(indexed(store)) == 6
        assert len(other.texts) == 7  # and the query
        store.use_semantics(Recording(1), lambda _: pytest.fail("one of its kind is in use already"))
        assert len(indexed(store)) == 6
        assert [thread.name for thread in threading.enumerate()].count("kvstore-semantic") == 1


class TestFile:
    def test_a_restart_embeds_nothing_again(self, tmp_path: Path) -> None:
        prompts = [some(seed, 70) for seed in range(5)]
        with open_at(tmp_path / "kv") as store:
            store.use_semantics(token_embedder(), text_of)
            for tokens in prompts:
                put(store, tokens)
            answers = drained(store).neighbours(prompts[3], 9)
        with open_at(tmp_path / "kv") as store:
            embedder = Recording()
            store.use_semantics(embedder, text_of)
            again = drained(store).neighbours(prompts[3], 9)
            assert [(near.block.key, near.similarity) for near in again] == [
                (near.block.key, near.similarity) for near in answers
            ]
            assert indexed(store) == held(store, prompts)
            assert (semantics(store).opened, semantics(store).embedded) == ("whole", 0)

    def test_what_was_flushed_survives_any_stop(self, tmp_path: Path) -> None:
        with open_at(tmp_path / "kv") as store:
            store.use_semantics(token_embedder(), text_of)
            put(store, some(1, 70))
            drained(store).flush(SECONDS)
            shutil.copytree(tmp_path / "kv", tmp_path / "stopped")
        with open_at(tmp_path / "stopped") as store:
            store.use_semantics(token_embedder(), text_of)
            assert len(indexed(store)) == 5
            assert semantics(store).embedded == 0

    def test_another_embedder_makes_all_vectors_anew(self, tmp_path: Path) -> None:
        tokens = some(1, 70)
        for seed, opened in ((0, "new"), (1, "rebuilt: vectors are of another embedder"), (1, "whole")):
            with open_at(tmp_path / "kv") as store:
                put(store, tokens)
                store.use_semantics(token_embedder(seed), text_of)
                assert indexed(store) == held(store, [tokens])
                assert semantics(store).opened.startswith(opened)
                assert semantics(store).embedded == (0 if opened == "whole" else 5)

    def test_a_damaged_file_costs_nothing_but_time(self, tmp_path: Path) -> None:
        tokens = some(1, 70)
        with open_at(tmp_path / "kv") as store:
            put(store, tokens)
            store.use_semantics(token_embedder(), text_of)
            drained(store)
        (file,) = vectors_files(tmp_path)
        file.write_bytes(file.read_bytes()[:-1])
        with open_at(tmp_path / "kv") as store:
            store.use_semantics(token_embedder(), text_of)
            assert indexed(store) == held(store, [tokens])
            assert semantics(store).opened.endswith("is damaged")

    def test_nothing_is_written_when_nothing_changed(self, tmp_path: Path) -> None:
        """Flash wears out."""
        with open_at(tmp_path / "kv") as store:
            put(store, some(1, 70))
            store.use_semantics(token_embedder(), text_of)
            drained(store).flush(SECONDS)
            (file,) = vectors_files(tmp_path)
            written = file.stat()
            store.flush(SECONDS)
        with open_at(tmp_path / "kv") as store:
            store.use_semantics(token_embedder(), text_of)
            drained(store).flush(SECONDS)
        assert (file.stat().st_ino, file.stat().st_mtime_ns) == (written.st_ino, written.st_mtime_ns)

    def test_the_file_counts_against_the_flash_budget(self, tmp_path: Path) -> None:
        budget = 512 << 10
        with open_at(tmp_path / "kv", cold_bytes=budget) as store:
            store.use_semantics(token_embedder(), text_of)
            for seed in range(60):
                put(store, some(seed, 10 * BLOCK), wait=SECONDS)
                drained(store).flush(SECONDS)
                occupied = sum(path.lstat().st_blocks * 512 for path in (tmp_path / "kv").rglob("*"))
                assert occupied <= store.stats().cold.used <= budget
            assert store.stats().counts["evicted_cold"] > 0
            assert len(vectors_files(tmp_path)) == 1

    def test_what_is_invalidated_leaves_flash_at_once(self, tmp_path: Path) -> None:
        """Kind of fault: a vector tells of a text that its owner asked to forget."""
        tokens = some(1, 70)
        with open_at(tmp_path / "kv") as store:
            put(store, tokens)
            put(store, some(2, 70))
            store.use_semantics(token_embedder(), text_of)
            drained(store).flush(SECONDS)
            assert len(vectors_files(tmp_path)) == 1
            store.invalidate(prefix=tokens[:BLOCK])
            assert vectors_files(tmp_path) == []
            store.flush(SECONDS)
            assert len(vectors_files(tmp_path)) == 1
        with open_at(tmp_path / "kv") as store:  # without an embedder this time
            store.invalidate(everything=True)
            assert vectors_files(tmp_path) == []


class TestWalls:
    @settings(max_examples=15, deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.booleans()), min_size=4, max_size=20))
    def test_nobody_finds_what_another_holds(self, traffic: list[tuple[int, int, bool]]) -> None:
        """Four identities, that differ in weights, tenant and adapter, in turn; they even put the same tokens."""
        adapter = Adapter("ad" * 32, 1.0)
        owners = [identity(), identity("b"), identity(salt=b"tenant"), identity(adapters=(adapter,))]
        with open_at(None) as first:
            views = [first.view(owner) for owner in owners]
            for view in views:
                view.use_semantics(token_embedder(), text_of)
            prompts: list[list[Tokens]] = [[] for _ in owners]
            for owner, text, keep in traffic:
                tokens = some(text, 40)
                if keep:
                    put(views[owner], tokens)
                    prompts[owner].append(tokens)
                else:
                    views[owner].invalidate(prefix=tokens)
            for view, mine in zip(views, prompts, strict=True):
                for near in drained(view).neighbours(some(0, 40), 1000):
                    assert near.block.namespace.identity == view.identity
                assert indexed(view) == held(view, mine)

    def test_each_identity_has_its_own_file(self, tmp_path: Path) -> None:
        with open_at(tmp_path / "kv") as store:
            other = store.view(identity(salt=b"tenant"))
            for view in (store, other):
                put(view, some(1, 40))
                view.use_semantics(token_embedder(), text_of)
                drained(view)
        assert {path.stem for path in vectors_files(tmp_path)} == {
            view.identity.digest().hex() for view in (store, other)
        }


@pytest.mark.usefixtures("quiet_log")
class TestFailure:
    def test_a_broken_embedder_costs_neighbours_only(self, store: KVStore) -> None:
        embedder = Recording()
        embedder.broken = True
        store.use_semantics(embedder, text_of)
        tokens = some(1, 40)
        assert put(store, tokens).stored == 40
        assert store.lookup(tokens).length == 40
        assert drained(store).neighbours(tokens) == []
        assert semantics(store).refusals["embedder failed"] == 3
        embedder.broken = False
        put(store, some(2, 40))
        assert len(indexed(store)) == 3
        embedder.broken = True
        assert store.neighbours(tokens) == []
        store.flush(SECONDS)

    def test_a_tokenizer_that_fails_costs_neighbours_only(self, store: KVStore) -> None:
        def fail(_: Tokens) -> str:
            raise KeyError("token without a name")

        store.use_semantics(token_embedder(), fail)
        tokens = some(1, 40)
        assert put(store, tokens).stored == 40
        assert drained(store).neighbours(tokens) == []
        assert store.neighbours(text_of(tokens)) == []
        assert store.lookup(tokens).length == 40
        assert semantics(store).refusals["text not made"] == 3

    def test_nobody_waits_for_an_embedder(self, store: KVStore) -> None:
        embedder = Recording()
        embedder.go.clear()
        store.use_semantics(embedder, text_of)
        tokens = some(1, 40)
        assert put(store, tokens).stored == 40
        assert store.lookup(tokens).length == 40
        store.flush(SECONDS)
        assert store.neighbours(tokens) == []
        assert (semantics(store).waiting, semantics(store).blocks) == (3, 0)
        store.invalidate(everything=True)
        assert semantics(store).waiting == 0
        embedder.go.set()
        assert indexed(store) == set()

    def test_what_cannot_be_saved_is_counted(self, tmp_path: Path) -> None:
        with open_at(tmp_path / "kv") as store:
            put(store, some(1, 40))
            store.use_semantics(token_embedder(), text_of)
            drained(store)
            (tmp_path / "kv" / "identities" / f"{store.identity.digest().hex()}.vectors").mkdir()
            store.flush(SECONDS)
            assert store.stats().refusals == {"vectors not saved": 1}
            assert len(indexed(store)) == 3


class TestLanguageModel:
    @pytest.fixture
    def model(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LanguageModel:
        monkeypatch.setenv("KVSTORE_CACHE_DIR", str(tmp_path / "cache"))
        write_tiny_gguf(tmp_path / "tiny.gguf")
        return LanguageModel(tmp_path / "tiny.gguf")

    def test_token_embeddings_serve_where_the_sentence_model_cannot(
        self, model: LanguageModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        embedder = model.embedder(tmp_path)  # holds no such model
        assert embedder.name == "token-embeddings"
        assert embedder.digest == model.embedder().digest
        assert "token embeddings serve instead" in caplog.text

    def test_what_a_session_stored_is_found_by_what_was_said(
        self, model: LanguageModel, tmp_path: Path
    ) -> None:
        profile = small_profile(block_tokens=32, layout=model.identity.layout, warm_bytes=1 << 24)
        with open_store(tmp_path / "kv", identity=model.identity, profile=profile) as store:
            store.use_semantics(model.embedder(), model.tokenizer.decode)
            prompts = [model.tokenizer.encode(text * 12) for text in ("a red hen. ", "two blue owls! ")]
            session = Session(model.engine, store)
            for tokens in prompts:
                session.generate(tokens, 1)
            assert semantics(drained(store)).embedder == "token-embeddings"
            for tokens, said in zip(prompts, ("a red hen. a red hen. ", "two blue owls! "), strict=True):
                nearest = store.neighbours(said, 1)[0].block
                assert nearest.key in held(store, [tokens])


def test_a_store_in_memory_indexes_too() -> None:
    with open_at(None) as store:
        store.use_semantics(token_embedder(), text_of)
        tokens = some(1, 40)
        put(store, tokens)
        assert indexed(store) == held(store, [tokens])


def test_traffic_from_several_threads(store: KVStore) -> None:
    """Kind of fault: a deadlock between the store's lock and the index's; a block that went while it was sought."""
    store.use_semantics(token_embedder(), text_of)
    failures: list[BaseException] = []

    def run(work: Callable[[int], object]) -> None:
        try:
            for step in range(40):
                work(step)
        except BaseException as error:
            failures.append(error)

    works: list[Callable[[int], object]] = [
        lambda step: put(store, some(step % 7, 60)),
        lambda step: store.invalidate(prefix=some(step % 7, 60)[:20]),
        lambda step: store.neighbours(some(step % 7, 60)),
        lambda _: store.flush(SECONDS),
        lambda step: store.use_semantics(token_embedder(step % 2), text_of),
    ]
    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    assert indexed(store) == held(store, [some(seed, 60) for seed in range(7)])
