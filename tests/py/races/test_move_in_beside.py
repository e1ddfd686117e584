"""Moving in while the workers of both queues run: no job is lost or runs twice, locks keep order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from support import ROOT
from workers import wait_for

pytestmark = [pytest.mark.client, pytest.mark.soak]

REQUIREMENTS = ROOT / "bench" / "workers" / "requirements.txt"
# As bench/peers.py makes it.
VENV = ROOT / ".tools" / "bench-venv"

# Both write into one ledger, whose numbers tell in which order. argv: DSN.
THEIRS = """
import asyncio, sys
import procrastinate

app = procrastinate.App(connector=procrastinate.PsycopgConnector(conninfo=sys.argv[1]))
WRITE = "insert into ledger (n, lock, worker) values (%(n)s, %(lock)s, 'theirs')"


@app.task(name="note")
async def note(n, lock):
    await app.connector.execute_query_async(WRITE, n=n, lock=lock)


async def main():
    async with app.open_async():
        if len(sys.argv) > 2:
            await app.schema_manager.apply_schema_async()
        else:
            await app.run_worker_async(concurrency=4)


asyncio.run(main())
"""
OURS = """
import asyncio, sys
from psycopg_pool import AsyncConnectionPool
from pgdefer import App

app = App(sys.argv[1])
pool = AsyncConnectionPool(sys.argv[1], max_size=10, open=False, kwargs={"autocommit": True})


@app.task(name="note")
async def note(n: int, lock: str | None) -> None:
    async with pool.connection() as connection:
        await connection.execute(
            "insert into ledger (n, lock, worker) values (%s, %s, 'ours')", (n, lock)
        )


async def main():
    async with pool:
        await app.run_worker_async()


asyncio.run(main())
"""
# Every second job has one of 200 locks; every fourth is due in some seconds.
JOBS = """
insert into procrastinate_jobs (queue_name, task_name, lock, args, scheduled_at)
select 'default', 'note', lock, jsonb_build_object('n', n, 'lock', lock),
  case when n % 4 = 3 then now() + make_interval(secs => n % 20) end
from generate_series(1, %s) n, lateral (select case when n % 2 = 0 then 'l' || n % 400 end as lock) l
"""


@pytest.fixture(scope="session")
def peers() -> Path:
    """The Python of a virtual environment with Procrastinate."""
    python = VENV / "bin" / "python"
    if not (VENV / "requirements.txt").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], check=True)
        pip = [python, "-m", "pip", "install", "--quiet", "-r", REQUIREMENTS]
        if subprocess.run(pip, check=False).returncode:
            pytest.skip("Procrastinate can't be installed here")
        (VENV / "requirements.txt").write_text(REQUIREMENTS.read_text())
    return python


@pytest.mark.parametrize("count", [2_000, 100_000])
def test_workers_of_both_run_beside(
    dsn: str, conn: psycopg.Connection[Any], peers: Path, tmp_path: Path, count: int
) -> None:
    programs = tmp_path / "theirs.py", tmp_path / "ours.py"
    programs[0].write_text(THEIRS)
    programs[1].write_text(OURS)
    subprocess.run([peers, programs[0], dsn, "schema"], check=True)
    conn.execute(
        "create table ledger (place bigint generated always as identity primary key, n int,"
        " lock text, worker text)"
    )
    conn.execute(JOBS.replace("%s", str(count)))
    conn.execute("analyze procrastinate_jobs")  # else each of their fetches reads all of it

    def written(worker: str | None = None) -> int:
        # The places have no gaps; the table is large.
        query = "select coalesce(max(place), 0) from ledger"
        if worker is not None:
            query = f"select count(*) from ledger where worker = '{worker}'"
        row = conn.execute(query.encode()).fetchone()
        assert row is not None
        return int(row[0])

    def moved() -> dict[str, int]:
        command = [sys.executable, "-m", "pgdefer", "move-in", "procrastinate", "--json"]
        done = subprocess.run(
            command,
            env=os.environ | {"PGDEFER_DSN": dsn},
            capture_output=True,
            text=True,
            check=True,
        )
        return dict(json.loads(done.stdout))

    workers = [
        subprocess.Popen([python, program, dsn], stderr=subprocess.DEVNULL)
        for python, program in zip((peers, sys.executable), programs, strict=True)
    ]
    try:
        wait_for(lambda: written("theirs") > 20)
        before = moved()
        assert before["moved"] > count // 2
        # What was running there, or waited for the lock of such a job, comes later.
        wait_for(lambda: sum(moved()[what] for what in ("moved", "behind", "running")) == 0)
        wait_for(lambda: written() >= count, 3600)
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
    assert written("theirs") > 0
    assert written("ours") >= before["moved"]
    row = conn.execute("select count(*), count(distinct n), min(n), max(n) from ledger").fetchone()
    assert row == (count, count, 1, count)
    late = conn.execute(
        "select lock, n from (select lock, n, lag(n) over (partition by lock order by place) as"
        " former from ledger where lock is not null) l where n < former"
    ).fetchall()
    assert late == []
    left = conn.execute("select state, count(*) from queue.jobs group by 1").fetchall()
    assert {state for state, _ in left} == {"succeeded"}
