"""Moving in jobs, from tables as Procrastinate 3 and Solid Queue make them, and a table `tasks`."""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import threading
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from pgdefer.codec import Codec

from .command_line import Run, run
from .conftest import Jobs, until

__all__ = ["run"]

pytestmark = pytest.mark.client

TABLES = """
create type procrastinate_job_status as enum (
  'todo', 'doing', 'succeeded', 'failed', 'cancelled', 'aborting', 'aborted');
create table procrastinate_jobs (
  id bigserial primary key,
  queue_name varchar(128) not null,
  task_name varchar(128) not null,
  priority integer default 0 not null,
  lock text,
  queueing_lock text,
  args jsonb default '{}' not null,
  status procrastinate_job_status default 'todo' not null,
  scheduled_at timestamptz,
  attempts integer default 0 not null,
  abort_requested boolean default false not null,
  worker_id bigint
);
insert into procrastinate_jobs (queue_name, task_name, priority, lock, queueing_lock, args, status,
  scheduled_at, attempts)
values
  ('mail', 'plain', 0, null, null, '{"a": {"b": null}}', 'todo', null, 0),
  ('mail', 'urgent', 7, null, null, '{}', 'todo', null, 2),
  ('mail', 'later', 0, null, null, '{}', 'todo', '2999-01-01 00:00+00', 0),
  ('mail', 'first', 0, 'l', null, '{}', 'todo', null, 0),
  ('mail', 'second', 9, 'l', null, '{}', 'todo', null, 0),
  ('mail', 'runs', 0, 'held', null, '{}', 'doing', null, 1),
  ('mail', 'behind', 0, 'held', null, '{}', 'todo', null, 0),
  ('mail', 'once', 0, '{{a}', '{b}', '{"b": 1}', 'todo', null, 0),
  ('mail', 'done', 0, null, null, '{}', 'succeeded', null, 1);
"""


def test_times_that_never_come(run: Run, conn: psycopg.Connection, jobs: Jobs) -> None:
    conn.execute(TABLES)
    conn.execute("delete from procrastinate_jobs")
    conn.execute("""select queue.register_task(t, '{"held": true, "delay": "1 h"}')
        from unnest(array['now', 'never']) t""")
    conn.execute(
        "insert into procrastinate_jobs (queue_name, task_name, scheduled_at)"
        " select 'mail', 'now', t::timestamptz"
        " from unnest(array['-infinity', '4000-01-01 BC', '0001-01-01 00:00+00']) t"
        " union all select 'mail', 'never', t::timestamptz"
        " from unnest(array['infinity', '10000-01-01 00:00+00']) t"
        " union all select 'mail', 'later', '9999-12-31 23:00+00'"
    )
    assert run("move-in", "procrastinate", "--json").json["scheduled"] == 3
    expected = {("now", "ready"), ("never", "held"), ("later", "scheduled")}
    assert {(row["task"], row["state"]) for row in jobs()} == expected
    (later,) = (row["scheduled_at"] for row in jobs() if row["task"] == "later")
    assert later.astimezone(dt.UTC).isoformat() == "9999-12-31T23:00:00+00:00"


