"""Administration of an open directory: the verbs that a daemon offers to tools, and the command line to its user.

Each verb takes plain arguments (text, numbers, lists of token ids) and returns a msgspec Struct, or a list of them, so
that any message can carry it. `VERBS` is all that may be called from outside. Verbs may run while requests do; they
hold the store's lock for moments only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvstore.block import Block
from kvstore.errors import InvalidRequestError
from kvstore.explain import Explanation
from kvstore.flash.record import BadRecordError
from kvstore.identity import Identity
from kvstore.invalidation import all_of, forget_vectors, unused_for
from kvstore.layout import capabilities
from kvstore.namespace import Namespace
from kvstore.open_directory import OpenDirectory
from kvstore.pipeline.schedule import CallCosts
from kvstore.quality.reuse import Policy
from kvstore.store import KVStore
from kvstore.tiers.pins import Pin
from kvstore.watch.stats import TierStats

from . import entry as entries
from . import gc as garbage
from . import portable, purge, rotation
from .entry import Entry
from .fault import Verified
from .gc import Collected
from .held import Held, checked, checked_filters
from .listing import Order, Page, page
from .open_check import check_open
from .portable import Imported
from .purge import Purged
from .record_check import read_kv
from .rotation import Dropped, Rotated
from .status import PinStatus, Status, identity_statuses, pin_statuses

VERBS = (
    "status",
    "quota",
    "ls",
    "show",
    "tree",
    "explain",
    "verify",
    "export",
    "flush",
    "purge",
    "pin",
    "unpin",
    "warm",
    "gc",
    "import_",
    "rotate_key",
    "drop_key",
)


class Flushed(msgspec.Struct, frozen=True):
    """All that was put before is durable; `blocks` on flash now. What was refused is in `status`."""

    blocks: int


class Pinned(msgspec.Struct, frozen=True):
    """The pins there are now. `held` tokens of the prefix that was pinned are in the store, the rest is once it is put.

    changed: whether there was something to do.
    """

    pins: tuple[PinStatus, ...]
    pinned_bytes: int
    most_pinned_bytes: int
    held: int
    changed: bool


class Quota(msgspec.Struct, frozen=True):
    """What a tenant, as `status` names it, holds in memory and on flash, of how many bytes; None is no limit.

    Without a daemon's walls, there is one tenant in memory.
    """

    tenant: str
    memory_bytes: int
    most_memory_bytes: int | None
    flash_bytes: int
    most_flash_bytes: int | None


class Warmed(msgspec.Struct, frozen=True):
    """Of `tokens` asked for, `held` are, and lie in memory now as far as there was room: `in_memory`."""

    tokens: int
    held: int
    in_memory: int


class Administration(Held):
    """Verbs over `opened`, which somebody else closes."""

    def __init__(self, opened: OpenDirectory) -> None:
        self._opened = opened
        self._tiers = opened.tiers
        self.block_tokens = opened.tiers.profile.block_tokens
        self.path = None if opened.directory is None else opened.directory.path
        self.ciphers = opened.ciphers

    # -- looking ------------------------------------------------------------------------------------------------

    def entries(self) -> list[Entry]:
        return [entries.of_block(block) for block in self._blocks()]

    def ls(self, *, order: Order = "key", after: str | None = None, limit: int = 100, **filters: Any) -> Page:
        """As `Held.ls`, without a snapshot of all there is."""
        wanted = checked_filters(filters)
        return page(self._blocks(), entries.of_block, self.identities(), wanted, order, after, limit)

    def identities(self) -> dict[bytes, Identity]:
        with self._tiers.lock:
            known = {
                digest: space.identity
                for digest, space in self._tiers.namespaces.items()
                if space.identity is not None
            }
        if self._opened.directory is not None:
            for digest, description in self._opened.directory.identities().items():
                if digest not in known:
                    with contextlib.suppress(ValueError):
                        known[digest] = Identity.from_bytes(description)
        return known

    def record_of(self, entry: Entry) -> Path | None:
        return None if self._tiers.cold is None else self._tiers.cold.file(entry.key)

    def raw(self, entry: Entry) -> NDArray[np.uint8]:
        tiers = self._tiers
        with tiers.lock:
            block = self._block(entry)
            tiers.acquire([block], used=False)
        try:
            if block.memory is not None:
                return tiers.raw(block).copy()
            if tiers.cold is None:
                raise LookupError("evicted meanwhile")
            with contextlib.closing(tiers.cold.reader(block.key)) as reader:
                return read_kv(reader, entry, self.identities()[entry.identity].layout)
        except BadRecordError as error:
            raise LookupError(str(error)) from error
        finally:
            with tiers.lock:
                tiers.release([block])

    def explanation(
        self,
        tokens: NDArray[np.int32],
        identity: Identity,
        policy: Policy,
        costs: CallCosts | None,
        layer_groups: int,
    ) -> tuple[Explanation, float | None]:
        speed = self._tiers.flash.bytes_per_second()
        store = KVStore(self._opened, identity)
        return store.explain(tokens, policy, costs=costs, layer_groups=layer_groups), speed

    def status(self) -> Status:
        """Tiers, identities, pins and counters."""
        held, identities, tiers = self.entries(), self.identities(), self._tiers
        with tiers.lock:
            cold = tiers.cold
            in_tiers = {
                "hot": self._tier("hot", tiers.hot.total, tiers.hot.used, tiers.hot.pinned),
                "warm": self._tier("warm", tiers.warm.total, tiers.warm.used),
            }
            if cold is not None:
                in_tiers["cold"] = self._tier("cold", cold.total, cold.used)
            counts = dict(tiers.counts)
            if cold is not None:
                counts |= {"bytes_written": cold.bytes_written, "bytes_written_today": cold.writes.spent}
            return Status(
                directory=None if self.path is None else str(self.path),
                owner=None,
                block_tokens=self.block_tokens,
                blocks=len(held),
                tokens=sum(len(each.tokens) for each in held),
                tiers=in_tiers,
                identities=identity_statuses(held, identities, self._opened.verdicts),
                pins=pin_statuses(tiers.pins),
                pinned_bytes=tiers.pins.used,
                most_pinned_bytes=tiers.pins.limit,
                quarantined=0 if cold is None else len(cold.quarantined()),
                index=None if cold is None else cold.opened,
                waiting=self._opened.worker.waiting,
                counts=counts,
                refusals=dict(tiers.refusals),
                misses=dict(tiers.misses),
                bad_records={} if cold is None else {why: n for why, n in cold.bad.items() if n},
            )

    def quota(self) -> list[Quota]:
        """Of each tenant; the limits are set by `tenant_memory_bytes` and `tenant_cold_bytes`."""
        quotas = self._tiers.quotas
        with self._tiers.lock:
            owners = sorted({quotas.owner(space) for space in self._tiers.namespaces.values()})
            return [
                Quota(
                    entries.tenant_name(owner),
                    quotas.memory_used(owner),
                    quotas.most_memory,
                    quotas.flash_used(owner),
                    quotas.most_flash,
                )
                for owner in owners
            ]

    def verify(self, *, repair: bool = False) -> Verified:
        """Check all that is held while requests go on; `repair` sets aside what is bad. See `open_check`."""
        return check_open(self._opened, self.identities(), repair=repair)

    # -- changing -----------------------------------------------------------------------------------------------

    def flush(self) -> Flushed:
        """Return once all that was put before is on the medium. Raises OSError when the medium does not take it."""
        self._opened.worker.flush().result()
        with self._tiers.lock:
            return Flushed(self._tiers.held("cold"))

    def purge(
        self,
        *,
        prefix: Sequence[int] | None = None,
        document: Sequence[int] | None = None,
        tenant: str | None = None,
        adapter: str | None = None,
        older_than: float | None = None,
        tier: str | None = None,
        everything: bool = False,
        identity: str | None = None,
        dry_run: bool = True,
    ) -> Purged:
        """Forget blocks; with `dry_run` only say how many. Exactly one of:

        prefix: prompts that start with these tokens, of `identity`, under any codec. document: blocks that hold a part
        of these tokens, and all that was computed behind one. tenant, adapter: as `status` names them. older_than:
        unused for so many seconds. tier: free it, see `purge.empty_tier`. everything.
        All but prefix go by `identity` only where it is given. Raises InvalidRequestError, InvalidTokensError.

        Nothing of the blocks stays in a file or an arena, but of those that a lease holds until it ends; pins of their
        tokens end, and the quarantine is emptied. `tier` leaves that aside.
        """
        given = (prefix, document, tenant, adapter, older_than, tier)
        if sum(each is not None for each in given) + everything != 1:
            raise InvalidRequestError(
                "give exactly one of prefix, document, tenant, adapter, older_than, tier, everything"
            )
        tiers = self._tiers
        identities = self.identities()
        if tier is not None:
            with tiers.lock:
                return purge.empty_tier(tiers, tier, dry_run=dry_run)
        with tiers.lock:
            spaces = list(tiers.namespaces.values())
            if identity is not None:
                digest = entries.chosen_identity(identity, tiers.namespaces)
                spaces = [space for space in spaces if space.digest == digest]
            doomed: list[Block] = []
            if prefix is not None:
                doomed = self._with_prefix(checked(prefix), identity, identities)
            elif document is not None:
                doomed = purge.with_document(spaces, checked(document))
            elif older_than is not None:
                doomed = unused_for(spaces, older_than)
            else:
                if tenant is not None:
                    spaces = purge.of_tenant(spaces, tenant, identities)
                elif adapter is not None:
                    spaces = purge.of_adapter(spaces, adapter, identities)
                doomed = all_of(spaces)
            if not dry_run:
                whole = tenant is not None or adapter is not None or everything
                purge.end_pins(tiers, doomed, spaces, whole=whole)
            purged = purge.forget(tiers, doomed, dry_run=dry_run)
        if not dry_run:
            self._forget_vectors({block.namespace for block in doomed})
            purge.erase(self._opened, spaces)
        return purged

    def pin(self, tokens: Sequence[int], *, identity: str | None = None) -> Pinned:
        """Keep what is held of these first tokens of prompts, or will be, from being evicted.

        Raises BudgetError when more would be pinned than a share of warm memory and flash permits, InvalidTokensError,
        InvalidRequestError, OSError.
        """
        ids, chosen = checked(tokens), self.described(identity)
        pin = self._pin(ids, chosen)
        with self._tiers.lock:
            before = len(self._tiers.pins)
            self._tiers.pins.add(pin)
            blocks, held = self._mark(pin).match(ids)
            for block in blocks:
                if not (block.cold_bytes or block.waiting):
                    self._opened.worker.submit(block)  # so that a restart does not lose it
            return self._pinned(held, len(self._tiers.pins) != before)

    def unpin(self, tokens: Sequence[int], *, identity: str | None = None) -> Pinned:
        """End a pin of these very tokens. Raises as `pin` does."""
        ids, chosen = checked(tokens), self.described(identity)
        pin = self._pin(ids, chosen)
        with self._tiers.lock:
            removed = self._tiers.pins.remove(pin.identity, pin.tokens)
            space = self._mark(pin)
            return self._pinned(space.match(ids)[1], removed)

    def warm(self, tokens: Sequence[int], *, identity: str | None = None) -> Warmed:
        """Bring what is held of a prompt from flash to memory. Raises InvalidTokensError, InvalidRequestError."""
        ids = checked(tokens)
        store = KVStore(self._opened, self.described(identity))
        match = store.lookup(ids)
        store.promote(match, to="warm")
        with self._tiers.lock:
            there = sum(block.length for block in match.blocks if block.in_memory)
        return Warmed(len(ids), match.length, min(there, match.length))

    def gc(self, *, dry_run: bool = True) -> Collected:
        """Remove what no request will ever use; with `dry_run` only say what that is. See `gc`."""
        return garbage.collect(self._opened, self.identities(), dry_run=dry_run)

    def rotate_key(self, *, tenant: str | None = None) -> Rotated:
        """Put all on flash of a tenant (as `status` names it; None: of each) under a new key. See `rotation.rotate`."""
        return rotation.rotate(self._opened, None if tenant is None else self._salt(tenant))

    def drop_key(self, *, tenant: str | None = None, dry_run: bool = True) -> Dropped:
        """Erase the keys of a tenant (None: of each) and forget its blocks: nobody reads them again, nor a copy.

        Raises InvalidRequestError, EncryptionError, OSError.
        """
        salts = {salt for salt in self.ciphers.tenants() if self.ciphers.has_key(salt)}
        if tenant is not None:
            salts = {self._salt(tenant)}
        blocks = self._forget_tenants(salts, dry_run=dry_run)
        if not dry_run:
            rotation.drop(self._opened, salts)
            self._forget_tenants(salts, dry_run=False)  # what was put just before
        return Dropped(len(salts), blocks, dry_run)

    def import_(self, path: str) -> Imported:
        """Take in a portable file. Raises InvalidRequestError, OSError; see `portable`."""
        return portable.import_file(Path(path).expanduser(), self._opened)

    def close(self) -> None:
        """Nothing: who opened the directory closes it."""

    # -- inside -------------------------------------------------------------------------------------------------

    def _salt(self, tenant: str) -> bytes:
        """Of a tenant, as `status` names it. Raises InvalidRequestError."""
        named = tenant.removeprefix("-")
        found = [salt for salt in self.ciphers.tenants() if entries.tenant_name(salt) == named]
        if len(found) != 1:
            raise InvalidRequestError(
                f"no tenant {tenant!r} is known; `kvstore status` names them, - is none"
            )
        return found[0]

    def _forget_tenants(self, salts: set[bytes], *, dry_run: bool) -> int:
        """How many blocks."""
        with self._tiers.lock:
            spaces = [
                space
                for space in self._tiers.namespaces.values()
                if self.ciphers.tenant(space.digest) in salts
            ]
            doomed = all_of(spaces)
            if not dry_run:
                purge.end_pins(self._tiers, doomed, spaces, whole=True)
            purged = purge.forget(self._tiers, doomed, dry_run=dry_run)
        if not dry_run:
            self._forget_vectors(set(spaces))
            purge.erase(self._opened, spaces)
        return purged.blocks

    def _blocks(self) -> list[Block]:
        with self._tiers.lock:
            return [block for block in self._tiers.blocks.values() if not block.doomed]

    def _tier(self, name: str, total: int, used: int, pinned: bool = False) -> TierStats:
        tiers = self._tiers
        return TierStats(total, used, total - used, tiers.held(name), tiers.leased[name], pinned)

    def _block(self, entry: Entry) -> Block:
        space = self._tiers.namespaces.get(entry.identity)
        block = None if space is None else space.by_key.get(entry.key)
        if block is None:
            raise LookupError("evicted meanwhile")
        return block

    def _with_prefix(
        self, ids: NDArray[np.int32], named: str | None, identities: dict[bytes, Identity]
    ) -> list[Block]:
        """In one identity and its likes under other codecs."""
        chosen = self.described(named)
        doomed: list[Block] = []
        for digest, identity in identities.items():
            same = msgspec.structs.replace(identity, codec=chosen.codec) == chosen
            if same and digest in self._tiers.namespaces:
                doomed += purge.with_prefix(self._tiers.namespaces[digest], ids, identity)
        return doomed

    def _pin(self, ids: NDArray[np.int32], identity: Identity) -> Pin:
        whole = capabilities(identity.layout).reuse == "exact"
        tokens = ids.astype("<i4").tobytes()
        return Pin(identity.digest(), tokens, identity.layout.token_bytes, whole)

    def _mark(self, pin: Pin) -> Namespace:
        """Tell the blocks of an identity whether they are pinned now."""
        space = self._tiers.namespace(pin.identity)
        for block in space.by_key.values():
            block.pinned = self._tiers.pins.covers(block)
        return space

    def _pinned(self, held: int, changed: bool) -> Pinned:
        pins = self._tiers.pins
        return Pinned(pin_statuses(pins), pins.used, pins.limit, held, changed)

    def _forget_vectors(self, spaces: set[Namespace]) -> None:
        for space in spaces:
            forget_vectors(space, self._opened.directory)


def returns(verb: str) -> Any:
    """The type that a verb returns, to decode an answer with. Raises InvalidRequestError for what is no verb."""
    if verb not in VERBS:
        raise InvalidRequestError(f"{verb!r} is none of {', '.join(VERBS)}")
    from typing import get_type_hints

    return get_type_hints(getattr(Administration, verb))["return"]
