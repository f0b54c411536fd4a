"""A GGUF model ready to answer: engine, tokenizer, chat template, and the identity of the KV it computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline.chat import ChatTemplate
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.tokenizer import Tokenizer

from . import models
from .session import identity_of


class LanguageModel:
    """Opens the GGUF at `path`; graphs and converted weights are kept in the user's cache directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokenizer = Tokenizer.from_gguf(path)
        self.chat = ChatTemplate.from_gguf(path)
        self.engine = StaticGraphEngine(path, cache=models.cache_directory() / "engine")
        self.identity = identity_of(self.engine, self.tokenizer.digest())
        self.stop = tuple(self.tokenizer.end_ids)

    def render(self, messages: Sequence[Mapping[str, str]]) -> NDArray[np.int32]:
        """Token ids of a conversation, ending where the assistant speaks."""
        return self.tokenizer.encode(self.chat.render(messages), special=True, start=True)

    def chat_prompt(self, system: str, question: str) -> NDArray[np.int32]:
        """Token ids of one question behind a system prompt."""
        return self.render([{"role": "system", "content": system}, {"role": "user", "content": question}])
