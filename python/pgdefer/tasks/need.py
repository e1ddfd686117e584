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

    A job in a queue that this role may not use has only its id. A job that was deleted by force has
    the state `deleted`.
    """

    id: int
    task: str | None
    state: str | None
    result: Any
    error: str | None
