"""In which order blocks leave the tiers: a policy for each, told what is known of the blocks in it.

In memory each owner has orders of his own, since only his own blocks make room for his: no search goes through those of
others, and what a policy learns of one tenant says nothing to another. On flash all share one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvstore.prefetch.eviction import POLICIES
from kvstore.prefetch.policy import Policy

from ..block import Block
from ..namespace import Namespace
from .appraisal import Appraisal

NAMES = ("hot", "warm", "cold")


class Orders:
    """`policy` names one of `prefetch.eviction.POLICIES`. Called under the store's lock.

    owner(): whose a namespace is. It must not change as long as a block of it is in memory.
    """

    def __init__(self, policy: str, appraisal: Appraisal, owner: Callable[[Namespace], bytes]) -> None:
        self._new = POLICIES[policy]
        self._appraisal = appraisal
        self._owner = owner
        self._rooms = dict.fromkeys(NAMES, 1)
        self._policies: dict[tuple[str, bytes], Policy] = {}

    def expect(self, blocks: Mapping[str, int]) -> None:
        """How many blocks each tier holds when it is full, about; all of them may be one owner's."""
        for name, count in blocks.items():
            self._rooms[name] = max(1, count)
        for (name, _), policy in self._policies.items():
            policy.room = self._rooms[name]

    def count(self, tier: str) -> int:
        return sum(len(policy) for (name, _), policy in self._policies.items() if name == tier)

    def insert(self, tier: str, block: Block) -> None:
        """A block comes into a tier from another one, or from before a restart: that is no use of it."""
        self._policy(tier, block).insert(block.number, self._appraisal.facts(block, tier))

    def insert_new(self, tier: str, block: Block) -> None:
        """A block was put. If it was held before, the policy may remember that it was used then."""
        facts = self._appraisal.facts(block, tier)
        self._policy(tier, block).insert(block.number, facts._replace(last_use=None))

    def keep(self, tier: str, block: Block) -> None:
        """Do not think of a block as a victim, as long as it is in the tier and until `offer`."""
        self._policy(tier, block).keep(block.number)

    def offer(self, tier: str, block: Block) -> None:
        self._policy(tier, block).offer(block.number)

    def remove(self, tier: str, block: Block) -> None:
        self._policy(tier, block).remove(block.number)

    def use(self, path: Sequence[Block]) -> None:
        """A request reads these blocks of one namespace, root first."""
        numbers = [block.number for block in path]
        for tier in NAMES if path else ():
            self._policy(tier, path[0]).touch(numbers)

    def changed(self, block: Block) -> None:
        """A block hangs on another parent, or a hit on it saves more or less since it lies elsewhere, too."""
        memory = () if block.memory is None else (block.memory.tier.name,)
        for tier in (*memory, *(("cold",) if block.cold_bytes else ())):
            facts = self._appraisal.facts(block, tier)
            self._policy(tier, block).update(block.number, facts.parent, facts.nbytes, facts.saved)

    def in_memory(self, tier: str, owner: bytes, may_leave: Callable[[int], bool]) -> int | None:
        """The number of the block of the least worth that an owner has in hot or warm memory and that may leave."""
        policy = self._policies.get((tier, owner))
        return None if policy is None else policy.victim(may_leave)

    def on_flash(self, may_leave: Callable[[int], bool]) -> int | None:
        """The number of the block of the least worth on flash that may leave."""
        return self._find("cold", b"").victim(may_leave)

    def on_flash_for(self, may_leave: Callable[[int], bool], incoming: Block, nbytes: int) -> int | None:
        """The same, and None too when `incoming`, of `nbytes` there, is worth less; then that counts as passed."""
        facts = self._appraisal.facts(incoming, "cold")._replace(nbytes=nbytes)
        policy = self._find("cold", b"")
        found = policy.victim(may_leave, facts)
        if found is None:
            policy.passed(facts)
        return found

    def _policy(self, tier: str, block: Block) -> Policy:
        return self._find(tier, b"" if tier == "cold" else self._owner(block.namespace))

    def _find(self, tier: str, owner: bytes) -> Policy:
        found = self._policies.get((tier, owner))
        if found is None:
            found = self._policies[tier, owner] = self._new(1)
            found.room = self._rooms[tier]
        return found
