"""A put: copies what is missing of a caller's KV into blocks and makes them findable, each once it is complete."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline import kernels

from .block import Block, block_key
from .buffer import KvBuffer
from .errors import StoreClosedError
from .namespace import ROOT_KEY, Namespace
from .record import BadRecordError
from .tiers import TENANT_QUOTA, Tiers

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


class Incoming:
    """One caller's KV, checked before: row i of `kv` is token `start` + i, or row slots[i] is.

    Waits at most `wait` seconds in all for room in warm memory.
    """

    def __init__(
        self,
        tiers: Tiers,
        namespace: Namespace,
        kv: KvBuffer,
        start: int,
        slots: NDArray[np.int64] | None,
        wait: float,
    ) -> None:
        self._tiers = tiers
        self._namespace = namespace
        self._sources = [
            array
            for layer, *pair in zip(namespace.layout.layers, kv.keys, kv.values, strict=True)
            for array in pair
            if layer.holds_kv and array is not None  # else a mistake that was found with the buffer
        ]
        self._start = start
        self._slots = None if slots is None else np.ascontiguousarray(slots, np.int64)
        self._deadline = time.monotonic() + wait
        self._fresh = 1  # blocks that this put is going to add

    def prefix(self, ids: NDArray[np.int32], path: Sequence[Block], held: int, seed: bytes) -> PutResult:
        """Add the blocks of `ids` behind the full blocks of `path`, which holds `held` tokens and is leased.

        seed: what the keys start from, the identity's digest as a rule.
        """
        leased = list(path)
        try:
            if held == len(ids):
                return PutResult(0, held, 0)
            size = self._namespace.trie.block_tokens
            first = held // size
            self._fresh = -(-len(ids) // size) - first
            parent = path[first - 1] if first else None
            sibling = (
                path[first] if first < len(path) else None
            )  # holds the beginning of the first block to add
            stored = 0
            for begin in range(first * size, len(ids), size):
                piece = ids[begin : begin + size]
                parent_key = ROOT_KEY if parent is None else parent.key
                block, reason = self._add(seed, begin, piece, parent_key, True, sibling, leased)
                new = begin + len(piece) - max(begin, held)
                if block is None:
                    return self._refuse(stored, held, len(ids) - max(begin, held), reason)
                stored += new if reason == "" else 0
                parent, sibling = block, None
            return PutResult(stored, held, 0)
        finally:
            with self._tiers.lock:
                self._tiers.release(leased)

    def span(self, ids: NDArray[np.int32], begin: int, end: int) -> PutResult:
        """Add ids[begin:end] as blocks that are not exact, one behind the other."""
        leased: list[Block] = []
        size = self._namespace.trie.block_tokens
        self._fresh = -(-(end - begin) // size)
        parent_key = block_key(
            begin.to_bytes(8, "little"), ROOT_KEY, ids[max(0, begin - _CONTEXT) : begin], exact=False
        )
        stored = 0
        try:
            for at in range(begin, end, size):
                piece = ids[at : min(at + size, end)]
                block, reason = self._add(self._namespace.digest, at, piece, parent_key, False, None, leased)
                if block is None:
                    return self._refuse(stored, 0, end - at, reason)
                stored += len(piece) if reason == "" else 0
                parent_key = block.key
            return PutResult(stored, end - begin - stored, 0)
        finally:
            with self._tiers.lock:
                self._tiers.release(leased)

    def _refuse(self, stored: int, held: int, refused: int, reason: str) -> PutResult:
        with self._tiers.lock:
            self._tiers.refusals[reason] += refused
        return PutResult(stored, held, refused, reason)

    def _add(
        self,
        seed: bytes,
        begin: int,
        piece: NDArray[np.int32],
        parent_key: bytes,
        exact: bool,
        sibling: Block | None,
        leased: list[Block],
    ) -> tuple[Block | None, str]:
        """Make a block of `piece` findable: (the block that stands for it, "" when it is new), or None and why not."""
        block, reason = self._fill(seed, begin, piece, parent_key, exact, sibling)
        if block is None:
            return None, reason
        with self._tiers.lock:
            standing = self._tiers.add(block)
            if standing is None:
                return None, "another block has its key"
            self._tiers.acquire([standing], used=False)
            leased.append(standing)
            if standing is not block:
                return standing, "held already"
            self._tiers.counts["tokens_stored"] += len(piece)
            self._tiers.new_in_memory(block)
        return block, ""

    def _fill(
        self,
        seed: bytes,
        begin: int,
        piece: NDArray[np.int32],
        parent_key: bytes,
        exact: bool,
        sibling: Block | None,
    ) -> tuple[Block | None, str]:
        """A complete, not yet findable block of the tokens `piece` at `begin`; or None and why not."""
        layout = self._namespace.layout
        nbytes = layout.block_bytes(len(piece))
        with self._tiers.lock:
            if self._tiers.closed:
                raise StoreClosedError("this store was closed; open it again")
            room = self._tiers.allocate_warm(nbytes, self._namespace)
            while room is None and (left := self._deadline - time.monotonic()) > 0:
                self._tiers.changed.wait(left)
                room = self._tiers.allocate_warm(nbytes, self._namespace)
            if room is None and self._tiers.over_quota(self._namespace, memory=nbytes):
                return None, TENANT_QUOTA
            if room is None:
                return None, "warm tier full of what is leased or waits for flash"
            number = self._tiers.new_number()
            raw = room.tier.view(room.extent, nbytes)
        block = Block(
            number=number,
            key=block_key(seed, parent_key, piece, exact=exact),
            parent_key=parent_key,
            namespace=self._namespace,
            tokens=piece.copy(),
            start=begin,
            nbytes=nbytes,
            exact=exact,
            memory=room,
            last_use=time.time(),
            fresh=self._fresh,
        )
        try:
            kept = max(0, self._start - begin)  # tokens that the caller did not give: the sibling holds them
            reason = self._copy_held(raw, len(piece), kept, sibling) if kept and sibling is not None else None
            if reason is None:
                self._copy_given(raw, begin, len(piece), kept)
                return block, ""
        except BaseException:
            with self._tiers.lock:
                self._tiers.give_back(room)
            raise
        with self._tiers.lock:
            self._tiers.give_back(room)
        return None, reason

    def _copy_given(self, raw: NDArray[np.uint8], begin: int, length: int, kept: int) -> None:
        """Copy the caller's rows for tokens begin + kept .. begin + length into a block."""
        first = begin + kept - self._start
        kernels.collect(
            self._sources,
            raw,
            tokens=length,
            kept=kept,
            first=first if self._slots is None else 0,
            slots=None if self._slots is None else self._slots[first : first + length - kept],
        )

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
