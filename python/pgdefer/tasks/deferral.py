"""One call that defers, and the App's middleware around it.

Tests: integration/test_middleware.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from pgdefer.client.client import Client
from pgdefer.errors import Naming
from pgdefer.tasks.job import Job
from pgdefer.tasks.prepared_job import PreparedJob

__all__ = ["DeferMiddleware", "Deferral", "deferring"]


@dataclasses.dataclass(frozen=True)
class Deferral:
    """One call that defers: the calls, and afterwards the jobs."""

    calls: Sequence[PreparedJob[Any]]
    jobs: list[Job[Any]] = dataclasses.field(default_factory=list)


DeferMiddleware: TypeAlias = Callable[[Deferral], AbstractContextManager[Any]]


def deferring(
    client: Client, calls: Sequence[PreparedJob[Any]]
) -> AbstractContextManager[Deferral | None]:
    """Enter the App's middleware around a call that defers; errors name the tasks."""
    return _deferring(client, calls) if client.defer_middleware else _naming(calls)


@contextlib.contextmanager
def _deferring(client: Client, calls: Sequence[PreparedJob[Any]]) -> Iterator[Deferral]:
    deferral = Deferral(tuple(calls))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_naming(calls))
        for call in calls:
            _ = call.options  # outside of the middleware, as telemetry makes spans for both
        for surround in client.defer_middleware:
            stack.enter_context(surround(deferral))
        yield deferral
        return
    raise RuntimeError("a defer_middleware has swallowed the call's error: there is no job")


def _naming(calls: Sequence[PreparedJob[Any]]) -> Naming:
    if len(calls) == 1:
        return Naming(f"a job of {calls[0].task!r}")
    tasks = list(dict.fromkeys(call.task for call in calls))
    return Naming(f"jobs of {', '.join(map(repr, tasks[:3]))}{', ...' if tasks[3:] else ''}")
