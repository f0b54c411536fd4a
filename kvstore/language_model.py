"""A GGUF model ready to answer: engine, tokenizer, chat template, and the identity of the KV it computes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvstore.index.embedder import Embedder, EmbedderUnavailable
from kvstore.index.sentence_embedder import SentenceEmbedder
from kvstore.index.token_embedder import TokenEmbedder
from kvstore.pipeline.chat import ChatTemplate
from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.tokenizer import Tokenizer

from . import models
from .session import identity_of

log = logging.getLogger(__name__)

LAYER_GROUPS = 4
"""So that six sevenths of a load from flash are hidden behind graph calls; more parts cost more than they hide."""


class LanguageModel:
    """Opens the GGUF at `path`; graphs and converted weights are kept in the user's cache directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokenizer = Tokenizer.from_gguf(path)
        self.chat = ChatTemplate.from_gguf(path)
        self.engine = StaticGraphEngine(path, groups=LAYER_GROUPS, cache=models.cache_directory() / "engine")
        self.identity = identity_of(self.engine, self.tokenizer.digest())
        self.stop = tuple(self.tokenizer.end_ids)

    def render(self, messages: Sequence[Mapping[str, str]]) -> NDArray[np.int32]:
        """Token ids of a conversation, ending where the assistant speaks."""
        return self.tokenizer.encode(self.chat.render(messages), special=True, start=True)

    def chat_prompt(self, system: str, question: str) -> NDArray[np.int32]:
        """Token ids of one question behind a system prompt."""
        return self.render([{"role": "system", "content": system}, {"role": "user", "content": question}])

    def embedder(self, sentence_model: Path | None = None) -> Embedder:
        """What says of texts what they speak of: `store.use_semantics(model.embedder(), model.tokenizer.decode)`.

        sentence_model: folder of a sentence-transformers model. It is loaded here, which takes seconds; so where
        start-up time counts, call this in another thread. Without one, or where it cannot run, which is logged,
        this model's own token embeddings serve, a fraction of a second away.
        """
        if sentence_model is not None:
            try:
                sentences = SentenceEmbedder(sentence_model)
                sentences.embed(["."])  # loads it
                return sentences
            except EmbedderUnavailable as error:
                log.warning("token embeddings serve instead: %s", error)
        return TokenEmbedder(self.engine.weights["embedding"], self.tokenizer.encode)
