"""How close answers over reused KV stay to those of full prefill.

Full prefill answers greedily, 16 tokens. Then each way of reuse is fed that same answer (teacher forcing), so that
the two are compared token by token on equal ground: KL(full || reuse), and whether the most likely token stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.kv_allocation import KvAllocation

FORCED = 16
"""Tokens of an answer that are compared; an allocation needs room for so many behind the prompt."""


class Reference(NamedTuple):
    """What full prefill says: the tokens of its answer [16], and the logits that each was chosen from [16, vocab]."""

    answer: list[int]
    logits: NDArray[np.float32]


class Fidelity(NamedTuple):
    """By token of the answer, [16]: KL(full || reuse) in nats, and whether the most likely token is the same.

    `likeliest` int64 [16]: which that is under reuse.
    """

    kl: NDArray[np.float64]
    agrees: NDArray[np.bool_]
    likeliest: NDArray[np.int64]


def reference(
    engine: StaticGraphEngine, kv: KvAllocation, logits: NDArray[np.float32], position: int
) -> Reference:
    """Answer from full prefill: `kv` holds the prompt's `position` tokens, `logits` float32 [vocab] follow it."""
    answer = greedy(engine, kv, logits, position)
    return Reference(answer, forced(engine, kv, logits, position, answer))


def fidelity(
    engine: StaticGraphEngine,
    kv: KvAllocation,
    logits: NDArray[np.float32],
    position: int,
    full: Reference,
) -> Fidelity:
    """Compare reuse with `full`: `kv` holds the prompt as reuse left it, `logits` are what reuse gave after it."""
    reused = forced(engine, kv, logits, position, full.answer)
    likeliest = reused.argmax(axis=1)
    return Fidelity(divergence(full.logits, reused), full.logits.argmax(axis=1) == likeliest, likeliest)


def unchanged(full: Reference) -> Fidelity:
    """What it comes to where all was computed: `full` compared with itself."""
    count = len(full.answer)
    return Fidelity(np.zeros(count), np.ones(count, dtype=bool), full.logits.argmax(axis=1))


def answer_of_reuse(
    engine: StaticGraphEngine, kv: KvAllocation, position: int, full: Reference, close: Fidelity
) -> list[int]:
    """What reuse answers greedily, 16 tokens; only what follows its first other token has to be computed.

    `close` was found with `kv`, whose KV behind the prompt is written anew from there on.
    """
    if close.agrees.all():
        return full.answer
    same = int(np.argmin(close.agrees))
    answer = [*full.answer[:same], int(close.likeliest[same])]
    while len(answer) < FORCED:
        at = position + len(answer) - 1
        logits = engine.step([answer[-1]], [at], [at], kv)
        assert logits is not None
        answer.append(int(logits.argmax()))
    return answer


def greedy(
    engine: StaticGraphEngine, kv: KvAllocation, logits: NDArray[np.float32], position: int
) -> list[int]:
    """The 16 tokens that are each the most likely, whether or not an end token is among them."""
    answer: list[int] = []
    for token in engine.decode(logits, kv, position):
        answer.append(token)
        if len(answer) == FORCED:
            break
    return answer


def forced(
    engine: StaticGraphEngine,
    kv: KvAllocation,
    logits: NDArray[np.float32],
    position: int,
    answer: Sequence[int],
) -> NDArray[np.float32]:
    """Logits [len(answer), vocab] after the prompt and after each token of `answer` but the last."""
    fed = np.array(answer[:-1], dtype=np.int32)
    at = np.arange(position, position + len(fed), dtype=np.int32)
    calls = engine.plan(fed, at, at, kv)
    return np.vstack([logits, engine.run(calls, kv, logits_of=range(len(fed)))])


def divergence(full: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float64]:
    """KL(full || other) of each row of logits [n, vocab], in nats."""
    p, q = _log_softmax(full), _log_softmax(other)
    return np.asarray(np.sum(np.exp(p) * (p - q), axis=1))


def _log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
