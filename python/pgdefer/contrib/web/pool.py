"""The connections of all visitors: their number is limited, and none stays open unused for long.

Tests: contrib/test_web_faults.py.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg

__all__ = ["Connection", "Full", "Pool"]

Connection = psycopg.Connection[dict[str, Any]]

MOST = 30
IDLE = 60.0  # s


class Full(Exception):  # noqa: N818 (what it says)
    """All connections are in use."""


class Pool:
    """At most MOST connections; an owner keeps one of them while it is idle."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open = 0
        # with the time since when; the least recently used one is the first
        self._idle: dict[object, tuple[Connection, float]] = {}
        self._timer: threading.Timer | None = None

    def take(self, owner: object) -> tuple[Connection | None, float]:
        """Return the owner's idle connection, and since when it is; or None: it may open one."""
        with self._lock:
            if owner in self._idle:
                return self._idle.pop(owner)
            if self._open >= MOST and self._idle:
                self._close(next(iter(self._idle)))
            if self._open >= MOST:
                raise Full
            self._open += 1
            return None, 0.0

    def give(self, owner: object, connection: Connection | None) -> None:
        """Take a connection back, None if it could not be opened."""
        with self._lock:
            if connection is None:
                self._open -= 1
            elif connection.closed or owner in self._idle:
                connection.close()
                self._open -= 1
            else:
                self._idle[owner] = connection, time.monotonic()
                self._start()

    def close(self, owner: object) -> None:
        """Close the owner's idle connection."""
        with self._lock:
            if owner in self._idle:
                self._close(owner)

    def close_all(self) -> None:
        """Close all idle connections."""
        with self._lock:
            for owner in list(self._idle):
                self._close(owner)
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _close(self, owner: object) -> None:
        connection, _ = self._idle.pop(owner)
        connection.close()
        self._open -= 1

    def _start(self) -> None:
        """Start the timer, unless it runs."""
        if self._idle and self._timer is None:
            self._timer = threading.Timer(IDLE, self._rest)
            self._timer.daemon = True
            self._timer.start()

    def _rest(self) -> None:
        """Close the connections that have been idle for too long; no request is needed for that."""
        with self._lock:
            last = time.monotonic() - IDLE
            for owner in [owner for owner, (_, since) in self._idle.items() if since <= last]:
                self._close(owner)
            self._timer = None
            self._start()
