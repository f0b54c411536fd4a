"""All blocks that a store holds: how they become findable, who relies on them, and how their room is given back.

    added      findable by its tokens, with a place in memory; `restart` adds those that flash holds
    leased     neither moved nor dropped, however many rely on it
    dropped    findable no more, at once
    freed      its memory and flash are free again: when it was dropped and no lease names it

Where blocks lie meanwhile is not decided here: `tiers` moves them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.prefetch.admission import Admission
from kvstore.prefetch.load_or_recompute import Throughput

from ..block import Block, Residence
from ..directory import DataDirectory
from ..errors import DirectoryUnusableError
from ..flash.cold import ColdTier
from ..flash.unwritten import Unwritten
from ..namespace import Namespace
from ..profile import Profile
from ..semantics import Semantics
from ..watch.recent import RecentPrefixes
from ..watch.timings import Timings
from .appraisal import Appraisal
from .continuation import follow
from .leaving import Leaving
from .memory import MemoryTier
from .orders import Orders
from .pins import Pins
from .quotas import Quotas, on_flash
from .shared_beginnings import PARTED, SharedBeginnings

log = logging.getLogger(__name__)

_SHARED_SHARE = 4  # this part of the smallest tier is the most that shared beginnings may hold
_PINNED_SHARE = 2  # this part of warm memory, and of flash, is the most that pins may hold


class Holdings:
    """The blocks of one data directory, or of none, and what is counted and known of all of them.

    Called under `lock`, but for `semantics`, which takes it. `blocks` has by number what is findable, and what is
    doomed but leased; `namespaces` has by identity digest what is findable.

    walled: each tenant has memory of his own, and another's blocks never leave memory for the odd block of his.
    Raises DirectoryUnusableError.
    """

    def __init__(self, profile: Profile, directory: DataDirectory | None, *, walled: bool = False) -> None:
        self.profile = profile
        self.walled = walled
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified when room appeared in warm memory or the write queue moved."""
        self.closed = False

        self.blocks: dict[int, Block] = {}
        self.namespaces: dict[bytes, Namespace] = {}
        self._next_number = 0
        self.leased: Counter[str] = Counter()
        """Blocks of each tier that a lease names."""
        self._aside = 0  # records of dropped blocks that wait for a lease to end
        self.abandoned: deque[list[Block]] = deque()
        """What leases held that were collected without a release; `reap` gives it back. Appended to by any thread."""

        self.used_at = time.time()
        """When a request used anything."""
        self.recent = RecentPrefixes()
        self.flash = Throughput()
        """How fast loads bring KV from flash into place."""
        self.timings = Timings()
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        """Why something was not stored, by reason."""
        self.misses: Counter[str] = Counter()
        """Why something held could not be used, by reason."""

        appraisal = Appraisal(profile.device, self.flash)
        admission = Admission(profile.cold_bytes_per_day)
        self.orders = Orders(profile.eviction, appraisal, self.owner)
        self.unwritten = Unwritten(appraisal, admission, self.orders, self._written_today, self.refusals)
        self.leaving = Leaving(self.blocks, self.owner, self.orders, self.unwritten)
        budgets = [each for each in (profile.hot_bytes, profile.warm_bytes, profile.cold_bytes) if each]
        self._beginnings = SharedBeginnings(min(budgets, default=0) // _SHARED_SHARE)
        self.pins = _pins(profile, directory)
        """Prefixes that are not evicted; a part of warm and cold memory at most, so that the rest stays a cache."""

        self.cold = _cold(profile, directory)
        self.hot = _hot(profile, walled=walled)
        self.warm = MemoryTier(
            "warm",
            profile.warm_bytes,
            arena_bytes=profile.arena_bytes,
            alignment=profile.alignment,
            pin=False,
            walled=walled,
        )
        self.quotas = Quotas(profile, self.namespaces, self.hot, self.warm, self.cold, walled=walled)

    # -- finding ------------------------------------------------------------------------------------------------

    def namespace(self, digest: bytes) -> Namespace:
        """The namespace of an identity digest, made when it is new."""
        found = self.namespaces.get(digest)
        if found is None:
            found = self.namespaces[digest] = Namespace(digest, self.profile.block_tokens)
        return found

    def opened(self, namespace: Namespace) -> None:
        """The blocks of a namespace have a size from now on: tell the policies how many of them the tiers hold."""
        nbytes = namespace.layout.block_bytes(self.profile.block_tokens)
        totals = {"hot": self.hot.total, "warm": self.warm.total, "cold": self.profile.cold_bytes}
        self.orders.expect({name: total // max(1, nbytes) for name, total in totals.items()})
        for block in namespace.by_key.values():
            if len(block.behind) >= PARTED:
                self._beginnings.consider(namespace.path(block))

    def owner(self, space: Namespace) -> bytes:
        """Whose memory the blocks of a namespace lie in; see `Quotas`."""
        return self.quotas.owner(space)

    def semantics(self) -> list[Semantics]:
        """Of every identity that has an embedder."""
        with self.lock:
            spaces = self.namespaces.values()
            return [space.semantics for space in spaces if space.semantics is not None]

    def held(self, name: str) -> int:
        """How many blocks lie in the tier `name`."""
        return self.orders.count(name) + (self._aside if name == "cold" else 0)

    def new_number(self) -> int:
        self._next_number += 1
        return self._next_number

    def _written_today(self) -> int:
        return 0 if self.cold is None else self.cold.writes.spent

    # -- leases -------------------------------------------------------------------------------------------------

    def acquire(self, blocks: Sequence[Block], *, used: bool, by_put: bool = False) -> None:
        """Keep blocks from being moved or dropped. `used` says that a request reads them, which counts for their worth.

        A request that leased them before it put what follows them has used them once: `by_put` tells.
        """
        for block in blocks:
            if block.leases == 0:
                self._count_leased(block, 1)
            block.leases += 1
        if used:
            fresh = [block for block in blocks if not (by_put and block.leased_since_put)]
            for block in blocks:
                block.leased_since_put = not by_put
            self._use(fresh)

    def release(self, blocks: Sequence[Block]) -> None:
        """End one hold on each block; what was doomed meanwhile goes when the last one ends."""
        for block in blocks:
            block.leases -= 1
            if block.leases == 0:
                self._count_leased(block, -1)
                if block.doomed:
                    self._free(block)
        self.changed.notify_all()

    def reap(self) -> None:
        """Give back what abandoned leases held. Apart from their collection, which may come within any other step."""
        while self.abandoned:
            blocks = self.abandoned.popleft()
            self.release(blocks)
            if blocks:
                self.counts["leases_abandoned"] += 1
                log.warning("a lease of %d blocks was never released; use `with`", len(blocks))

    def _count_leased(self, block: Block, by: int) -> None:
        if block.memory is not None:
            self.leased[block.memory.tier.name] += by
        if block.cold_bytes:
            self.leased["cold"] += by

    def _use(self, blocks: Sequence[Block]) -> None:
        """A request reads these blocks, root first."""
        self.used_at = now = time.time()
        for block in blocks:
            block.hits += 1
            block.last_use = now
            if self.cold is not None:
                self.unwritten.use(block)
        self.recent.used(blocks)
        self.orders.use(blocks)

    # -- coming and going ---------------------------------------------------------------------------------------

    def add(self, block: Block) -> Block | None:
        """Make a complete block findable; the block that stands for its tokens now.

        None when another block has its key; it is freed then.
        """
        namespace = block.namespace
        standing, replaced = namespace.add(block)
        if standing is not block:
            self._free(block)
            return standing
        block.pinned = self.pins.covers(block)
        self.blocks[block.number] = block
        if block.memory is not None:
            self.used_at = block.last_use
            self.orders.insert_new(block.memory.tier.name, block)
        if replaced is not None:
            self._retire(replaced, block)
        if (parting := follow(block, replaced)) is not None:
            self._beginnings.consider(namespace.path(parting))
        for double in namespace.adopt_orphans(block):
            self.discard(double)
        for child in namespace.children(block):
            self.orders.changed(child)
        return block

    def drop(self, block: Block) -> None:
        """Remove a block from the index and from every tier; from the tiers only once no lease names it."""
        self._beginnings.forget(block)
        block.namespace.forget(block)
        self._discard_tail(block)
        self.discard(block)

    def discard(self, block: Block) -> None:
        """Free a block that is no longer findable, at once or when its last lease ends.

        Its record gives up its name at once: the same tokens may be put again, and no stop may bring it back.
        """
        block.doomed = True
        if block.leases == 0:
            self._free(block)
        elif block.cold_bytes and self.cold is not None:
            self.orders.remove("cold", block)
            block.aside = True
            self._aside += 1
            self.cold.set_aside(block.key, block.number)

    def _retire(self, tail: Block, block: Block) -> None:
        """`block` holds what `tail` holds, and more. What of it is on flash stays there until `block` is, too."""
        if tail.cold_bytes and not block.cold_bytes:
            block.tail = tail
            return
        block.tail, tail.tail = tail.tail, None
        self.discard(tail)

    def _discard_tail(self, block: Block) -> None:
        if block.tail is not None:
            self.discard(block.tail)
            block.tail = None

    def _free(self, block: Block) -> None:
        """Give back all that a block occupies."""
        self.unwritten.remove(block)
        if block.memory is not None:
            self.orders.remove(block.memory.tier.name, block)
            self.give_back(block.memory, wiped=block.purged)
            block.memory = None
        if block.cold_bytes and self.cold is not None:
            self.orders.remove("cold", block)
            if block.aside:
                self.cold.remove_aside(block.number, block.cold_bytes)
                self._aside -= 1
            else:
                self.cold.remove(block.key, block.cold_bytes)
            on_flash(block, 0)
        self.blocks.pop(block.number, None)

    # -- places in memory ---------------------------------------------------------------------------------------

    def give_back(self, residence: Residence, *, wiped: bool = False) -> None:
        """Free memory that no block came to own; `wiped` leaves nothing in it."""
        if wiped:
            residence.tier.wipe(residence.extent)
        residence.tier.release(residence.extent)
        self.changed.notify_all()

    def raw(self, block: Block) -> NDArray[np.uint8]:
        """The raw bytes of a block in memory, as a view. Hold a lease."""
        assert block.memory is not None
        return block.memory.tier.view(block.memory.extent, block.nbytes)


def _pins(profile: Profile, directory: DataDirectory | None) -> Pins:
    most = min(profile.warm_bytes, profile.cold_bytes or profile.warm_bytes) // _PINNED_SHARE
    if directory is None:
        return Pins(None, profile.block_tokens, most)
    return Pins(directory.pins, profile.block_tokens, most, directory.ciphers)


def _cold(profile: Profile, directory: DataDirectory | None) -> ColdTier | None:
    """The tier on flash, where there is any. Raises DirectoryUnusableError."""
    if directory is None or not profile.cold_bytes:
        return None
    try:
        return ColdTier(directory, profile.cold_bytes, profile.block_tokens, profile.cold_bytes_per_day)
    except OSError as error:
        raise DirectoryUnusableError(f"{directory.path} cannot be read: {error}") from error


def _hot(profile: Profile, *, walled: bool) -> MemoryTier:
    """Empty where the memory that the NPU reads is that of its process, which is the client's then, not ours."""
    in_clients = walled and not profile.shares_hot
    return MemoryTier(
        "hot",
        0 if in_clients else profile.hot_bytes,
        arena_bytes=profile.arena_bytes,
        alignment=profile.alignment,
        pin=True,
        walled=walled,
        most_arenas=profile.max_hot_arenas,
    )
