"""A put: copies what is missing of a caller's KV into blocks and makes them findable, each once it is complete."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline import kernels

from .block import Block, Residence, block_key
from .buffer import KvBuffer
from .errors import StoreClosedError
from .flash.record import BadRecordError
from .namespace import ROOT_KEY, Namespace
from .tiers.quotas import TENANT_QUOTA
from .tiers.tiers import Tiers

_CONTEXT = 256  # tokens before a span that tell its capture from others of the same tokens


class PutResult(NamedTuple):
    """What a put did, in tokens: `stored` are new, `held` were there already, `refused` were not kept, and why."""

    stored: int
    held: int
    refused: int
    reason: str | None = None

    @classmethod
    def total(cls, results: Sequence[PutResult]) -> PutResult:
        """Of several, with the first reason."""
        return cls(
            sum(each.stored for each in results),
            sum(each.held for each in results),
            sum(each.refused for each in results),
            next((each.reason for each in results if each.reason), None),
        )


@dataclass(slots=True)
class _Piece:
    """A block that has room, and nothing in it yet; `new` of its tokens were not held before."""

    block: Block
    new: int


class Incoming:
    """A put in two steps: find room for what it adds, from when on `result` says what becomes of it; then `copy` it.

    start: as of `KVStore.put`. Waits at most `wait` seconds in all for room in warm memory. fresh: see `Block.fresh`,
    where more is known of it than this put shows.
    """

    def __init__(
        self, tiers: Tiers, namespace: Namespace, start: int = 0, wait: float = 0.0, fresh: int = 0
    ) -> None:
        self._tiers = tiers
        self._namespace = namespace
        self._start = start
        self._deadline = time.monotonic() + wait
        self._fresh = fresh
        self._stored = self._held = self._refused = 0
        self._reason: str | None = None
        self._pieces: deque[_Piece] = deque()
        self._leased: list[Block] = []
        self._sibling: Block | None = None  # holds the beginning of the first block to add

    @property
    def result(self) -> PutResult:
        """What becomes of the put. It changes later only by what another put adds just then, or damage on flash."""
        return PutResult(self._stored, self._held, self._refused, self._reason)

    @property
    def reads_flash(self) -> bool:
        """Whether `copy` does: it alone holds the beginning of a block of which the caller gave the rest."""
        sibling = self._sibling
        return sibling is not None and sibling.memory is None and self._start > sibling.start

    def prefix(self, ids: NDArray[np.int32], path: Sequence[Block], held: int, seed: bytes) -> None:
        """Find room for the blocks of `ids` behind the full blocks of `path`, which holds `held` tokens and is leased.

        seed: what the keys start from, the identity's digest as a rule.
        """
        self._leased = list(path)
        self._held = held
        if held < len(ids):
            size = self._namespace.trie.block_tokens
            first = held // size
            self._sibling = path[first] if first < len(path) else None
            parent_key = path[first - 1].key if first else ROOT_KEY
            self._find_room(seed, ids, first * size, parent_key, exact=True)

    def span(self, ids: NDArray[np.int32], begin: int) -> None:
        """Find room for ids[begin:] as blocks that are not exact, one behind the other."""
        context = ids[max(0, begin - _CONTEXT) : begin]
        parent_key = block_key(begin.to_bytes(8, "little"), ROOT_KEY, context, exact=False)
        self._find_room(self._namespace.digest, ids, begin, parent_key, exact=False)

    def refuse(self, tokens: int, count: str, reason: str) -> None:
        """Of what was to be added, these tokens are not, which is counted as `count`."""
        with self._tiers.lock:
            self._tiers.refusals[count] += tokens
        self._refused += tokens
        self._reason = reason

    def copy(self, kv: KvBuffer, slots: NDArray[np.int64] | None) -> PutResult:
        """Copy a caller's KV, checked before, and make each block findable once it is complete; the result.

        Row i of `kv` is token `start` + i, or row slots[i] is. Call it once, whatever `result` says.
        """
        try:
            sources = [
                array
                for layer, *pair in zip(self._namespace.layout.layers, kv.keys, kv.values, strict=True)
                for array in pair
                if layer.holds_kv and array is not None  # else a mistake that was found with the buffer
            ]
            rows = None if slots is None else np.ascontiguousarray(slots, np.int64)
            while self._pieces:
                piece = self._pieces[0]
                left = sum(each.new for each in self._pieces)
                reason = self._fill(piece.block, sources, rows)
                if reason is None:
                    self._pieces.popleft()  # its room is the store's to free now
                    reason = self._add(piece)
                if reason is not None:
                    self._stored -= left
                    self.refuse(left, reason, reason)
                    break
            return self.result
        finally:
            self._end()

    def _find_room(
        self, seed: bytes, ids: NDArray[np.int32], begin: int, parent_key: bytes, *, exact: bool
    ) -> None:
        layout, size = self._namespace.layout, self._namespace.trie.block_tokens
        fresh = self._fresh or -(-(len(ids) - begin) // size)
        known = self._held
        try:
            with self._tiers.lock:
                for at in range(begin, len(ids), size):
                    tokens = ids[at : at + size]
                    new = at + len(tokens) - max(at, known)
                    key = block_key(seed, parent_key, tokens, exact=exact)
                    if (twin := self._twin(key, at, tokens)) is not None:
                        self._lease(twin)
                        self._held += new
                    else:
                        nbytes = layout.block_bytes(len(tokens))
                        room = self._room(nbytes)
                        if isinstance(room, str):
                            self.refuse(len(ids) - max(at, known), room, room)
                            return
                        block = Block(
                            number=self._tiers.new_number(),
                            key=key,
                            parent_key=parent_key,
                            namespace=self._namespace,
                            tokens=tokens.copy(),
                            start=at,
                            nbytes=nbytes,
                            exact=exact,
                            memory=room,
                            last_use=time.time(),
                            fresh=fresh,
                        )
                        self._pieces.append(_Piece(block, new))
                        self._stored += new
                    parent_key = key
        except BaseException:
            self._end()
            raise

    def _twin(self, key: bytes, start: int, tokens: NDArray[np.int32]) -> Block | None:
        """A block that is held already, though no prefix may lead to it."""
        twin = self._namespace.by_key.get(key)
        same = twin is not None and twin.start == start and np.array_equal(twin.tokens, tokens)
        return twin if same else None

    def _room(self, nbytes: int) -> Residence | str:
        """Room in warm memory, or why there is none. Called under the lock, which it gives away while it waits."""
        tiers, space = self._tiers, self._namespace
        while True:
            self._check_open()
            if (room := tiers.allocate_warm(nbytes, space)) is not None:
                return room
            if (left := self._deadline - time.monotonic()) <= 0:
                break
            tiers.changed.wait(left)
        if tiers.quotas.exceeds_memory(tiers.owner(space), nbytes):
            return TENANT_QUOTA
        return "warm tier full of what is leased or waits for flash"

    def _check_open(self) -> None:
        if self._tiers.closed:
            raise StoreClosedError("this store was closed; open it again")

    def _lease(self, block: Block) -> None:
        self._tiers.acquire([block], used=False)
        self._leased.append(block)

    def _fill(
        self, block: Block, sources: Sequence[NDArray[Any]], slots: NDArray[np.int64] | None
    ) -> str | None:
        """Complete a block, outside the lock; or say why not."""
        with self._tiers.lock:
            self._check_open()
            raw = self._tiers.raw(block)
        kept = max(0, self._start - block.start)  # tokens that were not given: the sibling holds them
        if kept and self._sibling is not None:
            reason = self._copy_held(raw, block.length, kept, self._sibling)
            if reason is not None:
                return reason
        first = block.start + kept - self._start
        kernels.collect(
            sources,
            raw,
            tokens=block.length,
            kept=kept,
            first=first if slots is None else 0,
            slots=None if slots is None else slots[first : first + block.length - kept],
        )
        return None

    def _add(self, piece: _Piece) -> str | None:
        """Make a complete block findable, unless another stands for its tokens meanwhile; or say why not."""
        with self._tiers.lock:
            standing = self._tiers.add(piece.block)
            if standing is None:
                return "another block has its key"
            self._lease(standing)
            if standing is piece.block:
                self._tiers.counts["tokens_stored"] += standing.length
                self._tiers.new_in_memory(standing)
            else:
                self._stored -= piece.new
                self._held += piece.new
        return None

    def _end(self) -> None:
        """Give back the room of what was not added, and let go of the rest."""
        with self._tiers.lock:
            for piece in self._pieces:
                assert piece.block.memory is not None
                self._tiers.give_back(piece.block.memory)
            self._pieces.clear()
            self._tiers.release(self._leased)
            self._leased.clear()

    def _copy_held(self, raw: NDArray[np.uint8], length: int, kept: int, source: Block) -> str | None:
        """Copy the first `kept` tokens of a block from the sibling that holds them. Returns why it cannot."""
        with self._tiers.lock:
            held = self._tiers.raw(source) if source.memory is not None else None
        if held is None:
            held = np.empty(source.nbytes, dtype=np.uint8)
            try:
                reader = self._tiers.open_record(source)
                try:
                    reader.read(self._namespace.layout, 0, held)
                finally:
                    reader.close()
            except BadRecordError as error:
                with self._tiers.lock:
                    self._tiers.quarantine(source, error)
                return f"bad record: {error.reason}"
        layout = self._namespace.layout
        layers = range(len(layout.layers))
        for (_, *into), (_, *out) in zip(
            layout.layer_views(raw, layers, length),
            layout.layer_views(held, layers, source.length),
            strict=True,
        ):
            for target, origin in zip(into, out, strict=True):
                target[:, :kept] = origin[:, :kept]
        return None
