"""In which order blocks leave the tiers: a policy for each tier, told what is known of the blocks in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvstore.prefetch.eviction import POLICIES

from .appraisal import Appraisal
from .block import Block

NAMES = ("hot", "warm", "cold")


class Orders:
    """`policy` names one of `prefetch.eviction.POLICIES`. Called under the store's lock."""

    def __init__(self, policy: str, appraisal: Appraisal) -> None:
        self._appraisal = appraisal
        self._policies = {name: POLICIES[policy](1) for name in NAMES}

    def expect(self, blocks: Mapping[str, int]) -> None:
        """How many blocks each tier holds when it is full, about."""
        for name, count in blocks.items():
            self._policies[name].room = max(1, count)

    def count(self, tier: str) -> int:
        return len(self._policies[tier])

    def insert(self, tier: str, block: Block) -> None:
        """A block comes into a tier from another one, or from before a restart: that is no use of it."""
        self._policies[tier].insert(block.number, self._appraisal.facts(block, tier))

    def insert_new(self, tier: str, block: Block) -> None:
        """A block was put. If it was held before, the policy may remember that it was used then."""
        facts = self._appraisal.facts(block, tier)
        self._policies[tier].insert(block.number, facts._replace(last_use=None))

    def keep(self, tier: str, block: Block) -> None:
        """Do not think of a block as a victim, as long as it is in the tier and until `offer`."""
        self._policies[tier].keep(block.number)

    def offer(self, tier: str, block: Block) -> None:
        self._policies[tier].offer(block.number)

    def remove(self, tier: str, block: Block) -> None:
        self._policies[tier].remove(block.number)

    def use(self, path: Sequence[Block]) -> None:
        """A request reads these blocks, root first."""
        numbers = [block.number for block in path]
        for policy in self._policies.values():
            policy.touch(numbers)

    def changed(self, block: Block) -> None:
        """A block hangs on another parent, or a hit on it saves more or less since it lies elsewhere, too."""
        memory = () if block.memory is None else (block.memory.tier.name,)
        for tier in (*memory, *(("cold",) if block.cold_bytes else ())):
            facts = self._appraisal.facts(block, tier)
            self._policies[tier].update(block.number, facts.parent, facts.nbytes, facts.saved)

    def victim(self, tier: str, may_leave: Callable[[int], bool]) -> int | None:
        """The number of the block of the least worth that may leave."""
        return self._policies[tier].victim(may_leave)

    def victim_for(
        self, tier: str, may_leave: Callable[[int], bool], incoming: Block, nbytes: int
    ) -> int | None:
        """The same, and None too when `incoming`, of `nbytes` there, is worth less; then that counts as passed."""
        facts = self._appraisal.facts(incoming, tier)._replace(nbytes=nbytes)
        found = self._policies[tier].victim(may_leave, facts)
        if found is None:
            self._policies[tier].passed(facts)
        return found
