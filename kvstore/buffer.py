"""KV as an engine holds it: per layer two arrays, keys and values, [kv_heads, slots, head_dim]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import BufferTooSmallError, LayoutMismatchError
from .layout import Layout


class KvBuffer(Protocol):
    """Arrays of any strides, so that a transposed or padded engine layout is a view and needs no copy.

    Layers without KV have None. bfloat16 is held as uint16.
    """

    @property
    def keys(self) -> Sequence[NDArray[Any] | None]: ...

    @property
    def values(self) -> Sequence[NDArray[Any] | None]: ...


def check_buffer(
    buffer: KvBuffer, layout: Layout, tokens: int, slots: NDArray[np.int64] | None, *, written: bool = False
) -> None:
    """Raise LayoutMismatchError or BufferTooSmallError unless `buffer` has room for `tokens` tokens of `layout`.

    `written` asks besides that it can be written.
    """
    for name, arrays in (("keys", buffer.keys), ("values", buffer.values)):
        if len(arrays) != len(layout.layers):
            raise LayoutMismatchError(f"{name} has {len(arrays)} layers, the layout has {len(layout.layers)}")
    if slots is not None:
        if not isinstance(slots, np.ndarray) or slots.ndim != 1 or slots.dtype.kind not in "iu":
            raise LayoutMismatchError(f"slots must be a one-dimensional array of integers, is {slots!r}")
        if len(slots) < tokens:
            raise BufferTooSmallError(f"needs slots for {tokens} tokens, got {len(slots)}")
    highest = tokens - 1 if slots is None else int(slots[:tokens].max(initial=-1))
    if slots is not None and int(slots[:tokens].min(initial=0)) < 0:
        raise LayoutMismatchError("slots must not be negative")
    dtype = layout.numpy_dtype
    for name, arrays, sizes in (
        ("keys", buffer.keys, layout.key_sizes),
        ("values", buffer.values, layout.value_sizes),
    ):
        for index, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
            if size is None:
                continue
            if not isinstance(array, np.ndarray):
                raise LayoutMismatchError(
                    f"{name} of layer {index} is {array!r}, the layout has {layout.layers[index]}"
                )
            if array.dtype != dtype:
                raise LayoutMismatchError(
                    f"{name} of layer {index} is {array.dtype}, the layout has {layout.dtype} (held as {dtype})"
                )
            if array.ndim != 3 or array.shape[::2] != size:
                raise LayoutMismatchError(
                    f"{name} of layer {index} has shape {array.shape}, needs ({size[0]}, tokens, {size[1]})"
                )
            if written and not array.flags.writeable:
                raise LayoutMismatchError(f"{name} of layer {index} is read-only")
            if array.shape[1] <= highest:
                what = f"needs {tokens} tokens" if slots is None else f"needs slot {highest}"
                raise BufferTooSmallError(f"{what}, {name} of layer {index} holds {array.shape[1]}")
