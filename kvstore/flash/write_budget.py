"""How many bytes may be written to flash in a day, since flash wears out; counted across restarts.

What was written is noted on disk ahead, a step at a time. So a kill may cost up to one step of the day's budget, but
never lets more than the budget be written.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import xxhash

_STEPS = 64  # notes a day, about: each is a small write of its own
_DAY = 86_400  # seconds

log = logging.getLogger(__name__)


class _Note(msgspec.Struct, frozen=True):
    day: int
    bytes: int


class WriteBudget:
    """At most `per_day` bytes in one day of UTC; None is no limit, and nothing is noted then.

    file: where the count is kept. Used by one thread. `clock` gives unix seconds.
    """

    def __init__(self, file: Path, per_day: int | None, clock: Callable[[], float] = time.time) -> None:
        self.per_day = per_day
        self._file = file
        self._clock = clock
        self._day = self._today()
        self._spent = 0
        self._noted = 0
        if per_day is not None and (note := self._read()) is not None and note.day >= self._day:
            self._spent = self._noted = note.bytes  # also when the clock was set back: that buys nothing
            self._day = min(note.day, self._day + 1)

    @property
    def spent(self) -> int:
        """Bytes written in the day that `take` counts for."""
        return self._spent

    def take(self, nbytes: int) -> bool:
        """Count bytes that are about to be written; False, and nothing counted, when the day's budget is spent.

        Raises OSError when the count cannot be kept; nothing may be written then.
        """
        today = self._today()
        if today > self._day:
            self._day, self._spent, self._noted = today, 0, 0
        if self.per_day is None:
            self._spent += nbytes
            return True
        if self._spent + nbytes > self.per_day:
            return False
        if self._spent + nbytes > self._noted:
            ahead = min(self.per_day, self._spent + nbytes + self.per_day // _STEPS)
            self._write(ahead)
            self._noted = ahead
        self._spent += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Less was written than taken."""
        self._spent = max(0, self._spent - nbytes)

    def close(self) -> None:
        """Note what was really written."""
        if self._noted > self._spent:
            with contextlib.suppress(OSError):
                self._write(self._spent)
                self._noted = self._spent

    def _today(self) -> int:
        return int(self._clock() // _DAY)

    def _read(self) -> _Note | None:
        try:
            return _read(self._file)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            log.warning("%s is damaged: today's writes to flash are counted from 0", self._file)
            return None

    def _write(self, count: int) -> None:
        content = msgspec.json.encode(_Note(self._day, count))
        scratch = self._file.with_suffix(".tmp")
        scratch.write_bytes(xxhash.xxh3_64_digest(content) + content)
        scratch.rename(self._file)


def check(file: Path) -> None:
    """Raise ValueError where the count in `file` is damaged; OSError."""
    _read(file)


def _read(file: Path) -> _Note:
    content = file.read_bytes()
    if xxhash.xxh3_64_digest(content[8:]) != content[:8]:
        raise ValueError("its checksum does not fit")
    return msgspec.json.decode(content[8:], type=_Note)
