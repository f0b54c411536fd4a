"""Passages captured ahead are found by prompts that show them elsewhere, and each is computed once."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import kvstore
from kvstore.capture import FILLER, Captured, beginning, capture, capture_texts, filler, head
from kvstore.language_model import LanguageModel
from kvstore.moved import SHORTEST
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.kv_allocation import ContextExceeded
from kvstore.pipeline.recompute import Nothing
from kvstore.prefill import prefill
from kvstore.put import PutResult
from kvstore.quality.reuse import Verdict
from kvstore.session import Session
from kvstore.store import KVStore
from tests.known_kv import identity, known_kv, small_profile
from tests.tiny_models import write_tiny_gguf

SYSTEM = "Answer from the notes."
NOTES = (
    "The bus to the lake leaves twice a day, and in summer once more late in the evening.",
    "Who borrows a ladder writes it on the list at the door and brings it back on Friday.",
    "Bread is baked at night, so the kitchen is cleaned before ten and locked after that.",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_gguf(folder / "tiny.gguf", layers=2, context=2048)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVSTORE_CACHE_DIR", str(folder / "cache"))
        made = LanguageModel(folder / "tiny.gguf")
        made.engine = StaticGraphEngine(
            folder / "tiny.gguf", cache=folder / "cache", sizes=(16, 128), contexts=(1024, 2048)
        )
    return made


@pytest.fixture
def store(model: LanguageModel) -> Iterator[KVStore]:
    with kvstore.open(None, identity=model.identity) as opened:
        yield opened


def tokens_of(model: LanguageModel, text: str) -> int:
    return len(model.tokenizer.encode(text))


def blocks(store: KVStore) -> int:
    return store.stats().warm.blocks + store.stats().hot.blocks


def test_a_captured_passage_is_reused_in_another_prompt_elsewhere(
    model: LanguageModel, store: KVStore
) -> None:
    done = capture_texts(model, store, SYSTEM, NOTES)
    assert (done.captured, done.held, done.refused, done.left) == (3, 0, (), 0)
    prompt = model.chat_prompt(SYSTEM, "\n\n".join([NOTES[2], NOTES[0], "When does the bus leave?"]))
    found = store.lookup(prompt, moved=True)
    shown = [model.tokenizer.decode(prompt[run.target : run.target + run.length]) for run in found.runs]
    assert len(shown) == 2
    assert NOTES[2] in shown[0]
    assert NOTES[0] in shown[1]
    assert all(run.shift < 0 for run in found.runs)
    store.keep_verdict(Verdict(fast=Nothing(), careful=Nothing()))
    answer = Session(model.engine, store, "fast").generate(prompt, 1)
    assert answer.moved >= tokens_of(model, NOTES[0]) + tokens_of(model, NOTES[2])


def test_what_is_captured_is_what_full_prefill_computes(model: LanguageModel, store: KVStore) -> None:
    """Also where a part of the passage was held elsewhere, captured alone."""
    alone = model.tokenizer.encode(NOTES[1])
    Session(model.engine, store, "exact").generate(alone, 1)
    capture_texts(model, store, SYSTEM, NOTES[1:2])
    prompt = np.concatenate([beginning(head(model, SYSTEM), filler(model, []), store.block_tokens), alone])
    loaded, computed = model.engine.allocate(len(prompt)), model.engine.allocate(len(prompt))
    assert store.lookup(prompt).length == len(prompt)
    logits = prefill(model.engine, store, prompt, loaded).logits
    np.testing.assert_allclose(logits, model.engine.prefill(prompt, computed), atol=1e-4)


def test_the_system_prompt_and_the_filler_are_computed_once(model: LanguageModel, store: KVStore) -> None:
    before = beginning(head(model, SYSTEM), filler(model, []), store.block_tokens)
    assert len(before) % store.block_tokens == 0
    capture_texts(model, store, SYSTEM, [])  # tests whether keys turn
    counted = model.engine.statistics
    computed, stored = [], []
    for note in NOTES:
        earlier = counted.tokens
        stored.append(capture_texts(model, store, SYSTEM, [note]).tokens)
        computed.append(counted.tokens - earlier)
    lengths = [tokens_of(model, note) for note in NOTES]
    assert computed == stored == [len(before) + lengths[0], *lengths[1:]]
    for note in NOTES:
        prompt = np.concatenate([before, model.tokenizer.encode(note)])
        assert store.lookup(prompt).blocks[-1].start == len(
            before
        )  # no block holds a part of the filler again


def test_passages_stand_behind_others_of_their_kind_and_never_behind_themselves(
    model: LanguageModel, store: KVStore, pydoc_text: str
) -> None:
    """Behind prose that has nothing to do with them they serve no better than right behind the system prompt."""
    corpus = [pydoc_text[at : at + 90] for at in range(0, 21_000, 3_000)]
    done = capture_texts(model, store, SYSTEM, corpus)
    assert (done.captured, done.held, done.refused, done.left) == (6, 1, (), 0)
    assert capture_texts(model, store, SYSTEM, corpus).held == 7
    begun = head(model, SYSTEM)
    first, others = filler(model, corpus[:3]), filler(model, corpus[3:])
    for at, passage in enumerate(corpus):
        before = beginning(begun, others if at < 3 else first, store.block_tokens)
        prompt = np.concatenate([before, model.tokenizer.encode(passage)])
        assert passage not in model.tokenizer.decode(before)
        # the third stands behind the first two already, at the end of the filler
        assert (store.lookup(prompt).length == len(prompt)) is (at != 2)
    (refused,) = capture_texts(model, store, SYSTEM, [*corpus, "Short."]).refused
    assert refused.passage == 7
    stopped = capture_texts(model, store, SYSTEM, corpus[::-1], go_on=lambda: False)
    assert stopped == Captured(0, 0, (), 7, 0)


def test_a_second_capture_computes_nothing(model: LanguageModel, store: KVStore) -> None:
    capture_texts(model, store, SYSTEM, NOTES)
    held = blocks(store)
    assert capture_texts(model, store, SYSTEM, [*NOTES, NOTES[0]]) == Captured(0, 4, (), 0, 0)
    assert store.stats().counts.get("requests", 0) == 0
    assert blocks(store) == held


def test_a_passage_given_twice_is_captured_once(model: LanguageModel, store: KVStore) -> None:
    done = capture_texts(model, store, SYSTEM, [NOTES[0], NOTES[0]])
    assert (done.captured, done.held) == (1, 1)


@pytest.mark.parametrize(
    ("prompt", "held"),
    [
        ([NOTES[0]], 0),  # right behind the system prompt, where it serves worse than behind another text
        ([FILLER[:900], NOTES[0]], 1),
    ],
)
def test_what_traffic_left_behind_other_text_is_not_captured_again(
    model: LanguageModel, store: KVStore, prompt: list[str], held: int
) -> None:
    Session(model.engine, store, "exact").generate(model.chat_prompt(SYSTEM, "\n\n".join(prompt)), 1)
    done = capture_texts(model, store, SYSTEM, NOTES[:1])
    assert (done.captured, done.held) == (1 - held, held)
    again = capture_texts(model, store, SYSTEM, NOTES[:1])
    assert (again.captured, again.held) == (0, 1)


def test_it_stops_between_passages_when_told_to(model: LanguageModel, store: KVStore) -> None:
    asked = iter([True, True, False])
    done = capture_texts(model, store, SYSTEM, NOTES, go_on=lambda: next(asked))
    assert (done.captured, done.held, done.refused, done.left) == (2, 0, (), 1)
    done = capture_texts(model, store, SYSTEM, NOTES)
    assert (done.captured, done.held, done.left) == (1, 2, 0)
    assert capture_texts(model, store, SYSTEM, NOTES, go_on=lambda: False) == Captured(0, 0, (), 3, 0)


def test_what_cannot_be_captured_is_refused_with_a_reason(model: LanguageModel, store: KVStore) -> None:
    done = capture_texts(model, store, SYSTEM, ["", "Short.", "word " * 2000, NOTES[0]])
    assert (done.captured, done.held, done.left) == (1, 0, 0)
    assert [refused.passage for refused in done.refused] == [0, 1, 2]
    nothing, short, long = (refused.reason for refused in done.refused)
    assert nothing.startswith("0 tokens;")
    assert f"fewer than {SHORTEST}" in short
    assert "shorten" in long
    assert capture_texts(model, store, SYSTEM, []) == Captured(0, 0, (), 0, 0)


def test_where_nothing_may_move_nothing_is_captured(model: LanguageModel, store: KVStore) -> None:
    store.shift_refused = "keys of this model do not turn"
    done = capture_texts(model, store, SYSTEM, NOTES, policy="exact")
    assert (done.captured, done.tokens) == (0, 0)
    assert [refused.reason for refused in done.refused] == ["keys of this model do not turn"] * 3
    assert blocks(store) == 0


# -- any engine ------------------------------------------------------------------------------------------------------


def text(seed: int, tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.random.default_rng(seed).integers(0, 50_000, tokens).astype(np.int32)


def test_it_goes_no_further_where_the_store_takes_no_more() -> None:
    """Computing on for a store whose memory is full of what is leased would only drain the battery."""
    computed = []

    def compute(prompt: np.ndarray[tuple[int], np.dtype[np.int32]]) -> PutResult:
        computed.append(len(prompt))
        return store.put(prompt, known_kv(prompt, store.identity))

    profile = small_profile(warm_bytes=8 * 4096, hot_bytes=0)
    with kvstore.open(None, identity=identity(), profile=profile) as store:
        full = text(9, 100)
        compute(full)
        with store.find(full):
            done = capture(store, text(1, 20), text(2, 30), [text(3, 40), text(4, 40)], compute)
        assert (done.captured, done.held, done.left) == (0, 0, 1)
        assert [refused.passage for refused in done.refused] == [0]
        assert "leased" in done.refused[0].reason
        assert computed == [100, len(beginning(text(1, 20), text(2, 30), store.block_tokens)) + 40]


def test_an_engines_own_limit_refuses_one_passage_only() -> None:
    def compute(prompt: np.ndarray[tuple[int], np.dtype[np.int32]]) -> PutResult:
        if len(prompt) > 150:
            raise ContextExceeded("needs more than 150 tokens: cut it")
        return store.put(prompt, known_kv(prompt, store.identity))

    with kvstore.open(None, identity=identity(), profile=small_profile()) as store:
        passages = [text(3, 140), text(4, 40)]
        done = capture(store, text(1, 20), text(2, 30), passages, compute)
        assert (done.captured, done.left) == (1, 0)
        assert [tuple(refused) for refused in done.refused] == [(0, "needs more than 150 tokens: cut it")]


@pytest.mark.parametrize("block_tokens", [16, 32, 128, 1024])
def test_a_passage_begins_a_block_where_half_of_the_filler_is_left(block_tokens: int) -> None:
    whole = text(2, 260)
    for length in range(1, 300, 13):
        system = text(1, length)
        before = beginning(system, whole, block_tokens)
        rest = before[length:]
        np.testing.assert_array_equal(before[:length], system)
        np.testing.assert_array_equal(rest, whole[len(whole) - len(rest) :])
        assert 130 <= len(rest) <= 260
        assert len(before) % block_tokens == 0 or block_tokens > 130
