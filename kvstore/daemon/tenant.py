"""Whose KV it is: clients of another user, or with another salt, are other tenants, and share nothing.

The wall is the identity: a tenant is mixed into the salt of each identity that it opens, so that tenants have different
namespaces, where neither look-ups nor their timing tell anything of another's. Who runs the daemon is the one tenant
whose identities stay as they are: what an embedded store kept in the same directory is the same user's.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from kvstore.identity import Identity


@dataclass(frozen=True)
class Tenant:
    """A user, and what its identity has for a salt; Identity keeps only a digest of that."""

    uid: int
    salt: bytes

    @property
    def name(self) -> str:
        """The uid, and where there is a salt a digest of it."""
        if not self.salt:
            return str(self.uid)
        return f"{self.uid}-{blake2b(self.salt, digest_size=6, person=b'kvstore.tenant').hexdigest()}"

    @classmethod
    def of(cls, uid: int, identity: Identity) -> Tenant:
        return cls(uid, identity.tenant_salt)

    def own(self, identity: Identity) -> Identity:
        """The identity under which this tenant's KV is held."""
        if self.uid == os.geteuid():
            return identity
        return msgspec.structs.replace(identity, tenant_salt=b"uid %d:" % self.uid + self.salt)
