"""The page of benchmarks names every benchmark, and quotes the figures of the README, not others."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")


def test_every_benchmark_is_on_the_page() -> None:
    there = {
        path.stem for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text(encoding="utf-8")
    }
    named = set(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE))
    assert named == there


def test_times_to_first_token_are_those_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    sections = [part for part in PAGE.split("\n## ") if part.startswith("Time to first token")]
    drawings = [path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "drawings").glob("ttft-*.svg")]
    for text in (*sections, *drawings):
        quoted = set(re.findall(r"\b\d+(?:\.\d+)? (?:s|ms)\b", text))
        assert quoted
        assert not {figure for figure in quoted if figure not in readme}
