"""The demo as a user runs it: the installed command, a model and a text of one's own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pytest

from tests.tiny_models import write_tiny_gguf


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    script = Path(sys.executable).parent / "kvstore"
    assert script.exists(), "install the package: pip install -e '.[dev]'"
    monkeypatch.setenv("KVSTORE_CACHE_DIR", str(tmp_path / "cache"))
    return [str(script)]


def test_demo_answers_alike_with_and_without_the_store(command: list[str], tmp_path: Path) -> None:
    model, text = tmp_path / "tiny.gguf", tmp_path / "text.txt"
    write_tiny_gguf(model, context=4096)
    text.write_text(topics["assignment"], encoding="utf-8")
    run = subprocess.run(
        [
            *command,
            "demo",
            "--model",
            str(model),
            "--text",
            str(text),
            "--question",
            "What?",
            "--tokens",
            "6",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert run.returncode == 0, run.stderr
    assert "Answers with and without the store are equal." in run.stdout
    rows = [re.findall(r"[\w.+()]+", line) for line in run.stdout.splitlines() if line.startswith("│")]
    first, second, restart = rows
    assert [first[0], second[0], restart[0]] == ["first", "second", "restart"]
    assert first[2:5] == ["0", "0", "0"]
    assert int(second[2]) + int(second[3]) > 800  # hot and warm
    assert int(restart[4]) > 800  # cold
    assert float(restart[6]) > 0.1  # MB read


@pytest.mark.parametrize(
    ("arguments", "says"),
    [(["demo", "--tokens", "0"], "tokens"), (["nonsense"], "nonsense"), (["demo", "--model"], "model")],
)
def test_bad_arguments_give_one_clear_message_and_exit_2(
    command: list[str], arguments: list[str], says: str
) -> None:
    run = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert says in run.stderr
    assert "Traceback" not in run.stderr


def test_a_model_that_is_none_is_refused_without_a_traceback(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF nonsense")
    run = subprocess.run(
        [*command, "demo", "--model", str(tmp_path / "broken.gguf")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 1
    assert "broken.gguf" in run.stderr
    assert "Traceback" not in run.stderr
