"""The seed table: its workload is what it says, and its replay keeps the rules of the device."""

from __future__ import annotations

import pytest

from bench.report import Report
from bench.seeds import (
    CONTEXT,
    NONE,
    POLICIES,
    SIMULATED,
    SYSTEM,
    Replay,
    compare,
    measure,
    tabulate,
    workload,
)


def test_the_same_seed_gives_the_same_traffic() -> None:
    assert workload(3, 1.0) == workload(3, 1.0)
    assert workload(3, 1.0) != workload(4, 1.0)


def test_sessions_are_conversations_behind_one_system_prompt() -> None:
    turns = workload(1, 2.0)
    assert [turn.seconds for turn in turns] == sorted(turn.seconds for turn in turns)
    known: dict[int, int] = {}
    for turn in turns:
        assert known.get(turn.session, SYSTEM) < turn.prompt < turn.whole <= CONTEXT
        known[turn.session] = turn.whole
    for now in range(600, 7200, 600):
        running = {turn.session for turn in turns if turn.seconds <= now} & {
            turn.session for turn in turns if turn.seconds > now
        }
        assert len(running) <= 4


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("device", SIMULATED, ids=lambda device: device.name)
def test_a_replay_keeps_the_rules(device, name: str) -> None:  # type: ignore[no-untyped-def]
    turns = workload(2, 1.0)
    replay = Replay(device, name)
    outcome = replay.run(turns)
    assert outcome == Replay(device, name).run(turns)
    if name == NONE:
        assert outcome.hits == 0
        return
    assert replay._policy is not None
    assert 0 < len(replay._policy) <= device.buffers
    assert 0 < outcome.hits < 100
    none = Replay(device, NONE).run(turns)
    assert outcome.latency < none.latency
    assert outcome.peak <= none.peak + device.buffers * device.block_tokens * 56 * 1024


def test_the_table_stands_beside_what_was_published() -> None:
    report = Report("seeds", "simulated")
    found = {SIMULATED[0]: measure(SIMULATED[0], range(2), 1.0)}
    for device, outcomes in found.items():
        tabulate(report, device, outcomes)
    compare(report, found)
    title, _, rows = report.tables[0]
    assert "simulated device" in title
    assert [row[0] for row in rows] == list(POLICIES)
    assert rows[1][5:] == (31, 145, "69", "+18")
    assert len(report.bars) == 2 * (len(POLICIES) - 1)
