"""What an administrator asks of a daemon: verbs of `kvstore.admin`, and the picture of what happens just now."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import msgspec

from kvstore.errors import InvalidRequestError
from kvstore.open_directory import OpenDirectory


class Administered:
    """The verbs are `admin.administration.VERBS`. Called by threads of the daemon."""

    def __init__(self, shared: OpenDirectory) -> None:
        self._shared = shared
        self._administration: Any = None

    def call(self, verb: str, arguments: bytes) -> bytes:
        """What a verb returns, in msgpack. Raises InvalidRequestError, and what the verb raises."""
        module = import_module("kvstore.admin.administration")
        if self._administration is None:
            self._administration = module.Administration(self._shared)
        if verb not in module.VERBS:
            raise InvalidRequestError(f"{verb!r} is none of {', '.join(module.VERBS)}")
        method = getattr(self._administration, verb)
        try:
            given = msgspec.msgpack.decode(arguments, type=dict[str, Any])
            inspect.signature(method).bind(**given)
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
            raise InvalidRequestError(f"{verb}: {error}") from error
        return msgspec.msgpack.encode(method(**given))

    def snapshot(self) -> bytes:
        """What happens just now, in msgpack."""
        found = import_module("kvstore.watch.snapshot").snapshot(self._shared)
        return msgspec.msgpack.encode(found)
