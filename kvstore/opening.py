"""`kvstore.open`: a store of this process, or the one in a daemon, by one argument or a variable of the environment."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Literal, overload

from .api import Store
from .errors import DaemonLostError
from .flash.keys import Keys
from .identity import Identity
from .profile import CPU, Profile
from .store import KVStore, open_store

_VARIABLE = "KVSTORE_DAEMON"

log = logging.getLogger(__name__)


@overload
def open_any(
    path: str | os.PathLike[str] | None,
    *,
    identity: Identity,
    profile: Profile = CPU,
    key: Keys | None = None,
    daemon: Literal[False],
) -> KVStore: ...


@overload
def open_any(
    path: str | os.PathLike[str] | None,
    *,
    identity: Identity,
    profile: Profile = CPU,
    key: Keys | None = None,
    daemon: str | os.PathLike[str] | bool | None = None,
) -> Store: ...


def open_any(
    path: str | os.PathLike[str] | None,
    *,
    identity: Identity,
    profile: Profile = CPU,
    key: Keys | None = None,
    daemon: str | os.PathLike[str] | bool | None = None,
) -> Store:
    """Open a store for one identity; `kvstore.open`.

    daemon: the socket of the daemon that is to hold it, True for the user's own; False for none, which is what None
    means unless KVSTORE_DAEMON names a socket, or is "auto". With a daemon, `path` and `profile` are those of the store
    that serves when none is there at the start, as without one; for what serves when it goes later, and for what
    the daemon does with `key`, see `connect`.

    Raises what `store.open_store` does.
    """
    if daemon is None and (named := os.environ.get(_VARIABLE)):
        daemon = True if named == "auto" else named
    if daemon is None or daemon is False:
        return open_store(path, identity=identity, profile=profile, key=key)
    from .daemon.remote_store import connect

    socket = None if daemon is True else Path(daemon)
    try:
        return connect(socket, identity=identity, profile=profile, key=key, required=True)
    except DaemonLostError as error:
        log.warning("%s; a store of this process serves", error)
        return open_store(path, identity=identity, profile=profile, key=key)
