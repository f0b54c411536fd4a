"""Rows of many arrays, whatever their strides, become one block, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvstore.pipeline import kernels


@pytest.fixture(params=kernels.levels())
def level(request: pytest.FixtureRequest) -> Iterator[None]:
    before = kernels.level()
    kernels.use(request.param)
    yield
    kernels.use(before)


def sources(order: np.random.Generator, count: int, rows: int) -> list[NDArray[Any]]:
    """Arrays [heads, rows, channels] of any bits: plain, transposed, reversed, cut from wider ones."""
    made = []
    for _ in range(count):
        heads, channels = order.integers(1, 4), order.integers(1, 80)
        kind = order.choice([np.uint16, np.float16, np.float32])

        def noise(*shape: Any, kind: Any = kind) -> NDArray[Any]:
            return order.integers(0, 256, (*shape, np.dtype(kind).itemsize), np.uint8).view(kind)[..., 0]

        made.append(
            (
                noise(heads, rows, channels),
                noise(heads, channels, rows).transpose(0, 2, 1),
                noise(rows, heads, channels).transpose(1, 0, 2),
                noise(heads, rows, channels)[:, ::-1],
                noise(heads, rows, 2 * channels)[:, :, ::2],
            )[order.integers(5)]
        )
    return made


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), tokens=st.integers(1, 70), scattered=st.booleans())
def test_rows_lie_one_after_the_other(seed: int, tokens: int, scattered: bool) -> None:
    order = np.random.default_rng(seed)
    rows = tokens + int(order.integers(0, 20))
    given = sources(order, int(order.integers(0, 6)), rows)
    kept = int(order.integers(0, tokens + 1))
    first = int(order.integers(0, rows - (tokens - kept) + 1))
    slots = order.permutation(rows)[: tokens - kept].astype(np.int64) if scattered else None
    held = sum(each[:, :1].nbytes for each in given) * tokens
    before = order.integers(0, 256, held + 7 + 3, np.uint8)
    want, at = before.copy(), 3
    for each in given:
        part = np.empty((len(each), tokens, each.shape[2]), each.dtype)
        nbytes = part.nbytes
        part.reshape(-1).view(np.uint8)[:] = want[at : at + nbytes]
        part[:, kept:] = each[:, first : first + tokens - kept] if slots is None else each[:, slots]
        want[at : at + nbytes] = part.reshape(-1).view(np.uint8)
        at += nbytes
    start = 0 if slots is not None else first
    active = kernels.level()
    try:
        for name in kernels.levels():
            kernels.use(name)
            out = before.copy()
            kernels.collect(given, out[3:], tokens=tokens, kept=kept, first=start, slots=slots)
            assert out.tobytes() == want.tobytes(), name
    finally:
        kernels.use(active)


@pytest.mark.usefixtures("level")
def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    array = np.ones((2, 10, 4), np.float16)
    out = np.zeros(2 * 10 * 4 * 2, np.uint8)

    def refused(error: type[Exception] = ValueError, **changes: Any) -> None:
        with pytest.raises(error):
            kernels.collect(**{"sources": [array], "out": out, "tokens": 10} | changes)
        assert not out.any()

    refused(out=out[1:])
    refused(sources=[array, array])
    refused(first=1)
    refused(first=-1)
    refused(kept=11)
    refused(kept=-1)
    refused(first=2**62, kept=9)
    refused(slots=np.arange(9))
    refused(slots=np.full(10, 10))
    refused(IndexError, slots=np.full(10, -1))
    refused(sources=[array[0]])
    kernels.collect([array], out, tokens=10)
    assert out.tobytes() == array.tobytes()
