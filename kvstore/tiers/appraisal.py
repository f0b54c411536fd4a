"""What policies are told of a block: what a hit on it saves where it lies, over doing without it there.

    hot     the copy from warm memory
    warm    the load from flash, where that has it, else computing it again; less the copy from warm memory
    cold    computing it again, less the load from flash

Computing is spread evenly over the prompt that the block ends: its last blocks cost more, but are of no use without the
first. It costs what the engine has measured, where it told so (`KVStore.served`), else what the device of the profile
takes; flash is as fast as loads have shown it to be, else as the device's.
"""

from __future__ import annotations

from kvstore.prefetch.cost import DEVICES
from kvstore.prefetch.load_or_recompute import Throughput
from kvstore.prefetch.policy import Facts

from ..block import Block


class Appraisal:
    """Facts of blocks on a device of `prefetch.cost.DEVICES`, whose loads from flash `flash` measures."""

    def __init__(self, device: str, flash: Throughput) -> None:
        self._costs = DEVICES[device]
        self._flash = flash

    def use(self, block: Block) -> Facts:
        """What is known of a block wherever it lies: how often and when it was used, and what it is."""
        return Facts(
            fresh=block.fresh,
            whole=block.length == block.namespace.trie.block_tokens,
            kind="" if block.exact else "inexact",
            session=block.session,
            name=block.key,
            last_use=block.last_use,
            uses=block.hits + 1,
        )

    def facts(self, block: Block, tier: str) -> Facts:
        """What is known of a block, for the policy of `tier`. Called under the store's lock."""
        above = block.namespace.by_key.get(block.parent_key)
        return self.use(block)._replace(
            parent=None if above is None else above.number,
            nbytes=max(1, block.cold_bytes if tier == "cold" else block.nbytes),
            saved=self._saved(block, tier),
        )

    def _saved(self, block: Block, tier: str) -> float:
        copy = self._costs.load_seconds(block.nbytes, "warm") * self._costs.load_weight
        if tier == "hot":
            return copy
        compute = self._compute(block)
        if tier == "cold":
            return compute - self._load(block)
        return (min(compute, self._load(block)) if block.cold_bytes else compute) - copy

    def _compute(self, block: Block) -> float:
        recompute = block.namespace.recompute or self._costs.recompute
        end = block.start + block.length
        return recompute.seconds(end) * block.length / end * self._costs.compute_weight

    def _load(self, block: Block) -> float:
        speed = self._flash.bytes_per_second()
        seconds = block.cold_bytes / speed if speed else self._costs.load_seconds(block.cold_bytes, "cold")
        return seconds * self._costs.load_weight
