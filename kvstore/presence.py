"""Where the tokens of a match are just now: in memory, on their way, or on flash."""

from __future__ import annotations

from typing import Literal, NamedTuple

State = Literal["hit", "pending", "flash"]


class Stretch(NamedTuple):
    """Tokens [start, stop) of a prompt: `hit`, in memory; `pending`, being fetched ahead; or `flash`, only there."""

    start: int
    stop: int
    state: State


class Presence(NamedTuple):
    """All that is held of a prompt, ascending; what no stretch covers is a miss: nobody holds it."""

    stretches: tuple[Stretch, ...]

    def tokens(self, state: State) -> int:
        """How many tokens are in this state."""
        return sum(each.stop - each.start for each in self.stretches if each.state == state)

    @property
    def settled(self) -> bool:
        """Whether nothing is on its way: a request that waits gains nothing by waiting longer."""
        return not self.tokens("pending")
