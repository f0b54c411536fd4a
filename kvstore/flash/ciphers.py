"""Which key opens what in a data directory, and under which what is new is written.

What is there is readable for the tenant whose key it is under, and for nobody else: a record that says it is of a
tenant, and lies under another's key, is not that tenant's. Where keys are in use, what lies in clear is read by nobody;
else who can write files could plant KV.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence

from ..errors import EncryptionError
from .encryption import CLEAR_BYTES, ID_BYTES, KEY_BYTES, Cipher, Key, OtherKeyError, Sealing
from .keys import KeySource


class Ciphers:
    """Those of one directory. `source` None: all lies in clear, but for tenants that give a key. Thread-safe.

    Identities are named by their digest, tenants by their salt.
    """

    def __init__(self, source: KeySource | None = None) -> None:
        self._source = source
        self._lock = threading.RLock()
        self._tenants: dict[bytes, bytes] = {}
        self._of: dict[bytes, tuple[Cipher, ...]] = {}  # by tenant, the one to write under last
        self._given: dict[
            bytes, tuple[Key, ...]
        ] = {}  # by tenant that gave keys; none once they were dropped
        self._opened: set[bytes] = set()  # tenants that somebody works with
        self._at_hand: dict[Key, Cipher] = {}
        self._by_id: dict[bytes, Cipher] = {}
        if source is not None:
            source.keys(b"")  # refused now rather than when something is written
            Cipher(Key(bytes(KEY_BYTES)))

    # -- who there is -------------------------------------------------------------------------------------------------

    def note(self, digest: bytes, tenant: bytes) -> bool:
        """An identity is this tenant's; whether that was new. Makes no key. Raises EncryptionError."""
        with self._lock:
            if digest in self._tenants:
                return False
            self._tenants[digest] = tenant
            if self._source is not None and tenant not in self._of:
                self._take(tenant, self._source.keys(tenant))
            return True

    def open(self, digest: bytes, tenant: bytes, given: Sequence[Key] | None = None) -> bool:
        """Somebody works with an identity; whether there may be more to read now.

        given: keys that a client has, the one to write under last; None where it is no client. Whoever gives one has
        the tenant to himself: raises EncryptionError for clients who have it not, or another, and where others work
        with the tenant without one.
        """
        with self._lock:
            fresh = self.note(digest, tenant)
            if given is None:
                self.of(digest)
                return fresh
            had = self._given.get(tenant)
            if had is not None and not given:
                raise EncryptionError("this tenant has a key of its own; give it as `key`")
            if had and had[-1] not in given:
                raise EncryptionError(
                    "this tenant is open under another key; give that, or it and the new one"
                )
            if given and had is None and tenant in self._opened:
                raise EncryptionError(
                    "this tenant is open without a key of its own; restart whoever serves it"
                )
            if given and tuple(given) != had:
                own = () if self._source is None else self._source.keys(tenant)
                self._given[tenant] = (*(key for key in had or () if key not in given), *given)
                self._take(tenant, dict.fromkeys((*own, *self._given[tenant])))
                fresh = True
            self._opened.add(tenant)
            self.of(digest)  # makes a key where there is none: better refused now than when it is written
            return fresh

    def tenant(self, digest: bytes) -> bytes | None:
        """Whose an identity is; None where nobody noted it."""
        with self._lock:
            return self._tenants.get(digest)

    def identities(self, tenants: Collection[bytes]) -> list[bytes]:
        """Those of some tenants."""
        with self._lock:
            return [digest for digest, tenant in self._tenants.items() if tenant in tenants]

    def tenants(self) -> set[bytes]:
        """All that identities were noted of."""
        with self._lock:
            return set(self._tenants.values())

    # -- reading and writing ------------------------------------------------------------------------------------------

    def of(self, digest: bytes) -> Cipher | None:
        """Encrypts what is new of an identity; None: it is written in clear. Raises EncryptionError."""
        with self._lock:
            tenant = self._tenants.get(digest)
            if tenant is None:
                if self._source is None:
                    return None
                raise EncryptionError(f"nobody said whose identity {digest.hex()[:12]} is; open it first")
            if not (ciphers := self._of.get(tenant)):
                if tenant in self._given:
                    raise EncryptionError("this tenant's key was dropped; open it with a new one")
                if self._source is None:
                    return None
                ciphers = self._take(tenant, (self._source.make(tenant),))
            return ciphers[-1]

    def permits(self, digest: bytes, cipher: Cipher | None) -> bool:
        """Whether what lies under `cipher` (None: in clear) may be read as this identity's."""
        with self._lock:
            tenant = self._tenants.get(digest)
            if cipher is None:
                return self._source is None and (tenant is None or tenant not in self._given)
            return tenant is not None and cipher in self._of.get(tenant, ())

    def under_which(self, digest: bytes) -> tuple[Cipher | None, ...]:
        """What may be read as this identity's lies under one of these, the last one first."""
        with self._lock:
            tenant = self._tenants.get(digest)
            ciphers = () if tenant is None else self._of.get(tenant, ())[::-1]
            return ciphers or ((None,) if self.permits(digest, None) else ())

    def all(self) -> list[Cipher | None]:
        """Every cipher that something may lie under; None among them where something may lie in clear."""
        with self._lock:
            used = {cipher: None for ciphers in self._of.values() for cipher in ciphers}
            return [*([None] if self._source is None else []), *used]

    def has(self, cipher_id: bytes) -> bool:
        """Whether the key with this id is at hand."""
        return cipher_id in self._by_id

    def unsealing(self, clear: bytes) -> tuple[Cipher, Sealing]:
        """For what was written with `clear` before it. Raises OtherKeyError."""
        cipher = self._by_id.get(clear[:ID_BYTES])
        if cipher is None:
            raise OtherKeyError
        return cipher, cipher.unsealing(clear)

    def sealer(self, digest: bytes) -> Sealer | None:
        """For small files of an identity; None: they are in clear. Raises EncryptionError."""
        return None if self.of(digest) is None else Sealer(self, digest)

    # -- changing keys ------------------------------------------------------------------------------------------------

    def renew(self, tenant: bytes) -> None:
        """Write under a new key from now on, unless a rotation that was stopped left one, or there is none yet.

        Raises EncryptionError.
        """
        with self._lock:
            keys = tuple(cipher.key for cipher in self._of.get(tenant, ()))
            if len(keys) > 1:
                return
            if tenant in self._given or self._source is None:
                raise EncryptionError(
                    "this tenant's key is its own: it opens with the old and the new one, and then rotates"
                    if tenant in self._given
                    else "nothing is encrypted here; set key_file or keyring, or open with a key"
                )
            if keys:
                fresh = Key.generate()
                self._source.keep(tenant, (*keys, fresh))
                self._take(tenant, (*keys, fresh))

    def settle(self, tenant: bytes) -> list[Cipher]:
        """Nothing lies under a tenant's old keys any more: erase them; what they were. Raises EncryptionError."""
        with self._lock:
            if not self.has_key(tenant):
                return []
            *old, last = self._of[tenant]
            if tenant in self._given:
                self._given[tenant] = (last.key,)
            if self._source is not None and any(key != last.key for key in self._source.keys(tenant)):
                self._source.keep(tenant, () if tenant in self._given else (last.key,))
            self._take(tenant, (last.key,))
            self._forget_unused()
            return old

    def drop(self, tenant: bytes) -> list[Cipher]:
        """Erase all keys of a tenant; what they were. Raises EncryptionError."""
        with self._lock:
            old = self._of.pop(tenant, ())
            if self._source is not None:
                self._source.keep(tenant, ())
            if tenant in self._given:
                self._given[tenant] = ()
            if not old:
                raise EncryptionError(
                    "this tenant has no key here; `kvstore purge --tenant` forgets what is in clear"
                )
            self._forget_unused()
            return list(old)

    def has_key(self, tenant: bytes) -> bool:
        """Whether a tenant's KV is encrypted."""
        return bool(self._of.get(tenant))

    def has_only_its_own(self, tenant: bytes) -> bool:
        """Whether the only key of a tenant is one that he gave: then nobody else can make the next one."""
        with self._lock:
            return tenant in self._given and len(self._of.get(tenant, ())) < 2

    def _take(self, tenant: bytes, keys: Iterable[Key]) -> tuple[Cipher, ...]:
        keys = tuple(keys)
        for key in keys:
            if key not in self._at_hand:
                self._at_hand[key] = Cipher(key)
        ciphers = self._of[tenant] = tuple(self._at_hand[key] for key in keys)
        self._by_id |= {cipher.id: cipher for cipher in ciphers}
        return ciphers

    def _forget_unused(self) -> None:
        used = {cipher for ciphers in self._of.values() for cipher in ciphers}
        self._by_id = {cipher.id: cipher for cipher in used}
        self._at_hand = {cipher.key: cipher for cipher in used}


class Sealer:
    """Encrypts small files of an identity, each time under the key that is its tenant's then."""

    def __init__(self, ciphers: Ciphers, digest: bytes) -> None:
        self._ciphers = ciphers
        self._digest = digest

    def seal(self, plain: bytes) -> bytes:
        """A file as it is stored. Raises EncryptionError."""
        cipher = self._ciphers.of(self._digest)
        assert cipher is not None, "a tenant that has a key has one until it is dropped"
        return cipher.seal(plain)

    def open(self, stored: bytes) -> bytes:
        """What `seal` was given. Raises OtherKeyError, AlteredError."""
        cipher, _ = self._ciphers.unsealing(stored[:CLEAR_BYTES])
        if not self._ciphers.permits(self._digest, cipher):
            raise OtherKeyError
        return cipher.open(stored)
