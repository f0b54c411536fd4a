"""What a verb acts on: a running daemon, or a data directory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from kvstore.errors import DaemonError, DirectoryUnusableError, InvalidRequestError

if TYPE_CHECKING:
    from kvstore.admin.administration import Administration
    from kvstore.admin.fault import Verified
    from kvstore.admin.held import Held
    from kvstore.config import Config
    from kvstore.flash.keys import KeySource
    from kvstore.profile import Profile

_SPARE = 1 << 30  # bytes


class Target:
    """`directory`, `socket` and `key_file` as flags gave them, None where they did not.

    At most one of directory and socket; a daemon has its own key file.
    """

    def __init__(
        self,
        directory: Path | None,
        socket: Path | None,
        config: Path | None = None,
        key_file: Path | None = None,
    ) -> None:
        if directory is not None and socket is not None:
            raise InvalidRequestError("give --dir or --socket, not both")
        if key_file is not None and socket is not None:
            raise InvalidRequestError("a daemon has its own keys: give --key-file or --socket, not both")
        flags = {
            "directory": None if directory is None else str(directory),
            "socket": None if socket is None else str(socket),
            "key_file": None if key_file is None else str(key_file),
        }
        from kvstore.config import load

        self.config: Config = load(config, flags)
        self._daemon_only = socket is not None
        self._directory_only = directory is not None or key_file is not None

    @contextlib.contextmanager
    def reading(self) -> Iterator[Held]:
        """For verbs that change nothing."""
        found: Held | None = self._daemon()
        if found is None:
            from kvstore.admin.bare_directory import BareDirectory

            found = BareDirectory(self.config.directory, self.config.key())
        try:
            yield found
        finally:
            found.close()

    @contextlib.contextmanager
    def looking_at_damage(self) -> Iterator[_Verifiable]:
        """The same, for a directory of which nothing may be taken for granted."""
        found = self._daemon()
        try:
            config = self.config
            yield found or _Damaged(config.directory, config.device().block_tokens, config.key())
        finally:
            if found is not None:
                found.close()

    @contextlib.contextmanager
    def changing(self, *, daemon: str | None = None, new: bool = False) -> Iterator[Administration]:
        """For verbs that change something: in the daemon, or in the directory, opened for the while.

        daemon: why it takes a daemon, where it does. new: the directory may be made. Raises InvalidRequestError,
        DirectoryInUseError.
        """
        found = self._daemon()
        if found is not None:
            try:
                yield found
            finally:
                found.close()
            return
        if daemon is not None:
            raise InvalidRequestError(f"{daemon}; give --socket, or start one with `kvstore serve`")
        from kvstore.admin.administration import Administration
        from kvstore.open_directory import OpenDirectory

        if not (new or self.config.directory.exists()):
            raise DirectoryUnusableError(f"{self.config.directory} does not exist; give the store's --dir")
        opened = OpenDirectory(self.config.directory, self.profile_for_directory(), self.config.key())
        try:
            yield Administration(opened)
        finally:
            opened.close()

    def _daemon(self) -> Administration | None:
        """A connection; None where a directory is meant, or no daemon runs that nobody asked for by name."""
        if self._directory_only or not (self._daemon_only or self.config.socket.exists()):
            return None
        from kvstore.admin.remote import connected

        try:
            return connected(self.config.socket)
        except DaemonError:
            if self._daemon_only:
                raise
            return None

    def profile_for_directory(self) -> Profile:
        """As configured, but for the block size, which is the directory's, and room for all that is there."""
        device = self.config.device()
        if not (self.config.directory / "FORMAT").exists():
            return device
        from kvstore.admin.bare_directory import BareDirectory

        bare = BareDirectory(self.config.directory, self.config.key())
        used = bare.status().tiers["cold"].used
        return msgspec.structs.replace(
            device, block_tokens=bare.block_tokens, cold_bytes=max(device.cold_bytes, 2 * used + _SPARE)
        )


class _Verifiable(Protocol):
    def verify(self, *, repair: bool) -> Verified: ...


class _Damaged:
    """Verify for a directory that may not even say its block size."""

    def __init__(self, path: Path, block_tokens: int, key: KeySource | None) -> None:
        self._key = key
        self._path = path
        self._block_tokens = block_tokens

    def verify(self, *, repair: bool) -> Verified:
        from kvstore.admin.verify import verify_directory

        return verify_directory(self._path, repair=repair, block_tokens=self._block_tokens, key=self._key)
