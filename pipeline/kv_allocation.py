"""Memory for the keys and values of one sequence, owned by the host and read and written in place by the graphs."""

from __future__ import annotations

import mmap
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from .graphs import EMPTY
from .weights import ModelConfig


class ContextExceeded(ValueError):
    """More tokens than a limit allows; the message says how many, which limit, and what to do."""


class KvAllocation:
    """KV of up to `capacity` tokens in `slots` slots, for every layer.

    `keys[i]` and `values[i]` are [kv_heads, slots, head_dim] for layer i; keys are rotated. They start on pages and
    lie layer by layer in `memory`, so a group of layers is one range of it. Whoever fills a slot also sets its
    position in `slot_positions` (int32 [slots], EMPTY where nothing is held). Which token lies in which slot is the
    owner's matter; the last slot belongs to padding and stays EMPTY.
    """

    def __init__(
        self,
        allocate: Callable[[int], NDArray[np.uint8]],
        config: ModelConfig,
        slots: int,
        dtype: np.dtype[np.float32] | np.dtype[np.float16],
    ) -> None:
        shape = (config.kv_heads, slots, config.head_dim)
        nbytes = int(np.prod(shape)) * dtype.itemsize
        stride = nbytes + -nbytes % mmap.PAGESIZE
        self.slots = slots
        self.memory = allocate(2 * config.layers * stride)
        arrays = [
            self.memory[start : start + nbytes].view(dtype).reshape(shape)
            for start in range(0, len(self.memory), stride)
        ]
        self.keys, self.values = arrays[0::2], arrays[1::2]
        self.slot_positions = np.full(slots, EMPTY, dtype=np.int32)

    @property
    def capacity(self) -> int:
        """Tokens that fit: every slot but the one for padding."""
        return self.slots - 1

    @property
    def padding_slot(self) -> int:
        return self.slots - 1

    def copy_from(self, other: KvAllocation) -> None:
        """Take over all that a smaller or equal allocation of the same model holds, slot for slot."""
        held = other.capacity
        for mine, theirs in zip(self.keys + self.values, other.keys + other.values, strict=True):
            mine[:, :held] = theirs[:, :held]
        self.slot_positions[:held] = other.slot_positions[:held]
        self.slot_positions[held:] = EMPTY
