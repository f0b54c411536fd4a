"""Logs of the `kvstore` loggers for people and for machines, as the environment says.

    KVSTORE_LOG=info           text, from this level on
    KVSTORE_LOG=json           one JSON object a line, from `info` on
    KVSTORE_LOG=json:debug     the same, from another level on

A library leaves logging to its application: only the command and the daemon call `configure`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from typing import TextIO

from .errors import InvalidRequestError

VARIABLE = "KVSTORE_LOG"
_LEVELS = ("debug", "info", "warning", "error")
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


def configure(setting: str | None = None, stream: TextIO | None = None) -> None:
    """Log to `stream` (standard error) as `setting` says, by default KVSTORE_LOG, else warnings as text.

    A second call takes the place of the first. Raises InvalidRequestError for a setting that is not understood.
    """
    chosen = os.environ.get(VARIABLE, "warning") if setting is None else setting
    kind, _, level = chosen.rpartition(":")
    if level == "json" and not kind:
        kind, level = "json", "info"
    if level not in _LEVELS or kind not in ("", "text", "json"):
        raise InvalidRequestError(
            f"{VARIABLE}={chosen!r} is not understood; give {', '.join(_LEVELS)}, json, or json:debug and the like"
        )
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(
        JsonLines()
        if kind == "json"
        else logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    )
    handler.set_name("kvstore")
    logger = logging.getLogger("kvstore")
    for other in [each for each in logger.handlers if each.get_name() == "kvstore"]:
        logger.removeHandler(other)
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    logger.propagate = False
