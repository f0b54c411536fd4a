"""How KV is written to flash: exactly, or smaller and a little wrong.

    lossless   byte planes; bit for bit what was put, about 1.2x smaller than float16, no codec without loss does better
    int8       a byte a number, not compressed: the fastest to decode, about 1.9x smaller
    fine       a coarser grid, entropy-coded: about 3x smaller at KL < 0.001, in effect free
    small      a coarser one still: more than 4x smaller at KL < 0.01

(KL(full || reuse) of the next token, over 16 tokens; `bench.codecs` measures it.) The last three are one codec, see
`grid`, with other numbers.

What a lossy codec gives back is not what was put, so it is never taken for exact. The wall is the one that already
keeps KV of two models apart, the identity, of which the codec is a part:

- Under an identity with `codec="lossless"`, records are exact, and a lossy one there is a bad record. That is where the
  policy `exact` looks, and everyone else too, until a verdict says more.
- Once a verdict measured that a model bears the profile's codec, the policies `careful` and `fast` use a view of the
  store under the identity with that codec (`KVStore.under`). What they keep there may have gone through it, or may
  have been computed behind what did, and never reaches anyone else.
- Each frame of a record says in which form it is, with a version. One that this build does not know is a miss with a
  reason, and so is one that does not decode. A frame that a lossy codec cannot hold (infinity, NaN, too few tokens to
  know their spread) is stored without loss.

The price is that a directory used under both kinds of policy holds what both use twice.

The first four tokens of a prompt are always exact: all others attend to them (attention sinks, Xiao et al. 2024, arXiv
2309.17453, section 3.1), and theirs are the outliers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
from numpy.typing import NDArray

from . import grid, planes
from .grid import Steps
from .shape import FrameShape

Codec = Literal["lossless", "int8", "fine", "small"]
CODECS: tuple[Codec, ...] = get_args(Codec)

_STEPS: dict[Codec, Steps] = {
    "int8": Steps(keys=0.0, values=0.0, compressed=False),
    "fine": Steps(keys=0.10, values=0.16, compressed=True),
    "small": Steps(keys=0.36, values=0.45, compressed=True),
}


class Encoded(NamedTuple):
    """One frame as it is stored: its form, and the pieces that lie one after the other."""

    form: str
    pieces: list[bytes | memoryview]


class Decoder(Protocol):
    """Takes the stored pieces of one frame and gives its raw bytes.

    `pieces` are writable buffers (uint8, contiguous), to be filled with what was stored, in order; what is stored as it
    is needed is read straight to its place.
    """

    pieces: list[NDArray[np.uint8]]

    def finish(self, out: NDArray[np.uint8]) -> None:
        """Decode into `out` (uint8, the raw length), after the caller has checked the checksum.

        Raises ValueError for what does not decode.
        """


class UnknownFormError(ValueError):
    """A frame in a form that this build does not read, of a later version as a rule."""


def encode(codec: Codec, raw: NDArray[np.uint8], shape: FrameShape) -> Encoded:
    """`raw` (uint8, `shape.nbytes` long, in the layout's raw form) as `codec` stores it."""
    if codec != "lossless":
        pieces = grid.encode(raw, shape, _STEPS[codec])
        if pieces is not None:
            return Encoded(grid.FORM, pieces)
    return Encoded(planes.FORM, planes.encode(raw, shape.layout.itemsize))


def decoder(form: str, lengths: Sequence[int], shape: FrameShape) -> Decoder:
    """A decoder of a frame in `form` whose stored pieces have these lengths.

    Raises UnknownFormError, and ValueError when lengths do not fit the shape.
    """
    if form == planes.FORM:
        return planes.Decoder(lengths, shape.nbytes, shape.layout.itemsize)
    if form == grid.FORM:
        return grid.Decoder(lengths, shape)
    raise UnknownFormError(f"a frame in the form {form!r}, this build reads {', '.join(FORMS)}")


def is_lossless(form: str) -> bool:
    """Whether a frame in this form decodes to the very bytes that were put."""
    return form == planes.FORM


FORMS = (planes.FORM, grid.FORM)
