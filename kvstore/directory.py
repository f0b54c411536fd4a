"""The data directory: who owns it, what format it has, where its parts lie.

FORMAT        format version and block size, written once
LOCK          flock of the owning process, its pid inside
index/        LMDB index, named after the digest of its content
blocks/       one record a block, named after its key, or by a keyed hash of it; *.tmp goes on opening
quarantine/   records that failed a check, kept for inspection within the budget
writes        how much was written today, with its checksum; only under a write budget
pins          prefixes that are not to be evicted, with a checksum; only where there are any; under a key: pins.<its id>
identities/   what each identity digest stands for, what was measured of moved reuse for it, and what its blocks
              speak of, as vectors
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from pathlib import Path

import msgspec
import xxhash

from .errors import DirectoryInUseError, DirectoryUnusableError, FormatMismatchError
from .flash.ciphers import Ciphers
from .flash.encryption import Cipher

FORMAT = 1

SCRATCH = ".tmp"
"""Ending of files that no stop survives: half-written ones, and records kept only for a lease."""

_FIRST = ("LOCK", f"FORMAT{SCRATCH}")  # what a stop in the middle of the very first opening leaves


PARTS = ("FORMAT", "LOCK", "index", "blocks", "quarantine", "identities", "writes", "pins")
"""All that may lie in a data directory, besides what ends in SCRATCH."""

_VERDICT = ".verdict"


class _Format(msgspec.Struct):
    format: int
    block_tokens: int


class DataDirectory:
    """Opens and owns a data directory.

    Raises DirectoryInUseError, DirectoryUnusableError or FormatMismatchError; nothing is changed then.
    """

    def __init__(self, path: Path, block_tokens: int, ciphers: Ciphers | None = None) -> None:
        self.path = path
        self.ciphers = Ciphers() if ciphers is None else ciphers
        """Encrypt what tells of tokens or KV; without, all is in clear."""
        self._lock = -1
        try:
            fresh = self._check_format(block_tokens)
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = take_lock(path)
            try:
                if fresh:
                    write_format(path, block_tokens)
                for name in ("blocks", "quarantine", "identities"):
                    (path / name).mkdir(exist_ok=True, mode=0o700)
            except BaseException:
                self.close()
                raise
        except (DirectoryInUseError, DirectoryUnusableError, FormatMismatchError):
            raise
        except OSError as error:
            raise DirectoryUnusableError(
                f"{path} cannot be used as data directory: {error}; give a directory that this user can write"
            ) from error

    @property
    def blocks(self) -> Path:
        return self.path / "blocks"

    @property
    def quarantine(self) -> Path:
        return self.path / "quarantine"

    @property
    def index(self) -> Path:
        return self.path / "index"

    @property
    def writes(self) -> Path:
        return self.path / "writes"

    @property
    def pins(self) -> Path:
        """Of those that are in clear; the names of others begin with its."""
        return self.path / "pins"

    def block_file(self, key: bytes, cipher: Cipher | None = None) -> Path:
        """Of a record under `cipher`."""
        return self.path / "blocks" / record_name(key, cipher)

    def aside_file(self, number: int) -> Path:
        """Where the record of a dropped block waits for the end of its last lease."""
        return self.path / "blocks" / f"dropped-{number}{SCRATCH}"

    @property
    def folders(self) -> tuple[Path, ...]:
        return self.blocks, self.quarantine, self.index, self.path / "identities"

    def identity_notes(self) -> list[Path]:
        return list((self.path / "identities").iterdir())

    def keep_identity(self, digest: bytes, description: bytes) -> None:
        """Note what `digest` stands for, so that tools can say it. Losing the note loses no KV."""
        target = self.path / "identities" / digest.hex()
        if target.exists() and target.read_bytes() == description:
            return
        scratch = target.with_suffix(SCRATCH)
        scratch.write_bytes(description)
        scratch.rename(target)

    def vectors_file(self, digest: bytes) -> Path:
        """Where the vectors of an identity's blocks are kept. Losing them loses no KV."""
        return (self.path / "identities" / digest.hex()).with_suffix(".vectors")

    def keep_verdict(self, digest: bytes, content: bytes) -> None:
        """Keep what was measured of an identity."""
        target = (self.path / "identities" / digest.hex()).with_suffix(_VERDICT)
        scratch = target.with_suffix(SCRATCH)
        scratch.write_bytes(xxhash.xxh3_64_digest(content) + content)
        scratch.rename(target)

    def verdicts(self) -> dict[bytes, bytes]:
        """Digest -> what was kept; damaged ones are left out."""
        found: dict[bytes, bytes] = {}
        for path in self.identity_notes():
            if path.suffix == _VERDICT:
                with contextlib.suppress(OSError, ValueError):
                    content = path.read_bytes()
                    if xxhash.xxh3_64_digest(content[8:]) == content[:8]:
                        found[bytes.fromhex(path.stem)] = content[8:]
        return found

    def identities(self) -> dict[bytes, bytes]:
        """Digest -> description of every identity noted; unreadable notes are left out."""
        found: dict[bytes, bytes] = {}
        for path in self.identity_notes():
            with contextlib.suppress(OSError, ValueError):
                digest = bytes.fromhex(path.name)  # fails for what lies beside the notes
                found[digest] = path.read_bytes()
        return found

    def close(self) -> None:
        """Give the directory up."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _check_format(self, block_tokens: int) -> bool:
        """True for a directory that is new or empty."""
        if not self.path.exists():
            return True
        if not self.path.is_dir():
            raise DirectoryUnusableError(f"{self.path} is not a directory; give another path")
        note = self.path / "FORMAT"
        if not note.exists():
            strangers = [entry.name for entry in self.path.iterdir() if entry.name not in _FIRST]
            if strangers:
                raise DirectoryUnusableError(
                    f"{self.path} holds other files ({', '.join(sorted(strangers)[:3])}); give an empty directory"
                )
            return True
        try:
            found = msgspec.json.decode(note.read_bytes(), type=_Format)
        except msgspec.DecodeError as error:
            raise FormatMismatchError(
                f"{note} is damaged ({error}); restore it as "
                f'{{"format":{FORMAT},"block_tokens":N}} or use another directory'
            ) from error
        if found.format != FORMAT:
            raise FormatMismatchError(
                f"{self.path} has format {found.format}, this build reads {FORMAT}; "
                "use the build that wrote it or another directory"
            )
        if found.block_tokens != block_tokens:
            raise FormatMismatchError(
                f"{self.path} holds blocks of {found.block_tokens} tokens, the profile asks for {block_tokens}; "
                f"open it with block_tokens={found.block_tokens} or use another directory"
            )
        return False


def record_name(key: bytes, cipher: Cipher | None) -> str:
    """The file of a block's record: half of its key, or as much of a keyed hash. The record is checked against it."""
    return (key[:16] if cipher is None else cipher.name(key)).hex()


