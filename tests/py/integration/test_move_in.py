"""Moving in the jobs of Procrastinate, with its tables of version 3, and of a table `tasks`."""

from __future__ import annotations

import psycopg
import pytest

from .conftest import Jobs
from .test_cli_operations import Run, run

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
  ('mail', 'once', 0, null, 'q', '{}', 'todo', null, 0),
  ('mail', 'done', 0, null, null, '{}', 'succeeded', null, 1);
"""


def test_moving_in(run: Run, conn: psycopg.Connection, jobs: Jobs) -> None:
    conn.execute(TABLES)
    conn.execute("select queue.defer('once', queueing_lock => 'q')")
    # a task's key applies to what is deferred from now on
    conn.execute("select queue.register_task('first', '{\"idempotency_key\": \"k\"}')")
    conn.execute("select queue.defer('first'), queue.register_task('first', '{}')")
    conn.execute("select queue.delete(array[id]) from queue.jobs where task = 'first'")
    conn.execute("select queue.register_task('first', '{\"idempotency_key\": \"k\"}')")
    expected = {"moved": 6, "locked": 2, "scheduled": 1, "behind": 1, "running": 1}
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
