"""Sensitive args: declared in Python, and as a role that may not see them reads them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from pgdefer import App, BatchJob, current_job
from pgdefer.cli import Exit
from pgdefer.cli._base import cli
from pgdefer.errors import InvalidParameter
from pgdefer.logs import JsonFormatter

from .conftest import Jobs, running

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
SECRET = "4111-secret"
PAYS = {"card": {"number": SECRET, "name": "n"}, "user": "u"}
SHOWN = {"card": {"number": "***", "name": "n"}, "user": "u"}


@pytest.fixture
def roles(conn: Connection) -> Iterator[None]:
    """Roles without the owner's rights."""
    for kind in ("reader", "operator", "worker", "producer"):
        conn.execute(f"create role hides_{kind} login".encode())
        conn.execute("select queue.grant_access(%s, %s)", [f"hides_{kind}", kind])
    yield
    for kind in ("reader", "operator", "worker", "producer"):
        conn.execute("select queue.revoke_access(%s)", [f"hides_{kind}"])
        conn.execute(f"drop role hides_{kind}".encode())


Run = Callable[..., str]


@pytest.fixture
def run(dsn: str, roles: None, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command as a role, and return all that it prints."""
    monkeypatch.setenv("COLUMNS", "300")
    runner = CliRunner()

    def run(role: str, *words: object, code: int = 0) -> str:
        monkeypatch.setenv("PGDEFER_DSN", make_conninfo(dsn, user=f"hides_{role}"))
        done = runner.invoke(cli, [str(word) for word in words])
        assert done.exit_code == code, done.output
        return done.stdout + done.stderr

    return run


def paths_of(conn: Connection, task: str) -> Any:
    row = conn.execute("select defaults -> 'sensitive' from queue.tasks where name = %s", [task])
    return (row.fetchone() or (None,))[0]


def test_a_task_declares_paths(app: App, conn: Connection) -> None:
    @app.task(name="pay", sensitive=["card.number"], aliases=["old"])
    def pay(card: dict[str, str]) -> None:
        del card

    pay.defer({"number": SECRET})
    app.open()
    assert paths_of(conn, "pay") == paths_of(conn, "old") == ["card.number"]


def test_wrong_paths(app: App) -> None:
    with pytest.raises(TypeError, match=r"sensitive must be a list, not 'card'"):
        app.task(name="text", sensitive="card")(len)
    with pytest.raises(ValueError, match=r"'text': sensitive names 'cardd', .* takes card, to"):
        app.task(name="text", sensitive=["card", "cardd.number"])(lambda card, to: None)
    with pytest.raises(TypeError, match="takes no option sensitive"):
        app.defer("t", sensitive=["a"])  # type: ignore[call-arg]

    @app.task(name="bad", sensitive=["a ? (@ > 1)"])
    def bad(a: int) -> None:
        del a

    with pytest.raises(InvalidParameter, match="a sensitive path may only have names"):
        bad.defer(1)


async def test_handlers_get_all_and_logs_show_none(
    app: App, conn: Connection, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    @app.task(name="pay", sensitive=["card.number"])
    async def pay(card: dict[str, str], user: str) -> None:
        seen.append((card, user, repr(current_job())))
        raise ValueError("no")

    @app.task(name="many", batch=10, sensitive=["card.number"])
    async def many(batch: list[BatchJob[dict[str, Any]]]) -> None:
        seen.extend((job.args["card"], repr(job)) for job in batch)

    caplog.set_level(logging.DEBUG)
    async with running(app):
        await pay.defer_async(**PAYS)  # type: ignore[arg-type]
        await many.defer_async(**PAYS)
        await jobs.end()
    assert [one[0] for one in seen] == [PAYS["card"]] * 2
    assert SECRET not in seen[0][2] + seen[1][1]
    lines = [JsonFormatter().format(record) for record in caplog.records]
    assert SECRET not in "".join(lines) + caplog.text
    assert SECRET not in str(conn.execute("select * from queue.attempts").fetchall())


def test_the_command_line(run: Run, conn: Connection) -> None:
    conn.execute("""select queue.register_task('pay', '{"sensitive": ["card.number"]}')""")
    stored = json.dumps(PAYS)
    for name in ("one", "two"):
        conn.execute("select queue.defer('pay', %s, queue => %s)", [stored, name])
    conn.execute("select queue.schedule('s', '@daily', 'pay', %s)", [stored])
    for role in ("reader", "operator"):
        answers = [
            run(role, "job", "show", 1),
            run(role, "job", "ls", "--json"),
            run(role, "job", "search", "user", "--json"),
            run(role, "job", "search", "$.card.number", "--path", "--json"),
            run(role, "job", "get", "card.number", 1),
            run(role, "job", "get", "$.*", 1),
            run(role, "job", "why", 1),
            run(role, "schedule", "ls", "--json"),
        ]
        assert [answer for answer in answers if SECRET in answer] == []
        assert len(json.loads(answers[1])) == 2
        assert answers[4] == '"***"\n'
        assert SECRET not in run(role, "job", "search", SECRET)
        found = run(role, "job", "search", f'$.card.number == "{SECRET}"', "--path")
        assert "pay" not in found
    edited = json.dumps(SHOWN | {"user": "v"})
    run("operator", "job", "args", 1, edited)
    assert conn.execute("select args from queue.jobs where id = 1").fetchone() == (
        PAYS | {"user": "v"},
    )
    refused = run("operator", "job", "args", 1, '{"card": ["***"]}', code=0)
    assert SECRET not in refused
    message = run("operator", "job", "args", 2, '{"card": [{"number": "***"}]}', code=Exit.USAGE)
    assert "args contain *** in place of a sensitive value" in message
    run("reader", "job", "args", 1, "{}", code=Exit.FORBIDDEN)
    assert SECRET not in run("operator", "job", "next", "two")
    assert SECRET not in run("operator", "job", "next", "--peek")


def test_jobs_from_python(dsn: str, roles: None, app: App, conn: Connection) -> None:
    @app.task(name="pay", sensitive=["card.number"])
    def pay(card: dict[str, str], user: str) -> None:
        del card, user

    id = pay.defer(**PAYS).id  # type: ignore[arg-type]
    with App(make_conninfo(dsn, user="hides_reader")) as other:
        assert SECRET not in str(other.list_jobs("user"))
        assert other.list_jobs(SECRET) == []
    with App(make_conninfo(dsn, user="hides_operator")) as other:
        other.job(id).set_args(SHOWN | {"user": "v"})
        with pytest.raises(InvalidParameter, match=r"args contain \*\*\*"):
            other.job(id).set_args({"card": [{"number": "***"}]})
    assert conn.execute("select args from queue.jobs").fetchall() == [(PAYS | {"user": "v"},)]


def test_who_may_not_see_removes_no_path(dsn: str, roles: None, conn: Connection) -> None:
    def program(role: str, *paths: str) -> None:
        with App(make_conninfo(dsn, user=role)) as app:
            app.task(name="pay", sensitive=list(paths))(lambda **_: None)
            app.open()

    conn.execute("""select queue.register_task('pay', '{"sensitive": ["a"]}')""")
    program("hides_producer")
    assert paths_of(conn, "pay") == ["a"]
    program("hides_worker", "b")
    assert paths_of(conn, "pay") == ["a", "b"]
    owner = conn.execute("select current_user").fetchone()
    assert owner
    program(owner[0], "b")
    assert paths_of(conn, "pay") == ["b"]
