"""What held blocks speak of, and hints at what may be needed.

The daemon embeds, once for all clients, and each identity's vectors are its own as its KV is. It cannot read tokens:
that takes the tokenizer of the engine that computed them. So a client that has one tells it texts, see `texts`.
"""

from __future__ import annotations

import msgspec

from kvstore.open_directory import OpenDirectory
from kvstore.semantics import Semantics
from kvstore.store import KVStore

from . import wire
from .answers import Handler, Later, answer, tokens_of, view_of
from .connection import Connection
from .described import own, references


class MeaningRequests:
    """With the embedder of `shared`; without one, texts find nothing."""

    def __init__(self, shared: OpenDirectory) -> None:
        self.handlers: dict[type, Handler] = {
            wire.WantTexts: self._want,
            wire.TellTexts: self._tell,
            wire.Neighbours: self._neighbours,
            wire.Hint: self._hint,
        }
        self._shared = shared

    def _semantics(self, store: KVStore) -> Semantics | None:
        """Of an identity; made when somebody first asks for it, which is what the vectors on flash wait for."""
        tiers = self._shared.tiers
        if self._shared.embedder is not None:
            store.use_semantics(self._shared.embedder, None)
        with tiers.lock:
            return tiers.namespace(store.identity.digest()).semantics

    def _want(self, client: Connection, request: wire.WantTexts) -> Later:
        store = view_of(client, request.view)

        def work() -> msgspec.Struct:
            semantics = self._semantics(store)
            if semantics is None:
                return answer(request, wire.Wanted([], False, False))
            with self._shared.tiers.lock:
                blocks, busy = semantics.untold(request.most)
            named = [(block.key, block.tokens.astype("<i4").tobytes()) for block in blocks]
            return answer(request, wire.Wanted(named, busy, True))

        return work

    def _tell(self, client: Connection, request: wire.TellTexts) -> Later:
        store = view_of(client, request.view)

        def work() -> msgspec.Struct:
            semantics = self._semantics(store)
            held = store.blocks_of([key for key, _ in request.texts])
            with self._shared.tiers.lock:
                for block, (_, text) in zip(held, request.texts, strict=True):
                    if block is not None and semantics is not None:
                        semantics.tell(block, text)
            return wire.Done(request.id)

        return work

    def _neighbours(self, client: Connection, request: wire.Neighbours) -> Later:
        store = view_of(client, request.view)
        query = tokens_of(request.tokens) if request.text is None else request.text

        def work() -> msgspec.Struct:
            self._semantics(store)
            found = store.neighbours(query, request.k)
            blocks = references([own(each.block) for each in found])
            similarities = [float(each.similarity) for each in found]
            return answer(request, list(zip(blocks, similarities, strict=True)))

        return work

    def _hint(self, client: Connection, request: wire.Hint) -> Later:
        store = view_of(client, request.view)
        tokens = None if request.tokens is None else tokens_of(request.tokens)
        session = None if request.session is None else (client.uid, client.pid, request.session)

        def work() -> msgspec.Struct:
            if request.text:
                self._semantics(store)
            store.hint(tokens=tokens, text=request.text, session=session)
            return wire.Done(request.id)

        return work
