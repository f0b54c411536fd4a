"""Writes the command line reference from the commands themselves: what `kvstore VERB --help` says, verb by verb.

It replaces the line `<!-- every verb -->` of a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer.main
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

_PLACE = "<!-- every verb -->"


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """`markdown` with the reference in its place."""
    del page, config, files
    return markdown.replace(_PLACE, reference()) if _PLACE in markdown else markdown


def reference() -> str:
    """The Markdown text of all verbs, in the order in which the command lists them."""
    from kvstore.commands import app

    command: Any = typer.main.get_command(app)
    with command.make_context("kvstore", [], resilient_parsing=True) as context:
        return "\n".join(line for verb in _verbs(command, context) for line in _section(*verb))


def _verbs(group: Any, context: Any) -> Iterator[tuple[Any, Any]]:
    """Every command below `group` with its context; a group's own commands follow it."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        own = command.make_context(name, [], parent=context, resilient_parsing=True)
        if hasattr(command, "list_commands"):
            yield from _verbs(command, own)
        else:
            yield command, own


def _section(command: Any, context: Any) -> Iterator[str]:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    yield f"## {context.command_path}"
    yield ""
    yield command.help or command.short_help or ""
    yield ""
    yield f"Usage: `{usage}`"
    yield ""
    rows = [row for parameter in command.get_params(context) if (row := _row(parameter, context))]
    if rows:
        yield "| argument or option | meaning |"
        yield "|---|---|"
        yield from rows
        yield ""


def _row(parameter: Any, context: Any) -> str | None:
    """One line of the table; None for what is hidden, and for --help, which every verb has."""
    record = parameter.get_help_record(context)
    if getattr(parameter, "hidden", False) or parameter.name == "help" or record is None:
        return None
    name, meaning = (" ".join(text.split()) for text in record)
    name = re.sub(r"<list\[(\w+)\]>", lambda kind: f"<{kind[1].lower()}> …", name)  # given several times
    return "| `{}` | {} |".format(name.replace("|", r"\|"), meaning.replace("|", r"\|"))
