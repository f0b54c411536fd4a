"""Blocks in one file that another machine can take in: tensors with all that says whose KV they are.

A safetensors file. For each block and layer with KV there are two tensors, "<key>.<layer>.keys" [kv_heads, tokens,
head_dim] and ".values" [kv_heads, tokens, value_dim], in the layout's dtype. The metadata "kvstore" is JSON: format,
identities (digest in hex -> what `Identity.to_bytes` gives, in base64) and blocks, each with a checksum over its raw
form. Import trusts none of it: identities must have the digests they are listed under, keys must follow from identity,
parent and tokens, shapes from the layout, and bytes must have their checksum.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from kvstore.block import KEY_BYTES, Block, block_key
from kvstore.errors import InvalidRequestError
from kvstore.identity import Identity, IdentityError
from kvstore.layout import Layout, capabilities
from kvstore.namespace import ROOT_KEY
from kvstore.open_directory import OpenDirectory

from . import safetensors_file
from .entry import Entry
from .safetensors_file import SafetensorsError, SafetensorsFile

FORMAT = 1

_DTYPES = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}
_WAIT = 60.0  # seconds for room in warm memory: what came before has to go to flash first


class PortableBlock(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One block. `tokens` are the ids; `checksum` xxh3-64 of the raw form, in hex, since JSON numbers lose bits."""

    key: str
    identity: str
    parent: str
    start: int
    tokens: tuple[int, ...]
    exact: bool
    checksum: str


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a file says of itself."""

    format: int
    identities: dict[str, bytes]
    blocks: tuple[PortableBlock, ...]


class Exported(msgspec.Struct, frozen=True):
    """What was written: blocks, tokens, bytes of the file. `left_out`: blocks that could not be read, and why."""

    path: str
    blocks: int
    tokens: int
    nbytes: int
    left_out: dict[str, str]


class Imported(msgspec.Struct, frozen=True):
    """What became of the blocks of a file: `added`, `held` already, and `refused` by key, with the reason."""

    added: int
    held: int
    refused: dict[str, str]


# -- export ---------------------------------------------------------------------------------------------------------


def export(
    path: Path,
    entries: Sequence[Entry],
    identities: Mapping[bytes, Identity],
    read: Callable[[Entry], NDArray[np.uint8]],
) -> Exported:
    """Write blocks to a new file. `read` gives the raw form of a block, uint8; LookupError says why it cannot.

    Each block is read twice, once for its checksum, so that no more than one is in memory. Raises FileExistsError,
    InvalidRequestError when there is nothing to write, OSError.
    """
    left_out: dict[str, str] = {}
    checksums: dict[bytes, str] = {}
    for entry in entries:
        try:
            if entry.identity not in identities:
                raise LookupError("nobody described its identity")
            checksums[entry.key] = _checksum(read(entry))
        except LookupError as error:
            left_out[entry.key.hex()] = str(error)
    chosen = sorted(
        (each for each in entries if each.key in checksums), key=lambda each: (each.start, each.key)
    )
    if not chosen:
        raise InvalidRequestError(f"no block to export, {len(left_out)} cannot be read")
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for entry in chosen:
        tensors |= _tensors(entry.key.hex(), identities[entry.identity].layout, len(entry.tokens))
    contents = Contents(
        FORMAT,
        {digest.hex(): identities[digest].to_bytes() for digest in {each.identity for each in chosen}},
        tuple(_portable(entry, checksums[entry.key]) for entry in chosen),
    )

    def data() -> Iterator[memoryview]:
        for entry in chosen:
            raw = read(entry)
            if _checksum(raw) != checksums[entry.key]:
                raise LookupError("its KV changed while it was read")
            yield raw.data

    metadata = {"kvstore": msgspec.json.encode(contents).decode()}
    try:
        nbytes = safetensors_file.write(path, tensors, metadata, data())
    except LookupError as error:
        raise InvalidRequestError(f"a block went away while it was written: {error}; export again") from error
    return Exported(str(path), len(chosen), sum(len(each.tokens) for each in chosen), nbytes, left_out)


def _portable(entry: Entry, checksum: str) -> PortableBlock:
    return PortableBlock(
        entry.key.hex(),
        entry.identity.hex(),
        entry.parent_key.hex(),
        entry.start,
        tuple(entry.tokens.tolist()),
        entry.exact,
        checksum,
    )


def _tensors(key: str, layout: Layout, tokens: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Names, dtypes and shapes of a block's tensors, in the order of its raw form."""
    dtype = _DTYPES[layout.dtype]
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for number, layer in enumerate(layout.layers):
        if layer.holds_kv:
            found[f"{key}.{number}.keys"] = dtype, layout.key_shape(number, tokens)
            found[f"{key}.{number}.values"] = dtype, layout.value_shape(number, tokens)
    return found


# -- import ---------------------------------------------------------------------------------------------------------


def import_file(path: Path, opened: OpenDirectory) -> Imported:
    """Add the blocks of a file that are not held yet. Nothing that is held is changed.

    Raises InvalidRequestError for a file that is none, or that contradicts itself: nothing is added then. A block
    for which there is no room is refused, and the rest with it where they stand behind it.
    """
    try:
        file = SafetensorsFile(path)
    except SafetensorsError as error:
        raise InvalidRequestError(str(error)) from error
    blocks = _checked(file, path, opened.tiers.profile.block_tokens)
    if opened.directory is not None:
        for identity in {identity for _, identity in blocks}:
            opened.directory.keep_identity(identity.digest(), identity.to_bytes())
    added, held = 0, 0
    refused: dict[str, str] = {}
    for block, identity in blocks:
        reason = _add(file, block, identity, opened)
        if reason is None:
            added += 1
        elif reason == "":
            held += 1
        else:
            refused[block.key] = reason
    return Imported(added, held, refused)