def test_moving_in(run: Run, conn: psycopg.Connection, jobs: Jobs) -> None:
    conn.execute(TABLES)
    conn.execute("select queue.defer('once', queueing_lock => 'q')")
    # a task's key applies to what is deferred from now on
    conn.execute("select queue.register_task('first', '{\"idempotency_key\": \"k\"}')")
    conn.execute("select queue.defer('first'), queue.register_task('first', '{}')")
    conn.execute("select queue.delete(array[id]) from queue.jobs where task = 'first'")
    conn.execute("select queue.register_task('first', '{\"idempotency_key\": \"k\"}')")
    expected = {"moved": 6, "locked": 3, "scheduled": 1, "behind": 1, "running": 1}
    assert run("move-in", "procrastinate", "--dry-run", "--json").json == expected
    assert len(jobs()) == 1
    assert run("move-in", "procrastinate", "--json").json == expected
    rows = {row["task"]: row for row in jobs()}
    assert rows.keys() == {"plain", "urgent", "later", "first", "second", "once"}
    assert rows["plain"]["args"] == {"a": {"b": None}}
    assert (rows["urgent"]["priority"], rows["urgent"]["queue"]) == (7, "mail")
    assert rows["urgent"]["headers"] == {"procrastinate": {"id": 2, "attempts": 2}}
    assert rows["later"]["state"] == "scheduled"
    assert rows["first"]["lock"] == rows["second"]["lock"] == "l"
    assert rows["first"]["id"] < rows["second"]["id"]
    assert (rows["once"]["lock"], rows["once"]["queueing_lock"]) == ("{{a}", "{b}"), "no templates"
    left = conn.execute(
        "select task_name, status::text from procrastinate_jobs where status <> 'cancelled'"
        " order by id"
    ).fetchall()
    assert left == [("runs", "doing"), ("behind", "todo"), ("done", "succeeded")]
    conn.execute("update procrastinate_jobs set status = 'succeeded' where task_name = 'runs'")
    again = run("move-in", "procrastinate")
    assert again.out.startswith("1 waiting jobs moved\n")


def test_many_are_moved(run: Run, conn: psycopg.Connection) -> None:
    conn.execute(TABLES)
    conn.execute("delete from procrastinate_jobs")
    conn.execute(
        "insert into procrastinate_jobs (queue_name, task_name, lock)"
        " select 'q', 't', 'l' || n % 10 from generate_series(1, 2500) n"
    )
    assert run("move-in", "procrastinate", "--json").json["moved"] == 2500
    wrong = conn.execute(
        "select count(*) from (select lock, (headers #>> '{procrastinate,id}')::bigint"
        " - lag((headers #>> '{procrastinate,id}')::bigint) over (partition by lock order by id)"
        " as step from queue.jobs) s where step <= 0"
    ).fetchone()
    assert wrong == (0,)


@pytest.mark.parametrize("origin", ["procrastinate", "tasks", "solid-queue"])
def test_tables_that_are_not_here(run: Run, origin: str) -> None:
    done = run("move-in", origin)
    assert done.code == 1
    assert f"the tables of {origin} are not here: relation" in done.err
    assert "pgdefer install" not in done.err


def test_a_row_that_is_refused(run: Run, conn: psycopg.Connection, jobs: Jobs) -> None:
    conn.execute(TABLES)
    conn.execute("update procrastinate_jobs set args = '[1]' where task_name = 'second'")
    conn.execute(
        "create table tasks (id bigserial, task_type text, payload jsonb, status text,"
        " priority int, retries int, max_retries int, finished_at timestamptz, error text)"
    )
    conn.execute(
        "insert into tasks select n, 'a', case n when 3 then '[1]' else '{}' end::jsonb, 'pending',"
        " 0, 0, 3 from generate_series(0, 9) n"
    )
    for origin, id in (("procrastinate", 5), ("tasks", 3)):
        done = run("move-in", origin)
        assert (done.code, done.out) == (2, "")
        assert f"the row with id {id} can't be moved: args must be a JSON object" in done.err
    assert not jobs()
    conn.execute("delete from tasks where id = 3")
    assert run("move-in", "tasks", "--json").json["moved"] == 9


@pytest.mark.parametrize(
    ("columns", "lacks"),
    [
        (
            "id uuid not null, task_type text, payload jsonb, priority int",
            "id bigint not null, status, retries, max_",
        ),
        ("id bigint, task_type text", "id bigint not null, payload, status, priority, "),
    ],
)
def test_another_table_of_tasks(
    run: Run, conn: psycopg.Connection, columns: str, lacks: str
) -> None:
    conn.execute(f"create table tasks ({columns})")
    done = run("move-in", "tasks")
    assert done.code == 1
    assert f"the table tasks lacks columns: {lacks}" in done.err


def test_ids_below_one(run: Run, conn: psycopg.Connection, jobs: Jobs) -> None:
    conn.execute(TABLES)
    conn.execute("update procrastinate_jobs set id = -id")
    assert run("move-in", "procrastinate", "--json").json["moved"] == 6
    conn.execute(SOLID)
    solid(conn, "job", "ready", id=0)
    assert run("move-in", "solid-queue", "--json").json["moved"] == 1
    assert len(jobs()) == 7


