"""The verbs that change nothing, over a list of entries: one text for open stores and for directories on flash."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import InvalidRequestError, InvalidTokensError
from kvstore.explain import Explanation
from kvstore.flash.ciphers import Ciphers
from kvstore.identity import Identity
from kvstore.index.tokens import token_ids
from kvstore.pipeline.schedule import CallCosts
from kvstore.quality.reuse import Policy
from kvstore.sent_costs import SentCosts

from . import explained, portable
from . import show as showing
from . import tree as trees
from .entry import Entry, chosen_entry, chosen_identity, path_to
from .explained import Explained
from .fault import Verified
from .listing import Filters, Order, Page, page
from .portable import Exported
from .show import Shown
from .status import Status
from .tree import Tree


class Held(ABC):
    """What is held, to be looked at. Blocks and identities are named by the first digits of their digest in hex."""

    block_tokens: int
    path: Path | None
    ciphers: Ciphers
    """Open what is encrypted in `path`."""

    @abstractmethod
    def entries(self) -> list[Entry]:
        """A snapshot of all blocks."""

    @abstractmethod
    def identities(self) -> dict[bytes, Identity]:
        """Every identity that somebody described, by digest."""

    @abstractmethod
    def record_of(self, entry: Entry) -> Path | None:
        """The file of a block on flash."""

    @abstractmethod
    def raw(self, entry: Entry) -> NDArray[np.uint8]:
        """The KV of a block in raw form. LookupError says why it cannot be read."""

    @abstractmethod
    def explanation(
        self,
        tokens: NDArray[np.int32],
        identity: Identity,
        policy: Policy,
        costs: CallCosts | None,
        layer_groups: int,
    ) -> tuple[Explanation, float | None]:
        """What would become of a prompt, and the bytes a second that flash gives, where that was measured."""

    @abstractmethod
    def status(self) -> Status:
        """What is held in all."""

    @abstractmethod
    def verify(self, *, repair: bool = False) -> Verified:
        """Check all that is held; `repair` sets aside what is bad."""

    @abstractmethod
    def close(self) -> None:
        """Look no more."""

    def ls(self, *, order: Order = "key", after: str | None = None, limit: int = 100, **filters: Any) -> Page:
        """Blocks page by page; the filters are those of `listing.Filters`. Raises InvalidRequestError."""
        return page(self.entries(), _itself, self.identities(), checked_filters(filters), order, after, limit)

    def show(self, block: str) -> Shown:
        """One block in full. Raises InvalidRequestError when `block` names none, or several."""
        entries = self.entries()
        entry = chosen_entry(block, entries)
        file = self.record_of(entry) if entry.flash_bytes else None
        return showing.show(entry, entries, self.identities(), file, self.block_tokens, self.ciphers)

    def tree(
        self,
        *,
        identity: str | None = None,
        prefix: Sequence[int] = (),
        depth: int = 4,
        width: int = 20,
    ) -> list[Tree]:
        """Held prompts as a tree, of one identity or of each. Raises InvalidRequestError, InvalidTokensError."""
        entries, identities = self.entries(), self.identities()
        held = {entry.identity for entry in entries}
        digests = sorted(held) if identity is None else [chosen_identity(identity, held | identities.keys())]
        start = checked(prefix) if len(prefix) else np.empty(0, np.int32)
        return [
            trees.tree(entries, digest, identities.get(digest), self.block_tokens, start, depth, width)
            for digest in digests
        ]

    def explain(
        self,
        tokens: Sequence[int],
        *,
        identity: str | None = None,
        policy: str = "careful",
        costs: SentCosts | Mapping[str, Any] | None = None,
        layer_groups: int = 1,
    ) -> Explained:
        """Where each token of a prompt would come from and why not from nearer; see `kvstore.explain`.

        costs: of the graph calls of an engine whose graphs are split into so many layer groups; a map where they came
        over a connection. With them the answer is what a request does that comes now. Without them whether moving pays
        stays open, which notes say. Raises InvalidRequestError, InvalidTokensError.
        """
        if policy not in get_args(Policy):
            raise InvalidRequestError(f"policy {policy!r} is not {', '.join(get_args(Policy))}")
        ids = checked(tokens)
        chosen = self.described(identity)
        calls = None if costs is None else checked_costs(costs)
        told, speed = self.explanation(ids, chosen, cast(Policy, policy), calls, layer_groups)
        held = {entry.key.hex(): entry for entry in self.entries()}
        return explained.explained(len(ids), chosen, told, held, speed, calls)

    def export(
        self, path: str, *, identity: str | None = None, block: str | None = None, prefix: Sequence[int] = ()
    ) -> Exported:
        """Write blocks to a new portable file: all, those of an identity, those behind a prefix, or one and its path.

        Raises InvalidRequestError, FileExistsError, OSError.
        """
        entries, identities = self.entries(), self.identities()
        by_key = {entry.key: entry for entry in entries}
        if block is not None:
            entries = path_to(chosen_entry(block, entries), by_key, self.block_tokens)
        if identity is not None:
            digest = chosen_identity(identity, {entry.identity for entry in entries})
            entries = [entry for entry in entries if entry.identity == digest]
        if len(prefix):
            ids = checked(prefix)
            entries = [entry for entry in entries if self._along(entry, by_key, ids)]
        return portable.export(Path(path).expanduser(), entries, identities, self.raw)

    def described(self, identity: str | None) -> Identity:
        """The identity that is named, or the only one. Raises InvalidRequestError.

        Where one is held exactly and under a codec with loss, the exact one is meant.
        """
        known = self.identities()
        exact = {digest for digest, each in known.items() if each.codec == "lossless"}
        return known[chosen_identity(identity, exact if identity is None and exact else known)]

    def _along(self, entry: Entry, by_key: dict[bytes, Entry], prefix: NDArray[np.int32]) -> bool:
        """Whether a block is of a prompt that begins with `prefix`, or holds part of it."""
        path = path_to(entry, by_key, self.block_tokens)
        if path[0].parent_key:
            return False
        ids = np.concatenate([each.tokens for each in path])[: len(prefix)]
        return np.array_equal(ids, prefix[: len(ids)])


def checked(tokens: Sequence[int]) -> NDArray[np.int32]:
    """Token ids. Raises InvalidTokensError."""
    try:
        ids = token_ids(tokens)
    except (ValueError, OverflowError, TypeError) as error:
        raise InvalidTokensError(str(error)) from error
    if not len(ids):
        raise InvalidTokensError("no tokens given")
    return ids


def checked_filters(given: dict[str, Any]) -> Filters:
    """Raises InvalidRequestError."""
    try:
        return msgspec.convert(given, Filters)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"filters: {error}") from error


def checked_costs(given: SentCosts | Mapping[str, Any]) -> CallCosts:
    """Raises InvalidRequestError."""
    try:
        return msgspec.convert(given, SentCosts).calls()
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"costs: {error}") from error


def _itself(entry: Entry) -> Entry:
    return entry
