"""Text of others, as a log or a terminal may show it."""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["logger", "plain"]

# Control characters (C0, C1), other ends of lines, and what changes the direction of writing.
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def plain(text: str) -> str:
    """Return a text in which control characters are escaped, so that it is one line."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def logger(name: str) -> logging.Logger:
    """Return a logger that writes no text of jobs or errors as it came: nobody forges a line."""
    log = logging.getLogger(name)
    log.addFilter(_escape)
    return log


def _escape(record: logging.LogRecord) -> bool:
    """Escape what a record was given; its traceback keeps its lines, the messages in it have one.

    `exc_info` stays what it was, for handlers that take errors apart.
    """
    if isinstance(record.args, Mapping):
        record.args = {name: _escaped(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(_escaped(value) for value in record.args)
    if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
        record.exc_text = _traceback(record.exc_info[1])
    return True


def _escaped(value: Any) -> Any:
    if isinstance(value, str | BaseException):
        try:
            return plain(str(value))
        except Exception:
            return type(value).__qualname__
    return value


class _Escaped(traceback.TracebackException):
    """A traceback in which each error's message is one line."""

    def format_exception_only(self, **options: Any) -> Iterator[str]:  # type: ignore[override]
        for line in super().format_exception_only(**options):
            yield plain(line.removesuffix("\n")) + "\n"


def _traceback(error: BaseException) -> str:
    try:
        whole = traceback.TracebackException.from_exception(error)
        todo, seen = [whole], set()
        while todo:
            part = todo.pop()
            if id(part) not in seen:
                seen.add(id(part))
                part.__class__ = _Escaped
                if part.__notes__:
                    # indented, so that no line of theirs looks like one of the log's
                    part.__notes__ = [
                        "\n  ".join(plain(line) for line in str(note).splitlines())
                        for note in part.__notes__
                    ]
                within = [
                    part.__cause__,
                    part.__context__,
                    *(getattr(part, "exceptions", None) or ()),
                ]
                todo += [one for one in within if one is not None]
        return "".join(whole.format()).removesuffix("\n")
    except Exception:
        return f"({type(error).__qualname__}: its traceback could not be made)"
