"""Does moving a key really give the key that the engine would have computed there? Asked once, when a model is opened.

Keys of layer 0 depend on nothing but the token and its position, so the engine itself is the oracle: the same tokens
computed at two places must give keys that one rotation turns into each other. That finds a wrong pairing, rotary
size, theta or scaling without a second implementation. Geometries of other layers are tested against themselves:
moving in two steps must equal moving in one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .engine import StaticGraphEngine
from .graphs import EMPTY
from .rope import Rope

_TOKENS = 16
_SHIFT = 117
_TOLERANCE = {"float32": 1e-4, "float16": 4e-3}  # of the largest key; twice the rounding of float16 and more


def why_not_shift(engine: StaticGraphEngine, ropes: Sequence[Rope | None]) -> str | None:
    """None when keys can be moved; else the reason to leave moved reuse off. `ropes`: one a layer, as in the layout."""
    for number, rope in enumerate(ropes):
        if rope is not None and rope not in ropes[:number] and (error := _two_steps(rope)) > 1e-5:
            return f"layer {number}: moving a key in two steps differs from one step by {error:.2g}"
    kv = engine.allocate(_SHIFT + _TOKENS)
    ids = np.arange(_TOKENS, dtype=np.int32) % engine.config.vocab
    here, there = np.arange(_TOKENS), np.arange(_SHIFT, _SHIFT + _TOKENS)
    engine.step(ids, here, here, kv, last=None)
    kv.slot_positions[:] = EMPTY
    engine.step(ids, there, there, kv, last=None)
    keys = kv.keys[0]
    moved = np.empty_like(keys[:, here])
    if (rope := ropes[0]) is None:
        moved[:] = keys[:, here]
    else:
        cos, sin = rope.table([_SHIFT])
        kernels.place(
            np.ascontiguousarray(keys[:, here]),
            moved,
            src_dtype=engine.kv_dtype,
            dst_dtype=engine.kv_dtype,
            cos=cos,
            sin=sin,
            pairing=rope.pairing,
        )
    computed = keys[:, there].astype(np.float64)
    error = float(np.abs(moved - computed).max() / np.abs(computed).max())
    if error > _TOLERANCE[engine.kv_dtype]:
        return f"keys of layer 0 moved by {_SHIFT} positions differ from those computed there by {error:.2g}"
    return None


def _two_steps(rope: Rope) -> float:
    """Largest difference between moving random keys by a + b at once and by a, then b."""
    keys = np.random.default_rng(0).standard_normal((2, 8, rope.head_dim)).astype(np.float32)
    once = _turn(keys, rope, 1000)
    return float(np.abs(_turn(_turn(keys, rope, 1377), rope, -377) - once).max())


def _turn(keys: NDArray[np.float32], rope: Rope, shift: int) -> NDArray[np.float32]:
    out = np.empty_like(keys)
    cos, sin = rope.table([shift])
    kernels.place(keys, out, src_dtype="float32", dst_dtype="float32", cos=cos, sin=sin, pairing=rope.pairing)
    return out
