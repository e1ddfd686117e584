"""mypy reports wrong arguments as type errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

HEAD = """
import dataclasses
from datetime import timedelta
from typing import Any
import psycopg
import psycopg_pool
import sqlalchemy.ext.asyncio as sa_async
import sqlalchemy.orm as sa_orm
from pgdefer import App, BatchJob, Decision, Job, JobContext, Retry, current_job, models

app = App("postgresql://h/d")

@app.task(queue="mail", lock="account:{account_id}", retry=Retry(3), timeout=timedelta(seconds=5))
async def send(account_id: int, subject: str = "") -> float:
    return 1.0

@app.task
def count(path: str) -> int:
    return 1

@app.recurring("@daily", timezone="Europe/Paris", catch_up="all", max_delay=timedelta(1))
@app.recurring("@hourly", args={"path": "x"}, overlap="skip")
@app.task
def sweep(path: str = "") -> int:
    return 1

@app.recurring("@daily")
async def ping() -> float:
    return 1.0

@app.task(transactional=True, run_in="process", max_memory=1)
def pay(connection: psycopg.Connection[Any], amount: int) -> str:
    return "paid"

@app.task(transactional=True, retry_on=OSError, give_up_on=(KeyError, ValueError))
async def pay_async(connection: psycopg.AsyncConnection[Any], amount: int) -> str:
    return "paid"

@app.task(transactional=sa_orm.sessionmaker())
def save(session: sa_orm.Session, *, n: int) -> int:
    return n

@app.task(transactional=sa_async.async_sessionmaker(), name="save")
async def save_async(session: sa_async.AsyncSession, *, n: int) -> int:
    return n

@dataclasses.dataclass
class Row:
    name: str
    n: int = 0

@app.task(batch=100)
def insert(jobs: list[BatchJob[dict[str, Any]]]) -> None: ...

@app.task(batch=100, batch_of=Row, retry=3)
async def insert_rows(jobs: list[BatchJob[Row]]) -> list[int]:
    return [job.args.n for job in jobs]

def texts(jobs: list[BatchJob[str]]) -> None: ...

def decide(error: Exception, job: JobContext) -> Decision | None:
    return Decision(retry_in=timedelta(1)) if job.attempt == 1 else None

@app.task(decide=decide)
def decided() -> None: ...

async def use(
    connection: psycopg.Connection,
    other: psycopg.AsyncConnection,
    pool: psycopg_pool.ConnectionPool,
    async_pool: psycopg_pool.AsyncConnectionPool,
    row: models.Job,
) -> None:
"""

GOOD = """
    a: Job[float] = send.defer(account_id=1, subject="x")
    b: Job[int] = count.defer("x")
    c: Job[float] = await send.defer_async(1)
    d: Job[int] = count.configure(queue="q", delay=timedelta(1), needs=[a, 1]).defer(path="x")
    e: list[Job[int]] = count.defer_many([{"path": "x"}, count.prepare("x")])
    f: Job[float] = send.defer_with(connection, 1)
    g: Job[float] = await send.defer_with_async(other, 1, subject="x")
    h: float = await send(1)
    i: int = count("x")
    app.defer("unknown", {"a": 1}, priority=5)
    j: Job[int] = sweep.defer("x")
    k: Job[float] = await ping.defer_async()
    l: Job[str] = pay.defer(1)
    m: Job[str] = await pay_async.defer_async(amount=1)
    n: Job[int] = save.defer(n=1)
    o: Job[int] = save_async.defer(n=1)
    p: str = l.result()
    q: int = await n.result_async(timeout=5)
    r: Job[int] = app.group([send.prepare(1), count.prepare("x")]).then(count.prepare("x"))
    app.run_worker(["a"], slots=["1:30m", 2], drain=True)
    s: Job[Any] = app.job(row)
    t: str = app.job(current_job()).cancel(abort=True, connection=connection)
    u: str = await app.job(j).retry_async(force=True, connection=other)
    v: int = app.pause("mail", task="x", connection=sa_orm.Session())
    x: Job[Any] = insert.defer(whatever=1)
    y: Job[Any] = await insert_rows.defer_async("a", n=1)
    w: int = await app.resume_async(connection=sa_async.AsyncSession())
    z: App = App(connection=(pool, async_pool)) if w else App(connection=pool)
    aa: Job[float] = await send.configure(connection=async_pool).defer_async(1)
    bb: str = a.hold(connection=pool)
    cc: int = current_job().step("count", count, "x", retry=5)
    dd: float = await current_job().step_async("send", send, 1, subject="x")
    ee: int = await current_job().step_async("count", count, "x")
    ff: int = current_job().step("one", lambda: 1)
