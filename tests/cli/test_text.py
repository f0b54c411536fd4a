"""Texts through a model's tokenizer, and calibration, with the installed command and a tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstore.language_model import LanguageModel
from kvstore.pipeline.schedule import CallCosts, Windows
from kvstore.pipeline.tokenizer import Tokenizer
from kvstore.session import Session
from kvstore.store import open_store
from tests.known_kv import identity as known_identity
from tests.known_kv import known_kv, small_profile
from tests.tiny_models import write_tiny_gguf

TEXT = "the rain in spain stays mainly in the plain, and the train is late again and again"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, layers=6, context=4096)
    return path


def run(*arguments: str) -> Any:
    script = Path(sys.executable).parent / "kvstore"
    done = subprocess.run(
        [str(script), *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_text_is_read_with_the_tokenizer_of_the_model(model: Path, tmp_path: Path) -> None:
    """And its tokenizer tells which identity is meant, where others are held, too."""
    tokenizer = Tokenizer.from_gguf(model)
    ours = msgspec.structs.replace(known_identity(), tokenizer=tokenizer.digest())
    tokens = tokenizer.encode(TEXT, start=True)
    with open_store(tmp_path / "kv", identity=ours, profile=small_profile()) as store:
        store.put(tokens, known_kv(tokens, ours))
        store.view(known_identity("other")).put(tokens, known_kv(tokens, known_identity("other")))
    (tmp_path / "text.txt").write_text(TEXT)
    where = ["--dir", str(tmp_path / "kv"), "--model", str(model)]
    for given in ([TEXT], ["--file", str(tmp_path / "text.txt")]):
        found = run("explain", *given, *where)
        assert found["identity"] == ours.digest().hex()
        assert found["tokens"] == len(tokens)
        assert found["explanation"]["prefix"] == len(tokens) - 1
    assert run("tree", TEXT[:20], "--identity", ours.digest().hex(), *where)[0]["nodes"][0]["tokens"] == len(
        tokens
    )
    assert run("pin", TEXT, *where)["held"] == len(tokens)


def test_with_measured_costs_explain_says_what_a_request_then_does(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_CACHE_DIR", str(tmp_path / "cache"))
    opened = LanguageModel(model)
    known, asked = (opened.tokenizer.encode(text, start=True) for text in (TEXT, TEXT[:50] + " but not here"))
    with open_store(
        tmp_path / "kv", identity=opened.identity, profile=small_profile(warm_bytes=8 << 20)
    ) as store:
        Session(opened.engine, store).generate(known, 1)
    (tmp_path / "tokens.json").write_text(json.dumps(asked.tolist()))
    found = run(
        *("explain", "--tokens", str(tmp_path / "tokens.json"), "--measured", "--model", str(model)),
        *("--dir", str(tmp_path / "kv"), "--policy", "exact"),
    )
    assert found["cost"]["compute_seconds"] > 0
    assert found["cost"]["flash_bytes"] > 0
    with open_store(
        tmp_path / "kv", identity=opened.identity, profile=small_profile(warm_bytes=8 << 20)
    ) as store:
        done = Session(opened.engine, store, "exact").generate(asked, 1)
    told = found["explanation"]
    assert told["prefix"] == done.hot + done.warm + done.cold > 0
    assert told["computed"] == done.computed
    assert sum(span["length"] for span in told["spans"]) == done.prompt_tokens


def test_measured_costs_are_those_of_narrow_windows_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call was charged as one over all slots."""
    monkeypatch.setenv("KVSTORE_CACHE_DIR", str(tmp_path / "cache"))
    opened = LanguageModel(model)
    measured = opened.engine.costs(1024)
    costs = CallCosts(measured.seconds, Windows({512: 0.5, 1024: 1.0}))  # told apart from noise
    (table,) = (tmp_path / "cache").rglob("costs-*.json")
    table.write_text(
        json.dumps({1024: {"seconds": costs.seconds, "windows": {"shares": {512: 0.5, 1024: 1.0}}}})
    )
    with open_store(tmp_path / "kv", identity=opened.identity, profile=small_profile(warm_bytes=8 << 20)):
        pass  # nothing held
    (tmp_path / "tokens.json").write_text(json.dumps(list(range(100)) * 6))
    found = run(
        *("explain", "--tokens", str(tmp_path / "tokens.json"), "--measured", "--model", str(model)),
        *("--dir", str(tmp_path / "kv")),
    )
    assert found["cost"]["compute_seconds"] == pytest.approx(costs.cover_at(np.arange(600)).seconds)


def test_calibrate_leaves_a_verdict(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTORE_CACHE_DIR", str(tmp_path / "cache"))
    where = ["--dir", str(tmp_path / "kv")]
    own = tmp_path / "prompts.json"
    own.write_text(json.dumps([TEXT[:40], [1, 2, 3]]))
    verdict = run("calibrate", "--model", str(model), "--trials", "1", "--prompts", str(own), *where)
    assert verdict["careful"] is None  # nothing can be said of recall after one trial
    assert verdict["reasons"]
    assert list((tmp_path / "kv" / "identities").glob("*.verdict"))
    assert run("verify", *where)["faults"] == []
