"""Garbage: what lies in the directory and no request will ever use."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from kvstore.identity import FORMAT_VERSION, Identity
from kvstore.open_directory import OpenDirectory
from kvstore.tiers.pins import Pin


class Garbage(msgspec.Struct, frozen=True):
    """One thing that can go, why, and its bytes on flash."""

    what: str
    why: str
    nbytes: int


class Collected(msgspec.Struct, frozen=True):
    """What went, or would go."""

    garbage: tuple[Garbage, ...]
    nbytes: int
    dry_run: bool


def collect(opened: OpenDirectory, identities: Mapping[bytes, Identity], *, dry_run: bool) -> Collected:
    """Records in quarantine, blocks of another format version, and notes and pins of identities that hold nothing.

    A note on an identity that was opened in this process stays, as do verdicts, which took long to measure.
    """
    tiers = opened.tiers
    found: list[Garbage] = []
    with tiers.lock:
        for digest, identity in identities.items():
            if identity.format_version == FORMAT_VERSION or (space := tiers.namespaces.get(digest)) is None:
                continue
            blocks = space.below(np.empty(0, np.int32))
            why = f"of format {identity.format_version}, this build reads {FORMAT_VERSION}"
            what = f"{len(blocks)} blocks of identity {digest.hex()[:12]}"
            if blocks:
                found.append(Garbage(what, why, sum(block.cold_bytes for block in blocks)))
            for block in () if dry_run else blocks:
                tiers.drop(block)
        pins = [pin for pin in tiers.pins if pin.identity not in identities]
        for pin in pins:
            found.append(_pin(pin))
            if not dry_run:
                tiers.pins.remove(pin.identity, pin.tokens)
        if tiers.cold is not None:
            for name, nbytes in tiers.cold.quarantined():
                found.append(Garbage(f"quarantine/{name}", "failed a check", nbytes))
            if not dry_run:
                tiers.cold.empty_quarantine()
        held = {digest for digest, space in tiers.namespaces.items() if space.by_key or space.identity}
    if opened.directory is not None:
        for path in opened.directory.identity_notes():
            name = path.name.partition(".")[0]
            if path.suffix in ("", ".vectors") and name not in {digest.hex() for digest in held}:
                nbytes = path.stat().st_blocks * 512
                found.append(Garbage(f"identities/{path.name}", "nothing of this identity is held", nbytes))
                if not dry_run:
                    path.unlink(missing_ok=True)
    return Collected(tuple(found), sum(each.nbytes for each in found), dry_run)


def _pin(pin: Pin) -> Garbage:
    return Garbage(f"pin of {len(pin.tokens) // 4} tokens", "nobody described its identity", 0)
