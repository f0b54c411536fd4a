"""Where blocks lie: hot and warm memory, cold flash, and the moves between them.

    put            -> warm, findable at once, queued for flash
    write-behind   warm -> also cold
    warm is full   the least recently used block that flash holds leaves memory; one that flash does not hold
                   is dropped, leaves first
    lease          cold -> also warm, on the way into the engine's buffer
    used again     warm -> hot; hot is full: hot -> warm

A block has at most one place in memory and at most one on flash. All bookkeeping happens under one lock, copies and
file operations outside it, on blocks that are held by a lease meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvstore.prefetch.eviction import LeafFirstLru
from kvstore.prefetch.load_or_recompute import Throughput

from .block import Block, Residence
from .cold import ColdTier
from .cold_index import Row
from .directory import DataDirectory
from .errors import DirectoryUnusableError
from .memory import MemoryTier
from .namespace import Namespace
from .profile import Profile
from .record import BadRecordError, NotNowError, RecordReader
from .semantics import Semantics

log = logging.getLogger(__name__)


class Tiers:
    """The three tiers of one data directory (or of none: then there is no cold tier) and all blocks in them."""

    def __init__(self, profile: Profile, directory: DataDirectory | None) -> None:
        self.profile = profile
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
        self.closed = False
        self.abandoned: deque[list[Block]] = deque()
        """What leases held that were collected without a release; `reap` gives it back. Appended to by any thread."""
        self.leased: Counter[str] = Counter()
        """Blocks of each tier that a lease names."""
        self._aside = 0  # records of dropped blocks that wait for a lease to end
        self._order = {"hot": LeafFirstLru(), "warm": LeafFirstLru(), "cold": LeafFirstLru()}
        self._next_number = 0
        self.cold: ColdTier | None = None
        if directory is not None and profile.cold_bytes:
            try:
                self.cold = ColdTier(
                    directory, profile.cold_bytes, profile.block_tokens, profile.cold_bytes_per_day
                )
            except OSError as error:
                raise DirectoryUnusableError(f"{directory.path} cannot be read: {error}") from error
            self._load_rows(self.cold)
        self.hot = self._memory("hot", profile.hot_bytes, pin=True)
        self.warm = self._memory("warm", profile.warm_bytes, pin=False)

    # -- finding ------------------------------------------------------------------------------------------------

    def namespace(self, digest: bytes) -> Namespace:
        """The namespace of an identity digest, made when it is new."""
        found = self.namespaces.get(digest)
        if found is None:
            found = self.namespaces[digest] = Namespace(digest, self.profile.block_tokens)
        return found

    def semantics(self) -> list[Semantics]:
        """Of every identity that has an embedder."""
        with self.lock:
            spaces = self.namespaces.values()
            return [space.semantics for space in spaces if space.semantics is not None]

    def new_number(self) -> int:
        self._next_number += 1
        return self._next_number

    # -- leases -------------------------------------------------------------------------------------------------

    def acquire(self, blocks: Sequence[Block], *, used: bool) -> None:
        """Keep blocks from being moved or dropped. `used` says that a request reads them, which keeps them young."""
        for block in blocks:
            if block.leases == 0:
                self._count_leased(block, 1)
            block.leases += 1
        if used:
            path = [block.number for block in blocks]
            now = time.time()
            for block in blocks:
                block.hits += 1
                block.last_use = now
            for order in self._order.values():
                order.touch(path)

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
        return len(self._order[name]) + (self._aside if name == "cold" else 0)

    # -- adding and dropping ------------------------------------------------------------------------------------

    def allocate_warm(self, nbytes: int) -> Residence | None:
        """Room in warm memory, made by evicting where needed; None when all of it is held or waits for flash."""
        if nbytes > self.warm.largest_arena:
            return None
        self.reap()
        while (extent := self.warm.allocate(nbytes)) is None:
            victim = self._order["warm"].victim(self._may_leave_memory)
            if victim is None:
                return None
            self._leave_memory(self.blocks[victim])
        return Residence(self.warm, extent)

    def add(self, block: Block) -> Block | None:
        """Make a complete block findable; the block that stands for its tokens now.

        None when another block has its key; it is freed then.
        """
        namespace = block.namespace
        standing, replaced = namespace.add(block)
        if standing is not block:
            self._free(block)
            return standing
        self._register(block)
        if replaced is not None:
            self._retire(replaced, block)
        for double in namespace.adopt_orphans(block):
            self._discard(double)
        return block

    def drop(self, block: Block) -> None:
        """Remove a block from the index and from every tier; from the tiers only once no lease names it."""
        block.namespace.forget(block)
        if block.tail is not None:
            self._discard(block.tail)
            block.tail = None
        self._discard(block)

    def settle(self, block: Block, residence: Residence) -> None:
        """Give a block that was only on flash its place in memory; a double of one that has one is freed."""
        if block.memory is not None or block.doomed:
            residence.tier.release(residence.extent)
            return
        block.memory = residence
        self._order[residence.tier.name].insert(block.number)
        self.leased[residence.tier.name] += block.leases > 0

    def give_back(self, residence: Residence) -> None:
        """Free memory that no block came to own."""
        residence.tier.release(residence.extent)
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
            block.cold_bytes = 0
            self.leased["cold"] -= block.leases > 0
            self._order["cold"].remove(block.number)
        self.drop(block)

    def reserve_cold(self, nbytes: int) -> int | None:
        """Room on flash for a record, made by evicting leaves; None when the rest is held or carries others."""
        assert self.cold is not None
        if nbytes > self.cold.total:
            return None
        while (size := self.cold.reserve(nbytes)) is None:
            victim = self._order["cold"].victim(self._may_leave_cold)
            if victim is None:
                return None
            self._leave_cold(self.blocks[victim])
        return size

    def written(self, block: Block, size: int) -> None:
        """A block's record is on flash."""
        assert self.cold is not None
        if block.doomed:
            self.cold.remove(block.key, size)
            return
        block.cold_bytes = size
        self._order["cold"].insert(block.number)
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
                extent = self.hot.allocate(block.nbytes)
                victim = (
                    None
                    if extent
                    else self._order["hot"].victim(lambda number: self.blocks[number].leases == 0)
                )
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
            room = self.allocate_warm(block.nbytes)
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
        for name in self._order:
            if (held[name], leased[name]) != (self.held(name), self.leased[name]):
                raise AssertionError(
                    f"{name}: {held[name]} blocks, {leased[name]} of them leased; counted are {self.held(name)} "
                    f"and {self.leased[name]}"
                )

    def _memory(self, name: str, budget: int, *, pin: bool) -> MemoryTier:
        profile = self.profile
        return MemoryTier(name, budget, arena_bytes=profile.arena_bytes, alignment=profile.alignment, pin=pin)

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
                cold_bytes=row.file_bytes,
                hits=row.hits,
                last_use=row.last_use,
            )
            self.blocks[block.number] = block
            standing, replaced = block.namespace.add(block)
            if standing is not block:
                self._discard(block)
                continue
            if replaced is not None:
                self._discard(replaced)
            blocks.append(block)
        for block in sorted(blocks, key=lambda block: (block.last_use, -block.start)):
            if block.number in self.blocks:
                self._order["cold"].insert(block.number)
        while cold.free < 0:  # the budget was lowered
            victim = self._order["cold"].victim(self._may_leave_cold)
            if victim is None:
                break
            self._leave_cold(self.blocks[victim])
        cold.rows = {}

    def _register(self, block: Block) -> None:
        self.blocks[block.number] = block
        if block.memory is not None:
            self._order[block.memory.tier.name].insert(block.number)

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
            self._order["cold"].remove(block.number)
            block.aside = True
            self._aside += 1
            self.cold.set_aside(block.key, block.number)

    def _free(self, block: Block) -> None:
        """Give back all that a block occupies."""
        if block.memory is not None:
            self._order[block.memory.tier.name].remove(block.number)
            block.memory.tier.release(block.memory.extent)
            block.memory = None
        if block.cold_bytes and self.cold is not None:
            self._order["cold"].remove(block.number)
            if block.aside:
                self.cold.remove_aside(block.number, block.cold_bytes)
                self._aside -= 1
            else:
                self.cold.remove(block.key, block.cold_bytes)
            block.cold_bytes = 0
        self.blocks.pop(block.number, None)

    def _may_leave_memory(self, number: int) -> bool:
        block = self.blocks[number]
        if block.leases or block.waiting:
            return False
        return block.cold_bytes > 0 or block.namespace.is_leaf(block)

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
        self._order[block.memory.tier.name].remove(block.number)
        block.memory.tier.release(block.memory.extent)
        block.memory = None

    def _may_leave_cold(self, number: int) -> bool:
        block = self.blocks[number]
        return block.leases == 0 and block.namespace.is_leaf(block)

    def _leave_cold(self, block: Block) -> None:
        assert self.cold is not None
        self.counts["evicted_cold"] += 1
        self._order["cold"].remove(block.number)
        self.cold.remove(block.key, block.cold_bytes)
        block.cold_bytes = 0
        if block.memory is None:
            self.drop(block)

    def _only_ours(self, block: Block) -> bool:
        return block.leases == 1 and not block.doomed

    def _move(self, block: Block, room: Residence) -> bool:
        """Copy a block to `room` and give its old place back, unless someone took a lease meanwhile."""
        with self.lock:
            old = block.memory
            if old is None or block.leases > 0 or block.doomed:
                self.give_back(room)
                return False
            self.acquire([block], used=False)
            source = self.raw(block)
            target = room.tier.view(room.extent, block.nbytes)
        target[:] = source
        with self.lock:
            moved = self._only_ours(block)
            if moved:
                self._order[old.tier.name].remove(block.number)
                old.tier.release(old.extent)
                block.memory = room
                self._order[room.tier.name].insert(block.number)
                self.leased[old.tier.name] -= 1
                self.leased[room.tier.name] += 1
                self.counts[f"moved_{old.tier.name}_{room.tier.name}"] += 1
            else:
                self.give_back(room)
            self.release([block])
        return moved
