"""What an engine's graph calls cost, as it is sent: to a daemon, and to the verbs of `kvstore.admin`."""

from __future__ import annotations

from typing import Annotated, Self

import msgspec

from kvstore.pipeline.schedule import WINDOWED, CallCosts, Windows

from .errors import InvalidRequestError

_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 31)]
_Cost = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
_Few = Annotated[dict[_Tokens, _Cost], msgspec.Meta(max_length=256)]


class SentCosts(msgspec.Struct, frozen=True):
    """`CallCosts`: `seconds` of a call over all slots, by its size; `shares` of that by window, of calls of at least
    `least` tokens. Without shares, there are no windows."""

    seconds: _Few
    shares: _Few = {}
    least: int = WINDOWED

    @classmethod
    def of(cls, costs: CallCosts) -> Self:
        if costs.windows is None:
            return cls(costs.seconds)
        return cls(costs.seconds, costs.windows.shares, costs.windows.least)

    def calls(self) -> CallCosts:
        """What was sent. Raises InvalidRequestError for what no calls cost."""
        try:
            return CallCosts(self.seconds, Windows(self.shares, self.least) if self.shares else None)
        except ValueError as error:
            raise InvalidRequestError(f"costs: {error}") from error
