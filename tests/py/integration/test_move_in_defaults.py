"""Moving in jobs of a task whose defaults would drop them, or put them off."""

from __future__ import annotations

import json

import psycopg
import pytest

from .command_line import Run, run
from .conftest import Jobs
from .test_move_in import SOLID, TABLES, solid

__all__ = ["run"]

pytestmark = pytest.mark.client

DEFAULTS = {
    "queueing_lock": "only",
    "on_conflict": "replace",
    "idempotency_key": "k",
    "lock": "l",
    "group": "none",
    "held": True,
    "delay": "1 day",
    "concurrency_key": "c",
    "concurrency_limit": 1,
    "on_limit": "discard",
}


@pytest.mark.parametrize("origin", ["procrastinate", "tasks", "solid-queue"])
def test_defaults_of_the_task(run: Run, conn: psycopg.Connection, jobs: Jobs, origin: str) -> None:
    conn.execute("select queue.register_task('job', %s)", [json.dumps(DEFAULTS)])
    if origin == "procrastinate":
        conn.execute(TABLES)
        conn.execute("update procrastinate_jobs set task_name = 'job', priority = 0")
        conn.execute("delete from procrastinate_jobs where lock is not null or status <> 'todo'")
    elif origin == "tasks":
        conn.execute(
            "create table tasks (id bigserial, task_type text, payload jsonb default '{}',"
            " status text default 'pending', priority int default 0, retries int default 0,"
            " max_retries int default 3, finished_at timestamptz, error text)"
        )
        conn.execute("insert into tasks (task_type) values ('job'), ('job'), ('job')")
    else:
        conn.execute(SOLID)
        solid(conn, "job", "ready")
        solid(conn, "job", "ready")
        solid(conn, "job", "scheduled")
    assert run("move-in", origin, "--json").json["moved"] == 3
    conn.execute("select queue.tick()")
    rows = jobs()
    states = ["ready", "blocked", "blocked" if origin == "tasks" else "scheduled"]
    assert [row["state"] for row in rows] == states, "they wait for the task's limit only"
    for row in rows:
        assert (row["queueing_lock"], row["idempotency_key"]) == (None, None)
        assert row["lock"] == (None if origin == "procrastinate" else "l"), "no other has locks"
        assert row["concurrency_key"] == "c", "it says how the job runs"