def find_record(folder: Path, key: bytes, digest: bytes, ciphers: Ciphers) -> Path | None:
    """Where the record of a block of this identity lies, among the records of `folder`."""
    files = [folder / record_name(key, cipher) for cipher in ciphers.under_which(digest)]
    return next((file for file in files if file.exists()), None)


def is_part(name: str) -> bool:
    """Whether what lies in a data directory is a part of it."""
    return name in PARTS or name.endswith(SCRATCH) or re.fullmatch("pins[.][0-9a-f]{16}", name) is not None


def write_format(path: Path, block_tokens: int) -> None:
    """Say what a directory holds. Raises OSError."""
    scratch = path / f"FORMAT{SCRATCH}"
    with scratch.open("wb") as file:
        file.write(msgspec.json.encode(_Format(FORMAT, block_tokens)) + b"\n")
        file.flush()
        os.fsync(file.fileno())
    scratch.rename(path / "FORMAT")


def take_lock(path: Path) -> int:
    """Own a directory until the descriptor that this returns is closed. Raises DirectoryInUseError, OSError."""
    lock = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(lock, 32, 0).decode(errors="replace").strip()
        os.close(lock)
        raise DirectoryInUseError(
            f"{path} is in use by process {owner or 'unknown'}; stop it, or connect to it instead"
        ) from None
    except BaseException:
        os.close(lock)
        raise
    with contextlib.suppress(OSError):  # a courtesy to others, for which a full disk may have no room
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock
