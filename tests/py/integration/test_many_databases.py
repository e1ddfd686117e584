"""One worker process for many databases, each with a server's own jobs."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import prometheus_client
import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families
from psycopg.conninfo import make_conninfo

from pgdefer import App, JobEvent, MultiWorker, PgDeferError, current_job
from pgdefer.cli import Exit
from pgdefer.contrib import prometheus
from pgdefer.database.connection import ConnectionLost
from pgdefer.database.sql import FETCH, Statement
from pgdefer.worker import turnstile
from pgdefer.worker.heartbeat import Heartbeat
from pgdefer.worker.listener import OnlyConnection
from pgdefer.worker.shared_slots import DatabaseSlots, SharedSlots
from support import install

from .conftest import Tenants, until

pytestmark = pytest.mark.client


def name_of(dsn: str) -> str:
    return psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]  # type: ignore[return-value]


def states(dsn: str) -> dict[str, int]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        rows = connection.execute("select state, count(*) from queue.jobs group by 1").fetchall()
        broken = connection.execute("select * from queue.check()").fetchall()
    assert not broken
    return dict(rows)


@contextlib.asynccontextmanager
async def working(app: App, dsns: Any, **options: Any) -> AsyncIterator[MultiWorker]:
    worker = MultiWorker(app, dsns, **options)
    task = asyncio.create_task(worker.run_async())
    try:
        yield worker
    finally:
        worker.stop()
        async with asyncio.timeout(120):
            await task


async def registered(worker: MultiWorker, *dsns: str) -> None:
    def all_are() -> bool:
        names = {
            name.rpartition("/")[2] for name, one in worker.workers.items() if one.id is not None
        }
        return names == {name_of(dsn) for dsn in dsns}

    await until(all_are)


async def test_each_database_is_told_the_memory_of_the_process(dsns: list[str]) -> None:
    def told() -> set[int | None]:
        found = set()
        for dsn in dsns:
            with psycopg.connect(dsn, autocommit=True) as connection:
                found |= {row[0] for row in connection.execute("select memory from queue.workers")}
        return found

    async with working(App(), dsns, heartbeat_every=0.2) as worker:
        await registered(worker, *dsns)
        await until(lambda: None not in told())
        assert all(memory and memory > 1 << 20 for memory in told())


async def test_each_job_runs_once_and_in_its_own_database(dsns: list[str]) -> None:
    app = App()
    ran: collections.Counter[tuple[str, str, str]] = collections.Counter()

    @app.task
    async def child(parent: str, via: str) -> None:
        ran[name_of(current_job().dsn), parent, via] += 1

    @app.task
    async def coroutine(home: str, n: int) -> None:
        ran[name_of(current_job().dsn), home, f"coroutine {n}"] += 1
        await child.defer_async(home, f"coroutine {n}")

    @app.task
    def function(home: str, n: int) -> None:
        ran[name_of(current_job().dsn), home, f"function {n}"] += 1
        child.defer(home, f"function {n}")
        app.defer(child.name, {"parent": home, "via": f"app {n}"})

    @app.task(transactional=True)
    def transaction(connection: psycopg.Connection[Any], home: str) -> None:
        row = connection.execute("select current_database()").fetchone()
        assert row is not None
        ran[row[0], home, "transaction"] += 1

    homes = [name_of(dsn) for dsn in dsns]
    for dsn in dsns:
        tenant = app.bind(dsn)
        with tenant.active():
            home = name_of(dsn)
            coroutine.defer_many([{"home": home, "n": n} for n in range(20)])
            function.defer_many([{"home": home, "n": n} for n in range(20)])
            transaction.defer(home)
        tenant.close()
    # in this thread, so that it ends the process's main loop too
    await MultiWorker(app, dsns, drain=True).run_async()
    expected = {
        (home, home, what)
        for home in homes
        for n in range(20)
        for what in (f"coroutine {n}", f"function {n}", f"app {n}", "transaction")
    }
    assert set(ran) == expected
    counts = {key: 2 for key in expected if key[2].startswith(("coroutine", "function"))}
    assert dict(ran) == {key: counts.get(key, 1) for key in expected}
    for dsn in dsns:
        assert states(dsn) == {"succeeded": 101}


async def test_jobs_that_follow_each_other_share_connections(dsns: list[str]) -> None:
    app = App(dsns[0])
    sessions: set[int] = set()

    @app.task(transactional=True)
    async def transaction(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute("select")
        sessions.add(connection.info.backend_pid)

    await transaction.defer_many_async([{}] * 200)
    await MultiWorker(app, dsns, drain=True, concurrency=5).run_async()
    assert states(dsns[0]) == {"succeeded": 200}
    assert len(sessions) < 20


async def test_an_idle_database_has_one_connection(dsns: list[str], tenants: Tenants) -> None:
    app = App()
    done: set[str] = set()

    @app.task
    def task() -> None:
        app.get(other.name).defer()
        done.add(name_of(current_job().dsn))

    @app.task
    async def other() -> None:
        done.add(f"{name_of(current_job().dsn)} too")

    async with working(app, dsns, concurrency=1, heartbeat_every=0.5, dead_after=30) as worker:
        await registered(worker, *dsns)
        await until(lambda: tenants.connections() == 3)
        for dsn in dsns:
            tenant = app.bind(dsn)
            with tenant.active():
                task.defer()
            tenant.close()
        await until(lambda: len(done) == 6)
        # One database, that had jobs last, keeps its handlers' connections.
        await until(lambda: tenants.connections() <= 4)
        ids = {name: one.id for name, one in worker.workers.items()}
        beats = {name: one.heartbeat.beat_at for name, one in worker.workers.items()}
        await until(
            lambda: all(one.heartbeat.beat_at > beats[name] for name, one in worker.workers.items())
        )
        assert tenants.connections() <= 4
        assert {name: one.id for name, one in worker.workers.items()} == ids
    await until(lambda: tenants.connections() == 0)


def defer_in(app: App, dsn: str, task: Any, calls: list[dict[str, Any]]) -> None:
    tenant = app.bind(dsn)
    with tenant.active():
        task.defer_many(calls)
    tenant.close()


def backends(watching: psycopg.Connection[Any], dsn: str) -> list[int]:
    rows = watching.execute(
        "select pid from pg_stat_activity where datname = %s", [name_of(dsn)]
    ).fetchall()
    return [pid for (pid,) in rows]


def resume(stopped: list[int]) -> None:
    while stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(stopped.pop(), signal.SIGCONT)


async def test_a_database_that_hangs_keeps_no_other_waiting(
    dsns: list[str], tenants: Tenants
) -> None:
    app = App()
    ran: collections.Counter[tuple[str, int]] = collections.Counter()
    hanging = threading.Event()

    @app.task
    def follow(n: int) -> None:
        ran[name_of(current_job().dsn), 1000 + n] += 1

    @app.task
    def task(n: int) -> None:
        home = name_of(current_job().dsn)
        ran[home, n] += 1
        if home == "tenant_c":
            hanging.wait(60)
            follow.defer(n)

    stopped: list[int] = []
    watching = psycopg.connect(tenants.dsn("postgres"), autocommit=True)
    with watching, contextlib.ExitStack() as finally_:
        finally_.callback(resume, stopped)
        async with working(app, dsns, concurrency=4) as worker:
            await registered(worker, *dsns)
            defer_in(app, dsns[2], task, [{"n": n} for n in range(8)])
            await until(lambda: len(ran) == 2)  # half of the slots
            stopped += backends(watching, dsns[2])
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            hanging.set()
            for dsn in dsns[:2]:
                defer_in(app, dsn, task, [{"n": n} for n in range(50)])
            names = [name_of(dsn) for dsn in dsns]
            await until(lambda: sum(home in names[:2] for home, _ in ran) == 100)
            resume(stopped)
            await until(lambda: sum(home == names[2] for home, _ in ran) == 16)
    assert set(ran.values()) == {1}
    assert [states(dsn) for dsn in dsns] == [{"succeeded": n} for n in (50, 50, 16)]


async def test_one_that_refuses_connections_comes_back(
    dsns: list[str], tenants: Tenants, caplog: pytest.LogCaptureFixture
) -> None:
    app = App()
    ran: collections.Counter[tuple[str, int]] = collections.Counter()

    @app.task
    async def task(n: int) -> None:
        ran[name_of(current_job().dsn), n] += 1

    secret = [make_conninfo(dsn, password="secret") for dsn in dsns]
    with psycopg.connect(tenants.dsn("postgres"), autocommit=True) as watching:
        async with working(app, secret) as worker:
            await registered(worker, *dsns)
            for dsn in dsns:
                defer_in(app, dsn, task, [{"n": n} for n in range(20)])
            watching.execute("alter database tenant_c allow_connections false")
            watching.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = 'tenant_c'"
            )
            for dsn in dsns[:2]:
                defer_in(app, dsn, task, [{"n": 100 + n} for n in range(20)])
            await until(lambda: sum(home != "tenant_c" for home, _ in ran) == 80)
            watching.execute("alter database tenant_c allow_connections true")
            defer_in(app, dsns[2], task, [{"n": 100}])
            await until(lambda: ran["tenant_c", 100])
            await until(lambda: all(states(dsn).keys() == {"succeeded"} for dsn in dsns))
    # A job whose claim was lost on the way may run again, but only in the database that was cut.
    assert {count for (home, _), count in ran.items() if home != "tenant_c"} == {1}
    said = [record.getMessage() for record in caplog.records]
    assert any("/tenant_c: the connection was lost" in text for text in said)
    assert not any("/tenant_a: the connection was lost" in text for text in said)
    assert "secret" not in "\n".join(said)


async def test_records_of_jobs_name_the_database(
    dsns: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "pgdefer.job")
    app = App()

    @app.task
    async def coroutine() -> None: ...

    @app.task
    def function() -> None: ...

    def named() -> list[tuple[str, str]]:
        return sorted(
            (record.task.rpartition(".")[2], getattr(record, "database", "").rpartition("/")[2])  # type: ignore[attr-defined]
            for record in caplog.records
            if record.name == "pgdefer.job"
        )

    async with working(app, dsns):
        for dsn in dsns[:2]:
            for task in (coroutine, function):
                defer_in(app, dsn, task, [{}])
        await until(lambda: len(named()) == 4)
    assert named() == [
        (task, home) for task in ("coroutine", "function") for home in ("tenant_a", "tenant_b")
    ]


async def test_a_session_that_may_not_listen(
    dsns: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker polls."""
    app, (dsn, *_) = App(), dsns

    @app.task
    async def task() -> None: ...

    cuts = []
    real = OnlyConnection.call

    async def call(self: OnlyConnection, statement: Statement, **given: Any) -> Any:
        if statement is FETCH and not cuts:
            cuts.append(statement)
            self.close()
            raise ConnectionLost("cut")
        return await real(self, statement, **given)

    async def listen(*_: Any) -> None:
        raise psycopg.errors.LockNotAvailable("not now")

    async with working(app, [dsn]) as worker:
        await registered(worker, dsn)
        (one,) = worker.workers.values()
        await until(lambda: one.listener.is_first and one.state.is_waiting)
        monkeypatch.setattr(OnlyConnection, "listen", listen)
        monkeypatch.setattr(OnlyConnection, "call", call)
        defer_in(app, dsn, task, [{}])
        await until(lambda: states(dsn) == {"succeeded": 1})
        assert list(worker.workers.values()) == [one]
    assert "the worker polls: not now" in caplog.text
    assert "no jobs are run there" not in caplog.text


