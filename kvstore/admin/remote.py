"""The verbs of a daemon's `Administration`, called from another process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvstore.daemon import wire
from kvstore.daemon.client import Channel
from kvstore.watch.snapshot import Snapshot

from .administration import VERBS, returns

if TYPE_CHECKING:
    from .administration import Administration


class RemoteAdministration:
    """Over a connection of its own. Raises DaemonError where no daemon listens on `socket`; verbs raise what theirs do.

    A verb may take as long as it takes: `verify` reads all that is held.
    """

    def __init__(self, socket: Path) -> None:
        self._channel = Channel(socket, "kvstore command")

    def __getattr__(self, verb: str) -> Any:
        if verb not in VERBS:
            raise AttributeError(verb)

        def call(*given: Any, **named: Any) -> Any:
            arguments = dict(zip(_first_arguments(verb), given, strict=False)) | named
            packed = msgspec.msgpack.encode(arguments)
            answer = self._channel.call(
                lambda number: wire.Admin(number, verb, packed), wire.Answer, timeout=None
            )
            return msgspec.msgpack.decode(answer.body, type=returns(verb))

        return call

    def close(self) -> None:
        self._channel.close()


class RemoteSnapshots:
    """What happens just now in the daemon that listens on `socket`, each time it is called; see `snapshot`."""

    def __init__(self, socket: Path) -> None:
        self._channel = Channel(socket, "kvstore top")

    def __call__(self) -> Snapshot:
        answer = self._channel.call(wire.GetSnapshot, wire.Answer)
        return msgspec.msgpack.decode(answer.body, type=Snapshot)

    def close(self) -> None:
        self._channel.close()


def connected(socket: Path) -> Administration:
    """The same, with its verbs known to type checkers."""
    return RemoteAdministration(socket)  # type: ignore[return-value]


def _first_arguments(verb: str) -> tuple[str, ...]:
    """Names of arguments that verbs take without a name."""
    return {
        "show": ("block",),
        "explain": ("tokens",),
        "pin": ("tokens",),
        "unpin": ("tokens",),
        "warm": ("tokens",),
        "export": ("path",),
        "import_": ("path",),
    }.get(verb, ())
