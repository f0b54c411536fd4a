"""What is to be forgotten when somebody asks for it: what begins with a prefix, is of an adapter, or of long ago.

All here only look, under the store's lock, and give blocks in an order in which they can go; but for `forget_vectors`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from .block import Block
from .directory import DataDirectory
from .identity import Identity
from .namespace import Namespace
from .orphans import continuing


def starting_with(space: Namespace, tokens: NDArray[np.int32], *, whole: bool) -> list[Block]:
    """All that starts with `tokens`, and what may do so but lost the block before it.

    whole: keys of this identity stand for whole prompts, since its layout permits exact reuse only.
    """
    seed = None if whole else space.digest
    lost = continuing(space.orphans(), tokens, seed, space.trie.block_tokens)
    return [*lost, *space.below(tokens)]


def all_of(spaces: Iterable[Namespace]) -> list[Block]:
    """Leaves first."""
    return [block for space in spaces for block in space.below(_NO_TOKENS)]


def made_with(spaces: Collection[Namespace], adapter: str, directory: DataDirectory | None) -> list[Block]:
    """All KV made with the adapter of this content digest, as far as descriptions of identities are known."""
    known = {space.digest: space.identity for space in spaces if space.identity}
    for digest, description in ({} if directory is None else directory.identities()).items():
        with contextlib.suppress(ValueError):
            known.setdefault(digest, Identity.from_bytes(description))
    using = {
        digest
        for digest, identity in known.items()
        if any(each.digest == adapter.lower() for each in identity.adapters)
    }
    return all_of(space for space in spaces if space.digest in using)


def unused_for(spaces: Iterable[Namespace], seconds: float) -> list[Block]:
    """What no request used for so long."""
    horizon = time.time() - seconds
    return [block for block in all_of(spaces) if block.last_use < horizon]


def forget_vectors(space: Namespace, directory: DataDirectory | None) -> None:
    """Leave no vector of what was forgotten on flash. Those of the rest are written with the next flush.

    Called outside the lock.
    """
    with contextlib.suppress(OSError):
        if space.semantics is not None:
            space.semantics.delete_file()
        elif directory is not None:
            directory.vectors_file(space.digest).unlink(missing_ok=True)


_NO_TOKENS = np.empty(0, dtype=np.int32)
