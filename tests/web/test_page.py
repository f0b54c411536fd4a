"""The page in a real browser: what it shows is what the store did; and the pictures of the documentation."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

import kvstore
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.recompute import FirstTokens
from kvstore.quality.reuse import Verdict
from kvstore.session import Session, identity_of
from kvstore.store import KVStore, open_store
from kvstore.watch import top
from kvstore.watch.change import KINDS
from kvstore.watch.snapshot import Snapshot
from kvstore.web import serve_http
from tests.chromium import BINARY, Chromium
from tests.known_kv import identity, load, prompt, put, small_profile
from tests.tiny_models import write_tiny_gguf

pytestmark = pytest.mark.skipif(BINARY is None, reason="no Chromium is installed")

_IMAGES = Path(__file__).parents[2] / "docs" / "img"
_SYSTEM = prompt(99, 64)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    profile = small_profile(cold_bytes_per_day=64 << 20)
    with open_store(tmp_path / "kv", identity=identity(), profile=profile) as store:
        yield store


@dataclass
class Traffic:
    """Chats behind one system prompt, as an engine would serve them."""

    store: KVStore
    seed: int = 0

    def serve(self, requests: int) -> None:
        for _ in range(requests):
            rng = np.random.default_rng(self.seed)
            self.seed += 1
            tokens = np.concatenate([_SYSTEM, prompt(int(rng.zipf(1.4)) % 30, int(rng.integers(30, 120)))])
            prefix = min(load(self.store, tokens), len(tokens) - 1)
            put(self.store, tokens)
            rest = len(tokens) - prefix
            moved = rest // 3
            self.store.served(
                prefix=prefix,
                moved=moved - moved // 8,
                recomputed=moved // 8,
                computed=rest - moved,
                seconds=0.004 * (rest - moved),
                waited=2e-5,
                without=0.004 * len(tokens),
            )


def test_it_shows_what_the_store_did(store: KVStore, tmp_path: Path) -> None:
    traffic = Traffic(store)
    traffic.serve(20)
    with serve_http(store.snapshot, port=0) as server, Chromium(tmp_path / "browser") as browser:
        browser.open(server.url)
        browser.wait_until(lambda: browser.text("#state") == "live")
        counts = store.stats().counts
        legend = browser.evaluate("[...document.querySelectorAll('#tokens-legend b')].map(b => b.innerText)")
        assert legend == [f"{counts[f'tokens_{kind}']:,}" for kind in KINDS]
        assert f"{counts['requests']} requests" in browser.text("#saved-note")
        assert str(store.path) in browser.text("#where")
        assert f"{store.stats().warm.blocks} blocks" in browser.text("#tiers")
        hottest = store.snapshot().prefixes[0]
        assert hottest.key in browser.text("#prefixes")
        assert hottest.hits >= 15, "the system prompt"

        traffic.serve(5)
        browser.wait_until(lambda: "25 requests" in browser.text("#saved-note"))
        browser.wait_until(lambda: bool(browser.evaluate("document.querySelectorAll('#tokens rect').length")))
        assert browser.errors == []
        assert all(each.startswith((server.url, "data:")) for each in browser.requests)


def test_it_says_when_the_store_is_gone_and_finds_it_again(store: KVStore, tmp_path: Path) -> None:
    server = serve_http(store.snapshot, port=0)
    port = int(server.url.rstrip("/").rpartition(":")[2])
    with Chromium(tmp_path / "browser") as browser:
        browser.open(server.url)
        browser.wait_until(lambda: browser.text("#state") == "live")
        server.close()
        browser.wait_until(lambda: "no answer" in browser.text("#state"))
        with serve_http(store.snapshot, port=port):
            browser.wait_until(lambda: browser.text("#state") == "live")


def test_what_a_user_named_is_text_and_not_markup(store: KVStore, tmp_path: Path) -> None:
    evil = "<img src=x onerror=\"document.title='taken'\">"
    now = store.snapshot()
    told = msgspec.structs.replace(
        now, path=evil, stats=msgspec.structs.replace(now.stats, refusals={evil: 3}, misses={evil: 4})
    )
    with serve_http(lambda: told, port=0) as server, Chromium(tmp_path / "browser") as browser:
        browser.open(server.url)
        browser.wait_until(lambda: browser.text("#state") == "live")
        assert evil in browser.text("#where")
        assert evil in browser.text("#refusals")
        assert browser.evaluate("document.images.length") == 0
        assert browser.evaluate("document.title") == "kvstore"


_DEVICE = kvstore.Profile(
    name="example",
    block_tokens=32,
    hot_bytes=1 << 20,
    warm_bytes=5 << 20,
    cold_bytes=1 << 25,
    cold_bytes_per_day=1 << 25,
    arena_bytes=1 << 23,
    frame_bytes=16384,
)


def _anywhere(now: Snapshot) -> Snapshot:
    """Of whatever machine."""
    return msgspec.structs.replace(now, path="~/.local/share/kvstore", pid=4711)


def _asked(engine: StaticGraphEngine, rng: np.random.Generator) -> NDArray[np.int32]:
    """A question about some of 40 passages, in any order, behind one of two system prompts."""
    parts = [(int(rng.integers(2)), 96), *((10 + int(rng.zipf(1.3)) % 40, 128) for _ in range(3))]
    texts = [np.random.default_rng(seed).integers(0, engine.config.vocab, length) for seed, length in parts]
    return np.concatenate([*texts, rng.integers(0, engine.config.vocab, 24)]).astype(np.int32)


def test_pictures_for_the_documentation(tmp_path: Path) -> None:
    """Of a real run, so that the documentation shows what there is. Kept only where KVSTORE_DOCS_SCREENSHOTS is 1."""
    kept = os.environ.get("KVSTORE_DOCS_SCREENSHOTS") == "1"
    images = _IMAGES if kept else tmp_path
    images.mkdir(parents=True, exist_ok=True)
    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model, layers=6, hidden=256, heads=8, kv_heads=4, head_dim=32, ffn=1024)
    engine = StaticGraphEngine(model, cache=tmp_path / "cache", sizes=(32, 128), contexts=(640,), groups=3)
    rng = np.random.default_rng(1)
    with (
        kvstore.open(tmp_path / "kv", identity=identity_of(engine, "00" * 32), profile=_DEVICE) as store,
        serve_http(lambda: _anywhere(store.snapshot()), port=0) as server,
        Chromium(tmp_path / "light") as light,
        Chromium(tmp_path / "dark", dark=True) as dark,
    ):
        store.keep_verdict(Verdict(fast=FirstTokens(8), careful=None))
        session, seen = Session(engine, store, "fast"), [_anywhere(store.snapshot())]
        for browser in (light, dark):
            browser.open(server.url)
            browser.wait_until(lambda browser=browser: browser.text("#state") == "live")
        end = time.monotonic() + (60 if kept else 4)
        while time.monotonic() < end:
            asked = _asked(engine, rng)
            store.hint(tokens=asked[:300])  # as while the user types
            time.sleep(0.2)
            session.generate(asked, 1)
            if time.time() - seen[-1].at > 0.5:
                seen.append(_anywhere(store.snapshot()))
        light.screenshot(images / "page.png")
        dark.screenshot(images / "page-dark.png")
    console = Console(record=True, width=110, file=StringIO())
    console.print(top.Picture(seen))
    # Rich's own format loads fonts from elsewhere.
    code_format = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    console.save_svg(str(images / "top.svg"), title="kvstore top", code_format=code_format)
    for image in ("page.png", "page-dark.png", "top.svg"):
        assert 5_000 < (images / image).stat().st_size < 300_000
    drawn = (images / "top.svg").read_text("utf-8")
    assert "hottest&#160;prefixes" in drawn
    assert "//" not in drawn.replace("http://www.w3.org/2000/svg", "").replace(
        "https://www.textualize.io", ""
    )
