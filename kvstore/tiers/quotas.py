"""Whose memory and flash a block takes, and how much of both one tenant may take.

With walls (a daemon's) each tenant is an owner by himself, known by the salt of his identities, and the profile may set
limits for each. Without walls all is one owner's, and only the budgets of the tiers limit him.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..block import Block
from ..flash.cold import ColdTier
from ..namespace import Namespace
from ..profile import Profile
from .memory import MemoryTier

TENANT_QUOTA = "tenant quota"


class Quotas:
    """What each owner of blocks in `namespaces` has, and whether it would exceed his quota. Makes no room itself.

    Nothing is counted twice: memory is counted by its tiers, where it is handed out, flash by namespace, since a
    namespace that flash had before the store was opened gets its tenant later. Called under the store's lock.
    """

    def __init__(
        self,
        profile: Profile,
        namespaces: Mapping[bytes, Namespace],
        hot: MemoryTier,
        warm: MemoryTier,
        cold: ColdTier | None,
        *,
        walled: bool,
    ) -> None:
        self.most_memory = profile.tenant_memory_bytes if walled else None
        """Bytes of hot and warm memory; None sets no limit."""
        self.most_flash = profile.tenant_cold_bytes if walled else None
        self._walled = walled
        self._namespaces = namespaces
        self._hot = hot
        self._warm = warm
        self._cold = cold

    def owner(self, space: Namespace) -> bytes:
        """Whose the blocks of a namespace are: the tenant's by its salt. All is one owner's without walls."""
        return space.tenant if self._walled else b""

    def exceeds_memory(self, owner: bytes, nbytes: int) -> bool:
        """Whether a block of `nbytes` more in hot or warm memory would be more than he may have."""
        if self.most_memory is None:
            return False
        return self.memory_used(owner) + self._warm.round_up(nbytes) > self.most_memory

    def exceeds_flash(self, owner: bytes, nbytes: int) -> bool:
        """Whether a record of `nbytes` more would be more than he may have."""
        if self.most_flash is None or self._cold is None:
            return False
        return self.flash_used(owner) + self._cold.room(nbytes) > self.most_flash

    def memory_used(self, owner: bytes) -> int:
        """Bytes of hot and warm memory that his blocks take, those included that are being copied in."""
        return self._hot.used_by[owner] + self._warm.used_by[owner]

    def flash_used(self, owner: bytes) -> int:
        """Bytes of flash that his blocks occupy."""
        return sum(space.flash_bytes for space in self._namespaces.values() if self.owner(space) == owner)


def on_flash(block: Block, size: int) -> None:
    """A block occupies `size` bytes of flash from now on; all that changes that says so here."""
    block.namespace.flash_bytes += size - block.cold_bytes
    block.cold_bytes = size
