"""What may leave a tier just now, and which block of it goes first.

    memory   not what a lease names, what waits for flash, what stays; and of what only memory has, not what others
             hang on, nor what waits for a decision whether flash is to have it, see `unwritten`
    hot      to warm memory: not what a lease names, nor what stays
    flash    not what a lease names, what stays, what others hang on

What stays is pinned, or a part of a beginning that several prompts share. Of the rest the profile's policy says what is
worth the least, see `orders`.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

from ..block import Block
from ..flash.unwritten import Unwritten
from ..namespace import Namespace
from .orders import Orders


class Leaving:
    """Chooses among `blocks`, by number, and moves none. Called under the store's lock.

    owner(): whose a namespace is. Whoever makes room in memory gets it from his own blocks alone.
    """

    def __init__(
        self,
        blocks: Mapping[int, Block],
        owner: Callable[[Namespace], bytes],
        orders: Orders,
        unwritten: Unwritten,
    ) -> None:
        self._blocks = blocks
        self._owner = owner
        self._orders = orders
        self._unwritten = unwritten

    def stays(self, block: Block) -> bool:
        """Whether nothing but its user may drop a block."""
        return bool(block.pinned or block.shared)

    def may_leave_memory(self, block: Block) -> bool:
        if block.leases or block.waiting or self.stays(block):
            return False
        if block.cold_bytes:
            return True
        return block.namespace.is_leaf(block) and not self._unwritten.is_undecided(block)

    def may_leave_hot(self, block: Block) -> bool:
        """Whether a hot block may go to warm memory."""
        return not (block.leases or self.stays(block))

    def may_leave_flash(self, block: Block) -> bool:
        return block.leases == 0 and not self.stays(block) and block.namespace.is_leaf(block)

    def from_memory(self, tier: str, owner: bytes, spared: Container[int] = ()) -> Block | None:
        """The block that goes first of those that an owner has in hot or warm memory. None of the numbers `spared`."""

        def may_leave(number: int) -> bool:
            return number not in spared and self.may_leave_memory(self._blocks[number])

        return self._block(self._orders.in_memory(tier, owner, may_leave))

    def from_hot(self, owner: bytes) -> Block | None:
        """The hot block of an owner that goes to warm memory first."""
        return self._block(
            self._orders.in_memory("hot", owner, lambda number: self.may_leave_hot(self._blocks[number]))
        )

    def from_flash(
        self, owner: bytes | None = None, incoming: Block | None = None, nbytes: int = 0
    ) -> Block | None:
        """The record that goes first: of an owner's, or for None of all.

        incoming: the block whose record of `nbytes` is to take its place; None, too, when that is worth less.
        """

        def may_leave(number: int) -> bool:
            block = self._blocks[number]
            return (owner is None or self._owner(block.namespace) == owner) and self.may_leave_flash(block)

        if incoming is None:
            return self._block(self._orders.on_flash(may_leave))
        return self._block(self._orders.on_flash_for(may_leave, incoming, nbytes))

    def _block(self, number: int | None) -> Block | None:
        return None if number is None else self._blocks[number]
