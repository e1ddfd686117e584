"""The queue inside one test's transaction.

Tests: integration/test_testing.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import psycopg

from pgdefer.app import App
from pgdefer.client.base import tasks_json
from pgdefer.database import sql
from pgdefer.database.callers import OWN, CallersConnection, Rows, is_django
from pgdefer.database.execute import execute
from pgdefer.database.execute_async import execute_async
from pgdefer.database.source import AsyncPsycopgConnection, PsycopgConnection
from pgdefer.database.sql import Statement
from pgdefer.errors import JobCancelled, JobFailed
from pgdefer.options import JobOptions, as_list
from pgdefer.tasks.batch import BatchJob
from pgdefer.tasks.context import JobContext, running_job
from pgdefer.testing.base import TestQueueBase
from pgdefer.testing.connections import (
    AsyncOverSync,
    at_once,
    awaited_driver_of,
    check_in_transaction,
    driver_of,
    is_asynchronous,
    savepoint,
    unwrapped,
)
from pgdefer.testing.jobs import RanJob
from pgdefer.testing.perform import Ended, TestsOwn, claimed, normal, perform, perform_batch
from pgdefer.testing.standing_in import StandingIn
from pgdefer.testing.statements import CHANGES, DEFERS, READS, CallsApart
from pgdefer.testing.threads import ThreadLock, threads_for
from pgdefer.worker.ending import nearest, refused

__all__ = ["TestQueue"]

T = TypeVar("T")

_WORKER = {
    "name": "test",
    "queues": None,
    "info": json.dumps({"test": True, "dead_after": "1 day"}),
}


class TestQueue(StandingIn, TestQueueBase):
    """The queue as one test sees it: all calls of the App use the test's own connection.

    `connection` is Django's, a psycopg connection, or a SQLAlchemy connection or session, in the
    transaction that the test rolls back. With an asynchronous connection, use `async with`, and
    await the methods named ..._async; a synchronous one serves both kinds of tests. Calls of
    several coroutines take turns, but `run_async` must run alone.

    No worker runs. `run` runs the jobs that are due, at once, in the order in which a worker would
    claim them; the database makes all decisions. Timeouts are not enforced. Changes that a handler
    makes through other connections are not rolled back.
    """

    __test__ = False  # pytest need not collect it
    no_worker = (
        "a TestQueue runs the jobs of its test without a worker: call its run(), or use a "
        "CommittedTestQueue, whose run() has one"
    )

    def __init__(self, app: App, connection: CallersConnection, *, immediate: bool = False) -> None:
        super().__init__(app)
        self._threads = threads_for(connection)
        self.connection = _without_django(connection)
        self._is_asynchronous = is_asynchronous(self.connection)
        # Savepoints end in the reverse order of their beginnings, so calls take turns.
        self._turn: contextlib.AbstractAsyncContextManager[Any] = (
            asyncio.Lock() if self._is_asynchronous else ThreadLock()
        )
        self._is_immediate = immediate
        self._registered: dict[str, JobOptions] = {}
        self._worker: int | None = None
        self._is_running = False
        self._apart = CallsApart()

    def __enter__(self) -> Self:
        self._at_once(self.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self._leave(self.app.client)

    async def __aenter__(self) -> Self:
        self.app.import_tasks()
        rows = await self._execute(self._direct(), sql.LAST_ID, {})
        check_in_transaction(self.connection)
        self._after = rows[0][0]
        self._stand_in_for(self.app.client)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._leave(self.app.client)

    def _at_once(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine that waits for nothing, and return its value."""
        if self._is_asynchronous:
            coroutine.close()
            raise RuntimeError(
                "the test's connection is asynchronous: await the method named ..._async"
            )
        return at_once(coroutine)

    # The calls of the App

    def call(
        self,
        statement: Statement,
        parameters: Mapping[str, Any],
        connection: CallersConnection = OWN,
        defaults: Mapping[str, JobOptions] | None = None,
    ) -> Rows:
        """Run a statement on the test's connection, or on the caller's."""
        if connection is OWN and statement in CHANGES:
            self._at_once(self._rehearse())
        rows = self._at_once(self._call(statement, parameters, connection, defaults))
        if self._runs_after(statement):
            self.run()
        return rows

    async def call_async(
        self,
        statement: Statement,
        parameters: Mapping[str, Any],
        connection: CallersConnection = OWN,
        defaults: Mapping[str, JobOptions] | None = None,
    ) -> Rows:
        """Run a statement on the test's connection, or on the caller's."""
        if connection is OWN and statement in CHANGES:
            await self._rehearse()
        rows = await self._call(statement, parameters, connection, defaults)
        if self._runs_after(statement):
            await self.run_async()
        return rows

    async def _call(
        self,
        statement: Statement,
        parameters: Mapping[str, Any],
        connection: CallersConnection = OWN,
        defaults: Mapping[str, JobOptions] | None = None,
    ) -> Rows:
        async with contextlib.AsyncExitStack() as stack:
            if connection is OWN:
                await stack.enter_async_context(self._turn)
            new = {
                name: options
                for name, options in (defaults or {}).items()
                if self._registered.get(name) is not options
            }
            used = self._direct() if connection is OWN else unwrapped(connection)
            if connection is OWN and statement not in READS:
                # A refused statement must not end the test's transaction.
                await stack.enter_async_context(savepoint(used))
            if new:
                await self._execute(used, sql.REGISTER_TASKS, {"tasks": tasks_json(new)})
            rows = await self._execute(used, statement, parameters)
            self._registered.update(new)
            if connection is OWN:
                self._apart.note(statement, parameters)
        return rows

    def _direct(self) -> CallersConnection:
        """Return psycopg's connection behind the test's: SQLAlchemy's takes twice as long."""
        driver = driver_of(self.connection)
        return driver if isinstance(driver, psycopg.Connection) else self.connection

    async def _execute(
        self, connection: CallersConnection, statement: Statement, parameters: Mapping[str, Any]
    ) -> Rows:
        if is_asynchronous(connection):
            return await execute_async(connection, statement, parameters)  # type: ignore[arg-type]
        return execute(connection, statement, parameters)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def transaction(self) -> Iterator[PsycopgConnection]:
        """Begin a nested transaction on the test's connection, for that of a step."""
        self._apart.has_transaction = True
        driver = driver_of(self.connection)
        if not isinstance(driver, psycopg.Connection):
            raise self._unfit(driver)
        with self._threads.restoring(), driver.transaction():
            yield driver

    @contextlib.asynccontextmanager
    async def transaction_async(self) -> AsyncIterator[AsyncPsycopgConnection]:
        """Begin a nested transaction on the test's connection, in the form that coroutines need."""
        self._apart.has_transaction = True
        driver = await awaited_driver_of(self.connection)
        if not isinstance(driver, psycopg.Connection | psycopg.AsyncConnection):
            raise self._unfit(driver)
        given: Any = AsyncOverSync(driver) if isinstance(driver, psycopg.Connection) else driver
        with self._threads.restoring():
            async with savepoint(driver):
                yield given

    def _unfit(self, driver: object) -> TypeError:
        return TypeError(
            "a step's transaction can't use the test's connection, "
            f"a {type(driver or self.connection).__qualname__}: use a CommittedTestQueue"
        )

    def result(self, id: int) -> Any:
        """Return the result of a job that has run. Raises JobFailed, JobCancelled, TimeoutError."""
        return self._at_once(self.result_async(id))

    async def result_async(self, id: int) -> Any:
        """Return the result of a job that has run. Raises JobFailed, JobCancelled, TimeoutError."""
        ((state, result, error),) = await self._call(sql.RESULT_TEXT, {"id": id})
        match state:
            case "succeeded":
                if result is None:
                    return None
                codec = self.app.codec
                return await self._threads.decode(codec, [result], codec.loads, result)
            case "failed":
                raise JobFailed(id, error)
            case "cancelled":
                raise JobCancelled(id, error)
        why = "no worker runs in a test, call run() first"
        if state != "ready":
            ((why,),) = await self._call(sql.WHY, {"id": id})
        raise TimeoutError(f"job {id} is {state}: {why}")

    # Running

    @contextlib.contextmanager
    def immediate(self) -> Iterator[None]:
        """Run the jobs that the block defers, each before `defer` returns."""
        before, self._is_immediate = self._is_immediate, True
        try:
            yield
        finally:
            self._is_immediate = before

    def _runs_after(self, statement: Statement) -> bool:
        return self._is_immediate and not self._is_running and statement in DEFERS

    def run(
        self,
        queues: list[str] | None = None,
        *,
        max_jobs: int = 1000,
        raise_errors: bool = True,
    ) -> list[RanJob]:
        """Run the jobs that are due, and the jobs that they defer, until none is left.

        Returns a `RanJob` for each run. If a job fails for good, raises its error; with
        `raise_errors=False`, the returned run has the error instead. A job that will be retried
        waits for its time: use `travel`. Raises AssertionError if jobs may be left after
        `max_jobs`.
        """
        return self._at_once(self._run(queues, max_jobs, raise_errors=raise_errors, waits=False))

    async def run_async(
        self,
        queues: list[str] | None = None,
        *,
        max_jobs: int = 1000,
        raise_errors: bool = True,
    ) -> list[RanJob]:
        """Run due jobs, as `run`: coroutines in the running event loop, functions in threads."""
        return await self._run(queues, max_jobs, raise_errors=raise_errors, waits=True)

    async def _run(
        self, queues: list[str] | None, max_jobs: int, *, raise_errors: bool, waits: bool
    ) -> list[RanJob]:
        queues = None if queues is None else as_list("queues", queues)
        if self._is_running:
            raise RuntimeError(f"{running_job()!r} can't run other jobs: the test runs them")
        ran: list[RanJob] = []
        self._is_running = True
        self._worker = None  # the last one may have been rolled back with a savepoint
        try:
            while some := await self._run_some(queues, waits=waits):
                ran += some
                for one in some if raise_errors else ():
                    if one.state == "failed" and one.error is not None:
                        raise one.error
                if len(ran) >= max_jobs:
                    raise AssertionError(
                        f"{max_jobs} jobs have run, and there may be more: does {ran[-1].task} "
                        "defer itself? If not, pass run(max_jobs=...)"
                    )
        finally:
            self._is_running = False
        return ran

    async def _rehearse(self) -> None:
        await self._call(sql.REHEARSE, {})

    async def _run_some(self, queues: list[str] | None, *, waits: bool) -> list[RanJob]:
        """Run the next job, or those of the next batch; return how they ended."""
        rows = await self._fetch(queues, 1, None)
        if not rows:
            return []
        job = claimed(self.app.client, rows[0])
        task = self.app.get(job.task)
        jobs: Sequence[JobContext] = [job]
        if task.execution.batch is None:
            test = TestsOwn(self.connection, self._threads, self._apart)
            ends = [await perform(job, task, test, waits=waits)]
        else:
            if task.execution.batch > 1:
                names = json.dumps({"tasks": [task.name, *task.aliases]})
                rows = [*rows, *await self._fetch(queues, task.execution.batch - 1, names)]
            jobs = batch = [BatchJob[Any](self.app.client, normal(row)) for row in rows]
            ends = await perform_batch(batch, task, self.connection, self._threads, waits=waits)
        ran = []
        for one, ended in zip(jobs, ends, strict=True):
            state, error = await self._finish(one, ended)
            ran.append(RanJob(one.id, one.task, one.attempt, state, ended.result, error))
        return ran

    async def _fetch(self, queues: list[str] | None, max_jobs: int, options: str | None) -> Rows:
        used = self._direct()
        worker = self._worker
        async with self._turn, savepoint(used):
            if worker is None:
                ((worker,),) = await self._execute(used, sql.REGISTER_WORKER, _WORKER)
            await self._execute(used, sql.REHEARSE, {})
            asked = {"worker": worker, "queues": queues, "max_jobs": max_jobs, "options": options}
            rows = await self._execute(used, sql.FETCH, asked)
            if rows:  # The handler may ask for the states of jobs.
                await self._execute(used, sql.REHEARSE, {})
        self._worker = worker
        return rows

    async def _finish(self, job: JobContext, ended: Ended) -> tuple[str, BaseException | None]:
        """Report how a handler ended; return the job's state, and its error."""
        if ended.outcome is None:
            await self._rehearse()  # a job that waits is settled by the next admission
            ((state,),) = await self._call(sql.STATE, {"id": job.id})
            return str(state), ended.error
        state, code = await self._send(job, ended.outcome)
        if code is None or code == "QJ002":
            return str(state or code), ended.error
        state, code = await self._send(job, refused(job, ended.outcome, code))
        return str(state or code), job._error

    async def _send(self, job: JobContext, outcome: str) -> tuple[str | None, str | None]:
        """Send an outcome, or the closest one that the database can store, as a worker does."""
        errors: list[Exception] = []
        for text in nearest(job, outcome, "UTF8"):
            try:
                rows = await self._call(sql.FINISH_MANY, {"outcomes": f"[{text}]"})
            except Exception as error:
                errors.append(error)
            else:
                ((_, _, state, code),) = rows
                return state, code
        raise errors[0]


def _without_django(connection: Any) -> CallersConnection:
    """Return psycopg's connection behind Django's, and any other connection as it is."""
    if not is_django(connection):
        given: CallersConnection = connection
        return given
    if connection.connection is None:
        connection.ensure_connection()
    driver: CallersConnection = connection.connection
    return driver
