"""Where blocks lie: hot and warm memory, cold flash, and the moves between them.

    put            -> warm, findable at once
    warm fills     what was used longest ago is decided on: likely to be used again, warm -> also cold, else it may go;
                   so is all when no request comes for long
    flush, close   warm -> also cold, all of it
    warm is full   the block of the least worth that may go leaves memory; one that only memory holds is dropped,
                   leaves first
    lease          cold -> also warm, on the way into the engine's buffer
    used again     warm -> hot; hot is full: hot -> warm

What is worth the least is the say of the profile's eviction policy, and what may be written that of `admission`, within
the day's write budget. Never evicted are blocks that are leased, pinned, or a beginning that several prompts share.

A block has at most one place in memory and at most one on flash. All bookkeeping happens under one lock, copies and
file operations outside it, on blocks that are held by a lease meanwhile.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kvstore.prefetch.admission import Admission
from kvstore.prefetch.load_or_recompute import Throughput

from .appraisal import Appraisal
from .arena import Extent
from .block import Block, Residence
from .cold import ColdTier
from .cold_index import Row
from .directory import DataDirectory
from .errors import DirectoryUnusableError
from .identity import Identity
from .memory import MemoryTier
from .namespace import Namespace
from .orders import NAMES, Orders
from .pins import Pins
from .profile import Profile
from .recent import RecentPrefixes
from .record import BadRecordError, NotNowError, RecordReader
from .semantics import Semantics
from .shared_beginnings import PARTED, SharedBeginnings
from .timings import Timings
from .unwritten import Unwritten

log = logging.getLogger(__name__)

_SHARED_SHARE = 4  # this part of the smallest tier is the most that shared beginnings may hold
_UNDECIDED_SHARE = 0.75  # of warm memory, at most, may wait to be decided on
_PINNED_SHARE = 2  # this part of warm memory, and of flash, is the most that pins may hold


TENANT_QUOTA = "tenant quota"


class Tiers:
    """The three tiers of one data directory (or of none: then there is no cold tier) and all blocks in them."""

    def __init__(self, profile: Profile, directory: DataDirectory | None, *, walled: bool = False) -> None:
        self.profile = profile
        self.walled = walled
        """Each tenant has memory of its own, and another's blocks never leave memory for the odd block of his."""
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified when room appeared in warm memory or the write queue moved."""
        self.blocks: dict[int, Block] = {}
        self.namespaces: dict[bytes, Namespace] = {}
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        """Why something was not stored, by reason."""
        self.misses: Counter[str] = Counter()
        """Why something held could not be used, by reason."""
        self.flash = Throughput()
        """How fast loads bring KV from flash into place."""
        self.timings = Timings()
        self.recent = RecentPrefixes()
        self.closed = False
        self.abandoned: deque[list[Block]] = deque()
        """What leases held that were collected without a release; `reap` gives it back. Appended to by any thread."""
        self.leased: Counter[str] = Counter()
        """Blocks of each tier that a lease names."""
        self.used_at = time.time()
        """When a request used anything."""
        self._aside = 0  # records of dropped blocks that wait for a lease to end
        appraisal = Appraisal(profile.device, self.flash)
        admission = Admission(profile.cold_bytes_per_day)
        self._orders = Orders(profile.eviction, appraisal)
        self.unwritten = Unwritten(appraisal, admission, self._orders, self._written_today, self.refusals)
        budgets = [each for each in (profile.hot_bytes, profile.warm_bytes, profile.cold_bytes) if each]
        self._beginnings = SharedBeginnings(min(budgets, default=0) // _SHARED_SHARE)
        self._next_number = 0
        self.cold: ColdTier | None = None
        most_pinned = min(profile.warm_bytes, profile.cold_bytes or profile.warm_bytes) // _PINNED_SHARE
        self.pins = (
            Pins(None, profile.block_tokens, most_pinned)
            if directory is None
            else Pins(directory.pins, profile.block_tokens, most_pinned, directory.cipher)
        )
        """Prefixes that are not evicted; a part of warm and cold memory at most, so that the rest stays a cache."""
        if directory is not None and profile.cold_bytes:
            try:
                self.cold = ColdTier(
                    directory, profile.cold_bytes, profile.block_tokens, profile.cold_bytes_per_day
                )
            except OSError as error:
                raise DirectoryUnusableError(f"{directory.path} cannot be read: {error}") from error
            self._load_rows(self.cold)
            self._name_tenants(directory)
        self.hot = self._memory("hot", profile.hot_bytes, pin=True)
        self.warm = self._memory("warm", profile.warm_bytes, pin=False)

    # -- finding ------------------------------------------------------------------------------------------------

    def namespace(self, digest: bytes) -> Namespace:
        """The namespace of an identity digest, made when it is new."""
        found = self.namespaces.get(digest)
        if found is None:
            found = self.namespaces[digest] = Namespace(digest, self.profile.block_tokens)
        return found

    def owner(self, space: Namespace) -> bytes:
        """Whose memory the blocks of a namespace lie in: the tenant's by its salt. All is one owner's without walls."""
        return space.tenant if self.walled else b""

    def semantics(self) -> list[Semantics]:
        """Of every identity that has an embedder."""
        with self.lock:
            spaces = self.namespaces.values()
            return [space.semantics for space in spaces if space.semantics is not None]

    def opened(self, namespace: Namespace) -> None:
        """The blocks of a namespace have a size from now on: tell the policies how many of them the tiers hold."""
        nbytes = namespace.layout.block_bytes(self.profile.block_tokens)
        totals = {"hot": self.hot.total, "warm": self.warm.total, "cold": self.profile.cold_bytes}
        self._orders.expect({name: total // max(1, nbytes) for name, total in totals.items()})
        for block in namespace.by_key.values():
            if len(block.behind) >= PARTED:
                self._beginnings.consider(namespace.path(block))

    def new_number(self) -> int:
        self._next_number += 1
        return self._next_number

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

    def held(self, name: str) -> int:
        """How many blocks lie in the tier `name`."""
        return self._orders.count(name) + (self._aside if name == "cold" else 0)

    # -- adding and dropping ------------------------------------------------------------------------------------

    def allocate_warm(self, nbytes: int, space: Namespace) -> Residence | None:
        """Room in warm memory for a block of `space`, made by evicting where needed.

        None when all of it, or all of this tenant's, is held or waits for flash.
        """
        if nbytes > self.warm.largest_arena:
            return None
        self.reap()
        owner = self.owner(space)
        may_leave = partial(self._own_may_leave_memory, owner)
        while True:
            if self._keep_memory_quota(owner, nbytes, may_leave):
                if (extent := self._allocate(self.warm, nbytes, space)) is not None:
                    return Residence(self.warm, extent)
                if self._take_arena(self.warm, owner):
                    continue
                if (victim := self._orders.victim("warm", may_leave)) is not None:
                    self._leave_memory(self.blocks[victim])
                    continue
            if not self._decide_until_one_may_go(owner):
                return None

    def allocate_ahead(self, block: Block, spared: Container[int]) -> Residence | None:
        """Room in warm memory for a block on flash that may be needed soon: free, or of what is worth the least.

        Nothing is written for it, so that what waits to be decided on stays, and so do the block numbers `spared`.
        """

        owner = self.owner(block.namespace)

        def may_leave(number: int) -> bool:
            return number not in spared and self._own_may_leave_memory(owner, number)

        if not self._keep_memory_quota(owner, block.nbytes, may_leave):
            return None
        while (extent := self._allocate(self.warm, block.nbytes, block.namespace)) is None:
            victim = self._orders.victim("warm", may_leave)
            if victim is None:
                return None
            self._leave_memory(self.blocks[victim])
        return Residence(self.warm, extent)

    def new_in_memory(self, block: Block) -> None:
        """A block was put. When it fills what may be undecided, others are decided on, ahead of need."""
        if self.cold is not None:
            self.unwritten.put(block)
            self.decide(self.warm.total * _UNDECIDED_SHARE)

    def decide(self, most: float = 0) -> None:
        """Have decided on what is to be written, until at most `most` bytes of memory wait for that."""
        for block in self.unwritten.decide(most):
            if block.waiting:
                self.changed.notify_all()

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
        self._register(block)
        if replaced is not None:
            self._retire(replaced, block)
        if (parting := self._follow(block, replaced)) is not None:
            self._beginnings.consider(namespace.path(parting))
        for double in namespace.adopt_orphans(block):
            self._discard(double)
        for child in namespace.children(block):
            self._orders.changed(child)
        return block

    def drop(self, block: Block) -> None:
        """Remove a block from the index and from every tier; from the tiers only once no lease names it."""
        self._beginnings.forget(block)
        block.namespace.forget(block)
        if block.tail is not None:
            self._discard(block.tail)
            block.tail = None
        self._discard(block)

    def settle(self, block: Block, residence: Residence) -> None:
        """Give a block that was only on flash its place in memory; a double of one that has one is freed."""
        if block.memory is not None or block.doomed:
            self.give_back(residence, wiped=block.purged)
            return
        block.memory = residence
        self._orders.insert(residence.tier.name, block)
        self.leased[residence.tier.name] += block.leases > 0

    def give_back(self, residence: Residence, *, wiped: bool = False) -> None:
        """Free memory that no block came to own; `wiped` leaves nothing in it."""
        if wiped:
            residence.tier.wipe(residence.extent)
        residence.tier.release(residence.extent)
        self.changed.notify_all()

    def wipe_free(self, spaces: Collection[Namespace]) -> None:
        """Overwrite what blocks of these namespaces left in memory that is free now. Takes the lock for moments."""
        owners = {self.owner(space) for space in spaces}
        for tier in (self.hot, self.warm):
            with self.lock:
                numbers = [number for number in tier.arenas if tier.owner(number) in owners]
            for number in numbers:
                with self.lock:
                    taken = tier.take_free(number)
                for extent in taken:
                    tier.wipe(extent)
                with self.lock:
                    for extent in taken:
                        tier.release(extent)
                    self.changed.notify_all()

    def raw(self, block: Block) -> NDArray[np.uint8]:
        """The raw bytes of a block in memory, as a view. Hold a lease."""
        assert block.memory is not None
        return block.memory.tier.view(block.memory.extent, block.nbytes)

    # -- flash --------------------------------------------------------------------------------------------------

    def open_record(self, block: Block) -> RecordReader:
        """Open a block's record and check that it is this block. Raises BadRecordError."""
        try:
            reader = self._reader(block)
        except BadRecordError:
            with self.lock:  # it may have been set aside just then, which happens under the lock
                reader = self._reader(block)
        header = reader.header
        for reason, same in (
            ("identity", header.identity == block.namespace.digest),
            ("key", header.key == block.key and header.parent_key == block.parent_key),
            ("exactness", header.exact == block.exact),
            ("position", header.start == block.start),
            ("tokens", np.array_equal(header.token_ids(), block.tokens)),
            ("shape", sum(frame.raw_length for frame in header.frames) == block.nbytes),
            ("codec", header.lossless or block.namespace.codec != "lossless"),
        ):
            if not same:
                reader.close()
                raise BadRecordError(reason, f"block {block.key.hex()[:16]}")
        return reader

    def _reader(self, block: Block) -> RecordReader:
        assert self.cold is not None
        return self.cold.reader_aside(block.number) if block.aside else self.cold.reader(block.key)

    def quarantine(self, block: Block, error: BadRecordError) -> None:
        """A record failed a check: set it aside, count the reason, forget the block."""
        if isinstance(error, NotNowError):
            self.misses[error.reason] += 1
            return
        self.misses[f"bad record: {error.reason}"] += 1
        if self.cold is not None and block.cold_bytes and not block.aside:
            self.cold.quarantine(block.key, block.cold_bytes, error.reason)
            self._on_flash(block, 0)
            self.leased["cold"] -= block.leases > 0
            self._orders.remove("cold", block)
        self.drop(block)

    def reserve_cold(
        self, nbytes: int, incoming: Block | None = None, owner: bytes | None = None
    ) -> int | None:
        """Room on flash for a record, made by evicting leaves; None when the rest is held or carries others.

        With `incoming`, the block that the record is of, also None when it is worth less than what would go for it.
        owner: whose record it is; what exceeds his quota takes the place of others of his. None for what has no owner.
        """
        assert self.cold is not None
        if nbytes > self.cold.total:
            return None
        own = None if owner is None else partial(self._own_may_leave_cold, owner)
        while own is not None and owner is not None and self._exceeds_flash_quota(owner, nbytes):
            if not self._evict_cold(own, incoming, nbytes):
                return None
        while (size := self.cold.reserve(nbytes)) is None:
            if not self._evict_cold(self._may_leave_cold, incoming, nbytes):
                return None
        return size

    def _evict_cold(self, may_leave: Callable[[int], bool], incoming: Block | None, nbytes: int) -> bool:
        if incoming is None:
            victim = self._orders.victim("cold", may_leave)
        else:
            victim = self._orders.victim_for("cold", may_leave, incoming, nbytes)
        if victim is not None:
            self._leave_cold(self.blocks[victim])
        return victim is not None

    def flash_used(self, owner: bytes) -> int:
        """Bytes of flash that a tenant's blocks occupy."""
        return sum(space.flash_bytes for space in self.namespaces.values() if self.owner(space) == owner)

    def over_quota(self, space: Namespace, *, memory: int = 0, flash: int = 0) -> bool:
        """Whether it is this tenant's quota that has no room for so many bytes more."""
        owner = self.owner(space)
        return bool(
            (memory and self._exceeds_memory_quota(owner, memory))
            or (flash and self._exceeds_flash_quota(owner, flash))
        )

    def written(self, block: Block, size: int) -> None:
        """A block's record is on flash."""
        assert self.cold is not None
        if block.doomed:
            self.cold.remove(block.key, size)
            return
        self._on_flash(block, size)
        self._orders.insert("cold", block)
        self._orders.changed(block)
        self.leased["cold"] += block.leases > 0
        if block.tail is not None:
            self._discard(block.tail)
            block.tail = None

    def rows(self) -> list[Row]:
        """What the flash index is to say of each record. Takes the lock only for a moment."""
        with self.lock:
            held = [block for block in self.blocks.values() if block.cold_bytes and not block.doomed]
        return [
            Row(
                key=block.key,
                identity=block.namespace.digest,
                parent_key=block.parent_key,
                start=block.start,
                tokens=block.tokens.astype("<i4").tobytes(),
                exact=block.exact,
                file_bytes=block.cold_bytes,
                last_use=block.last_use,
                hits=block.hits,
            )
            for block in held
        ]

    # -- moves in memory, by the background thread ---------------------------------------------------------------

    def promote(self, block: Block) -> None:
        """Copy a warm block into hot memory, demoting the least recently used ones to make room."""
        if block.nbytes > self.hot.largest_arena:
            return
        while True:
            with self.lock:
                if block.memory is None or block.memory.tier is self.hot or block.doomed:
                    return
                owner = self.owner(block.namespace)
                others = partial(self._other_may_leave_memory, owner, block.number)
                if not self._keep_memory_quota(owner, block.nbytes, others):  # it lies in both for a moment
                    return
                extent = self._allocate(self.hot, block.nbytes, block.namespace)
                if extent is None and self._take_arena(self.hot, owner):
                    continue
                victim = None if extent else self._orders.victim("hot", partial(self._own_may_cool, owner))
            if extent is not None:
                self._move(block, Residence(self.hot, extent))
                return
            if victim is None or not self.demote(self.blocks[victim]):
                return

    def demote(self, block: Block) -> bool:
        """Move a hot block to warm memory, or out of memory when warm is full and flash has it."""
        with self.lock:
            if block.memory is None or block.memory.tier is not self.hot or block.leases:
                return False
            room = self.allocate_warm(block.nbytes, block.namespace)
            if room is None:
                if not self._may_leave_memory(block.number):
                    return False
                self._leave_memory(block)
                return True
        return self._move(block, room)

    def forget_memory(self, block: Block) -> bool:
        """Drop a block's place in memory, flash keeps it. False when it is held or flash has no copy."""
        with self.lock:
            if block.memory is None or block.leases or block.waiting or not block.cold_bytes:
                return False
            self._leave_memory(block)
            return True

    def forget_flash(self, block: Block) -> bool:
        """Drop a block's record, and the block where memory has it not. False when it is held or not on flash."""
        with self.lock:
            if block.leases or not block.cold_bytes:
                return False
            self._leave_cold(block)
            return True

    def check(self) -> None:
        """Raise AssertionError unless every tier's accounting adds up."""
        with self.lock:
            self._check_counts()
            for tier in (self.hot, self.warm):
                tier.check()
                held = sum(
                    block.memory.extent.size
                    for block in self.blocks.values()
                    if block.memory and block.memory.tier is tier
                )
                if held > tier.used:
                    raise AssertionError(
                        f"{tier.name}: blocks have {held} bytes, the tier counts {tier.used}"
                    )
            by_space = Counter[bytes]()
            for block in self.blocks.values():
                by_space[block.namespace.digest] += block.cold_bytes
            for digest, space in self.namespaces.items():
                if space.flash_bytes != by_space[digest]:
                    raise AssertionError(
                        f"{digest.hex()[:12]}: blocks have {by_space[digest]} bytes on flash, counted are "
                        f"{space.flash_bytes}"
                    )
            if self.cold is not None:
                held = sum(block.cold_bytes for block in self.blocks.values())
                if held > self.cold.used or self.cold.used > self.cold.total:
                    raise AssertionError(
                        f"cold: blocks {held}, used {self.cold.used}, total {self.cold.total}"
                    )

    def close(self) -> None:
        self.hot.close()
        self.warm.close()
        if self.cold is not None:
            self.cold.close(self.rows())

    # -- inside --------------------------------------------------------------------------------------------------

    def _count_leased(self, block: Block, by: int) -> None:
        if block.memory is not None:
            self.leased[block.memory.tier.name] += by
        if block.cold_bytes:
            self.leased["cold"] += by

    def _check_counts(self) -> None:
        held, leased = Counter[str](), Counter[str]()
        for block in self.blocks.values():
            tiers = [block.memory.tier.name] if block.memory is not None else []
            for name in [*tiers, *(["cold"] if block.cold_bytes else [])]:
                held[name] += 1
                leased[name] += block.leases > 0
        for name in NAMES:
            if (held[name], leased[name]) != (self.held(name), self.leased[name]):
                raise AssertionError(
                    f"{name}: {held[name]} blocks, {leased[name]} of them leased; counted are {self.held(name)} "
                    f"and {self.leased[name]}"
                )

    def _memory(self, name: str, budget: int, *, pin: bool) -> MemoryTier:
        profile = self.profile
        return MemoryTier(
            name,
            budget,
            arena_bytes=profile.arena_bytes,
            alignment=profile.alignment,
            pin=pin,
            walled=self.walled,
        )

    def _load_rows(self, cold: ColdTier) -> None:
        """Make what flash holds findable again, oldest use first so that the LRU order survives a restart."""
        rows = sorted(cold.rows.values(), key=lambda row: row.start)
        blocks = []
        for row in rows:
            block = Block(
                number=self.new_number(),
                key=row.key,
                parent_key=row.parent_key,
                namespace=self.namespace(row.identity),
                tokens=np.frombuffer(row.tokens, dtype="<i4").astype(np.int32),
                start=row.start,
                nbytes=0,  # known when the identity is opened
                exact=row.exact,
                hits=row.hits,
                last_use=row.last_use,
            )
            self._on_flash(block, row.file_bytes)
            self.blocks[block.number] = block
            standing, replaced = block.namespace.add(block)
            if standing is not block:
                self._discard(block)
                continue
            if replaced is not None:
                self._discard(replaced)
            self._follow(block, replaced)
            block.pinned = self.pins.covers(block)
            blocks.append(block)
        for block in sorted(blocks, key=lambda block: (block.last_use, -block.start)):
            if block.number in self.blocks:
                self._orders.insert("cold", block)
        cold.drop_useless(0)
        while cold.free < 0:  # the budget was lowered
            victim = self._orders.victim("cold", self._may_leave_cold)
            if victim is None:
                break
            self._leave_cold(self.blocks[victim])
        cold.rows = {}

    def _name_tenants(self, directory: DataDirectory) -> None:
        """Whose blocks on flash are, which counts against quotas before anybody opens their identity."""
        for digest, description in directory.identities().items():
            if (space := self.namespaces.get(digest)) is not None:
                with contextlib.suppress(ValueError):
                    space.tenant = Identity.from_bytes(description).tenant_salt

    def _register(self, block: Block) -> None:
        self.blocks[block.number] = block
        if block.memory is not None:
            self.used_at = block.last_use
            self._orders.insert_new(block.memory.tier.name, block)

    def _use(self, blocks: Sequence[Block]) -> None:
        """A request reads these blocks, root first."""
        self.used_at = now = time.time()
        for block in blocks:
            block.hits += 1
            block.last_use = now
            if self.cold is not None:
                self.unwritten.use(block)
        self.recent.used(blocks)
        self._orders.use(blocks)

    def _written_today(self) -> int:
        return 0 if self.cold is None else self.cold.writes.spent

    def _follow(self, block: Block, replaced: Block | None) -> Block | None:
        """A block is new: it goes on with a conversation, or begins one; the block behind which prompts part."""
        block.session = block.number
        above = block.namespace.parent(block)
        if replaced is not None:
            block.session = replaced.session
        elif above is not None and not above.behind:
            block.session = above.session
        if above is None or block.key in above.behind or len(above.behind) >= PARTED:
            return None
        before = above.behind
        if replaced is not None:
            before = tuple(key for key in before if key != replaced.key)
        above.behind = (*before, block.key)
        return above if len(above.behind) >= PARTED else None

    def _allocate(self, tier: MemoryTier, nbytes: int, space: Namespace) -> Extent | None:
        return tier.allocate(nbytes, self.owner(space), space.layout.block_bytes(self.profile.block_tokens))

    def _keep_memory_quota(self, owner: bytes, nbytes: int, may_leave: Callable[[int], bool]) -> bool:
        """Have a tenant's blocks of the least worth leave memory until he may have so much more; whether he may."""
        while self._exceeds_memory_quota(owner, nbytes):
            victim = self._orders.victim("warm", may_leave)
            if victim is None:
                victim = self._orders.victim("hot", may_leave)
            if victim is None:
                return False
            self._leave_memory(self.blocks[victim])
        return True

    def _exceeds_memory_quota(self, owner: bytes, nbytes: int) -> bool:
        limit = self.profile.tenant_memory_bytes
        if limit is None or not self.walled:
            return False
        return self.hot.used_by[owner] + self.warm.used_by[owner] + self.warm.round_up(nbytes) > limit

    def _exceeds_flash_quota(self, owner: bytes, nbytes: int) -> bool:
        limit = self.profile.tenant_cold_bytes
        if limit is None or not self.walled or self.cold is None:
            return False
        return self.flash_used(owner) + self.cold.room(nbytes) > limit

    def _on_flash(self, block: Block, size: int) -> None:
        """A block occupies `size` there from now on."""
        block.namespace.flash_bytes += size - block.cold_bytes
        block.cold_bytes = size

    def _take_arena(self, tier: MemoryTier, owner: bytes) -> bool:
        """Empty an arena of an owner who has more memory than `owner`, so that it can be given up; whether one was.

        Of those who have the most, the arena that was used longest ago goes. What is leased, pinned or waits for flash
        keeps its arena in place. Owners that have an arena less than others leave it at that.
        """
        if not tier.walled:
            return False
        owned = tier.owned()
        mine = owned[owner]
        rich = {
            number: owned[tier.owner(number)]
            for number, arena in tier.arenas.items()
            if tier.owner(number) != owner
            and (not mine or owned[tier.owner(number)] - arena.size >= mine + arena.size)
        }
        if not rich:
            return False
        lying: dict[int, list[Block]] = {number: [] for number in rich}
        for block in self.blocks.values():
            if block.memory is not None and block.memory.tier is tier and block.memory.extent.arena in lying:
                lying[block.memory.extent.arena].append(block)
        used = {number: max((block.last_use for block in lying[number]), default=0.0) for number in rich}
        return any(
            self._empty(tier, number, lying[number])
            for number in sorted(rich, key=lambda number: (-rich[number], used[number]))
        )

    def _empty(self, tier: MemoryTier, number: int, blocks: list[Block]) -> bool:
        """Have all blocks of an arena leave memory. Nothing changes where one of them has to stay."""
        if any(block.leases or block.doomed or self._stays(block) for block in blocks):
            return False
        here = {block.number for block in blocks}
        for block in self.unwritten.decide_among(lambda block: block.number in here):
            if block.waiting:
                self.changed.notify_all()
        if any(block.waiting for block in blocks):
            return False
        for block in sorted(blocks, key=lambda block: -block.start):
            if block.number in self.blocks and block.memory is not None:
                if not self._may_leave_memory(block.number):
                    return False
                self._leave_memory(block)
        return tier.is_empty(number)

    def _own_may_leave_memory(self, owner: bytes, number: int) -> bool:
        return self.owner(self.blocks[number].namespace) == owner and self._may_leave_memory(number)

    def _other_may_leave_memory(self, owner: bytes, than: int, number: int) -> bool:
        return number != than and self._own_may_leave_memory(owner, number)

    def _own_may_cool(self, owner: bytes, number: int) -> bool:
        """Whether a hot block may go to warm memory."""
        block = self.blocks[number]
        return self.owner(block.namespace) == owner and not (block.leases or self._stays(block))

    def _decide_until_one_may_go(self, owner: bytes) -> bool:
        """Whether a block may leave memory now that it was decided on; the first that is written ends the search."""
        waiting = self.unwritten.decide()
        if self.walled:
            waiting = self.unwritten.decide_among(lambda block: self.owner(block.namespace) == owner)
        for block in waiting:
            if block.waiting:
                self.changed.notify_all()
                return False
            if self._may_leave_memory(block.number):
                return True
        return False

    def _stays(self, block: Block) -> bool:
        """Whether nothing but its user may drop a block."""
        return bool(block.pinned or block.shared)

    def _retire(self, tail: Block, block: Block) -> None:
        """`block` holds what `tail` holds, and more. What of it is on flash stays there until `block` is, too."""
        if tail.cold_bytes and not block.cold_bytes:
            block.tail = tail
            return
        block.tail, tail.tail = tail.tail, None
        self._discard(tail)

    def _discard(self, block: Block) -> None:
        """Free a block that is no longer findable, at once or when its last lease ends.

        Its record gives up its name at once: the same tokens may be put again, and no stop may bring it back.
        """
        block.doomed = True
        if block.leases == 0:
            self._free(block)
        elif block.cold_bytes and self.cold is not None:
            self._orders.remove("cold", block)
            block.aside = True
            self._aside += 1
            self.cold.set_aside(block.key, block.number)

    def _free(self, block: Block) -> None:
        """Give back all that a block occupies."""
        self.unwritten.remove(block)
        if block.memory is not None:
            self._orders.remove(block.memory.tier.name, block)
            self.give_back(block.memory, wiped=block.purged)
            block.memory = None
        if block.cold_bytes and self.cold is not None:
            self._orders.remove("cold", block)
            if block.aside:
                self.cold.remove_aside(block.number, block.cold_bytes)
                self._aside -= 1
            else:
                self.cold.remove(block.key, block.cold_bytes)
            self._on_flash(block, 0)
        self.blocks.pop(block.number, None)

    def _may_leave_memory(self, number: int) -> bool:
        block = self.blocks[number]
        if block.leases or block.waiting or self._stays(block):
            return False
        if block.cold_bytes:
            return True
        return block.namespace.is_leaf(block) and not self.unwritten.is_undecided(block)

    def _leave_memory(self, block: Block) -> None:
        """Evict a block from memory. What of it is only there is lost, and a shorter one on flash serves again."""
        assert block.memory is not None
        self.counts[f"evicted_{block.memory.tier.name}"] += 1
        if not block.cold_bytes:
            tail, block.tail = block.tail, None
            self.drop(block)
            if tail is not None and tail.number in self.blocks and block.namespace.add(tail)[0] is not tail:
                self._discard(tail)
            return
        self._orders.remove(block.memory.tier.name, block)
        block.memory.tier.release(block.memory.extent)
        block.memory = None

    def _may_leave_cold(self, number: int) -> bool:
        block = self.blocks[number]
        return block.leases == 0 and not self._stays(block) and block.namespace.is_leaf(block)

    def _own_may_leave_cold(self, owner: bytes, number: int) -> bool:
        return self.owner(self.blocks[number].namespace) == owner and self._may_leave_cold(number)

    def _leave_cold(self, block: Block) -> None:
        assert self.cold is not None
        self.counts["evicted_cold"] += 1
        self._orders.remove("cold", block)
        self.cold.remove(block.key, block.cold_bytes)
        self._on_flash(block, 0)
        if block.memory is None:
            self.drop(block)
        else:
            self._orders.changed(block)

    def _only_ours(self, block: Block) -> bool:
        return block.leases == 1 and not block.doomed

    def _move(self, block: Block, room: Residence) -> bool:
        """Copy a block to `room` and give its old place back, unless someone took a lease meanwhile."""
        with self.lock:
            old = block.memory
            if old is None or block.leases > 0 or block.doomed:
                self.give_back(room)  # nothing was copied yet
                return False
            self.acquire([block], used=False)
            source = self.raw(block)
            target = room.tier.view(room.extent, block.nbytes)
        target[:] = source
        with self.lock:
            moved = self._only_ours(block)
            if moved:
                self._orders.remove(old.tier.name, block)
                old.tier.release(old.extent)
                block.memory = room
                self._orders.insert(room.tier.name, block)
                if self.unwritten.is_undecided(block):
                    self._orders.keep("warm", block)
                self.leased[old.tier.name] -= 1
                self.leased[room.tier.name] += 1
                self.counts[f"moved_{old.tier.name}_{room.tier.name}"] += 1
            else:
                self.give_back(room, wiped=block.purged)
            self.release([block])
        return moved
