"""Identities, and all that neither reads nor puts."""

from __future__ import annotations

import asyncio
import os

import msgspec

from kvstore.errors import BudgetError, InvalidRequestError
from kvstore.flash.encryption import Key
from kvstore.identity import Identity
from kvstore.match import Match
from kvstore.open_directory import OpenDirectory
from kvstore.quality.reuse import Verdict
from kvstore.store import KVStore

from . import wire
from .administered import Administered
from .answers import Handler, Later, answer, tokens_of, view_of
from .connection import Connection, View
from .described import match_of
from .tenant import Tenant

_MOST_VIEWS = 64  # identities that one client opens
_MOST_IDENTITIES = 4096  # of all clients, as long as the daemon lives


class OtherRequests:
    """What shows or changes all of a daemon is for who runs it."""

    def __init__(
        self, shared: OpenDirectory, administered: Administered, loop: asyncio.AbstractEventLoop
    ) -> None:
        self.handlers: dict[type, Handler] = {
            wire.Open: self._open,
            wire.Served: self._served,
            wire.GetVerdict: self._verdict,
            wire.KeepVerdict: self._keep_verdict,
            wire.Move: self._move,
            wire.Invalidate: self._invalidate,
            wire.GetStats: self._stats,
            wire.Explain: self._explain,
            wire.Check: self._check,
            wire.GetPresence: self._presence,
            wire.Admin: self._admin,
            wire.GetSnapshot: self._snapshot,
        }
        self._shared = shared
        self._administered = administered
        self._loop = loop
        self._identities: set[bytes] = set()

    def _open(self, client: Connection, request: wire.Open) -> Later:
        if len(client.views) >= _MOST_VIEWS:
            raise BudgetError(f"this connection opened {_MOST_VIEWS} identities; open another connection")
        identity = Identity.from_bytes(request.identity)
        tenant = Tenant.of(client.uid, identity)
        own = tenant.own(identity)
        if own.digest() not in self._identities and len(self._identities) >= _MOST_IDENTITIES:
            raise BudgetError(f"the daemon serves {_MOST_IDENTITIES} identities already; restart it")
        self._identities.add(own.digest())
        number = max(client.views, default=0) + 1
        client.views[number] = None
        given = tuple(Key(secret) for secret in request.keys)

        def work() -> msgspec.Struct:
            try:
                store = KVStore(self._shared, own, given)
            except BaseException:
                self._loop.call_soon_threadsafe(client.views.pop, number, None)
                raise
            client.views[number] = View(store, tenant)
            groups = [(group.start, group.stop) for group in store.layer_groups]
            return wire.Opened(request.id, number, groups)

        return work

    def _served(self, client: Connection, request: wire.Served) -> msgspec.Struct:
        view_of(client, request.view).served(
            prefix=request.prefix,
            moved=request.moved,
            recomputed=request.recomputed,
            computed=request.computed,
            unsure=request.unsure,
            seconds=request.seconds,
            waited=request.waited,
            without=request.without,
        )
        return wire.Done(request.id)

    def _verdict(self, client: Connection, request: wire.GetVerdict) -> msgspec.Struct:
        return answer(request, view_of(client, request.view).verdict)

    def _move(self, client: Connection, request: wire.Move) -> Later:
        store = view_of(client, request.view)

        def work() -> msgspec.Struct:
            blocks = [block for block in store.blocks_of(request.keys) if block is not None]
            match = Match(sum(block.length for block in blocks), tuple(blocks))
            if request.to == "cold":
                return answer(request, store.demote(match))
            store.promote(match, request.to)
            return answer(request, 0)

        return work

    def _invalidate(self, client: Connection, request: wire.Invalidate) -> Later:
        store = view_of(client, request.view)
        if request.prefix is None and client.uid != os.geteuid():
            raise InvalidRequestError(
                "this reaches the KV of all tenants, which only who runs the daemon may; give a prefix"
            )
        prefix = None if request.prefix is None else tokens_of(request.prefix)

        def work() -> msgspec.Struct:
            count = store.invalidate(
                prefix=prefix,
                adapter=request.adapter,
                older_than=request.older_than,
                everything=request.everything,
            )
            return answer(request, count)

        return work

    def _stats(self, client: Connection, request: wire.GetStats) -> Later:
        store = view_of(client, request.view)
        return lambda: answer(request, store.stats())

    def _keep_verdict(self, client: Connection, request: wire.KeepVerdict) -> Later:
        store = view_of(client, request.view)
        try:
            verdict = msgspec.msgpack.decode(request.verdict, type=Verdict)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"this is no verdict: {error}") from error

        def work() -> msgspec.Struct:
            store.keep_verdict(verdict)
            return wire.Done(request.id)

        return work

    def _explain(self, client: Connection, request: wire.Explain) -> Later:
        store, tokens = view_of(client, request.view), tokens_of(request.tokens)
        costs = None if request.costs is None else request.costs.calls()
        store.shift_refused = request.shift_refused  # this connection's own view

        def work() -> msgspec.Struct:
            found = store.explain(
                tokens,
                request.policy,
                boundaries=request.boundaries,
                costs=costs,
                layer_groups=request.layer_groups,
            )
            return answer(request, found)

        return work

    def _check(self, client: Connection, request: wire.Check) -> Later:  # noqa: ARG002
        def work() -> msgspec.Struct:
            self._shared.tiers.check()
            return wire.Done(request.id)

        return work

    def _presence(self, client: Connection, request: wire.GetPresence) -> Later:
        store = view_of(client, request.view)
        match = match_of(store, request)

        def work() -> msgspec.Struct:
            found = store.prefetch(match, request.timeout) if request.fetch else store.presence(match)
            return answer(request, found)

        return work

    def _admin(self, client: Connection, request: wire.Admin) -> Later:
        if client.uid != os.geteuid():
            raise InvalidRequestError("only who runs the daemon may administer it")
        return lambda: wire.Answer(request.id, self._administered.call(request.verb, request.arguments))

    def _snapshot(self, client: Connection, request: wire.GetSnapshot) -> Later:
        if client.uid != os.geteuid():
            raise InvalidRequestError("only who runs the daemon may look at all that happens in it")
        return lambda: wire.Answer(request.id, self._administered.snapshot())
