"""Whether the device has better things to do, from files as Linux has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.prefetch.pressure import Pressure

CALM = (
    "some avg10=0.12 avg60=0.40 avg300=0.10 total=84021\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=40112\n"
)


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def battery(root: Path, *, capacity: int, status: str = "Discharging", scope: str | None = None) -> None:
    supply = "sys/class/power_supply/BAT0/"
    write(root, supply + "type", "Battery\n")
    write(root, supply + "status", f"{status}\n")
    write(root, supply + "capacity", f"{capacity}\n")
    if scope is not None:
        write(root, supply + "scope", f"{scope}\n")


def zone(root: Path, *, temperature: int, points: dict[str, int] | None = None) -> None:
    thermal = "sys/class/thermal/thermal_zone3/"
    write(root, thermal + "temp", f"{temperature}\n")
    for number, (kind, point) in enumerate((points or {}).items()):
        write(root, f"{thermal}trip_point_{number}_type", f"{kind}\n")
        write(root, f"{thermal}trip_point_{number}_temp", f"{point}\n")


def test_a_system_that_says_nothing_holds_nobody_back(tmp_path: Path) -> None:
    assert Pressure(tmp_path).reason() is None


def test_a_calm_device_holds_nobody_back(tmp_path: Path) -> None:
    write(tmp_path, "proc/pressure/memory", CALM)
    battery(tmp_path, capacity=80)
    zone(tmp_path, temperature=41_000, points={"passive": 75_000, "critical": 110_000})
    assert Pressure(tmp_path).reason() is None


def test_tasks_that_wait_for_memory_are_pressure(tmp_path: Path) -> None:
    write(tmp_path, "proc/pressure/memory", CALM.replace("avg10=0.12", "avg10=23.40"))
    assert Pressure(tmp_path).reason() == "memory pressure"


@pytest.mark.parametrize(
    ("capacity", "status", "scope", "reason"),
    [
        (15, "Discharging", None, "low battery"),
        (15, "Charging", None, None),
        (60, "Discharging", None, None),
        (15, "Discharging", "Device", None),  # of a mouse
        (15, "Discharging", "System", "low battery"),
    ],
)
def test_a_battery_counts_when_it_is_the_systems_and_runs_down(
    tmp_path: Path, capacity: int, status: str, scope: str | None, reason: str | None
) -> None:
    battery(tmp_path, capacity=capacity, status=status, scope=scope)
    assert Pressure(tmp_path).reason() == reason


@pytest.mark.parametrize(
    ("temperature", "points", "reason"),
    [
        (72_000, {"passive": 75_000, "critical": 110_000}, "hot"),
        (72_000, {"passive": 95_000, "critical": 110_000}, None),
        (72_000, {"critical": 110_000}, None),
        (90_000, {"critical": 110_000}, "hot"),
        (90_000, {"passive": -274_000}, "hot"),  # a point that is not set
    ],
)
def test_heat_counts_shortly_before_the_system_throttles(
    tmp_path: Path, temperature: int, points: dict[str, int], reason: str | None
) -> None:
    zone(tmp_path, temperature=temperature, points=points)
    assert Pressure(tmp_path).reason() == reason


def test_files_full_of_something_else_say_nothing(tmp_path: Path) -> None:
    write(tmp_path, "proc/pressure/memory", "some\n\nsome avg10 =\nfull of surprises=1\nsome avg10=lots\n")
    battery(tmp_path, capacity=15)
    write(tmp_path, "sys/class/power_supply/BAT0/capacity", "unknown\n")
    zone(tmp_path, temperature=0, points={"passive": 75_000})
    write(tmp_path, "sys/class/thermal/thermal_zone3/temp", "")
    assert Pressure(tmp_path).reason() is None


def test_what_was_seen_holds_for_two_seconds(tmp_path: Path) -> None:
    now = [100.0]
    pressure = Pressure(tmp_path, lambda: now[0])
    assert pressure.reason() is None
    battery(tmp_path, capacity=3)
    now[0] += 1.0
    assert pressure.reason() is None
    now[0] += 1.5
    assert pressure.reason() == "low battery"
