"""What all commands share: dry runs, JSON, exit codes, completion."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest

from pgdefer.cli import Exit
from pgdefer.database.source import PsycopgConnection

from .command_line import Claim, Run, claim, defer, run, zoo

__all__ = ["claim", "run", "zoo"]

pytestmark = pytest.mark.client


def everything(conn: PsycopgConnection) -> list[Any]:
    views = "jobs", "queues", "schedules", "attempts"
    return [conn.execute(f"select * from queue.{view} order by 1").fetchall() for view in views]


@pytest.mark.long
def test_dry_runs(run: Run, conn: PsycopgConnection, zoo: dict[str, int]) -> None:
    assert run("schedule", "add", "nightly", "0 3 * * *", "report").code == 0
    assert run("queue", "create", "other").code == 0
    before = everything(conn)
    one = zoo["ready"]
    for words in (
        ["defer", "t"],
        ["job", "move", one, "--to", "other"],
        ["job", "copy", one],
        ["job", "retry", zoo["failed"]],
        ["job", "retry", "--failed"],
        ["job", "retry", zoo["running"], "--force"],
        ["job", "delete", one],
        ["job", "fail", one],
        ["job", "done", one],
        ["job", "hold", one],
        ["job", "unhold", zoo["held"]],
        ["job", "cancel", one],
        ["job", "cancel", zoo["running"], "--abort"],
        ["job", "priority", 7, one],
        ["job", "reschedule", one, "--at", "2999-01-01"],
        ["job", "args", one, '{"n": 2}'],
        ["queue", "create", "new"],
        ["queue", "delete", "other"],
        ["queue", "delete", "default", "--force"],
        ["queue", "pause", "other"],
        ["queue", "resume", "--all"],
        ["queue", "configure", "other", "--max-running", 3],
        ["schedule", "add", "weekly", "0 3 * * 1", "report"],
        ["schedule", "rm", "nightly"],
        ["schedule", "run", "nightly"],
        ["schedule", "enable", "nightly", "--off"],
        ["db", "prune", "-s", "failed"],
    ):
        done = run(*words, "--dry-run")
        assert (done.code, done.err) == (0, "Dry run, nothing is changed:\n"), words
        assert done.out, words
        assert everything(conn) == before, words


@pytest.mark.parametrize(
    "words",
    [
        "job delete 1",
        "job fail 1",
        "job done 1",
        "job cancel 1",
        "queue delete default",
        "schedule rm nightly",
        "db prune -s failed",
        "pg restore",
    ],
)
def test_what_destroys_asks(run: Run, conn: PsycopgConnection, words: str) -> None:
    defer(run, "t")
    assert run("schedule", "add", "nightly", "0 3 * * *", "report").code == 0
    before = everything(conn)
    done = run(*words.split())
    assert done.code == Exit.USAGE
    assert "pass --yes" in done.err
    assert everything(conn) == before


@pytest.mark.long
def test_json_everywhere(run: Run, zoo: dict[str, int]) -> None:
    assert run("schedule", "add", "nightly", "0 3 * * *", "report", "--json").json
    one = zoo["ready"]
    for words in (
        ["version"],
        ["install"],
        ["upgrade"],
        ["worker", "ls"],
        ["queue", "ls"],
        ["queue", "create", "q"],
        ["queue", "configure", "q", "--max-running", 3],
        ["queue", "pause", "q"],
        ["queue", "resume", "q"],
        ["queue", "delete", "q", "--yes"],
        ["schedule", "ls"],
        ["schedule", "run", "nightly"],
        ["schedule", "next", "@hourly"],
        ["schedule", "enable", "nightly"],
        ["schedule", "rm", "nightly", "--yes"],
        ["defer", "t"],
        ["job", "ls"],
        ["job", "show", one],
        ["job", "search", "x"],
        ["job", "why", one],
        ["job", "get", "$", one],
        ["job", "copy", one],
        ["job", "hold", one],
        ["job", "unhold", one],
        ["job", "priority", 2, one],
        ["job", "reschedule", one],
        ["job", "args", one, "{}"],
        ["job", "next", "--peek"],
        ["job", "retry", zoo["failed"]],
        ["job", "move", one, "--to", "q"],
        ["job", "cancel", one, "--yes"],
        ["job", "done", one, "--yes"],
        ["job", "fail", zoo["held"], "--yes"],
        ["job", "delete", one, "--yes"],
        ["db", "stats"],
        ["db", "health"],
        ["db", "check"],
        ["db", "reap"],
        ["db", "tick"],
        ["db", "prune"],
        ["top", "--once"],
        ["graph", zoo["waiting"]],
    ):
        done = run(*words, "--json")
        assert done.code in (0, Exit.UNHEALTHY), (words, done.err)
        assert isinstance(done.json, dict | list), words
    assert [
        json.loads(line) for line in run("job", "tail", "--no-follow", "--json").out.splitlines()
    ]


@pytest.mark.parametrize("styles", ["German iso_8601", "SQL,DMY sql_standard"])
def test_the_databases_own_styles(
    run: Run, claim: Claim, conn: PsycopgConnection, monkeypatch: pytest.MonkeyPatch, styles: str
) -> None:
    """Of times and intervals: what is printed does not depend on them."""
    id = defer(run, "t", "--deadline", "2999-12-31 09:00Z")
    conn.execute("select queue.succeed(%s, %s)", [id, claim()[id]])
    run("queue", "configure", "q", "--retain", "40 days")
    run("schedule", "add", "nightly", "0 3 * * *", "report")
    commands = [
        ["job", *words, *form]
        for words in (["tail", "--no-follow"], ["show", id], ["ls"])
        for form in ([], ["--json"])
    ]
    commands += [["queue", "ls"], ["queue", "ls", "--json"], ["schedule", "ls"]]
    usual = [run(*words) for words in commands]
    assert {done.code for done in usual} == {0}
    dates, intervals = styles.split()
    monkeypatch.setenv("PGOPTIONS", f"-c DateStyle={dates} -c IntervalStyle={intervals}")
    for words, before in zip(commands, usual, strict=True):
        assert run(*words) == before, words


def test_what_went_wrong_is_in_the_exit_code(
    run: Run, conn: PsycopgConnection, blank_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = "postgresql://127.0.0.1:1/nowhere?connect_timeout=1"
    codes = {
        "unreachable": run("job", "ls", "--dsn", nowhere).code,
        "not installed": run("job", "ls", "--dsn", blank_dsn).code,
        "not found": run("job", "why", 1).code,
        "usage": run("job", "ls", "-s", "x").code,
        "nothing": run("job", "next").code,
    }
    conn.execute("create role nobody_much login")
    try:
        monkeypatch.setenv("PGUSER", "nobody_much")
        user = re.sub(r"user=\S+", "user=nobody_much", os.environ["PGDEFER_DSN"])
        forbidden = run("job", "ls", "--dsn", user)
    finally:
        conn.execute("drop role nobody_much")
    codes["forbidden"] = forbidden.code
    assert codes == {
        "unreachable": Exit.UNREACHABLE,
        "not installed": Exit.NOT_INSTALLED,
        "not found": Exit.NOT_FOUND,
        "usage": Exit.USAGE,
        "nothing": Exit.NOTHING,
        "forbidden": Exit.FORBIDDEN,
    }
    assert "permission denied" in forbidden.err
    assert len({*Exit}) == len(Exit), "each cause has its own"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["defer", "t", "--at", "soonish"], "--at"),
        (["defer", "t", "--at", "2030-01-01", "--deadline", "2030-99-99"], "--deadline"),
        (["job", "reschedule", 1, "--at", "soonish"], "--at"),
        (["queue", "pause", "q", "--until", "soonish", "--json"], "--until"),
        (["db", "prune", "-s", "failed", "--older-than", "long", "--yes"], "--older-than"),
        (["job", "next", "--lease", "long"], "--lease"),
    ],
)
def test_a_time_that_cannot_be_read(run: Run, arguments: list[object], option: str) -> None:
    done = run(*arguments)
    assert done.code == Exit.USAGE
    assert done.err.startswith(f"pgdefer: {option}: ")
    assert re.search(r"\. Give an? (time|interval), such as .*\.\n$", done.err)


def test_a_number_out_of_range(run: Run) -> None:
    assert run("job", "show", 10**30).code == Exit.USAGE


@pytest.mark.parametrize(
    "arguments",
    [["job", "ls"], ["version"], ["install"], ["upgrade"], ["psql"]],
)
def test_a_dsn_that_cannot_be_read(run: Run, arguments: list[object]) -> None:
    done = run(*arguments, "--dsn", "secret garbage")
    assert done.code == Exit.USAGE
    assert "the DSN can't be read. Write postgresql://" in done.err
    assert "secret" not in done.err


@pytest.mark.unchecked("the tables are of no version that there is")
def test_a_database_of_another_version(run: Run, conn: PsycopgConnection) -> None:
    conn.execute("update queue.installation set version = '999.0.0'")
    done = run("install")
    assert done.code == Exit.INCOMPATIBLE, done.err


def complete(dsn: str, line: str) -> list[str]:
    """Return the completions that bash would offer."""
    words = line.split(" ")
    given = {"_PGDEFER_COMPLETE": "complete_bash", "COMP_WORDS": line, "PGDEFER_DSN": dsn}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv[0] = 'pgdefer'; from pgdefer.cli import main; main()",
        ],
        env=os.environ | given | {"COMP_CWORD": str(len(words) - 1)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.long
def test_completion(dsn: str, conn: PsycopgConnection) -> None:
    conn.execute("select queue.create_queue('mail'), queue.create_queue('mad')")
    conn.execute("select queue.register_task('main', '{}')")
    assert complete(dsn, "pgdefer job re") == ["retry", "reschedule"]
    assert complete(dsn, "pgdefer job ls --state r") == ["ready", "running"]
    assert complete(dsn, "pgdefer job ls -q ma") == ["mad", "mail"]
    assert complete(dsn, "pgdefer queue pause mai") == ["mail"]
    assert complete(dsn, "pgdefer defer m") == ["main"]
    assert complete(dsn, "pgdefer web --po") == ["--port"]
    assert complete("postgresql://127.0.0.1:1/x?connect_timeout=1", "pgdefer queue pause m") == []
