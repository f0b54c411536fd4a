"""What one frame holds: which layers of which layout, of which tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

import msgspec

from ..layout import LayerLayout, Layout


class Stretch(NamedTuple):
    """`times` equal layers with KV, one after the other in a frame's raw bytes; those before take `offset` bytes."""

    layer: LayerLayout
    times: int
    offset: int


class FrameShape(msgspec.Struct, frozen=True, dict=True):
    """`layers`, a contiguous range of `layout`, of `tokens` tokens, the first of which stands at position `start`."""

    layout: Layout
    layers: range
    tokens: int
    start: int

    @property
    def nbytes(self) -> int:
        """Length of the raw form."""
        return sum(self.layout.layer_bytes(number, self.tokens) for number in self.layers)

    @cached_property
    def stretches(self) -> tuple[Stretch, ...]:
        return tuple(self._stretches())

    def _stretches(self) -> Iterator[Stretch]:
        offset, times = 0, 0
        holding = [self.layout.layers[number] for number in self.layers]
        holding = [layer for layer in holding if layer.holds_kv]
        for number, layer in enumerate(holding):
            times += 1
            if number + 1 == len(holding) or holding[number + 1] != layer:
                yield Stretch(layer, times, offset)
                offset += times * self.array_bytes(layer)
                times = 0

    def array_bytes(self, layer: LayerLayout) -> int:
        """Bytes of the keys and values of one such layer."""
        return self.tokens * layer.kv_heads * (layer.head_dim + layer.value_dim) * self.layout.itemsize
