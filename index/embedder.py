"""What turns texts into vectors, so that texts of like content lie near one another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class EmbedderUnavailable(RuntimeError):
    """This embedder cannot run here; the message says what is missing and what to do."""


class Embedder(Protocol):
    """A fixed function from texts to vectors, safe to call from several threads.

    Vectors of two embedders are comparable if and only if both have one `digest`. `name` is for people.
    """

    @property
    def name(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def dimension(self) -> int: ...

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Vectors [n, dimension] of n texts. Of any length; a text without content may give zeros."""
        ...
