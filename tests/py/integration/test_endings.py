"""Each end of a run is told once, to the log, hooks, meters and traces, as the database has it."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime as dt
import importlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pgdefer import App, JobContext, JobEvent, JobSuspended, Retry, RetryLater, current_job
from pgdefer.contrib import otel
from pgdefer.database import sql
from pgdefer.database.connection import Connection, ConnectionLost
from pgdefer.worker.executor import Executor

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

MOMENT = dt.timedelta(milliseconds=1)
LATER = dt.datetime(2999, 1, 1, tzinfo=dt.UTC)
IN_PROCESS = """
from pgdefer import App, RetryLater

app = App({dsn!r})
app.defaults = dict(queue="q")


@app.task(name="yields in a process", run_in="process", transactional=True, max_progress=1)
def yields_in_a_process(connection):
    raise RetryLater("not yet")
"""
SQL = """
create function public.breaks(args jsonb) returns void language plpgsql as $$
begin raise 'broken'; end $$;
select queue.register_task('sql', '{"function": "public.breaks"}');
select queue.configure('{"unknown_task_grace": "0"}');
"""

# A commit that waits, and goes on when it is cancelled.
UNSTOPPABLE = """
create table effect (n integer);
create function public.wait_for_lock() returns trigger language plpgsql as $$
begin
  perform pg_advisory_xact_lock(1);
  return null;
exception when query_canceled then
  return null;
end $$;
create constraint trigger wait_for_lock after insert on effect deferrable initially deferred
  for each row execute function public.wait_for_lock();
