"""The application's side: what tasks there are, and where their jobs go."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import importlib
import json
import sys
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, Unpack, cast, overload

import psycopg

from . import _sql
from ._codec import Codec
from ._connect import AsyncConnection, AsyncPool, Connection, Source, SyncPool
from ._context import Need
from ._errors import InvalidParameter, UnknownTask, concerning
from ._execute import AnyAsyncConnection, AnyConnection, Rows, execute, execute_async
from ._groups import Group
from ._job import Job
from ._options import (
    DeferOptions,
    HasId,
    RecurringOptions,
    Settings,
    defer_parameters,
    interval_text,
    job_id,
    listed,
    to_json,
)
from ._recurring import RecurringDecorator, Schedule, array, vanished
from ._results import Waiter, wait
from ._stream import JobStream
from ._task import (
    AllTaskOptions,
    AsyncTask,
    ConnectionDecorator,
    Prepared,
    SessionDecorator,
    SyncTask,
    Task,
    TaskDecorator,
    checked,
    in_context,
    module_name,
    name_of,
)
from ._text import logger
from ._worker import Worker, WorkerOptions

if TYPE_CHECKING:
    import sqlalchemy.ext.asyncio as sa_async
    import sqlalchemy.orm as sa_orm

    from ._context import JobContext, Middleware
    from ._server import EmbeddedServer

__all__ = ["App"]

log = logger("pgdefer")

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="Task[..., Any]")


class App:
    """Tasks, and the database that their jobs are kept in.

    The database is `dsn`; without one, what libpq's environment variables say; without those, or
    with `embedded=True`, the embedded server, which is started when first needed. Behind pgbouncer
    in transaction mode give `pgbouncer=True`: no prepared statements, and workers poll, unless
    `listen_dsn` leads past it to the same database: then they hear notifications there.

    `imports` names modules that define tasks, imported before a worker starts.

    `name` tells this program's recurring runs from those of others in the same database; by
    default it is that of the module that makes the App.

    `middleware` surrounds every handler: functions that are called with the job's JobContext and
    return a context manager, entered where the handler runs (the event loop, a thread, a process)
    and with the first one outermost, outside of a `transactional` task's transaction. What one
    raises, the job fails with; where one swallows an error, the job has succeeded. RetryLater is
    none: it goes by.

    `defaults` are options that each task of the app has unless it says otherwise, as None for none:
    `{"deadline": timedelta(days=7), "retry": 4, "retain": timedelta(days=30)}`.

    `headers` is called with the task's name where a job is deferred, and returns headers for it,
    such as a trace's: those named with the job go before.

    Connections are opened when first needed, `max_connections` at once for synchronous calls and as
    many for those of each event loop: further calls wait for their turn. Four of each are kept;
    `close` and `close_async` close them. An App may be used from all threads and event loops.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        embedded: bool | EmbeddedServer = False,
        pgbouncer: bool = False,
        listen_dsn: str | None = None,
        imports: Iterable[str] = (),
        name: str | None = None,
        middleware: Iterable[Middleware] = (),
        headers: Callable[[str], Mapping[str, Any]] | None = None,
        defaults: AllTaskOptions | None = None,
        max_connections: int = 20,
    ) -> None:
        self.name = name or module_name(sys._getframe(1).f_globals["__name__"])
        self.codec = Codec()
        self.tasks: dict[str, Task[..., Any]] = {}
        self.schedules: dict[str, Schedule] = {}
        self.source = Source(dsn, embedded=embedded, pgbouncer=pgbouncer, listen_dsn=listen_dsn)
        self.imports = tuple(listed("imports", imports))
        self.middleware = tuple(listed("middleware", middleware))
        for surround in self.middleware:
            if not callable(surround):
                raise TypeError(f"middleware must be functions of a JobContext, not {surround!r}")
        if headers is not None and not callable(headers):
            raise TypeError(f"headers must be a function of a task's name, not {headers!r}")
        self.headers = headers
        if defaults is not None and not isinstance(defaults, Mapping):
            raise TypeError(f"defaults must be a dict of a task's options, not {defaults!r}")
        self.defaults: Mapping[str, Any] = dict(defaults or {})
        if max_connections < 1:
            raise ValueError(f"max_connections must be at least 1, not {max_connections}")
        self._max_connections = max_connections
        self._open_pools()
        self._waiters: dict[asyncio.AbstractEventLoop, Waiter] = {}
        self._registered: dict[str, Settings] = {}
        self._may_register = True

    # Tasks

    @overload
    def task(  # type: ignore[overload-overlap]
        self, function: Callable[P, Coroutine[Any, Any, R]], /
    ) -> AsyncTask[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> SyncTask[P, R]: ...
    @overload
    def task(
        self,
        *,
        transactional: Literal[True],
        name: str | None = None,
        **options: Unpack[AllTaskOptions],
    ) -> ConnectionDecorator: ...
    @overload
    def task(
        self,
        *,
        transactional: sa_orm.sessionmaker[Any] | sa_async.async_sessionmaker[Any],
        name: str | None = None,
        **options: Unpack[AllTaskOptions],
    ) -> SessionDecorator: ...
    @overload
    def task(
        self, *, name: str | None = None, **options: Unpack[AllTaskOptions]
    ) -> TaskDecorator: ...
    def task(  # type: ignore[misc]
        self,
        function: Callable[..., Any] | None = None,
        /,
        *,
        name: str | None = None,
        **options: Any,
    ) -> object:
        """Make a function a task, named by its module and name unless `name` is given.

        The options are registered in the database as the task's defaults, so that jobs deferred
        by SQL have them too. `lock`, `queueing_lock` and `concurrency_key` may hold `{field}`,
        filled from the arguments. Only the worker knows of `HandlingOptions`.

        With `transactional=True` the handler's first parameter, which is no argument of the job's,
        is a psycopg connection in a transaction that also ends the job: both commit or neither. A
        `sessionmaker` or `async_sessionmaker` instead of True gives a session of SQLAlchemy's. To
        return or raise RetryLater commits, too; any other exception rolls back.
        """
        decorator = TaskDecorator(self, name, {**self.defaults, **options})
        return decorator if function is None else decorator(function)

    def recurring(
        self,
        cron: str,
        *,
        timezone: str = "UTC",
        name: str | None = None,
        args: Mapping[str, Any] | None = None,
        **options: Unpack[RecurringOptions],
    ) -> RecurringDecorator:
        """Have the task deferred at each run of a cron expression in a time zone.

        Stands above `@app.task`, or in its place; several may stand on one task. Workers register
        the schedules when they start, named by the task (then `task#2` and so on, from below)
        unless `name` is given. A handler that has a parameter `scheduled_for` is given the time
        that the run is for; `current_job().scheduled_for` is it too.
        """
        return RecurringDecorator(
            self, cron=cron, timezone=timezone, name=name, args=args, options=options
        )

    def add(self, task: T) -> T:
        """Take in a task. Raises ValueError where another has its name."""
        other = self.tasks.get(task.name)
        if other is not None and name_of(other.function) != name_of(task.function):
            raise ValueError(f"there are two tasks named {task.name!r}")
        self.tasks[task.name] = task
        return task

    def get(self, name: str) -> Task[..., Any]:
        """Return a task. Raises UnknownTask."""
        try:
            return self.tasks[name]
        except KeyError:
            raise UnknownTask(
                f"the task {name!r} isn't known here",
                hint="Import the module that defines it: App(imports=[...]).",
            ) from None

    def move(
        self, dsn: str, listen_dsn: str | None = None, *, pgbouncer: bool | None = None
    ) -> None:
        """Use another database from now on; `pgbouncer` None: as before."""
        self.close()
        pgbouncer = self.source.pgbouncer if pgbouncer is None else pgbouncer
        self.source = Source(dsn, pgbouncer=pgbouncer, listen_dsn=listen_dsn)
        self._open_pools()
        self._registered.clear()

    def _open_pools(self) -> None:
        self._pool = SyncPool(self.source, most=self._max_connections)
        # One that waits for a result may wait for what another has yet to defer.
        self._hearing_pool = SyncPool(self.source.ears or self.source)
        self._async_pool = AsyncPool(self.source, most=self._max_connections)

    def import_tasks(self) -> None:
        """Import the modules of `imports`."""
        for module in self.imports:
            importlib.import_module(module)

    # Life

    def open(self) -> Self:
        """Check the connection and register the tasks; deferring does so by itself."""
        with self._connection(list(self.tasks.values())):
            pass
        return self

    def close(self) -> None:
        """Close the connections of synchronous calls."""
        self._pool.close()
        self._hearing_pool.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def open_async(self) -> Self:
        """As `open`, for asyncio."""
        async with self._connection_async(list(self.tasks.values())):
            pass
        return self

    async def close_async(self) -> None:
        """Close the connections of the running event loop, and those of synchronous calls."""
        self._async_pool.close()
        waiter = self._waiters.pop(asyncio.get_running_loop(), None)
        if waiter is not None:
            waiter.close()
        self.close()

    async def __aenter__(self) -> Self:
        return await self.open_async()

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()

    # Deferring

    def defer(
        self,
        task: str,
        args: Mapping[str, Any] | None = None,
        *,
        connection: AnyConnection | None = None,
        **options: Unpack[DeferOptions],
    ) -> Job[Any]:
        """Defer a job of a task that need not be known here; its arguments are not checked."""
        text = self.codec.dumps_args(args or {})
        settings = self._settings(task, options)
        return self.submit(task, text, defer_parameters(task, text, settings), connection)

    async def defer_async(
        self,
        task: str,
        args: Mapping[str, Any] | None = None,
        *,
        connection: AnyAsyncConnection | None = None,
        **options: Unpack[DeferOptions],
    ) -> Job[Any]:
        """As `defer`, for asyncio."""
        text = self.codec.dumps_args(args or {})
        settings = self._settings(task, options)
        return await self.submit_async(
            task, text, defer_parameters(task, text, settings), connection
        )

    def prepare(
        self, task: str, args: Mapping[str, Any] | None = None, **options: Unpack[DeferOptions]
    ) -> Prepared[Any]:
        """Return a call for `defer_many` of a task that need not be known here."""
        return Prepared(task, self.codec.dumps_args(args or {}), self._settings(task, options))

    def _settings(self, task: str, options: Mapping[str, Any]) -> Settings:
        return in_context(task, Settings.of(options), self, is_child="parent" not in options)

    def defer_many(
        self,
        calls: Iterable[Prepared[Any]],
        *,
        connection: AnyConnection | AnyAsyncConnection | None = None,
    ) -> list[Job[Any]]:
        """Defer many jobs at once, of any tasks, all or none; in the order given."""
        prepared = checked(calls)
        if not prepared:
            return []
        tasks = self._known(call.task for call in prepared)
        parameters = {"jobs": _array(prepared)}
        with self._connection(tasks, connection) as used:
            rows = execute(used, _sql.DEFER_MANY, parameters)
        return [Job(row[0], self) for row in rows]

    async def defer_many_async(
        self,
        calls: Iterable[Prepared[Any]],
        *,
        connection: AnyConnection | AnyAsyncConnection | None = None,
    ) -> list[Job[Any]]:
        """As `defer_many`, for asyncio."""
        prepared = checked(calls)
        if not prepared:
            return []
        tasks = self._known(call.task for call in prepared)
        parameters = {"jobs": _array(prepared)}
        async with self._connection_async(tasks, connection) as used:
            rows = await execute_async(used, _sql.DEFER_MANY, parameters)
        return [Job(row[0], self) for row in rows]

    def group(
        self,
        calls: Iterable[Prepared[Any]],
        *,
        connection: AnyConnection | AnyAsyncConnection | None = None,
    ) -> Group:
        """Return jobs to be deferred with one that follows: `app.group([...]).then(call)`."""
        return Group(self, calls, connection)

    def chain(
        self,
        calls: Iterable[Prepared[Any]],
        *,
        connection: AnyConnection | None = None,
    ) -> list[Job[Any]]:
        """Defer jobs of which each needs the one before it."""
        prepared = checked(calls)
        with self._connection(self._known(call.task for call in prepared), connection) as used:
            rows = execute(used, _sql.DEFER_CHAIN, {"jobs": _array(prepared)})
        return [Job(row[0], self) for row in rows]

    async def chain_async(
        self,
        calls: Iterable[Prepared[Any]],
        *,
        connection: AnyAsyncConnection | None = None,
    ) -> list[Job[Any]]:
        """As `chain`, for asyncio."""
        prepared = checked(calls)
        tasks = self._known(call.task for call in prepared)
        async with self._connection_async(tasks, connection) as used:
            rows = await execute_async(used, _sql.DEFER_CHAIN, {"jobs": _array(prepared)})
        return [Job(row[0], self) for row in rows]

    def submit_group(
        self,
        calls: Sequence[Prepared[Any]],
        then: Prepared[Any],
        connection: AnyConnection | AnyAsyncConnection | None,
    ) -> tuple[Job[Any], list[Job[Any]]]:
        """Send a group: what `Group.then` ends in."""
        tasks = self._known(call.task for call in [*calls, then])
        with self._connection(tasks, connection) as used:
            parameters = {"jobs": _array(calls), "then": then.to_json()}
            ((id, ids),) = execute(used, _sql.DEFER_GROUP, parameters)
        return Job(id, self), [Job(one, self) for one in ids]

    async def submit_group_async(
        self,
        calls: Sequence[Prepared[Any]],
        then: Prepared[Any],
        connection: AnyConnection | AnyAsyncConnection | None,
    ) -> tuple[Job[Any], list[Job[Any]]]:
        """As `submit_group`, for asyncio."""
        tasks = self._known(call.task for call in [*calls, then])
        async with self._connection_async(tasks, connection) as used:
            parameters = {"jobs": _array(calls), "then": then.to_json()}
            ((id, ids),) = await execute_async(used, _sql.DEFER_GROUP, parameters)
        return Job(id, self), [Job(one, self) for one in ids]

    def submit(
        self,
        task: str,
        args: str,
        parameters: Mapping[str, Any] | None,
        connection: AnyConnection | AnyAsyncConnection | None,
    ) -> Job[Any]:
        """Send an encoded job: what every single `defer` ends in."""
        statement = _sql.DEFER_PLAIN if parameters is None else _sql.DEFER
        with self._connection(self._known([task]), connection) as used:
            rows = execute(used, statement, parameters or {"task": task, "args": args})
        return Job(rows[0][0], self)

    async def submit_async(
        self,
        task: str,
        args: str,
        parameters: Mapping[str, Any] | None,
        connection: AnyConnection | AnyAsyncConnection | None,
    ) -> Job[Any]:
        """As `submit`, for asyncio."""
        statement = _sql.DEFER_PLAIN if parameters is None else _sql.DEFER
        async with self._connection_async(self._known([task]), connection) as used:
            rows = await execute_async(used, statement, parameters or {"task": task, "args": args})
        return Job(rows[0][0], self)

    # Jobs and queues

    def job(self, id: int | HasId) -> Job[Any]:
        """Return the job of an id, to ask about or change; the database is not asked for it yet.

        Also that of what has an id: `current_job()`, a row of `pgdefer.models`, a job of another
        App. Raises TypeError, ValueError for what can't be an id.
        """
        return Job(job_id(id), self)

    def pause(
        self,
        queue: str | None = None,
        *,
        task: str | None = None,
        until: dt.datetime | None = None,
        connection: AnyConnection | None = None,
    ) -> int:
        """Let no job of a queue (a name, prefix* or *; None: all), or of a task there, start.

        Until `resume`, or until a time. Running jobs go on. Returns how many unfinished, not
        running jobs it concerns. Raises WrongIsolation in a transaction of the caller's that is not
        READ COMMITTED. Until that ends, no worker takes in new jobs: keep it short.
        """
        ((jobs,),) = self.call(_sql.PAUSE, _pause(queue, task, until), connection)
        return int(jobs)

    async def pause_async(
        self,
        queue: str | None = None,
        *,
        task: str | None = None,
        until: dt.datetime | None = None,
        connection: AnyAsyncConnection | None = None,
    ) -> int:
        """As `pause`, for asyncio."""
        ((jobs,),) = await self.call_async(_sql.PAUSE, _pause(queue, task, until), connection)
        return int(jobs)

    def resume(
        self,
        queue: str | None = None,
        *,
        task: str | None = None,
        connection: AnyConnection | None = None,
    ) -> int:
        """End a pause: the latest call of the two that matches a queue holds.

        Without a task it ends the pauses of tasks on those queues too; with one, a pause of the
        queue stays. Returns and raises as `pause`.
        """
        ((jobs,),) = self.call(_sql.RESUME, {"queue": queue, "task": task}, connection)
        return int(jobs)

    async def resume_async(
        self,
        queue: str | None = None,
        *,
        task: str | None = None,
        connection: AnyAsyncConnection | None = None,
    ) -> int:
        """As `resume`, for asyncio."""
        ((jobs,),) = await self.call_async(_sql.RESUME, {"queue": queue, "task": task}, connection)
        return int(jobs)

    # Results

    def result(self, job: int | HasId, timeout: float | None = None) -> Any:
        """Wait until a job has succeeded, for `timeout` seconds at most, and return its result.

        Raises JobFailed, JobCancelled, TimeoutError, and JobNotFound also where the transaction
        that defers it has not committed. `Job.result` is the same.
        """
        return wait(job_id(job), timeout, self._hearing_pool, self.source, self.codec)

    async def result_async(self, job: int | HasId, timeout: float | None = None) -> Any:  # noqa: ASYNC109
        """As `result`, for asyncio."""
        loop = asyncio.get_running_loop()
        waiter = self._waiters.get(loop)
        if waiter is None:
            for other in [other for other in self._waiters if other.is_closed()]:
                del self._waiters[other]
            waiter = self._waiters[loop] = Waiter(self.source.ears or self.source)
        return await waiter.wait(job_id(job), timeout, self.codec)

    # Working

    def run_worker(
        self, queues: Sequence[str] | None = None, **options: Unpack[WorkerOptions]
    ) -> None:
        """Run a worker until SIGTERM or SIGINT: see `Worker`."""
        Worker(self, queues, **options).run()

    async def run_worker_async(
        self, queues: Sequence[str] | None = None, **options: Unpack[WorkerOptions]
    ) -> None:
        """Run a worker in this event loop, until cancelled."""
        await Worker(self, queues, **options).run_async()

    def stream_jobs(
        self, queues: Sequence[str] | None = None, **options: Unpack[WorkerOptions]
    ) -> JobStream:
        """Return the jobs of queues (None: all) for a loop of your own, whatever their tasks.

        The options are a worker's; but where no `concurrency` is given there is one job at a time.

            with app.stream_jobs(["mail"]) as jobs:
                for job in jobs:
                    with job:
                        send(job.args["to"])
        """
        return JobStream(self, queues, **options)

    def needs(self, job: int | HasId) -> list[Need]:
        """Return what a job needs, as it stands now, by id. Raises JobNotFound.

        DecodeError where a result can't be read.
        """
        rows = self.call(_sql.NEEDS, {"id": job_id(job)})
        decode = self.codec.decode
        return [Need(id, task, state, decode(found), why) for id, task, state, found, why in rows]

    async def needs_async(self, job: int | HasId) -> list[Need]:
        """As `needs`, for asyncio."""
        rows = await self.call_async(_sql.NEEDS, {"id": job_id(job)})
        decode = self.codec.decode_async
        return [
            Need(id, task, state, await decode(found), why) for id, task, state, found, why in rows
        ]

    def extend(self, job: JobContext, lease: dt.timedelta) -> dt.datetime:
        """Give a running job a lease of its own: `current_job().extend(lease)`."""
        end: dt.datetime = self.call(_sql.EXTEND, _lease(job, lease))[0][0]
        return end

    async def extend_async(self, job: JobContext, lease: dt.timedelta) -> dt.datetime:
        """As `extend`, for asyncio."""
        end: dt.datetime = (await self.call_async(_sql.EXTEND, _lease(job, lease)))[0][0]
        return end

    # Connections, on which the tasks are registered

    def call(
        self,
        statement: _sql.Statement,
        parameters: Mapping[str, Any],
        connection: AnyConnection | None = None,
    ) -> Rows:
        """Run a statement that asks nothing of the tasks, in the caller's transaction if given."""
        with self._connection([], connection) as used:
            return execute(used, statement, parameters)

    async def call_async(
        self,
        statement: _sql.Statement,
        parameters: Mapping[str, Any],
        connection: AnyAsyncConnection | None = None,
    ) -> Rows:
        """As `call`, for asyncio."""
        async with self._connection_async([], connection) as used:
            return await execute_async(used, statement, parameters)

    def _known(self, names: Iterable[str]) -> list[Task[..., Any]]:
        """Return those tasks of this app that have yet to be registered."""
        if not self._may_register:
            return []
        return [
            task
            for name in dict.fromkeys(names)
            if (task := self.tasks.get(name)) is not None
            and self._registered.get(name) is not task.settings
        ]

    @contextlib.contextmanager
    def _connection(
        self,
        tasks: list[Task[..., Any]],
        given: AnyConnection | AnyAsyncConnection | None = None,
    ) -> Iterator[AnyConnection]:
        if given is None:
            with self._pool.connection() as own:
                if tasks:
                    self.register(own)
                yield own
            return
        used = cast("AnyConnection", given)
        if tasks and self.source.is_chosen:
            with self._pool.connection() as own:
                self.register(own)
        elif tasks:
            # Only the caller's connection is known. What is registered in its transaction may be
            # rolled back with it, so nothing is remembered.
            execute(used, _sql.REGISTER_TASKS, {"tasks": _defaults(tasks)})
        yield used

    @contextlib.asynccontextmanager
    async def _connection_async(
        self,
        tasks: list[Task[..., Any]],
        given: AnyConnection | AnyAsyncConnection | None = None,
    ) -> AsyncIterator[AnyAsyncConnection]:
        if given is None:
            async with self._async_pool.connection() as own:
                if tasks:
                    await self.register_async(own)
                yield own
            return
        used = cast("AnyAsyncConnection", given)
        if tasks and self.source.is_chosen:
            async with self._async_pool.connection() as own:
                await self.register_async(own)
        elif tasks:
            await execute_async(used, _sql.REGISTER_TASKS, {"tasks": _defaults(tasks)})
        yield used

    def register(self, connection: Connection) -> None:
        """Register all tasks' defaults; the same again change nothing in the database."""
        tasks = list(self.tasks.values())
        try:
            execute(connection, _sql.REGISTER_TASKS, {"tasks": _defaults(tasks)})
        except psycopg.errors.InsufficientPrivilege:
            self._not_registered()
        except InvalidParameter:
            with connection.transaction(force_rollback=True):
                for task in tasks:
                    with concerning("the task", task.name):
                        execute(connection, _sql.REGISTER_TASKS, {"tasks": _defaults([task])})
            raise
        self._registered.update((task.name, task.settings) for task in tasks)

    async def register_async(self, connection: AsyncConnection) -> None:
        """As `register`, for asyncio."""
        tasks = list(self.tasks.values())
        try:
            await execute_async(connection, _sql.REGISTER_TASKS, {"tasks": _defaults(tasks)})
        except psycopg.errors.InsufficientPrivilege:
            self._not_registered()
        except InvalidParameter:
            async with connection.transaction(force_rollback=True):
                for task in tasks:
                    with concerning("the task", task.name):
                        given = {"tasks": _defaults([task])}
                        await execute_async(connection, _sql.REGISTER_TASKS, given)
            raise
        self._registered.update((task.name, task.settings) for task in tasks)

    async def schedule_async(
        self, connection: AsyncConnection, *, prune: bool = False
    ) -> list[str]:
        """Register the recurring runs; return the names of those that the code no longer has.

        With `prune` these are removed.
        """
        try:
            if self.schedules:
                await self._schedule_all(connection)
            rows = await execute_async(connection, _sql.SCHEDULES_OF, {"source": self.name})
            lost = vanished((row[0] for row in rows), self.schedules)
            for name in lost if prune else ():
                await execute_async(connection, _sql.UNSCHEDULE, {"name": name})
        except psycopg.errors.InsufficientPrivilege:
            if self.schedules or prune:
                log.warning("this role may not register recurring runs")
            return []
        for name in lost:
            if prune:
                log.info("the schedule %r was removed, as the code no longer has it", name)
            else:
                log.warning(
                    "the schedule %r goes on though the code no longer has it: "
                    "--prune-schedules or queue.unschedule removes it",
                    name,
                )
        return lost

    async def _schedule_all(self, connection: AsyncConnection) -> None:
        schedules = list(self.schedules.values())
        try:
            given = {"schedules": array(schedules, self.name)}
            await execute_async(connection, _sql.SCHEDULE, given)
        except InvalidParameter:
            async with connection.transaction(force_rollback=True):
                for schedule in schedules:
                    with concerning("the schedule", schedule.name):
                        given = {"schedules": array([schedule], self.name)}
                        await execute_async(connection, _sql.SCHEDULE, given)
            raise

    def _not_registered(self) -> None:
        self._may_register = False
        log.info("this role may not register tasks: jobs get the defaults that workers register")


def _defaults(tasks: Iterable[Task[..., Any]]) -> str:
    # Sorted, so that two processes that register the same tasks meet in the same order.
    defaults = {task.name: task.settings.defaults() for task in tasks}
    return json.dumps([{"name": name, "defaults": defaults[name]} for name in sorted(defaults)])


def _pause(queue: str | None, task: str | None, until: dt.datetime | None) -> dict[str, Any]:
    return {"queue": queue, "task": task, "until": to_json("until", until)}


def _lease(job: JobContext, lease: dt.timedelta) -> dict[str, Any]:
    return {"id": job.id, "claim": job.claim, "lease": interval_text(lease)}


def _array(calls: Iterable[Prepared[Any]]) -> str:
    return f"[{','.join(call.to_json() for call in calls)}]"
