"""RoPE geometry: which angle a position turns each pair of key channels by.

Rotary position embedding (Su et al. 2021, arXiv 2104.09864, section 3.2) turns pair i of a key at position p
by the angle p * w_i. Rotations add, so a stored key moves from p to q by one more rotation of (q - p) * w_i;
values never turn. Angles are computed in fp64: fp16 angles are wrong by 14 % of the key at position 2047.

Everything here is geometry; the kernels that turn keys are in `kernels`.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

Pairing = Literal["half", "interleaved"]
"""`half`: pairs (i, i + rotary_dim/2), as in Hugging Face; `interleaved`: pairs (2i, 2i + 1), as in GPT-J."""


class Linear(msgspec.Struct, frozen=True, tag="linear"):
    """Position interpolation (Chen et al. 2023, arXiv 2306.15595): every frequency divided by `factor`."""

    factor: float


class Llama3(msgspec.Struct, frozen=True, tag="llama3"):
    """Llama 3.1 scaling: long wavelengths divided by `factor`, short ones kept, a linear blend between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


class Yarn(msgspec.Struct, frozen=True, tag="yarn"):
    """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2): per-frequency ramp between interpolated and original.

    `attention_factor` None means the paper's 0.1 ln(factor) + 1.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True


class LongRope(msgspec.Struct, frozen=True, tag="longrope"):
    """LongRoPE (Ding et al. 2024, arXiv 2402.13753): a divisor per frequency, one set for short totals, one for long.

    Which set a sequence uses depends on its total length, so KV of the two regimes differ: `regime` is part of
    the layout and hence of the identity.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_context: int
    attention_factor: float
    regime: Literal["short", "long"] = "short"


class DynamicNtk(msgspec.Struct, frozen=True, tag="dynamic"):
    """Dynamic NTK: theta grows with the current length, so a key's angle depends on more than its position."""

    factor: float
    original_context: int


class Explicit(msgspec.Struct, frozen=True, tag="explicit"):
    """A divisor per frequency as the model file gives it (`rope_freqs` of a GGUF). One of 1e30 stops its pair."""

    factors: tuple[float, ...]


Scaling = Linear | Llama3 | Yarn | LongRope | DynamicNtk | Explicit


class Rope(msgspec.Struct, frozen=True):
    """Rotary geometry of one layer.

    Only the first `rotary_dim` of `head_dim` channels turn (partial rotary when smaller); pairs are formed
    inside them. Raises ValueError for a geometry that no model can have.
    """

    head_dim: int
    theta: float
    rotary_dim: int
    pairing: Pairing = "half"
    scaling: Scaling | None = None

    def __post_init__(self) -> None:
        if self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim:
            raise ValueError(
                f"rotary_dim {self.rotary_dim} must be even, positive and at most head_dim {self.head_dim}"
            )
        if not (math.isfinite(self.theta) and self.theta > 1):
            raise ValueError(f"theta {self.theta} must be a finite number above 1")
        for name, factors in _divisors(self.scaling).items():
            if len(factors) != self.rotary_dim // 2:
                raise ValueError(
                    f"{name} has {len(factors)} entries, rotary_dim / 2 is {self.rotary_dim // 2}"
                )

    def inverse_frequencies(self) -> NDArray[np.float64]:
        """w_i in radians a position, shape [rotary_dim / 2], scaling applied."""
        exponents = np.arange(0, self.rotary_dim, 2, dtype=np.float64) / self.rotary_dim
        base = self.theta**-exponents
        match self.scaling:
            case None | DynamicNtk():  # dynamic NTK equals the unscaled table inside the original context
                return base
            case Linear(factor):
                return base / factor
            case Llama3():
                return _llama3(base, self.scaling)
            case Yarn():
                return _yarn(base, self.theta, self.rotary_dim, self.scaling)
            case LongRope(short_factor=short, long_factor=long, regime=regime):
                return np.divide(base, long if regime == "long" else short)
            case Explicit(factors):
                return np.divide(base, factors)

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by when a key is first rotated; moving a key must not apply it again."""
        match self.scaling:
            case Yarn(factor=factor, attention_factor=None):
                return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
            case Yarn(attention_factor=float(value)) | LongRope(attention_factor=value):
                return value
            case _:
                return 1.0

    def table(self, positions: ArrayLike) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(cos, sin) of the pure rotation to (or by) `positions`, each [len(positions), rotary_dim / 2] float32.

        Positions may be negative: the difference of two positions moves a key between them.
        """
        angles = np.multiply.outer(
            np.atleast_1d(np.asarray(positions, dtype=np.float64)), self.inverse_frequencies()
        )
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _divisors(scaling: Scaling | None) -> dict[str, tuple[float, ...]]:
    """The lists that hold one divisor per frequency, by name."""
    match scaling:
        case LongRope(short_factor=short, long_factor=long):
            return {"short_factor": short, "long_factor": long}
        case Explicit(factors):
            return {"factors": factors}
        case _:
            return {}


def _llama3(base: NDArray[np.float64], scaling: Llama3) -> NDArray[np.float64]:
    wavelength = 2 * math.pi / base
    longest_kept = scaling.original_context / scaling.high_freq_factor
    shortest_scaled = scaling.original_context / scaling.low_freq_factor
    blend = (scaling.original_context / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smooth = (1 - blend) * base / scaling.factor + blend * base
    return np.where(
        wavelength < longest_kept,
        base,
        np.where(wavelength > shortest_scaled, base / scaling.factor, smooth),
    )


def _yarn(base: NDArray[np.float64], theta: float, rotary_dim: int, scaling: Yarn) -> NDArray[np.float64]:
    def channel_of(turns: float) -> float:
        """The (fractional) pair whose wavelength makes `turns` full turns over the original context."""
        return rotary_dim * math.log(scaling.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel_of(scaling.beta_fast), channel_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp: NDArray[np.float64] = np.clip((np.arange(rotary_dim // 2) - low) / max(high - low, 1e-3), 0, 1)
    return base / scaling.factor * ramp + base * (1 - ramp)
