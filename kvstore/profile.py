"""What a device allows: budgets of the tiers, block size, alignment. All sizes in bytes.

Every budget is a ceiling that is checked before an allocation, with in-flight bytes counted.
"""

from __future__ import annotations

import msgspec

from kvstore.prefetch.cost import DEVICES
from kvstore.prefetch.eviction import DEFAULT, POLICIES

from .codec import CODECS, Codec
from .errors import BudgetError

MIB = 1 << 20
GIB = 1 << 30


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Budgets and rules of one device.

    `cold_bytes` 0 keeps everything in memory; `hot_bytes` 0 does without memory that an NPU reads.
    `cold_bytes_per_day` is how much may be written to flash in one day (UTC), which wears it; None is no limit.
    128 GB of flash that stand a thousand times their size are worn out in five years by 70 GB a day.
    `codec` is how KV is to be kept on flash: as small as the model bears by its verdict, so only for policies that may
    approximate, see `codec`. `lossless` keeps all exact.
    `eviction` names the policy by which blocks leave each tier, of `prefetch.eviction.POLICIES`.
    `device` names what computing and loading cost, of `prefetch.cost.DEVICES`, as far as it is not measured.
    `frame_bytes` is the usual size of one flash read: a block is cut into as many layer groups as leave each group of
    a full block about that large or larger, the first ones half as large.
    `max_hot_arenas` is how many buffers the device pins at a time, each of at most `arena_bytes`. `shares_hot` False: a
    process cannot map memory that an NPU reads through another one. A daemon then keeps warm and cold alone, and each
    client has a part of `hot_bytes` and of these buffers in its own memory, see `daemon.client_hot`.
    `staging_bytes` is what all clients of a daemon together have for KV that they put. `tenant_memory_bytes` and
    `tenant_cold_bytes` are the most that one tenant of a daemon has in hot and warm memory, and on flash; None sets no
    limit but the budgets.
    """

    name: str = "cpu"
    block_tokens: int = 128
    hot_bytes: int = 256 * MIB
    warm_bytes: int = 512 * MIB
    cold_bytes: int = 4096 * MIB
    cold_bytes_per_day: int | None = None
    codec: Codec = "fine"
    eviction: str = DEFAULT
    device: str = "laptop"
    arena_bytes: int = 256 * MIB
    max_hot_arenas: int = 8
    shares_hot: bool = True
    alignment: int = 4096
    frame_bytes: int = 512 * 1024
    staging_bytes: int = 64 * MIB
    tenant_memory_bytes: int | None = None
    tenant_cold_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.block_tokens < 1 or self.block_tokens > 4096:
            raise BudgetError(f"block_tokens {self.block_tokens} must lie between 1 and 4096")
        if self.block_tokens > 16 and self.block_tokens % 16:
            raise BudgetError(f"block_tokens {self.block_tokens} must be a multiple of 16, or at most 16")
        if self.codec not in CODECS:
            raise BudgetError(f"codec {self.codec!r} is not one of {', '.join(CODECS)}")
        for name, known in (("eviction", POLICIES), ("device", DEVICES)):
            if getattr(self, name) not in known:
                raise BudgetError(f"{name} {getattr(self, name)!r} is not one of {', '.join(known)}")
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise BudgetError(f"alignment {self.alignment} must be a power of two")
        for name in ("hot_bytes", "warm_bytes", "cold_bytes", "staging_bytes"):
            if getattr(self, name) < 0:
                raise BudgetError(f"{name} {getattr(self, name)} must not be negative")
        for name in ("cold_bytes_per_day", "tenant_memory_bytes", "tenant_cold_bytes"):
            limit = getattr(self, name)
            if limit is not None and limit < 0:
                raise BudgetError(f"{name} {limit} must not be negative")
        for name in ("arena_bytes", "frame_bytes", "max_hot_arenas"):
            if getattr(self, name) < 1:
                raise BudgetError(f"{name} {getattr(self, name)} must be positive")
        hot_arenas = -(-self.hot_bytes // self.arena_bytes)
        if hot_arenas > self.max_hot_arenas:
            raise BudgetError(
                f"hot_bytes {self.hot_bytes} needs {hot_arenas} arenas of {self.arena_bytes}, the device pins "
                f"{self.max_hot_arenas}; lower hot_bytes or raise arena_bytes"
            )


CPU = Profile()
"""Laptop or single board without an NPU: no limit on pinned buffers to speak of."""

ANE = Profile(
    name="ane",
    block_tokens=256,
    alignment=16384,
    max_hot_arenas=8,
    shares_hot=False,
    cold_bytes_per_day=32 * GIB,
    device="flagship",
)
"""Apple Neural Engine: 16 KiB pages, 8 to 12 contiguous pinned buffers that no other process can map, blocks of 256 to
512 tokens."""

NNAPI = Profile(
    name="nnapi",
    block_tokens=128,
    max_hot_arenas=4,
    hot_bytes=192 * MIB,
    warm_bytes=256 * MIB,
    cold_bytes_per_day=16 * GIB,
    device="mid",
)
"""Android NNAPI: 4 to 16 pinned buffers by driver, blocks of 128 to 256 tokens."""

QNN = Profile(
    name="qnn",
    block_tokens=128,
    hot_bytes=512 * MIB,
    arena_bytes=512 * MIB,
    max_hot_arenas=3,
    cold_bytes_per_day=32 * GIB,
    device="flagship",
)
"""Qualcomm Hexagon through QNN: blocks as long as its prefill graphs; few large buffers out of one allocation, of at
most 1 GiB each, since a DSP maps 3 to 4 GiB in all; imported pointers on 4 KiB."""

OPENVINO_NPU = Profile(
    name="openvino-npu",
    block_tokens=256,
    hot_bytes=512 * MIB,
    warm_bytes=1024 * MIB,
    cold_bytes=16 * GIB,
    cold_bytes_per_day=64 * GIB,
)
"""Intel NPU through OpenVINO: address and size of what it imports are multiples of 4 KiB; a laptop's memory and SSD."""

PROFILES = {profile.name: profile for profile in (CPU, ANE, NNAPI, QNN, OPENVINO_NPU)}
"""By name."""
