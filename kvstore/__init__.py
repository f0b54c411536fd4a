"""Hierarchical KV-cache store for LLM inference on NPU devices.

`kvstore.open` gives a store of one identity, see `kvstore.store`, and `kvstore.connect` one in a daemon. Names load on
first use, so that `import kvstore` costs next to nothing.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

# In a checkout the subsystems lie beside this folder, installed they lie inside it; find them either way.
if not (Path(__file__).parent / "index").is_dir():
    __path__.append(str(Path(__file__).parent.parent))

if TYPE_CHECKING:
    from .api import Store as Store
    from .daemon.remote_store import RemoteStore as RemoteStore
    from .daemon.remote_store import connect as connect
    from .errors import KVStoreError as KVStoreError
    from .flash.encryption import Key as Key
    from .flash.keys import KeyFile as KeyFile
    from .flash.keys import Keyring as Keyring
    from .identity import Adapter as Adapter
    from .identity import Identity as Identity
    from .layout import Layout as Layout
    from .lease import Lease as Lease
    from .match import Match as Match
    from .opening import open_any as open
    from .pipeline.rope import Rope as Rope
    from .profile import Profile as Profile
    from .store import KVStore as KVStore

_HOMES = {
    "Adapter": "identity",
    "connect": "daemon.remote_store",
    "Identity": "identity",
    "Key": "flash.encryption",
    "KeyFile": "flash.keys",
    "Keyring": "flash.keys",
    "KVStore": "store",
    "KVStoreError": "errors",
    "Layout": "layout",
    "Lease": "lease",
    "Match": "match",
    "Profile": "profile",
    "RemoteStore": "daemon.remote_store",
    "Rope": "pipeline.rope",
    "Store": "api",
}

__all__ = [*_HOMES, "open"]


def __getattr__(name: str) -> Any:
    if name == "open":
        return import_module(".opening", __name__).open_any
    if name in _HOMES:
        return getattr(import_module(f".{_HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
