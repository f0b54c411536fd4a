"""Logs: one object a line for machines, text for people."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO

import pytest

from kvstore.watch import logs


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    logger = logging.getLogger("kvstore")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_json_lines() -> None:
    stream = StringIO()
    logs.configure("info", "json", stream)
    log = logging.getLogger("kvstore.tiers.tiers")
    log.debug("not from this level on")
    log.warning('a "quoted" %s\nin two lines', "word", extra={"tenant": "a", "bytes": 12})
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["level"] == "warning"
    assert first["logger"] == "kvstore.tiers.tiers"
    assert first["message"] == 'a "quoted" word\nin two lines'
    assert (first["tenant"], first["bytes"]) == ("a", 12)
    assert abs((datetime.fromisoformat(first["time"]) - datetime.now(UTC)).total_seconds()) < 600
    assert "error" not in first
    assert "ValueError: broken" in second["error"]


def test_the_level_decides() -> None:
    for level, shows in (("error", False), ("debug", True)):
        stream = StringIO()
        logs.configure(level, "text", stream)
        logging.getLogger("kvstore.store").debug("seen?")
        assert ("seen?" in stream.getvalue()) == shows


def test_a_second_call_takes_the_place_of_the_first() -> None:
    first, second = StringIO(), StringIO()
    logs.configure("info", "text", first)
    logs.configure("info", "text", second)
    logging.getLogger("kvstore").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1
