"""Token ids as the indexes take them: one-dimensional, non-negative, within int32."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import TokenError

LARGEST = int(np.iinfo(np.int32).max)


def token_ids(tokens: ArrayLike) -> NDArray[np.int32]:
    """Return `tokens` as int32 [n], n >= 0; the same array where it is that already.

    Raises TokenError for another number of dimensions, a dtype that is not an integer's (booleans are none)
    and any id outside 0..2^31-1.
    """
    ids = np.asarray(tokens)
    if ids.ndim != 1:
        raise TokenError(f"token ids need one dimension, got shape {ids.shape}")
    if not ids.size:
        return ids.astype(np.int32)
    if ids.dtype.kind not in "iu":
        raise TokenError(f"token ids need an integer dtype, got {ids.dtype}")
    if ids.min() < 0 or (ids.dtype != np.int32 and ids.max() > LARGEST):
        at = int(np.argmax((ids < 0) | (ids > LARGEST)))
        raise TokenError(f"token id {ids[at]} at position {at} is outside 0..{LARGEST}")
    return ids.astype(np.int32, copy=False)