async def test_databases_that_cannot_be_served(
    dsns: list[str], tenants: Tenants, caplog: pytest.LogCaptureFixture
) -> None:
    app = App()
    ran: list[str] = []

    @app.task(name="task")
    async def task() -> None:
        ran.append(name_of(current_job().dsn))

    blank = tenants.new("tenant_blank", template="template1")
    missing = tenants.dsn("tenant_missing")
    nowhere = "postgresql://somebody:secret@127.0.0.1:1/nowhere"
    everywhere = [blank, missing, nowhere, dsns[0], f"{dsns[0]} connect_timeout=5"]
    async with working(app, everywhere, http="127.0.0.1:0") as worker:
        await registered_some(worker, dsns[0])
        defer_in(app, dsns[0], task, [{}])
        await until(lambda: ran == ["tenant_a"])
        ready = await asyncio.to_thread(answer, worker)
        first, *others = ready.splitlines()
        assert first == "1 of 4 databases are served"
        assert "127.0.0.1:1/nowhere: not registered, or stopping" in others
        assert "secret" not in ready
        await asyncio.to_thread(install, tenants.server, "tenant_blank")
        defer_in(app, blank, task, [{}])
        await until(lambda: ran == ["tenant_a", "tenant_blank"])
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "/tenant_a is listed twice, and served once" in said
    assert "/tenant_blank: no jobs are run there: " in said
    assert "/tenant_missing: no jobs are run there: " in said
    assert "127.0.0.1:1/nowhere: no connection yet: " in said
    assert "secret" not in said
    with pytest.raises(PgDeferError, match=r"1 databases could not be drained: .*/tenant_missing"):
        await MultiWorker(app, [missing, dsns[0]], drain=True).run_async()


