"""Logs: one object a line for machines, text for people, as KVSTORE_LOG says."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from io import StringIO

import pytest

from kvstore import logs
from kvstore.errors import InvalidRequestError


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    logger = logging.getLogger("kvstore")
    before = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers, logger.propagate = before[0], before[2]
    logger.setLevel(before[1])


def test_json_lines() -> None:
    stream = StringIO()
    logs.configure("json", stream)
    log = logging.getLogger("kvstore.tiers")
    log.debug("not from this level on")
    log.warning('a "quoted" %s\nin two lines', "word", extra={"tenant": "a", "bytes": 12})
    try:
        raise ValueError("broken")
    except ValueError:
        log.exception("failed")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["level"] == "warning"
    assert first["logger"] == "kvstore.tiers"
    assert first["message"] == 'a "quoted" word\nin two lines'
    assert (first["tenant"], first["bytes"]) == ("a", 12)
    assert abs((datetime.fromisoformat(first["time"]) - datetime.now(UTC)).total_seconds()) < 600
    assert "error" not in first
    assert "ValueError: broken" in second["error"]


def test_the_environment_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, level, shows in (("error", logging.ERROR, ""), ("json:debug", logging.DEBUG, '"debug"')):
        stream = StringIO()
        monkeypatch.setenv(logs.VARIABLE, setting)
        logs.configure(stream=stream)
        assert logging.getLogger("kvstore").level == level
        logging.getLogger("kvstore.store").debug("seen?")
        assert shows in stream.getvalue()
        assert bool(stream.getvalue()) == bool(shows)


def test_a_second_call_takes_the_place_of_the_first() -> None:
    first, second = StringIO(), StringIO()
    logs.configure("info", first)
    logs.configure("info", second)
    logging.getLogger("kvstore").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


@pytest.mark.parametrize("setting", ["loud", "xml:info", "json:loud", ""])
def test_what_is_not_understood(setting: str) -> None:
    with pytest.raises(InvalidRequestError, match="KVSTORE_LOG"):
        logs.configure(setting)
