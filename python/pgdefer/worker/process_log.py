"""What a worker's child process says: its messages, and log records for the worker's log.

Tests: integration/test_process_log.py.
"""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import pickle
import queue
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, cast

from pgdefer._text import logger
from pgdefer.errors import describe

__all__ = ["Forwarder", "Outbox", "receive"]

log = logger("pgdefer.worker")

# How a message begins that is a log record.
_RECORD = b"L"
_OTHER = b"M"


class Outbox:
    """Sends messages to the worker, in a thread of its own.

    A signal's handler may interrupt the main thread at any time, also by an exception. Half a
    message would be sent then.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[tuple[bytes, threading.Lock]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="pgdefer-outbox", daemon=True).start()

    def send(self, message: object) -> None:
        """Return when it is sent, or the worker is gone: the process may die the next moment."""
        self._send(_OTHER + pickle.dumps(message))

    def send_record(self, record: logging.LogRecord) -> None:
        """Send a log record, as `send`."""
        self._send(_RECORD + _pickled(record))

    def _send(self, message: bytes) -> None:
        sent = threading.Lock()  # an exception could leave an Event's own lock behind
        sent.acquire()
        self._messages.put((message, sent))
        sent.acquire()

    def _run(self) -> None:
        while True:
            message, sent = self._messages.get()
            try:
                self._connection.send_bytes(message)
            except OSError:
                pass
            except BaseException:
                os._exit(1)  # half of the message may be sent
            sent.release()


class Forwarder(logging.handlers.QueueHandler):
    """Sends the records for which the task's module has set up no handler.

    While the process has nothing to do, the worker reads no messages: `is_idle` tells.
    """

    def __init__(self, outbox: Outbox, is_idle: Callable[[], bool]) -> None:
        super().__init__(cast("Any", None))
        self._outbox = outbox
        self._is_idle = is_idle
        self._pid = os.getpid()

    def install(self, level: int) -> None:
        """Forward records of this level, warnings of Python, and all of this package's records."""
        root, ours = logging.getLogger(), logging.getLogger("pgdefer")
        root.setLevel(level)
        ours.setLevel(logging.DEBUG)
        ours.propagate = False
        for each in (root, ours):
            each.addHandler(self)
        logging.captureWarnings(True)

    def filter(self, record: logging.LogRecord) -> Any:
        """Whether no other handler writes the record."""
        others = (each for each in _handlers(record.name) if each is not self)
        return all(isinstance(each, logging.NullHandler) for each in others) and super().filter(
            record
        )

    def enqueue(self, record: logging.LogRecord) -> None:
        """Send a record; while idle, and in a process that a handler has forked, do as Python."""
        if os.getpid() == self._pid and not self._is_idle():
            self._outbox.send_record(record)
        elif logging.lastResort and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)


def _pickled(record: logging.LogRecord) -> bytes:
    """Return a record, with texts in place of those of its fields that can't be pickled."""
    try:
        return pickle.dumps(record)
    except Exception:
        fields = vars(record)
        for name in fields:
            try:
                pickle.dumps(fields[name])
            except Exception:
                fields[name] = repr(fields[name])
        return pickle.dumps(record)


def receive(connection: Connection) -> object:
    """Return a message of the process; None if it was a log record, which is written.

    Raises: OSError, EOFError.
    """
    message = connection.recv_bytes()
    if message[:1] != _RECORD:
        return pickle.loads(message[1:])  # noqa: S301 (its sender is this worker's own process)
    try:
        record: logging.LogRecord = pickle.loads(message[1:])  # noqa: S301
    except Exception as error:
        log.warning("a log record of a job's process could not be read: %s", describe(error))
        return None
    try:
        _write(record)
    except (Exception, SystemExit):  # of the application's handlers and filters
        with contextlib.suppress(Exception):  # stderr may be closed
            logging.Handler().handleError(record)
    return None


def _write(record: logging.LogRecord) -> None:
    """Write a record as its logger does, but without what an SDK such as Sentry's adds to loggers.

    That has seen the record in the process.
    """
    its_logger = logging.getLogger(record.name)
    if not its_logger.isEnabledFor(record.levelno):
        return
    found: Any = its_logger.filter(record)
    if not found:
        return
    if isinstance(found, logging.LogRecord):  # a filter's own, from Python 3.12 on
        record = found
    handlers: list[logging.Handler | None] = [*_handlers(record.name)] or [logging.lastResort]
    for handler in handlers:
        if handler is not None and record.levelno >= handler.level:
            handler.handle(record)


def _handlers(name: str) -> Iterator[logging.Handler]:
    """Yield the handlers that get the records of a logger."""
    each: logging.Logger | None = logging.getLogger(name)
    while each is not None:
        yield from each.handlers
        each = each.parent if each.propagate else None
