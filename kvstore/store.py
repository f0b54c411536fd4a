"""The store as an engine sees it: look up, lease, load, put.

    store = kvstore.open("~/kv", identity=identity)
    match = store.lookup(tokens)                  # no side effects
    with store.lease(match) as lease:             # from here on nothing of it moves
        known = lease.load_into(buffer)           # keys and values of tokens[:known] are in place
    ...                                           # the engine computes the rest
    store.put(tokens, buffer)                     # what is new becomes findable

One open directory serves several identities: `store.view(identity)` shares tiers and budgets, never KV.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.index.tokens import token_ids

from . import explain as explanation
from .block import Block, block_key
from .buffer import KvBuffer, check_buffer
from .directory import DataDirectory
from .errors import BudgetError, InvalidRequestError, InvalidTokensError, StoreClosedError
from .identity import Identity
from .layout import capabilities
from .lease import Lease
from .namespace import ROOT_KEY
from .profile import CPU, Profile
from .record import BadRecordError
from .stats import Stats, collect
from .tiers import Tiers
from .write_behind import WriteBehind

_IO_THREADS = 2

EXACT_ONLY = "layout permits exact reuse only"


class Match(NamedTuple):
    """What a look-up found: the first `length` of the tokens asked for are held, in these blocks."""

    length: int
    blocks: tuple[Block, ...]


class PutResult(NamedTuple):
    """What a put did, in tokens: `stored` are new, `held` were there already, `refused` were not kept, and why."""

    stored: int
    held: int
    refused: int
    reason: str | None = None


class _Shared:
    """What all views of one open directory share."""

    def __init__(self, path: Path | None, profile: Profile) -> None:
        self.directory = None if path is None else DataDirectory(path, profile.block_tokens)
        try:
            self.tiers = Tiers(profile, self.directory)
        except BaseException:
            if self.directory is not None:
                self.directory.close()
            raise
        self.worker = WriteBehind(self.tiers)
        self.pool = ThreadPoolExecutor(_IO_THREADS, thread_name_prefix="kvstore-load")


class KVStore:
    """Holds KV of one identity in the tiers of one directory. Thread-safe. A context manager; see `open_store`."""

    def __init__(self, shared: _Shared, identity: Identity) -> None:
        self._shared = shared
        self._tiers = shared.tiers
        self.identity = identity
        self.layout = identity.layout
        self.path = None if shared.directory is None else shared.directory.path
        self.capabilities = capabilities(identity.layout)
        self._exact = self.capabilities.reuse == "exact"
        self._digest = identity.digest()
        profile = shared.tiers.profile
        self.block_tokens = profile.block_tokens
        needed = self.layout.block_bytes(profile.block_tokens)
        if needed > shared.tiers.warm.largest_arena:
            raise BudgetError(
                f"a block of {profile.block_tokens} tokens needs {needed} bytes, warm memory has at most "
                f"{shared.tiers.warm.largest_arena} in one piece; raise warm_bytes and arena_bytes"
            )
        if shared.directory is not None:
            with contextlib.suppress(
                OSError
            ):  # a note for tools; a full disk does not keep anyone from reading
                shared.directory.keep_identity(self._digest, identity.to_bytes())
        with self._tiers.lock:
            self._namespace = self._tiers.namespace(self._digest)
            self._namespace.open(identity, profile.frame_bytes)

    # -- reading ----------------------------------------------------------------------------------------------------

    def lookup(self, tokens: ArrayLike) -> Match:
        """The longest prefix of `tokens` (integers [n]) that is held. Changes nothing. Raises InvalidTokensError."""
        ids = _checked(tokens)
        with self._lock():
            found, reached = self._namespace.match(ids)
            blocks, length = self._usable(ids, found, reached)
            if length < reached:
                self._tiers.misses[EXACT_ONLY] += reached - length
            self._tiers.counts["tokens_asked"] += len(ids)
            self._tiers.counts["tokens_matched"] += length
            self._tiers.counts["lookups"] += 1
        return Match(length, tuple(blocks))

    def _usable(self, ids: NDArray[np.int32], blocks: list[Block], length: int) -> tuple[list[Block], int]:
        """What of a match may be used: all, or for exact reuse the longest prompt that was stored as a whole."""
        if not self._exact:
            return blocks, length
        for count in range(len(blocks), 0, -1):
            end = blocks[count - 1].start + blocks[count - 1].length
            if end <= length and self._stored_as_one(ids[:end], blocks[:count]):
                return blocks[:count], end
        return [], 0

    def _stored_as_one(self, ids: NDArray[np.int32], blocks: Sequence[Block]) -> bool:
        seed, key = self._key_seed(ids), ROOT_KEY
        for block in blocks:
            key = block_key(seed, key, block.tokens)
            if key != block.key:
                return False
        return True

    def _key_seed(self, ids: NDArray[np.int32]) -> bytes:
        """What keys of a prompt's blocks start from. For exact reuse all its tokens go in: no block is shared."""
        return block_key(self._digest, ROOT_KEY, ids) if self._exact else self._digest

    def lease(self, match: Match) -> Lease:
        """Hold what `match` found. What vanished since makes the lease shorter, possibly empty; nothing fails."""
        with self._lock():
            blocks: list[Block] = []
            length = 0
            for block in match.blocks:
                if not self._namespace.holds(block):
                    self._tiers.misses["evicted between look-up and lease"] += match.length - length
                    break
                blocks.append(block)
                length = min(block.start + block.length, match.length)
            if length < match.length and self._exact:
                blocks, length = [], 0
            self._tiers.acquire(blocks, used=True)
            return Lease(
                self._tiers, self._shared.worker, self._shared.pool, blocks, length, whole=self._exact
            )

    # -- writing ----------------------------------------------------------------------------------------------------

    def put(
        self,
        tokens: ArrayLike,
        kv: KvBuffer,
        start: int = 0,
        slots: NDArray[np.int64] | None = None,
        *,
        wait: float = 0.0,
    ) -> PutResult:
        """Keep the KV of `tokens`, so far as it is not held yet.

        tokens: integers [n], from position 0. kv: arrays a layer, keys and values [kv_heads, rows, head_dim]; row i
        is token `start` + i, or with `slots` (int64 [n - start]) row slots[i] is. The KV must come from the exact
        prefix `tokens[:start]`. Only what is missing is copied; the caller may reuse its buffer at once.

        When warm memory is full of what waits for flash, the rest is refused, after at most `wait` seconds.
        Raises InvalidTokensError, LayoutMismatchError, BufferTooSmallError, InvalidRequestError.
        """
        ids = _checked(tokens)
        if not isinstance(start, (int, np.integer)) or not 0 <= start < len(ids):
            raise InvalidRequestError(f"start {start!r} must lie in the {len(ids)} tokens given")
        check_buffer(kv, self.layout, len(ids) - start, slots)
        with self._lock():
            path, held = self._namespace.match(ids)
            if held < start:
                self._tiers.refusals["prefix not held"] += len(ids) - start
                return PutResult(0, 0, len(ids) - start, f"only {held} of the {start} tokens before are held")
            if self._exact:
                if self._usable(ids, path, held)[1] == len(ids):
                    return PutResult(0, len(ids), 0)
                if start:
                    self._tiers.refusals[EXACT_ONLY] += len(ids) - start
                    return PutResult(0, 0, len(ids) - start, f"{EXACT_ONLY}: put the prompt from its start")
                for other in self._namespace.below(ids[: self.block_tokens]):
                    self._tiers.drop(other)  # two prompts cannot share a block, the newer one stays
                path, held = [], 0
            self._tiers.acquire(path, used=True)
        leased = list(path)
        try:
            return self._put_blocks(ids, kv, start, slots, leased, held, time.monotonic() + wait)
        finally:
            with self._tiers.lock:
                self._tiers.release(leased)

    def _put_blocks(
        self,
        ids: NDArray[np.int32],
        kv: KvBuffer,
        start: int,
        slots: NDArray[np.int64] | None,
        path: list[Block],
        held: int,
        deadline: float,
    ) -> PutResult:
        """Add block after block behind the full blocks of `path`, which is leased and grows."""
        if held == len(ids):
            return PutResult(0, held, 0)
        size = self.block_tokens
        stored = 0
        first = held // size
        parent = path[first - 1] if first else None
        seed = self._key_seed(ids)
        for begin in range(first * size, len(ids), size):
            piece = ids[begin : begin + size]
            block, reason = self._fill(seed, begin, piece, parent, kv, start, slots, path, deadline)
            if block is None:
                refused = len(ids) - max(begin, held)
                with self._tiers.lock:
                    self._tiers.refusals[reason] += refused
                return PutResult(stored, held, refused, reason)
            with self._tiers.lock:
                standing = self._tiers.add(block)
                if standing is None:
                    reason = "another block has its key"
                    self._tiers.refusals[reason] += len(ids) - max(begin, held)
                    return PutResult(stored, held, len(ids) - max(begin, held), reason)
                self._tiers.acquire([standing], used=False)
                path.append(standing)
                if standing is block:
                    stored += begin + len(piece) - max(begin, held)
                    self._tiers.counts["tokens_stored"] += begin + len(piece) - max(begin, held)
                    self._shared.worker.submit(block)
            parent = standing
        return PutResult(stored, held, 0)

    def _fill(
        self,
        seed: bytes,
        begin: int,
        piece: NDArray[np.int32],
        parent: Block | None,
        kv: KvBuffer,
        start: int,
        slots: NDArray[np.int64] | None,
        path: Sequence[Block],
        deadline: float,
    ) -> tuple[Block | None, str]:
        """A complete, not yet findable block of the tokens `piece` at `begin`; or None and why not."""
        nbytes = self.layout.block_bytes(len(piece))
        with self._lock():
            room = self._tiers.allocate_warm(nbytes)
            while room is None and (left := deadline - time.monotonic()) > 0:
                self._tiers.changed.wait(left)
                room = self._tiers.allocate_warm(nbytes)
            if room is None:
                return None, "warm tier full of what is leased or waits for flash"
            number = self._tiers.new_number()
            raw = room.tier.view(room.extent, nbytes)
        parent_key = ROOT_KEY if parent is None else parent.key
        block = Block(
            number=number,
            key=block_key(seed, parent_key, piece),
            parent_key=parent_key,
            namespace=self._namespace,
            tokens=piece.copy(),
            start=begin,
            nbytes=nbytes,
            memory=room,
            last_use=time.time(),
        )
        try:
            kept = max(0, start - begin)  # tokens that the caller did not give: another block holds them
            if kept and (reason := self._copy_held(raw, len(piece), kept, path[-1])):
                with self._tiers.lock:
                    self._tiers.give_back(room)
                return None, reason
            self._copy_given(raw, begin, len(piece), kept, kv, start, slots)
        except BaseException:
            with self._tiers.lock:
                self._tiers.give_back(room)
            raise
        return block, ""

    def _copy_given(
        self,
        raw: NDArray[np.uint8],
        begin: int,
        length: int,
        kept: int,
        kv: KvBuffer,
        start: int,
        slots: NDArray[np.int64] | None,
    ) -> None:
        """Copy the caller's rows for tokens begin + kept .. begin + length into a block."""
        rows = slice(begin + kept - start, begin + length - start)
        layers = range(len(self.layout.layers))
        for layer, key, value in self.layout.layer_views(raw, layers, length):
            for target, source in ((key, kv.keys[layer]), (value, kv.values[layer])):
                assert source is not None  # checked with the buffer
                target[:, kept:] = source[:, rows] if slots is None else source[:, slots[rows]]

    def _copy_held(self, raw: NDArray[np.uint8], length: int, kept: int, source: Block) -> str | None:
        """Copy the first `kept` tokens of a block from the sibling that holds them. Returns why it cannot."""
        with self._tiers.lock:
            held = self._tiers.raw(source) if source.memory is not None else None
        if held is None:
            held = np.empty(source.nbytes, dtype=np.uint8)
            try:
                reader = self._tiers.open_record(source)
                try:
                    reader.read(0, held)
                finally:
                    reader.close()
            except BadRecordError as error:
                with self._tiers.lock:
                    self._tiers.quarantine(source, error)
                return f"bad record: {error.reason}"
        layers = range(len(self.layout.layers))
        for (_, *into), (_, *out) in zip(
            self.layout.layer_views(raw, layers, length),
            self.layout.layer_views(held, layers, source.length),
            strict=True,
        ):
            for target, origin in zip(into, out, strict=True):
                target[:, :kept] = origin[:, :kept]
        return None

    # -- administration ---------------------------------------------------------------------------------------------

    def view(self, identity: Identity) -> KVStore:
        """The same directory, tiers and budgets for another identity; KV of the two never mixes."""
        with self._lock():
            return KVStore(self._shared, identity)

    def invalidate(
        self,
        *,
        prefix: ArrayLike | None = None,
        adapter: str | None = None,
        older_than: float | None = None,
        everything: bool = False,
    ) -> int:
        """Forget blocks, at once for look-ups, in the tiers as soon as no lease names them; returns how many.

        Exactly one of: `prefix`, all that starts with these tokens, in this identity; `adapter`, all KV made with
        the adapter of this content digest, in every identity; `older_than`, what no request used for so many
        seconds, in every identity; `everything`, in every identity.
        """
        if sum((prefix is not None, adapter is not None, older_than is not None, everything)) != 1:
            raise InvalidRequestError("give exactly one of prefix, adapter, older_than, everything")
        ids = None if prefix is None else _checked(prefix)
        with self._lock():
            if ids is not None:
                doomed = self._namespace.below(ids)
            else:
                doomed = [
                    block for space in self._tiers.namespaces.values() for block in space.below(_NO_TOKENS)
                ]
            if adapter is not None:
                using = self._digests_with(adapter)
                doomed = [block for block in doomed if block.namespace.digest in using]
            if older_than is not None:
                horizon = time.time() - older_than
                doomed = [block for block in doomed if block.last_use < horizon]
            for block in doomed:
                self._tiers.drop(block)
            self._tiers.counts["invalidated"] += len(doomed)
        return len(doomed)

    def promote(self, match: Match, to: Literal["warm", "hot"] = "hot") -> None:
        """Bring the blocks of a match nearer to the NPU, as far as there is room: from flash to warm, then to hot."""
        with self.lease(match) as lease:
            lease.warm_up()
            blocks = lease.blocks
        if to == "hot":
            for block in blocks:
                self._tiers.promote(block)

    def demote(self, match: Match) -> int:
        """Drop what memory holds of a match and flash holds too; returns how many blocks left memory."""
        with self._lock():
            return sum(self._tiers.forget_memory(block) for block in reversed(match.blocks))

    def flush(self, timeout: float | None = None) -> None:
        """Return once all that was put before is durable: on the medium, and findable after any stop.

        What the tiers refused (see `stats().refusals`) is not. Raises OSError when the medium does not take it,
        TimeoutError.
        """
        self._open()
        self._shared.worker.flush().result(timeout)

    def stats(self) -> Stats:
        """Budgets and use of each tier, counters, and why things were refused or missed."""
        with self._lock():
            return collect(self._tiers, self._shared.worker)

    def explain(self, tokens: ArrayLike) -> explanation.Explanation:
        """Where each of `tokens` would come from, and why not from somewhere nearer. Changes nothing."""
        ids = _checked(tokens)
        with self._lock():
            found, reached = self._namespace.match(ids)
            blocks, length = self._usable(ids, found, reached)
            reason = EXACT_ONLY if length < reached else None
            return explanation.explain(
                ids, blocks, length, self._namespace, self._tiers, self.identity, reason
            )

    def check(self) -> None:
        """Raise AssertionError unless free + used = total in each tier."""
        self._open()
        self._tiers.check()

    def close(self) -> None:
        """Write what waits, seal the index, give the directory up. Of all views, the first close counts."""
        with self._tiers.lock:
            if self._tiers.closed:
                return
            self._tiers.closed = True
        self._shared.worker.close()
        self._shared.pool.shutdown(wait=True)
        self._tiers.close()
        if self._shared.directory is not None:
            self._shared.directory.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _digests_with(self, adapter: str) -> set[bytes]:
        """Identity digests whose adapters include this one, as far as their description is known."""
        known = {digest: space.identity for digest, space in self._tiers.namespaces.items() if space.identity}
        if self._shared.directory is not None:
            for digest, description in self._shared.directory.identities().items():
                with contextlib.suppress(ValueError):
                    known.setdefault(digest, Identity.from_bytes(description))
        return {
            digest
            for digest, identity in known.items()
            if any(each.digest == adapter for each in identity.adapters)
        }

    def _open(self) -> None:
        if self._tiers.closed:
            raise StoreClosedError("this store was closed; open it again")

    def _lock(self) -> Any:
        self._open()
        return self._tiers.lock


_NO_TOKENS = np.empty(0, dtype=np.int32)


def open_store(path: str | os.PathLike[str] | None, *, identity: Identity, profile: Profile = CPU) -> KVStore:
    """Open a data directory for one identity; `kvstore.open`.

    path: the directory, made when it is new; None keeps everything in memory. identity: whose KV this is, with its
    layout. profile: budgets and block size of the device.

    Raises DirectoryInUseError, DirectoryUnusableError, FormatMismatchError, BudgetError; the directory is left as
    it was then.
    """
    location = None if path is None else Path(path).expanduser()
    shared = _Shared(location, profile)
    try:
        return KVStore(shared, identity)
    except BaseException:
        shared.worker.close()
        shared.pool.shutdown()
        shared.tiers.close()
        if shared.directory is not None:
            shared.directory.close()
        raise


def _checked(tokens: ArrayLike) -> NDArray[np.int32]:
    try:
        ids = token_ids(tokens)
    except (ValueError, OverflowError, TypeError) as error:  # TokenError, or numpy's about ragged lists
        raise InvalidTokensError(str(error)) from error
    if not len(ids):
        raise InvalidTokensError("no tokens given")
    return ids
