"""Where keys come from: the caller, a file, or the keyring of the operating system. Each tenant has a key of its own.

A tenant is whoever has a salt (see `identity`), and has one key, or two from the beginning of a rotation to its end:
what is there is read under either, what is new is written under the last. To erase a tenant for good is to erase its
keys here; no other tenant notices.

A file has a line a tenant: a digest of its salt, or - for KV without one, and its keys in hex. The keyring has an entry
a tenant. Both make a key when a tenant comes that has none. One file, or one name in the keyring, is for one data
directory: a rotation drops the old keys once nothing in its directory needs them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from ..errors import EncryptionError
from .encryption import KEY_BYTES, Key
from .flash_file import sync_folder

_KEY = f"[0-9a-f]{{{2 * KEY_BYTES}}}"
_LINE = re.compile(f"(-|[0-9a-f]{{2,64}})((?: {_KEY}){{1,2}})")


class KeySource(Protocol):
    """`tenant`: the salt of an identity, b"" for none. Each method raises EncryptionError."""

    def keys(self, tenant: bytes) -> tuple[Key, ...]:
        """A tenant's keys, the one to write under last; none where it has none."""

    def keep(self, tenant: bytes, keys: tuple[Key, ...]) -> None:
        """These are a tenant's keys from now on, after any stop, too. All others that it had are erased."""

    def make(self, tenant: bytes) -> Key:
        """The first key of a tenant; what another process made for it meanwhile, if so."""


Keys = Key | bytes | Sequence[Key | bytes] | KeySource
"""What `kvstore.open` takes: a source, or the caller's key; two while he rotates, the new one last."""


def source_of(keys: Keys | None) -> KeySource | None:
    """Raises EncryptionError."""
    if isinstance(keys, Key | bytes | bytearray | Sequence):
        return GivenKeys(given(keys))
    return keys


def given(keys: Key | bytes | Sequence[Key | bytes]) -> tuple[Key, ...]:
    """The caller's keys. Raises EncryptionError."""
    several: Sequence[Key | bytes] = [keys] if isinstance(keys, Key | bytes | bytearray) else keys
    if not 1 <= len(several) <= 2:
        raise EncryptionError(
            f"one key is needed, or while it changes the old and the new one, not {len(several)}"
        )
    return tuple(each if isinstance(each, Key) else Key(bytes(each)) for each in several)


def secrets_of(source: KeySource, tenant: bytes) -> list[bytes]:
    """A tenant's keys as they are sent to a daemon; one is made where there is none. Raises EncryptionError."""
    return [key.secret for key in source.keys(tenant) or (source.make(tenant),)]


class GivenKeys:
    """What the caller gave, for each tenant that he has no other key for. It is kept in this object alone."""

    def __init__(self, keys: tuple[Key, ...]) -> None:
        self._keys = keys
        self._changed: dict[bytes, tuple[Key, ...]] = {}

    def keys(self, tenant: bytes) -> tuple[Key, ...]:
        return self._changed.get(tenant, self._keys)

    def keep(self, tenant: bytes, keys: tuple[Key, ...]) -> None:
        had = self.keys(tenant)
        if any(key not in had for key in keys):
            raise EncryptionError("the key is the caller's: to change it, give the old and the new one")
        self._changed[tenant] = keys

    def make(self, tenant: bytes) -> Key:
        raise EncryptionError(
            f"the key of tenant {_named(tenant)[:16]} was dropped; open the store with a new one"
        )


