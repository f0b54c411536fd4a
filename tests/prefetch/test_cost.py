"""Cost formulae against figures worked out by hand, and the fit against calls made from known speeds."""

from __future__ import annotations

import pytest

from kvstore.prefetch.cost import DEVICES, DeviceCosts, Link, Power, Recompute


def test_recompute_grows_with_context() -> None:
    recompute = Recompute(500, double_at=1000)
    assert recompute.seconds(100) == pytest.approx(100 / 500 * 1.05)
    assert recompute.seconds(100, 950) == pytest.approx(100 / 500 * 2)
    assert recompute.seconds(300) == pytest.approx(sum(recompute.seconds(100, at) for at in (0, 100, 200)))


@pytest.mark.parametrize("double_at", [900.0, 12_000.0])
def test_fit_finds_the_speeds_it_was_timed_with(double_at: float) -> None:
    true = Recompute(640, double_at)
    calls = [(n, c, true.seconds(n, c)) for n in (32, 128, 512) for c in (0, 500, 4000)]
    found = Recompute.measured(calls)
    assert found.tokens_per_second == pytest.approx(640)
    assert found.double_at == pytest.approx(double_at)


def test_fit_of_calls_that_do_not_feel_the_context() -> None:
    found = Recompute.measured([(n, c, n / 100) for n in (32, 128) for c in (0, 500)])
    assert found.seconds(128, 500) == pytest.approx(1.28)
    faster_behind = Recompute.measured([(100, 0, 1.0), (100, 1000, 0.9)])
    assert faster_behind.seconds(100, 10_000) == pytest.approx(faster_behind.seconds(100))


def test_flash_speeds_are_met() -> None:
    link = Link.flash(2.1e9, 146e6, decode=float("inf"))
    assert 4096 / link.seconds(4096) == pytest.approx(146e6)
    assert 1e9 / link.seconds(10**9) == pytest.approx(2.1e9, rel=1e-3)
    assert link.seconds(8192, reads=2) == pytest.approx(2 * link.seconds(4096))


def test_break_even_bandwidth() -> None:
    """Qwen3-1.7B int8 at 1000 tokens/s: loading pays above 57 MB/s (56 KiB a token)."""
    for bandwidth, pays in ((56e6, False), (59e6, True)):
        device = DeviceCosts("x", Recompute(1000, double_at=1e12), {"cold": Link(bandwidth)})
        assert (device.saved_seconds(128, 0, 128 * 56 * 1024, "cold") > 0) is pays


def test_energy_weighs_where_it_is_known() -> None:
    device = DeviceCosts("x", Recompute(100), {"cold": Link(1e9)}, Power(4.0, 1.0, 0.5))
    plain = DeviceCosts("x", Recompute(100), {"cold": Link(1e9)})
    assert device.saved_seconds(100, 0, 10**9, "cold") == pytest.approx(
        3 * plain.recompute_seconds(100) - 1.5 * plain.load_seconds(10**9, "cold")
    )


def test_hot_memory_is_free_and_faster_tiers_save_more() -> None:
    for device in DEVICES.values():
        nbytes = 128 * 56 * 1024
        assert device.load_seconds(nbytes, "hot") == 0
        assert device.load_seconds(nbytes, "warm") < device.load_seconds(nbytes, "cold")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Recompute(0), "tokens_per_second 0"),
        (lambda: Link(-1), "speeds must be positive"),
        (lambda: Recompute.measured([(1, 0, 1.0)]), "at least 2"),
    ],
)
def test_what_cannot_be_is_refused(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]
