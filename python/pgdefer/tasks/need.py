"""The needs of a job.

Tests: integration/test_managing.py.
"""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["Need"]


@dataclasses.dataclass(frozen=True)
class Need:
    """A job that another job needs: its state, its result if it has one, its last error.

    All but the id is None if this role may not use the job's queue. A job that was deleted by force
    has the state `deleted`.
    """

    id: int
    task: str | None
    state: str | None
    result: Any
    error: str | None