class KeyFile:
    """Keys in a file of mode 0600, which `create` makes. Processes may share it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().resolve()

    def create(self) -> None:
        """Make the file. Raises EncryptionError, also when it exists."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            sync_folder(self.path.parent)
        except FileExistsError:
            raise EncryptionError(
                f"{self.path} exists; keys are never overwritten, give another path"
            ) from None
        except OSError as error:
            raise EncryptionError(f"{self.path} cannot be made: {error}") from error

    def keys(self, tenant: bytes) -> tuple[Key, ...]:
        return self.read().get(_named(tenant), ())

    def keep(self, tenant: bytes, keys: tuple[Key, ...]) -> None:
        with self._alone():
            self._write({**self.read(), _named(tenant): keys})

    def make(self, tenant: bytes) -> Key:
        with self._alone():
            held = self.read()
            if not (keys := held.get(_named(tenant), ())):
                keys = (Key.generate(),)
                self._write({**held, _named(tenant): keys})
            return keys[-1]

    def read(self) -> dict[str, tuple[Key, ...]]:
        """All keys by the name of their tenant."""
        try:
            lines = self._content().decode("ascii").splitlines()
        except FileNotFoundError:
            raise EncryptionError(f"{self.path} does not exist; `kvstore key new` makes it") from None
        except (OSError, UnicodeDecodeError) as error:
            raise EncryptionError(f"{self.path} cannot be read: {error}") from error
        found: dict[str, tuple[Key, ...]] = {}
        for number, line in enumerate(lines, start=1):
            match = _LINE.fullmatch(line)
            if match is None or match[1] in found:
                raise EncryptionError(f"{self.path} is damaged in line {number}; restore it from its backup")
            found[match[1]] = tuple(Key(bytes.fromhex(key)) for key in match[2].split())
        return found

    def _content(self) -> bytes:
        """Raises EncryptionError, OSError."""
        while True:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_mode & 0o077:
                    raise EncryptionError(f"others may read {self.path}: chmod 600 it, and rotate its keys")
                content = file.read()
            if self.path.stat().st_ino == status.st_ino:  # else it was replaced, and overwritten meanwhile
                return content

    def _write(self, held: dict[str, tuple[Key, ...]]) -> None:
        """Whole or not at all; what was there before is overwritten afterwards."""
        lines = [
            f"{name} {' '.join(key.secret.hex() for key in keys)}\n" for name, keys in held.items() if keys
        ]
        scratch = self.path.with_name(self.path.name + ".new")
        try:
            with self.path.open("r+b") as old:
                scratch.unlink(missing_ok=True)  # of a stop, or made by others who could read it then
                fd = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                with open(fd, "wb") as file:
                    file.write("".join(lines).encode())
                    file.flush()
                    os.fsync(fd)
                scratch.rename(self.path)
                sync_folder(self.path.parent)
                _overwrite(old)
        except OSError as error:
            raise EncryptionError(f"{self.path} cannot be written: {error}") from error

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Between processes that change the file: else one would lose the other's keys."""
        try:
            lock = os.open(
                self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
            )
        except OSError as error:
            raise EncryptionError(f"{self.path} cannot be written: {error}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


class Keyring:
    """Keys in the keyring of the operating system, under `name`. Needs the package `keyring`."""

    def __init__(self, name: str = "npu-kvstore") -> None:
        self.name = name

    def keys(self, tenant: bytes) -> tuple[Key, ...]:
        text = self._ask("get_password", _named(tenant)) or ""
        if text and not re.fullmatch(f"{_KEY}(?: {_KEY})?", text):
            raise EncryptionError(f"{self.name}, {_named(tenant)} in the keyring is no key; delete it there")
        return tuple(Key(bytes.fromhex(each)) for each in text.split())

    def keep(self, tenant: bytes, keys: tuple[Key, ...]) -> None:
        if keys:
            self._ask("set_password", _named(tenant), " ".join(key.secret.hex() for key in keys))
        elif self.keys(tenant):
            self._ask("delete_password", _named(tenant))
        if self.keys(tenant) != keys:
            raise EncryptionError(
                f"the keyring did not keep {self.name}, {_named(tenant)}; choose another backend"
            )

    def make(self, tenant: bytes) -> Key:
        if not (keys := self.keys(tenant)):
            keys = (Key.generate(),)
            self.keep(tenant, keys)
        return keys[-1]

    def _ask(self, verb: str, *arguments: str) -> Any:
        try:
            import keyring
            from keyring.errors import KeyringError
        except ImportError as error:
            raise EncryptionError(
                "the keyring needs the package keyring: pip install 'npu-kvstore[keyring]', or use a key file"
            ) from error
        try:
            return getattr(keyring, verb)(self.name, *arguments)
        except (KeyringError, RuntimeError) as error:  # NoKeyringError is one of both
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise EncryptionError(
                f"the keyring does not serve: {why}; unlock it, choose a backend, or use a key file"
            ) from error


def _named(tenant: bytes) -> str:
    """A tenant by the digest of its salt, which identities keep."""
    return tenant[-32:].hex() or "-"


def _overwrite(file: BinaryIO) -> None:
    file.write(bytes(os.fstat(file.fileno()).st_size))
    file.flush()
    os.fsync(file.fileno())
