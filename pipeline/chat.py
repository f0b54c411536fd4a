"""Conversations to prompt text, by the Jinja template that the GGUF brings (`tokenizer.chat_template`).

A template is a program from a file of unknown origin, so it runs in Jinja's immutable sandbox. It finds there what
templates are written against, the environment of Hugging Face transformers: blocks trimmed, loop controls,
`raise_exception`, `strftime_now`, a `tojson` that does not escape HTML, and the `generation` block.

Encode the result with `tokenizer.encode(text, special=True, start=True)`. Message contents that spell a control token
become that token: what must not is for the caller to strip.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from os import PathLike
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .gguf_metadata import read_metadata


class ChatTemplateError(ValueError):
    """There is no template, it cannot be parsed, or it refuses the conversation."""


class ChatTemplate:
    """The chat template in GGUF metadata (see `read_metadata`).

    Raises ChatTemplateError if there is none or it is no Jinja.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        source = metadata.get("tokenizer.chat_template")
        if not source:
            name = metadata.get("general.name", "the model")
            raise ChatTemplateError(f"{name} has no chat template (a base model?): send it plain text")
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template cannot be parsed: {error}") from error
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        self._tokens: dict[str, str] = {}
        for name in ("bos", "eos", "unk", "pad"):
            key = {"unk": "unknown", "pad": "padding"}.get(name, name)
            index = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if index is not None and 0 <= index < len(tokens):
                self._tokens[f"{name}_token"] = tokens[index]

    @classmethod
    def from_gguf(cls, path: str | PathLike[str]) -> ChatTemplate:
        """The template of the GGUF file at `path`. Raises ChatTemplateError, GgufError, OSError."""
        return cls(read_metadata(path))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        now: datetime | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`, each {"role": ..., "content": ...}; it ends where the answer begins.

        tools: JSON schemas of functions. now: what `strftime_now` formats, by default the present; fix it where a
        changing date would end the reuse of everything after it. variables: whatever else the template knows
        (`documents`, `enable_thinking`). Raises ChatTemplateError when the template refuses or fails.
        """
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                strftime_now=(now or datetime.now()).strftime,
                **{**self._tokens, **variables},
            )
        except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise ChatTemplateError(f"the chat template refuses these messages: {error}") from error


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training; here it only shows it."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
