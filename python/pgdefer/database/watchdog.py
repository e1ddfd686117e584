"""Time limits on calls: if the answer does not arrive in time, the connection is cut.

Tests: integration/test_connections.py, integration/test_worker_connections.py.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["CALL_TIMEOUT", "cut", "watchdog"]

# The time limit for one answer of the database, in seconds.
CALL_TIMEOUT = 20.0


def cut(connection: Any) -> None:
    """Cut a connection, so that a wait for an answer on it fails. May be called from any thread.

    Cancelling would not do: psycopg would spend a long time cancelling the statement. The
    connection is psycopg's, or another driver's with a file descriptor, or with a transport, as
    asyncpg's.
    """
    with contextlib.suppress(Exception):
        if not hasattr(connection, "fileno"):
            connection = connection._transport.get_extra_info("socket")
        with socket.socket(fileno=os.dup(connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)


class Watchdog:
    """Cuts connections whose time is over, from a thread of its own; for calls that block."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all connections: in a forked process they are those of its parent."""
        self._deadlines: dict[object, tuple[float, Any]] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @contextlib.contextmanager
    def watching(self, connection: Any) -> Iterator[None]:
        """Cut the connection if the block takes longer than CALL_TIMEOUT."""
        stop = self.begin(connection)
        try:
            yield
        finally:
            stop()

    def begin(self, connection: Any) -> Callable[[], None]:
        """Cut the connection after CALL_TIMEOUT, unless the returned function is called first."""
        key = object()
        with self._changed:
            self._deadlines[key] = time.monotonic() + CALL_TIMEOUT, connection
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="pgdefer-watch", daemon=True)
                self._thread.start()
            elif len(self._deadlines) == 1:
                self._changed.notify()

        def stop() -> None:
            with self._changed:
                self._deadlines.pop(key, None)

        return stop

    def _run(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for key, (deadline, connection) in list(self._deadlines.items()):
                    if deadline <= now:
                        del self._deadlines[key]
                        cut(connection)
                self._changed.wait(min(CALL_TIMEOUT, 1.0) if self._deadlines else None)


#: The watchdog of this process.
watchdog = Watchdog()
if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=watchdog.reset)
