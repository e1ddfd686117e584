"""Failures as reported by Python, and as handled by the database."""

from __future__ import annotations

import datetime as dt
import enum
import logging
import re
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from pgdefer import App, BatchJob, Decision, JobContext, Retry, RetryLater, current_job

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

HOUR = dt.timedelta(hours=1)


async def test_by_class(app: App, jobs: Jobs) -> None:
    kinds = {kind.__name__: kind for kind in (OSError, ConnectionError, KeyError, ValueError)}

    @app.task(retry=Retry(2), give_up_on=ConnectionError)
    async def gives_up(kind: str) -> None:
        raise kinds[kind]

    @app.task(retry=Retry(2), retry_on=(OSError, KeyError), give_up_on=ConnectionError)
    def retries(kind: str) -> None:
        raise kinds[kind]

    async with running(app):
        made = [await task.defer_async(kind) for task in (gives_up, retries) for kind in kinds]
        await jobs.end()
    shown = {row["id"]: row for row in jobs()}
    assert {shown[job.id]["state"] for job in made} == {"failed"}
    attempts = [shown[job.id]["attempts"] for job in made]
    assert attempts == [2, 1, 2, 2, 2, 1, 2, 1]
    reasons = [shown[job.id]["reason"] for job in made]
    assert reasons == ["attempts" if n == 2 else "not_retryable" for n in attempts]


async def test_by_the_class_of_each_error_in_a_group(app: App, jobs: Jobs) -> None:
    groups = [
        ExceptionGroup("one", [OSError()]),
        ExceptionGroup("within", [KeyError(), ExceptionGroup("another", [OSError()])]),
        ExceptionGroup("other", [OSError(), ValueError()]),
        ExceptionGroup("final", [OSError(), ConnectionError()]),
    ]

    @app.task(retry=Retry(2), retry_on=(OSError, KeyError), give_up_on=ConnectionError)
    async def task(number: int) -> None:
        raise groups[number]

    @app.task(retry=Retry(2), retry_on=ExceptionGroup)
    async def retries_groups(number: int) -> None:
        raise groups[number]

    async with running(app):
        made = [await task.defer_async(number) for number in range(len(groups))]
        made.append(await retries_groups.defer_async(2))
        await jobs.end()
    shown = {row["id"]: row for row in jobs()}
    assert [shown[job.id]["attempts"] for job in made] == [2, 2, 1, 1, 2]


async def test_by_decision(app: App, jobs: Jobs) -> None:
    asked: list[tuple[str, int, int]] = []

    def decide(error: BaseException, job: JobContext) -> Decision | None:
        asked.append((str(error), job.id, job.attempt))
        match str(error):
            case "give up":
                return Decision(retryable=False, reason="hopeless")
            case "again" if job.attempt < 5:
                return Decision(retryable=True)
            case "elsewhere" if job.attempt == 1:
                return Decision(retry_in=dt.timedelta(0), queue="other", priority=7, lock="l")
            case "broken":
                raise RuntimeError("in decide")
        return None

    @app.task(retry=Retry(2), decide=decide)
    async def task(text: str) -> tuple[str, int, str | None]:
        job = current_job()
        if text == "elsewhere" and job.attempt == 2:
            return job.queue, job.priority, job.lock
        raise ValueError(text)

    texts = ["give up", "again", "elsewhere", "broken", "other"]
    async with running(app):
        made = {text: await task.defer_async(text) for text in texts}
        await jobs.end()
    shown = {row["id"]: row for row in jobs()}
    ends = {
        text: (shown[job.id]["state"], shown[job.id]["attempts"], shown[job.id]["reason"])
        for text, job in made.items()
    }
    assert ends == {
        "give up": ("failed", 1, "hopeless"),
        "again": ("failed", 5, "attempts"),
        "elsewhere": ("succeeded", 2, None),
        "broken": ("failed", 2, "attempts"),
        "other": ("failed", 2, "attempts"),
    }
    assert app.codec.decode(shown[made["elsewhere"].id]["result"]) == ("other", 7, "l")
    assert ("give up", made["give up"].id, 1) in asked


async def test_a_time_for_the_retry(app: App, jobs: Jobs) -> None:
    @app.task(decide=lambda error, job: Decision(retry_in=HOUR))
    async def task() -> None:
        raise ValueError("not now")

    async with running(app):
        job = await task.defer_async()

        await until(lambda: jobs.states()[job.id] == "scheduled")
    (row,) = jobs()
    left = row["scheduled_at"] - dt.datetime.now(dt.UTC)
    assert HOUR - dt.timedelta(minutes=1) < left <= HOUR


