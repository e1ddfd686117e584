"""When a busy worker makes room for jobs that have crashed and must run alone."""

from __future__ import annotations

import random

__all__ = ["Suspects"]

# For how long a worker fetches nothing, in seconds, so that its running jobs can end.
PATIENCE = 30.0
LONGEST = 600.0


class Suspects:
    """Decides when a worker that is never idle runs dry.

    An idle one asks for such jobs by itself. A busy one, once it has heard of them, waits for a
    random while, so that not every worker pauses at once, and then fetches nothing until all its
    jobs have ended, or its patience has: then it tries again later, for longer.
    """

    def __init__(self, heartbeat_every: float) -> None:
        self._delay = 3 * heartbeat_every
        self._patience = PATIENCE
        self._begins: float | None = None
        self._has_run = False

    def seen(self, count: int, now: float) -> None:
        """Take in how many there are, as queue.tick said."""
        if not count:
            self.done()
        elif self._begins is None:
            self._plan(now, self._delay)

    def holds_back(self, now: float) -> bool:
        """Whether to fetch nothing now."""
        if self._begins is None or now < self._begins:
            return False
        if now < self._begins + self._patience:
            return True
        if self._has_run:
            self.done()
        else:
            self._patience = min(2 * self._patience, LONGEST)
            self._plan(now, 4 * self._patience)
        return False

    def ran(self) -> None:
        """One of them has been fetched."""
        self._has_run = True

    def done(self) -> None:
        """There are none left, as far as this worker knows."""
        self._begins = None
        self._has_run = False
        self._patience = PATIENCE

    def _plan(self, now: float, delay: float) -> None:
        self._has_run = False
        self._begins = now + delay * random.uniform(0.3, 1.0)  # noqa: S311
