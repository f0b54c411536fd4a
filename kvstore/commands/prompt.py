"""The tokens that a verb is given: as a text with a model's tokenizer, or as they are."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from kvstore.errors import InvalidRequestError, InvalidTokensError

if TYPE_CHECKING:
    from kvstore.admin.held import Held
    from kvstore.pipeline.tokenizer import Tokenizer


class Given(NamedTuple):
    """Token ids, and the tokenizer that made them, if a model was given."""

    tokens: list[int]
    tokenizer: Tokenizer | None

    def identity(self, named: str | None, held: Held) -> str | None:
        """The identity that is meant: as named, else the only exact one that this tokenizer fits."""
        if named is not None or self.tokenizer is None:
            return named
        digest = self.tokenizer.digest()
        fitting = [
            each.identity
            for each in held.status().identities
            if each.tokenizer == digest and each.codec == "lossless"
        ]
        return fitting[0] if len(fitting) == 1 else None


def tokenizer_of(model: Path | None) -> Tokenizer | None:
    """The tokenizer in a GGUF. Raises TokenizerError, GgufError, OSError."""
    if model is None:
        return None
    from kvstore.pipeline.tokenizer import Tokenizer

    return Tokenizer.from_gguf(model)


def given(
    text: str | None, file: Path | None, tokens: Path | None, model: Path | None, *, special: bool
) -> Given:
    """Exactly one of text, file and tokens. Raises InvalidRequestError, InvalidTokensError, and what reading raises."""
    if sum(each is not None for each in (text, file, tokens)) != 1:
        raise InvalidRequestError("give a text, --file or --tokens, and only one of them")
    return optional(text, file, tokens, model, special=special)


def optional(
    text: str | None, file: Path | None, tokens: Path | None, model: Path | None, *, special: bool = False
) -> Given:
    """The same, but none of them is no tokens."""
    tokenizer = tokenizer_of(model)
    if tokens is not None:
        return Given(_token_list(tokens), tokenizer)
    if file is not None:
        text = _read(file)
    if text is None:
        return Given([], tokenizer)
    if tokenizer is None:
        raise InvalidRequestError("a text takes --model, whose tokenizer reads it; or give --tokens")
    return Given(tokenizer.encode(text, special=special, start=True).tolist(), tokenizer)


def text_of(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """Tokens for people: their text on one line where a tokenizer is there, else the first ids."""
    if tokenizer is None:
        return " ".join(map(str, tokens[:12])) + (" …" if len(tokens) > 12 else "")
    try:
        text = tokenizer.decode(tokens, special=True)
    except ValueError:  # of another tokenizer
        return text_of(tokens, None)
    return repr(text if len(text) <= 72 else text[:71] + "…")


def _token_list(path: Path) -> list[int]:
    try:
        return msgspec.json.decode(_read(path), type=list[int])
    except msgspec.DecodeError as error:
        raise InvalidTokensError(f"{path} is no JSON list of token ids: {error}") from error


def _read(path: Path) -> str:
    if str(path) == "-":
        return sys.stdin.read()
    return path.read_text(encoding="utf-8", errors="replace")
