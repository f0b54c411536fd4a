"""The verbs of the `kvstore` command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, add_completion=True, pretty_exceptions_enable=False)


@app.callback()
def about() -> None:
    """KV-cache store for on-device LLM inference."""


@app.command()
def demo(
    model: Annotated[
        Path | None,
        typer.Option(help="A llama-family GGUF; SmolLM2-135M-Instruct is fetched when none is given."),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(help="Text files to ask about; Python's own documentation when none is given."),
    ] = None,
    question: Annotated[list[str] | None, typer.Option(help="Questions to ask, at least two.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 48,
) -> None:
    """Answer questions about a text with and without the store, then again in a new process, and compare."""
    from . import demo as demonstration

    raise typer.Exit(demonstration.run(model, text or [], question or [], tokens))