def _checked(file: SafetensorsFile, path: Path, block_tokens: int) -> list[tuple[PortableBlock, Identity]]:
    """The blocks of a file, parents first, each with its identity. Raises InvalidRequestError."""
    try:
        contents = msgspec.json.decode(file.metadata["kvstore"], type=Contents)
    except KeyError:
        raise InvalidRequestError(f"{path} is a safetensors file, and not one of this store") from None
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"{path} has metadata that cannot be read: {error}") from error
    if contents.format != FORMAT:
        raise InvalidRequestError(f"{path} has format {contents.format}, this build reads {FORMAT}")
    identities: dict[str, Identity] = {}
    for digest, description in contents.identities.items():
        try:
            identities[digest] = Identity.from_bytes(description)
        except IdentityError as error:
            raise InvalidRequestError(f"{path}, identity {digest[:12]}: {error}") from error
        if identities[digest].digest().hex() != digest:
            raise InvalidRequestError(f"{path}: what is called identity {digest[:12]} is another one")
    names = set[str]()
    for block in contents.blocks:
        if (wrong := _wrong(file, block, identities.get(block.identity), block_tokens)) is not None:
            raise InvalidRequestError(f"{path}, block {block.key[:12]}: {wrong}; nothing was imported")
        if block.key in names:
            raise InvalidRequestError(f"{path}, block {block.key[:12]} is there twice; nothing was imported")
        names.add(block.key)
    by_start = sorted(contents.blocks, key=lambda block: block.start)
    return [(block, identities[block.identity]) for block in by_start]


def _wrong(
    file: SafetensorsFile, block: PortableBlock, identity: Identity | None, block_tokens: int
) -> str | None:
    """Why a block cannot be what it says."""
    if identity is None:
        return f"the file does not describe its identity {block.identity[:12]}"
    try:
        key, parent = bytes.fromhex(block.key), bytes.fromhex(block.parent)
        tokens = np.array(block.tokens, np.int32)
    except (ValueError, OverflowError) as error:
        return str(error)
    if len(key) != KEY_BYTES or len(parent) not in (0, KEY_BYTES):
        return "a key of another length"
    if not 1 <= len(tokens) <= block_tokens or int(tokens.min()) < 0:
        return f"{len(tokens)} tokens, blocks here hold 1 to {block_tokens}; import into a store with as large ones"
    if block.start < 0 or (block.exact and block.start % block_tokens):
        return f"starts at {block.start}, blocks here start at multiples of {block_tokens}"
    if (block.exact and (block.start == 0) != (parent == ROOT_KEY)) or not (block.exact or parent):
        return f"starts at {block.start} with {'a' if parent else 'no'} parent"
    if block.exact and capabilities(identity.layout).reuse == "exact":
        return (
            "its identity permits exact reuse only, where a block cannot be checked without its whole prompt"
        )
    if key != block_key(identity.digest(), parent, tokens, exact=block.exact):
        return "its key does not follow from identity, parent and tokens"
    for name, (dtype, shape) in _tensors(block.key, identity.layout, len(tokens)).items():
        tensor = file.tensors.get(name)
        if tensor is None or (tensor.dtype, tensor.shape) != (dtype, shape):
            return f"tensor {name} is missing or not {dtype} {list(shape)}"
    if _checksum(_raw(file, block, identity.layout)) != block.checksum:
        return "its KV does not have its checksum"
    return None


def _checksum(raw: NDArray[np.uint8]) -> str:
    return f"{xxhash.xxh3_64_intdigest(raw.data):016x}"


def _raw(file: SafetensorsFile, block: PortableBlock, layout: Layout) -> NDArray[np.uint8]:
    names = _tensors(block.key, layout, len(block.tokens))
    return np.concatenate([file.bytes_of(name) for name in names])


def _add(
    file: SafetensorsFile, portable: PortableBlock, identity: Identity, opened: OpenDirectory
) -> str | None:
    """None when a block was added, "" when it is held, else why it cannot be."""
    tiers = opened.tiers
    key, tokens = bytes.fromhex(portable.key), np.array(portable.tokens, np.int32)
    nbytes = identity.layout.block_bytes(len(tokens))
    deadline = time.monotonic() + _WAIT
    with tiers.lock:
        space = tiers.namespace(identity.digest())
        if space.identity is None:
            space.open(identity, tiers.profile.frame_bytes)
        if key in space.by_key:
            return ""
        room = tiers.allocate_warm(nbytes, space)
        while room is None and (left := deadline - time.monotonic()) > 0:
            tiers.changed.wait(left)
            room = tiers.allocate_warm(nbytes, space)
        if room is None:
            return "warm memory is full of what is leased or waits for flash"
        raw, number = room.tier.view(room.extent, nbytes), tiers.new_number()
    raw[:] = _raw(file, portable, identity.layout)
    block = Block(
        number=number,
        key=key,
        parent_key=bytes.fromhex(portable.parent),
        namespace=space,
        tokens=tokens,
        start=portable.start,
        nbytes=nbytes,
        exact=portable.exact,
        memory=room,
        last_use=time.time(),
    )
    with tiers.lock:
        standing = tiers.add(block)
        if standing is not block:
            return "" if standing is not None else "another block has its key"
        tiers.counts["tokens_imported"] += len(tokens)
        opened.worker.submit(block)
    return None
