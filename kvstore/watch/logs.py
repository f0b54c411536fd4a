"""Logs of the `kvstore` loggers, for people (text) and for machines (one JSON object a line).

A library leaves logging to its application: only the command and the daemon call `configure`.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

from ..config import LogFormat, LogLevel

_ORDINARY = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One object a line: time (UTC), level, logger, message, error with its traceback, and what `extra` gave."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "thread": record.threadName,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        line |= {name: value for name, value in vars(record).items() if name not in _ORDINARY}
        return json.dumps(line, default=str, ensure_ascii=False)


def configure(level: LogLevel, form: LogFormat, stream: TextIO | None = None) -> None:
    """Log to `stream` (standard error) what is at least this serious. A second call takes the place of the first."""
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(
        JsonLines()
        if form == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    handler.set_name("kvstore")
    logger = logging.getLogger("kvstore")
    for other in [each for each in logger.handlers if each.get_name() == "kvstore"]:
        logger.removeHandler(other)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
