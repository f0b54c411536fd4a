"""What verbs print, and ask: JSON for programs, tables for people."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvstore.errors import InvalidRequestError

if TYPE_CHECKING:
    from rich.console import Console

_WIDE = 200  # characters


def json(value: Any) -> None:
    """Print a value as JSON."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    right: Sequence[str] = (),
    title: str | None = None,
) -> None:
    """Print a table; columns named in `right` are numbers."""
    from rich.table import Table
    from rich.text import Text

    made = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for column in columns:
        made.add_column(
            column, justify="right" if column in right else "left", no_wrap=True, overflow="ellipsis"
        )
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    console().print(made)


def console() -> Console:
    """Standard output, as wide as the terminal; where there is none, wide enough for all of it."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=_WIDE)


def line(text: str) -> None:
    """Print a line as it is."""
    print(text)


def confirm(yes: bool, question: str) -> None:
    """Go on only where the user says so. Raises InvalidRequestError where nobody can be asked."""
    import typer

    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidRequestError("nothing was changed: confirm with --yes, or look with --dry-run")
    typer.confirm(question, abort=True, err=True)


def size(nbytes: float | None) -> str:
    """Bytes for people."""
    if nbytes is None:
        return "?"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def age(last_use: float) -> str:
    """How long ago, for people."""
    seconds = max(0.0, time.time() - last_use)
    for length, unit in ((86_400, "d"), (3_600, "h"), (60, "min")):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
