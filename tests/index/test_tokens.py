"""Token ids: what is taken, what is refused, and that the message names value and position."""

import numpy as np
import pytest
from numpy.typing import ArrayLike

from kvstore.index.errors import TokenError
from kvstore.index.tokens import LARGEST, token_ids


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", ">i4", ">u2"])
def test_every_integer_dtype_becomes_int32(dtype: str) -> None:
    ids = token_ids(np.array([0, 1, 127], dtype))
    assert ids.dtype == np.int32
    assert ids.dtype.isnative
    assert ids.tolist() == [0, 1, 127]


def test_lists_and_nothing_are_taken() -> None:
    assert token_ids([3, LARGEST]).tolist() == [3, LARGEST]
    assert token_ids([]).dtype == np.int32
    assert token_ids([]).shape == (0,)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([5, -3, 2], np.int32), "-3 at position 1 "),
        (np.array([5, 6, 1 << 31], np.int64), "2147483648 at position 2 "),
        (np.array([1 << 31], np.uint32), "2147483648 at position 0 "),
        (np.array([1, (1 << 64) - 1], np.uint64), "18446744073709551615 at position 1 "),
        (np.array([1, -(1 << 40), 1 << 40]), "-1099511627776 at position 1 "),
        ([1 << 70], "dtype, got object"),
        ([1.0, 2.0], "dtype, got float64"),
        ([True, False], "dtype, got bool"),
        (["a"], "dtype, got <U1"),
        ([[1, 2]], r"shape \(1, 2\)"),
        (7, r"shape \(\)"),
        (np.empty((0, 4), np.int32), r"shape \(0, 4\)"),
    ],
)
def test_what_is_no_token_id_is_refused(tokens: ArrayLike, message: str) -> None:
    with pytest.raises(TokenError, match=message):
        token_ids(tokens)
