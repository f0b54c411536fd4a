"""Where blocks lie: hot and warm memory, cold flash, and the moves between them.

    put            -> warm, findable at once
    warm fills     what was used longest ago is decided on: likely to be used again, warm -> also cold, else it may go;
                   so is all when no request comes for long
    flush, close   warm -> also cold, all of it
    warm is full   the block of the least worth that may go leaves memory; one that only memory holds is dropped,
                   leaves first
    lease          cold -> also warm, on the way into the engine's buffer
    used again     warm -> hot; hot is full: hot -> warm

A block has at most one place in memory and at most one on flash. Which may leave, and which of them goes first, is the
say of `leaving`; what may be written, that of `unwritten`; how much each tenant may have, that of `quotas`, and how one
gets room from another that of `hand_over`.

All bookkeeping happens under one lock, copies and file operations outside it, on blocks that are held by a lease
meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

from ..block import Block, Residence
from ..directory import DataDirectory
from ..flash.cold import ColdTier
from ..flash.cold_index import Row
from ..flash.record import BadRecordError, NotNowError, RecordReader
from ..namespace import Namespace
from ..profile import Profile
from . import accounts, block_record, restart
from .hand_over import take_arena
from .holdings import Holdings
from .memory import MemoryTier
from .quotas import on_flash

_UNDECIDED_SHARE = 0.75  # of warm memory, at most, may wait to be decided on


class Tiers(Holdings):
    """The three tiers of one data directory (or of none: then there is no cold tier) and all blocks in them.

    Called under `lock`, but for what takes it itself: `open_record`, `rows`, `check`, `promote`, `demote`,
    `forget_memory` and `forget_flash`.
    """

    def __init__(self, profile: Profile, directory: DataDirectory | None, *, walled: bool = False) -> None:
        super().__init__(profile, directory, walled=walled)
        if self.cold is not None:
            try:
                self.load_rows(self.cold)
            except BaseException:
                self._close_memory()
                raise

    # -- room in memory -----------------------------------------------------------------------------------------

    def allocate_warm(self, nbytes: int, space: Namespace) -> Residence | None:
        """Room in warm memory for a block of `space`, made by evicting where needed.

        None when all of it, or all of this tenant's, is held or waits for flash.
        """
        if nbytes > self.warm.largest_arena:
            return None
        self.reap()
        owner = self.owner(space)
        while True:
            if self._keep_memory_quota(owner, nbytes):
                if (room := self._room(self.warm, nbytes, space)) is not None:
                    return room
                if take_arena(self, self.warm, owner):
                    continue
                if (victim := self.leaving.from_memory("warm", owner)) is not None:
                    self.leave_memory(victim)
                    continue
            if not self._decide_until_one_may_go(owner):
                return None

    def allocate_ahead(self, block: Block, spared: Container[int]) -> Residence | None:
        """Room in warm memory for a block on flash that may be needed soon: free, or of what is worth the least.

        Nothing is written for it, so that what waits to be decided on stays, and so do the block numbers `spared`.
        """
        owner = self.owner(block.namespace)
        if not self._keep_memory_quota(owner, block.nbytes, spared):
            return None
        while (room := self._room(self.warm, block.nbytes, block.namespace)) is None:
            victim = self.leaving.from_memory("warm", owner, spared)
            if victim is None:
                return None
            self.leave_memory(victim)
        return room

    def settle(self, block: Block, residence: Residence) -> None:
        """Give a block that was only on flash its place in memory; a double of one that has one is freed."""
        if block.memory is not None or block.doomed:
            self.give_back(residence, wiped=block.purged)
            return
        block.memory = residence
        self.orders.insert(residence.tier.name, block)
        self.leased[residence.tier.name] += block.leases > 0

    def leave_memory(self, block: Block) -> None:
        """Evict a block from memory. What of it is only there is lost, and a shorter one on flash serves again."""
        assert block.memory is not None
        self.counts[f"evicted_{block.memory.tier.name}"] += 1
        if not block.cold_bytes:
            tail, block.tail = block.tail, None
            self.drop(block)
            if tail is not None and tail.number in self.blocks and block.namespace.add(tail)[0] is not tail:
                self.discard(tail)
            return
        self.orders.remove(block.memory.tier.name, block)
        block.memory.tier.release(block.memory.extent)
        block.memory = None

    def _room(self, tier: MemoryTier, nbytes: int, space: Namespace) -> Residence | None:
        """Room that is free for a block of `space`."""
        unit = space.layout.block_bytes(self.profile.block_tokens)
        extent = tier.allocate(nbytes, self.owner(space), unit)
        return None if extent is None else Residence(tier, extent)

    def _keep_memory_quota(self, owner: bytes, nbytes: int, spared: Container[int] = ()) -> bool:
        """Have a tenant's blocks of the least worth leave memory until he may have so much more; whether he may."""
        while self.quotas.exceeds_memory(owner, nbytes):
            victim = self.leaving.from_memory("warm", owner, spared)
            if victim is None:
                victim = self.leaving.from_memory("hot", owner, spared)
            if victim is None:
                return False
            self.leave_memory(victim)
        return True

    # -- deciding what is written -------------------------------------------------------------------------------

    def new_in_memory(self, block: Block) -> None:
        """A block was put. When it fills what may be undecided, others are decided on, ahead of need."""
        if self.cold is not None:
            self.unwritten.put(block)
            self.decide(self.warm.total * _UNDECIDED_SHARE)

    def decide(self, most: float = 0) -> None:
        """Have decided on what is to be written, until at most `most` bytes of memory wait for that."""
        self._wake_writer(self.unwritten.decide(most))

    def decide_among(self, among: Callable[[Block], bool]) -> None:
        """The same on all of which `among` holds."""
        self._wake_writer(self.unwritten.decide_among(among))

    def _wake_writer(self, decided: Iterable[Block]) -> None:
        for block in decided:
            if block.waiting:
                self.changed.notify_all()

    def _decide_until_one_may_go(self, owner: bytes) -> bool:
        """Whether a block may leave memory now that it was decided on; the first that is written ends the search."""
        waiting = self.unwritten.decide()
        if self.walled:
            waiting = self.unwritten.decide_among(lambda block: self.owner(block.namespace) == owner)
        for block in waiting:
            if block.waiting:
                self.changed.notify_all()
                return False
            if self.leaving.may_leave_memory(block):
                return True
        return False

    # -- flash --------------------------------------------------------------------------------------------------

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
        while owner is not None and self.quotas.exceeds_flash(owner, nbytes):
            if (victim := self.leaving.from_flash(owner, incoming, nbytes)) is None:
                return None
            self.leave_flash(victim)
        while (size := self.cold.reserve(nbytes)) is None:
            if (victim := self.leaving.from_flash(None, incoming, nbytes)) is None:
                return None
            self.leave_flash(victim)
        return size

    def written(self, block: Block, size: int, head_bytes: int) -> None:
        """A block's record is on flash; `head_bytes` as in `Row`."""
        assert self.cold is not None
        if block.doomed:
            self.cold.remove(block.key, size)
            return
        on_flash(block, size)
        block.head_bytes = head_bytes
        self.orders.insert("cold", block)
        self.orders.changed(block)
        self.leased["cold"] += block.leases > 0
        self._discard_tail(block)

    def open_record(self, block: Block, *, ahead: bool = False) -> RecordReader:
        """Open a block's record and check that it is this block. Outside the lock. Raises BadRecordError.

        ahead: its first frame is read next, so it comes with the header, in one read.
        """
        assert self.cold is not None
        return block_record.open_record(self.cold, block, self.lock, ahead=ahead)

    def quarantine(self, block: Block, error: BadRecordError) -> None:
        """A record failed a check: set it aside, count the reason, forget the block."""
        if isinstance(error, NotNowError):
            self.misses[error.reason] += 1
            return
        self.misses[f"bad record: {error.reason}"] += 1
        if self.cold is not None and block.cold_bytes and not block.aside:
            self.cold.quarantine(block.key, block.cold_bytes, error.reason)
            on_flash(block, 0)
            self.leased["cold"] -= block.leases > 0
            self.orders.remove("cold", block)
        self.drop(block)

    def leave_flash(self, block: Block) -> None:
        """Evict a block from flash; it is lost where memory has it not."""
        assert self.cold is not None
        self.counts["evicted_cold"] += 1
        self.orders.remove("cold", block)
        self.cold.remove(block.key, block.cold_bytes)
        on_flash(block, 0)
        if block.memory is None:
            self.drop(block)
        else:
            self.orders.changed(block)

    def load_rows(self, cold: ColdTier) -> None:
        """Make findable what flash holds and is new in `cold.rows`: on opening, or since a key came."""
        restart.load_rows(self, cold)

    def rows(self) -> list[Row]:
        """What the flash index is to say of each record. Takes the lock only for a moment."""
        with self.lock:
            held = [block for block in self.blocks.values() if block.cold_bytes and not block.doomed]
        return [restart.row_of(block) for block in held]

    # -- moves; they take the lock themselves, and let go of it while they copy -----------------------------------

    def promote(self, block: Block) -> None:
        """Copy a warm block into hot memory, demoting the least recently used ones to make room."""
        if block.nbytes > self.hot.largest_arena:
            return
        while True:
            with self.lock:
                if block.memory is None or block.memory.tier is self.hot or block.doomed:
                    return
                owner = self.owner(block.namespace)
                if not self._keep_memory_quota(owner, block.nbytes, (block.number,)):  # a moment in both
                    return
                room = self._room(self.hot, block.nbytes, block.namespace)
                if room is None and take_arena(self, self.hot, owner):
                    continue
                victim = None if room is not None else self.leaving.from_hot(owner)
            if room is not None:
                self._move(block, room)
                return
            if victim is None or not self.demote(victim):
                return

    def demote(self, block: Block) -> bool:
        """Move a hot block to warm memory, or out of memory when warm is full and flash has it."""
        with self.lock:
            if block.memory is None or block.memory.tier is not self.hot or block.leases:
                return False
            room = self.allocate_warm(block.nbytes, block.namespace)
            if room is None:
                if not self.leaving.may_leave_memory(block):
                    return False
                self.leave_memory(block)
                return True
        return self._move(block, room)

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
            moved = block.leases == 1 and not block.doomed  # the lease is ours
            if moved:
                self.orders.remove(old.tier.name, block)
                old.tier.release(old.extent)
                block.memory = room
                self.orders.insert(room.tier.name, block)
                if self.unwritten.is_undecided(block):
                    self.orders.keep("warm", block)
                self.leased[old.tier.name] -= 1
                self.leased[room.tier.name] += 1
                self.counts[f"moved_{old.tier.name}_{room.tier.name}"] += 1
            else:
                self.give_back(room, wiped=block.purged)
            self.release([block])
        return moved

    def forget_memory(self, block: Block) -> bool:
        """Drop a block's place in memory, flash keeps it. False when it is held or flash has no copy."""
        with self.lock:
            if block.memory is None or block.leases or block.waiting or not block.cold_bytes:
                return False
            self.leave_memory(block)
            return True

    def forget_flash(self, block: Block) -> bool:
        """Drop a block's record, and the block where memory has it not. False when it is held or not on flash."""
        with self.lock:
            if block.leases or not block.cold_bytes:
                return False
            self.leave_flash(block)
            return True

    # -- in the end ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless every tier's accounting adds up."""
        with self.lock:
            accounts.check(self)

    def close(self) -> None:
        """Seal the index on flash, give memory up. Nothing may use the tiers any more."""
        self._close_memory()
        if self.cold is not None:
            self.cold.close(self.rows())

    def _close_memory(self) -> None:
        self.hot.close()
        self.warm.close()
