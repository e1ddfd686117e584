"""The log of `pgdefer worker`, beside that of the application.

Tests: integration/test_cli.py, contrib/test_django_log.py, unit/test_log.py.
"""

from __future__ import annotations

import enum
import logging
import sys
import threading

from pgdefer.logs import JsonFormatter, own_loggers

__all__ = ["Format", "Level", "set_up_log"]


class Level(enum.StrEnum):
    """The values of `--log-level`."""

    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class Format(enum.StrEnum):
    """The values of `--log-format`."""

    text = "text"
    json = "json"


def set_up_log(level: Level | None, form: Format | None, *, verbose: bool) -> None:
    """Log to stderr as the options say; without any, only if the application has no log.

    It is called once the application has been imported.
    """
    for logger in own_loggers():
        logger.disabled = False  # by a configuration that does not name it
    root, *own = map(logging.getLogger, ("", "pgdefer", "pgdefer.job", "pgdefer.worker"))
    handlers = [handler for logger in (root, *own) for handler in logger.handlers]
    handler = logging.StreamHandler()
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(JsonFormatter() if form is Format.json else logging.Formatter(text))
    least = None if level is None else logging.getLevelName(level.upper())
    if not handlers:
        _add_to_root(root, handler)
        _set_levels_alone(root, own, least, verbose=verbose)
        return
    consoles = list(filter(_is_console, handlers))
    if form is not None:
        for console in consoles:
            console.setFormatter(handler.formatter)
        if not consoles:
            own[0].addHandler(handler)
    if verbose:
        least = logging.DEBUG
    if least is not None:
        for logger in own:
            logger.setLevel(least)
        for console in consoles:
            console.setLevel(min(console.level, least))


def _add_to_root(root: logging.Logger, handler: logging.Handler) -> None:
    loggers = [
        each for each in root.manager.loggerDict.values() if isinstance(each, logging.Logger)
    ]
    consoles = [each for logger in loggers for each in logger.handlers if _is_console(each)]
    root.addHandler(handler)
    for each in (handler, *consoles):
        each.addFilter(_is_no_repeat)
    if isinstance(handler.formatter, JsonFormatter):
        logging.captureWarnings(True)  # else Python writes them to stderr as text
        return
    for console in consoles:
        console.addFilter(_note)
    handler.addFilter(_is_unwritten)


def _set_levels_alone(
    root: logging.Logger, own: list[logging.Logger], least: int | None, *, verbose: bool
) -> None:
    """Log all that the process has to say, but no successes unless they are asked for."""
    root.setLevel(logging.INFO if least is None else least)
    for logger in own if least is not None else ():
        logger.setLevel(logging.NOTSET)
    whole, jobs, _ = own
    if verbose:
        whole.setLevel(logging.DEBUG)
    elif least is None:
        # Django says again how each run of its tasks has ended.
        for logger in (jobs, logging.getLogger("django.tasks")):
            if logger.level == logging.NOTSET:
                logger.setLevel(logging.WARNING)


def _is_console(handler: logging.Handler) -> bool:
    """Whether a handler writes to the terminal."""
    streams = (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in streams


def _is_no_repeat(record: logging.LogRecord) -> bool:
    """Whether a record is not Django's that a task has failed as a job: the queue says so too.

    Tasks of Django's other backends have no number.
    """
    id = record.args[0] if isinstance(record.args, tuple) and record.args else None
    is_failure = record.name == "django.tasks" and record.levelno == logging.ERROR
    return not (is_failure and str(id).isdecimal())


# The time of the record that a handler for the terminal has last let through, in each thread. Its
# filters may have let through a copy, with the same time.
_last = threading.local()


def _note(record: logging.LogRecord) -> bool:
    """Note a record, as the last filter of a handler that is not the root's."""
    _last.time = record.created
    return True


def _is_unwritten(record: logging.LogRecord) -> bool:
    """Whether no other handler writes a record to the terminal, as one of Django's may do."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None and logger is not logging.root:
        for handler in filter(_is_console, logger.handlers):
            if _note not in handler.filters:  # added since; only its first record appears twice
                handler.addFilter(_note)
        logger = logger.parent
    return getattr(_last, "time", None) != record.created
