"""Logs as JSON: one object per line, with the records' fields.

Tests: unit/test_log.py.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any

__all__ = ["JsonFormatter", "own_loggers"]


def own_loggers() -> list[logging.Logger]:
    """Return the loggers of this package that exist."""
    names = [name for name in logging.root.manager.loggerDict if f"{name}.".startswith("pgdefer.")]
    return [logging.getLogger(name) for name in names]


# The attributes of every record; all others are its fields.
_COMMON = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: `time`, `level`, `logger`, `message`, and its fields.

    Records about a job have the fields `id`, `task`, `queue`, `attempt`, and at its end `outcome`,
    `state` and `duration` in seconds. The `repr` of a value stands in for one that JSON can't hold.
    No field replaces one of the first four. If a message does not fit its arguments, they follow
    it.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": _message(record),
        }
        fields = {name: value for name, value in vars(record).items() if name not in _COMMON}
        line = line | fields | line  # in this order, and its own win
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            line["traceback"] = record.exc_text
        if record.stack_info:
            line["stack"] = self.formatStack(record.stack_info)
        try:
            return _dumps(line)
        except Exception:
            return _dumps({str(name): _storable(value) for name, value in line.items()})


def _message(record: logging.LogRecord) -> str:
    """Return the message. If it does not fit its arguments, append them.

    logging itself would print a report of many lines.
    """
    try:
        return record.getMessage()
    except Exception:
        return f"{_text(record.msg)} {_text(record.args)}"


def _text(value: object) -> str:
    try:
        return value if isinstance(value, str) else repr(value)
    except Exception:
        return type(value).__qualname__


def _dumps(value: object) -> str:
    return json.dumps(value, default=str, allow_nan=False)


def _storable(value: object) -> object:
    """Return a value, or a text in its place if JSON has none for it."""
    try:
        _dumps(value)
    except Exception:
        return _text(value)
    return value
