"""Every code block of the README and of the documentation does what the page says."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.code_blocks import LANGUAGES, Block, blocks, commands, says

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
RUN = [page for page in PAGES if any(block.language != "indented" for block in blocks(page))]


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_does_what_it_says(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"):
        monkeypatch.setenv(folder, str(tmp_path / folder.lower()))
        (tmp_path / folder.lower()).mkdir(mode=0o700)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")
    with contextlib.ExitStack() as at_end:
        _run_page(page, {"__name__": "page", "at_end": at_end})


def _run_page(page: Path, namespace: dict[str, Any]) -> None:
    printed: str | None = None
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        match block.language:
            case "python" | "hidden":
                printed = _run(block, page, namespace)
            case "text":
                assert printed is not None, f"{where}: no Python block before it printed this"
                assert says(printed, block.text), f"{where}: it printed\n{printed}"
            case "console":
                for command in commands(block.text):
                    done = subprocess.run(
                        ["bash", "-c", command.line],
                        stdout=subprocess.PIPE,
                        stderr=subprocess.STDOUT,
                        text=True,
                        timeout=240,
                        check=False,
                    )
                    assert done.returncode == 0, f"{where}: {command.line}\n{done.stdout}"
                    assert not command.output or says(done.stdout, command.output), (
                        f"{where}: {command.line} printed\n{done.stdout}"
                    )
            case "toml":
                Path("config.toml").write_text(block.text, encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_no_block_that_is_not_run(page: Path) -> None:
    for block in blocks(page):
        where = f"{page.name}, line {block.line}"
        if block.language == "indented":
            for line in block.text.splitlines():
                if line.strip().startswith("make "):
                    target = line.split("#")[0].strip()
                    dry = subprocess.run(
                        f"{target} --dry-run",
                        shell=True,
                        cwd=ROOT,
                        capture_output=True,
                        text=True,
                        check=False,
                    )
                    assert dry.returncode == 0, f"{where}: {dry.stderr}"
        else:
            assert block.language in (*LANGUAGES, "hidden"), f"{where}: nothing runs {block.language!r}"


def _run(block: Block, page: Path, namespace: dict[str, Any]) -> str:
    """Run a Python block; what it printed. Tracebacks name the page and its lines."""
    code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(code, namespace)
    return output.getvalue()


def test_output_on_a_page_is_compared() -> None:
    assert says("12 of 20 tokens, 4096 bytes\n", "12 of 20 tokens, … bytes")
    assert says("a  \nb\n", "a\nb\n")
    assert not says("13 of 20 tokens\n", "12 of 20 tokens")
    assert not says("", "something")
    assert [command.line for command in commands("$ one\nsays\n$ two\n")] == ["one", "two"]
    with pytest.raises(ValueError, match="not with a command"):
        commands("says\n$ one\n")


def test_blocks_are_found_in_order(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text\n\n    make test\n\n<!-- run\nx = 1\n-->\n\n"
        "- item\n\n  ```python\n  if x:\n      print(x)\n  ```\n\n```text\n1\n```\n",
        encoding="utf-8",
    )
    found = list(blocks(page))
    assert [block.language for block in found] == ["indented", "hidden", "python", "text"]
    assert found[2].text == "if x:\n    print(x)\n"
    assert [block.line for block in found] == [3, 6, 12, 17]
