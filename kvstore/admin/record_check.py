"""Checks one record file: all that can be known of it by itself, and by the identity that it is of."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.block import KEY_BYTES, block_key
from kvstore.directory import record_name
from kvstore.flash.ciphers import Ciphers
from kvstore.flash.record import BadRecordError, ForeignRecordError, Header, RecordReader
from kvstore.identity import Identity
from kvstore.layout import Layout, capabilities
from kvstore.namespace import ROOT_KEY

from .entry import Entry
from .fault import Kind

LOST = "its KV is lost: repair sets it aside, and the next prompt with these tokens computes it again"


class Checked(NamedTuple):
    """A record: its header where that can be trusted, and the first thing that is wrong with it.

    Neither of another key's: what cannot be read cannot be judged.
    """

    header: Header | None
    status: os.stat_result | None
    kind: Kind | None
    found: str
    bytes_read: int


def check_record(
    path: Path,
    identities: Mapping[bytes, Identity],
    name: str | None = None,
    raw: NDArray[np.uint8] | None = None,
    ciphers: Ciphers | None = None,
) -> Checked:
    """Read all of a record. Raises NotNowError when that is not possible now.

    name: what the file is called where it belongs, by default its name. raw: filled with the block's KV where its
    identity is described, uint8 of the block's length. ciphers: open the record, if it is encrypted.
    """
    try:
        reader = RecordReader(path, ciphers)
    except ForeignRecordError as error:
        return Checked(None, None, None, str(error), 0)
    except BadRecordError as error:
        if error.reason == "too many open files or too little memory":
            raise
        return Checked(None, None, "record", str(error), 0)
    try:
        header = reader.header
        identity = identities.get(header.identity)
        try:
            wrong = next(_wrong(reader, name or path.name, identities, identity, raw), None)
        except BadRecordError as error:
            wrong = "record", str(error)
        kind, found = wrong or (None, "")
        return Checked(header, reader.status, kind, found, reader.status.st_size)
    finally:
        reader.close()


def _wrong(
    reader: RecordReader,
    name: str,
    identities: Mapping[bytes, Identity],
    identity: Identity | None,
    raw: NDArray[np.uint8] | None,
) -> Iterator[tuple[Kind, str]]:
    header = reader.header
    yield from _wrong_tokens(header)
    yield from _wrong_place(header)
    yield from _wrong_key(header, identities, identity)
    if record_name(header.key, reader.cipher) != name:
        yield "name", f"holds block {header.key.hex()[:32]}"
    yield from _wrong_frames(header, identity)
    yield from _wrong_data(reader, identity, raw)
    yield from _wrong_padding(reader)


def read_kv(reader: RecordReader, entry: Entry, layout: Layout) -> NDArray[np.uint8]:
    """The KV of a block out of its record, in raw form. Raises BadRecordError, also for that of another block."""
    header = reader.header
    same = (header.key, header.identity, header.start) == (entry.key, entry.identity, entry.start)
    if not same or not np.array_equal(header.token_ids(), entry.tokens):
        raise BadRecordError("key", "the record is of another block")
    out = np.empty(layout.block_bytes(len(entry.tokens)), np.uint8)
    reader.read(layout, 0, out)
    return out


def misfit(header: Header, block_tokens: int) -> tuple[Kind, str] | None:
    """What is wrong with a record in a directory whose blocks are of `block_tokens` tokens."""
    count = len(header.tokens) // 4
    if count > block_tokens:
        return "tokens", f"{count} tokens, a block holds at most {block_tokens}"
    if header.exact and header.start % block_tokens:
        return "position", f"starts at {header.start}, blocks are of {block_tokens} tokens"
    return None


def _wrong_tokens(header: Header) -> Iterator[tuple[Kind, str]]:
    if not header.tokens or len(header.tokens) % 4:
        yield "tokens", f"{len(header.tokens)} bytes of token ids"
    elif (least := int(header.token_ids().min())) < 0:
        yield "tokens", f"token id {least}"


def _wrong_place(header: Header) -> Iterator[tuple[Kind, str]]:
    if len(header.parent_key) not in (0, KEY_BYTES):
        yield "parent", f"a parent key of {len(header.parent_key)} bytes"
    if header.start < 0:
        yield "position", f"starts at {header.start}"
    if header.exact and (header.start == 0) != (header.parent_key == ROOT_KEY):
        yield "parent", f"starts at {header.start} with {'a' if header.parent_key else 'no'} parent"
    if not header.exact and header.parent_key == ROOT_KEY:
        yield "parent", "computed behind a moved run, and without a parent"


def _wrong_key(
    header: Header, identities: Mapping[bytes, Identity], identity: Identity | None
) -> Iterator[tuple[Kind, str]]:
    whole = header.exact and identity is not None and capabilities(identity.layout).reuse == "exact"
    if not whole and not _made_for(header, header.identity):  # of a whole prompt: see `chain`
        others = [digest.hex()[:12] for digest in identities if _made_for(header, digest)]
        if others:
            yield "identity", f"says {header.identity.hex()[:12]}, its key was made for {others[0]}"
        yield "key", "does not follow from identity, parent and tokens"


def _made_for(header: Header, digest: bytes) -> bool:
    return header.key == block_key(digest, header.parent_key, header.token_ids(), exact=header.exact)


def _wrong_frames(header: Header, identity: Identity | None) -> Iterator[tuple[Kind, str]]:
    layers, offset = 0, 0
    for number, frame in enumerate(header.frames):
        first, end = frame.layers
        if first != layers or end <= first or frame.offset != offset or min(frame.lengths, default=0) < 0:
            yield "frames", f"group {number} has layers {first}–{end - 1} at {frame.offset}"
            return
        if identity is not None and end <= len(identity.layout.layers):
            span = identity.layout.span(range(first, end), len(header.tokens) // 4)
            if frame.raw_length != span.stop - span.start:
                yield "frames", f"group {number} is of {frame.raw_length} bytes, not {span.stop - span.start}"
        layers, offset = end, offset + frame.length
    if not header.frames or (identity is not None and layers != len(identity.layout.layers)):
        total = "some" if identity is None else len(identity.layout.layers)
        yield "frames", f"holds {layers} of {total} layers"
    if identity is not None and identity.codec == "lossless" and not header.lossless:
        yield "frames", "went through a codec with loss, its identity permits none"


def _wrong_data(
    reader: RecordReader, identity: Identity | None, raw: NDArray[np.uint8] | None
) -> Iterator[tuple[Kind, str]]:
    """Raises BadRecordError for what does not decode; without an identity checksums have to do."""
    if identity is None:
        reader.check_frames()
    else:
        nbytes = identity.layout.block_bytes(len(reader.header.tokens) // 4)
        if raw is None or len(raw) != nbytes:
            raw = np.empty(nbytes, np.uint8)
        reader.read(identity.layout, 0, raw)
    yield from ()


def _wrong_padding(reader: RecordReader) -> Iterator[tuple[Kind, str]]:
    if any(padding := reader.padding()):
        yield "padding", f"{sum(map(bool, padding))} bytes between header and frames are not zero"
