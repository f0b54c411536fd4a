"""What happened between two snapshots of one directory."""

from __future__ import annotations

from .snapshot import Snapshot
from .timings import StageUse

KINDS = ("prefix", "moved", "recomputed", "computed")
"""What becomes of a prompt's tokens; the first two are reused."""


class Change:
    """From `before` to `after`. None before, or one of another process, means since that directory was opened."""

    def __init__(self, before: Snapshot | None, after: Snapshot) -> None:
        if before is not None and before.pid != after.pid:
            before = None
        self._before, self._after = before, after
        self.seconds = None if before is None else max(after.at - before.at, 1e-9)
        """Between the two; None since opening."""

    def count(self, name: str) -> int:
        """How much a count of `Stats.counts` grew."""
        before = 0 if self._before is None else self._before.stats.counts.get(name, 0)
        return self._after.stats.counts.get(name, 0) - before

    def tokens(self) -> dict[str, int]:
        """What became of the tokens of prompts: of those that engines reported, else of those that were looked up."""
        found = {kind: self.count(f"tokens_{kind}") for kind in KINDS}
        if not any(found.values()):
            found["prefix"], found["computed"] = self.count("tokens_matched"), self.count("tokens_missed")
        return found

    def stage(self, name: str) -> StageUse:
        """The runs of a stage."""
        after = self._after.stages[name]
        before = None if self._before is None else self._before.stages.get(name)
        if before is None:
            return after
        counts = (mine - theirs for mine, theirs in zip(after.counts, before.counts, strict=True))
        return StageUse(tuple(counts), after.seconds - before.seconds)

    def hidden(self) -> float | None:
        """The share of the time of bringing KV in which the engine need not wait; None when nothing was brought."""
        busy = self.stage("read").seconds + self.stage("place").seconds
        return None if busy <= 0 else min(1.0, max(0.0, 1 - self.stage("wait").seconds / busy))


def quantile(use: StageUse, bounds: tuple[float, ...], share: float) -> float | None:
    """Seconds that so large a share of the runs took at most: the upper end of the bucket. None without runs."""
    left = share * use.count
    if not left:
        return None
    for count, bound in zip(use.counts, (*bounds, bounds[-1]), strict=True):
        left -= count
        if left <= 0:
            return bound
    return bounds[-1]
