"""One block in full: its tokens, where it stands among others, and its record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from kvstore.flash.ciphers import Ciphers
from kvstore.flash.record import BadRecordError, RecordReader
from kvstore.identity import Identity

from .entry import BlockRow, Entry, path_to, row_of


class FrameRow(msgspec.Struct, frozen=True):
    """One layer group of a record: layers [first, end), how it is stored, bytes stored and raw."""

    layers: tuple[int, int]
    form: str
    stored: int
    raw: int


class Shown(msgspec.Struct, frozen=True):
    """A block. `token_ids` all of them. path: keys of the held blocks before it, from the first on.

    serves: as a prefix; or only as a moved run, since the block before it is not held, or it was computed behind one.
    record: name of its file below the directory, frames in it, and why it cannot be read, if so.
    """

    block: BlockRow
    identity: str
    token_ids: tuple[int, ...]
    path: tuple[str, ...]
    serves: Literal["prefix", "moved: parent not held", "moved: computed behind a moved run"]
    children: tuple[str, ...]
    record: str | None
    frames: tuple[FrameRow, ...]
    unreadable: str | None


def show(
    entry: Entry,
    entries: Sequence[Entry],
    identities: dict[bytes, Identity],
    file: Path | None,
    block_tokens: int,
    ciphers: Ciphers,
) -> Shown:
    """All that is known of `entry`, one of `entries`. file: its record."""
    by_key = {each.key: each for each in entries}
    path = path_to(entry, by_key, block_tokens)
    identity = identities.get(entry.identity)
    frames: tuple[FrameRow, ...] = ()
    record = unreadable = None
    if file is not None:
        record = f"blocks/{file.name}"
        try:
            reader = RecordReader(file, ciphers)
            reader.close()
            frames = tuple(
                FrameRow(frame.layers, frame.form, frame.length, frame.raw_length)
                for frame in reader.header.frames
            )
        except BadRecordError as error:
            unreadable = str(error)
    return Shown(
        row_of(entry, identities),
        "nobody described this identity" if identity is None else str(identity),
        tuple(entry.tokens.tolist()),
        tuple(each.key.hex() for each in path[:-1]),
        "moved: computed behind a moved run"
        if not entry.exact
        else "moved: parent not held"
        if path[0].parent_key
        else "prefix",
        tuple(sorted(each.key.hex() for each in entries if each.parent_key == entry.key)),
        record,
        frames,
        unreadable,
    )
