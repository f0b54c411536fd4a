"""KV that follows from its tokens, so that any KV a store returns can be checked bit for bit, whoever put it.

As in a model, a token's KV depends on all tokens before it and on the identity: KV of a block that was put behind
another prefix, or under another identity, never passes for right. The bits of sign and mantissa are noise and the
exponent is one of two, so that records hold compressed and plain planes as real ones do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvstore.identity import Adapter, Identity
from kvstore.layout import Layout
from kvstore.pipeline.rope import Rope
from kvstore.profile import Profile
from kvstore.store import KVStore

LAYOUT = Layout.uniform(layers=2, kv_heads=2, head_dim=8, rope=Rope(8, 1e4, 8), dtype="float32")
"""256 bytes a token: small enough that a few blocks fill a tier."""

_ODD = 0x9E3779B97F4A7C15
_INVERSE = pow(_ODD, -1, 1 << 64)


def identity(
    name: str = "a", *, layout: Layout = LAYOUT, adapters: tuple[Adapter, ...] = (), salt: bytes = b""
) -> Identity:
    """An identity whose weights are called `name`."""
    return Identity(
        weights=name.encode().hex().rjust(64, "0"),
        tokenizer="7e" * 32,
        layout=layout,
        quantisation="none",
        adapters=adapters,
        tenant_salt=salt,
    )


def small_profile(*, block_tokens: int = 16, layout: Layout = LAYOUT, **changes: Any) -> Profile:
    """Two frames a block. Blocks take whole pages of 4 KiB, as the smallest full block of LAYOUT does."""
    block = layout.block_bytes(block_tokens)
    settings: dict[str, Any] = {
        "hot_bytes": 8 * 4096,
        "warm_bytes": 64 * 4096,
        "cold_bytes": 16 << 20,
        "frame_bytes": max(1, block // 2),
    }
    return Profile(block_tokens=block_tokens, **(settings | changes))


@dataclass
class Arrays:
    """A buffer as an engine has it: keys and values of each layer, [kv_heads, slots, head_dim]."""

    keys: list[NDArray[Any] | None] = field(default_factory=list)
    values: list[NDArray[Any] | None] = field(default_factory=list)

    def rows(self, rows: Any) -> Arrays:
        """The same arrays at other slots: a slice or a list of them."""
        return Arrays(
            [each if each is None else each[:, rows] for each in self.keys],
            [each if each is None else each[:, rows] for each in self.values],
        )

    def each(self) -> list[NDArray[Any]]:
        return [array for array in (*self.keys, *self.values) if array is not None]


def empty(slots: int, layout: Layout = LAYOUT) -> Arrays:
    """Room for `slots` tokens, full of a pattern that is no right KV."""
    made = Arrays()
    for layer, holding in enumerate(layout.layers):
        for arrays, shape in (
            (made.keys, layout.key_shape(layer, slots)),
            (made.values, layout.value_shape(layer, slots)),
        ):
            array = np.empty(shape, layout.numpy_dtype)
            array.view(np.uint8).fill(0xA5)
            arrays.append(array if holding.holds_kv else None)
    return made


def known_kv(
    tokens: Sequence[int] | NDArray[Any], owner: Identity, start: int = 0, slots: int | None = None
) -> Arrays:
    """KV of tokens[start:] behind tokens[:start], under the identity `owner`; `slots` makes the buffer longer."""
    ids = np.asarray(tokens)
    layout = owner.layout
    states = _states(ids, int.from_bytes(owner.digest()[:8], "little"))[start:]
    made = empty(max(len(states), slots or 0), layout)
    for lane, array in enumerate(made.each()):
        heads, _, width = array.shape
        channel = np.arange(heads * width, dtype=np.uint64) + np.uint64(lane << 32)
        bits = _mix(states[:, None] ^ _mix(channel)[None, :]).reshape(len(states), heads, width)
        array[:, : len(states)] = _as_floats(bits, array.dtype).transpose(1, 0, 2)
    return made


def matches(
    found: Arrays, tokens: Sequence[int] | NDArray[Any], owner: Identity, length: int, start: int = 0
) -> bool:
    """Whether rows 0 .. length - start of `found` are, bit for bit, the KV of tokens start .. length."""
    if length <= start:
        return True
    right = known_kv(np.asarray(tokens)[:length], owner, start)
    return all(
        np.ascontiguousarray(have[:, : length - start]).tobytes() == want.tobytes()
        for have, want in zip(found.each(), right.each(), strict=True)
    )


def put(store: KVStore, tokens: Sequence[int] | NDArray[Any], **options: Any) -> Any:
    """Put the right KV of `tokens`."""
    start = options.get("start", 0)
    return store.put(np.asarray(tokens), known_kv(tokens, store.identity, start), **options)


def load(store: KVStore, tokens: Sequence[int] | NDArray[Any]) -> int:
    """Look up and load all that is held of `tokens`; how many came. Fails when any of it is wrong."""
    buffer = empty(len(tokens), store.layout)
    with store.lease(store.lookup(np.asarray(tokens))) as lease:
        length = lease.load_into(buffer)
    assert matches(buffer, tokens, store.identity, length), f"wrong KV within {length} tokens"
    return length


def quiet(store: KVStore) -> None:
    """Wait until the background thread has nothing to write or to move."""
    for _ in range(2):  # moves wait for writes
        store.flush(60)


def prompt(seed: int, length: int, vocabulary: int = 50_000) -> NDArray[np.int32]:
    """`length` random tokens, the same for the same seed."""
    return np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.int32)


def _states(ids: NDArray[Any], seed: int) -> NDArray[np.uint64]:
    """A hash of tokens[:i + 1] for each i: a polynomial in an odd constant, modulo 2^64."""
    count = len(ids)
    powers = np.ones(count + 1, np.uint64)
    inverses = np.ones(count + 1, np.uint64)
    with np.errstate(over="ignore"):
        powers[1:] = np.cumprod(np.full(count, _ODD, np.uint64))
        inverses[1:] = np.cumprod(np.full(count, _INVERSE, np.uint64))
        terms = _mix(ids.astype(np.uint64) + np.uint64(1)) * inverses[1:]
        return _mix((np.cumsum(terms, dtype=np.uint64) + np.uint64(seed)) * powers[1:])


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(_ODD)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def _as_floats(bits: NDArray[np.uint64], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Finite numbers around 1 with random sign and mantissa."""
    if dtype == np.float32:
        return (((bits & np.uint64(0x80FFFFFF)) | np.uint64(0x3F000000)).astype(np.uint32)).view(np.float32)
    return (((bits & np.uint64(0x83FF)) | np.uint64(0x3800)).astype(np.uint16)).view(dtype)
