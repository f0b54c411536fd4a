"""The client's part in what blocks speak of: it reads tokens to the daemon, which has the embedder but no tokenizer.

A thread asks which texts are wanted, whoever put the blocks, and tells them, until there are none; again after each put
of this process and each hint. It polls for nothing else.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import DaemonError
from kvstore.semantics import TextOfTokens

from . import wire

_AT_ONCE = 32
_BUSY_SECONDS = 0.2  # until an embedder that has enough to do is asked again
_LONGEST = 1 << 14  # characters

Ask = Callable[[int], wire.Wanted]
Tell = Callable[[Sequence[tuple[bytes, str]]], None]
"""Both raise DaemonError."""

log = logging.getLogger(__name__)


class Texts:
    """Of one identity. Any thread may call."""

    def __init__(self, text_of_tokens: TextOfTokens, ask: Ask, tell: Tell) -> None:
        self._text_of_tokens = text_of_tokens
        self._ask = ask
        self._tell = tell
        self._news = threading.Event()
        self._closed = threading.Event()
        self._warned = set[str]()
        self._thread = threading.Thread(target=self._run, name="kvstore-texts", daemon=True)
        self._thread.start()
        self.wake()

    def wake(self) -> None:
        """There may be blocks whose text is wanted."""
        self._news.set()

    def read(self, tokens: NDArray[np.int32]) -> str:
        """The text of tokens int32 [n], as far as a message takes it; "" where it cannot be made."""
        try:
            return self._text_of_tokens(tokens)[:_LONGEST].encode("utf-8", "replace").decode()
        except Exception:
            self._warn("text not made", exc_info=True)
            return ""

    def close(self) -> None:
        self._closed.set()
        self._news.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._news.wait()
            self._news.clear()
            try:
                while not self._closed.is_set() and self._step():
                    pass
            except DaemonError as error:  # the next put or hint tries again
                log.info("no texts were told: %s", error)

    def _step(self) -> bool:
        """Whether there may be more to tell. Raises DaemonError."""
        wanted = self._ask(_AT_ONCE)
        if not wanted.embeds:
            self._warn("the daemon has no embedder, so texts find nothing; start it with --embedder")
        if wanted.blocks:
            self._tell([(key, self.read(np.frombuffer(raw, "<i4"))) for key, raw in wanted.blocks])
            return True
        return wanted.busy and not self._closed.wait(_BUSY_SECONDS)

    def _warn(self, what: str, *, exc_info: bool = False) -> None:
        log.log(logging.DEBUG if what in self._warned else logging.WARNING, what, exc_info=exc_info)
        self._warned.add(what)