def test_a_table_of_tasks(run: Run, conn: psycopg.Connection, jobs: Jobs) -> None:
    conn.execute("""
        create table tasks (
          id bigserial primary key, task_type text not null, payload jsonb not null default '{}',
          status text not null default 'pending'
            check (status in ('pending', 'running', 'done', 'failed')),
          priority int not null default 0, created_at timestamptz not null default now(),
          started_at timestamptz, finished_at timestamptz, error text,
          retries int not null default 0, max_retries int not null default 3);
        insert into tasks (task_type, payload, status, priority, retries) values
          ('welcome', '{"user_id": 1, "name": null}', 'pending', 0, 0),
          ('upload', '{}', 'pending', 5, 2), ('upload', '{}', 'running', 0, 0),
          ('upload', '{}', 'failed', 0, 3)
    """)
    conn.execute(
        "update tasks set max_retries = 2147483647, retries = -1 where task_type = 'welcome'"
    )
    expected = {"moved": 2, "locked": 0, "scheduled": 0, "behind": 0, "running": 1}
    assert run("move-in", "tasks", "--dry-run", "--json").json == expected
    assert jobs() == []
    assert run("move-in", "tasks", "--json").json == expected
    welcome, upload = jobs()
    assert (welcome["task"], welcome["args"]) == ("welcome", {"user_id": 1, "name": None})
    assert (upload["priority"], upload["headers"]) == (5, {"tasks": {"id": 2, "retries": 2}})
    worker = conn.execute("select queue.register_worker('w')").fetchone()
    claimed = conn.execute("select id, claim from queue.fetch(%s, null, 2)", worker).fetchall()
    # as many attempts as it had left there
    ends = [conn.execute("select queue.fail(%s, %s, 'no')", one).fetchone() for one in claimed]
    assert ends == [("failed",), ("ready",)]
    left = conn.execute("select status from tasks order by id").fetchall()
    assert left == [("done",), ("done",), ("running",), ("failed",)]
    assert run("move-in", "tasks", "--json").json == expected | {"moved": 0}


# As Rails makes them in PostgreSQL: times in UTC, without saying so.
SOLID = """
create table solid_queue_jobs (
  id bigserial primary key, queue_name varchar not null, class_name varchar not null,
  arguments text, priority integer default 0 not null, active_job_id varchar,
  scheduled_at timestamp(6), finished_at timestamp(6), concurrency_key varchar,
  created_at timestamp(6) not null default (now() at time zone 'UTC'),
  updated_at timestamp(6) not null default (now() at time zone 'UTC'), batch_id bigint);
create table solid_queue_ready_executions (
  id bigserial primary key, job_id bigint not null unique references solid_queue_jobs
    on delete cascade, queue_name varchar not null default 'mail', priority integer default 0);
create table solid_queue_scheduled_executions (
  like solid_queue_ready_executions including all,
  scheduled_at timestamp(6) not null default '2999-01-01 12:00');
create table solid_queue_blocked_executions (
  like solid_queue_ready_executions including all, concurrency_key varchar not null default 'k',
  expires_at timestamp(6) not null default now());
create table solid_queue_claimed_executions (
  id bigserial primary key, job_id bigint not null unique references solid_queue_jobs,
  process_id bigint);
create table solid_queue_failed_executions (
  id bigserial primary key, job_id bigint not null unique references solid_queue_jobs, error text);
create table solid_queue_semaphores (
  id bigserial primary key, key varchar not null unique, value integer default 1 not null,
  expires_at timestamp(6) not null default now());
create table solid_queue_recurring_tasks (id bigserial primary key, key varchar not null unique);
create table solid_queue_pauses (id bigserial primary key, queue_name varchar not null unique);
insert into solid_queue_recurring_tasks (key) values ('morning');
insert into solid_queue_pauses (queue_name) values ('reports');
"""
AJ = "ActiveJob::Serializers::"


