"""What it costs to have the KV of some tokens: to compute it again, or to load it from a tier.

    recompute   t(n | c) = (n + n * (c + n/2) / d) / v
    load        t(b)     = seek * reads + b / B + b / D

with n tokens behind a context of c, v the tokens a second of an empty context, d the context at which a token costs
twice as much; b bytes, B the bandwidth of the tier, D that of decoding and turning what was read.

The first is the operation count of a transformer: per token c1 = 2 * parameters for the matrices and
c2 = 4 * layers * heads * head_dim for each token it attends to, so d = c1 / c2 (Mooncake, FAST'25, eq. 2, has the same
two terms). `Recompute.measured` fits both from calls that were timed. The second is a read of a flash part that is
bound by latency when small and by bandwidth when large: `seek` follows from a device's random 4 KiB speed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

_QWEN3_1_7B_DOUBLE = 12_000
"""c1 / c2 of Qwen3-1.7B: 2 * 1.4e9 parameters without embeddings over 4 * 28 layers * 2,048."""


@dataclass(frozen=True)
class Recompute:
    """Prefill on a device: tokens a second at an empty context, and the context at which a token costs twice that."""

    tokens_per_second: float
    double_at: float = _QWEN3_1_7B_DOUBLE

    def __post_init__(self) -> None:
        if not self.tokens_per_second > 0 or not self.double_at > 0:
            raise ValueError(
                f"tokens_per_second {self.tokens_per_second} and double_at {self.double_at} must be positive"
            )

    def seconds(self, tokens: int, context: int = 0) -> float:
        """Seconds to compute `tokens` tokens behind `context` tokens."""
        return tokens * (1 + (context + tokens / 2) / self.double_at) / self.tokens_per_second

    @classmethod
    def measured(cls, calls: Iterable[tuple[int, int, float]]) -> Recompute:
        """The least-squares fit through timed calls: (tokens, context, seconds) each.

        Relative errors count, so that short calls are not drowned by long ones. Raises ValueError for less than two
        calls, or for times that do not grow with the tokens.
        """
        rows = [(n, n * (c + n / 2), s) for n, c, s in calls]
        if len(rows) < 2:
            raise ValueError(f"a fit needs at least 2 timed calls, got {len(rows)}")
        linear, attention, seconds = np.array(rows, dtype=np.float64).T
        terms = np.stack([linear, attention], axis=1) / seconds[:, None]
        each, grown = np.linalg.lstsq(terms, np.ones(len(rows)), rcond=None)[0]
        if grown <= 0:  # calls too alike to see the context, or a device that does not feel it
            each, grown = (linear / seconds).sum() / ((linear / seconds) ** 2).sum(), 0.0
        if not each > 0:
            raise ValueError("the timed calls do not take longer for more tokens")
        return cls(float(1 / each), float(each / grown) if grown else math.inf)


@dataclass(frozen=True)
class Link:
    """The way from a tier into memory that the NPU reads. Speeds in bytes a second, of the bytes as stored."""

    bytes_per_second: float
    seek_seconds: float = 0.0
    decode_bytes_per_second: float = math.inf

    def __post_init__(self) -> None:
        if not (self.bytes_per_second > 0 and self.decode_bytes_per_second > 0 and self.seek_seconds >= 0):
            raise ValueError(f"speeds must be positive, and seeks not negative: {self}")

    def seconds(self, nbytes: int, reads: int = 1) -> float:
        """Seconds to bring `nbytes` bytes in, in `reads` separate reads."""
        return (
            self.seek_seconds * reads + nbytes / self.bytes_per_second + nbytes / self.decode_bytes_per_second
        )

    @classmethod
    def flash(cls, sequential: float, random_4k: float, decode: float = 1e9) -> Link:
        """A flash part by its sequential and its random 4 KiB speed; `decode` of zstd is about 1 GB/s a core."""
        return cls(sequential, max(0.0, 4096 / random_4k - 4096 / sequential), decode)

    @classmethod
    def memory(cls, bandwidth: float) -> Link:
        """A copy in memory: each byte is read and written."""
        return cls(bandwidth / 2)


@dataclass(frozen=True)
class Power:
    """Watts drawn while computing and while loading, and how many seconds of waiting a joule is worth."""

    compute_watts: float
    load_watts: float
    seconds_per_joule: float


@dataclass(frozen=True)
class DeviceCosts:
    """What one device takes to compute KV again and to load it, by tier name ("warm", "cold", "remote", ...).

    A tier without a link is free to read: hot memory is where the NPU looks.
    """

    name: str
    recompute: Recompute
    links: Mapping[str, Link]
    power: Power | None = None

    def recompute_seconds(self, tokens: int, context: int = 0) -> float:
        """Seconds to compute `tokens` tokens behind `context` tokens."""
        return self.recompute.seconds(tokens, context)

    def load_seconds(self, nbytes: int, tier: str, reads: int = 1) -> float:
        """Seconds to load `nbytes` bytes, as stored, from a tier in `reads` separate reads."""
        link = self.links.get(tier)
        return 0.0 if link is None else link.seconds(nbytes, reads)

    def saved_seconds(self, tokens: int, context: int, nbytes: int, tier: str, reads: int = 1) -> float:
        """What loading saves over computing: below 0 where computing is the cheaper way.

        Where the device has `power`, each side counts what its energy is worth besides its time.
        """
        compute, load = self.recompute_seconds(tokens, context), self.load_seconds(nbytes, tier, reads)
        return compute * self.compute_weight - load * self.load_weight

    @property
    def compute_weight(self) -> float:
        """What a second of computing counts for, its energy included."""
        return 1.0 if self.power is None else 1 + self.power.compute_watts * self.power.seconds_per_joule

    @property
    def load_weight(self) -> float:
        """What a second of loading counts for, its energy included."""
        return 1.0 if self.power is None else 1 + self.power.load_watts * self.power.seconds_per_joule


def _device(
    name: str, tokens_per_second: float, sequential: float, random_4k: float, memory: float
) -> DeviceCosts:
    links = {"warm": Link.memory(memory), "cold": Link.flash(sequential, random_4k)}
    return DeviceCosts(name, Recompute(tokens_per_second), links)


DEVICES: Mapping[str, DeviceCosts] = {
    device.name: device
    for device in (
        _device("flagship", 1400, 4.0e9, 450e6, 60e9),
        _device("mid", 500, 2.1e9, 146e6, 40e9),
        _device("low", 150, 250e6, 40e6, 25e9),
        _device("aged", 500, 416e6, 40e6, 40e9),
        _device("laptop", 768, 5.0e9, 1.2e9, 100e9),
        # 280 MB/s is what "Dynamic Flow, Static Graph" reports for reading and mapping together: nothing on top.
        DeviceCosts("paper", Recompute(1000), {"warm": Link.memory(60e9), "cold": Link(280e6)}),
    )
}
"""Published speeds of device classes for models of 1 to 2 billion parameters: UFS 4.0 (PowerInfer-2, arXiv
2406.06282), UFS 3.0 measured, an eMMC (KVSwap, arXiv 2511.11907), a four-year-old UFS 4.0 with a fragmented file
system, a laptop with NVMe (XDNA2 prefill at 32 k context), and the effective figures of arXiv 2609.34727."""
