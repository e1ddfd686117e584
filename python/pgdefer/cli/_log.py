"""The log of `pgdefer worker`, beside that of the application."""

from __future__ import annotations

import enum
import logging
import sys

from pgdefer.logs import JsonFormatter

__all__ = ["Format", "Level", "Log"]


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


class Log:
    """Logs to stderr as the options say; without any, only if the application has no log."""

    def __init__(self, level: Level | None, form: Format | None, *, verbose: bool) -> None:
        self._level = logging.getLevelName(level.upper()) if level else None
        self._form = form
        self._verbose = verbose
        self._handler = logging.StreamHandler()
        text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
        is_json = form is Format.json
        self._handler.setFormatter(JsonFormatter() if is_json else logging.Formatter(text))
        self._root = logging.getLogger()
        self._own = [logging.getLogger(f"pgdefer{name}") for name in ("", ".job", ".worker")]
        self._replaced: list[tuple[logging.Logger, logging.Handler]] = []
        #: The levels that it has set, and those before.
        self._levels: dict[logging.Logger, tuple[int, int]] = {}
        self.set_up()

    def set_up(self) -> None:
        """Set up the log: at first, and again when the application has been imported."""
        self._undo()
        loggers = [self._root, *self._own]
        if not any(logger.handlers for logger in loggers):
            self._set_up_alone()
            return
        if self._form is not None:
            self._replace_consoles(loggers)
        if self._level is not None:
            self._let_through(loggers, self._level)
        if self._verbose:
            self._let_through(loggers, logging.DEBUG)

    def _undo(self) -> None:
        for logger in (self._root, *self._own):
            logger.removeHandler(self._handler)
        for logger, (ours, before) in self._levels.items():
            if logger.level == ours:
                logger.setLevel(before)
        self._levels.clear()
        while self._replaced:
            logger, handler = self._replaced.pop()
            logger.addHandler(handler)

    def _set_level(self, logger: logging.Logger, level: int) -> None:
        _, before = self._levels.get(logger, (0, logger.level))
        self._levels[logger] = level, before
        logger.setLevel(level)

    def _set_up_alone(self) -> None:
        """Log all that the process has to say, but no successes unless they are asked for."""
        self._root.addHandler(self._handler)
        self._set_level(self._root, logging.INFO if self._level is None else self._level)
        for logger in self._own if self._level is not None else ():
            self._set_level(logger, logging.NOTSET)
        whole, jobs, _ = self._own
        if self._verbose:
            self._set_level(whole, logging.DEBUG)
        elif self._level is None and jobs.level == logging.NOTSET:
            self._set_level(jobs, logging.WARNING)

    def _replace_consoles(self, loggers: list[logging.Logger]) -> None:
        """Write to stderr in place of the application's handlers that do so, once per record."""
        for logger in loggers:
            for handler in filter(_is_console, logger.handlers[:]):
                logger.removeHandler(handler)
                self._replaced.append((logger, handler))
            if logger is self._root or not logger.propagate:
                logger.addHandler(self._handler)

    def _let_through(self, loggers: list[logging.Logger], level: int) -> None:
        """Log the queue's records from a level on, to wherever the application logs."""
        for logger in self._own:
            self._set_level(logger, level)
        for handler in (one for logger in loggers for one in logger.handlers if _is_console(one)):
            handler.setLevel(min(handler.level, level))


def _is_console(handler: logging.Handler) -> bool:
    """Whether a handler writes to the terminal."""
    streams = (sys.stderr, sys.stdout, sys.__stderr__, sys.__stdout__)
    return isinstance(handler, logging.StreamHandler) and handler.stream in streams