def solid(
    conn: psycopg.Connection, name: str, where: str, key: str | None = None, **columns: object
) -> int:
    """Add a job of Solid Queue, and its execution; return its id."""
    given = columns.pop("arguments", [])
    stored = {"job_class": name, "job_id": f"uuid of {name}", "locale": "en", "arguments": given}
    values = {"class_name": name, "queue_name": "mail", "arguments": json.dumps(stored)}
    values |= {"concurrency_key": key, **columns}
    names = ", ".join(values)
    marks = ", ".join(["%s"] * len(values))
    into = f"insert into solid_queue_jobs ({names}) values ({marks}) returning id"
    row = conn.execute(into.encode(), [*values.values()]).fetchone()
    assert row is not None
    if where:
        conn.execute(
            f"insert into solid_queue_{where}_executions (job_id) values (%s)".encode(), row
        )
    return int(row[0])


def test_solid_queue(run: Run, conn: psycopg.Connection, jobs: Jobs) -> None:
    conn.execute(SOLID)
    conn.execute("set timezone to 'Asia/Tokyo'")
    plain = solid(conn, "Shop::WelcomeJob", "ready", priority=3)
    later = solid(conn, "later", "scheduled")
    # Of a key with three slots, one is free.
    keyed = [solid(conn, f"k{n}", where, "three") for n, where in enumerate(("ready", "ready"))]
    conn.execute("insert into solid_queue_semaphores (key, value) values ('three', 1)")
    # Of a key with one slot, none is; the semaphore of another has expired.
    keyed.append(solid(conn, "ready", "ready", "one"))
    keyed.append(solid(conn, "blocked", "blocked", "one"))
    conn.execute("insert into solid_queue_semaphores (key, value) values ('one', 0)")
    keyed.append(solid(conn, "expired", "scheduled", "{x}"))
    runs = solid(conn, "runs", "claimed", "held")
    solid(conn, "behind", "blocked", "held")
    conn.execute("insert into solid_queue_semaphores (key, value) values ('held', 0)")
    solid(conn, "failed", "failed")
    solid(conn, "in a batch", "ready", "batch", batch_id=1)
    solid(conn, "beside a batch", "scheduled", "batch")
    solid(conn, "done", "", finished_at="2020-01-01")
    expected = {"moved": 7, "limited": 5, "scheduled": 2, "behind": 3, "running": 1}
    expected |= {"failed": 1, "recurring": 1, "paused": 1}
    assert run("move-in", "solid-queue", "--dry-run", "--json").json == expected
    assert jobs() == []
    assert run("move-in", "solid-queue", "--json").json == expected
    rows = jobs()
    assert [row["headers"]["solid_queue"]["id"] for row in rows] == [plain, later, *keyed]
    first, second, *limited = rows
    assert (first["task"], first["queue"], first["priority"]) == ("Shop::WelcomeJob", "mail", -3)
    assert first["args"] == {}
    assert first["headers"]["solid_queue"] == {
        "id": plain,
        "active_job_id": "uuid of Shop::WelcomeJob",
        "locale": "en",
    }
    assert second["state"] == "scheduled"
    assert str(second["scheduled_at"].astimezone(dt.UTC)) == "2999-01-01 12:00:00+00:00"
    assert [row["concurrency_key"] for row in limited] == [*["three"] * 2, *["one"] * 2, "{x}"]
    conn.execute("select queue.tick()")
    limits = conn.execute('select key, "limit" from queue.semaphores order by key').fetchall()
    assert limits == [("one", 1), ("three", 3)]
    left = conn.execute("select key, value from solid_queue_semaphores").fetchall()
    assert left == [("held", 0)]
    conn.execute("delete from solid_queue_claimed_executions where job_id = %s", [runs])
    again = run("move-in", "solid-queue").out.splitlines()
    assert again[:2] == ["1 waiting jobs moved", "1 of these have a concurrency key"]
    unfinished = "select class_name from solid_queue_jobs where finished_at is null order by id"
    assert [name for (name,) in conn.execute(unfinished.encode())] == [
        "runs",
        "failed",
        "in a batch",
        "beside a batch",
    ]


