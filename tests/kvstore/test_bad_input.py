"""Mistakes of the caller: each has its own type and says what is wrong, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore.errors import (
    BufferTooSmallError,
    InvalidRequestError,
    InvalidTokensError,
    KVStoreError,
    LayoutMismatchError,
)
from kvstore.store import KVStore, open_store
from tests.known_kv import empty, identity, known_kv, load, prompt, put, small_profile

HELD = prompt(1, 40)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[KVStore]:
    """A store that holds something; at the end it must hold exactly that, and have counted nothing."""
    with open_store(tmp_path / "kv", identity=identity(), profile=small_profile()) as opened:
        put(opened, HELD)
        opened.flush()
        before = opened.stats()
        yield opened
        opened.flush()
        assert opened.stats() == before
        assert opened.lookup(HELD).length == 40
        assert load(opened, HELD) == 40


TOKENS: dict[str, tuple[Any, str]] = {
    "none at all": ([], "no tokens"),
    "negative": ([5, -1, 7], "-1 at position 1"),
    "2**31": ([5, 2**31], "2147483648 at position 1"),
    "2**63": (np.array([2**63], np.uint64), "9223372036854775808 at position 0"),
    "2**64": ([2**64], "integer"),
    "mixed with 2**63": ([1, 2**63], "token id"),
    "floats": ([1.0, 2.0], "integer"),
    "booleans": ([True, False], "integer"),
    "two-dimensional": ([[1, 2], [3, 4]], "one dimension"),
    "ragged": ([[1, 2], [3]], "inhomogeneous"),
    "a number": (5, "one dimension"),
    "text": ("hello", "one dimension"),
    "texts": (["a", "b"], "integer"),
    "complex": ([1j], "integer"),
    "dates": (np.array(["2026-01-01"], "datetime64[D]"), "integer"),
}


@pytest.mark.parametrize("name", TOKENS)
@pytest.mark.parametrize("call", ["lookup", "explain", "put", "invalidate"])
def test_tokens_that_are_none(store: KVStore, name: str, call: str) -> None:
    """Token 0 put in place of nothing; ids that wrapped around to others."""
    tokens, text = TOKENS[name]
    calls: dict[str, Callable[[], object]] = {
        "lookup": lambda: store.lookup(tokens),
        "explain": lambda: store.explain(tokens),
        "put": lambda: store.put(tokens, empty(4)),
        "invalidate": lambda: store.invalidate(prefix=tokens),
    }
    with pytest.raises(InvalidTokensError, match=text):
        calls[call]()


def test_no_tokens_argument_at_all(store: KVStore) -> None:
    nothing: Any = None
    for call in (store.lookup, store.explain, lambda tokens: store.put(tokens, empty(4))):
        with pytest.raises(InvalidTokensError, match="one dimension"):
            call(nothing)


@pytest.mark.parametrize("start", [40, 41, -1, 1.0, "1", None])
def test_a_start_outside_of_the_tokens(store: KVStore, start: Any) -> None:
    with pytest.raises(InvalidRequestError, match="start"):
        store.put(HELD, known_kv(HELD, store.identity), start=start)


def _with(change: Callable[[Any], None]) -> Any:
    buffer = empty(20)
    change(buffer)
    return buffer


BUFFERS: dict[str, tuple[Any, type[KVStoreError], str]] = {
    "too few rows": (empty(19), BufferTooSmallError, "needs 20 tokens, keys of layer 0 holds 19"),
    "a layer less": (_with(lambda b: b.keys.pop()), LayoutMismatchError, "1 layers, the layout has 2"),
    "no values": (_with(lambda b: b.values.clear()), LayoutMismatchError, "0 layers, the layout has 2"),
    "a layer that is None": (_with(lambda b: b.keys.__setitem__(1, None)), LayoutMismatchError, "is None"),
    "half precision": (
        _with(lambda b: b.keys.__setitem__(0, np.zeros((2, 20, 8), np.float16))),
        LayoutMismatchError,
        "float16",
    ),
    "double precision": (
        _with(lambda b: b.values.__setitem__(1, np.zeros((2, 20, 8)))),
        LayoutMismatchError,
        "values of layer 1 is float64",
    ),
    "other byte order": (
        _with(lambda b: b.keys.__setitem__(0, np.zeros((2, 20, 8), ">f4"))),
        LayoutMismatchError,
        "keys of layer 0 is >f4",
    ),
    "other head size": (
        _with(lambda b: b.keys.__setitem__(0, np.zeros((2, 20, 9), np.float32))),
        LayoutMismatchError,
        r"shape \(2, 20, 9\), needs \(2, tokens, 8\)",
    ),
    "other heads": (
        _with(lambda b: b.keys.__setitem__(0, np.zeros((3, 20, 8), np.float32))),
        LayoutMismatchError,
        r"shape \(3, 20, 8\)",
    ),
    "tokens first": (
        _with(lambda b: b.keys.__setitem__(0, np.zeros((20, 2, 8), np.float32))),
        LayoutMismatchError,
        r"shape \(20, 2, 8\)",
    ),
    "four dimensions": (
        _with(lambda b: b.keys.__setitem__(0, np.zeros((1, 2, 20, 8), np.float32))),
        LayoutMismatchError,
        "shape",
    ),
    "a list": (_with(lambda b: b.keys.__setitem__(0, [1.0])), LayoutMismatchError, "keys of layer 0"),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_kv_that_is_not_of_the_layout(store: KVStore, name: str) -> None:
    """One layer left out of what was saved; another width of KV loaded as if it were this."""
    buffer, error, text = BUFFERS[name]
    with pytest.raises(error, match=text):
        store.put(prompt(2, 20), buffer)
    with pytest.raises(error):  # also where only the end is new
        store.put(np.concatenate([HELD, prompt(2, 20)]), buffer, start=40)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"everything": True, "older_than": 1},
        {"prefix": [1], "adapter": "ad" * 32},
        {"prefix": [1], "everything": True},
    ],
)
def test_invalidate_wants_to_know_exactly_one_thing(store: KVStore, arguments: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match="exactly one"):
        store.invalidate(**arguments)


def test_errors_are_also_what_python_calls_them() -> None:
    """Callers that know nothing of this package catch ValueError and RuntimeError."""
    assert issubclass(InvalidTokensError, ValueError)
    assert issubclass(LayoutMismatchError, ValueError)
    assert issubclass(BufferTooSmallError, ValueError)
    assert issubclass(KVStoreError, Exception)
