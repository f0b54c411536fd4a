"""Prefetch in the store, from real flash: hints bring what they name, requests go first, and nothing is left behind."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.errors import InvalidRequestError, InvalidTokensError, StoreClosedError
from kvstore.index.token_embedder import TokenEmbedder
from kvstore.store import KVStore, open_store
from tests.known_kv import identity, load, prompt, put, small_profile

BLOCK = 16
VOCABULARY = 2000
SECONDS = 60

Tokens = NDArray[np.int32]


def text_of(tokens: Tokens) -> str:
    return " ".join(map(str, tokens.tolist()))


def embedder() -> TokenEmbedder:
    matrix = np.random.default_rng(0).standard_normal((VOCABULARY, 32), np.float32)
    return TokenEmbedder(matrix, lambda text: [int(word) for word in text.split() if word.isdigit()])


def some(seed: int, length: int = 4 * BLOCK) -> Tokens:
    return prompt(seed, length, VOCABULARY)


def open_at(path: Path | None, **budgets: Any) -> KVStore:
    store = open_store(path, identity=identity(), profile=small_profile(block_tokens=BLOCK, **budgets))
    store.stand_back_when(lambda: None)  # whatever the machine that tests is busy with
    return store


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    with open_at(tmp_path / "kv") as opened:
        yield opened
        assert opened._shared.prefetching.settled(SECONDS)
        opened.check()
        assert opened.stats().warm.leased == opened.stats().cold.leased == 0
        assert adds_up(opened)


def on_flash(store: KVStore, *prompts: Tokens) -> None:
    """Put prompts and leave them on flash alone."""
    for tokens in prompts:
        put(store, tokens)
    store.flush(SECONDS)
    for tokens in prompts:
        store.demote(store.lookup(tokens))
        assert hits(store, tokens) == 0


def hits(store: KVStore, tokens: Tokens) -> int:
    """How many tokens are in memory."""
    return store.presence(store.lookup(tokens)).tokens("hit")


def settled(store: KVStore) -> KVStore:
    assert store._shared.prefetching.settled(SECONDS)
    return store


def indexed(store: KVStore) -> None:
    """Wait until everything held can be found by its meaning."""
    while (now := store.stats().semantics) is not None and (now.waiting or now.backend == "not loaded yet"):
        pass


def count(store: KVStore, what: str) -> int:
    return store.stats().counts.get(f"bytes_prefetched_{what}", 0)


def adds_up(store: KVStore) -> bool:
    parts = sum(count(store, what) for what in ("used", "wasted", "waiting", "cancelled"))
    return count(store, "read") == parts


def test_hinted_tokens_are_in_memory_before_they_are_asked_for(store: KVStore) -> None:
    tokens = some(1)
    on_flash(store, tokens, some(2))
    store.hint(tokens=tokens)
    assert hits(settled(store), tokens) == len(tokens)
    assert hits(store, some(2)) == 0
    assert count(store, "waiting") == count(store, "read") > 0
    assert load(store, tokens) == len(tokens)
    assert count(store, "used") == count(store, "read")


def test_who_looks_all_the_time_whether_it_has_come_does_not_keep_it_from_coming(store: KVStore) -> None:
    """Look-ups count as requests, and the prefetcher stands back for requests: so it stood back for ever."""
    tokens = some(1)
    on_flash(store, tokens)
    store.hint(tokens=tokens)
    deadline = time.monotonic() + SECONDS
    while hits(store, tokens) < len(tokens):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def test_what_a_text_speaks_of_is_fetched_with_what_stands_beside_it(store: KVStore) -> None:
    tokens = [some(seed) for seed in range(6)]
    on_flash(store, *tokens)
    store.use_semantics(embedder(), text_of)
    indexed(store)
    for words in range(4, BLOCK):
        store.hint(text=text_of(tokens[3][:words]))
        settled(store)
    assert hits(store, tokens[3]) >= 2 * BLOCK
    assert store.stats().counts.get("hints_without_semantics") is None


def test_a_text_without_semantics_is_counted_and_fetches_nothing(store: KVStore) -> None:
    on_flash(store, some(1))
    store.hint(text="1 2 3")
    settled(store)
    assert store.stats().counts["hints_without_semantics"] == 1
    assert count(store, "read") == 0


def test_a_session_that_comes_back_finds_its_last_prompt_and_its_answer(store: KVStore) -> None:
    system, turn, answer = some(1, BLOCK), some(2, 2 * BLOCK), some(3, BLOCK)
    asked = np.concatenate([system, turn])
    put(store, asked)
    put(store, some(9))
    store.hint(tokens=asked, session="chat")
    settled(store)
    answered = np.concatenate([asked, answer])
    on_flash(store, answered, some(9))
    store.hint(session="chat")
    assert hits(settled(store), answered) == len(answered)
    assert hits(store, some(9)) == 0


def test_sessions_of_two_identities_with_one_name_are_two(store: KVStore) -> None:
    other = store.view(identity("b"))
    for view, tokens in ((store, some(1)), (other, some(2))):
        on_flash(view, tokens)
        view.hint(tokens=tokens, session="chat")
        settled(view)
        view.demote(view.lookup(tokens))
    store.hint(session="chat")
    settled(store)
    assert hits(store, some(1)) == len(some(1))
    assert hits(other, some(2)) == 0


def test_what_usually_follows_is_fetched_without_a_hint(store: KVStore) -> None:
    first, then = some(1), some(2)
    on_flash(store, first, then)
    store.hint(session="nobody")  # from the first hint on the store learns
    settled(store)
    for _ in range(8):
        load(store, first)
        load(settled(store), then)
        settled(store)
        for tokens in (first, then):
            store.demote(store.lookup(tokens))
    load(store, first)
    assert hits(settled(store), then) == len(then)


def test_without_any_hint_nothing_is_fetched_and_no_thread_runs(store: KVStore) -> None:
    first, then = some(1), some(2)
    on_flash(store, first, then)
    for _ in range(8):
        load(store, first)
        load(store, then)
        store.demote(store.lookup(then))
    assert hits(store, then) == 0
    assert not any(thread.name == "kvstore-prefetch" for thread in threading.enumerate())


def test_moved_runs_of_hinted_tokens_are_fetched_too(store: KVStore) -> None:
    held = some(1)
    on_flash(store, held)
    wanted = np.concatenate([some(2, 7), held])
    store.hint(tokens=wanted)
    settled(store)
    match = store.lookup(wanted, moved=True)
    assert store.presence(match).tokens("hit") >= len(held) - BLOCK
    assert store.presence(match).tokens("flash") == 0


@pytest.mark.parametrize("timeout", [None, float(SECONDS)])
def test_prefetch_waits_until_all_is_in_memory(store: KVStore, timeout: float | None) -> None:
    tokens = some(1)
    on_flash(store, tokens)
    presence = store.prefetch(store.lookup(tokens), timeout=timeout)
    assert presence.stretches == ((0, len(tokens), "hit"),)


def test_prefetch_at_best_effort_says_what_is_pending_and_it_comes(store: KVStore) -> None:
    tokens = some(1)
    on_flash(store, tokens)
    presence = store.prefetch(store.lookup(tokens))
    assert presence.tokens("hit") + presence.tokens("pending") == len(tokens)
    assert hits(settled(store), tokens) == len(tokens)


def test_presence_tells_hit_flash_and_miss(store: KVStore) -> None:
    near, far = some(1, 2 * BLOCK), some(2, 2 * BLOCK)
    both = np.concatenate([near, far])
    on_flash(store, both)
    store.promote(store.lookup(near), to="warm")
    presence = store.presence(store.lookup(np.concatenate([both, some(3)])))
    assert presence.stretches == ((0, 2 * BLOCK, "hit"), (2 * BLOCK, 4 * BLOCK, "flash"))
    assert presence.settled


def test_prefetch_of_what_is_not_on_flash_returns_at_once() -> None:
    with open_at(None) as store:
        put(store, some(1))
        store.hint(tokens=some(1))
        assert store.prefetch(store.lookup(some(1)), timeout=None).tokens("hit") == len(some(1))
        assert store.prefetch(store.lookup(some(2)), timeout=None).stretches == ()


def test_a_record_that_is_damaged_ends_the_wait_and_is_counted(store: KVStore) -> None:
    tokens = some(1)
    on_flash(store, tokens)
    assert store.path is not None
    for record in (store.path / "blocks").rglob("*"):
        if record.is_file():
            content = bytearray(record.read_bytes())
            content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
            record.write_bytes(content)
    presence = store.prefetch(store.lookup(tokens), timeout=None)
    assert presence.tokens("hit") == 0
    assert store.stats().bad_records


def test_nothing_hinted_is_read_under_pressure_but_what_is_asked_for_is(store: KVStore) -> None:
    hinted, asked = some(1), some(2)
    on_flash(store, hinted, asked)
    busy = threading.Event()

    def reason() -> str:
        busy.set()
        return "low battery"

    store.stand_back_when(reason)
    store.hint(tokens=hinted)
    assert busy.wait(SECONDS)
    assert store.prefetch(store.lookup(asked), timeout=None).tokens("hit") == len(asked)
    assert hits(store, hinted) == 0
    assert store.stats().counts["prefetch_stood_back: low battery"] >= 1
    store.stand_back_when(lambda: None)
    assert hits(settled(store), hinted) == len(hinted)


def test_a_host_that_cannot_tell_makes_the_prefetcher_stand_back_and_not_die(
    store: KVStore, caplog: pytest.LogCaptureFixture
) -> None:
    on_flash(store, some(1))
    called = threading.Event()

    def broken() -> str:
        called.set()
        raise OSError("sensor gone")

    store.stand_back_when(broken)
    store.hint(tokens=some(1))
    assert called.wait(SECONDS)
    store.stand_back_when(lambda: None)
    assert hits(settled(store), some(1)) == len(some(1))
    assert "nobody can tell" in caplog.text


def test_what_is_fetched_ahead_takes_a_quarter_of_warm_memory_at_most(tmp_path: Path) -> None:
    with open_at(tmp_path / "kv", warm_bytes=16 * 4096, hot_bytes=0) as store:
        prompts = [some(seed) for seed in range(3)]
        on_flash(store, *prompts)
        for tokens in prompts:
            store.hint(tokens=tokens, session=len(tokens))
            settled(store)
            assert count(store, "waiting") <= 4 * 4096
            assert sum(hits(store, each) for each in prompts) <= 4 * BLOCK
        store.check()


def test_what_only_memory_holds_is_never_dropped_for_a_guess(tmp_path: Path) -> None:
    with open_at(tmp_path / "kv", warm_bytes=16 * 4096, hot_bytes=0) as store:
        on_flash(store, some(1), some(2))
        fresh = some(7, 16 * BLOCK)
        put(store, fresh)
        in_memory = hits(store, fresh)
        store.hint(tokens=some(1))
        settled(store)
        assert hits(store, fresh) == in_memory
        assert store.lookup(fresh).length == len(fresh)


def test_a_request_stops_what_is_being_read_and_leaves_nothing_behind(store: KVStore) -> None:
    """Requests come at any moment of a read: what was half there is given back, and comes another time."""
    hinted, asked = some(1), some(2)
    on_flash(store, hinted, asked)
    for _ in range(20):
        store.hint(tokens=hinted, session="a")
        assert load(store, asked) == len(asked)
        store.demote(store.lookup(asked))
        store.check()
    store.hint(tokens=hinted, session="a")
    assert hits(settled(store), hinted) == len(hinted)
    assert adds_up(store)


def test_closing_stops_the_thread_in_the_middle_of_its_work(tmp_path: Path) -> None:
    store = open_at(tmp_path / "kv")
    prompts = [some(seed) for seed in range(4)]
    on_flash(store, *prompts)
    for number, tokens in enumerate(prompts):
        store.hint(tokens=tokens, session=number)
    store.close()
    assert not any(thread.name == "kvstore-prefetch" for thread in threading.enumerate())
    with pytest.raises(StoreClosedError):
        store.hint(tokens=prompts[0])
    with open_at(tmp_path / "kv") as again:
        assert all(load(again, tokens) == len(tokens) for tokens in prompts)


def test_closing_ends_a_wait(tmp_path: Path) -> None:
    store = open_at(tmp_path / "kv")
    on_flash(store, some(1))
    match = store.lookup(some(1))
    ended: list[BaseException | None] = []

    def wait() -> None:
        try:
            store.prefetch(match, timeout=None)
            ended.append(None)
        except StoreClosedError as error:
            ended.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    store.close()
    waiting.join(SECONDS)
    assert len(ended) == 1


def test_hints_that_say_nothing_are_refused(store: KVStore) -> None:
    with pytest.raises(InvalidRequestError, match="tokens, text or session"):
        store.hint()
    with pytest.raises(InvalidTokensError):
        store.hint(tokens=[])


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["hint", "session", "load", "demote", "prefetch", "put", "drop"]),
            st.integers(0, 5),
        ),
        max_size=25,
    )
)
def test_whatever_comes_budgets_and_accounts_hold_and_kv_is_right(actions: list[tuple[str, int]]) -> None:
    folder = Path(tempfile.mkdtemp())
    try:
        with open_at(folder / "kv", warm_bytes=12 * 4096, hot_bytes=4 * 4096) as store:
            on_flash(store, *(some(seed) for seed in range(2)))
            for action, seed in actions:
                tokens = some(seed)
                match action:
                    case "hint":
                        store.hint(tokens=tokens, session=seed % 3)
                    case "session":
                        store.hint(session=seed % 3)
                    case "load":
                        load(store, tokens)
                    case "demote":
                        store.demote(store.lookup(tokens))
                    case "prefetch":
                        store.prefetch(store.lookup(tokens), timeout=0.01)
                    case "put":
                        put(store, tokens, wait=SECONDS)
                    case "drop":
                        store.invalidate(prefix=tokens)
                store.check()
                assert count(store, "waiting") <= count(store, "read")
            settled(store)
            assert adds_up(store)
            store.flush(SECONDS)
            found = store.stats()
            assert found.warm.leased == found.hot.leased == found.cold.leased == 0
            store.check()
    finally:
        shutil.rmtree(folder)
