"""Whether the device has better things to do than to fetch ahead: memory is short, the battery is low, it is hot.

Read from where Linux says so, under `root`:

    proc/pressure/memory                       share of the last 10 s in which something waited for memory (PSI)
    sys/class/power_supply/*/                  type, scope, capacity and status of batteries
    sys/class/thermal/thermal_zone*/           temp, and the trip points at which the system throttles, in 1/1000 °C

What is missing or unreadable says nothing. Other systems have other ways to tell: a host gives its own `reason`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

MOST_WAITING = 5.0
"""Percent of time in which tasks waited for memory: beyond that, more KV in memory would only be swapped."""

LEAST_CHARGE = 20
"""Percent of a battery that is being discharged."""

COOL = 5.0
"""Degrees below the first point at which the system throttles that count as hot."""

_HOT = 85.0  # °C, where no such point is known
_AGAIN = 2.0  # seconds for which an answer holds: sensors are slow to read


class Pressure:
    """What the files under `root` say, looked at every two seconds at most. Any thread may call."""

    def __init__(self, root: Path = Path("/"), clock: Callable[[], float] = time.monotonic) -> None:
        self._root = root
        self._clock = clock
        self._looked = float("-inf")
        self._reason: str | None = None

    def reason(self) -> str | None:
        """Why nothing is to be fetched ahead now; None: nothing speaks against it."""
        now = self._clock()
        if now - self._looked >= _AGAIN:
            self._reason = self._memory() or self._battery() or self._heat()
            self._looked = now
        return self._reason

    def _memory(self) -> str | None:
        for line in _read(self._root / "proc/pressure/memory").splitlines():
            fields = line.split()
            if fields[:1] != ["some"]:
                continue
            for field in fields:
                name, _, value = field.partition("=")
                if name == "avg10" and (_number(value) or 0.0) > MOST_WAITING:
                    return "memory pressure"
        return None

    def _battery(self) -> str | None:
        for supply in _folders(self._root / "sys/class/power_supply"):
            charge = _number(_read(supply / "capacity"))
            if (
                _read(supply / "type") == "Battery"
                and _read(supply / "scope") != "Device"  # that of a mouse
                and _read(supply / "status") == "Discharging"
                and charge is not None
                and charge <= LEAST_CHARGE
            ):
                return "low battery"
        return None

    def _heat(self) -> str | None:
        for zone in _folders(self._root / "sys/class/thermal"):
            now = _number(_read(zone / "temp"))
            if now is not None and now / 1000 >= _throttles_at(zone):
                return "hot"
        return None


def _throttles_at(zone: Path) -> float:
    """°C from which a zone counts as hot."""
    points = [
        point
        for kind in zone.glob("trip_point_*_type")
        if _read(kind) == "passive"
        and (point := _number(_read(kind.with_name(kind.name.replace("_type", "_temp"))))) is not None
        and point > 0  # 0 and below: not set
    ]
    return min(points) / 1000 - COOL if points else _HOT


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(path.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace").strip()
    except OSError:
        return ""


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
