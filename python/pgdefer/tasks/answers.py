"""Reads the rows that functions on jobs return.

Tests: integration/test_managing.py.
"""

from __future__ import annotations

from pgdefer.database.callers import Rows
from pgdefer.errors import refused

__all__ = ["check_outcomes", "outcome_of", "value_of"]


def value_of(rows: Rows) -> str:
    """Return what a function on one job returned."""
    ((value,),) = rows
    return str(value)


def outcome_of(rows: Rows) -> str:
    """Return the outcome of one job from a function on many; raise its error if it was refused."""
    ((id, outcome, error),) = rows
    if error is not None:
        raise refused(id, outcome, error)
    return str(outcome)


def check_outcomes(rows: Rows) -> None:
    """Raise the error of the first job that a function on many has refused."""
    for id, outcome, error in rows:
        if error is not None:
            raise refused(id, outcome, error)
