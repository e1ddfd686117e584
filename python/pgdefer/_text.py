"""Text for logs, terminals and pages; text from elsewhere is escaped.

Tests: unit/test_log.py.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import re
import traceback
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

__all__ = [
    "count_of",
    "database_in_logs",
    "escaped",
    "first_line",
    "full_type_name",
    "logger",
    "traceback_of",
    "type_name",
]

#: The database that a record is about, where one process works for several; else empty.
database_in_logs: contextvars.ContextVar[str] = contextvars.ContextVar("database", default="")

# The most characters that the log takes of a message: escaping and writing 100 MB takes long, and
# the worker's loop stands still meanwhile.
MAX_MESSAGE = 16_000

# Control characters (C0, C1), other line ends, and characters that change the text direction.
_CONTROL = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)


def escaped(text: str) -> str:
    """Return a text with control characters escaped, so that it is one line."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def first_line(text: str) -> str:
    """Return the first line that is not blank."""
    return text.strip().partition("\n")[0].rstrip()


def count_of(number: int, noun: str) -> str:
    """Return `1 job`, `2 jobs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def type_name(value: object) -> str:
    """Return the name of a value's type, even if its metaclass overrides that name."""
    return str.__str__(type.__dict__["__qualname__"].__get__(type(value)))


def full_type_name(value: object) -> str:
    """Return the name of a value's type, after that of its module if it has one."""
    name = type_name(value)
    try:
        return f"{str.__str__(type.__dict__['__module__'].__get__(type(value)))}.{name}"
    except (AttributeError, TypeError):  # it was deleted, or is no text
        return name


def traceback_of(error: BaseException) -> TracebackType | None:
    """Return an error's traceback, even if its class overrides `__traceback__`."""
    found: TracebackType | None = BaseException.__dict__["__traceback__"].__get__(error)
    return found


def logger(name: str) -> logging.Logger:
    """Return a logger that escapes text of jobs and errors, so that nobody can forge a line.

    It also names the database, where one process works for several. Errors of the application's own
    handlers and filters do not reach the code that logs.
    """
    log = logging.getLogger(name)
    log.addFilter(_escape)
    log.addFilter(_name_database)
    log.handle = functools.partial(_handle, log)  # type: ignore[method-assign]
    return log


def _handle(log: logging.Logger, record: logging.LogRecord) -> None:
    """Handle a record. If a handler or filter raises, report that on stderr, as logging does."""
    try:
        type(log).handle(log, record)
    except (Exception, SystemExit):
        with contextlib.suppress(Exception):  # stderr may be closed
            logging.Handler().handleError(record)


def _escape(record: logging.LogRecord) -> bool:
    """Escape the arguments of a record. Its traceback keeps its lines; each message in it is one.

    `exc_info` stays unchanged, for handlers that inspect errors.
    """
    if isinstance(record.args, Mapping):
        record.args = {name: _escaped_argument(value) for name, value in record.args.items()}
    elif record.args:
        record.args = tuple(_escaped_argument(value) for value in record.args)
    if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
        record.exc_text = _traceback(record.exc_info[1])
    return True


def _name_database(record: logging.LogRecord) -> bool:
    database = database_in_logs.get()
    if database and not hasattr(record, "database"):
        record.database = database
        name = database.replace("%", "%%") if record.args else database
        record.msg = f"{name}: {record.msg}"
    return True


def _escaped_argument(value: Any) -> Any:
    if issubclass(type(value), str | BaseException):
        try:
            return escaped(_cut(str.__str__(str(value))))
        except BaseException:  # Python's tracebacks then show only the type, too
            return type_name(value)
    return value


class _Escaped(traceback.TracebackException):
    """A traceback in which each error's message is one line, and not too long."""

    def format_exception_only(self, **options: Any) -> Iterator[str]:  # type: ignore[override]
        for line in super().format_exception_only(**options):
            yield escaped(_cut(line.removesuffix("\n"))) + "\n"


def _cut(text: str) -> str:
    return text if len(text) <= MAX_MESSAGE else f"{text[: MAX_MESSAGE - 4]} ..."


def _parts(whole: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield a traceback, and those of its causes, contexts and groups, each once."""
    todo: list[traceback.TracebackException | None] = [whole]
    seen: set[int] = set()
    while todo:
        part = todo.pop()
        if part is not None and id(part) not in seen:
            seen.add(id(part))
            yield part
            todo += [part.__cause__, part.__context__, *(getattr(part, "exceptions", None) or ())]


def _traceback(error: BaseException) -> str:
    try:
        whole = traceback.TracebackException.from_exception(error)
        for part in _parts(whole):
            part.__class__ = _Escaped
            if part.__notes__:
                # indented, so that none of these lines looks like one of the log
                part.__notes__ = [
                    "\n  ".join(escaped(line) for line in _cut(str(note)).splitlines())
                    for note in part.__notes__
                ]
        return "".join(whole.format()).removesuffix("\n")
    except BaseException:
        return f"({type_name(error)}: its traceback could not be made)"
