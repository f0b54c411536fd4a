"""Checks an open store block by block, while it is used: records, memory, keys, parents, accounts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kvstore.block import Block
from kvstore.flash.record import BadRecordError, NotNowError
from kvstore.identity import Identity
from kvstore.open_directory import OpenDirectory

from .fault import Fault, Verified
from .record_check import LOST, check_record, misfit


def check_open(opened: OpenDirectory, identities: Mapping[bytes, Identity], *, repair: bool) -> Verified:
    """Check each block that is held, and set aside what is bad if `repair`. Requests go on meanwhile.

    The index file is left out: a running store writes it now and then, and anew when it closes.
    """
    faults: list[Fault] = []
    notes: list[str] = []
    checked, bytes_read = 0, 0
    tiers = opened.tiers
    with tiers.lock:
        blocks = list(tiers.blocks.values())
    for block in blocks:
        with tiers.lock:
            if block.doomed or tiers.blocks.get(block.number) is not block:
                continue
            tiers.acquire([block], used=False)
        try:
            fault, read = _check(opened, block, identities)
        except NotNowError as error:
            notes.append(f"block {block.key.hex()[:12]} cannot be read now: {error}")
            continue
        finally:
            with tiers.lock:
                tiers.release([block])
        checked += 1
        bytes_read += read
        if fault is not None and not block.doomed:  # else its record went aside while it was read
            faults.append(_repaired(opened, block, fault) if repair else fault)
    try:
        tiers.check()
    except AssertionError as error:
        faults.append(Fault("counter", "tiers", str(error), "restart: accounts are made anew on opening"))
    return Verified(checked, bytes_read, tuple(faults), tuple(notes))


def _check(
    opened: OpenDirectory, block: Block, identities: Mapping[bytes, Identity]
) -> tuple[Fault | None, int]:
    """What is wrong with a leased block, and how many bytes were read."""
    tiers = opened.tiers
    name = block.key.hex()
    parent = block.namespace.by_key.get(block.parent_key) if block.exact and block.parent_key else None
    if parent is not None and (parent.start + parent.length != block.start or not parent.exact):
        found = f"starts at {block.start}, its parent ends at {parent.start + parent.length}"
        return Fault("position", name, found, LOST, name), 0
    if not block.cold_bytes or opened.directory is None or block.aside:
        return None, 0
    identity = identities.get(block.namespace.digest)
    raw = None if identity is None else np.empty(identity.layout.block_bytes(block.length), np.uint8)
    if tiers.cold is None:
        return None, 0
    path = tiers.cold.file(block.key)
    checked = check_record(path, identities, raw=raw, ciphers=opened.ciphers)
    now = tiers.cold.file(block.key)
    if checked.kind is not None and now != path:  # it was put under another key just then
        path = now
        checked = check_record(path, identities, raw=raw, ciphers=opened.ciphers)
    header = checked.header
    if checked.kind is not None or header is None:
        return Fault(
            checked.kind or "record", f"blocks/{path.name}", checked.found, LOST, name
        ), checked.bytes_read
    if (wrong := misfit(header, tiers.profile.block_tokens)) is not None:
        return Fault(wrong[0], f"blocks/{path.name}", wrong[1], LOST, name), checked.bytes_read
    if (header.identity, header.key, header.parent_key, header.start, header.exact) != (
        block.namespace.digest,
        block.key,
        block.parent_key,
        block.start,
        block.exact,
    ) or not np.array_equal(header.token_ids(), block.tokens):
        found = "the record is not of the block that the store takes it for"
        return Fault("row differs", f"blocks/{path.name}", found, LOST, name), checked.bytes_read
    same = raw is None or not header.lossless or block.memory is None or np.array_equal(raw, tiers.raw(block))
    if not same:
        cure = "repair drops what memory holds, flash has the block"
        return Fault("memory", name, "memory and flash differ", cure, name), checked.bytes_read
    return None, checked.bytes_read


def _repaired(opened: OpenDirectory, block: Block, fault: Fault) -> Fault:
    done: str | None
    with opened.tiers.lock:
        if block.doomed:
            done = "gone meanwhile"
        elif fault.kind == "memory":
            dropped = opened.tiers.forget_memory(block)
            done = "dropped from memory" if dropped else None
        elif block.cold_bytes:
            opened.tiers.quarantine(block, BadRecordError(fault.kind, fault.found))
            done = "set aside, and forgotten"
        else:
            opened.tiers.drop(block)
            done = "forgotten"
    return Fault(fault.kind, fault.entry, fault.found, fault.cure, fault.block, done)
