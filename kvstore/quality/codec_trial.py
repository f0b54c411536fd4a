"""What a codec does to answers: a prompt's KV passes through it, then the model goes on from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.kv_allocation import KvAllocation

from ..buffer import KvBuffer
from ..codec import Codec, decoder, encode
from ..codec.shape import FrameShape
from ..layout import Layout
from .fidelity import FORCED, Fidelity, Reference, fidelity

MOST_KL: dict[Codec, float] = {"int8": 0.001, "fine": 0.001, "small": 0.012}
"""Mean KL(full || coded) over 16 tokens up to which a model bears a codec; see `bears`."""

LEAST_AGREEMENT = 0.95
"""And the share of the 16 tokens that stay the most likely one."""


class CodecTrial(NamedTuple):
    """One prompt through one codec: bytes stored for how many tokens, and how close the answer stays."""

    stored: int
    tokens: int
    close: Fidelity


def bears(codec: Codec, trials: list[CodecTrial]) -> bool:
    """Whether a model bears a codec, by what it did to `trials`, at least one."""
    kl = np.mean([trial.close.kl for trial in trials])
    agreement = np.mean([trial.close.agrees for trial in trials])
    return bool(kl <= MOST_KL[codec] and agreement >= LEAST_AGREEMENT)


def go_on(
    engine: StaticGraphEngine,
    whole: KvAllocation,
    prompt: NDArray[np.int32],
    full: Reference,
    code: Callable[[KvAllocation, int], int],
) -> CodecTrial:
    """Answer from KV of all tokens but the last that went through `code`.

    code: gets an allocation and how many tokens of it to change; returns the bytes that they are stored in. `whole`
    holds the prompt as full prefill left it, and is not changed.
    """
    held = len(prompt) - 1
    kv = engine.allocate(len(prompt) + FORCED)
    try:
        kv.copy_from(whole)
        stored = code(kv, held)
        logits = engine.prefill(prompt, kv, start=held)
        return CodecTrial(stored, held, fidelity(engine, kv, logits, len(prompt), full))
    finally:
        engine.recycle(kv)


def pass_through(codec: Codec, layout: Layout, block_tokens: int, kv: KvBuffer, tokens: int) -> int:
    """Replace the first `tokens` tokens of `kv` by what `codec` makes of them, cut into blocks; returns bytes stored.

    kv: arrays a layer, keys and values [kv_heads, slots, channels]; token i, at position i, in slot i.
    """
    stored = 0
    layers = range(len(layout.layers))
    for start in range(0, tokens, block_tokens):
        span = slice(start, min(start + block_tokens, tokens))
        shape = FrameShape(layout, layers, span.stop - start, start)
        raw = np.empty(shape.nbytes, dtype=np.uint8)
        views = list(layout.layer_views(raw, layers, shape.tokens))
        for layer, *arrays in views:
            for array, held in zip(arrays, (kv.keys[layer], kv.values[layer]), strict=True):
                assert held is not None, "this layer holds KV"
                array[...] = held[:, span]
        encoded = encode(codec, raw, shape)
        taken = decoder(encoded.form, [len(piece) for piece in encoded.pieces], shape)
        for buffer, piece in zip(taken.pieces, encoded.pieces, strict=True):
            buffer[:] = np.frombuffer(piece, dtype=np.uint8)
            stored += len(buffer)
        taken.finish(raw)
        for layer, *arrays in views:
            for array, held in zip(arrays, (kv.keys[layer], kv.values[layer]), strict=True):
                assert held is not None, "this layer holds KV"
                held[:, span] = array
    return stored
