"""What all views of one open directory share: tiers, verdicts, the background thread and the threads that load."""

from __future__ import annotations

import contextlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from .directory import DataDirectory
from .encryption import Cipher, Key
from .prefetching import Prefetching
from .profile import Profile
from .put_later import LaterPuts
from .reuse import Verdict
from .tiers import Tiers
from .write_behind import WriteBehind

_IO_THREADS = 2


class OpenDirectory:
    """`path` None keeps everything in memory. key: encrypts what lies on flash, see `encryption`. walled: tenants
    share no memory, see `memory`.

    Raises as `store.open_store` does; the directory is as it was then.
    """

    def __init__(
        self, path: Path | None, profile: Profile, key: Key | None = None, *, walled: bool = False
    ) -> None:
        cipher = None if key is None else Cipher(key)
        self.directory = None if path is None else DataDirectory(path, profile.block_tokens, cipher)
        try:
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


def _verdicts(directory: DataDirectory) -> dict[bytes, Verdict]:
    """Verdicts kept beside the identities; one that cannot be read counts as never measured."""
    found: dict[bytes, Verdict] = {}
    for digest, content in directory.verdicts().items():
        with contextlib.suppress(msgspec.DecodeError):
            found[digest] = msgspec.json.decode(content, type=Verdict)
    return found