"""
WAITING = (
    "select from pg_stat_activity where wait_event = 'advisory' and datname = current_database()"
)


class Told:
    """All that is told about jobs: by name of the task, how often each."""

    def __init__(self, app: App, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO)
        self._caplog = caplog
        self.measured: collections.Counter[tuple[str, str]] = collections.Counter()
        self.exhausted: collections.Counter[str] = collections.Counter()
        self.errors: list[BaseException | None] = []
        self.retried: collections.Counter[str] = collections.Counter()
        app.meters.append(self._measure)
        app.on("exhausted")(self._exhaust)
        app.on("retry")(self._retry)

    def _measure(self, job: JobContext, outcome: str, seconds: float) -> None:
        assert seconds >= 0
        self.measured[job.task, outcome] += 1

    async def _exhaust(self, event: JobEvent) -> None:
        self.exhausted[event.job.task] += 1
        self.errors.append(event.exception)

    async def _retry(self, event: JobEvent) -> None:
        self.retried[event.job.task] += 1

    def logged(self, level: int) -> collections.Counter[str]:
        return collections.Counter(
            getattr(record, "task", "")
            for record in self._caplog.records
            if record.name == "pgdefer.job" and record.levelno == level
        )

    def troubles(self) -> list[str]:
        """What the worker logs, apart from jobs, as a warning or worse."""
        return [
            record.getMessage()
            for record in self._caplog.records
            if record.name == "pgdefer.worker" and record.levelno >= logging.WARNING
        ]


class Recorded:
    """The same, as the database has it."""

    def __init__(self, jobs: Jobs) -> None:
        rows = {row["id"]: row for row in jobs()}
        self.measured: collections.Counter[tuple[str, str]] = collections.Counter()
        self.by_state: dict[str, collections.Counter[str]] = collections.defaultdict(
            collections.Counter
        )
        self.failures: collections.Counter[str] = collections.Counter()
        for row in rows.values():
            self.by_state[row["state"]][row["task"]] += 1
            if row["state"] == "succeeded":
                self.measured[row["task"], "succeeded"] += 1
        for attempt in jobs.attempts():
            task = rows[attempt["job_id"]]["task"]
            self.measured[task, attempt["outcome"]] += 1
            if attempt["outcome"] in ("failed", "timed_out", "crashed"):
                self.failures[task] += 1


@contextlib.contextmanager
def raising(_: JobContext) -> Iterator[None]:
    """A middleware that breaks afterwards."""
    try:
        yield
    finally:
        raise ValueError("the middleware is broken")


@contextlib.contextmanager
def swallowing(_: JobContext) -> Iterator[None]:
    with contextlib.suppress(BaseException):
        yield


def is_first(seen: set[int]) -> bool:
    """Whether the job runs for the first time."""
    is_new = current_job().id not in seen
    seen.add(current_job().id)
    return is_new


def define_durable_tasks(app: App) -> None:
    seen: set[int] = set()

    async def sleep() -> None:
        await current_job().sleep_async("nap", MOMENT)

    app.task(name="sleeps")(sleep)
    app.task(name="sleeps, swallowed", middleware=[swallowing])(sleep)

    @app.task(name="sleeps in a thread")
    def sleeps_in_thread() -> None:
        current_job().sleep("nap", MOMENT)

    @app.task(name="step")
    async def step() -> None:
        def once_only() -> None:
            if is_first(seen):
                raise ValueError("no")

        await current_job().step_async("a", once_only, retry=Retry(2, base=dt.timedelta(0)))

    @app.task(name="late step")
    async def late_step() -> None:
        async def once_late() -> None:
            if is_first(seen):
                await asyncio.Event().wait()

        retry = Retry(2, base=dt.timedelta(0))
        await current_job().step_async("a", once_late, retry=retry, timeout=10 * MOMENT)

    @app.task(name="suspends itself", retry=Retry(1))
    async def suspends_itself() -> None:
        raise JobSuspended


def define_yielding_tasks(app: App) -> None:
    seen: set[int] = set()

    def yield_once() -> None:
        if is_first(seen):
            raise RetryLater("not yet")

    @app.task(name="writes, then broken", transactional=True, middleware=[raising])
    async def writes(connection: psycopg.AsyncConnection[Any]) -> None: ...

    @app.task(name="yields")
    async def yields() -> None:
        yield_once()

    @app.task(name="yields in a transaction", transactional=True)
    async def yields_in_transaction(connection: psycopg.AsyncConnection[Any]) -> None:
        yield_once()

    @app.task(name="yields too often", max_progress=1)
    async def yields_too_often() -> RetryLater:
        return RetryLater("never")

    @app.task(name="writes, yields too often", max_progress=1, transactional=True)
    async def writes_too_often(connection: psycopg.AsyncConnection[Any]) -> RetryLater:
        return RetryLater("never")


def define_failing_tasks(app: App) -> None:
    @app.task(name="late", timeout=dt.timedelta(seconds=0.1), retry=Retry(1))
    async def late() -> None:
        await asyncio.Event().wait()

    @app.task(name="fails once", retry=Retry(2, base=dt.timedelta(0)))
    def fails_once() -> None:
        if current_job().attempt == 1:
            raise ValueError("no")


@pytest.fixture
def told(app: App, caplog: pytest.LogCaptureFixture) -> Told:
    return Told(app, caplog)


@pytest.fixture
def in_process(app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "in_process.py").write_text(IN_PROCESS.format(dsn=app.source.conninfo()))
    monkeypatch.syspath_prepend(tmp_path)
    return importlib.import_module("in_process").yields_in_a_process


async def test_all_is_told_as_it_is_recorded(
    app: App, jobs: Jobs, told: Told, conn: psycopg.Connection[Any], in_process: Any
) -> None:
    define_durable_tasks(app)
    define_yielding_tasks(app)
    define_failing_tasks(app)
    app.add(in_process)
    conn.execute(SQL.encode())
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    otel.instrument(app, tracer_provider=tracers, meter_provider=NoOpMeterProvider())
    tasks = [*app.tasks, "sql", "unknown"]
    async with running(app):
        for task in tasks:
            await app.defer_async(task)
        await jobs.end(*range(1, len(tasks) + 1))
        recorded = Recorded(jobs)
        await until(lambda: told.measured.total() >= recorded.measured.total())
        failed = recorded.by_state["failed"]
        await until(lambda: told.exhausted.total() >= failed.total())
    assert set(failed) == {
        "yields too often",
        "writes, yields too often",
        "yields in a process",
        "late",
        "suspends itself",
        "sql",
        "unknown",
    }
    assert told.measured == recorded.measured
    assert told.exhausted == failed
    assert told.logged(logging.ERROR) == failed
    assert told.logged(logging.INFO) == recorded.by_state["succeeded"]
    assert (
        told.logged(logging.WARNING)
        == told.retried
        == {
            "fails once": 1,
            "step": 1,
            "late step": 1,
        }
    )
    spans = {span.name for span in exporter.get_finished_spans() if not span.status.is_ok}
    names = {"late", "suspends itself", "fails once", "step", "late step", "writes, then broken"}
    assert spans == {f"process {name}" for name in names}
    tracers.shutdown()


async def sleep(job: JobContext) -> None:
    await job.sleep_async("nap", MOMENT)


async def wait(job: JobContext) -> None:
    await job.wait_for_async("approval")


async def gather(job: JobContext) -> None:
    await job.gather_async([App().prepare("child", scheduled_at=LATER)])


async def fail(job: JobContext) -> None:
    def always() -> None:
        raise ValueError("no")

    await job.step_async("a", always, retry=Retry(2))


async def fail_late(job: JobContext) -> None:
    retry = Retry(2, base=dt.timedelta(0))
    await job.step_async("a", asyncio.Event().wait, retry=retry, timeout=10 * MOMENT)


async def test_a_job_told_to_abort_that_suspends_is_told_as_aborted(
    app: App,
    jobs: Jobs,
    told: Told,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The database knows of the abort, and the worker does not yet."""
    monkeypatch.setattr(Executor, "abort_some", lambda *_: None)
    begun: list[int] = []
    goes_on = asyncio.Event()
    ways = (sleep, wait, gather, fail, fail_late)
    for way in ways:

        @app.task(name=way.__name__)
        async def task(way: Callable[[JobContext], Awaitable[None]] = way) -> None:
            begun.append(current_job().id)
            await goes_on.wait()
            await way(current_job())

    async with running(app):
        for way in ways:
            await app.defer_async(way.__name__)
        await until(lambda: len(begun) == len(ways))
        for id in begun:
            conn.execute("select queue.cancel(%s, abort => true)", [id])
        goes_on.set()
        await jobs.end(*begun)
        await until(lambda: told.measured.total() >= len(ways))
    recorded = Recorded(jobs)
    assert told.measured == {(way.__name__, "aborted"): 1 for way in ways} == recorded.measured
    assert not told.retried
    assert not told.exhausted
    assert not told.logged(logging.WARNING)


