"""KV of passages that are known before any prompt shows them (notes, tool schemas), computed in idle time.

What a passage stood behind when its KV was computed decides how well that serves elsewhere. KL over 16 tokens, without
repair and with the first 4 tokens of each run computed again (SmolLM2-135M, 7 open questions behind 4 passages):

    right behind the system prompt                           .11 / .11
    behind that and 200 tokens of prose on something else    .13 / .12
    behind that and two other passages of the same text      .07 / .06
    among passages as prompts come by                        .07 / .07

So each is computed behind the same two, the system prompt and a filler: other passages. Their KV is a prefix of all
captures, computed once, and kept once, as it ends where a block does.

    system prompt ─ filler ─ passage 1          computed: all of it
    system prompt ─ filler ─ passage 2          computed: the passage

What traffic has left behind other text serves as well, and is not captured again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvstore.pipeline.engine import StaticGraphEngine
from kvstore.pipeline.kv_allocation import ContextExceeded
from kvstore.pipeline.self_test import why_engine_does_not_shift

from .api import Store
from .language_model import LanguageModel
from .moved import SHORTEST, Piece
from .put import PutResult
from .quality.reuse import Policy

FILLER = (
    "The morning began as most mornings do. Light came slowly over the roofs, and the streets below were still quiet. "
    "A few people walked to work, some with a cup in their hands, others with their eyes on the ground. Shops opened "
    "one after another: doors were unlocked, lamps went on, chairs were put outside. Someone swept the pavement, "
    "someone else watered the plants by the window. On the corner two neighbours stopped to talk about the weather, "
    "which was neither warm nor cold, and agreed that it might change later. A bicycle passed, then a van that brought "
    "bread. Nobody was in a hurry.\n\n"
    "Around noon there was more to see. People sat on benches and ate what they had brought with them, children played "
    "between the trees, and a dog slept in the shade. It was an ordinary day, and little of it would be remembered. In "
    "the afternoon clouds came up, a light rain fell for a while, and then the sky was clear again. When evening came, "
    "the shops closed in the same order in which they had opened, the chairs were carried inside, and the streets grew "
    "quiet once more. Behind the windows tables were laid, and the day ended as calmly as it had begun."
)
"""Stands before few or short passages, which have not enough others. It names nothing that a question might ask for."""

_LONG = 200  # tokens

Tokens = NDArray[np.int32]


class Refused(NamedTuple):
    """Passage number `passage` was not captured, and why."""

    passage: int
    reason: str


class Captured(NamedTuple):
    """What became of the passages: captured + held + len(refused) + left is how many there were.

    held: stood behind other text already. left: not come to, since `go_on` said so, or the store took no more.
    tokens: new in the store.
    """

    captured: int
    held: int
    refused: tuple[Refused, ...]
    left: int
    tokens: int


def capture(
    store: Store,
    system: Tokens,
    filler: Tokens,
    passages: Sequence[Tokens],
    compute: Callable[[Tokens], PutResult],
    *,
    go_on: Callable[[], bool] = lambda: True,
) -> Captured:
    """Have `compute` compute each of `passages` that `store` does not hold behind other text; for any engine.

    system: a prompt up to where passages begin, int32 [n]; filler: some 200 tokens or more of a text of the passages'
    kind that is none of them, see `beginning`; passages: int32 [n] each, as prompts will show them. compute: prefills a
    prompt behind what is held of it as a prefix, without moved runs, and puts its KV into `store`, the view in which it
    will be looked for; returns what the put did. A passage for which it raises ContextExceeded is refused. go_on: asked
    before each passage; call again when it is time to go on.
    """
    if store.shift_refused is not None:
        return Captured(0, 0, tuple(Refused(at, store.shift_refused) for at in range(len(passages))), 0, 0)
    before = beginning(system, filler, store.block_tokens)
    enough = (len(system) + len(before)) // 2  # of the filler, half
    captured = held = tokens = 0
    refused = list[Refused]()
    for number, passage in enumerate(passages):
        if not go_on():
            return Captured(captured, held, tuple(refused), len(passages) - number, tokens)
        if len(passage) < SHORTEST:
            reason = f"{len(passage)} tokens; fewer than {SHORTEST} in a row are not reused elsewhere"
            refused.append(Refused(number, reason))
            continue
        if _is_held(store, before, passage, enough):
            held += 1
            continue
        try:
            put = compute(np.concatenate([before, passage]))
        except ContextExceeded as error:
            refused.append(Refused(number, str(error)))
            continue
        tokens += put.stored
        if put.refused:
            refused.append(Refused(number, put.reason or "the store took no more"))
            return Captured(captured, held, tuple(refused), len(passages) - number - 1, tokens)
        captured += 1
    return Captured(captured, held, tuple(refused), 0, tokens)


def capture_texts(
    model: LanguageModel,
    store: Store,
    system: str,
    passages: Sequence[str],
    *,
    policy: Policy = "careful",
    go_on: Callable[[], bool] = lambda: True,
) -> Captured:
    """`capture` by the bundled engine: of texts that prompts will show behind the system prompt `system`.

    policy: of the sessions that will look for them. The first passages are what all others are captured behind, and
    they behind the next ones; so they come last.
    """
    store, engine = store.under(policy), model.engine
    if store.shift_refused is None:
        store.shift_refused = why_engine_does_not_shift(engine, [layer.rope for layer in store.layout.layers])
    begun, compute, encode = head(model, system), _computing(engine, store), model.tokenizer.encode
    count = _enough(model, passages)
    first, others = passages[:count], passages[count:]
    done = capture(store, begun, filler(model, first), list(map(encode, others)), compute, go_on=go_on)
    last = Captured(0, 0, (), len(first), 0)
    if not done.left:
        last = capture(store, begun, filler(model, others), list(map(encode, first)), compute, go_on=go_on)
    shifted = (Refused(count + number, reason) for number, reason in done.refused)
    return Captured(
        done.captured + last.captured,
        done.held + last.held,
        (*last.refused, *shifted),
        done.left + last.left,
        done.tokens + last.tokens,
    )


def head(model: LanguageModel, system: str) -> Tokens:
    """A chat prompt up to where its user's text begins."""
    shown = model.chat.render([{"role": "system", "content": system}, {"role": "user", "content": FILLER}])
    begun, _, _ = shown.partition(FILLER)
    return model.tokenizer.encode(begun, special=True, start=True)


