"""Text to token ids and back, as the metadata of a GGUF defines it: byte-level BPE (`tokenizer.ggml.model` gpt2).

A byte-level vocabulary (Radford et al. 2019, GPT-2, section 2.2) writes each byte as one printable character. Text is
split by the regular expressions that `tokenizer.ggml.pre` names, and the pairs of each piece are merged by rank. The
ids are those of llama.cpp: no Unicode normalisation, so decoding gives the text back, except that bytes which the
vocabulary has no token for are dropped (SmolLM2 lacks six control characters and the bytes of unassigned planes).

Control tokens (`<|im_start|>`, end of text) are recognised in text only where the caller says so: what a user typed
must not be able to open a system turn.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping
from functools import cache, cached_property
from os import PathLike
from typing import Any, NamedTuple

import msgspec
import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Regex, models
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

from .gguf_metadata import read_metadata


class TokenizerError(ValueError):
    """A tokenizer that this module cannot build, or ids that are not of its vocabulary."""


class _Pre(NamedTuple):
    """How text is cut before merging: each expression cuts further what the ones before it left."""

    patterns: tuple[str, ...]
    whole_pieces_first: bool = False
    """A piece that is in the vocabulary is one token, whatever the merges say."""
    add_bos: bool = False
    """Where `tokenizer.ggml.add_bos_token` says nothing."""


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")

_PRE = {
    "gpt-2": _Pre((_GPT2,)),
    "smollm": _Pre((r"\p{N}", _GPT2)),
    "llama-bpe": _Pre((_LLAMA3,), whole_pieces_first=True, add_bos=True),
    "qwen2": _Pre((_QWEN2,)),
    "default": _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}
_SAME = {
    "gpt-2": ("phi-2", "mpt", "olmo", "jais", "exaone4", "trillion"),
    "smollm": ("starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "llama-bpe": ("llama3", "llama-v3", "falcon3", "falcon-h1", "lfm2"),
    "qwen2": ("deepseek-r1-qwen", "megrez", "stablelm2", "hunyuan"),
}
_PRE |= {other: _PRE[name] for name, others in _SAME.items() for other in others}

# Values of tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# Control tokens that end a turn, by their text: files name one end token, chat models stop at several.
_ENDS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|end|>", "</s>")


class Tokenizer:
    """The tokenizer that GGUF metadata describes (see `read_metadata`).

    Raises TokenizerError for another model than byte-level BPE, a `pre` type that is not known here, or a
    vocabulary that contradicts itself. Immutable; threads may share it.
    """

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        model = metadata.get("tokenizer.ggml.model")
        if model != "gpt2":
            raise TokenizerError(
                f"tokenizer.ggml.model is {model!r}; only byte-level BPE ('gpt2') can be read"
            )
        self.pre = str(metadata.get("tokenizer.ggml.pre", "default"))
        if self.pre not in _PRE:
            known = ", ".join(sorted(_PRE))
            raise TokenizerError(f"tokenizer.ggml.pre {self.pre!r} is not known here; known are {known}")
        self._pre = _PRE[self.pre]
        self._tokens = _required(metadata, "tokenizer.ggml.tokens")
        self._merges = _required(metadata, "tokenizer.ggml.merges")
        self._types: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(self._tokens))
        if len(self._types) != len(self._tokens):
            raise TokenizerError(f"{len(self._types)} token types for {len(self._tokens)} tokens")
        self._ids = {token: index for index, token in enumerate(self._tokens)}
        if len(self._ids) != len(self._tokens):
            twice = next(token for index, token in enumerate(self._tokens) if self._ids[token] != index)
            raise TokenizerError(f"token {twice!r} has two ids")

        self.bos_id = self._id(metadata, "bos")
        self.eos_id = self._id(metadata, "eos")
        self.add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", self._pre.add_bos))
        """Prompts of this model start with `bos_id`."""
        if self.add_bos and self.bos_id is None:
            raise TokenizerError(
                "tokenizer.ggml.add_bos_token is set, tokenizer.ggml.bos_token_id is missing"
            )
        by_text = {self._ids[text] for text in _ENDS if text in self._ids}
        by_text = {index for index in by_text if self._types[index] == _CONTROL}
        named = {self._id(metadata, name) for name in ("eos", "eot", "eom")}
        self.end_ids = frozenset(by_text | {index for index in named if index is not None})
        """Generation is over when one of these comes."""

        self._marks = _any_of(self._of_type(_USER_DEFINED))
        self._marks_and_controls = _any_of(self._of_type(_USER_DEFINED, _CONTROL, _UNKNOWN))
        self._bpe = self._build()

    @classmethod
    def from_gguf(cls, path: str | PathLike[str]) -> Tokenizer:
        """The tokenizer of the GGUF file at `path`. Raises TokenizerError, GgufError, OSError."""
        return cls(read_metadata(path))

    @property
    def vocab(self) -> int:
        return len(self._tokens)

    def encode(self, text: str, *, special: bool = False, start: bool = False) -> NDArray[np.int32]:
        """Token ids of `text`, [n] int32.

        special: the texts of control tokens stand for these tokens, as in a rendered chat template; else they are
        text like any other. start: `text` begins a prompt, so BOS comes first, if the model wants one and the
        text does not bring it. Raises UnicodeEncodeError for a lone surrogate.
        """
        text.encode("utf-8")  # the library below says "must be str" of a string with a lone surrogate
        ids: list[int] = []
        marks = self._marks_and_controls if special else self._marks
        for index, piece in enumerate(marks.split(text) if marks else [text]):
            if index % 2:  # re.split with one group: every second piece is a separator
                ids.append(self._ids[piece])
            elif piece:
                ids += self._bpe.encode(piece, add_special_tokens=False).ids
        if start and self.add_bos and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)  # type: ignore[arg-type]  # checked in __init__
        return np.array(ids, dtype=np.int32)

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. Control tokens give their text only if `special`.

        Raises TokenizerError for an id outside of the vocabulary.
        """
        return b"".join(self._bytes_of(int(index), special) for index in ids).decode(
            "utf-8", errors="replace"
        )

    def stream(self, *, special: bool = False) -> Stream:
        """Decodes token by token, for output that appears while it is generated."""
        return Stream(self, special)

    def digest(self) -> str:
        """SHA-256 (hex) over all that decides which ids a text gets: two tokenizers with one digest agree."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        bos = self.bos_id if self.add_bos else None
        parts = (self._tokens, self._merges, self._types, self._pre, bos)
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()

    def _id(self, metadata: Mapping[str, Any], name: str) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        index = metadata.get(key)
        if index is not None and not 0 <= index < len(self._tokens):
            raise TokenizerError(f"{key} is {index}, the vocabulary has {len(self._tokens)} tokens")
        return index

    def _of_type(self, *types: int) -> list[str]:
        return [
            token for token, kind in zip(self._tokens, self._types, strict=True) if kind in types and token
        ]

    def _build(self) -> tokenizers.Tokenizer:
        pairs: list[tuple[str, str]] = []
        for merge in self._merges:
            left, space, right = merge.partition(" ")
            if not space:
                raise TokenizerError(f"merge {merge!r} is no pair of tokens")
            pairs.append((left, right))
        try:
            model = models.BPE(self._ids, pairs, ignore_merges=self._pre.whole_pieces_first)
        except (
            Exception
        ) as error:  # the library raises plain Exception, here for a merge outside the vocabulary
            raise TokenizerError(f"the merges do not fit the vocabulary: {error}") from error
        bpe = tokenizers.Tokenizer(model)
        splits = [Split(Regex(pattern), "isolated") for pattern in self._pre.patterns]
        bpe.pre_tokenizer = Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
        return bpe

    def _bytes_of(self, index: int, special: bool) -> bytes:
        if not 0 <= index < len(self._tokens):
            raise TokenizerError(f"token {index} is outside of the vocabulary of {len(self._tokens)} tokens")
        kind = self._types[index]
        if kind in (_CONTROL, _UNKNOWN) and not special:
            return b""
        token = self._tokens[index]
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED):
            return token.encode()
        # Padding entries such as "[PAD 1]" hold characters that stand for no byte; they stand for themselves.
        bytes_by_character = _bytes_by_character()
        return b"".join(bytes_by_character.get(character) or character.encode() for character in token)


class Stream:
    """Text of a sequence of tokens as they come; a character whose bytes are not all there yet is held back."""

    def __init__(self, tokenizer: Tokenizer, special: bool) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, index: int) -> str:
        """What one more token adds to the text, possibly nothing. Raises TokenizerError as `decode` does."""
        return self._decoder.decode(self._tokenizer._bytes_of(int(index), self._special))

    def finish(self) -> str:
        """The rest: U+FFFD where a character was begun and not completed."""
        return self._decoder.decode(b"", final=True)


def _required(metadata: Mapping[str, Any], key: str) -> list[str]:
    values = metadata.get(key)
    if not values:
        raise TokenizerError(f"the metadata has no {key}")
    return list(values)


def _any_of(tokens: list[str]) -> re.Pattern[str] | None:
    """An expression whose one group matches the longest of `tokens`."""
    if not tokens:
        return None
    return re.compile("(" + "|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) + ")")


@cache
def _bytes_by_character() -> dict[str, bytes]:
    """Printable Latin-1 characters stand for their own byte, those from U+0100 on for the others in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(0x100)
    return {chr(byte if byte in printable else next(spare)): bytes([byte]) for byte in range(256)}
