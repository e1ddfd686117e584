"""The events of workers that call functions of the application: `@app.on("exhausted")`.

Tests: integration/test_announcer.py.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, Literal, get_args

from pgdefer.tasks.context import JobContext

__all__ = ["Event", "JobEvent", "check_event", "check_hook"]

Event = Literal["exhausted", "retry", "crash", "worker_start", "worker_stop"]
EVENTS: tuple[str, ...] = get_args(Event)


@dataclasses.dataclass(frozen=True)
class JobEvent:
    """How an unsuccessful claim ended, as the database has recorded it.

    `outcome` is the attempt's (`failed`, `timed_out`, `crashed`), `state` the job's state
    afterwards, `error` the error's text, and `duration` how long the handler ran, in seconds. If it
    ran in another process, `exception` is None.
    """

    job: JobContext
    outcome: str
    state: str
    error: str
    exception: BaseException | None
    duration: float


def check_event(event: str) -> None:
    """Raise ValueError for anything but an event, such as the function below a bare `@app.on`."""
    if event not in EVENTS:
        raise ValueError(f"there is no event {event!r}: events are {', '.join(EVENTS)}")


def check_hook(event: str, hook: Callable[[Any], Any]) -> None:
    """Raise TypeError for a hook that can't be called with one argument."""
    if not callable(hook):
        raise TypeError(f"a hook must be a function, not {hook!r}")
    given = "the Worker" if event.startswith("worker") else "a JobEvent"
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # of some builtins there is none
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(f"the hook {hook!r} is called with {given}: {error}") from None
