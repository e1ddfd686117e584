"""How many jobs a worker claims before it can start them."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["MOST", "MOST_OF_MANY", "SOON", "WAIT", "Filling", "Prefetch"]

# How many jobs are claimed ahead at most, unless the worker's options say otherwise: about as many
# small ones as fit into one answer of queue.fetch (64 kB).
MOST = 500
# The same for each of many databases: with fewer jobs ahead, their turns come sooner.
MOST_OF_MANY = 100
# In seconds. As many jobs are claimed ahead as start within AHEAD, if they run as long as the last
# ones did; none if those ran longer than AHEAD. Jobs are given back if they have waited for longer
# than WAIT and, at the pace of the last starts, would wait that long again: a slow job came first.
AHEAD = 0.05
WAIT = 0.2
# In seconds. As many as start within this time are claimed ahead even if an answer was not full. It
# is about a round trip, so no other worker could have started them earlier.
SOON = 0.005
# In seconds. Jobs that run no longer are quick. On a slow machine, a job that does nothing runs so
# long if 64 start together.
QUICK = 0.01
# The most jobs to ask for where they are to fill batches.
MOST_IN_BATCHES = 1000
# An answer that was not full, but holds at least so many jobs, may have been cut to 64 kB: as
# `always_fit` in extension/macros.
FIT = 30
# The weight of the last job in the mean of run times.
WEIGHT = 1 / 8


class Prefetch:
    """How many jobs may be claimed ahead for some slots.

    The number begins at 0, and doubles after each full answer, or grows by the slots if that is
    more. These rules keep it low:

    - It is never more than start within AHEAD if they run as long as the last jobs did. It is
      0 where those ran longer.
    - Slots whose jobs run for longer than AHEAD do not count: nothing will start in them soon.
    - It halves if jobs have waited longer than AHEAD. Handlers that compute in the event loop end
      one at a time, however many slots there are.
    - It halves if an answer may have been cut, but keeps as many as that answer and the full ones
      just before it held, and as start within SOON.
    - After any other answer that was not full, it keeps only as many as start within SOON: other
      workers may have nothing to do. It keeps those so that jobs that come many at a time, and are
      done before the next come, are claimed in one answer. If jobs have waited longer than AHEAD,
      it keeps none.
    - It is 0 after jobs were given back, because they had waited too long. From half of what it was
      it then grows only by the slots with each full answer, as the congestion window of TCP does
      (RFC 5681). So slow jobs that come again and again make few others go back.
    """

    __slots__ = (
        "_burst",
        "_doubles_to",
        "_held",
        "_is_late",
        "_mean",
        "_most",
        "_slots",
        "_started",
        "_window",
    )

    def __init__(self, slots: int, most: int) -> None:
        self._slots = slots
        self._most = most
        self._window = 0
        self._doubles_to = most
        # How many jobs came since the last answer that was not full.
        self._burst = 0
        # How many jobs that waited for a slot have started since the last `take_pace`.
        self._started = 0
        # Whether a job has waited for longer than AHEAD since the last answer.
        self._is_late = False
        # How long the last jobs ran, in seconds; below 0: none has yet.
        self._mean = -1.0
        # How many slots have jobs that run for longer than AHEAD.
        self._held = 0

    @property
    def allowed(self) -> int:
        """How many jobs may be claimed ahead now."""
        return min(self._window, self._start_within(AHEAD)) if self._mean <= AHEAD else 0

    @property
    def is_quick(self) -> bool:
        """Whether the last jobs, if any, ran no longer than QUICK."""
        return self._mean <= QUICK

    def ended(self, duration: float) -> None:
        """Take in how long a job ran."""
        mean = self._mean
        self._mean = duration if mean < 0 else mean + (duration - mean) * WEIGHT

    def runs(self, starts: Iterable[float], now: float) -> None:
        """Take in when the jobs that run have started, the first ones first."""
        self._held = 0
        for at in starts:
            if now - at <= AHEAD:
                break
            self._held += 1

    def answered(self, asked: int, came: int) -> None:
        """Take in how many jobs an answer held of those that were asked for."""
        soon = 0 if self._is_late else self._start_within(SOON)
        self._burst += came
        if came == asked and not self._is_late:
            doubled = min(2 * self._window, self._doubles_to)
            self._window = min(max(self._window + self._slots - self._held, doubled), self._most)
        elif came == asked or came >= FIT:
            self._window = max(self._window // 2, min(self._window, self._burst, soon))
        else:
            self._window = min(self._window, soon)
        if came < asked:
            self._burst = 0
        self._is_late = False

    def waited(self, seconds: float) -> None:
        """Take in that a job has started, and how long it had waited for its slot."""
        self._started += 1
        if seconds > AHEAD:
            self._is_late = True

    def take_pace(self, seconds: float) -> int:
        """Return how many jobs start within WAIT at the pace of the last `seconds`.

        Then count from 0 again.
        """
        started, self._started = self._started, 0
        return int(started * WAIT / seconds)

    def waited_too_long(self) -> None:
        """Take in that jobs were given back."""
        if self._window:
            self._doubles_to = self._window // 2
        self._window = 0

    def _start_within(self, seconds: float) -> int:
        """Return how many jobs start within so many seconds, if they run as long as the last."""
        if self._mean < 0:
            return 0
        return int(min(seconds * (self._slots - self._held) / max(self._mean, 1e-9), self._most))


class Filling:
    """How many jobs to ask for, so that each free slot gets a full batch.

    Which tasks the next jobs have is not known before they are claimed. So it asks for as many per
    slot as the last answer held, and for twice as many if that was full and held only batches.
    """

    __slots__ = ("_per_slot",)

    def __init__(self) -> None:
        self._per_slot = 1.0

    def wanted(self, free: int) -> int:
        """Return how many jobs to ask for to fill the free slots."""
        return max(free, min(int(free * self._per_slot), MOST_IN_BATCHES))

    def answered(self, jobs: int, calls: int, largest: int, *, grows: bool) -> None:
        """Take in an answer, whose jobs need so many calls.

        `largest`: the size of a batch, or 1. `grows`: it was full, and held only batches.
        """
        if jobs:
            self._per_slot = min(jobs / calls * (2 if grows else 1), largest)
