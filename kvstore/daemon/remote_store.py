"""A store in a daemon, used as if it were this process's own.

    store = kvstore.connect(identity=identity)

The daemon may be away, go, and come back: it costs reuse, never a request. Look-ups then find nothing, leases hold
nothing, puts are refused, or a store of this process serves, as `fallback` says; each first time with a warning. What
only an administrator asks for raises DaemonLostError instead.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.block import Block
from kvstore.buffer import KvBuffer, check_buffer
from kvstore.errors import DaemonError, DaemonLostError, EncryptionError, InvalidRequestError
from kvstore.explain import Explanation
from kvstore.flash.keys import Keys, source_of
from kvstore.identity import Identity
from kvstore.index.embedder import Embedder
from kvstore.layout import capabilities
from kvstore.lease import Lease
from kvstore.match import Match
from kvstore.moved import SHORTEST
from kvstore.pipeline.schedule import CallCosts
from kvstore.presence import Presence
from kvstore.profile import CPU, Profile
from kvstore.put import PutResult
from kvstore.put_later import LaterPuts
from kvstore.quality.reuse import NOT_MEASURED, Policy, Verdict
from kvstore.semantics import Neighbour, TextOfTokens
from kvstore.sent_costs import SentCosts
from kvstore.store import KVStore, check_spans, check_start, checked_tokens
from kvstore.watch.snapshot import Snapshot
from kvstore.watch.stats import Stats

from . import wire
from .client import PATIENCE, Channel, View
from .link import Fallback, Link
from .remote_lease import NothingLeased, RemoteLease, moved_runs
from .remote_put import Putting
from .service import default_socket
from .texts import Texts

Found = TypeVar("Found")

_AWAY = "the daemon is away"


class RemoteStore:
    """KV of one identity in a daemon; `api.Store`, each method as `KVStore` describes it. Thread-safe."""

    def __init__(self, link: Link, identity: Identity) -> None:
        self._link = link
        self._later = LaterPuts()
        self.identity = identity
        self.layout = identity.layout
        self.capabilities = capabilities(identity.layout)
        self.shift_refused = (
            None if self.capabilities.reuse == "shift" else "; ".join(self.capabilities.reasons)
        )
        self._verdict = NOT_MEASURED
        self._welcome: wire.Welcome | None = None
        self._asked_last: tuple[NDArray[np.int32], int] = np.empty(0, np.int32), 0
        """What was looked up last, and how much of it was held: what is put next mostly goes on with it."""
        try:
            self._ask(lambda channel, view: None)  # noqa: ARG005
        except DaemonLostError:
            self._served_here()

    @property
    def block_tokens(self) -> int:
        return self._link.profile.block_tokens if self._welcome is None else self._welcome.block_tokens

    @property
    def path(self) -> Path | None:
        """The daemon's data directory."""
        return None if self._welcome is None or self._welcome.path is None else Path(self._welcome.path)

    @property
    def is_connected(self) -> bool:
        """Whether there is a daemon now; tries to reach it."""
        try:
            return self._ask(lambda channel, _: channel.is_intact())
        except DaemonError:
            return False

    # -- reading ------------------------------------------------------------------------------------------------------

    def lookup(self, tokens: ArrayLike, *, moved: bool = False, boundaries: Sequence[int] = ()) -> Match:
        ids = checked_tokens(tokens)

        def work(channel: Channel, view: View) -> Match:
            request = self._lookup(view, ids, moved, boundaries, lease=False)
            found = channel.call(request, wire.Found)
            self._asked_last = ids.copy(), found.length
            hot = self._link.hot(channel)
            blocks = found.blocks if hot is None else hot.seen(found.blocks)
            return Match(found.length, tuple(blocks[: found.prefix]), moved_runs(found.runs, blocks))

        return self._or(
            work, lambda store: store.lookup(ids, moved=moved, boundaries=boundaries), Match(0, ())
        )

    def lease(self, match: Match) -> Lease:
        blocks = [*match.blocks, *(piece.block for run in match.runs for piece in run.pieces)]
        if any(isinstance(block, Block) for block in blocks):  # found while the daemon was away
            here = self._link.embedded(self.identity)
            return self._nothing() if here is None else here.lease(match)
        if not blocks:
            return self._nothing()
        keys, runs = _named(match)

        def work(channel: Channel, view: View) -> Lease:
            asked = time.monotonic()
            leased = channel.call(
                lambda number: wire.TakeLease(
                    number, view.number, match.length, keys, len(match.blocks), runs
                ),
                wire.Leased,
            )
            return RemoteLease(self._link, channel, view, self.layout, leased, asked)

        return self._or(work, None, self._nothing())

    def find(self, tokens: ArrayLike, *, moved: bool = False, boundaries: Sequence[int] = ()) -> Lease:
        ids = checked_tokens(tokens)

        def work(channel: Channel, view: View) -> Lease:
            asked = time.monotonic()
            leased = channel.call(self._lookup(view, ids, moved, boundaries, lease=True), wire.Leased)
            self._asked_last = ids.copy(), leased.length
            return RemoteLease(self._link, channel, view, self.layout, leased, asked)

        return self._or(
            work,
            lambda store: store.find(ids, moved=moved, boundaries=boundaries),
            self._nothing(),
        )

    def _nothing(self) -> Lease:
        return NothingLeased(self.layout, self._link.pool)

    def _lookup(
        self, view: View, ids: NDArray[np.int32], moved: bool, boundaries: Sequence[int], *, lease: bool
    ) -> Callable[[int], wire.Lookup]:
        moved = moved and self.shift_refused is None
        return lambda number: wire.Lookup(
            number, view.number, _raw(ids), moved, [int(each) for each in boundaries], lease
        )

    # -- writing ------------------------------------------------------------------------------------------------------

    def put(
        self,
        tokens: ArrayLike,
        kv: KvBuffer,
        start: int = 0,
        slots: NDArray[np.int64] | None = None,
        *,
        wait: float = 0.0,
    ) -> PutResult:
        ids = checked_tokens(tokens)
        check_start(start, ids)
        check_buffer(kv, self.layout, len(ids) - start, slots)

        def work(channel: Channel, view: View) -> PutResult:
            putting = Putting(channel, view, self.layout, kv, int(start), slots, self._guess(ids))
            result = putting.prefix(ids, wait)
            self._has_news_to_read()
            return result

        return self._or(
            work,
            lambda store: store.put(ids, kv, start, slots, wait=wait),
            PutResult(0, 0, len(ids) - start, _AWAY),
        )

    def put_later(
        self,
        tokens: ArrayLike,
        kv: KvBuffer,
        start: int = 0,
        slots: NDArray[np.int64] | None = None,
    ) -> Future[PutResult]:
        ids = checked_tokens(tokens)
        check_start(start, ids)
        check_buffer(kv, self.layout, len(ids) - start, slots)
        return self._later.put(self, ids, kv, start, slots)

    def _guess(self, ids: NDArray[np.int32]) -> int | None:
        """How much of `ids` is held, by the last look-up; None when it was about something else."""
        asked, length = self._asked_last
        if not len(asked) or len(asked) > len(ids) or length == len(ids):
            return None
        return length if np.array_equal(asked, ids[: len(asked)]) else None

    def put_inexact(
        self,
        tokens: ArrayLike,
        kv: KvBuffer,
        spans: Sequence[tuple[int, int]],
        slots: NDArray[np.int64] | None = None,
    ) -> PutResult:
        ids = checked_tokens(tokens)
        check_spans(spans, ids)
        check_buffer(kv, self.layout, max((end for _, end in spans), default=0), slots)
        kept = [(begin, end) for begin, end in spans if end - begin >= SHORTEST]

        def work(channel: Channel, view: View) -> PutResult:
            putting = Putting(channel, view, self.layout, kv, 0, slots)
            results = [putting.span(ids, begin, end) for begin, end in kept]
            self._has_news_to_read()
            return PutResult.total(results)

        return self._or(
            work,
            lambda store: store.put_inexact(ids, kv, spans, slots),
            PutResult(0, 0, sum(end - begin for begin, end in kept), _AWAY),
        )

    @property
    def verdict(self) -> Verdict:
        def work(channel: Channel, view: View) -> Verdict:
            self._verdict = _answered(channel, lambda n: wire.GetVerdict(n, view.number), Verdict)
            return self._verdict

        return self._or(work, None, self._verdict)

    def keep_verdict(self, verdict: Verdict) -> None:
        packed = msgspec.msgpack.encode(verdict)
        self._ask(
            lambda channel, view: channel.call(lambda n: wire.KeepVerdict(n, view.number, packed), wire.Done)
        )

    # -- meaning ------------------------------------------------------------------------------------------------------

    def use_semantics(self, embedder: Embedder, text_of_tokens: TextOfTokens) -> None:
        """From now on read to the daemon what its blocks of this identity say, in a thread.

        The daemon has an embedder of its own, for all its clients (`kvstore serve --embedder`); `embedder` is not used.
        Where it has none, which is logged, texts find nothing.
        """
        del embedder

        def ask(most: int) -> wire.Wanted:
            return self._ask_once(
                lambda channel, view: _answered(
                    channel, lambda n: wire.WantTexts(n, view.number, most), wire.Wanted
                )
            )

        def tell(texts: Sequence[tuple[bytes, str]]) -> None:
            self._ask_once(
                lambda channel, view: channel.call(
                    lambda n: wire.TellTexts(n, view.number, list(texts)), wire.Done
                )
            )

        self._link.read_with(self.identity, lambda: Texts(text_of_tokens, ask, tell))

    def _has_news_to_read(self) -> None:
        if (texts := self._link.texts(self.identity)) is not None:
            texts.wake()

    def neighbours(self, query: str | ArrayLike, k: int = 16) -> list[Neighbour]:
        if k < 1:
            raise InvalidRequestError(f"at least one neighbour is asked for, got k={k}")
        reader = self._link.texts(self.identity)
        texts = [query] if isinstance(query, str) else []
        if not isinstance(query, str) and reader is not None:
            ids, size = checked_tokens(query), self.block_tokens
            texts = [reader.read(ids[at : at + size]) for at in range(0, len(ids), size)]

        def work(channel: Channel, view: View) -> list[Neighbour]:
            best: dict[bytes, Neighbour] = {}
            for text in texts:
                found = _answered(
                    channel,
                    partial(wire.Neighbours, view=view.number, text=text, tokens=b"", k=k),
                    list[tuple[wire.BlockRef, float]],
                )
                for near in (Neighbour(block, similarity) for block, similarity in found):
                    before = best.get(near.block.key)
                    best[near.block.key] = (
                        near if before is None or near.similarity > before.similarity else before
                    )
            return sorted(best.values(), key=lambda near: near.similarity, reverse=True)[:k]

        return self._or(work, lambda store: store.neighbours(query, k), [])

    def hint(
        self,
        *,
        tokens: ArrayLike | None = None,
        text: str | None = None,
        session: Hashable = None,
    ) -> None:
        """Sessions are told apart by what `str` makes of them."""
        if tokens is None and not text and session is None:
            raise InvalidRequestError("give tokens, text or session")
        raw = None if tokens is None else _raw(checked_tokens(tokens))
        name = None if session is None else str(session)[:200]

        def work(channel: Channel, view: View) -> None:
            channel.tell(wire.Hint(wire.NO_REPLY, view.number, raw, text, name))
            self._has_news_to_read()

        self._or(work, None, None)

    def presence(self, match: Match) -> Presence:
        return self._presence(match, fetch=False, timeout=0.0)

    def prefetch(self, match: Match, timeout: float | None = 0.0) -> Presence:
        return self._presence(match, fetch=True, timeout=timeout)

    def _presence(self, match: Match, *, fetch: bool, timeout: float | None) -> Presence:
        keys, runs = _named(match)
        patience = None if timeout is None else timeout + PATIENCE

        def work(channel: Channel, view: View) -> Presence:
            return _answered(
                channel,
                lambda n: wire.GetPresence(
                    n, view.number, match.length, keys, len(match.blocks), runs, fetch, timeout
                ),
                Presence,
                patience,
            )

        return self._or(work, None, Presence(()))

    # -- administration -----------------------------------------------------------------------------------------------

    def view(self, identity: Identity) -> RemoteStore:
        return RemoteStore(self._link, identity)

    def under(self, policy: Policy) -> RemoteStore:
        wanted = "lossless" if self._welcome is None else self._welcome.codec
        if policy == "exact" or wanted not in self.verdict.codecs:
            wanted = "lossless"
        if wanted == self.identity.codec:
            return self
        return self.view(msgspec.structs.replace(self.identity, codec=wanted))

    def invalidate(
        self,
        *,
        prefix: ArrayLike | None = None,
        adapter: str | None = None,
        older_than: float | None = None,
        everything: bool = False,
    ) -> int:
        ids = None if prefix is None else _raw(checked_tokens(prefix))

        def work(channel: Channel, view: View) -> int:
            return _answered(
                channel,
                lambda n: wire.Invalidate(n, view.number, ids, adapter, older_than, everything),
                int,
                timeout=None,
            )

        return self._ask(work)

    def promote(self, match: Match, to: Literal["warm", "hot"] = "hot") -> None:
        self._move(match, to)
        if to == "hot":
            with self.lease(match) as lease:
                if isinstance(lease, RemoteLease):
                    lease.copies_all = True
            if isinstance(lease, RemoteLease) and lease.hot is not None:
                lease.hot.settled()

    def demote(self, match: Match) -> int:
        def work(channel: Channel, _: View) -> None:
            if (hot := self._link.hot(channel)) is not None:
                hot.forget(block.key for block in match.blocks)

        self._or(work, None, None)
        return self._move(match, "cold")

    def _move(self, match: Match, to: Literal["hot", "warm", "cold"]) -> int:
        keys = _named(match)[0][: len(match.blocks)] if to == "cold" else _named(match)[0]

        def work(channel: Channel, view: View) -> int:
            return _answered(channel, lambda n: wire.Move(n, view.number, keys, to), int, timeout=None)

        return self._or(work, None, 0)

    def flush(self, timeout: float | None = None) -> None:
        self._ask(lambda channel, _: channel.call(wire.Flush, wire.Done, timeout))

    def stats(self) -> Stats:
        def work(channel: Channel, view: View) -> Stats:
            stats = _answered(channel, lambda n: wire.GetStats(n, view.number), Stats)
            if (hot := self._link.hot(channel)) is None:
                return stats
            tier, counts = hot.stats()
            return msgspec.structs.replace(stats, hot=tier, counts=stats.counts | counts)

        return self._ask(work)

    def snapshot(self) -> Snapshot:
        return self._ask(lambda channel, _: _answered(channel, wire.GetSnapshot, Snapshot))

    def served(
        self,
        *,
        prefix: int,
        moved: int,
        recomputed: int,
        computed: int,
        unsure: bool = False,
        seconds: float = 0.0,
        waited: float = 0.0,
        without: float | None = None,
    ) -> None:
        def work(channel: Channel, view: View) -> None:
            tokens = prefix, moved, recomputed, computed
            channel.tell(wire.Served(wire.NO_REPLY, view.number, *tokens, unsure, seconds, waited, without))

        self._or(work, None, None)

    def explain(
        self,
        tokens: ArrayLike,
        policy: Policy = "careful",
        *,
        boundaries: Sequence[int] = (),
        costs: CallCosts | None = None,
        layer_groups: int = 1,
    ) -> Explanation:
        ids = checked_tokens(tokens)
        sent = None if costs is None else SentCosts.of(costs)

        def work(channel: Channel, view: View) -> Explanation:
            return _answered(
                channel,
                lambda n: wire.Explain(
                    n,
                    view.number,
                    _raw(ids),
                    policy,
                    list(boundaries),
                    sent,
                    layer_groups,
                    self.shift_refused,
                ),
                Explanation,
            )

        return self._ask(work)

    def check(self) -> None:
        def work(channel: Channel, _: View) -> None:
            channel.call(wire.Check, wire.Done)
            if (hot := self._link.hot(channel)) is not None:
                hot.check()

        self._ask(work)

    def close(self) -> None:
        """Of all views, the first close counts. Waits for puts of this one."""
        self._later.close()
        self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- when the daemon is away --------------------------------------------------------------------------------------

    def _ask(self, work: Callable[[Channel, View], Found]) -> Found:
        """`work` with the daemon, once more with a new connection where the first was lost. Raises DaemonError."""
        try:
            return self._ask_once(work)
        except DaemonLostError:
            return self._ask_once(work)

    def _ask_once(self, work: Callable[[Channel, View], Found]) -> Found:
        channel = self._link.channel()
        try:
            view = channel.view(self.identity, self._link.source)
        except EncryptionError as error:
            if self._welcome is None:
                raise
            raise DaemonLostError(f"the daemon has no reuse for this tenant any more: {error}") from error
        self._welcome = channel.welcome
        return work(channel, view)

    def _or(
        self,
        work: Callable[[Channel, View], Found],
        here: Callable[[KVStore], Found] | None,
        nothing: Found,
    ) -> Found:
        """`work` with the daemon; while it is away what the store of this process says, or `nothing`."""
        try:
            return self._ask(work)
        except DaemonError:
            store = None if here is None else self._link.embedded(self.identity)
            return nothing if store is None or here is None else here(store)

    def _served_here(self) -> None:
        """Raise what opening a store of this process for this identity raises."""
        self._link.embedded(self.identity)


