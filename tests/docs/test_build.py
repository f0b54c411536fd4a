"""The documentation builds without a warning, and is complete in itself."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages."""
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return target


def test_every_page_is_there(site: Path) -> None:
    for page in (ROOT / "docs").glob("*.md"):
        assert (site / f"{page.stem}.html").is_file()


def test_reading_fetches_nothing(site: Path) -> None:
    elsewhere = r"[\"']?(?:https?:)?//"
    outside = re.compile(rf"(?:src|srcset)={elsewhere}|<link[^>]+href={elsewhere}|url\({elsewhere}")
    found = {
        path.name: match[0]
        for path in site.rglob("*")
        if path.suffix in (".html", ".css")  # a picture that is shown as an image loads nothing
        and (match := outside.search(path.read_text(encoding="utf-8")))
    }
    assert not found


def test_every_verb_is_in_the_reference(site: Path) -> None:
    listed = subprocess.run(
        [str(Path(sys.executable).parent / "kvstore"), "--help"],
        stdout=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "100", "NO_COLOR": "1"},
        text=True,
        check=True,
    )
    verbs = re.findall(r"^│ ([a-z]+) ", listed.stdout.partition("Commands")[2], re.MULTILINE)
    assert len(verbs) > 10
    page = html.unescape((site / "cli.html").read_text(encoding="utf-8"))
    for verb in verbs:
        assert f">kvstore {verb}" in page, f"{verb} is not in the command line reference"


def test_docstrings_are_in_the_reference(site: Path) -> None:
    page = (site / "api.html").read_text(encoding="utf-8")
    for name in (
        "kvstore.store.KVStore.put",
        "kvstore.lease.Lease.layer_groups",
        "kvstore.pipeline.rope.Rope",
    ):
        assert f'id="{name}"' in page
    assert "Thread-safe. A context manager" in page


def test_every_drawing_is_shown(site: Path) -> None:
    shown = "".join(page.read_text(encoding="utf-8") for page in site.glob("*.html"))
    for drawing in (ROOT / "docs" / "drawings").iterdir():
        assert f"drawings/{drawing.name}" in shown
