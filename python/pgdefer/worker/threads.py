"""Threads for handlers that are not coroutines."""

from __future__ import annotations

import asyncio
import collections
import contextvars
import math
import queue
import threading
from collections.abc import Callable

from pgdefer._text import logger

__all__ = ["Threads"]

log = logger("pgdefer.worker")

# How long to wait, in seconds, after the system has refused a thread.
AGAIN = 1.0

# A submitted function, with the context of the `submit`.
_Work = tuple[contextvars.Context, Callable[[], Callable[[], None]]]


def _nothing() -> None:
    pass


class Threads:
    """A pool of daemon threads, which grows as needed: a handler that never returns blocks nobody.

    Call `submit` and `close` in the event loop. A submitted function returns a function, which is
    called in the loop, in the context of `submit`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, max_threads: float = math.inf) -> None:
        self._loop = loop
        self._max_threads = max_threads
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        self._done: collections.deque[tuple[contextvars.Context, Callable[[], None]]] = (
            collections.deque()
        )
        self._is_called = False
        self._unfinished = 0
        self._threads = 0
        # If the system refuses threads: when to try again, and whether that was logged.
        self._again: asyncio.TimerHandle | None = None
        self._is_short = False

    def submit(self, work: Callable[[], Callable[[], None]]) -> None:
        """Run `work` in a thread, then call its return value in the loop. `work` must not raise."""
        self._unfinished += 1
        self._work.put((contextvars.copy_context(), work))
        if self._again is None:
            self._grow()

    def close(self) -> None:
        """Let the threads end once they have done their work."""
        if self._again is not None:
            self._again.cancel()
        for _ in range(self._threads):
            self._work.put(None)

    @property
    def is_busy(self) -> bool:
        """Whether a submitted function has not returned yet."""
        return self._unfinished > 0

    def _grow(self) -> None:
        """Start the threads that are missing; if the system refuses one, try again later."""
        self._again = None
        while self._threads < min(self._unfinished, self._max_threads):
            name = f"pgdefer-{self._threads + 1}"
            try:
                threading.Thread(target=self._run, name=name, daemon=True).start()
            except RuntimeError as error:
                if not self._is_short:
                    log.warning("jobs wait until a thread can be started: %s", error)
                self._is_short = True
                self._again = self._loop.call_later(AGAIN, self._grow)
                return
            self._threads += 1
        self._is_short = False

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            context, work = item
            try:
                then = work()
            except BaseException:  # the thread must go on: other work needs it
                log.exception("a thread's work has failed")
                then = _nothing
            self._done.append((context, then))
            del item, context, work, then
            # One call wakes the loop for all functions that return until it runs.
            if not self._is_called:
                self._is_called = True
                try:
                    self._loop.call_soon_threadsafe(self._drain)
                except RuntimeError:  # the loop is closed: nobody waits any more
                    return

    def _drain(self) -> None:
        self._is_called = False
        while self._done:
            self._unfinished -= 1
            context, function = self._done.popleft()
            context.run(function)