async def test_a_success_that_is_refused_is_not_told(
    app: App, jobs: Jobs, told: Told, conn: psycopg.Connection[Any]
) -> None:
    """The job has ended by hand meanwhile."""
    goes_on = asyncio.Event()

    @app.task(name="slow")
    async def slow() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await goes_on.wait()

    @app.task(name="last")
    async def last() -> None: ...

    async with running(app):
        job = await slow.defer_async()
        await until(lambda: jobs.states()[job.id] == "running")
        conn.execute("select queue.fail_jobs(array[%s]::bigint[], 'by hand')", [job.id])
        goes_on.set()
        await last.defer_async()
        await until(lambda: ("last", "succeeded") in told.measured)
    assert jobs.states()[job.id] == "failed"
    assert told.logged(logging.INFO) == {"last": 1}
    assert ("slow", "succeeded") not in told.measured
    assert "dropped: its claim has ended as failed, and the job is failed" in told.troubles()[0]


@pytest.mark.parametrize("cancel", ["time out", "stop"])
async def test_a_commit_that_succeeds_though_it_is_cancelled(
    app: App, jobs: Jobs, told: Told, conn: psycopg.Connection[Any], cancel: str
) -> None:
    """The handler's task is cancelled, and its worker reports that; the job has succeeded."""
    conn.execute(UNSTOPPABLE)

    @app.task(name="paid", transactional=True)
    async def paid(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("insert into effect values (1)")

    conn.execute("select pg_advisory_lock(1)")
    async with running(app) as worker:
        await app.defer_async("paid")
        await until(lambda: conn.execute(WAITING).fetchall())
        if cancel == "stop":
            worker.stop_at_once()
        else:
            worker.executor._time_out(*worker.executor.running)
        await until(lambda: not worker.executor.running)
        conn.execute("select pg_advisory_unlock(1)")
        await jobs.end()
        await until(lambda: told.measured)
    assert [row["state"] for row in jobs()] == ["succeeded"]
    assert told.measured == {("paid", "succeeded"): 1}
    assert told.logged(logging.INFO) == {"paid": 1}
    stopping = ["did not end in time"] if cancel == "stop" else []
    assert [t.partition("> ")[2].partition(":")[0] for t in told.troubles()] == stopping
    assert not told.retried
    assert not told.exhausted


async def test_reports_whose_answers_are_lost_are_told(
    app: App, jobs: Jobs, told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The database has stored them; sent again, they are refused."""
    lost: list[tuple[int, int]] = []
    real = Connection.call

    async def call(self: Connection, statement: sql.Statement, **given: Any) -> Any:
        rows = await real(self, statement, **given)
        sent = [(one["id"], one["claim"]) for one in json.loads(given.get("outcomes", "[]"))]
        if new := [claim for claim in sent if claim not in lost]:
            lost.extend(new)
            self.close()
            raise ConnectionLost("cut")
        return rows

    monkeypatch.setattr(Connection, "call", call)

    @app.task(name="good")
    async def good() -> str:
        return "done"

    @app.task(name="bad")
    async def bad() -> None:
        raise ValueError("no")

    @app.task(name="again", retry=Retry(2, base=dt.timedelta(0)))
    async def again() -> None:
        if current_job().attempt == 1:
            raise ValueError("not yet")

    async with running(app):
        for task in (good, bad, again):
            await task.defer_async()
        await jobs.end()
        await until(lambda: told.measured.total() >= 4)
        await until(lambda: told.exhausted)
        await until(lambda: told.retried)
    recorded = Recorded(jobs)
    assert told.measured == recorded.measured
    assert told.exhausted == {"bad": 1}
    assert told.retried == {"again": 1}
    assert not [said for said in told.troubles() if "refused" in said]


def test_a_stream_tells_the_same(app: App, jobs: Jobs, told: Told) -> None:
    for _ in range(2):
        app.defer("streamed", retry=Retry(1))
    with app.stream_jobs(drain=True) as stream:
        for job in stream:
            if job.id == 2:
                job.fail(ValueError("no"))
            else:
                with job:
                    job.sleep("nap", MOMENT)
    recorded = Recorded(jobs)
    assert ("streamed", "yielded") in recorded.measured
    assert told.measured == recorded.measured
    assert told.exhausted == recorded.by_state["failed"] == {"streamed": 1}
    assert told.logged(logging.INFO) == recorded.by_state["succeeded"]
    assert isinstance(told.errors[0], ValueError)