def test_arguments_of_active_job(run: Run, conn: psycopg.Connection, jobs: Jobs) -> None:
    conn.execute(SOLID)

    def of(kind: str, value: object, **more: object) -> dict[str, object]:
        return {"_aj_serialized": f"{AJ}{kind}Serializer", "value": value, **more}

    own = {"_aj_serialized": "MoneySerializer", "cents": 5}
    hour = [[of("Symbol", "hours"), 1]]
    keywords = {
        "day": of("Date", "2026-01-02"),
        "at": of("TimeWithZone", "2026-01-02T03:04:05.123456789-05:00", time_zone="EST"),
        "span": of("Duration", 3600, parts=hour),
        "price": of("BigDecimal", "1.10"),
        "kind": of("Symbol", "express"),
        "own": own,
        "_aj_ruby2_keywords": ["day", "at", "span", "price", "kind", "own"],
    }
    lines = {"_aj_symbol_keys": ["sku"], "sku": [1, None, 1e16]}
    row = {"_aj_globalid": "gid://shop/Order/7"}
    solid(conn, "named", "ready", arguments=[keywords])
    solid(conn, "placed", "ready", arguments=[row, lines, "x"])
    solid(conn, "both", "ready", arguments=[1, {"to": "Ann", "_aj_ruby2_keywords": ["to"]}])
    assert run("move-in", "solid-queue", "--json").json["moved"] == 3
    named, placed, both = (Codec().decode(row["args"]) for row in jobs())
    assert named == {
        "day": dt.date(2026, 1, 2),
        "at": dt.datetime.fromisoformat("2026-01-02T03:04:05.123456-05:00"),
        "span": dt.timedelta(hours=1),
        "price": Decimal("1.10"),
        "kind": "express",
        "own": own,
    }
    assert placed == {"arguments": ["gid://shop/Order/7", {"sku": [1, None, 1e16]}, "x"]}
    assert both == {"arguments": [1], "to": "Ann"}
    conn.execute("delete from solid_queue_jobs")
    solid(conn, "good", "ready")
    deep = '{"arguments": ' + "[" * 100_000
    for arguments in ([of("Date", "soon")], [{"_aj_serialized": f"{AJ}SymbolSerializer"}], deep):
        bad = solid(conn, "bad", "ready", arguments=arguments)
        if arguments is deep:
            conn.execute("update solid_queue_jobs set arguments = %s where id = %s", [deep, bad])
        refused = run("move-in", "solid-queue")
        assert refused.code == 1
        assert f"the arguments of job {bad} (bad) can't be read" in refused.err
        conn.execute("delete from solid_queue_jobs where id = %s", [bad])
    assert len(jobs()) == 3


def test_workers_of_solid_queue_run_beside(
    run: Run, conn: psycopg.Connection, dsn: str, jobs: Jobs
) -> None:
    """What a worker has claimed stays there; one that claims meanwhile finds nothing."""
    conn.execute(SOLID)
    ids = [solid(conn, "job", "ready") for _ in range(3)]
    claim = (
        "with r as (select job_id from solid_queue_ready_executions order by job_id limit 1"
        " for update skip locked)"
        " insert into solid_queue_claimed_executions (job_id) select job_id from r returning job_id"
    )
    delete = "delete from solid_queue_ready_executions where job_id = %s"
    with psycopg.connect(dsn) as worker:
        (mine,) = worker.execute(claim.encode()).fetchall()
        found: list[Any] = []
        moving = threading.Thread(
            target=lambda: found.append(run("move-in", "solid-queue", "--json").json)
        )
        moving.start()
        waits = "select count(*) from pg_locks where not granted"
        asyncio.run(until(lambda: conn.execute(waits.encode()).fetchall() == [(1,)]))
        worker.execute(delete.encode(), mine)
        worker.commit()
        moving.join()
        assert mine == (ids[0],)
        assert worker.execute(claim.encode()).fetchall() == []
    assert [counts["moved"] for counts in found] == [2]
    assert [row["headers"]["solid_queue"]["id"] for row in jobs()] == ids[1:]
