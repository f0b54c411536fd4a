"""Makes a damaged data directory sound again: sets aside what is bad, and makes anew what the rest can tell.

Nothing is deleted. What is bad goes to quarantine/, where it stays until flash needs the room.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from kvstore.directory import DataDirectory, take_lock, write_format
from kvstore.errors import DirectoryUnusableError
from kvstore.flash import cold_index
from kvstore.flash.ciphers import Ciphers
from kvstore.flash.cold import ColdTier

from .directory_check import Checked, check_directory, is_block_size
from .fault import Fault, Kind

_ROWS: tuple[Kind, ...] = ("row without record", "record without row", "row differs", "counter")
_UNLIMITED = 1 << 62  # bytes: repair evicts nothing


def repair_directory(
    path: Path, block_tokens: int, ciphers: Ciphers | None = None
) -> tuple[Checked, list[Fault]]:
    """Check a directory that nobody has open, and repair it: what was found, and the faults with what was done.

    block_tokens: of the profile, used where nothing that is held tells the size of a block. Raises
    DirectoryInUseError, DirectoryUnusableError.
    """
    ciphers = Ciphers() if ciphers is None else ciphers
    if not path.is_dir():
        raise DirectoryUnusableError(
            f"{path} is no data directory; give the one that the store was opened with"
        )
    try:
        lock = take_lock(path)
        try:
            checked = check_directory(path, owned=False, ciphers=ciphers)
            size = _block_tokens(checked, block_tokens)
            repaired = _set_aside(path, checked.faults, size)
        finally:
            os.close(lock)
        if any(fault.entry.startswith(("blocks/", "index/")) for fault in checked.faults):
            _write_index(path, checked, size, ciphers)
    except OSError as error:
        raise DirectoryUnusableError(f"{path} cannot be repaired: {error}") from error
    return checked, repaired


def _block_tokens(checked: Checked, given: int) -> int:
    if checked.block_tokens is not None:
        return checked.block_tokens
    longest = max((len(header.tokens) // 4 for header in checked.headers.values()), default=0)
    if longest > given:
        given = longest
    while not is_block_size(given):
        given += 1
    return given


def _set_aside(path: Path, faults: Iterable[Fault], block_tokens: int) -> list[Fault]:
    done: dict[str, str] = {}
    repaired = []
    for fault in faults:
        if fault.entry not in done or fault.kind in _ROWS:
            done[fault.entry] = _mend(path, fault, block_tokens)
        repaired.append(msgspec.structs.replace(fault, repaired=done[fault.entry]))
    return repaired


def _mend(path: Path, fault: Fault, block_tokens: int) -> str:
    if fault.kind in _ROWS and not fault.entry.startswith("index/"):
        return "row made anew" if fault.kind != "row without record" else "row dropped"
    target = _quarantine(path, fault)
    if fault.kind == "format":
        write_format(path, block_tokens)
        return f"written for blocks of {block_tokens} tokens"
    if fault.entry.startswith("index/"):
        return f"index made anew, the old one is {target}"
    return f"set aside as {target}"


def _quarantine(path: Path, fault: Fault) -> str:
    """Move a file or folder aside under a name that is free; that name."""
    source = path / fault.entry
    folder = path / "quarantine"
    folder.mkdir(mode=0o700, exist_ok=True)
    name = f"{source.name}.{fault.kind.replace(' ', '-')}"
    number = 0
    while os.path.lexists(target := folder / (f"{name}.{number}" if number else name)):
        number += 1
    if os.path.lexists(source):
        source.rename(target)
    return f"quarantine/{target.name}"


def _write_index(path: Path, checked: Checked, block_tokens: int, ciphers: Ciphers) -> None:
    """Adopt the records that are left, with what sound rows knew of them."""
    directory = DataDirectory(path, block_tokens, ciphers)
    try:
        unsound = [fault for fault in checked.faults if fault.kind in ("row differs", "counter")]
        if unsound:  # a row that misleads must not be asked
            for cipher in ciphers.all():
                for file in cold_index.index_files(directory.index, cipher):
                    _quarantine(path, Fault("index", f"index/{file.name}", "", ""))
        cold = ColdTier(directory, _UNLIMITED, block_tokens)
        cold.close([checked.rows.get(key, row) for key, row in cold.rows.items()])
    finally:
        directory.close()
