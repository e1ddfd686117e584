"""Logs as JSON: one object per line, with the records' fields."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

__all__ = ["JsonFormatter"]

# The attributes of every record; all others are its fields.
_COMMON = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats a record as a JSON object: `time`, `level`, `logger`, `message`, and its fields.

    Records about a job have the fields `id`, `task`, `queue`, `attempt`, and at its end `outcome`,
    `state` and `duration` in seconds.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{seconds}.{int(record.msecs):03}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _COMMON}
        if record.exc_info and not record.exc_text:
            record.exc_text = self.formatException(record.exc_info)
        if record.exc_text:
            line["traceback"] = record.exc_text
        return json.dumps(line, default=str)
