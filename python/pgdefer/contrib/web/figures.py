"""Figures that count whole tables: cached for a time that depends on their cost.

Tests: contrib/test_web_faults.py.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from .database import Refused
from .sessions import Session

__all__ = ["Figures"]

SHORTEST = 4.0  # s
SHARE = 100  # an answer is cached for so many times the time that it took
MOST = 1_000
PATIENCE = 10.0  # s; meanwhile others get the last answer

Key = tuple[str, str, str]


class Figures:
    """The last answers to a few statements, separately for each role and its rights."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Key, tuple[float, list[dict[str, Any]] | None]] = {}

    def read(self, session: Session, rights: str, statement: str) -> list[dict[str, Any]] | None:
        """Return the present or a recent answer to a statement; None if it takes too long."""
        key = (session.role, rights, statement)
        now = time.monotonic()
        with self._lock:
            if len(self._kept) > MOST:
                self._kept.clear()
            until, rows = self._kept.get(key, (now, None))
            if now < until:
                return rows
            if key in self._kept:
                self._kept[key] = (now + PATIENCE, rows)
        try:
            with session.database.visit() as reader:
                rows = reader.rows(statement)
        except Refused as refused:
            if refused.sqlstate != "57014":
                self._forget(key)
                raise
            rows = None
        except BaseException:
            self._forget(key)
            raise
        end = time.monotonic()
        with self._lock:
            self._kept[key] = (end + max(SHORTEST, SHARE * (end - now)), rows)
        return rows

    def _forget(self, key: Key) -> None:
        with self._lock:
            self._kept.pop(key, None)
