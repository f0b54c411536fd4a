"""Options that many verbs have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Dir = Annotated[Path | None, typer.Option("--dir", help="Data directory.", show_default=False)]
Socket = Annotated[Path | None, typer.Option(help="Socket of a running daemon.", show_default=False)]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="Configuration file.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
IdentityName = Annotated[
    str | None,
    typer.Option("--identity", help="First digits of an identity, as `kvstore status` shows it."),
]
Text = Annotated[str | None, typer.Argument(help="A text; needs --model.", show_default=False)]
File = Annotated[
    Path | None,
    typer.Option("--file", help="A text file, - for standard input; needs --model.", show_default=False),
]
Tokens = Annotated[
    Path | None,
    typer.Option("--tokens", help="A JSON list of token ids, - for standard input.", show_default=False),
]
Model = Annotated[
    Path | None, typer.Option("--model", help="A GGUF whose tokenizer reads texts.", show_default=False)
]
Special = Annotated[
    bool, typer.Option("--special", help="Texts of control tokens stand for them, as in a chat template.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it without asking.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would happen.")]