INVALID: list[dict[str, Any]] = [
    {"queue": "bad*"},
    {"lock": "l" * 2000},
    {"retryable": "maybe"},
    {"retryable": True, "queue": "bad*"},
    {"retry_in": dt.timedelta(days=-5)},
    {"retry_in": HOUR, "retry_at": dt.datetime.now(dt.UTC)},
]


@pytest.mark.parametrize("invalid", INVALID, ids="-".join)
async def test_an_invalid_decision_keeps_the_error(
    app: App, jobs: Jobs, caplog: pytest.LogCaptureFixture, invalid: dict[str, Any]
) -> None:
    @app.task(retry=Retry(2), decide=lambda error, job: Decision(**invalid))
    async def task() -> None:
        await current_job().step_async("a", one)
        if current_job().attempt == 1:
            raise ValueError("the real one")

    calls = []

    async def one() -> int:
        calls.append(1)
        return 1

    async with running(app):
        await task.defer_async()
        (row,) = await jobs.end()
    (attempt,) = jobs.attempts()
    assert (row["state"], attempt["outcome"]) == ("succeeded", "failed")
    assert attempt["error"] == "ValueError: the real one"
    assert "the real one" in attempt["details"]["traceback"]
    assert calls == [1]
    assert next(iter(invalid)) in caplog.text


async def test_extending_a_lease(app: App, jobs: Jobs) -> None:
    ends: list[dt.datetime] = []

    @app.task
    async def coroutine() -> None:
        ends.append(await current_job().extend_async(HOUR))

    @app.task
    def function() -> None:
        ends.append(current_job().extend(HOUR))

    async with running(app):
        await coroutine.defer_async()
        await function.defer_async()
        rows = await jobs.end()
    assert [row["state"] for row in rows] == ["succeeded"] * 2
    now = dt.datetime.now(dt.UTC)
    assert all(HOUR - dt.timedelta(minutes=1) < end - now <= HOUR for end in ends)


class Kind(enum.Enum):
    ONE = 1


SECRET = "correct horse battery staple"


