"""The application: its tasks, and the database of their jobs.

Tests: integration/test_defer.py, unit/test_misuse.py.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, Unpack, overload

from pgdefer._text import logger
from pgdefer.app_deferring import Deferring
from pgdefer.app_deferring_async import AsyncDeferring
from pgdefer.app_managing import Managing
from pgdefer.app_managing_async import AsyncManaging
from pgdefer.checks import check_number, check_text
from pgdefer.client.client import Client
from pgdefer.codec import Codec
from pgdefer.database.callers import OWN, AnyPool, CallersConnection
from pgdefer.database.pool_source import PoolSource, pools_of
from pgdefer.database.source import Source
from pgdefer.errors import describe
from pgdefer.options import DeferOptions, HasId, job_id
from pgdefer.tasks.blueprint import Blueprint
from pgdefer.tasks.context import Middleware
from pgdefer.tasks.deferral import DeferMiddleware
from pgdefer.tasks.defining import Defining
from pgdefer.tasks.group import Group
from pgdefer.tasks.hooks import JobEvent, check_event, check_hook
from pgdefer.tasks.job import Job
from pgdefer.tasks.middleware import check_middleware
from pgdefer.tasks.option_checks import check_options
from pgdefer.tasks.prepared import prepare
from pgdefer.tasks.prepared_job import PreparedJob
from pgdefer.tasks.registry import module_name
from pgdefer.tasks.task import AllTaskOptions

# Producers need no worker, nor what it imports.
if TYPE_CHECKING:
    from pgdefer.database.embedded import EmbeddedServer
    from pgdefer.worker.many_databases import MultiWorker
    from pgdefer.worker.options import WorkerOptions
    from pgdefer.worker.stream import JobStream
    from pgdefer.worker.worker import Worker

__all__ = ["App"]

log = logger("pgdefer.worker")

P = ParamSpec("P")
R = TypeVar("R")
JobHook = TypeVar("JobHook", bound=Callable[[JobEvent], Any])
WorkerHook = TypeVar("WorkerHook", bound="Callable[[Worker], Any]")


class App(Defining, Deferring, AsyncDeferring, Managing, AsyncManaging):
    """Tasks, and the database of their jobs.

    `dsn` names the database. If it is left out, the environment variable PGDEFER_DSN names it, or
    else the variables of libpq, such as `PGHOST`. If none of them is set, or with `embedded=True`,
    the App uses the embedded server, and starts it when it is first needed. With `embedded=False`
    the App never uses that server: if production lacks the variables, libpq connects to its default
    address, and the call fails unless a server runs there.

    Behind pgbouncer in transaction mode, pass `pgbouncer=True`. The App then uses no prepared
    statements, and workers poll. With `listen_dsn`, which leads to the same database directly,
    workers listen there and need not poll.

    `imports` names modules that define tasks; a worker imports them before it starts.

    `name` distinguishes this program's schedules from those of others in the same database; by
    default it is the name of the module that makes the App.

    `middleware` surrounds every handler. Each function takes the job's JobContext and returns a
    context manager, which is entered where the handler runs (the event loop, a thread, a process).
    The first one is outermost. All of them are outside a `transactional` task's transaction. If
    middleware raises, the job fails with that exception; if it swallows an error, the job succeeds.
    Middleware does not see RetryLater, which is not an error. Around coroutines, the context
    manager may be asynchronous. After the handler, `job.result` is its return value.
    `defer_middleware` surrounds each call that defers: functions that take a `Deferral` and return
    a context manager.

    `defaults` are options for all tasks of the app; a task's own options override them, and None
    removes a default: `{"deadline": timedelta(days=7), "retry": 4, "retain": timedelta(days=30)}`.

    `headers` is called with the task's name when a job is deferred, and returns headers for it,
    such as those of a trace. Headers passed with the call override them.

    The App opens connections when it needs them: at most `max_connections` for synchronous calls,
    and as many for each event loop; further calls wait for a free one. Each open block of
    `job.transaction` uses one more, and so does each thread that waits in `result`. The App keeps
    four idle connections for synchronous calls, four for each event loop, and four for such waits.
    Of all other idle connections, a process keeps at most 20, for one to two seconds. `close` and
    `close_async` close the idle ones. All threads and event loops may share an App.

    `connection` is the application's own pool of psycopg_pool, which the application opens and
    closes. Each call borrows a connection from it. Synchronous calls need a `ConnectionPool`,
    asynchronous ones an `AsyncConnectionPool`; a tuple may hold one of each. Workers, and waits for
    results, open connections of their own, by default to the pool's database.
    """

    def __init__(
        self,
        dsn: str | None = None,
        *,
        embedded: bool | EmbeddedServer | None = None,
        pgbouncer: bool = False,
        listen_dsn: str | None = None,
        imports: Iterable[str] = (),
        name: str | None = None,
        middleware: Iterable[Middleware] = (),
        defer_middleware: Iterable[DeferMiddleware] = (),
        headers: Callable[[str], Mapping[str, Any]] | None = None,
        defaults: AllTaskOptions | None = None,
        max_connections: int = 20,
        connection: AnyPool | tuple[AnyPool, AnyPool] = OWN,
    ) -> None:
        surrounding = check_middleware("middleware", middleware)
        deferring = check_middleware("defer_middleware", defer_middleware, "a Deferral")
        if headers is not None and not callable(headers):
            raise TypeError(f"headers must be a function of a task's name, not {headers!r}")
        if defaults is not None and not isinstance(defaults, Mapping):
            raise TypeError(f"defaults must be a dict of a task's options, not {defaults!r}")
        check_options("App(defaults=...)", defaults or {}, AllTaskOptions)
        check_number("max_connections", max_connections, int, at_least=1)
        if name:
            check_text("name", name, "shop")
        pools = () if connection is OWN else pools_of(connection)
        source = (
            PoolSource(pools[0], pgbouncer=pgbouncer, listen_dsn=listen_dsn)
            if pools and dsn is None and not embedded
            else Source(dsn, embedded=embedded, pgbouncer=pgbouncer, listen_dsn=listen_dsn)
        )
        client = Client(
            source,
            headers=headers,
            middleware=surrounding,
            defer_middleware=deferring,
            max_connections=max_connections,
            pools=pools,
        )
        module = sys._getframe(1).f_globals["__name__"]
        super().__init__(client, name or module_name(module), imports)
        if module == "__main__":
            self.import_hint += (
                " Give the App a module of its own: one that imports the main program makes a "
                "second App, which gets its tasks."
            )
        self.defaults: Mapping[str, Any] = dict(defaults or {})

    @property
    def codec(self) -> Codec:
        """The codec of values; `app.codec.register` adds types."""
        return self.client.codec

    @property
    def source(self) -> Source:
        """The address of the database."""
        return self.client.source

    def move(
        self, dsn: str, listen_dsn: str | None = None, *, pgbouncer: bool | None = None
    ) -> None:
        """Switch to another database. `pgbouncer=None` keeps the present setting."""
        self.client.move(dsn, listen_dsn, pgbouncer=pgbouncer)

    def bind(
        self, dsn: str, listen_dsn: str | None = None, *, pgbouncer: bool | None = None
    ) -> Self:
        """Return a copy of this app for another database: the same tasks, its own connections.

        All methods of the copy use that database. Tasks, which belong to both apps, use it only
        within `with copy.active():`. `pgbouncer=None` keeps this app's setting.
        """
        if pgbouncer is None:
            pgbouncer = self.source.pgbouncer
        twin = copy.copy(self)
        twin._client = self.client.bound(Source(dsn, pgbouncer=pgbouncer, listen_dsn=listen_dsn))
        return twin

    def active(self) -> AbstractContextManager[None]:
        """Return a block in which tasks, and the app that `bind` copied, use this app's database.

        This holds for the running thread or coroutine, and for the coroutines that it starts.
        """
        return self.client.entered()

    # Opening and closing

    def open(self) -> Self:
        """Check the connection and register the tasks. Optional: the first `defer` does both."""
        self.client.open()
        return self

    def close(self) -> None:
        """Close the connections of synchronous calls."""
        self.client.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    async def open_async(self) -> Self:
        """Check the connection and register the tasks. Optional: the first `defer` does both."""
        await self.client.open_async()
        return self

    async def close_async(self) -> None:
        """Close the connections of the running event loop, and those of synchronous calls."""
        await self.client.close_async()

    async def __aenter__(self) -> Self:
        return await self.open_async()

    async def __aexit__(self, *_: object) -> None:
        await self.close_async()

    # Tasks

    def include(self, blueprint: Blueprint, namespace: str = "") -> None:
        """Add the tasks and schedules of a blueprint; their names begin with the namespace.

        The App's middleware surrounds them, but its `defaults` do not apply to them. Raises
        ValueError, and adds nothing, if names clash, or if the blueprint was included before.
        """
        if not isinstance(blueprint, Blueprint):
            raise TypeError(f"blueprint must be a Blueprint, not {blueprint!r}")
        if not isinstance(namespace, str):
            raise TypeError(f"namespace must be text, such as 'mail.', not {namespace!r}")
        blueprint.include_in(self, namespace)

    @overload
    def on(
        self, event: Literal["exhausted", "retry", "crash"], /
    ) -> Callable[[JobHook], JobHook]: ...
    @overload
    def on(
        self, event: Literal["worker_start", "worker_stop"], /
    ) -> Callable[[WorkerHook], WorkerHook]: ...
    def on(self, event: str, /) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """Return a decorator; the app's workers call the decorated function at each such event.

        They call coroutine functions in their event loop, others in a thread. The function gets a
        `JobEvent` when a job has failed for good (`exhausted`), will be retried (`retry`), or has
        lost its process or transaction (`crash`). If a whole worker dies, no hook is called for
        its jobs: only the database knows their fate. The function gets the `Worker` before the
        worker takes jobs (`worker_start`), and after it has returned the last one (`worker_stop`).
        """
        check_event(event)

        def add(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
            check_hook(event, hook)
            self.hooks.setdefault(event, []).append(hook)
            return hook

        return add

    # Jobs

    def prepare(
        self, task: str, args: Mapping[str, Any] | None = None, **options: Unpack[DeferOptions]
    ) -> PreparedJob[Any]:
        """Return a call for `defer_many`. The task need not be defined here."""
        return prepare(self.client, task, args, options)

    def group(
        self,
        calls: Iterable[PreparedJob[Any]],
        *,
        connection: CallersConnection = OWN,
    ) -> Group:
        """Return a group, which `then` defers with a job that needs them all.

        For example `app.group([...]).then(call)`. Nothing is deferred before that.
        """
        return Group(self.client, calls, connection)

    def job(self, id: int | HasId) -> Job[Any]:
        """Return the `Job` with this id, to read or change it. Does not query the database.

        An object with an id will do too: `current_job()`, a row of `pgdefer.models`, a job of
        another App. Raises TypeError or ValueError for anything that can't be an id.
        """
        return Job(job_id(id), self.client)

    # Working

    def run_worker(
        self,
        queues: Sequence[str] | None = None,
        *,
        dsns: Iterable[str] | Path | None = None,
        per_database: int | None = None,
        **options: Unpack[WorkerOptions],
    ) -> None:
        """Run a `Worker`, or with `dsns` a `MultiWorker`, until SIGTERM, SIGINT or SIGHUP."""
        self._worker(queues, dsns, per_database, options).run()

    async def run_worker_async(
        self,
        queues: Sequence[str] | None = None,
        *,
        dsns: Iterable[str] | Path | None = None,
        per_database: int | None = None,
        handle_signals: bool = False,
        **options: Unpack[WorkerOptions],
    ) -> None:
        """Run a worker in this event loop until it is cancelled; otherwise as `run_worker`.

        After the cancel, running jobs may continue for `shutdown_timeout` seconds; without that
        option they are aborted and given back. With `handle_signals`, SIGTERM, SIGINT and SIGHUP
        stop the worker too. Pass it if the worker is the whole program:
        `asyncio.run(app.run_worker_async(handle_signals=True))`. Without it, SIGTERM kills that
        program. Don't pass it in the loop of a web server, which handles these signals itself.
        """
        worker = self._worker(queues, dsns, per_database, options)
        try:
            await worker.run_async(handle_signals=handle_signals)
        except Exception as error:
            # The task that runs it may never be awaited, as in a web server.
            log.error("the worker has ended: %s", describe(error))
            raise

    def _worker(
        self,
        queues: Sequence[str] | None,
        dsns: Iterable[str] | Path | None,
        per_database: int | None,
        options: WorkerOptions,
    ) -> Worker | MultiWorker:
        from pgdefer.worker.many_databases import MultiWorker  # noqa: PLC0415
        from pgdefer.worker.worker import Worker  # noqa: PLC0415

        if dsns is not None:
            return MultiWorker(self, dsns, queues, per_database=per_database, **options)
        if per_database is not None:
            raise ValueError("per_database is for a worker of many databases: give dsns, too")
        return Worker(self, queues, **options)

    def stream_jobs(
        self, queues: Sequence[str] | None = None, **options: Unpack[WorkerOptions]
    ) -> JobStream:
        """Return a stream of the jobs of these queues (None: all), for a loop of your own.

        It yields jobs of all tasks. The options are those of a worker, but `concurrency` is 1 by
        default.

            with app.stream_jobs(["mail"]) as jobs:
                for job in jobs:
                    with job:
                        send(job.args["to"])
        """
        from pgdefer.worker.stream import JobStream  # noqa: PLC0415

        return JobStream(self, queues, **options)