"""

BAD = [
    ("send.defer()", "Missing positional argument"),
    ("send.defer(account_id='x')", "incompatible type"),
    ("send.defer(1, subjekt='x')", "Unexpected keyword argument"),
    ("await send.defer_async('x')", "incompatible type"),
    ("count.configure().defer(1)", "incompatible type"),
    ("count.configure(qeue='x')", "Unexpected keyword argument"),
    ("count.configure(priority='x')", "incompatible type"),
    ("count.prepare(p='x')", "Unexpected keyword argument"),
    ("send.defer_with(connection, 'x')", "incompatible type"),
    ("x1: int = send.defer(1)", "Incompatible types in assignment"),
    ("y1: Job[str] = send.defer(1)", "Incompatible types in assignment"),
    ("app.task(queue=1)(print)", "No overload variant"),
    ("app.task(lokc='x')(print)", "Unexpected keyword argument"),
    ("pay.defer(connection, 1)", "Too many arguments"),
    ("save.defer(n='x')", "incompatible type"),
    ("l.result(timeout='x')", "incompatible type"),
    ("app.task(transactional=True)(count)", "incompatible type"),
    ("app.task(retry_on=5)", "No overload variant"),
    ("app.run_worker(slot=1)", "Unexpected keyword argument"),
    ("z1: int = await send(1)", "Incompatible types in assignment"),
    ("sweep.defer(1)", "incompatible type"),
    ("app.recurring('@daily', catch_up='some')", "incompatible type"),
    ("app.recurring('@daily', scheduled_at='x')", "Unexpected keyword argument"),
    ("a.cancel(True)", "Too many positional arguments"),
    ("a.hold(connection=other)", "incompatible type"),
    ("await a.hold_async(connection=connection)", "incompatible type"),
    ("a.hold(connection=async_pool)", "incompatible type"),
    ("await a.hold_async(connection=pool)", "incompatible type"),
    ("App(connection=connection)", "incompatible type"),
    ("a.reschedule('2030-01-01')", "incompatible type"),
    ("a.set_priority('5')", "incompatible type"),
    ("insert_rows.defer(name=1)", "incompatible type"),
    ("insert_rows.defer('a', x=1)", "Unexpected keyword argument"),
    ("app.task(batch=5, batch_of=Row)(texts)", "incompatible type"),
    ("app.job('5')", "incompatible type"),
    ("x2: str = current_job().step('count', count, 'x')", "Incompatible types in assignment"),
    ("y2: str = await current_job().step_async('s', send, 1)", "incompatible type"),
    ("z2: str = current_job().call(count.prepare('x'))", "Incompatible types in assignment"),
    ("z3: str = await current_job().call_async(send.prepare(1))", "incompatible type"),
]


def test_the_tutorial(tmp_path: Path) -> None:
    """Its code has the types that it says; the one mistake is there to be shown."""
    page = (Path(__file__).parents[3] / "docs/tutorial.md").read_text("utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for number, block in enumerate(blocks):
        name = "shop.py" if block.startswith("# shop.py") else f"block_{number}.py"
        with (tmp_path / name).open("a") as file:
            file.write(block)
    done = mypy(tmp_path, ".")
    assert [line for line in done if " error:" in line and "nmae" not in line] == []
    assert any("nmae" in line for line in done)


def mypy(folder: Path, *files: str) -> list[str]:
    """Return the lines of mypy's output."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", *files],
        check=False,
        cwd=folder,
        capture_output=True,
        text=True,
        env={"PATH": "/usr/bin", "MYPYPATH": str(Path(__file__).parents[3] / "python")},
    )
    assert not done.stderr, done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """mypy's errors by the line of code; one run for all, because it takes seconds."""
    folder = tmp_path_factory.mktemp("typing")
    lines = [*HEAD.splitlines(), *GOOD.splitlines(), *(f"    {code}" for code, _ in BAD)]
    (folder / "use.py").write_text("\n".join(lines) + "\n")
    found: dict[str, list[str]] = {}
    for line in mypy(folder, "use.py"):
        _, number, message = line.split(":", 2)
        if " error:" in message:
            found.setdefault(lines[int(number) - 1].strip(), []).append(message)
    return found


def test_right_calls_have_their_types(errors: dict[str, list[str]]) -> None:
    bad = {code for code, _ in BAD}
    assert {code: found for code, found in errors.items() if code not in bad} == {}


@pytest.mark.parametrize(("code", "message"), BAD)
def test_wrong_calls(errors: dict[str, list[str]], code: str, message: str) -> None:
    assert any(message in error for error in errors.get(code, [])), errors.get(code)