def connect(
    socket: str | os.PathLike[str] | None = None,
    *,
    identity: Identity,
    profile: Profile | None = None,
    key: Keys | None = None,
    fallback: Fallback = "embedded",
    required: bool = False,
) -> RemoteStore:
    """A store of `identity` in the daemon that listens on `socket`, by default the user's own.

    fallback: what serves while the daemon is away: "embedded", a store of this process in memory alone, with the
    budgets of `profile`; "none", no cache. key: encrypts on flash what is of this identity's tenant, see `keys`; the
    daemon keeps it in memory, until it ends or the key is dropped, and opens the tenant for nobody who has it not.
    required: raise DaemonLostError when there is no daemon now. Raises BudgetError for an identity that cannot be held,
    EncryptionError.
    """
    path = default_socket() if socket is None else Path(socket).expanduser()
    link = Link(path, profile or CPU, fallback, source_of(key))
    try:
        if required:
            link.channel()
        return RemoteStore(link, identity)
    except BaseException:
        link.close()
        raise


def _raw(ids: NDArray[np.int32]) -> bytes:
    return ids.astype("<i4", copy=False).tobytes()


def _answered(
    channel: Channel,
    request: Callable[[int], wire.AnyRequest],
    kind: type[Found],
    timeout: float | None = 60.0,
) -> Found:
    body = channel.call(request, wire.Answer, timeout).body
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except msgspec.MsgspecError as error:
        raise DaemonError(f"the daemon answers something else than was asked: {error}") from error


def _named(match: Match) -> tuple[list[bytes], list[wire.RunRef]]:
    """A match by the keys of its blocks, the prefix first: names that hold in any daemon."""
    keys = [block.key for block in match.blocks]
    at: dict[bytes, int] = {key: place for place, key in enumerate(keys)}
    runs = []
    for run in match.runs:
        pieces = []
        for piece in run.pieces:
            key = piece.block.key
            if key not in at:
                at[key] = len(keys)
                keys.append(key)
            pieces.append(wire.PieceRef(at[key], piece.offset, piece.length))
        runs.append(wire.RunRef(run.target, pieces))
    return keys, runs