def filler(model: LanguageModel, others: Sequence[str]) -> Tokens:
    """A text to capture behind: as many of `others` as are long enough; where all are not, FILLER before them."""
    encode = model.tokenizer.encode
    shown = encode("\n\n".join(other.strip() for other in others[: _enough(model, others)]) + "\n\n")
    if len(shown) < _LONG:
        shown = np.concatenate([encode(FILLER + "\n\n"), shown])
    return shown[-2 * _LONG :]


def _enough(model: LanguageModel, passages: Sequence[str]) -> int:
    """How many of the passages, from the first on, are long enough together to capture others behind them."""
    lengths = np.cumsum([len(model.tokenizer.encode(passage)) for passage in passages])
    return min(len(passages), int(np.searchsorted(lengths, _LONG)) + 1)


def beginning(system: Tokens, filler: Tokens, block_tokens: int) -> Tokens:
    """What each passage stands behind: the system prompt, and the end of the filler.

    So much of that, but half at least, that a passage begins a block of its own where that can be: it would share
    a block with the filler else, and each passage would keep that part of the filler once more.
    """
    over = (len(system) + len(filler)) % block_tokens
    return np.concatenate([system, filler[over if 2 * over <= len(filler) else 0 :]])


def _is_held(store: Store, before: Tokens, passage: Tokens, enough: int) -> bool:
    """Whether all but too little of a passage is held, where `enough` tokens or more stood before it."""
    found = store.lookup(np.concatenate([before, passage]), moved=True, boundaries=[len(before)])
    covered = max(0, found.length - len(before))
    for run in found.runs:
        covered += sum(
            max(0, piece.target + piece.length - max(piece.target, len(before)))
            for piece in run.pieces
            if _source(piece) >= enough
        )
    return len(passage) - covered < SHORTEST


def _source(piece: Piece) -> int:
    """The position at which the KV of a piece was computed."""
    return piece.block.start + piece.offset


def _computing(engine: StaticGraphEngine, store: Store) -> Callable[[Tokens], PutResult]:
    """Not `prefill.prefill`: that would count as a request, and make the store look better than it serves."""

    def compute(prompt: Tokens) -> PutResult:
        kv = engine.allocate(len(prompt))
        try:
            with store.find(prompt) as lease:
                known = lease.load_into(kv, length=min(lease.length, len(prompt) - 1))
            engine.prefill(prompt, kv, start=known)
            return store.put(prompt, kv)
        finally:
            engine.recycle(kv)

    return compute
