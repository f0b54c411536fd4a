"""What happens in an open directory just now, in one picture: for `kvstore top`, the web page and metrics.

It is taken under the store's lock in a time that does not grow with what is held, and it can be sent: msgspec encodes
and decodes it.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import msgspec

from .recent import HotPrefix
from .stats import Stats, collect
from .timings import BOUNDS, StageUse

if TYPE_CHECKING:
    from ..open_directory import OpenDirectory

_PREFIXES = 10


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """`at` in unix seconds; all counts and seconds grow from when process `pid` opened the directory.

    `path` None: all in memory. `stages` by name, see `timings`; they count only while someone looks. `bounds`: of their
    buckets. `flash_bytes_per_second`: the speed that loads saw, None before the first. `writes_per_day`: the write
    budget, None is no limit. `prefixes`: the hottest of those used lately.
    """

    at: float
    pid: int
    path: str | None
    profile: str
    stats: Stats
    stages: dict[str, StageUse]
    bounds: tuple[float, ...] = BOUNDS
    flash_bytes_per_second: float | None
    writes_per_day: int | None
    prefixes: list[HotPrefix]


def snapshot(shared: OpenDirectory) -> Snapshot:
    """Look now; and have stages timed for the next few minutes."""
    tiers = shared.tiers
    stages = tiers.timings.look()
    with tiers.lock:
        tiers.reap()
        stats = collect(tiers, None, shared.verdicts, shared.prefetching.usefulness())
        prefixes = tiers.recent.hottest(_PREFIXES)
    return Snapshot(
        at=time.time(),
        pid=os.getpid(),
        path=None if shared.directory is None else str(shared.directory.path),
        profile=tiers.profile.name,
        stats=stats,
        stages={str(name): use for name, use in stages.items()},
        flash_bytes_per_second=tiers.flash.bytes_per_second(),
        writes_per_day=tiers.profile.cold_bytes_per_day,
        prefixes=prefixes,
    )
