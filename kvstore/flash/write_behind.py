"""The background thread: writes to flash what was admitted, and moves what is used again to hot memory.

A block waiting for flash is findable and readable all the while; its bytes stay in warm memory, so the warm budget
bounds the queue. A write that fails (full disk, no room) is counted with its reason; the block stays in memory until
it is evicted, and the next `flush` or `close` tries again.

When no request came for a while, blocks that wait to be decided on are: so what is likely to be used again is on flash
before a battery runs out, and room in memory is there before it is needed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from ..block import Block
from ..errors import EncryptionError, StoreClosedError
from ..tiers.quotas import TENANT_QUOTA
from ..tiers.tiers import Tiers
from . import record
from .cold import ColdTier

_GROUP = 16  # records written before a promotion gets its turn
_AHEAD = 32 << 20  # bytes of warm memory kept ready, more than a prompt puts at a time
_IDLE = 600.0  # seconds without a request

Done = TypeVar("Done")

log = logging.getLogger(__name__)


class WriteBehind:
    """One daemon thread over `tiers`. `submit`, `promote` and `flush` return at once."""

    def __init__(self, tiers: Tiers) -> None:
        self._tiers = tiers
        self._promotions: deque[Block] = deque()
        self._flushes: list[Future[None]] = []
        self._asked: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._settling: list[Future[None]] = []
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="kvstore-write-behind", daemon=True)
        self._thread.start()

    def submit(self, block: Block) -> None:
        """Queue a block that its user wants on flash. Called under the lock."""
        if self._tiers.cold is not None:
            self._tiers.unwritten.write([block], asked=True)
            self._tiers.changed.notify_all()

    @property
    def waiting(self) -> int:
        """Blocks queued for flash."""
        return len(self._tiers.unwritten.queue)

    def promote(self, block: Block) -> None:
        """Queue a warm block for hot memory. Called under the lock."""
        if block not in self._promotions:
            self._promotions.append(block)
            self._tiers.changed.notify_all()

    def settled(self) -> Future[None]:
        """Done once every promotion queued before was tried."""
        done: Future[None] = Future()
        with self._tiers.lock:
            if self._closing:
                raise StoreClosedError("this store was closed; open it again")
            self._settling.append(done)
            self._tiers.changed.notify_all()
        return done

    def flush(self) -> Future[None]:
        """Done once all that memory held is on the medium, too; holds OSError when syncing failed."""
        done: Future[None] = Future()
        with self._tiers.lock:
            if self._closing:
                raise StoreClosedError("this store was closed; open it again")
            self._flushes.append(done)
            self._write_all()
        return done

    def rewrite_index(self) -> Future[None]:
        """Done once the index on flash says nothing of what was forgotten before."""
        return self.run(self._rewrite)

    def run(self, work: Callable[[], Done]) -> Future[Done]:
        """What `work` returns or raises. It is done by the thread that writes, between two groups of records."""
        done: Future[Done] = Future()
        with self._tiers.lock:
            if self._closing:
                raise StoreClosedError("this store was closed; open it again")
            self._asked.append((work, done))
            self._tiers.changed.notify_all()
        return done

    def close(self) -> None:
        """Write all that only memory holds, then stop."""
        with self._tiers.lock:
            self._closing = True
            self._write_all()
        self._thread.join()

    def _run(self) -> None:
        tiers = self._tiers
        while True:
            tiers.warm.touch_ahead(_AHEAD)
            with tiers.lock:
                queue = tiers.unwritten.queue
                if not tiers.changed.wait_for(self._has_work, _IDLE):
                    if time.time() - tiers.used_at >= _IDLE:
                        tiers.decide()
                    continue
                flushes, self._flushes = self._flushes, []
                asked, self._asked = self._asked, []
                promotions, settling = list[Block](), list[Future[None]]()
                if not queue:
                    promotions, settling = list(self._promotions), self._settling
                    self._promotions.clear()
                    self._settling = []
                stop = self._closing and not (queue or promotions or settling or flushes or asked)
                due = len(queue) if flushes or self._closing else _GROUP
            if stop:
                self._save_vectors(all_of_them=True)
                return
            self._write_group(due)
            for block in promotions:
                self._survive(partial(tiers.promote, block), "promotion failed")
            for done in settling:
                done.set_result(None)
            if flushes:
                self._save_vectors(all_of_them=False)
            for flush in flushes:
                _do(self._sync, flush)
            for work, done in asked:
                _do(work, done)

    def _has_work(self) -> bool:
        queue = self._tiers.unwritten.queue
        asked = self._promotions or self._settling or self._flushes or self._asked
        return bool(queue or asked or self._closing) or self._tiers.warm.lacks_touched(_AHEAD // 2)

    def _write_group(self, limit: int) -> None:
        """Write up to `limit` of the blocks that wait."""
        cold, unwritten = self._tiers.cold, self._tiers.unwritten
        if cold is None or not unwritten.queue:
            return
        for _ in range(limit):
            self._tiers.warm.touch_ahead(_AHEAD)  # puts go on meanwhile
            with self._tiers.lock:
                if not unwritten.queue:
                    break
                block, asked = unwritten.queue.popleft()
                if block.doomed or block.memory is None:
                    block.waiting = False
                    continue
                self._tiers.acquire([block], used=False)
            with self._tiers.timings.stage("write"):
                self._survive(partial(self._write, cold, block, asked=asked), "write failed")
            with self._tiers.lock:
                block.waiting = False
                if not (block.cold_bytes or block.doomed):
                    unwritten.refuse(block)
                self._tiers.release([block])
        self._survive(cold.measure_overhead, "folders not measured")
        if cold.sync_is_due:
            self._survive(cold.sync, "not forced to the medium")
        if cold.index_is_due:
            self._survive(lambda: cold.write_index(self._tiers.rows()), "index not written")

    def _survive(self, work: Callable[[], None], reason: str) -> None:
        """Do something that may fail, as on a full disk, and count the reason: the thread must live."""
        try:
            work()
        except Exception as error:
            self._refuse(reason, error)

    def _write_all(self) -> None:
        if self._tiers.cold is not None:
            self._tiers.unwritten.write_all()
        self._tiers.changed.notify_all()

    def _write(self, cold: ColdTier, block: Block, *, asked: bool) -> None:
        if not cold.may_write(block.nbytes):
            self._refuse(
                "today's write budget is spent", f"{cold.writes.spent} bytes of {cold.writes.per_day}"
            )
            return
        namespace = block.namespace
        try:
            cipher = cold.ciphers.of(namespace.digest)
        except EncryptionError as error:
            self._refuse("no key", error)
            return
        raw = self._tiers.raw(block)
        header, pieces = record.encode(
            identity=namespace.digest,
            key=block.key,
            parent_key=block.parent_key,
            start=block.start,
            tokens=block.tokens,
            exact=block.exact,
            raw=raw,
            layout=namespace.layout,
            groups=namespace.layer_groups,
            with_codec=namespace.codec,
            cipher=cipher,
        )
        with self._tiers.lock:
            nbytes = sum(len(piece) for piece in pieces)
            head_bytes = nbytes - sum(frame.length for frame in header.frames[1:])
            owner = self._tiers.owner(namespace)
            reserved = self._tiers.reserve_cold(nbytes, None if asked else block, owner)
            over_quota = reserved is None and self._tiers.quotas.exceeds_flash(owner, nbytes)
        if reserved is None:
            reason = "cold tier full" if asked else "cold tier full of what is worth more"
            if over_quota:
                reason = TENANT_QUOTA
            self._refuse(reason, f"no room for {block.key.hex()[:16]}")
            return
        try:
            size = cold.write(block.key, pieces, reserved, cipher)
        except OSError as error:
            with self._tiers.lock:
                cold.release(reserved)
            self._refuse("disk full or not writable", error)
            return
        with self._tiers.lock:
            cold.release(reserved - size)
            self._tiers.written(block, size, head_bytes)

    def _save_vectors(self, *, all_of_them: bool) -> None:
        for semantics in self._tiers.semantics():
            save = partial(semantics.save, self._tiers, all_of_it=all_of_them)
            self._survive(save, "vectors not saved")

    def _refuse(self, reason: str, detail: object) -> None:
        """Count a reason; the first time it is worth a line in the log, a full disk would fill it."""
        with self._tiers.lock:
            first = not self._tiers.refusals[reason]
            self._tiers.refusals[reason] += 1
        unexpected = detail if isinstance(detail, Exception) and not isinstance(detail, OSError) else None
        level = logging.WARNING if first or unexpected else logging.DEBUG
        log.log(level, "%s: %s", reason, detail, exc_info=unexpected)

    def _rewrite(self) -> None:
        if self._tiers.cold is not None:
            self._tiers.cold.forget_index(self._tiers.rows())

    def _sync(self) -> None:
        if self._tiers.cold is not None:
            self._tiers.cold.sync()


def _do(work: Callable[[], Done], done: Future[Done]) -> None:
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
