"""What may be needed next, how likely, and what of it is worth reading now.

A candidate is a block on flash with signs that it is about to be needed: it was named, it is near in meaning to what
is being typed, it followed before. What a sign is worth is learned: of the blocks that showed it, how many did the
next request use? Several signs of one block count as independent, so its chance is 1 - product(1 - chance of each).

Reading ahead a block of b bytes is worth

    value = chance * (load from flash - load from memory) - price * load from flash

seconds: what a request will not wait for, less what the read costs in energy (`price` begins at PRICE). The chosen set
is a knapsack: the most value in a budget of bytes. Blocks are small beside the budget, where taking them by value per
byte is as good as the optimum less one block (Dantzig, Discrete-variable extremum problems, 1957).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

PRICE = 0.2
"""What a second in which flash reads is worth, in seconds of waiting: so a chance below a fifth pays for no read."""

_PRIOR_WEIGHT = 4.0  # observations that the first guess counts for
_MEMORY = 64.0  # observations after which old ones count half


class Sign(NamedTuple):
    """Why a block may be needed: `source`, its `rank` among the candidates of that, how much `grade` was known then.

    source  chance at first                            rank              grade
    tokens  0.9                                        0                 0
    session 0.8                                        0                 0
    near    0.9 / (1 + (rank / 2)^2) * min(1, words/8) of its text       words of the query, 9 for more
    beside  half of that: it stands beside a near one  of the near one   as for near
    follows (tenths + 0.5) / 10                        0                 tenths of the chance seen so far
    """

    source: str
    rank: int = 0
    grade: int = 0

    @property
    def first_guess(self) -> float:
        """Its chance before anything was learned. `bench.prefetch` shows what became of it."""
        match self.source:
            case "tokens":
                return 0.9
            case "session":
                return 0.8
            case "near":
                return 0.9 / (1 + (self.rank / 2) ** 2) * min(1.0, self.grade / 8)
            case "beside":
                return 0.5 * Sign("near", self.rank, self.grade).first_guess
            case "follows":
                return (self.grade + 0.5) / 10
        raise ValueError(f"no sign is called {self.source!r}")


class Chances:
    """How often blocks that showed a sign were used by the next request, by sign."""

    def __init__(self) -> None:
        self._seen: dict[Sign, tuple[float, float]] = {}  # used, observed; the first guess included

    def of(self, sign: Sign) -> float:
        """The chance of one sign, 0 to 1."""
        used, observed = self._counts(sign)
        return used / observed

    def of_all(self, signs: Iterable[Sign]) -> float:
        """The chance of a block with these signs."""
        missed = 1.0
        for sign in signs:
            missed *= 1.0 - self.of(sign)
        return 1.0 - missed

    def learn(self, sign: Sign, used: bool) -> None:
        """A block that showed `sign` was used by the request that came then, or was not."""
        hits, observed = self._counts(sign)
        if observed >= _MEMORY:
            hits, observed = hits / 2, observed / 2
        self._seen[sign] = (hits + used, observed + 1.0)

    def _counts(self, sign: Sign) -> tuple[float, float]:
        return self._seen.get(sign) or (_PRIOR_WEIGHT * sign.first_guess, _PRIOR_WEIGHT)


class Read(NamedTuple):
    """What bringing a block takes: `room` bytes in memory, `nbytes` from flash in `seconds`; a use saves `saved`."""

    room: int
    nbytes: int
    seconds: float
    saved: float


class Candidate(NamedTuple):
    """A block with its chance to be needed. `price` of a second of reading: 0 when it was read before."""

    block: int
    chance: float
    read: Read
    price: float = PRICE

    @property
    def value(self) -> float:
        """Seconds gained by having it in memory; below 0 when it is better left on flash."""
        return self.chance * self.read.saved - self.price * self.read.seconds

    @property
    def density(self) -> float:
        """Value per byte of memory."""
        return self.value / max(1, self.read.room)


def choose(candidates: Iterable[Candidate], budget: int) -> list[Candidate]:
    """Those worth reading that fit into `budget` bytes together, the most valuable per byte first.

    Equals stay in the order given: so of a prefix, whose blocks are of no use without those before, the root is first.
    """
    chosen, left = [], budget
    for candidate in sorted(candidates, key=lambda each: each.density, reverse=True):
        if candidate.value <= 0:
            break
        if candidate.read.room <= left:
            left -= candidate.read.room
            chosen.append(candidate)
    return chosen
