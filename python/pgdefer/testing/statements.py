"""What a test's queue knows of the calls that it makes."""

from __future__ import annotations

from pgdefer.database import sql

__all__ = ["CHANGES", "DEFERS", "READS"]

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
