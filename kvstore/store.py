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
import math
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from kvstore.index.embedder import Embedder
from kvstore.index.tokens import token_ids
from kvstore.pipeline.schedule import CallCosts
from kvstore.prefetch.cost import Recompute

from . import explain as explanation
from .block import Block, block_key, own_blocks
from .buffer import KvBuffer, check_buffer
from .codec import CODECS
from .errors import BudgetError, InvalidRequestError, InvalidTokensError, StoreClosedError
from .flash.encryption import Key
from .flash.keys import Keys
from .identity import Identity
from .invalidation import all_of, forget_vectors, made_with, starting_with, unused_for
from .layout import capabilities
from .lease import Lease
from .match import Match as Match
from .moved import SHORTEST, MovedRun
from .namespace import ROOT_KEY
from .open_directory import OpenDirectory
from .presence import Presence
from .profile import CPU, Profile
from .put import Incoming, PutResult
from .quality.reuse import NOT_MEASURED, Policy, Verdict
from .semantics import Neighbour, Semantics, TextOfTokens
from .store_lease import StoreLease
from .watch.snapshot import Snapshot, snapshot
from .watch.stats import Stats, collect
from .watch.timings import microseconds

EXACT_ONLY = "layout permits exact reuse only"


class KVStore:
    """Holds KV of one identity in the tiers of one directory. Thread-safe. A context manager; see `open_store`.

    given: of a daemon's client, the keys that it has its tenant's KV under, see `Ciphers.open`.
    """

    def __init__(self, shared: OpenDirectory, identity: Identity, given: Sequence[Key] | None = None) -> None:
        self._shared = shared
        self._tiers = shared.tiers
        self.identity = identity
        self.layout = identity.layout
        self.path = None if shared.directory is None else shared.directory.path
        self.capabilities = capabilities(identity.layout)
        self.shift_refused = (
            None if self.capabilities.reuse == "shift" else "; ".join(self.capabilities.reasons)
        )
        """Why moved runs are not looked for; None when they are. A self-test that fails sets it, too."""
        self._exact = self.capabilities.reuse == "exact"
        self._digest = identity.digest()
        self._under_any_codec = [msgspec.structs.replace(identity, codec=each).digest() for each in CODECS]
        self._measured = self._under_any_codec[CODECS.index("lossless")]  # whose verdict counts
        profile = shared.tiers.profile
        self.block_tokens = profile.block_tokens
        needed = self.layout.block_bytes(profile.block_tokens)
        if needed > shared.tiers.warm.largest_arena:
            raise BudgetError(
                f"a block of {profile.block_tokens} tokens needs {needed} bytes, warm memory has at most "
                f"{shared.tiers.warm.largest_arena} in one piece; raise warm_bytes and arena_bytes"
            )
        shared.work_with(identity, given)
        if shared.directory is not None:
            with contextlib.suppress(
                OSError
            ):  # a note for tools; a full disk does not keep anyone from reading
                shared.directory.keep_identity(self._digest, identity.to_bytes())
        with self._tiers.lock:
            self._namespace = self._tiers.namespace(self._digest)
            self._namespace.open(identity, profile.frame_bytes)
            self._tiers.opened(self._namespace)

    # -- reading ----------------------------------------------------------------------------------------------------

    def lookup(self, tokens: ArrayLike, *, moved: bool = False, boundaries: Sequence[int] = ()) -> Match:
        """The longest prefix of `tokens` (integers [n]) that is held. Changes nothing. Raises InvalidTokensError.

        moved: look for runs of the rest that are held anywhere, too; their KV has to be turned and repaired, and is
        an approximation then. boundaries: positions at which segments of the prompt begin, where they are known.
        """
        ids = checked_tokens(tokens)
        self._shared.prefetching.request()
        with self._tiers.timings.stage("lookup"), self._lock():
            found, reached = self._namespace.match(ids)
            blocks, length = self._usable(ids, found, reached)
            if length < reached:
                self._tiers.misses[EXACT_ONLY] += reached - length
            runs: list[MovedRun] = []
            if moved and length < len(ids) and self.shift_refused is None:
                runs = self._namespace.moved(ids, length, boundaries)
            self._tiers.counts["tokens_asked"] += len(ids)
            self._tiers.counts["tokens_matched"] += length
            self._tiers.counts["tokens_found_elsewhere"] += sum(run.length for run in runs)
            self._tiers.counts["lookups"] += 1
        return Match(length, tuple(blocks), tuple(runs))

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
        with self._tiers.timings.stage("lease"), self._lock():
            blocks: list[Block] = []
            length = 0
            for block in match.blocks:
                if not (isinstance(block, Block) and self._namespace.holds(block)):
                    break
                blocks.append(block)
                length = min(block.start + block.length, match.length)
            gone = match.length - length
            if gone and self._exact:
                blocks, length = [], 0
            runs = [
                run for run in match.runs if all(self._namespace.holds(piece.block) for piece in run.pieces)
            ]
            gone += sum(run.length for run in match.runs) - sum(run.length for run in runs)
            if gone:
                self._tiers.misses["evicted between look-up and lease"] += gone
            self._tiers.acquire(blocks, used=True)
            for run in runs:
                self._tiers.acquire(own_blocks(run.blocks), used=True)
            self._shared.prefetching.used(
                [*blocks, *(block for run in runs for block in own_blocks(run.blocks))]
            )
            return StoreLease(self._shared, self._namespace, blocks, length, runs, whole=self._exact)

    def find(self, tokens: ArrayLike, *, moved: bool = False, boundaries: Sequence[int] = ()) -> Lease:
        """Look up and hold what was found, in one step. As `lookup` and `lease`."""
        return self.lease(self.lookup(tokens, moved=moved, boundaries=boundaries))

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
        ids = checked_tokens(tokens)
        check_start(start, ids)
        check_buffer(kv, self.layout, len(ids) - start, slots)
        with self._tiers.timings.stage("put"):
            return self.accept_put(ids, start, wait=wait).copy(kv, slots)

    def put_later(
        self,
        tokens: ArrayLike,
        kv: KvBuffer,
        start: int = 0,
        slots: NDArray[np.int64] | None = None,
    ) -> Future[PutResult]:
        """As `put`, by a thread of the store, in the shadow of what the caller does next; returns at once.

        Until the future is done the rows given must stay as they are; others of the buffer may change, so an engine
        puts its prompt while it decodes. `close` waits for it. Raises what `put` raises of its arguments.
        """
        ids = checked_tokens(tokens)
        check_start(start, ids)
        check_buffer(kv, self.layout, len(ids) - start, slots)
        self._open()
        return self._shared.later.put(self, ids, kv, start, slots)

    def put_inexact(
        self,
        tokens: ArrayLike,
        kv: KvBuffer,
        spans: Sequence[tuple[int, int]],
        slots: NDArray[np.int64] | None = None,
    ) -> PutResult:
        """Keep the KV of spans [begin, end) of `tokens` that were computed behind moved runs.

        It is an approximation of what a cold run computes, so no prefix look-up ever finds it; it serves as a moved
        run elsewhere. Give only spans that were computed, never keys that were turned. kv and slots as in `put`, with
        `start` 0. Raises as `put` does.
        """
        ids = checked_tokens(tokens)
        check_spans(spans, ids)
        check_buffer(kv, self.layout, max((end for _, end in spans), default=0), slots)
        self._open()
        results = []
        for begin, end in spans:
            if end - begin >= SHORTEST:
                incoming = Incoming(self._tiers, self._namespace)
                incoming.span(ids[:end], begin)
                results.append(incoming.copy(kv, slots))
        return PutResult.total(results)

    @property
    def verdict(self) -> Verdict:
        """What was measured of moved reuse for this identity; without that, nothing is approximated."""
        return self._shared.verdicts.get(self._measured, NOT_MEASURED)

    def keep_verdict(self, verdict: Verdict) -> None:
        """Use this verdict from now on, and after a restart."""
        self._shared.verdicts[self._measured] = verdict
        if self._shared.directory is not None:
            self._shared.directory.keep_verdict(self._measured, msgspec.json.encode(verdict))

    # -- meaning ----------------------------------------------------------------------------------------------------

    def use_semantics(self, embedder: Embedder, text_of_tokens: TextOfTokens | None) -> None:
        """From now on have `embedder` say what held blocks of this identity speak of; see `neighbours`.

        text_of_tokens: the text of token ids int32 [n], the tokenizer's decoding; None in a daemon, to which clients
        tell texts. Both are called by a background thread, and what they raise costs only neighbours. Vectors are kept
        in the directory, by `flush` and `close`, and made anew where another embedder made them. A second call with the
        same embedder changes nothing.
        """
        with self._lock():
            before = self._namespace.semantics
            if before is not None and before.embedder.digest == embedder.digest:
                return
            path = cipher = None
            if self._shared.directory is not None and self._tiers.cold is not None:
                path = self._shared.directory.vectors_file(self._digest)
                cipher = self._shared.ciphers.sealer(self._digest)
            semantics = Semantics(embedder, text_of_tokens, path, self.block_tokens, cipher)
            self._namespace.use_semantics(semantics)
        if before is not None:
            before.close()

    def neighbours(self, query: str | ArrayLike, k: int = 16) -> list[Neighbour]:
        """The at most `k` held blocks of this identity that speak of what `query` speaks of, nearest first.

        query: a text, or token ids [n]. These are candidates to fetch ahead; what of them a prompt may reuse is a
        look-up's to say. None without `use_semantics`, and of what the background thread has not come to yet.
        Raises InvalidTokensError, InvalidRequestError for a `k` below 1.
        """
        if k < 1:
            raise InvalidRequestError(f"at least one neighbour is asked for, got k={k}")
        asked = query if isinstance(query, str) else checked_tokens(query)
        with self._lock():
            semantics = self._namespace.semantics
        found = semantics.nearest(asked, k) if semantics is not None else []
        with self._lock():
            held = [(self._namespace.block(number), similarity) for number, similarity in found]
        return [Neighbour(block, similarity) for block, similarity in held if block is not None]

    # -- ahead of requests -------------------------------------------------------------------------------------------

    def hint(
        self,
        *,
        tokens: ArrayLike | None = None,
        text: str | None = None,
        session: Hashable = None,
    ) -> None:
        """Say what the next request may need, so that it is read from flash before: returns at once, promises nothing.

        text: what the user has typed so far, while he types; what it speaks of is fetched. Needs `use_semantics`.
        tokens: what the next prompt will begin with or contain, integers [n]. session: who is going to ask, any name.
        With `tokens`, also where that session stands: say it after an answer, and `session` alone, when its user comes
        back to it, brings those blocks. A hint replaces the one before of the same session (None is one, too).

        Only time in which no request reads is used, and a part of warm memory. From the first hint on, what usually
        follows the requests that were seen is fetched without being hinted. `stats().counts` says what that was good
        for: bytes_prefetched_read = _used + _wasted + _waiting + _cancelled.
        Raises InvalidTokensError, InvalidRequestError when nothing is given.
        """
        if tokens is None and not text and session is None:
            raise InvalidRequestError("give tokens, text or session")
        ids = None if tokens is None else checked_tokens(tokens)
        with self._lock():
            self._shared.prefetching.hint(self._namespace, ids, text, session)

    def prefetch(self, match: Match, timeout: float | None = 0.0) -> Presence:
        """Have what a look-up found read into memory, before all that is only hinted; where its tokens are then.

        timeout: 0 returns at once (best effort); None waits until all is in memory or will not come (no room, damage);
        else at most so many seconds, and what is not there by then goes on. A request that reads meanwhile goes first.
        Raises StoreClosedError.
        """
        with self._lock():
            self._shared.prefetching.demand(match, timeout)
            self._open()
            return self._shared.prefetching.presence(match)

    def presence(self, match: Match) -> Presence:
        """Which tokens of a match are in memory (`hit`), on their way there (`pending`), or on flash: `Presence`."""
        with self._lock():
            return self._shared.prefetching.presence(match)

    def stand_back_when(self, reason: Callable[[], str | None]) -> None:
        """Nothing that is only hinted is read while `reason()` names one. For hosts that know their device better.

        By default Linux says so: memory pressure, a low battery, heat (`prefetch.pressure`).
        """
        self._shared.prefetching.stands_back = reason

    # -- administration ---------------------------------------------------------------------------------------------

    def view(self, identity: Identity) -> KVStore:
        """The same directory, tiers and budgets for another identity; KV of the two never mixes.

        Raises EncryptionError.
        """
        with self._lock():
            return KVStore(self._shared, identity)

    def under(self, policy: Policy) -> KVStore:
        """The view in which `policy` finds and keeps KV: one of its own where it may be kept with loss, see `codec`."""
        wanted = self._tiers.profile.codec
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
        """Forget blocks, at once for look-ups, in the tiers as soon as no lease names them; returns how many.

        Exactly one of: `prefix`, all that starts with these tokens, in this identity under any codec, and what
        may do so but lost the block before it; `adapter`, all KV made with the adapter of this content digest, in
        every identity; `older_than`, what no request used for so many seconds, in every identity; `everything`, in
        every identity.
        By a prefix, KV that `put_inexact` kept is not reached: it stands behind no prefix.
        """
        if sum((prefix is not None, adapter is not None, older_than is not None, everything)) != 1:
            raise InvalidRequestError("give exactly one of prefix, adapter, older_than, everything")
        ids = None if prefix is None else checked_tokens(prefix)
        with self._lock():
            spaces = self._tiers.namespaces.values()
            if ids is not None:
                own = [self._tiers.namespace(digest) for digest in self._under_any_codec]
                doomed = [block for space in own for block in starting_with(space, ids, whole=self._exact)]
            elif adapter is not None:
                doomed = made_with(spaces, adapter, self._shared.directory)
            elif older_than is not None:
                doomed = unused_for(spaces, older_than)
            else:
                doomed = all_of(spaces)
            for block in doomed:
                self._tiers.drop(block)
            self._tiers.counts["invalidated"] += len(doomed)
            touched = set(spaces) if everything else {block.namespace for block in doomed}
        for space in touched:
            forget_vectors(space, self._shared.directory)
        return len(doomed)

    def promote(self, match: Match, to: Literal["warm", "hot"] = "hot") -> None:
        """Bring the blocks of a match nearer to the NPU, as far as there is room: from flash to warm, then to hot."""
        with self.lease(match) as lease:
            lease.warm_up()
        if to == "hot":
            with self._lock():
                for block in own_blocks(lease.blocks):
                    self._shared.worker.promote(block)
            self._shared.worker.settled().result()

    def demote(self, match: Match) -> int:
        """Drop what memory holds of a match and flash holds too; returns how many blocks left memory."""
        with self._lock():
            return sum(self._tiers.forget_memory(block) for block in reversed(own_blocks(match.blocks)))

    def flush(self, timeout: float | None = None) -> None:
        """Return once all that is held is durable: on the medium, and findable after any stop.

        Without it, blocks stay in memory until that needs the room, which saves flash the writes of what nobody asks
        for again; `close` writes what is there then. What was refused (see `stats().refusals`) is not durable: by the
        day's write budget, or, long before, as not worth a write. Raises OSError when the medium does not take it,
        TimeoutError.
        """
        self._open()
        self._shared.worker.flush().result(timeout)

    def stats(self) -> Stats:
        """Budgets and use of each tier, counters, and why things were refused or missed.

        Of verdicts, that on this identity: views of one directory may be of several tenants.
        """
        with self._lock():
            ahead = self._shared.prefetching.usefulness()
            verdict = self._shared.verdicts.get(self._measured)
            own = {} if verdict is None else {self._measured: verdict}
            return collect(self._tiers, self._namespace, own, ahead)

    def snapshot(self) -> Snapshot:
        """What happens in the whole directory just now, as `kvstore top` and metrics show it."""
        self._open()
        return snapshot(self._shared)

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
        """Count what became of the tokens of a prompt, for `stats`; an engine says it once it has computed it.

        unsure: moved tokens were loaded, and computed nevertheless, since the answer hung in the balance.
        seconds: from the prompt to its logits; waited: of these, for the store. without: what it would have taken with
        all computed, by the engine's costs; from then on that is what blocks of this identity save.
        """
        self._tiers.timings.observe("prefill", seconds)
        self._tiers.timings.observe("wait", waited)
        with self._lock():
            if without is not None:
                self._tiers.counts["ttft_saved_us"] += microseconds(without - seconds)
                self._tiers.counts["ttft_lost_us"] += microseconds(seconds - without)
                tokens = prefix + moved + recomputed + computed
                if tokens >= self.block_tokens and without > 0:  # a short prompt pays for padding
                    self._namespace.recompute = Recompute(tokens / without, math.inf)
            counts = self._tiers.counts
            counts["requests"] += 1
            counts["requests_unsure"] += unsure
            counts["tokens_prefix"] += prefix
            counts["tokens_moved"] += moved
            counts["tokens_recomputed"] += recomputed
            counts["tokens_computed"] += computed

    def explain(
        self,
        tokens: ArrayLike,
        policy: Policy = "careful",
        *,
        boundaries: Sequence[int] = (),
        costs: CallCosts | None = None,
        layer_groups: int = 1,
    ) -> explanation.Explanation:
        """Where each of `tokens` would come from under `policy`, and why not from nearer. Changes nothing.

        boundaries: as in `lookup`. costs: what graph calls over this prompt's context cost (`engine.costs`); with
        them the answer is what a request that comes now does (`Session.explain` gives them), without them what the
        engine decides by its costs stays open. layer_groups: into how many the engine's graphs are split.
        Raises InvalidTokensError.
        """
        if (view := self.under(policy)) is not self:
            return view.explain(tokens, policy, boundaries=boundaries, costs=costs, layer_groups=layer_groups)
        ids = checked_tokens(tokens)
        with self._lock():
            path, reached = self._namespace.match(ids)
            blocks, length = self._usable(ids, path, reached)
            runs, near = list[MovedRun](), list[MovedRun]()
            if length < len(ids) and not self._exact:
                runs = self._namespace.moved(ids, length, boundaries)
                near = self._namespace.moved(ids, length, boundaries, shortest=SHORTEST // 2)
            stopped = EXACT_ONLY if length < reached else None
            speed = None if self._exact else self._tiers.flash.bytes_per_second()
            found = explanation.Found(blocks, length, runs, near, stopped, self.shift_refused, speed)
            return explanation.explain(
                ids,
                found,
                self._namespace,
                self._tiers,
                self.identity,
                self.verdict,
                policy,
                costs,
                layer_groups,
            )

    def check(self) -> None:
        """Raise AssertionError unless free + used = total in each tier."""
        self._open()
        self._tiers.check()

    def close(self) -> None:
        """Write what waits, seal the index, give the directory up. Of all views, the first close counts."""
        self._shared.close()

    def __enter__(self) -> KVStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- for the daemon -----------------------------------------------------------------------------------------------

    @property
    def layer_groups(self) -> tuple[range, ...]:
        """Into which blocks are cut: one (block, group) is one read from flash."""
        return self._namespace.layer_groups

    def blocks_of(self, keys: Sequence[bytes]) -> list[Block | None]:
        """The findable blocks of these keys; None where there is none any more."""
        with self._lock():
            return [self._namespace.by_key.get(key) for key in keys]

    def held_for_put(self, tokens: ArrayLike) -> int:
        """How many of `tokens` a put need not bring; when that is all of them, they count as used, as by a put."""
        ids = checked_tokens(tokens)
        with self._lock():
            path, held = self._namespace.match(ids)
            if self._exact and self._usable(ids, path, held)[1] < len(ids):
                return 0
            if held == len(ids):
                self._tiers.acquire(path, used=True, by_put=True)
                self._tiers.release(path)
            return held

    def accept_put(
        self, ids: NDArray[np.int32], start: int, *, wait: float = 0.0, fresh: int = 0
    ) -> Incoming:
        """The first half of `put`, all but the copy, which has to follow: until then it holds room and leases."""
        incoming = Incoming(self._tiers, self._namespace, start, wait, fresh)
        with self._lock():
            path, held = self._namespace.match(ids)
            if held < start:
                reason = f"only {held} of the {start} tokens before are held"
                incoming.refuse(len(ids) - start, "prefix not held", reason)
                return incoming
            if self._exact:
                if self._usable(ids, path, held)[1] == len(ids):
                    incoming.prefix(ids, [], len(ids), self._digest)
                    return incoming
                if start:
                    reason = f"{EXACT_ONLY}: put the prompt from its start"
                    incoming.refuse(len(ids) - start, EXACT_ONLY, reason)
                    return incoming
                for other in self._namespace.below(ids[: self.block_tokens]):
                    self._tiers.drop(other)  # two prompts cannot share a block, the newer one stays
                path, held = [], 0
            self._tiers.acquire(path, used=True, by_put=True)
        incoming.prefix(ids, path, held, self._key_seed(ids))
        return incoming

    def _open(self) -> None:
        if self._tiers.closed:
            raise StoreClosedError("this store was closed; open it again")

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        self._open()
        with self._tiers.lock:
            self._tiers.reap()
            yield


def open_store(
    path: str | os.PathLike[str] | None,
    *,
    identity: Identity,
    profile: Profile = CPU,
    key: Keys | None = None,
) -> KVStore:
    """Open a data directory for one identity; `kvstore.open`.

    path: the directory, made when it is new; None keeps everything in memory. identity: whose KV this is, with its
    layout. profile: budgets and block size of the device. key: encrypts what lies on flash: 32 bytes, a `KeyFile` or a
    `Keyring`, see `keys`; what is there under another key, or under none, is not seen then.

    Raises DirectoryInUseError, DirectoryUnusableError, FormatMismatchError, BudgetError, EncryptionError; the
    directory is left as it was then.
    """
    location = None if path is None else Path(path).expanduser()
    shared = OpenDirectory(location, profile, key)
    try:
        return KVStore(shared, identity)
    except BaseException:
        shared.close()
        raise


def check_start(start: int, ids: NDArray[np.int32]) -> None:
    """Raise InvalidRequestError unless a put of `ids` can begin at `start`."""
    if not isinstance(start, (int, np.integer)) or not 0 <= start < len(ids):
        raise InvalidRequestError(f"start {start!r} must lie in the {len(ids)} tokens given")


def check_spans(spans: Sequence[tuple[int, int]], ids: NDArray[np.int32]) -> None:
    """Raise InvalidRequestError unless each span lies in `ids`."""
    if any(not 0 <= begin < end <= len(ids) for begin, end in spans):
        raise InvalidRequestError(f"spans {list(spans)} must lie in the {len(ids)} tokens given")


def checked_tokens(tokens: ArrayLike) -> NDArray[np.int32]:
    """Token ids as int32 [n], n >= 1. Raises InvalidTokensError."""
    try:
        ids = token_ids(tokens)
    except (ValueError, OverflowError, TypeError) as error:  # TokenError, or numpy's about ragged lists
        raise InvalidTokensError(str(error)) from error
    if not len(ids):
        raise InvalidTokensError("no tokens given")
    return ids
