"""Code blocks of a Markdown page, and what running them takes.

A page is run from top to bottom, its Python blocks in one namespace, in a folder of its own:

    ```python     runs
    ```text       what the Python block before it printed; … stands for anything
    ```console    lines with `$ ` run in a shell, each has to succeed; below it stands what it printed, with … as above
    ```toml       is written to config.toml, for the commands below it
    <!-- run      Python that readers do not see: what a page takes for granted. `at_end` is an ExitStack that is
    -->           closed after the page

An indented block is a command for the shell where it starts with `make`, else a signature or a picture in characters.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

LANGUAGES = ("python", "text", "console", "toml")

_FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\S*)[^\n]*\n(?P<fenced>.*?)^(?P=indent)```$"
    r"|^<!-- run\n(?P<hidden>.*?)^-->$"
    r"|(?:^\n|\A)(?P<indented>(?:^    [^\n]+\n?)+)",
    re.DOTALL | re.MULTILINE,
)


class Block(NamedTuple):
    """`language` is one of LANGUAGES, "hidden", "indented", or what the page made up. `line` is its first."""

    language: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """The code blocks of a page, in order."""
    source = page.read_text(encoding="utf-8")
    for found in _FENCE.finditer(source):
        line = source.count("\n", 0, found.end()) + 1
        if found["fenced"] is not None:
            text = found["fenced"].replace("\n" + found["indent"], "\n").removeprefix(found["indent"])
            yield Block(found["language"], text, line - text.count("\n"))
        elif found["hidden"] is not None:
            yield Block("hidden", found["hidden"], line - found["hidden"].count("\n"))
        else:
            yield Block("indented", found["indented"], line - found["indented"].count("\n"))


class Command(NamedTuple):
    """A line for the shell, and what it is said to print."""

    line: str
    output: str


def commands(console: str) -> list[Command]:
    """The commands of a console block. Raises ValueError for output that stands before any."""
    found: list[Command] = []
    for line in console.splitlines():
        if line.startswith("$ "):
            found.append(Command(line[2:], ""))
        elif found:
            found[-1] = Command(found[-1].line, found[-1].output + line + "\n")
        elif line:
            raise ValueError(f"a console block starts with {line!r}, not with a command")
    return found


def says(printed: str, expected: str) -> bool:
    """Whether `printed` is what the page shows: … there stands for anything, and blanks at line ends do not count."""
    shown, had = (
        "\n".join(line.rstrip() for line in each.strip().splitlines()) for each in (expected, printed)
    )
    pattern = ".*?".join(re.escape(part) for part in shown.split("…"))
    return re.fullmatch(pattern, had, re.DOTALL) is not None
