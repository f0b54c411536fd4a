"""Does moving a key really give the key that the engine would have computed there?

A token that stands alone attends to itself only. So whatever its position, each layer computes the same of it, but for
the rotation of its key: keys of a lone token at two positions must differ by one rotation between them, in every layer.
The engine itself is the oracle, and a wrong pairing, rotary size, theta or scaling of any layer shows, without a second
implementation. The positions lie as far apart as the context allows, where also the slowest channels have turned.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from . import kernels
from .call import Call
from .engine import StaticGraphEngine
from .graphs import EMPTY
from .rope import Rope

KeysAt = Callable[[int, int], Sequence[NDArray[Any] | None]]
"""(token id, position) → the keys of a token that nothing precedes: of each layer [kv_heads, head_dim], float16 or
float32, rotated as in the KV; None of a layer without keys. Good until it is called again."""

_TOKENS = (17, 101)
_TOLERANCE = {"float32": 1e-4, "float16": 4e-3, "bfloat16": 3e-2}
"""Of a layer's largest key; twice the rounding of the 16-bit formats and more."""
_TINY = np.float32(1e-30)  # keys that are all zero differ by nothing

_answers: WeakKeyDictionary[StaticGraphEngine, dict[tuple[Rope | None, ...], str | None]] = (
    WeakKeyDictionary()
)


def why_not_shift(
    keys_at: KeysAt, ropes: Sequence[Rope | None], *, context: int, kv_dtype: str = "float32"
) -> str | None:
    """None when keys can be moved; else the reason to leave moved reuse off.

    ropes: one a layer, as in the layout. context: how many positions there are. kv_dtype: of the KV that the keys come
    from, float32, float16 or bfloat16. Asks for two tokens with the ids 17 and 101, at three positions each.
    Raises ValueError unless there are keys, or None, for each of `ropes`.
    """
    for token in _TOKENS:
        first = _copied(keys_at(token, 0))
        for position in (context // 2, context - 1):
            there = _copied(keys_at(token, position))
            for layer, (rope, keys, expected) in enumerate(zip(ropes, first, there, strict=True)):
                if keys is None or expected is None:
                    continue
                moved = keys if rope is None else _turned(keys, rope, position)
                error = np.abs(moved - expected).max() / max(np.abs(expected).max(), _TINY)
                if not error <= _TOLERANCE[kv_dtype]:  # nor NaN
                    return (
                        f"keys of layer {layer} moved by {position} positions differ from those computed there by "
                        f"{error:.2g}"
                    )
    return None


def why_engine_does_not_shift(engine: StaticGraphEngine, ropes: Sequence[Rope | None]) -> str | None:
    """As `why_not_shift`, of the bundled engine. Asked once of an engine for the same `ropes`: it takes six steps."""
    answers = _answers.setdefault(engine, {})
    if (key := tuple(ropes)) not in answers:
        kv = engine.allocate(1)

        def keys_at(token: int, position: int) -> list[NDArray[Any]]:
            kv.slot_positions[:] = EMPTY
            ids, at, slots = np.array([[token % engine.config.vocab], [position], [0]], np.int32)
            engine.run([Call(engine.sizes[0], ids, at, slots)], kv)
            return [keys[:, 0] for keys in kv.keys]

        answers[key] = why_not_shift(
            keys_at, ropes, context=engine.config.context_length, kv_dtype=engine.kv_dtype
        )
        engine.recycle(kv)
    return answers[key]


def _copied(keys: Sequence[NDArray[Any] | None]) -> list[NDArray[np.float32] | None]:
    return [None if each is None else np.array(each, np.float32, order="C") for each in keys]


def _turned(keys: NDArray[np.float32], rope: Rope, shift: int) -> NDArray[np.float32]:
    """Keys [kv_heads, head_dim] of one token, turned by `shift` positions."""
    source = keys[:, None]
    out = np.empty_like(source)
    cos, sin = rope.table([shift])
    kernels.place(
        source, out, src_dtype="float32", dst_dtype="float32", cos=cos, sin=sin, pairing=rope.pairing
    )
    return out[:, 0]
