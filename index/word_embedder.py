"""Embedder over nothing but words: no model, no vocabulary, no file, only numpy.

For who has texts alone, as a daemon has of engines that it knows nothing of. A word becomes a few signed places of the
vector, by its hash (Weinberger et al., "Feature Hashing for Large Scale Multitask Learning", 2009); a text, the
weighted sum of its words. So it finds texts that share words, in whatever order, and none that say the same in others.

- Long words say more: what is common in a language is short (Zipf's law of abbreviation).
- A word that occurs n times counts 1 + ln n times, else markup drowns what a screen says.
- The beginning of a longer word counts as a word, so that its inflections are alike.
- Characters of scripts that put no spaces between words count as words, and so do pairs of them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

_RULE = "hashed words 1"  # changes with anything here that changes vectors
_PLACES = 8  # of a word
_STEM = 5  # letters that make a longer word and its like alike
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]+|[^\W_{_UNSPACED}]+")


class WordEmbedder:
    """Immutable; any thread may call."""

    name = "words"
    dimension = 768
    digest = xxhash.xxh3_128(f"{_RULE} {dimension}".encode()).hexdigest()

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Normalised vectors [n, dimension]; zeros for a text without words."""
        vectors = np.zeros((len(texts), self.dimension), np.float32)
        for vector, text in zip(vectors, texts, strict=True):
            counts = Counter(_features(text.lower()))
            for (feature, weight), count in counts.items():
                for place, sign in _places(feature, self.dimension):
                    vector[place] += sign * weight * (1 + math.log(count))
            vector /= np.linalg.norm(vector) or 1
        return vectors


def _places(feature: str, dimension: int) -> Iterator[tuple[int, int]]:
    """(place, sign) of a word. Nothing is remembered: how long that takes would tell what was embedded before."""
    word = feature.encode()
    for seed in range(_PLACES):
        digest = xxhash.xxh3_64_intdigest(word, seed)
        yield digest // 2 % dimension, 1 if digest % 2 else -1


def _features(text: str) -> Iterator[tuple[str, float]]:
    """Words and what else counts as such, each with its weight."""
    for word in _WORD.findall(text):
        if "\u3040" <= word[0] <= "\u9fff":
            yield from ((character, 1.0) for character in word)
            yield from ((word[at : at + 2], 2.0) for at in range(len(word) - 1))
            continue
        yield word, math.log(1 + len(word)) ** 2
        if len(word) >= _STEM:
            yield word[:_STEM] + "…", math.log(1 + _STEM) ** 2