async def test_a_silent_server_keeps_no_other_waiting(
    dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turnstile, "PATIENCE", 600)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        port = silent.getsockname()[1]
        lost = [
            make_conninfo("connect_timeout=600", host="127.0.0.1", port=port, dbname=f"lost_{n}")
            for n in range(80)
        ]
        async with working(App(), [*lost, dsns[0]]) as worker:
            await registered_some(worker, dsns[0])
            worker.stop()
            silent.close()


async def registered_some(worker: MultiWorker, dsn: str) -> None:
    name = name_of(dsn)
    await until(
        lambda: any(
            one.id is not None for on, one in worker.workers.items() if on.endswith(f"/{name}")
        )
    )


def answer(worker: MultiWorker, path: str = "/readyz") -> str:
    assert worker.probes is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{worker.probes.port}{path}") as answered:
        return str(answered.read().decode())


async def test_metrics_have_the_queues_of_each_database(
    dsns: list[str],
    tenants: Tenants,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that are down or slow are missing, and keep no scrape waiting."""
    app = App()
    registry = prometheus_client.CollectorRegistry()
    prometheus.instrument(app, registry=registry, queues=True)
    for n, dsn in enumerate(dsns, 1):
        with contextlib.closing(app.bind(dsn)) as tenant:
            tenant.defer_many([tenant.prepare("waits", queue="other")] * n)
    nowhere = "postgresql://somebody:secret@127.0.0.1:1/nowhere"

    async def scraped(worker: MultiWorker) -> dict[str, tuple[float, set[str]]]:
        """Return how many jobs are ready in each database, and what other figures it has."""
        text = await asyncio.to_thread(answer, worker, "/metrics")
        assert "secret" not in text
        assert text.count("# TYPE pgdefer_jobs gauge") == 1
        ready, others = {}, collections.defaultdict(set)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.labels.get("state") == "ready":
                    ready[sample.labels["database"].rpartition("/")[2]] = sample.value
                elif "database" in sample.labels and "state" not in sample.labels:
                    others[sample.labels["database"].rpartition("/")[2]].add(sample.name)
        return {name: (count, others[name]) for name, count in ready.items()}

    figures = {"pgdefer_oldest_ready_seconds", "pgdefer_worker_memory_bytes"}
    a, b, c = ((f"tenant_{letter}", (n, figures)) for n, letter in enumerate("abc", 1))
    served = [nowhere, *dsns]
    async with working(app, served, queues=["q"], http="127.0.0.1:0", heartbeat_every=0.2) as one:
        await until(lambda: one.probes)
        async with asyncio.timeout(300):
            while await scraped(one) != dict([a, b, c]):
                pass  # workers register, and heartbeats come, beside it
        assert "the metrics lack" not in caplog.text
        monkeypatch.setattr(prometheus, "STATEMENT_TIMEOUT", "600s")
        with psycopg.connect(dsns[2]) as holder:
            holder.execute("lock table queue.job_override in access exclusive mode")
            assert await scraped(one) == dict([a, b])
            lacking = "/tenant_c: the metrics lack figures from the database: no answer within"
            assert caplog.text.count("the metrics lack") == caplog.text.count(lacking) == 1
        assert await scraped(one) == dict([a, b, c])
        await until(lambda: tenants.connections() == 3)  # those of the scrapes are closed
    assert app.databases is None


async def test_databases_come_and_go_with_the_file(
    dsns: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app = App()
    ran: list[str] = []
    release = asyncio.Event()

    @app.task
    async def task() -> None:
        ran.append(name_of(current_job().dsn))
        if ran[-1] == "tenant_b":
            await release.wait()

    file = tmp_path / "tenants"
    file.write_text(f"# ours\n{dsns[0]}\n\n  {dsns[1]}  \nnonsense\n")
    async with working(app, file) as worker:
        await registered(worker, *dsns[:2])
        for dsn in dsns:
            defer_in(app, dsn, task, [{}])
        await until(lambda: sorted(ran) == ["tenant_a", "tenant_b"])
        file.write_text(f"{dsns[0]}\n{dsns[2]}\n")
        await until(lambda: sorted(ran) == ["tenant_a", "tenant_b", "tenant_c"])
        release.set()  # what runs there may end
        await registered(worker, dsns[0], dsns[2])
        file.unlink()
        file.write_text(f"{dsns[1]}\n")
        await registered(worker, dsns[1])
    assert [states(dsn) for dsn in dsns] == [{"succeeded": 1}] * 3
    assert any("line 5: the DSN can't be read" in r.getMessage() for r in caplog.records)


async def test_a_database_whose_dsn_changes_does_not_wait_for_its_jobs(
    dsns: list[str], tmp_path: Path
) -> None:
    app = App()
    begun, release = asyncio.Event(), asyncio.Event()
    ran = []

    @app.task
    async def task(n: int) -> None:
        ran.append(n)
        if n == 0:
            begun.set()
            await release.wait()

    file = tmp_path / "tenants"
    file.write_text(dsns[0])
    async with working(app, file) as worker:
        defer_in(app, dsns[0], task, [{"n": 0}])
        await begun.wait()
        (old,) = worker.workers.values()
        file.write_text(f"{dsns[0]} connect_timeout=7")
        await until(lambda: old.state.is_stopping)
        defer_in(app, dsns[0], task, [{"n": 1}])
        await until(lambda: worker.finished == 1)
        assert ran == [0, 1]
        file.write_text("# none")
        release.set()
        await until(lambda: worker.finished == 2)
    assert states(dsns[0]) == {"succeeded": 2}


async def test_slots_go_round(dsns: list[str]) -> None:
    app = App()
    began: list[str] = []
    now: collections.Counter[str] = collections.Counter()
    most: collections.Counter[str] = collections.Counter()

    @app.task
    async def task(n: int) -> None:
        home = name_of(current_job().dsn)
        began.append(home)
        now[home] += 1
        now["all"] += 1
        for key in (home, "all"):
            most[key] = max(most[key], now[key])
        await asyncio.sleep(0.02)
        now[home] -= 1
        now["all"] -= 1

    defer_in(app, dsns[0], task, [{"n": n} for n in range(60)])
    for dsn in dsns[1:]:
        defer_in(app, dsn, task, [{"n": n} for n in range(10)])
    await MultiWorker(app, dsns, concurrency=3, per_database=2, drain=True).run_async()
    assert collections.Counter(began) == {"tenant_a": 60, "tenant_b": 10, "tenant_c": 10}
    assert (most["all"], most["tenant_a"]) == (3, 2)
    # The small ones do not wait for the large one, which has half of the slots or more.
    for home in ("tenant_b", "tenant_c"):
        last = max(at for at, name in enumerate(began) if name == home)
        assert began[:last].count("tenant_a") < 55


async def test_what_may_be_asked_for_may_change_at_any_moment(
    dsns: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    app = App()
    ran: list[str] = []
    batch = SharedSlots._batch
    looks: collections.Counter[DatabaseSlots] = collections.Counter()

    def once(shared: SharedSlots, share: DatabaseSlots, *, is_busy: bool) -> int:
        looks[share] += 1
        return 0 if looks[share] == 2 else batch(shared, share, is_busy=is_busy)

    @app.task
    async def task() -> None:
        ran.append(name_of(current_job().dsn))

    def is_refused() -> bool:
        return any("trying again" in record.getMessage() for record in caplog.records)

    monkeypatch.setattr(SharedSlots, "_batch", once)
    for dsn in dsns:
        defer_in(app, dsn, task, [{}])
    async with working(app, dsns):
        await until(lambda: len(ran) == 3 or is_refused())
    assert sorted(ran) == [name_of(dsn) for dsn in dsns]


async def test_a_dropped_database_keeps_no_worker(
    dsns: list[str],
    tenants: Tenants,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One that was removed from the file, and one from which the process is stopped."""
    app = App()
    begun: list[str] = []
    release = asyncio.Event()

    @app.task
    async def task() -> None:
        begun.append(name_of(current_job().dsn))
        await release.wait()

    file = tmp_path / "tenants"
    file.write_text("\n".join(dsns))
    monkeypatch.setattr(Heartbeat, "is_overdue", False)
    async with working(app, file) as worker:
        for dsn in dsns[:2]:
            defer_in(app, dsn, task, [{}])
        await until(lambda: len(begun) == 2)
        tenants.close()
        file.write_text("\n".join(dsns[1:]))
        await until(lambda: worker._leaving)
        release.set()
        await until(lambda: worker.finished == 2)
        caplog.clear()
        await until(lambda: said(caplog, '"tenant_a" does not exist'))
        assert worker._leaving
        monkeypatch.setattr(Heartbeat, "is_overdue", True)
        await until(lambda: not worker._leaving)
        assert len(said(caplog, "outcomes that could not be reported: 1")) == 1
    assert len(said(caplog, "outcomes that could not be reported: 1")) == 2


def said(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message for message in messages if text in message]


async def test_handlers_that_outlive_their_worker_leave_threads_to_others(
    dsns: list[str], tmp_path: Path
) -> None:
    app = App()
    has_begun, may_end = threading.Event(), threading.Event()
    others: list[str] = []

    @app.task(name="hang")
    def hang() -> None:
        has_begun.set()
        may_end.wait()

    @app.task(name="other")
    def other() -> None:
        others.append(name_of(current_job().dsn))

    first, second, _ = dsns
    file = tmp_path / "tenants"
    file.write_text(f"{first}\n{second}\n")
    with contextlib.closing(app.bind(first)) as tenant:
        tenant.defer("hang")
    try:
        async with working(app, file, concurrency=1, shutdown_timeout=0.1) as worker:
            await until(has_begun.is_set)
            file.write_text(f"{second}\n")
            await until(lambda: worker.given_back == 1)
            with contextlib.closing(app.bind(second)) as tenant:
                tenant.defer("other")
            await until(lambda: others, 60)
    finally:
        may_end.set()
    assert others == [name_of(second)]
    assert states(first) == {"ready": 1}


async def test_what_handlers_start_knows_its_database(dsns: list[str]) -> None:
    app = App()
    said: list[str] = []

    @app.task(name="later")
    async def later(from_: str) -> None:
        said.append(f"{from_} {name_of(current_job().dsn)}")

    @app.task(name="starts")
    def starts() -> None:
        refused: list[str] = []

        def bare() -> None:
            try:
                later.defer("bare")
            except RuntimeError as error:
                refused.append(str(error))

        threads = [
            threading.Thread(target=bare),
            threading.Thread(target=contextvars.copy_context().run, args=(later.defer, "copied")),
        ]
        for thread in threads:
            thread.start()
            thread.join()
        assert "no job says here which one is meant" in refused[0]
        raise ValueError("no")

    @app.on("exhausted")
    def on_exhausted(event: JobEvent) -> None:
        later.defer(f"hook of {name_of(event.job.dsn)}")

    for dsn in dsns:
        defer_in(app, dsn, starts, [{}])
    async with working(app, dsns):
        await until(lambda: len(said) == 6)
    names = [name_of(dsn) for dsn in dsns]
    assert sorted(said) == sorted(
        [f"copied {name}" for name in names] + [f"hook of {name} {name}" for name in names]
    )
    with pytest.raises(ValueError, match="DSN"):
        MultiWorker(app, ["nonsense"])
    with pytest.raises(ValueError, match="dsns is empty"):
        MultiWorker(app, [])
    with pytest.raises(ValueError, match="takes no option max_jobs"):
        MultiWorker(app, dsns, max_jobs=1)
    with pytest.raises(ValueError, match="per_database must be from 1 to concurrency"):
        MultiWorker(app, dsns, concurrency=2, per_database=3)


async def test_a_running_job_is_aborted_at_once(dsns: list[str]) -> None:
    app = App()
    ended = asyncio.Event()

    @app.task(name="waits")
    async def waits() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with working(app, dsns, heartbeat_every=100, dead_after=300) as worker:
        await registered(worker, *dsns)
        tenant = app.bind(dsns[1])
        job = await tenant.defer_async("waits")
        await until(lambda: any(one.executor.running for one in worker.workers.values()))
        await job.cancel_async(abort=True)
        async with asyncio.timeout(60):
            await ended.wait()
        await until(lambda: states(dsns[1]) == {"cancelled": 1})
        await tenant.close_async()


APP = """
from pgdefer import App, current_job

app = App()

@app.task(name="says")
def says() -> None:
    name = current_job().dsn.partition("dbname=")[2].split()[0]
    print(f"in {name}\\n", end="", flush=True)  # whole: two threads print
"""


def test_the_command_line(dsns: list[str], tenants: Tenants, tmp_path: Path) -> None:
    (tmp_path / "many.py").write_text(APP)
    app = App()
    for dsn in dsns:
        tenant = app.bind(dsn)
        tenant.defer("says")
        tenant.close()
    env = {name: value for name, value in os.environ.items() if not name.startswith("PG")}

    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pgdefer", "worker", "-A", "many", *options]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env
        )

    secret = [make_conninfo(dsn, password="secret") for dsn in dsns]
    done = run("--dsn", secret[0], "--dsn", secret[1], "--drain", "--log-format", "json")
    assert (done.returncode, sorted(done.stdout.splitlines())) == (
        0,
        ["in tenant_a", "in tenant_b"],
    )
    records = [json.loads(line) for line in done.stderr.splitlines()]
    served = {record["database"] for record in records if " serves " in record["message"]}
    assert {name.rpartition("/")[2] for name in served} == {"tenant_a", "tenant_b"}
    assert "secret" not in done.stderr

    (tmp_path / "tenants").write_text(f"\ufeff{dsns[2]}\n{tenants.dsn('tenant_missing')}\n")
    env["PGDEFER_LISTEN_DSN"] = "dbname=nowhere"
    done = run("--dsns", "tenants", "--drain")
    assert (done.returncode, done.stdout) == (Exit.ERROR, "in tenant_c\n")
    assert "1 databases could not be drained: " in done.stderr

    for single in (("--processes", "2"), ("--listen-dsn", dsns[0])):
        done = run("--dsns", "tenants", *single)
        assert (done.returncode, done.stderr) == (
            Exit.USAGE,
            "pgdefer: --processes, --pgbouncer and --listen-dsn are for one database.\n",
        )
    done = run("--dsn", dsns[0], "--per-database", "2")
    assert done.returncode == Exit.USAGE
    assert "--per-database is for many databases" in done.stderr


async def test_a_cancel_while_it_ends_does_not_leave_it_half_ended(
    dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads and its probes end, too, and its caller gets the cancel."""
    app = App()
    worker = MultiWorker(app, dsns[:1], http="127.0.0.1:0")
    working = asyncio.create_task(worker.run_async())
    await registered(worker, dsns[0])
    closing, goes_on = asyncio.Event(), threading.Event()
    assert worker.probes is not None
    loop, real = asyncio.get_running_loop(), worker.probes.close

    def close() -> None:
        loop.call_soon_threadsafe(closing.set)
        goes_on.wait()
        real()

    monkeypatch.setattr(worker.probes, "close", close)
    working.cancel()
    await closing.wait()
    working.cancel()
    goes_on.set()
    with pytest.raises(asyncio.CancelledError):
        await working
    await until(lambda: not worker._shared.heartbeats._thread.is_alive(), 60)
