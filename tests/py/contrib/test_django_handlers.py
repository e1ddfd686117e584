"""Handlers that use Django's ORM: their connections, transactions and arguments."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from asgiref.sync import sync_to_async
from django.db import OperationalError, connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.functional import SimpleLazyObject
from django.utils.safestring import SafeString, mark_safe
from django.utils.translation import gettext_lazy
from shop.models import Order

from pgdefer import EncodeError, JobContext, Retry, RetryLater, Worker, current_job
from pgdefer.contrib.django.application import DjangoApp
from pgdefer.contrib.django.models import Attempt, Job
from pgdefer.database.embedded import EmbeddedServer, temporary_server
from pgdefer.tasks.context import running_job
from support import create_database, install

from .conftest import PROJECT, customers, environment_of, order, states, use

pytestmark = [pytest.mark.client, pytest.mark.usefixtures("own_tasks")]


def failures() -> list[tuple[str, str | None]]:
    """What went wrong in attempts. A worker that is slow gives back what it has claimed ahead."""
    ended = Attempt.objects.exclude(outcome="released")
    return [(attempt.outcome, attempt.error) for attempt in ended]


def test_writes_and_outcome_are_one_transaction(app: DjangoApp) -> None:
    @app.task(name="once", transactional=True, retry=Retry(1))
    def once(how: str) -> str:
        assert connection.in_atomic_block
        order(how)
        with contextlib.suppress(ZeroDivisionError), transaction.atomic():
            order("rolled back to a savepoint")
            raise ZeroDivisionError
        app.defer(f"after {how}", queue="other")
        if how == "fails":
            raise ValueError(how)
        if how == "later":
            raise RetryLater(needs=[app.defer("no such", queue="other").id])
        return how

    jobs = [once.defer(how) for how in ("succeeds", "fails", "later")]
    Worker(app, ["default"], concurrency=3, drain=True).run()
    assert [job.state() for job in jobs] == ["succeeded", "failed", "waiting"]
    assert customers() == ["later", "succeeds"]
    assert set(Job.objects.filter(task__startswith="after").values_list("task", flat=True)) == {
        "after succeeds",
        "after later",
    }
    assert jobs[0].result(10) == "succeeds"


def test_a_broken_transaction_fails_the_job(app: DjangoApp, drain: Callable[..., None]) -> None:
    @app.task(name="broken", transactional=True, retry=Retry(1))
    def broken() -> None:
        order()
        with contextlib.suppress(Exception), connection.cursor() as cursor:
            cursor.execute("select 1/0")

    broken.defer()
    drain()
    assert states() == ["failed"]
    assert Order.objects.count() == 0


def test_what_fails_after_the_commit_is_logged(
    app: DjangoApp, drain: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ZeroDivisionError("after the commit")

    @app.task(name="after", transactional=True, retry=Retry(2))
    def after(how: str) -> str | RetryLater:
        order(how)
        transaction.on_commit(fail)
        if how == "fails":
            raise ValueError(how)
        if how == "later" and Order.objects.filter(customer=how).count() == 1:
            return RetryLater()
        return how

    for how in ("succeeds", "later"):
        after.defer(how)
    after.configure(retry=Retry(1)).defer("fails")
    drain()
    assert states() == ["succeeded", "succeeded", "failed"]
    assert customers() == [
        "later",
        "later",
        "succeeds",
    ]
    assert ("failed", "ValueError: fails") in failures()
    logged = [record for record in caplog.records if "on_commit()" in record.message]
    assert len(logged) == 3
    for record in logged:
        assert record.levelname == "ERROR"
        assert record.exc_info is not None
        assert "after the commit" in str(record.exc_info[1])
    assert not [record for record in caplog.records if "was refused" in record.message]


def test_queries_that_debug_keeps_are_those_of_one_job(
    app: DjangoApp, drain: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    @app.task(name="count")
    def count() -> int:
        Order.objects.count()
        return len(connection.queries_log)

    @app.task(name="count_async")
    async def count_async() -> int:
        return await sync_to_async(count.function)()

    monkeypatch.setattr("django.conf.settings.DEBUG", True)
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)
    jobs = [task.defer() for task in (count, count_async) for _ in range(2)]
    Order.objects.count()
    drain(concurrency=1)
    assert [job.result(10) for job in jobs] == [1, 1, 1, 1]
    assert connection.queries_log  # of this thread, in which no job has run


def test_a_transaction_within_a_middlewares_is_refused(
    app: DjangoApp, drain: Callable[..., None]
) -> None:
    @contextlib.contextmanager
    def around(_job: JobContext) -> Iterator[None]:
        with transaction.atomic():
            yield

    @app.task(name="inner", transactional=True, retry=Retry(1), middleware=[around])
    def inner() -> None:
        order()

    inner.defer()
    drain()
    assert states() == ["failed"]
    ((outcome, error),) = failures()
    assert outcome == "failed"
    assert error is not None
    assert "durable" in error
    assert Order.objects.count() == 0


@pytest.mark.parametrize("options", [{}, {"transactional": True}])
def test_a_failure_has_no_foreign_exception_before_it(
    app: DjangoApp, drain: Callable[..., None], options: Any
) -> None:
    @app.task(name="divide", retry=Retry(1), **options)
    def divide() -> float:
        return 1 / 0

    divide.defer()
    drain()
    assert "During handling" not in str(Attempt.objects.get().detail("traceback"))
    assert "ZeroDivisionError" in str(Attempt.objects.get().detail("traceback"))


def test_an_outcome_of_a_lost_claim_rolls_back(app: DjangoApp, shop: str) -> None:
    @app.task(name="lost", transactional=True)
    def lost() -> None:
        order()
        with psycopg.connect(shop, autocommit=True) as other:
            other.execute("select queue.release(%s, %s)", [current_job().id, current_job().claim])
            other.execute("select queue.cancel(%s)", [current_job().id])

    lost.defer()
    app.run_worker(max_jobs=1)
    assert states() == ["cancelled"]
    assert Order.objects.count() == 0


@pytest.mark.parametrize("way", ["stop", "timeout"])
def test_a_job_that_waits_for_its_connection_goes_back(
    app: DjangoApp, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    @app.task(name="waits", transactional=True)
    def waits() -> None: ...

    real = BaseDatabaseWrapper.ensure_connection
    tries = set()

    def refuse(self: BaseDatabaseWrapper) -> None:
        job = running_job()
        if job is None:
            real(self)
            return
        tries.add(job.claim)
        if way == "stop" or len(tries) > 1:
            worker.stop()
        raise OperationalError("no more connections")

    monkeypatch.setattr(BaseDatabaseWrapper, "ensure_connection", refuse)
    timeout = dt.timedelta(milliseconds=300) if way == "timeout" else None
    waits.configure(timeout=timeout).defer()
    worker = Worker(app, drain=True, shutdown_timeout=10)
    worker.run()
    assert (states(), worker.given_back) == (["ready"], 0)
    assert failures() == []


def test_a_coroutine_cannot_be_atomic(app: DjangoApp) -> None:
    with pytest.raises(TypeError, match="atomic"):

        @app.task(name="coroutine", transactional=True)
        async def coroutine() -> None: ...


def test_each_job_has_fresh_connections(
    app: DjangoApp, shop: str, drain: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)
    seen = []

    @app.task(name="look")
    def look() -> None:
        Order.objects.count()
        seen.append((threading.get_ident(), connection.connection.info.backend_pid))

    @app.task(name="look_async")
    async def look_async() -> None:
        await Order.objects.acount()
        seen.append((0, await sync_to_async(lambda: connection.connection.info.backend_pid)()))

    def kill_idle_ones() -> None:
        with psycopg.connect(shop, autocommit=True) as other:
            other.execute(
                "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
                " where pid = any (%s)",
                [[pid for _, pid in seen]],
            )

    @app.task(name="kill")
    def kill() -> None:
        kill_idle_ones()

    for _ in range(3):
        look.defer()
        look_async.defer()
        kill.defer()
    Worker(app, drain=True, concurrency=1).run()
    assert states() == ["succeeded"] * 9
    assert failures() == []
    with psycopg.connect(shop, autocommit=True) as other:
        # What coroutines used was closed, whatever CONN_MAX_AGE says: its thread has ended.
        left = other.execute(
            "select count(*) from pg_stat_activity where pid = any (%s) and pid <> all (%s)",
            [[pid for at, pid in seen if not at], [pid for at, pid in seen if at]],
        ).fetchone()
    assert left == (0,)


def test_coroutines_do_not_wait_for_each_other(app: DjangoApp) -> None:
    """Each has a thread of its own: two meet, whose statements run at once."""
    met = threading.Barrier(2, timeout=300)

    @app.task(name="meet")
    async def meet() -> None:
        await sync_to_async(met.wait)()

    meet.defer()
    meet.defer()
    Worker(app, drain=True, concurrency=2).run()
    assert states() == ["succeeded", "succeeded"]


def test_lazy_objects_are_arguments(
    app: DjangoApp, own_tasks: None, drain: Callable[..., None]
) -> None:
    """As `request.user` is one, whether or not it has been used."""
    taken: list[Any] = []

    @app.task(name="take")
    def take(row: Order, rest: list[Any]) -> None:
        taken.extend([row, *rest])

    row = order("Ann")
    used = SimpleLazyObject(lambda: row)
    assert used.customer == "Ann"
    take.defer(SimpleLazyObject(lambda: row), [used, SimpleLazyObject(lambda: "text")])
    drain()
    assert taken == [row, row, "text"]
    assert {type(one) for one in taken} == {Order, str}


def test_rows_and_lazy_texts_are_arguments(app: DjangoApp, drain: Callable[..., None]) -> None:
    seen: list[Any] = []

    @app.task(name="take", retry=Retry(1))
    def take(row: Order, rest: list[Any]) -> None:
        seen.append((row.customer, *rest))

    @app.task(name="take_async", retry=Retry(1))
    async def take_async(row: Order) -> None:
        seen.append(row.customer)

    one, gone = order("Ann"), order("Bob")
    take.defer(one, [gettext_lazy("Yes"), mark_safe("<b>"), {"deep": order("Cid")}])
    take_async.defer(one)
    lost = take_async.defer(gone)
    gone.delete()
    Order.objects.filter(customer="Ann").update(customer="Anna")
    with pytest.raises(EncodeError, match=r"shop\.Order has not been saved"):
        take.defer(Order(), [])
    drain(concurrency=1)
    assert seen[0][:3] == ("Anna", "Yes", "<b>")
    assert type(seen[0][2]) is SafeString
    assert seen[0][3]["deep"].customer == "Cid"
    assert seen[1] == "Anna"
    found = Job.objects.get(id=lost.id)
    assert (found.state, found.error) == ("failed", "DecodeError: the row shop.Order 2 has gone")


@pytest.mark.long
def test_a_supervisor_and_processes_have_the_project(app: DjangoApp, shop: str) -> None:
    jobs = [app.defer("shop.tasks.count_letters") for _ in range(4)]
    command = [sys.executable, str(PROJECT / "manage.py"), "pgdefer", "worker"]
    command += ["--processes", "2", "--drain"]
    done = subprocess.run(
        command, env=environment_of(shop), capture_output=True, check=False, cwd="/"
    )
    assert done.returncode == 0, done.stderr.decode()
    assert [job.result(10) for job in jobs] == [0] * 4


def test_the_command_reads_djangos_own_options(app: DjangoApp, shop: str) -> None:
    id = app.defer("a").id
    command = [sys.executable, str(PROJECT / "manage.py"), "pgdefer", "job", "ls", "--json"]
    command += ["--settings", "shop.settings", "--pythonpath=.", "--noreload"]
    done = subprocess.run(command, env=environment_of(shop), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert [job["id"] for job in json.loads(done.stdout)] == [id]


def restart(server: EmbeddedServer) -> None:
    """Stop it as an operator does, and start it."""
    pid = server.status().pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)
    while server.status().pid is not None:
        time.sleep(0.01)
    server.ensure_running()


@pytest.mark.long
def test_no_job_fails_for_a_restart_of_the_server(
    server: EmbeddedServer, app: DjangoApp, monkeypatch: pytest.MonkeyPatch
) -> None:
    with temporary_server(durable=True) as own:
        create_database(own, "restart")
        install(own, "restart")
        with psycopg.connect(own.dsn("restart"), autocommit=True) as opened:
            opened.execute(
                "create table shop_order (id bigint generated always as identity,"
                " customer text, total int, state text)"
            )
        use(own, "restart")
        monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", None)
        from pgdefer.contrib.django import app

        app.client._registered.clear()

        @app.task(name="write_once", transactional=True)
        def write_once() -> None:
            order()

        @app.task(name="write_twice")
        def write_twice() -> None:
            order()

        async def run() -> None:
            worker = Worker(app, concurrency=4)
            running = asyncio.create_task(worker.run_async())
            for number in range(1, 3):
                if number > 1:
                    await asyncio.to_thread(restart, own)
                await asyncio.to_thread(defer_some)
                async with asyncio.timeout(120):
                    while worker.finished < number * 8:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            worker.stop()
            await running

        def defer_some() -> None:
            from pgdefer.contrib.django.connections import renew_connections

            renew_connections()
            for _ in range(4):
                write_once.defer()
                write_twice.defer()
            connections.close_all()

        asyncio.run(run())
        assert states() == ["succeeded"] * 16
        assert failures() == []
        assert Order.objects.count() == 16
        app.close()
        use(server, "django")
