"""What requests have in common: the tokens and the view that they name, and how they are answered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequestError
from kvstore.store import KVStore

from . import wire
from .connection import Connection

Later = Callable[[], msgspec.Struct]
"""Work for a thread, which makes the reply."""


class WithArenas(NamedTuple):
    """A reply that names `arenas` (numbers) which go with it, since the client was not given them before."""

    reply: msgspec.Struct
    arenas: Sequence[int]


class BeforeWork(NamedTuple):
    """A reply that is sent before the loop does `work`: the client need not wait for it, its next request does."""

    reply: msgspec.Struct
    work: Callable[[], object]


Answered = msgspec.Struct | WithArenas | BeforeWork | Later | Future[None] | None
"""A reply; or the work that makes one; or what it waits for, Done then; or None: it was sent already."""

Handler = Callable[[Connection, Any], Answered]
"""Called by the loop's thread; what it raises is the answer, too."""

log = logging.getLogger(__name__)


def view_of(client: Connection, number: int) -> KVStore:
    """The store of an identity that the client opened. Raises InvalidRequestError."""
    view = client.views.get(number)
    if view is None:
        raise InvalidRequestError(f"no identity was opened as view {number} of this connection")
    return view.store


def tokens_of(raw: bytes) -> NDArray[np.int32]:
    """Raises InvalidRequestError."""
    if len(raw) % 4:
        raise InvalidRequestError(f"{len(raw)} bytes are no int32 token ids")
    return np.frombuffer(raw, "<i4")


def answer(request: wire.Request, content: Any) -> wire.Answer:
    return wire.Answer(request.id, msgspec.msgpack.encode(content))


def failed(request: Any, error: BaseException) -> wire.Failed:
    """What the client is told; what is not the client's fault goes to the log besides."""
    for kind in type(error).__mro__:
        if kind.__module__ == "kvstore.errors":
            return wire.Failed(request.id, kind.__name__, str(error))
    for known in (AssertionError, TimeoutError, OSError):
        if isinstance(error, known):
            return wire.Failed(request.id, known.__name__, str(error))
    log.error("request %s failed", type(request).__name__, exc_info=error)
    return wire.Failed(request.id, "internal", f"{type(error).__name__}: {error}")
