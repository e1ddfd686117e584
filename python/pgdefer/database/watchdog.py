"""Time limits on calls: if the answer does not arrive in time, the connection is cut.

Tests: integration/test_connections.py, integration/test_worker_connections.py.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["CALL_TIMEOUT", "cut", "watchdog"]

# The time limit for one answer of the database, in seconds.
CALL_TIMEOUT = 20.0
# How long an answer may be on its way once the server has ended the call.
ON_ITS_WAY = 1.0


def cut(connection: Any) -> None:
    """Make a wait for an answer fail because the connection is lost; from any thread.

    Cancelling would not do: psycopg would spend a long time cancelling the statement. The
    connection belongs to psycopg, or to a driver with a file descriptor, or a transport as asyncpg.
    """
    with contextlib.suppress(Exception):
        if not hasattr(connection, "fileno"):
            connection = connection._transport.get_extra_info("socket")
        with socket.socket(fileno=os.dup(connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)


class Watchdog:
    """Cuts connections whose time is over, from a thread of its own; for calls that block."""

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
        """Forget all connections: in a forked process they are the other one's."""
        self._deadlines: dict[object, tuple[float, Any, Callable[[], bool] | None]] = {}
        self._asking = threading.Lock()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(
        self, connection: Any, may_be_busy: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Cut the connection if the block takes longer than CALL_TIMEOUT.

        With `may_be_busy`, which asks the server, that is put off for as long as the server may
        work on the call, or can't be asked.
        """
        key = object()
        try:  # a JobTimeout may be raised in this thread
            self._watch(key, connection, may_be_busy)
            yield
        finally:
            self._forget(key)

    def begin(self, connection: Any) -> Callable[[], None]:
        """Cut the connection after CALL_TIMEOUT, unless the returned function is called before."""
        key = object()
        self._watch(key, connection)
        return functools.partial(self._forget, key)

    def _watch(
        self, key: object, connection: Any, may_be_busy: Callable[[], bool] | None = None
    ) -> None:
        with self._changed:
            self._deadlines[key] = time.monotonic() + CALL_TIMEOUT, connection, may_be_busy
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="pgdefer-watch", daemon=True)
                self._thread.start()
            elif len(self._deadlines) == 1:
                self._changed.notify()

    def _forget(self, key: object) -> None:
        with self._changed:
            self._deadlines.pop(key, None)

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for key, (deadline, connection, may_be_busy) in list(self._deadlines.items()):
                    if deadline > now:
                        continue
                    if may_be_busy is None:
                        del self._deadlines[key]
                        cut(connection)
                    else:
                        self._deadlines[key] = math.inf, connection, may_be_busy
                        asking = key, connection, may_be_busy
                        threading.Thread(target=self._ask, args=asking, daemon=True).start()
                self._changed.wait(min(CALL_TIMEOUT, 1.0) if self._deadlines else None)

    def _ask(self, key: object, connection: Any, may_be_busy: Callable[[], bool]) -> None:
        """Ask whether the server works on a call: one after another, or many would connect."""
        goes_on = True
        with self._asking, contextlib.suppress(Exception):
            goes_on = may_be_busy()
        left = CALL_TIMEOUT if goes_on else ON_ITS_WAY
        with self._changed:
            if key in self._deadlines:
                end = time.monotonic() + left
                self._deadlines[key] = end, connection, may_be_busy if goes_on else None


#: The watchdog of this process.
watchdog = Watchdog()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=watchdog.begin_anew)
