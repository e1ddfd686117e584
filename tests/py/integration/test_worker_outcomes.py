"""Outcomes that the database can't store, and those that wait while it refuses other calls."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import psycopg
import pytest

from pgdefer import App, Retry, Worker, current_job
from pgdefer.database import connection, sql
from pgdefer.worker import outcomes
from pgdefer.worker.heartbeat import clock

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]

# What stands in place of a result that the database can't store.
NOTE = {"__pgdefer__": "unencodable", "value": "JSON, which this database can't hold"}


@pytest.fixture
def two_is_unstorable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a character that no database can store into each result that is 2."""
    real = outcomes.succeeded

    def spoilt(id: int, claim: int, result: str | None = None) -> str:
        return real(id, claim, '"\\u0000"' if result == "2" else result)

    monkeypatch.setattr(outcomes, "succeeded", spoilt)


def refuse_outcomes(conn: Connection, errcode: str, which: str = "true") -> None:
    """Let the server refuse outcomes with an error, until the trigger `refuse` is dropped."""
    conn.execute(
        f"""
        create function public.refuse() returns trigger language plpgsql as $$
        begin
          raise exception 'refused' using errcode = '{errcode}';
        end $$;
        create trigger refuse before insert on queue.finished
        for each row when ({which}) execute function public.refuse()
        """
    )


@pytest.mark.usefixtures("two_is_unstorable")
async def test_an_outcome_that_cannot_be_stored_spoils_no_other(app: App, jobs: Jobs) -> None:
    @app.task(name="good")
    async def good() -> int:
        return 1

    @app.task(name="bad")
    async def bad() -> int:
        return 2

    app.defer_many([(bad if n == 7 else good).prepare() for n in range(20)])
    async with running(app):
        rows = await jobs.end()
    ends = {row["task"]: (row["state"], row["result"], row["error"]) for row in rows}
    assert ends == {
        "good": ("succeeded", 1, None),
        "bad": ("succeeded", NOTE, None),  # its writes remain
    }


@pytest.mark.usefixtures("two_is_unstorable")
async def test_an_outcome_that_cannot_be_stored_spoils_no_other_at_the_end(
    app: App, jobs: Jobs
) -> None:
    """It does not prevent the worker from deregistering, either."""
    begun = []

    @app.task(name="t")
    async def task(n: int) -> int:
        begun.append(n)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return n

    task.defer_many([{"n": n} for n in range(1, 4)])
    stopping = asyncio.create_task(Worker(app).run_async())
    await until(lambda: len(begun) == 3)
    stopping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stopping
    await app.close_async()
    assert [(row["state"], row["result"]) for row in jobs()] == [
        ("succeeded", 1),
        ("succeeded", NOTE),
        ("succeeded", 3),
    ]


async def test_a_job_whose_tracing_raises_has_an_outcome(app: App, jobs: Jobs) -> None:
    """Wherever in the worker's own code a debugger or coverage raises, after the handler."""

    @app.task
    def task(last: int) -> None:
        events = iter(range(last))

        def trace(*_: object) -> Any:
            if next(events, None) is None:
                raise RuntimeError("the debugger has failed")
            return trace

        sys.settrace(trace)

    for last in range(150):
        task.defer(last)
    async with running(app, concurrency=1):
        await until(lambda: set(jobs.states().values()) <= {"succeeded", "failed"})
    assert set(jobs.states().values()) == {"succeeded", "failed"}


