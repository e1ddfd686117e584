"""Delays between attempts of the package's own calls; retries of jobs have queue.backoff.

Tests: integration/test_worker_connections.py, integration/test_results.py.
"""

from __future__ import annotations

import random

__all__ = ["GrowingDelay"]


class GrowingDelay:
    """Delays between attempts: from 0.1 s, doubling up to 5 s, less a random part."""

    def __init__(self, first: float = 0.1, last: float = 5.0) -> None:
        self._first = first
        self._last = last
        self._next = first

    def reset(self) -> None:
        """Start over, after a success."""
        self._next = self._first

    def next(self) -> float:
        """Return the time to wait now, in seconds."""
        delay = self._next
        self._next = min(self._next * 2, self._last)
        return delay * random.uniform(0.7, 1.0)  # noqa: S311
