"""The database from the command line: upkeep, workers, schedules, backups."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgdefer.cli import Exit
from pgdefer.database.embedded import EmbeddedServer
from pgdefer.database.source import PsycopgConnection
from support import server_program

from .command_line import Claim, Run, claim, defer, run
from .conftest import Jobs

__all__ = ["claim", "run"]

pytestmark = pytest.mark.client


def test_upkeep(
    run: Run,
    jobs: Jobs,
    conn: PsycopgConnection,
    claim: Claim,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    id = defer(run, "t")
    health = run("db", "health")
    assert (health.code, "1 alive" in health.out) == (0, True)
    ((_, number),) = claim().items()
    conn.execute("select queue.succeed(%s, %s)", [id, number])
    (stats,) = run("db", "stats", "--json").json
    assert (stats["succeeded_5m"], stats["ready"]) == (1, 0)
    assert "The last 5 minutes:" in run("db", "stats").out
    assert "The last hour:" in run("db", "stats", "--hour").out
    assert run("db", "check").err == "Every invariant holds.\n"
    assert run("db", "check", "--json").json == []
    assert run("db", "reap").out.startswith("0 claims ended")
    assert run("db", "tick", "--json").json["reaped"] == 0
    assert run("db", "prune").out == "0 jobs removed\n"
    assert run("db", "prune", "-s", "succeeded").code == Exit.USAGE, "nobody to ask"
    assert run("db", "prune", "-s", "succeeded", "--dry-run").out == "1 job removed\n"
    assert run("db", "prune", "-s", "nonsense", "--yes").code == Exit.USAGE
    for words, said in (
        (["-s", "faild"], "state: faild"),
        (["-s", "failed", "--older-than", "3 dayz"], "--older-than"),
    ):
        done = run("db", "prune", *words)
        assert done.code == Exit.USAGE
        assert said in done.err, "refused before the question"
        assert "for good?" not in done.err
    assert len(jobs()) == 1
    assert run("db", "prune", "-s", "succeeded", "--yes", "--json").json == {"jobs": 1}
    monkeypatch.setattr("pgdefer.cli._db.PRUNED_AT_ONCE", 2)
    for _ in range(7):
        later = defer(run, "t", "--in", "1 hour")
        conn.execute("select queue.cancel(%s)", [later])
    prune = ["db", "prune", "-s", "cancelled", "--yes"]
    assert run(*prune, "--dry-run").out == "2 jobs removed\n"
    assert run(*prune, "--limit", "3").out == "3 jobs removed\n"
    assert run(*prune).out == "4 jobs removed\n", "until nothing is left"
    conn.execute(
        "update queue.worker set last_seen_at = now() - interval '1 hour', dead_after = '0'"
    )
    defer(run, "t")
    conn.execute("update queue.job set created_at = now() - interval '1 hour'")
    unwell = run("db", "health")
    assert unwell.code == Exit.UNHEALTHY
    assert "queue.tick()" in unwell.out


@pytest.mark.unchecked("breaks an invariant on purpose")
def test_check_says_what_is_wrong(run: Run, conn: PsycopgConnection) -> None:
    id = defer(run, "t")
    conn.execute("select queue.tick()")
    conn.execute("delete from queue.active_job")
    broken = run("db", "check")
    assert broken.code == Exit.UNHEALTHY
    assert f"{id}" in broken.out
    assert run("db", "check", "--json").code == Exit.UNHEALTHY


def test_workers(run: Run, conn: PsycopgConnection) -> None:
    assert run("worker", "ls").err == "There are no workers.\n"
    conn.execute("select queue.register_worker('the worker', '{a,b*}')")
    (row,) = run("worker", "ls", "--json").json
    assert (row["name"], row["queues"], row["is_alive"]) == ("the worker", ["a", "b*"], True)
    assert "a, b*" in run("worker", "ls").out
    assert row["memory"] is None
    conn.execute("select queue.heartbeat(%s, 123456789)", [row["id"]])
    assert run("worker", "ls", "--json").json[0]["memory"] == 123456789
    assert "118 MB" in run("worker", "ls").out
    assert "118 MB" in run("top", "--once").out
    conn.execute("select queue.heartbeat(%s, 9223372036854775807)", [row["id"]])
    assert "8589934592 GB" in run("worker", "ls").out


def test_schedules(run: Run, jobs: Jobs) -> None:
    assert run("schedule", "ls").err == "Nothing is scheduled.\n"
    added = run(
        "schedule", "add", "nightly", "0 3 * * *", "report", '{"n": 1}', "-z", "Europe/Paris"
    )
    assert added.out.startswith("next run: ")
    (row,) = run("schedule", "ls", "--json").json
    assert (row["name"], row["timezone"], row["args"]) == ("nightly", "Europe/Paris", {"n": 1})
    id = int(run("schedule", "run", "nightly").out)
    assert jobs()[0]["id"] == id
    assert run("schedule", "enable", "nightly", "--off").out == "next run: never\n"
    assert run("schedule", "next", "@hourly", "-n", 3, "--json").code == 0
    assert run("schedule", "add", "x", "not cron", "report").code == Exit.USAGE
    assert run("schedule", "rm", "nightly", "--dry-run").code == 0
    assert run("schedule", "rm", "nightly", "-y").out == "removed\n"
    assert run("schedule", "rm", "nightly", "-y").code == Exit.NOT_FOUND
    for command in ("run", "enable"):
        missing = run("schedule", command, "nightly")
        assert missing.code == Exit.NOT_FOUND
        assert missing.err == (
            "pgdefer: no such schedule (name: nightly). `pgdefer schedule ls` lists them.\n"
        )


def test_top(run: Run, claim: Claim) -> None:
    defer(run, "t", "-q", "mail")
    claim()
    shown = run("top", "--once").out
    assert "0 ready, 1 running" in shown
    assert "mail" in shown


@pytest.mark.long
def test_backup_and_restore(
    run: Run, server: EmbeddedServer, dsn: str, blank_dsn: str, tmp_path: Path
) -> None:
    if server_program(server, "pg_dump") is None:
        pytest.skip(f"there is no pg_dump for PostgreSQL {server.major}")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("drop trigger stay_alive on queue.worker")  # the tests' own database
    id = defer(run, "t", '{"kept": true}')
    command = [sys.executable, "-m", "pgdefer", "pg"]
    with (tmp_path / "dump").open("wb") as file:
        subprocess.run([*command, "backup"], stdout=file, check=True)
    install = [sys.executable, "-m", "pgdefer", "version", "--dsn", blank_dsn]
    assert (
        subprocess.run(install, capture_output=True, check=False).returncode == Exit.NOT_INSTALLED
    )
    with (tmp_path / "dump").open("rb") as file:
        restore = [*command, "restore", "--yes", "--dsn", blank_dsn]
        done = subprocess.run(restore, stdin=file, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    with psycopg.connect(blank_dsn) as restored:
        assert restored.execute("select id, args from queue.job").fetchall() == [
            (id, {"kept": True})
        ]


def test_a_backup_needs_the_right(
    run: Run, conn: PsycopgConnection, dsn: str, blank_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute("create role dumps_nothing login")
    monkeypatch.setattr("os.isatty", lambda _: False)
    try:
        backup = run("pg", "backup", "--dsn", make_conninfo(dsn, user="dumps_nothing"))
        address = make_conninfo(blank_dsn, user="dumps_nothing")
        restore = run("pg", "restore", "--yes", "--dsn", address)
    finally:
        conn.execute("drop role dumps_nothing")
    for done, named in ((backup, "table queue."), (restore, "database ")):
        assert (done.code, done.out) == (Exit.FORBIDDEN, "")
        assert f"permission denied for {named}" in done.err
        assert "as the owner of the queue" in done.err