async def test_an_outcome_for_which_there_is_no_room(
    app: App, jobs: Jobs, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with a full disk: the worker sends it until the server takes it."""
    monkeypatch.setattr("pgdefer.worker.completer.TRIES", 2)
    conn.execute(
        """
        create sequence public.tries;
        grant all on sequence public.tries to public;
        create function public.refuse() returns trigger language plpgsql as $$
        begin
          if nextval('public.tries') <= 5 then
            raise exception 'no space left on device' using errcode = '53100';
          end if;
          return new;
        end $$
        """
    )
    conn.execute(
        "create trigger refuse before insert on queue.finished "
        "for each row execute function public.refuse()"
    )

    @app.task(name="t")
    async def task() -> None: ...

    app.defer("t")
    async with running(app):
        (row,) = await jobs.end()
    assert (row["state"], row["attempts"], row["crashes"]) == ("succeeded", 1, 0)
    conn.execute("drop trigger refuse on queue.finished")


@pytest.mark.parametrize("are_all", [True, False])
async def test_many_outcomes_for_which_there_is_no_room(
    app: App, jobs: Jobs, conn: Connection, are_all: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A single one tells that the server is full; if only that one is too large, others pass."""

    @app.task(name="t")
    async def task() -> None: ...

    first, *_ = task.defer_many([{}] * 20)
    refuse_outcomes(conn, "53100", f"{are_all} or new.id = {first.id}")
    async with running(app, concurrency=20):
        await until(lambda: caplog.text.count("trying again") >= 5)
        lines = len(caplog.records)
        if not are_all:
            await until(lambda: list(jobs.states().values()).count("succeeded") == 19)
        conn.execute("drop trigger refuse on queue.finished")
        rows = await jobs.end()
    assert lines < 30
    assert {(row["state"], row["attempts"]) for row in rows} == {("succeeded", 1)}


async def test_an_outcome_that_is_refused_for_ever(
    app: App, jobs: Jobs, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its claim ends nevertheless, by a lease."""
    monkeypatch.setattr("pgdefer.worker.completer.TRIES", 3)
    refuse_outcomes(conn, "XX000")
    runs = []

    @app.task(name="t", retry=Retry(2))
    async def task() -> None:
        runs.append(1)

    app.defer("t")
    async with running(app, heartbeat_every=0.5):
        await until(lambda: [a["outcome"] for a in jobs.attempts()] == ["failed"])
        conn.execute("drop trigger refuse on queue.finished")
        (row,) = await jobs.end()
    assert row["state"] == "succeeded"


async def test_outcomes_are_sent_while_fetches_are_refused(
    app: App, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that stops meanwhile ends, too."""
    release = asyncio.Event()
    refused: list[float] = []

    @app.task(name="t")
    async def task() -> None:
        await release.wait()

    real = connection.Connection.call

    async def call(self: connection.Connection, statement: sql.Statement, **given: Any) -> Any:
        if statement in (sql.FETCH, sql.FINISH_AND_FETCH):
            refused.append(clock())
            raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
        return await real(self, statement, **given)

    app.defer("t")
    async with running(app, concurrency=2) as worker:
        await until(lambda: worker.executor.running and worker.state.is_waiting)
        monkeypatch.setattr(connection.Connection, "call", call)
        app.defer("t")
        await until(lambda: len(refused) > 8)
        # The last three waited for the longest delay.
        assert refused[8] - refused[5] > 1.5
        release.set()
        await until(lambda: "succeeded" in jobs.states().values())
    assert list(jobs.states().values()) == ["succeeded", "ready"]


async def test_outcomes_are_sent_while_a_worker_may_not_sleep(
    dsn: str, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without notifications it asks on the connection of the outcomes."""
    release = asyncio.Event()
    app = App(dsn, pgbouncer=True)
    refused: list[float] = []

    @app.task(name="t")
    async def task() -> None:
        await release.wait()

    real = connection.Connection.call

    async def call(self: connection.Connection, statement: sql.Statement, **given: Any) -> Any:
        if statement is sql.BEFORE_SLEEP:
            refused.append(clock())
            raise psycopg.errors.QueryCanceled("canceling statement due to statement timeout")
        return await real(self, statement, **given)

    app.defer("t")
    async with running(app, concurrency=2) as worker:
        await until(lambda: bool(worker.executor.running))
        monkeypatch.setattr(connection.Connection, "call", call)
        await until(lambda: len(refused) > 2)
        release.set()
        await until(lambda: list(jobs.states().values()) == ["succeeded"])
    app.close()


@pytest.mark.parametrize("stops", [False, True])
async def test_a_claim_that_a_transaction_left_behind_has_locked(
    app: App,
    dsn: str,
    jobs: Jobs,
    conn: Connection,
    caplog: pytest.LogCaptureFixture,
    *,
    stops: bool,
) -> None:
    """The other jobs run meanwhile, and the outcome is stored once that transaction has ended."""
    left = []

    @app.task(name="leaves")
    async def leaves() -> str:
        job = current_job()
        connection = psycopg.connect(dsn)
        connection.execute("select queue.set_progress(%s, %s, 5)", (job.id, job.claim))
        left.append(connection)
        return "done"

    @app.task(name="other")
    async def other() -> None: ...

    job = leaves.defer()
    async with running(app, concurrency=2) as worker:
        await until(lambda: left)
        others = [other.defer().id for _ in range(3)]
        await jobs.end(*others)
        assert jobs.states()[job.id] == "running"
        await until(lambda: "can't end: an open transaction has locked its claim" in caplog.text)
        assert f"session {left[0].info.backend_pid} " in job.why()
        if stops:
            worker.stop()
        left[0].rollback()
        left[0].close()
        assert await job.result_async(100) == "done"
    assert jobs.states()[job.id] == "succeeded"
    assert jobs.attempts() == []
