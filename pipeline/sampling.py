"""From logits to the next token: the most likely one, or a draw from the likely ones."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray


class Sampler:
    """Chooses tokens. With temperature 0 (the default) always the most likely, of equals the lowest id.

    Else a draw from the softmax of logits / temperature over what three filters leave, applied in this order to the
    untempered distribution, as in llama.cpp: the `top_k` most likely (0: all); of these the fewest whose share is at
    least `top_p` (nucleus sampling, Holtzman et al. 2019, arXiv 1904.09751, section 3.1); of these the ones at least
    `min_p` as likely as the most likely (Nguyen et al. 2024, arXiv 2407.01082).

    One seed gives one sequence of draws; None takes a seed from the system. Not to be shared between threads.
    Raises ValueError for a parameter outside of its range.
    """

    def __init__(
        self,
        temperature: float = 0.0,
        *,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int | None = None,
    ) -> None:
        if not (math.isfinite(temperature) and temperature >= 0):
            raise ValueError(f"temperature {temperature} must be 0 (greedy) or a positive number")
        if top_k < 0:
            raise ValueError(f"top_k {top_k} must be 0 (all tokens) or positive")
        if not 0 < top_p <= 1:
            raise ValueError(f"top_p {top_p} must be above 0 and at most 1 (all tokens)")
        if not 0 <= min_p <= 1:
            raise ValueError(f"min_p {min_p} must be between 0 (all tokens) and 1")
        self._temperature = temperature
        self._top_k = top_k
        self._top_p = top_p
        self._min_p = min_p
        self._random = np.random.default_rng(seed)

    def __call__(self, logits: NDArray[np.floating]) -> int:
        """The next token for `logits`, [vocab] of any float type; -inf excludes a token.

        Raises ValueError if the highest is not finite or any is NaN: then the model's output is broken.
        """
        best = int(logits.argmax())  # the first NaN, if there is one
        if not math.isfinite(logits[best]):
            raise ValueError(f"logit {logits[best]} at token {best}: the model's output is broken")
        if self._temperature == 0:
            return best
        tokens = self._candidates(logits, best)
        heights = logits[tokens].astype(np.float64) - float(logits[best])
        shares = np.cumsum(np.exp(heights / self._temperature))
        drawn = np.searchsorted(shares, self._random.random() * shares[-1], side="right")
        return int(tokens[min(int(drawn), len(tokens) - 1)])  # random() * x can round up to x

    def _candidates(self, logits: NDArray[np.floating], best: int) -> NDArray[np.int64]:
        """Ids of the tokens that the filters leave. Of equally likely ones at an edge the lower ids stay."""
        tokens = np.arange(len(logits))
        if 0 < self._top_k < len(logits):
            edge = np.partition(logits, -self._top_k)[-self._top_k]
            tokens = _likeliest_first(logits, np.flatnonzero(logits >= edge))[: self._top_k]
        shares = np.exp(logits[tokens].astype(np.float64) - float(logits[best]))
        if self._top_p < 1:
            # What is rarer than this adds up to less than 1 - top_p, so none of it is needed. Sorting the rest
            # instead of everything is what makes this fit into a decode step.
            rare = (1 - self._top_p) * shares.sum() / len(tokens)
            enough = self._top_p * shares.sum()
            tokens = _likeliest_first(logits, tokens[shares >= rare])
            shares = np.exp(logits[tokens].astype(np.float64) - float(logits[best]))
            count = int(np.searchsorted(np.cumsum(shares), enough)) + 1
            tokens, shares = tokens[:count], shares[:count]
        return np.compress(shares >= self._min_p, tokens)  # the share of the most likely is 1


def _likeliest_first(logits: NDArray[np.floating], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.take(tokens, np.argsort(-logits[tokens], kind="stable"))
