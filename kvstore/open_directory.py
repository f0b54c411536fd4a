"""What all views of one open directory share: tiers, verdicts, the background thread and the threads that load."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from kvstore.index.embedder import Embedder

from .directory import DataDirectory
from .flash.ciphers import Ciphers
from .flash.cold_index import Row
from .flash.encryption import Key
from .flash.keys import Keys, source_of
from .flash.write_behind import WriteBehind
from .identity import Identity, IdentityError
from .prefetching import Prefetching
from .profile import Profile
from .put_later import LaterPuts
from .quality.reuse import Verdict
from .tiers.tiers import Tiers

_IO_THREADS = 2


class OpenDirectory:
    """`path` None keeps everything in memory. key: encrypts what lies on flash, see `keys`. walled: tenants share no
    memory, see `memory`.

    Raises as `store.open_store` does; the directory is as it was then.
    """

    def __init__(
        self, path: Path | None, profile: Profile, key: Keys | None = None, *, walled: bool = False
    ) -> None:
        self.ciphers = Ciphers(source_of(key))
        self.directory = None if path is None else DataDirectory(path, profile.block_tokens, self.ciphers)
        try:
            if self.directory is not None:
                note_tenants(self.ciphers, self.directory.identities())
            self.tiers = Tiers(profile, self.directory, walled=walled)
        except BaseException:
            if self.directory is not None:
                self.directory.close()
            raise
        self.verdicts = {} if self.directory is None else _verdicts(self.directory)
        self.worker = WriteBehind(self.tiers)
        self.pool = ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="kvstore-load")
        self.later = LaterPuts()
        self.prefetching = Prefetching(self.tiers)
        self.embedder: Embedder | None = None
        """What a daemon has for the identities of all clients."""

    def work_with(self, identity: Identity, given: Sequence[Key] | None = None) -> None:
        """Somebody opens an identity; what its tenant's keys open is held from then on. See `Ciphers.open`.

        Raises EncryptionError.
        """
        fresh = self.ciphers.open(identity.digest(), identity.tenant_salt, given)
        if fresh and self.directory is not None:
            self.unlock()

    def unlock(self, known: Mapping[bytes, Row] | None = None) -> None:
        """Hold what lies under keys that came since the directory was opened.

        known: what is known of records that no index names, by the keys of their blocks.
        """
        cold = self.tiers.cold
        found = [] if cold is None else cold.unlocked()
        if known:
            found = [
                (path, msgspec.structs.replace(row, hits=was.hits, last_use=was.last_use), cipher)
                for path, row, cipher in found
                for was in [known.get(row.key, row)]
            ]
        with self.tiers.lock:
            self.tiers.pins.unlock()
            if cold is None or not found:
                return
            space_of = self.tiers.namespace
            cold.unlock(each for each in found if each[1].key not in space_of(each[1].identity).by_key)
            self.tiers.load_rows(cold)

    def close(self) -> None:
        """Put and write what waits, seal the index, give the directory up. The first close counts."""
        self.later.close()
        with self.tiers.lock:
            if self.tiers.closed:
                return
            self.tiers.closed = True
        self.prefetching.close()
        for semantics in self.tiers.semantics():
            semantics.close()
        self.worker.close()
        self.pool.shutdown(wait=True)
        self.tiers.close()
        if self.directory is not None:
            self.directory.close()


def note_tenants(ciphers: Ciphers, identities: Mapping[bytes, bytes]) -> None:
    """Say to `ciphers` whose each identity is, by the digest and description of each. Raises EncryptionError."""
    for digest, description in identities.items():
        with contextlib.suppress(IdentityError):
            ciphers.note(digest, Identity.from_bytes(description).tenant_salt)


def _verdicts(directory: DataDirectory) -> dict[bytes, Verdict]:
    """Verdicts kept beside the identities; one that cannot be read counts as never measured."""
    found: dict[bytes, Verdict] = {}
    for digest, content in directory.verdicts().items():
        with contextlib.suppress(msgspec.DecodeError):
            found[digest] = msgspec.json.decode(content, type=Verdict)
    return found
