"""The command line over many databases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from typer.testing import CliRunner, Result

from pgdefer.cli import Exit, _job, _top
from pgdefer.cli._base import cli

from .conftest import Tenants, wait_for

pytestmark = pytest.mark.client

Run = Callable[..., Result]


@pytest.fixture
def file(dsns: list[str], tmp_path: Path) -> Path:
    """A file of three databases, in which jobs were deferred in turn; and one that is not there."""
    for number, dsn in enumerate([*dsns[:2], *dsns]):
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute("select queue.defer(%s, queue => 'mail')", [f"t{number}"])
    file = tmp_path / "tenants"
    file.write_text("# tenants\n" + "\n".join(dsns) + "\n")
    return file


@pytest.fixture
def run(file: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command on the file's databases."""
    monkeypatch.setenv("COLUMNS", "160")
    runner = CliRunner()
    return lambda *words: runner.invoke(cli, [*map(str, words), "--dsns", str(file)])


def add(file: Path, dsn: str) -> None:
    file.write_text(file.read_text() + dsn + "\n")


def test_jobs_of_all_databases_newest_first(run: Run) -> None:
    found = json.loads(run("job", "ls", "--json").stdout)
    assert [(row["database"].rpartition("/")[2], row["task"]) for row in found] == [
        ("tenant_c", "t4"),
        ("tenant_b", "t3"),
        ("tenant_a", "t2"),
        ("tenant_b", "t1"),
        ("tenant_a", "t0"),
    ]
    assert run("job", "ls", "-s", "failed").stderr == "No such jobs.\n"


def test_the_newest_jobs_and_a_word_that_there_are_more(run: Run) -> None:
    done = run("job", "ls", "-n", 2)
    assert done.exit_code == Exit.DONE
    assert done.stdout.split()[:2] == ["database", "id"]
    assert ["t4" in done.stdout, "t3" in done.stdout, "t2" in done.stdout] == [True, True, False]
    assert done.stderr == "There may be more: --limit\n"
    assert run("job", "ls", "--before", 2).exit_code == Exit.USAGE


def test_queues_and_workers_of_all_databases(run: Run, dsns: list[str]) -> None:
    with psycopg.connect(dsns[1], autocommit=True) as connection:
        connection.execute("select queue.register_worker('w')")
        connection.execute("select queue.tick()")
    done = run("top", "--once", "--json")
    found = json.loads(done.stdout)
    by_name = {row["database"].rpartition("/")[2]: row["ready"] for row in found["queues"]}
    assert by_name == {"tenant_a": 2, "tenant_b": 2, "tenant_c": 1}
    assert [(row["database"][-8:], row["name"]) for row in found["workers"]] == [("tenant_b", "w")]
    shown = run("top", "--once").stdout
    assert "5 ready, 0 running, 0 done/s, workers: 1" in shown
    assert all(f"/tenant_{letter}" in shown for letter in "abc")


def test_databases_that_cannot_be_asked_are_named(run: Run, file: Path, tenants: Tenants) -> None:
    add(file, tenants.dsn("tenant_missing"))
    add(file, tenants.dsn("postgres"))
    done = run("job", "ls", "--json")
    assert done.exit_code == Exit.PARTLY
    assert len(json.loads(done.stdout)) == 5
    assert "/tenant_missing: " in done.stderr
    assert 'database "tenant_missing" does not exist' in done.stderr
    assert '/postgres: schema "queue" does not exist' in done.stderr
    done = run("top", "--once")
    assert done.exit_code == Exit.PARTLY
    assert "2 databases missing" in done.stdout


def test_a_database_that_stopped_early_may_have_newer_jobs(
    run: Run, dsns: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_job, "GLANCE", 100)  # one job of each database
    done = run("job", "ls", "-t", "t0", "-n", 1)
    assert done.exit_code == Exit.PARTLY
    assert done.stderr.endswith("There may be more: --limit, or --no-limit\n")
    done = run("job", "ls", "-t", "t0", "-n", 1, "--no-limit")
    assert (done.exit_code, "t0" in done.stdout) == (Exit.DONE, True)


def test_a_database_that_does_not_answer_is_left_out(
    run: Run, dsns: list[str], tenants: Tenants, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_top, "PATIENCE", 10.0)
    with psycopg.connect(dsns[1]) as holder:
        holder.execute("lock table queue.job, queue.worker")
        done = run("top", "--once")
    assert done.exit_code == Exit.PARTLY
    assert done.stderr.endswith("/tenant_b: no answer within 10 s\n")
    assert "/tenant_a" in done.stdout
    assert "/tenant_b" not in done.stdout
    wait_for(lambda: tenants.connections() == 0)


def test_a_line_that_can_not_be_read(run: Run, file: Path) -> None:
    add(file, "no dsn")
    done = run("job", "ls", "--json")
    assert (done.exit_code, len(json.loads(done.stdout))) == (Exit.PARTLY, 5)


def test_no_database_can_be_asked(run: Run, file: Path) -> None:
    file.write_text("host=127.0.0.1 port=1 dbname=a\nhost=127.0.0.1 port=1 dbname=b\n")
    done = run("job", "ls")
    assert (done.exit_code, done.stdout) == (Exit.UNREACHABLE, "")
    assert done.stderr.count("127.0.0.1:1/") == 2
    file.write_text("# none\n")
    assert run("job", "ls").exit_code == Exit.USAGE


def test_one_database_or_many(run: Run, dsns: list[str]) -> None:
    done = run("job", "ls", "--dsn", dsns[0])
    assert (done.exit_code, done.stderr) == (
        Exit.USAGE,
        "pgdefer: give --dsn or --dsns, not both.\n",
    )
