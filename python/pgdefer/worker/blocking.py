"""Tells which job's coroutine blocks the worker's event loop. Called in other threads.

Tests: integration/test_blocking.py, integration/test_worker_stops.py.
"""

from __future__ import annotations

import asyncio
import sys
import types
from collections.abc import Iterable

from pgdefer._text import logger
from pgdefer.worker.claim import Claim

__all__ = ["warn_at_stop", "warn_of_silence"]

log = logger("pgdefer.worker")


def warn_at_stop(loop: asyncio.AbstractEventLoop, running: Iterable[Claim]) -> None:
    """Say that a job keeps the loop from hearing of a signal."""
    if (claim := _blocking(loop, running)) is not None:
        said = "%r blocks the event loop: until it goes on, only a kill ends the worker"
        log.warning(said, claim, extra=claim.job._log_fields())


def warn_of_silence(
    loop: asyncio.AbstractEventLoop, thread: int, running: Iterable[Claim], seconds: float
) -> None:
    """Say that a job has blocked the loop, which runs in `thread`, for so many seconds."""
    if (claim := _blocking(loop, running)) is not None:
        said = (
            "%r has blocked the event loop for %.0f s, at %s: the worker's other jobs stand still. "
            "Make its handler an ordinary function, or await what it waits for"
        )
        place = _place(thread, claim)
        log.warning(said, claim, seconds, place, extra=claim.job._log_fields())


def _blocking(loop: asyncio.AbstractEventLoop, running: Iterable[Claim]) -> Claim | None:
    """Return the claim whose coroutine runs in the loop."""
    current = asyncio.current_task(loop)
    for claim in list(running):
        if claim.coroutine is not None and claim.coroutine is current:
            return claim
    return None


def _place(thread: int, claim: Claim) -> str:
    """Return the file and line in which a thread is: that of the handler's module, if one is."""
    module = None if claim.task is None else sys.modules.get(claim.task.module)
    file = getattr(module, "__file__", None)
    innermost = sys._current_frames().get(thread)
    if innermost is None:
        return "an unknown place"
    frame: types.FrameType | None = innermost
    while frame is not None and frame.f_code.co_filename != file:
        frame = frame.f_back
    found = frame or innermost
    return f"{found.f_code.co_filename}:{found.f_lineno}"
