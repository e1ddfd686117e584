"""Which steps of a run have begun and not ended, so that none overlaps the job's next run.

Tests: integration/test_durable_beside.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Iterator
from typing import TypeAlias

__all__ = ["RunningSteps"]

Owner: TypeAlias = "asyncio.Task[object] | threading.Thread"
Begun: TypeAlias = tuple[object, contextvars.Token[tuple[object, ...]]]

# The steps within which the code of this context runs, the outermost first.
_around: contextvars.ContextVar[tuple[object, ...]] = contextvars.ContextVar(
    "pgdefer_steps", default=()
)


class RunningSteps:
    """The steps of a run that have begun and not ended, and the call that ends its claim.

    Coroutines call the methods named ..._async, functions the others. A function blocks the event
    loop of its thread, so it must not wait for anything that this loop would run.
    """

    __slots__ = ("_ending", "_owners", "_reading", "_resting")

    def __init__(self) -> None:
        self._owners: dict[object, Owner] = {}
        self._resting: list[object] = []
        self._ending: Owner | None = None
        self._reading: Owner | None = None

    def begin(self) -> Begun:
        """Count a step as running; `end` takes what it returns."""
        mark = object()
        self._owners[mark] = _owner()
        return mark, _around.set((*_around.get(), mark))

    def end(self, begun: Begun) -> None:
        """Record that a step has ended."""
        mark, token = begun
        self._owners.pop(mark, None)
        with contextlib.suppress(ValueError):  # it ends in another context
            _around.reset(token)

    @contextlib.contextmanager
    def resting(self) -> Iterator[None]:
        """Do not count the steps around this call as running: they wait for the call."""
        around = _around.get()
        self._resting += around
        try:
            yield
        finally:
            for mark in around:
                self._resting.remove(mark)

    @contextlib.contextmanager
    def ending(self) -> Iterator[None]:
        """Note that the code in the block is ending the claim."""
        self._ending = _owner()
        try:
            yield
        finally:
            self._ending = None

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Note that the code in the block is reading the job's children."""
        self._reading = _owner()
        try:
            yield
        finally:
            self._reading = None

    def has_read_async(self) -> bool:
        """Whether no call is reading the job's children."""
        return self._reading is None

    def has_read(self) -> bool:
        """As `has_read_async`."""
        return self._reading is None or _is_stopped(self._reading)

    def may_end_async(self) -> bool:
        """Whether the claim may end: no step runs, and no other call ends it."""
        return self._ending is None and not self._running()

    def may_end(self) -> bool:
        """As `may_end_async`."""
        return self.is_decided() and not [one for one in self._running() if not _is_stopped(one)]

    def is_decided_async(self) -> bool:
        """Whether no call is about to end the claim."""
        return self._ending is None

    def is_decided(self) -> bool:
        """As `is_decided_async`."""
        return self._ending is None or _is_stopped(self._ending)

    def is_over_async(self) -> bool:
        """Whether no step runs, other than the caller's own."""
        return not self._others()

    def is_over(self) -> bool:
        """As `is_over_async`."""
        return not [owner for owner in self._others() if not _is_stopped(owner)]

    def cancel(self) -> None:
        """Cancel the coroutines of steps, other than the caller's own, once each."""
        for owner in set(self._others()):
            if isinstance(owner, asyncio.Task) and not owner.cancelling():
                with contextlib.suppress(RuntimeError):  # its loop is closed by now
                    owner.get_loop().call_soon_threadsafe(owner.cancel)

    def _running(self) -> list[Owner]:
        """Return the other tasks and threads that run steps, without the resting steps."""
        return self._others(*self._resting)

    def _others(self, *but: object) -> list[Owner]:
        """Return the other tasks and threads that run steps, without the steps in `but`.

        A step ends with its task or thread.
        """
        if not self._owners:
            return []
        own = _owner()
        owners = [owner for mark, owner in list(self._owners.items()) if mark not in but]
        return [owner for owner in owners if owner is not own and not _has_ended(owner)]


def _owner() -> Owner:
    """Return the running task, or else the thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    return threading.current_thread() if task is None else task


def _has_ended(owner: Owner) -> bool:
    """Whether a task or thread has ended, or can't continue as its event loop does not run."""
    if isinstance(owner, asyncio.Task):
        return owner.done() or not owner.get_loop().is_running()
    return owner.is_alive() is False


def _is_stopped(owner: Owner) -> bool:
    """Whether an owner may need the event loop that this function blocks: its tasks, any thread."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return False
    return isinstance(owner, threading.Thread) or owner.get_loop() is loop
