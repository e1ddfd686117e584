"""What a test's queue must know about the statements that it runs.

Tests: integration/test_testing.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from pgdefer.database import sql

__all__ = ["CHANGES", "DEFERS", "READS", "CallsApart"]

DEFERS = (
    sql.DEFER,
    sql.DEFER_WITH_TIME,
    sql.DEFER_WITHOUT_OPTIONS,
    sql.DEFER_MANY,
    sql.DEFER_GROUP,
    sql.DEFER_CHAIN,
)
# These change jobs that a worker could see, so those of the test are admitted first.
CHANGES = (
    sql.CANCEL,
    sql.CANCEL_CHILDREN,
    sql.DELETE,
    sql.DELETE_QUEUE,
    sql.DONE,
    sql.FAIL_JOBS,
    sql.HOLD,
    sql.MOVE,
    sql.RESCHEDULE,
    sql.RETRY,
    sql.RETRY_FAILED,
    sql.SET_ARGS,
    sql.SET_DEADLINE,
    sql.SET_PRIORITY,
    sql.UNHOLD,
)
# These only read, and are not refused: they need no savepoint.
READS = (sql.DEFERRED, sql.CLOCK)


class CallsApart:
    """The calls of a transactional handler that its ROLLBACK does not undo in production.

    In a test its ROLLBACK undoes them, because all calls are on one connection. So they are
    repeated.
    """

    def __init__(self) -> None:
        self._is_on = False
        self.made: list[tuple[sql.Statement, Mapping[str, Any]]] = []
        #: Whether it has begun a step's transaction, or that in which children are deferred. Such
        #: calls can't be repeated.
        self.has_transaction = False

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the calls of a block."""
        self._is_on, self.made, self.has_transaction = True, [], False
        try:
            yield
        finally:
            self._is_on = False

    def note(self, statement: sql.Statement, parameters: Mapping[str, Any]) -> None:
        """Record a call that has been made."""
        if self._is_on and statement in sql.AT_ONCE:
            self.made.append((statement, parameters))