async def test_secrets_in_arguments_are_not_logged(
    app: App, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    @app.task(name="task", retry=Retry(2))
    async def task(password: str) -> None:
        raise ValueError("no")

    @app.task(name="typed")
    async def typed(value: Any) -> None: ...

    jobs._cursor.execute('select queue.configure(\'{"unknown_task_grace": "0 s"}\')')
    made = [await task.defer_async(SECRET), await app.defer_async("unknown", {"a": SECRET})]
    await app.defer_async("typed", {"wrong": SECRET})
    async with running(app):
        for tag in ("uuid", "datetime", "decimal", "enum", "dataclass", "nothing", "bytes"):
            jobs._cursor.execute(
                "select queue.defer('typed', jsonb_build_object('value', jsonb_build_object("
                "'__pgdefer__', %s::text, 'value', %s::text, 'type', %s::text)))",
                (tag, SECRET, f"{__name__}:Kind"),
            )
        await jobs.end()
    assert [row["state"] for row in jobs()] == ["failed"] * (len(made) + 8)
    assert SECRET not in caplog.text
    errors = [str(row["error"]) for row in jobs()]
    details = [str(attempt["details"]) + str(attempt["error"]) for attempt in jobs.attempts()]
    assert SECRET not in "".join(errors + details)


MODULE = """
import os, time
import psycopg
from pgdefer import App, JobAborted, Retry, RetryLater, current_job

app = App({dsn!r})

@app.task(name="coroutine", retry=Retry(2))
async def coroutine(password: str) -> None:
    raise ValueError("no")

@app.task(name="function")
def function(password: str) -> None:
    raise SystemExit(1)

@app.task(name="late")
def late(password: str) -> None:
    while not current_job().should_abort():
        time.sleep(0.01)
    current_job().check_abort()

@app.task(name="aborted")
def aborted(password: str) -> None:
    raise JobAborted("enough")

@app.task(name="later", retry=Retry(1))
def later(password: str) -> None:
    if current_job().attempt == 1:
        raise RetryLater("soon")
    raise KeyError("no")

@app.task(name="transaction", transactional=True)
def transaction(connection: psycopg.Connection, password: str) -> None:
    connection.execute("select 1 / 0")

@app.task(name="process", run_in="process")
def process(password: str) -> None:
    raise ValueError("no")

@app.task(name="process_late", run_in="process")
def process_late(password: str) -> None:
    while True:
        pass

@app.task(name="process_dies", run_in="process", retry=Retry(1, on_crash="fail"))
def process_dies(password: str) -> None:
    os._exit(1)

@app.task(name="odd")
def odd(password: str) -> object:
    return lambda: password
"""


def test_a_worker_logs_no_secrets(dsn: str, app: App, jobs: Jobs, tmp_path: Path) -> None:
    (tmp_path / "mod.py").write_text(MODULE.format(dsn=dsn))
    jobs._cursor.execute('select queue.configure(\'{"unknown_task_grace": "0 s"}\')')
    names = "coroutine function late aborted later transaction process process_late process_dies"
    made = {
        name: app.defer(
            name, {"password": SECRET}, timeout=dt.timedelta(seconds=0.5 if "late" in name else 60)
        ).id
        for name in [*names.split(), "odd", "none"]
    }
    made["more"] = app.defer("function", {"password": SECRET, "more": SECRET}).id
    done = subprocess.run(
        [sys.executable, "-m", "pgdefer", "worker", "-A", "mod:app", "--drain", "--verbose"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    shown = {row["id"]: row for row in jobs()}
    states = {name: (shown[id]["state"], shown[id]["error"]) for name, id in made.items()}
    assert states == {
        "coroutine": ("failed", "ValueError: no"),
        "function": ("failed", "SystemExit: 1"),
        "late": ("failed", "TimeoutError: not done within 0:00:00.500000"),
        "aborted": ("cancelled", "JobAborted: enough"),
        "later": ("failed", "KeyError: 'no'"),
        "transaction": ("failed", "DivisionByZero: division by zero"),
        "process": ("failed", "ValueError: no"),
        "process_late": ("failed", "TimeoutError: not done within 0:00:00.500000"),
        "process_dies": ("failed", "ProcessDied: its process exited with 1"),
        "odd": ("succeeded", None),
        "none": ("failed", shown[made["none"]]["error"]),
        "more": ("failed", "DecodeError: the task takes no argument more"),
    }
    told = done.stdout + done.stderr
    # It names jobs and reasons, but no data.
    for name, cause in {
        "coroutine attempt 2": "failed: ValueError: no",
        "function attempt 1": "failed: SystemExit: 1",
        "process attempt 1": "failed: ValueError: no",
        "process_dies attempt 1": "crashed: ProcessDied: its process exited with 1",
        "none attempt 1": "failed: no worker knows the task",
    }.items():
        # also from a separate process
        head = r"(?m)^20\d\d-.* (ERROR pgdefer\.job|WARNING pgdefer\.(job|worker)): "
        assert re.search(rf"{head}<job \d+ {name} claim \d+> {cause}", told)
    assert SECRET not in told
    for row in [*shown.values(), *jobs.attempts()]:
        kept = {name: row.get(name) for name in ("error", "details", "result", "reason")}
        assert SECRET not in str(kept)
    for attempt in jobs.attempts():
        if attempt["outcome"] == "failed" and attempt["job_id"] != made["none"]:
            assert {"type", "message", "traceback"} <= attempt["details"].keys()


async def test_large_errors_are_cut(app: App, jobs: Jobs) -> None:
    @app.task
    async def task() -> None:
        raise ValueError("x" * 1_000_000)

    async with running(app):
        await task.defer_async()
        (row,) = await jobs.end()
    assert len(row["error"]) <= 2_000
    assert len(str(jobs.attempts()[0]["details"])) < 40_000


async def test_an_argument_with_a_uuid_in_a_lock(app: App, jobs: Jobs) -> None:
    @app.task(lock="account:{account}")
    async def task(account: uuid.UUID) -> str | None:
        return current_job().lock

    account = uuid.uuid4()
    async with running(app):
        job = await task.defer_async(account)
        assert await job.result_async(300) == f"account:{account}"
        jobs._cursor.execute(
            "select queue.defer(%s, jsonb_build_object('account', %s::text))",
            (task.name, str(account)),
        )
        rows = await jobs.end()
    assert {row["lock"] for row in rows} == {f"account:{account}"}


async def test_needs_that_the_database_refuses(app: App, jobs: Jobs) -> None:
    """The claim is not lost; otherwise the job would seem to run forever. A retry can't mend it."""

    @app.task(name="single", retry=Retry(2, base=dt.timedelta(0)))
    async def single() -> None:
        raise RetryLater(needs=[10**9])

    @app.task(name="batch", batch=2)
    def batch(of: list[BatchJob[Any]]) -> list[RetryLater]:
        return [RetryLater(needs=[job.id, 1]) for job in of]

    await single.defer_async()
    await batch.defer_async()
    async with running(app):
        await jobs.end()
    ends = {
        row["task"]: (row["reason"], row["attempts"], row["error"].partition(". ")[0])
        for row in jobs()
    }
    cycle = "DependencyCycle: the new need would create a dependency cycle (needs: 2, 1)"
    assert ends == {
        "single": ("not_retryable", 1, "JobNotFound: job not found (needs: 1000000000)"),
        "batch": ("not_retryable", 1, cycle),
    }
