"""Locks, queueing locks and concurrency keys from the application's side."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import itertools
import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer import AlreadyQueued, App, InvalidParameter

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
SECOND = dt.timedelta(seconds=1)


def column(conn: Connection, name: str) -> list[Any]:
    return [row[0] for row in conn.execute(f"select {name} from queue.jobs order by id".encode())]


# Four jobs that write a, b, c and d to one file, the first being the slowest, and three workers


@pytest.mark.parametrize("lock", ["file:{path}", None])
async def test_four_letters(dsn: str, tmp_path: Path, jobs: Jobs, lock: str | None) -> None:
    path = tmp_path / "letters"
    path.touch()
    at_work: set[str] = set()
    together: list[set[str]] = []
    apps = [App(dsn) for _ in range(3)]

    def task_of(app: App) -> Any:
        @app.task(name="write", **({"lock": lock} if lock else {}))
        async def write(letter: str, path: str) -> None:
            at_work.add(letter)
            together.append(set(at_work))
            if lock:
                await asyncio.sleep("dcba".index(letter) * 0.02)
            else:
                # each waits for the next, so they have to run at the same time
                await until(lambda: letter == "d" or chr(ord(letter) + 1) in read())
            await asyncio.to_thread(append, letter)
            at_work.remove(letter)

        return write

    def read() -> str:
        return path.read_text()

    def append(letter: str) -> None:
        with path.open("a") as file:
            file.write(letter)

    write, *_ = (task_of(app) for app in apps)
    async with contextlib.AsyncExitStack() as stack:
        for app in apps:
            await stack.enter_async_context(running(app, concurrency=2))
        for letter in "abcd":
            await write.defer_async(letter, path=str(path))
        rows = await jobs.end()
    assert [row["state"] for row in rows] == ["succeeded"] * 4
    if lock:
        assert read() == "abcd"
        assert together == [{"a"}, {"b"}, {"c"}, {"d"}]
        for one, other in itertools.pairwise(rows):
            assert one["finished_at"] <= other["started_at"]
    else:
        assert read() == "dcba"


@pytest.mark.parametrize(
    "holds", [{"lock": "one"}, {"concurrency_key": "one", "concurrency_limit": 1}]
)
async def test_the_next_one_starts_at_once_on_another_worker(
    dsn: str, jobs: Jobs, conn: Connection, holds: dict[str, Any]
) -> None:
    apps = [App(dsn), App(dsn)]
    may_end = asyncio.Event()

    def task_of(app: App) -> Any:
        @app.task(name="t")
        async def task(n: int) -> None:
            if n == 1:
                await may_end.wait()

        return task

    task, _ = [task_of(app) for app in apps]
    async with running(apps[0], queues=["first"]), running(apps[1], queues=["second"]):
        first = await task.configure(queue="first", **holds).defer_async(1)
        await until(lambda: jobs.states()[first.id] == "running")
        second = await task.configure(queue="second", **holds).defer_async(2)
        # the other worker has seen it and sleeps
        await until(lambda: jobs.states()[second.id] == "blocked")
        may_end.set()
        one, other = await jobs.end()
    assert other["started_at"] - one["finished_at"] < SECOND / 2


# Templates


@pytest.fixture
def account_app(app: App) -> App:
    @app.task(
        name="transfer",
        lock="account:{account_id}",
        queueing_lock="{account_id}/{note}",
        concurrency_key="bank:{bank}",
        concurrency_limit=2,
    )
    def transfer(account_id: int, note: str = "none", bank: str | None = None) -> None: ...

    return app


def test_templates_are_filled_for_every_caller(
    account_app: App, connect: Callable[..., Connection]
) -> None:
    conn = connect()
    transfer = account_app.get("transfer")
    transfer.defer(account_id=1, note="a", bank="x")
    asyncio.run(transfer.defer_async(1, "b", "x"))
    transfer.configure(priority=3).defer(1, note="c", bank="x")
    transfer.configure(lock="own:{note}", queueing_lock="").defer(1, note="d", bank="x")
    transfer.configure(concurrency_key="").defer(2, note="e")
    conn.execute(
        'select queue.defer(\'transfer\', \'{"account_id": 1, "note": "f", "bank": "y"}\')'
    )
    conn.execute(
        'select queue.defer_many(\'[{"task": "transfer", "args":'
        ' {"account_id": 3, "note": "g", "bank": "y"}}]\')'
    )
    assert column(conn, "lock") == [f"account:{n}" for n in (1, 1, 1)] + [
        "own:d",
        "account:2",
        "account:1",
        "account:3",
    ]
    assert column(conn, "queueing_lock") == ["1/a", "1/b", "1/c", None, "2/e", "1/f", "3/g"]
    assert column(conn, "concurrency_key") == [
        *["bank:x"] * 4,
        None,
        *["bank:y"] * 2,
    ]
    with pytest.raises(AlreadyQueued):
        transfer.defer(account_id=1, note="a", bank="x")


async def test_a_trigger_fills_them_too(account_app: App, conn: Connection, jobs: Jobs) -> None:
    """Its jobs take turns with those from Python, in the order of their creation."""
    account_app.open()
    transfer = account_app.get("transfer")
    conn.execute("create table movement (account_id int, note text, bank text, amount numeric)")
    conn.execute(
        "create trigger defer after insert on movement for each row"
        " execute function queue.defer_trigger('transfer')"
    )
    first = transfer.defer(7, note="from python", bank="x")
    conn.execute(
        "insert into movement values (7, 'from a trigger', 'x', 1.5), (8, 'other', 'y', 2)"
    )
    assert column(conn, "lock") == ["account:7", "account:7", "account:8"]
    assert column(conn, "queueing_lock") == ["7/from python", "7/from a trigger", "8/other"]
    assert column(conn, "concurrency_key") == ["bank:x", "bank:x", "bank:y"]
    conn.execute("select queue.tick()")
    assert [row["state"] for row in jobs()] == ["ready", "blocked", "ready"]
    held = f"its lock account:7 is held by job {first.id} (ready)"
    assert conn.execute("select queue.why(%s)", [first.id + 1]).fetchone() == (
        f"no live worker serves its queue default; {held}",
    )
    # a waiting job prevents the insert of the row; a transaction that must not fail asks first
    with pytest.raises(psycopg.Error) as caught:
        conn.execute("insert into movement values (8, 'other', 'y', 3)")
    assert caught.value.sqlstate == "QJ004"
    assert conn.execute("select count(*) from movement").fetchone() == (2,)


def test_every_kind_of_scalar_fills_a_field(app: App, conn: Connection) -> None:
    @app.task(lock="{value}")
    def task(value: Any) -> None: ...

    key = uuid.UUID(int=5)
    for value in (1, "a {b} c", True, 1.5, key, dt.date(2030, 1, 2), "Zoë"):
        task.defer(value)
    assert column(conn, "lock") == [
        "1",
        "a {b} c",
        "true",
        "1.5",
        str(key),
        "2030-01-02",
        "Zoë",
    ]


async def test_each_of_several_keys_is_filled(app: App, jobs: Jobs, conn: Connection) -> None:
    at_work: list[tuple[int, str]] = []
    most: dict[str, int] = {}
    filled = {"a": asyncio.Event(), "b": asyncio.Event()}

    @app.task(
        concurrency=[
            {"key": "user:{user}", "limit": 1},
            {"key": "host:{host}", "limit": 2},
        ]
    )
    async def visit(user: int, host: str) -> None:
        at_work.append((user, host))
        for key in (f"user:{user}", f"host:{host}"):
            n = sum(key in (f"user:{u}", f"host:{h}") for u, h in at_work)
            most[key] = max(most.get(key, 0), n)
        if most[f"host:{host}"] == 2:
            filled[host].set()
        await filled[host].wait()
        await asyncio.sleep(0.02)
        at_work.remove((user, host))

    async with running(app, concurrency=20):
        for user in range(4):
            for host in ("a", "b", "a"):
                await visit.defer_async(user, host)
        rows = await jobs.end()
    assert [row["state"] for row in rows] == ["succeeded"] * 12
    # the groups of one template are separate: each user, and up to two on each host
    assert most == {f"user:{n}": 1 for n in range(4)} | {"host:a": 2, "host:b": 2}


def test_doubled_braces_are_no_field(app: App, jobs: Jobs) -> None:
    @app.task(lock="{{account}}:{n}", queueing_lock="{{{n}}}")
    def braced(n: int) -> None: ...

    braced.defer(7)
    (row,) = jobs()
    assert (row["lock"], row["queueing_lock"]) == ("{account}:7", "{7}")
    with pytest.raises(InvalidParameter, match="a single brace beside doubled ones"):
        app.defer("t", lock="{{account}")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"lock": "account:{account}"}, "account"),
        ({"queueing_lock": "{account}"}, "account"),
        ({"concurrency_key": "{account}", "concurrency_limit": 1}, "account"),
        ({"concurrency": [{"key": "{account}", "limit": 1}]}, "account"),
        ({"lock": "{n}:{}"}, ""),
        ({"lock": "{note}"}, "note"),  # has a default, which is not sent
        ({"lock": "{rows}"}, "rows"),  # is not a scalar
    ],
)
def test_a_field_that_is_missing(
    app: App, conn: Connection, options: dict[str, Any], field: str
) -> None:
    """The error names template and field, whoever defers, and nothing is deferred."""

    @app.task(name="plain")
    def plain(n: int, rows: list[int], note: str = "none") -> None: ...

    def define() -> Any:
        @app.task(name="templated", **options)
        def templated(n: int, rows: list[int], note: str = "none") -> None: ...

        return templated

    tasks = [plain.configure(**options)]
    if field in ("account", ""):
        with pytest.raises(ValueError, match="which is no argument"):
            define()
        # as another program may register it
        conn.execute("select queue.register_task('templated', %s)", [json.dumps(options)])
    else:
        tasks.append(define())
    for task in tasks:
        with pytest.raises(InvalidParameter, match="names a field that args do not fill") as caught:
            task.defer(1, [2])
        assert f"field: {field}" in str(caught.value.detail)
        assert "Defaults of the handler do not count" in str(caught.value.hint)
    conn.execute("create table t (n int, rows int[])")
    conn.execute(
        "create trigger t after insert on t for each row"
        " execute function queue.defer_trigger('templated')"
    )
    for call in (
        "select queue.defer('templated', '{\"n\": 1, \"rows\": []}')",
        "insert into t values (1, '{}')",
    ):
        with pytest.raises(psycopg.Error) as error:
            conn.execute(call.encode())
        assert error.value.sqlstate == "22023"
    assert conn.execute(
        "select (select count(*) from queue.jobs) + (select count(*) from t)"
    ).fetchone() == (0,)


def test_a_lock_by_the_time_of_the_run(app: App) -> None:
    @app.task(lock="day {scheduled_for}")
    def task(n: int) -> None: ...

    assert "day {scheduled_for}" in str(task.defaults)


def test_a_filled_name_has_its_limits(app: App, conn: Connection) -> None:
    @app.task(lock="{text}")
    def task(text: str) -> None: ...

    for text in ("", "x" * 1001):
        with pytest.raises(InvalidParameter):
            task.defer(text)
    task.defer("é" * 500)
    assert column(conn, "lock") == ["é" * 500]
