"""Verify: checksums and invariants of all that is held, and repair of what does not hold."""

from __future__ import annotations

from pathlib import Path

from kvstore.flash.ciphers import Ciphers
from kvstore.flash.keys import Keys, source_of

from .directory_check import check_directory, owner
from .fault import Verified
from .repair import repair_directory


def verify_directory(
    path: Path, *, repair: bool = False, block_tokens: int = 128, key: Keys | None = None
) -> Verified:
    """Check a directory that is not open in this process; `repair` needs that it is open in none.

    block_tokens: what repair writes to FORMAT where nothing that is held tells it. key: of what is encrypted,
    that which it opens is checked. Raises DirectoryInUseError, DirectoryUnusableError, EncryptionError.
    """
    ciphers = Ciphers(source_of(key))
    if repair:
        checked, faults = repair_directory(path, block_tokens, ciphers)
        return Verified(len(checked.headers), checked.bytes_read, tuple(faults), tuple(checked.notes))
    owned = owner(path)
    checked = check_directory(path, owned=owned is not None, ciphers=ciphers)
    notes = list(checked.notes)
    if owned is not None:
        notes.append(
            f"process {owned} has it open: what only lags behind was not checked; ask the daemon itself"
        )
    return Verified(len(checked.headers), checked.bytes_read, tuple(checked.faults), tuple(notes))
