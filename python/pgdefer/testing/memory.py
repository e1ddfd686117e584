"""A queue for tests without a database: it records what the code defers.

Tests: integration/test_memory_queue.py.
"""

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn, Self

from pgdefer.app import App
from pgdefer.database import sql
from pgdefer.database.callers import OWN, CallersConnection, Rows
from pgdefer.database.sql import Statement
from pgdefer.options import JobOptions
from pgdefer.testing.assertions import Assertions, checked_app
from pgdefer.testing.jobs import RecordedJob
from pgdefer.testing.queue import TestQueue
from pgdefer.testing.standing_in import StandingIn

__all__ = ["MemoryQueue"]


class MemoryQueue(StandingIn, Assertions[RecordedJob]):
    """Records the jobs that the App defers, for a test that has no database.

    It raises the errors that the bindings raise before they call the database: for wrong arguments,
    wrong options, and values that can't be stored. It has none of the database's rules, so it runs
    no job, and every call that does not defer raises RuntimeError.
    """

    no_worker = "a MemoryQueue only records what is deferred: use a TestQueue, which has a database"

    def __init__(self, app: App) -> None:
        self.app = checked_app(app)
        self._jobs: list[RecordedJob] = []
        self._ids = itertools.count(1)

    def __enter__(self) -> Self:
        self.app.import_tasks()
        self._stand_in_for(self.app.client)
        return self

    def __exit__(self, *_: object) -> None:
        self._leave(self.app.client)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            said = f"{type(self).__name__!r} object has no attribute {name!r}"
            if hasattr(TestQueue, name):  # run, for example
                said = f"{said}: {self.no_worker}"
            raise AttributeError(said, name=name, obj=self)

    async def _deferred_jobs(self) -> list[RecordedJob]:
        """Return the jobs deferred in this test."""
        return list(self._jobs)

    # The calls of the App

    def call(
        self,
        statement: Statement,
        parameters: Mapping[str, Any],
        connection: CallersConnection = OWN,
        defaults: Mapping[str, JobOptions] | None = None,
    ) -> Rows:
        """Record the jobs of a call that defers; `connection` may be anything."""
        del connection, defaults
        match statement:
            case sql.DEFER | sql.DEFER_WITHOUT_OPTIONS:
                return [(self._record(parameters),)]
            case sql.DEFER_WITH_TIME:
                return [(self._record(parameters), dt.datetime.now(dt.UTC))]
            case sql.DEFER_MANY | sql.DEFER_CHAIN:
                return [(id,) for id in self._record_all(parameters["jobs"])]
            case sql.DEFER_GROUP:
                ids = self._record_all(parameters["jobs"])
                (last,) = self._record_all(f"[{parameters['then']}]")
                return [(last, ids)]
        raise RuntimeError(self.no_worker)

    async def call_async(
        self,
        statement: Statement,
        parameters: Mapping[str, Any],
        connection: CallersConnection = OWN,
        defaults: Mapping[str, JobOptions] | None = None,
    ) -> Rows:
        """Record the jobs of a call that defers."""
        return self.call(statement, parameters, connection, defaults)

    def transaction(self) -> NoReturn:
        """Refuse."""
        raise RuntimeError(self.no_worker)

    def transaction_async(self) -> NoReturn:
        """Refuse."""
        raise RuntimeError(self.no_worker)

    def result(self, _: int) -> NoReturn:
        """Refuse."""
        raise RuntimeError(self.no_worker)

    async def result_async(self, _: int) -> NoReturn:
        """Refuse."""
        raise RuntimeError(self.no_worker)

    def _record_all(self, jobs: str) -> list[int]:
        return [
            self._record({**job, "args": json.dumps(job.get("args", {}))})
            for job in json.loads(jobs)
        ]

    def _record(self, parameters: Mapping[str, Any]) -> int:
        """Record a job, given in the form of sql.DEFER, with `options` as text or as an object."""
        given = {name: value for name, value in parameters.items() if value is not None}
        task, args, more = given.pop("task"), given.pop("args"), given.pop("options", {})
        known = self.app.client.defaults.get(task)
        options = {
            **(known.defaults() if known else {}),
            **given,
            **(json.loads(more) if isinstance(more, str) else more),
        }
        job = RecordedJob(
            id=next(self._ids),
            task=task,
            args=self.app.client.codec.loads(args),
            queue=options.pop("queue", "default"),
            priority=options.pop("priority", 0),
            options=options,
        )
        self._jobs.append(job)
        return job.id
