"""Handlers that take many jobs at once: `@app.task(batch=...)`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import json
import logging
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pgdefer import (
    App,
    BatchJob,
    Decision,
    JobAborted,
    JobContext,
    JobEvent,
    RetryLater,
    current_job,
)
from pgdefer.codec import TAG
from pgdefer.contrib import otel, sentry
from pgdefer.tasks.context import running_job
from pgdefer.testing import TestQueue

from .conftest import Jobs, Program, give_up, running, until, wait_for

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
Batch = list[BatchJob[Any]]


def define(app: App, handler: Callable[[Batch], Any], *, is_async: bool, **options: Any) -> Any:
    """Make a task of a function, or of a coroutine that calls it."""
    given: dict[str, Any] = {"name": "t", "batch": 100} | options

    async def in_loop(jobs: Batch) -> Any:
        await asyncio.sleep(0)
        return handler(jobs)

    return app.task(**given)(in_loop if is_async else handler)


async def run(app: App, **options: Any) -> None:
    """Run a worker until nothing is left that would start by itself: at first, 100 jobs."""
    async with running(app, drain=True, **{"concurrency": 100} | options) as worker:
        await until(lambda: worker.id is not None)
        await until(lambda: worker.id is None)


def outcomes(jobs: Jobs) -> list[tuple[str, Any]]:
    return [(row["state"], row["result"]) for row in jobs()]


# Gathering


async def test_a_handler_gets_the_jobs_of_a_fetch(app: App, jobs: Jobs) -> None:
    got: list[list[tuple[Any, ...]]] = []

    def handler(batch: Batch) -> None:
        got.append([(job.id, job.args, job.attempt, job.headers) for job in batch])

    for is_async in (True, False):
        task = define(app, handler, is_async=is_async, name=str(is_async))
        task.configure(headers={"h": 1}).defer_many([{"n": n} for n in range(20)])
    await run(app)
    expected = [(n + 1, {"n": n % 20}, 1, {"h": 1}) for n in range(40)]
    assert sorted(got) == [expected[:20], expected[20:]]
    assert outcomes(jobs) == [("succeeded", None)] * 40


async def test_batches_fill(app: App, jobs: Jobs) -> None:
    """Though there are fewer slots than jobs in a batch, and though their handlers are slow."""
    sizes: list[int] = []
    go_on = asyncio.Event()

    @app.task(batch=100)
    async def task(batch: Batch) -> None:
        sizes.append(len(batch))
        await go_on.wait()

    task.defer_many([{}] * 1000)
    async with running(app, concurrency=2, prefetch=0):
        await until(lambda: len(sizes) == 2)
        go_on.set()
        await jobs.end()
    # Twice as much for each slot whenever an answer was full.
    assert sizes[:2] == [2, 4]
    assert max(sizes) == 100
    assert sum(sizes) == 1000
    assert len(sizes) < 25


async def test_a_batch_uses_one_slot(app: App, jobs: Jobs) -> None:
    now = most = 0

    @app.task(batch=10)
    async def task(batch: Batch) -> None:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.001)
        now -= 1

    task.defer_many([{}] * 500)
    async with running(app, concurrency=3) as worker:
        await jobs.end()
        await until(lambda: worker.slots[0].used == 0)
        assert (worker.slots[0].running, worker.slots[0].free, worker.finished) == (0, 3, 500)
    assert most == 3


async def test_no_more_than_its_size_and_none_waits_for_more(app: App, jobs: Jobs) -> None:
    sizes: list[int] = []

    @app.task(batch=7)
    async def task(batch: Batch) -> None:
        sizes.append(len(batch))

    task.defer_many([{}] * 20)
    await run(app)
    assert sizes == [7, 7, 6]
    task.defer()
    await run(app)
    assert sizes == [7, 7, 6, 1]
    assert set(jobs.states().values()) == {"succeeded"}


async def test_other_tasks_and_other_timeouts_have_their_own_calls(app: App, jobs: Jobs) -> None:
    calls: list[tuple[str, list[int]]] = []

    @app.task(batch=10, name="a", aliases=["old"])
    async def a(batch: Batch) -> None:
        calls.append(("a", [job.id for job in batch]))

    @app.task(batch=10, name="b")
    async def b(batch: Batch) -> None:
        calls.append(("b", [job.id for job in batch]))

    @app.task(name="single")
    async def single() -> None:
        calls.append(("single", [current_job().id]))

    minute = dt.timedelta(minutes=1)
    app.defer_many(
        [
            a.prepare(),
            single.prepare(),
            b.prepare(),
            app.prepare("old"),
            a.configure(timeout=minute).prepare(),
            a.configure(timeout=minute).prepare(),
        ]
    )
    await run(app)
    assert sorted(calls) == [("a", [1, 4]), ("a", [5, 6]), ("b", [3]), ("single", [2])]
    assert set(jobs.states().values()) == {"succeeded"}


async def test_limits_count_jobs(app: App, jobs: Jobs) -> None:
    sizes: list[int] = []

    @app.task(batch=10)
    async def task(batch: Batch) -> None:
        sizes.append(len(batch))
        await asyncio.sleep(0)

    task.configure(concurrency_key="k", concurrency_limit=3).defer_many([{}] * 9)
    task.configure(lock="l").defer_many([{}] * 2)
    await run(app)
    # Three with the key and one with the lock.
    assert max(sizes) <= 4
    assert sum(sizes) == 11
    task.defer_many([{}] * 20)
    await run(app, max_jobs=7, concurrency=2)
    assert list(jobs.states().values()).count("ready") == 13
    await run(app, tasks=[task.name])
    assert set(jobs.states().values()) == {"succeeded"}


async def test_large_jobs_fill_batches_too(app: App, jobs: Jobs) -> None:
    """One answer does not hold them all."""
    sizes: list[int] = []

    @app.task(batch=100)
    async def task(batch: Batch) -> None:
        assert all(len(job.args["text"]) == 3000 for job in batch)
        sizes.append(len(batch))

    task.defer_many([{"text": "x" * 3000}] * 150)
    await run(app)
    assert sum(sizes) == 150
    assert len(sizes) < 25
    assert set(jobs.states().values()) == {"succeeded"}


async def test_jobs_that_fill_no_batch_do_not_wait_here(app: App, jobs: Jobs, dsn: str) -> None:
    """A worker that asks for a batch and gets other jobs keeps only as many as it can start."""
    release = asyncio.Event()

    @app.task(batch=100)
    async def many(batch: Batch) -> None: ...

    @app.task
    async def single() -> None:
        await release.wait()

    many.defer_many([{}] * 200)
    single.defer_many([{}] * 200)
    async with running(app, concurrency=2) as worker:
        await until(lambda: list(jobs.states().values()).count("succeeded") == 200)
        await until(lambda: list(jobs.states().values()).count("running") == 2)
        assert worker.slots[0].used == 2
        assert list(jobs.states().values()).count("ready") == 198
        assert {row["attempts"] for row in jobs() if row["state"] == "ready"} == {0}
        release.set()
        await jobs.end()


# Outcomes


def every(batch: Batch) -> list[Any]:
    return [{"n": 1}, ValueError("no"), RetryLater("soon"), JobAborted("enough"), None, 5]


WAYS: dict[str, Callable[[Batch], Any]] = {
    "list": every,
    "tuple": lambda batch: tuple(every(batch)),
    "job": lambda batch: dict(zip(batch, every(batch), strict=True)),
    # What is left out has succeeded.
    "id": lambda batch: {
        job.id: said for job, said in zip(batch, every(batch), strict=True) if said
    },
}


async def test_an_outcome_for_each(app: App, jobs: Jobs) -> None:
    for way, handler in WAYS.items():
        for is_async in (True, False):
            name = f"{way} {is_async}"
            define(app, handler, is_async=is_async, name=name, max_progress=0).defer_many([{}] * 6)
    await run(app)
    rows = jobs()
    for first in range(0, 48, 6):
        some = rows[first : first + 6]
        assert [(row["state"], row["result"], row["error"]) for row in some] == [
            ("succeeded", {"n": 1}, None),
            ("failed", None, "ValueError: no"),
            ("failed", None, some[2]["error"]),
            ("cancelled", None, "JobAborted: enough"),
            ("succeeded", None, None),
            ("succeeded", 5, None),
        ]
        attempts = [row for row in jobs.attempts() if row["job_id"] in {row["id"] for row in some}]
        assert [row["outcome"] for row in attempts] == ["failed", "yielded", "aborted"]


async def test_a_handler_that_raises(app: App, jobs: Jobs) -> None:
    """Each job fails by its own retry policy."""

    def handler(batch: Batch) -> None:
        raise ValueError("all")

    for is_async in (True, False):
        task = define(app, handler, is_async=is_async, name=str(is_async))
        task.defer()
        task.configure(retry=2).defer()
    await run(app)
    assert [(row["state"], row["error"], row["failures"]) for row in jobs()] == [
        ("failed", "ValueError: all", 1),
        ("failed", "ValueError: all", 2),
    ] * 2


async def test_a_handler_that_yields(app: App, jobs: Jobs) -> None:
    calls: list[str] = []

    def handler(batch: Batch) -> Any:
        calls.append(batch[0].task)
        if calls.count(batch[0].task) > 1:
            return None
        if batch[0].task == "raises":
            raise RetryLater("later")
        return RetryLater("later")

    define(app, handler, is_async=True, name="raises").defer_many([{}] * 2)
    define(app, handler, is_async=False, name="returns").defer_many([{}] * 2)
    await run(app)
    assert outcomes(jobs) == [("succeeded", None)] * 4
    assert [row["outcome"] for row in jobs.attempts()] == ["yielded"] * 4


async def test_calls_that_fail_singly(app: App, jobs: Jobs) -> None:
    async def call(job: BatchJob[Any]) -> int:
        if job.args["n"] == 1:
            raise ValueError("one")
        return int(job.args["n"])

    @app.task(batch=10)
    async def task(batch: Batch) -> Any:
        return await asyncio.gather(*map(call, batch), return_exceptions=True)

    task.defer_many([{"n": n} for n in range(3)])
    await run(app)
    assert outcomes(jobs) == [("succeeded", 0), ("failed", None), ("succeeded", 2)]


async def test_what_a_task_decides_of_errors_holds_for_each_job(app: App, jobs: Jobs) -> None:
    def decide(error: BaseException, job: JobContext) -> Decision:
        return Decision(retryable=False, reason=f"{error} {job.id}")

    def handler(batch: Batch) -> Any:
        return [KeyError("a"), ValueError("b"), OSError("c")]

    task = define(app, handler, is_async=True, retry=5, give_up_on=KeyError, decide=decide)
    task.defer_many([{}] * 3)
    await run(app)
    rows = jobs()
    assert [(row["state"], row["failures"]) for row in rows] == [("failed", 1)] * 3
    assert [row["reason"] for row in rows][1:] == ["b 2", "c 3"]


class Hostile:
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def generator() -> Iterator[int]:
    yield 1


# What a handler returns, and the error of all its jobs.
REFUSED: list[tuple[Callable[[Batch], Any], str]] = [
    (lambda _: [1], "returned 1 outcomes for 2 jobs"),
    (lambda _: [], "returned 0 outcomes for 2 jobs"),
    (lambda _: [1, 2, 3], "returned 3 outcomes for 2 jobs"),
    (lambda batch: {batch[0].id: 1, -9: 2}, "returned an outcome for -9, not in its batch"),
    (lambda batch: {str(batch[0].id): 1}, "', not in its batch"),
    (lambda _: {True: 1}, "returned an outcome for True, not in its batch"),
    (lambda batch: {float(batch[0].id): 1}, ".0, not in its batch"),
    (lambda batch: {batch[0]: 1, batch[0].id: 2}, "returned two outcomes for job"),
    (lambda _: "ab", "returned a str"),
    (lambda _: {1, 2}, "returned a set"),
    (lambda _: 2, "returned a int"),
    (lambda _: False, "returned a bool"),
    (lambda _: ValueError("x"), "returned a ValueError"),
    (lambda _: Hostile(), "returned a Hostile"),
    (lambda _: generator(), "returned a generator, whose code nobody runs"),
    (lambda batch: (n for n in batch), "returned a generator, whose code nobody runs"),
    (lambda _: asyncio.sleep(0), "returned a coroutine, whose code nobody runs"),
]


async def test_what_cannot_be_divided_fails_all(app: App, jobs: Jobs) -> None:
    for n, (handler, _) in enumerate(REFUSED):
        for is_async in (True, False):
            define(app, handler, is_async=is_async, name=f"{n} {is_async}").defer_many([{}, {}])
    await run(app)
    rows = jobs()
    assert len(rows) == 4 * len(REFUSED)
    for row in rows:
        assert row["state"] == "failed"
        assert row["error"].startswith("TypeError: the task ")
        assert REFUSED[int(row["task"].split()[0])][1] in row["error"]


# An outcome, and the error of its job.
MISTAKEN: list[tuple[Callable[[], Any], str]] = [
    (lambda: ValueError, "is the class ValueError, not an error"),
    (lambda: asyncio.sleep(0), "is a coroutine, whose code nobody runs"),
    (generator, "is a generator, whose code nobody runs"),
    (KeyboardInterrupt, "KeyboardInterrupt"),
    (lambda: SystemExit(1), "SystemExit: 1"),
    (asyncio.CancelledError, "CancelledError"),
]


async def test_a_mistaken_outcome_is_its_jobs_alone(app: App, jobs: Jobs) -> None:
    def define_one(n: int, *, is_async: bool) -> None:
        def handler(_: Batch) -> Any:
            return [MISTAKEN[n][0](), "well"]

        define(app, handler, is_async=is_async, name=f"{n} {is_async}").defer_many([{}, {}])

    for n in range(len(MISTAKEN)):
        define_one(n, is_async=True)
        define_one(n, is_async=False)
    await run(app)
    assert outcomes(jobs) == [("failed", None), ("succeeded", "well")] * 2 * len(MISTAKEN)
    for row in jobs()[::2]:
        assert MISTAKEN[int(row["task"].split()[0])][1] in row["error"]


class Unprintable(Exception):  # noqa: N818
    """An error that can't be shown, compared, copied or pickled."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__

    def __reduce__(self) -> Any:
        raise TypeError("no copy")


async def test_errors_and_results_that_nobody_can_read(app: App, jobs: Jobs) -> None:
    def handler(batch: Batch) -> Any:
        return [Unprintable(), object(), "\0", "\ud800", 1]

    define(app, handler, is_async=True).defer_many([{}] * 5)
    await run(app)
    states = [row["state"] for row in jobs()]
    assert states == ["failed", "succeeded", "succeeded", "succeeded", "succeeded"]
    assert "its text could not be made: RuntimeError" in jobs()[0]["error"]
    assert jobs()[4]["result"] == 1


async def test_a_handler_may_change_its_list(app: App, jobs: Jobs) -> None:
    def handler(batch: Batch) -> None:
        while batch:
            batch.pop()

    define(app, handler, is_async=False).defer_many([{}] * 3)
    await run(app)
    assert outcomes(jobs) == [("succeeded", None)] * 3


# Arguments


@dataclasses.dataclass
class Row:
    name: str
    n: int = 5

    def __post_init__(self) -> None:
        if self.n < 0:
            raise ValueError(f"{self.n} is below 0")


async def test_arguments_of_a_class(app: App, jobs: Jobs, conn: Connection) -> None:
    """Those that do not fit are their job's alone, and if none fits, there is no call."""
    got: list[Any] = []

    def handler(batch: Batch) -> Any:
        got.append([job.args for job in batch])
        return [job.args.n for job in batch]

    args: list[dict[str, Any]]
    args = [{}, {"name": "a", "n": 1}, {"x": 1}, {"name": "b", "n": -1}, {"name": "c"}]
    for is_async in (True, False):
        task = define(app, handler, is_async=is_async, name=str(is_async), batch_of=Row)
        app.defer_many(app.prepare(task.name, each) for each in args)
        unknown = json.dumps({"name": {TAG: "unknown", "value": 1}})
        conn.execute("select queue.defer(%s, %s)", [task.name, unknown])
    task = define(app, handler, is_async=True, name="none", batch_of=Row)
    app.defer(task.name)
    with pytest.raises(TypeError, match="unexpected keyword argument 'x'"):
        task.defer(name="a", x=1)
    with pytest.raises(TypeError, match="missing a required argument: 'name'"):
        task.defer()
    await run(app)
    rows = jobs()
    for some in (rows[:6], rows[6:12]):
        assert [(row["state"], row["result"], row["error"]) for row in some][:5] == [
            ("failed", None, "DecodeError: the task needs the argument name"),
            ("succeeded", 1, None),
            ("failed", None, "DecodeError: the task takes no argument x"),
            ("failed", None, "ValueError: -1 is below 0"),
            ("succeeded", 5, None),
        ]
        assert (some[5]["state"], some[5]["error"][:12]) == ("failed", "DecodeError:")
    assert rows[12]["state"] == "failed"
    assert got == [[Row("a", 1), Row("c")]] * 2


class Remote:
    """A codec that must be awaited in the worker's loop."""

    def __init__(self) -> None:
        self.decoded_in: set[str] = set()

    async def decode(self, value: Any) -> Any:
        await asyncio.sleep(0)
        self.decoded_in.add(threading.current_thread().name)
        return complex(value)


async def test_asynchronous_codecs(app: App, jobs: Jobs) -> None:
    remote = Remote()
    app.codec.register(complex, tag="complex", encode=str, decode=remote.decode)

    def handler(batch: Batch) -> Any:
        return [str(job.args["z"]) for job in batch]

    for is_async in (True, False):
        task = define(app, handler, is_async=is_async, name=str(is_async))
        task.defer_many([{"z": 1j}, {"z": 2j}])
    await run(app)
    assert outcomes(jobs) == [("succeeded", "1j"), ("succeeded", "2j")] * 2
    assert remote.decoded_in == {"MainThread"}


# The current job, and code around handlers


async def test_no_job_is_the_current_one(app: App, jobs: Jobs) -> None:
    @app.task(name="child")
    async def child() -> None: ...

    def handler(batch: Batch) -> None:
        assert running_job() is None
        with pytest.raises(LookupError, match="a batch's jobs are its handler's argument"):
            current_job()
        child.defer()
        child.configure(parent=batch[0].id).defer()
        assert batch[0].max_attempts() == 1
        with pytest.raises(TypeError, match="'s' is refused: a job in a batch has no steps"):
            batch[0].step("s", int)
        with pytest.raises(TypeError, match="a job in a batch has no steps"):
            batch[0].sleep("s", dt.timedelta(1))
        batch[1].progress(50)

    define(app, handler, is_async=False).defer_many([{}, {}])
    await run(app)
    rows = jobs()
    assert [(row["state"], row["parent"]) for row in rows] == [("succeeded", None)] * 3 + [
        ("succeeded", 1)
    ]


async def test_middleware_sees_the_end_of_its_own_job(dsn: str, jobs: Jobs) -> None:
    lines: list[str] = []

    @contextlib.contextmanager
    def surround(job: JobContext) -> Iterator[None]:
        assert current_job() is job
        n = job.args["n"] if isinstance(job, BatchJob) else None
        if n == 5:
            raise OSError("not this one")
        lines.append(f"{n} begins")
        try:
            yield
        except ValueError as error:
            lines.append(f"{n} fails: {error}")
            if n == 2:
                raise KeyError("in its place") from None
            if n == 3:
                return
            raise
        assert current_job() is job
        lines.append(f"{n} ends: {job.result!r}")
        if n == 4:
            raise OSError("afterwards")

    def handler(batch: Batch) -> Any:
        lines.append(f"{len(batch)} jobs")
        return [0, ValueError("b"), ValueError("c"), ValueError("d"), 4, RetryLater("e")]

    app = App(dsn, middleware=[surround])
    for is_async in (True, False):
        task = define(app, handler, is_async=is_async, name=str(is_async), max_progress=0)
        task.defer_many([{"n": n} for n in range(7)])
        await run(app)
    assert lines == 2 * [
        *(f"{n} begins" for n in (0, 1, 2, 3, 4, 6)),
        "6 jobs",
        "6 ends: RetryLater('e')",
        "4 ends: 4",
        "3 fails: d",
        "2 fails: c",
        "1 fails: b",
        "0 ends: 0",
    ]
    rows = jobs()
    assert [(row["state"], row["result"], row["error"]) for row in rows[:6] + rows[7:13]] == 2 * [
        ("succeeded", 0, None),
        ("failed", None, "ValueError: b"),
        ("failed", None, "KeyError: 'in its place'"),
        ("succeeded", None, None),
        ("failed", None, "OSError: afterwards"),
        ("failed", None, "OSError: not this one"),
    ]


async def test_asynchronous_middleware(dsn: str, jobs: Jobs) -> None:
    lines: list[str] = []

    @contextlib.asynccontextmanager
    async def surround(job: JobContext) -> Any:
        await asyncio.sleep(0)
        lines.append(f"{job.id} begins")
        try:
            yield
        finally:
            await asyncio.sleep(0)
            lines.append(f"{job.id} ends")

    app = App(dsn, middleware=[surround])
    define(app, lambda batch: None, is_async=True).defer_many([{}] * 2)
    await run(app)
    assert lines == ["1 begins", "2 begins", "2 ends", "1 ends"]


async def test_hooks_and_logs_are_of_single_jobs(
    app: App, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    events: list[tuple[Any, ...]] = []

    @app.on("exhausted")
    def exhausted(event: JobEvent) -> None:
        events.append((event.job.id, event.outcome, event.state, event.error, event.exception))

    error = ValueError("no")
    define(app, lambda batch: [None, error], is_async=True).defer_many([{}, {}])
    with caplog.at_level(logging.INFO, "pgdefer.job"):
        await run(app)
    assert events == [(2, "failed", "failed", "ValueError: no", error)]
    said = [
        (vars(record)["id"], vars(record)["outcome"])
        for record in caplog.records
        if record.name == "pgdefer.job"
    ]
    assert sorted(said) == [(1, "succeeded"), (2, "failed")]


async def test_spans_and_scopes_are_of_single_jobs(app: App, jobs: Jobs) -> None:
    exporter, tracers = InMemorySpanExporter(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    otel.instrument(app, tracer_provider=tracers)
    sentry.instrument(app)

    async def handler(batch: Batch) -> Any:
        with tracers.get_tracer("test").start_as_current_span("bulk"):
            return [None, ValueError("no"), None]

    task = app.task(name="t", batch=3)(handler)
    app.defer_many([task.prepare() for _ in range(3)])
    await run(app)
    spans = {
        span.attributes["messaging.message.id"]: span
        for span in exporter.get_finished_spans()
        if span.name == "process t" and span.attributes
    }
    created = [s.context for s in exporter.get_finished_spans() if s.name == "create t"]
    assert [spans[id].status.status_code.name for id in "123"] == ["UNSET", "ERROR", "UNSET"]
    # Each is part of the trace of its own job.
    for id in "123":
        parent = spans[id].parent
        assert parent is not None
        assert parent.span_id == created[int(id) - 1].span_id
    (bulk,) = (span for span in exporter.get_finished_spans() if span.name == "bulk")
    assert bulk.parent is not None
    assert bulk.parent.span_id == spans["3"].context.span_id


async def test_a_recurring_task(app: App, jobs: Jobs) -> None:
    got: list[Any] = []

    @app.recurring("@daily", args={"n": 1})
    @app.task(name="t", batch=3)
    async def task(batch: Batch) -> None:
        got.extend((job.args, job.scheduled_for is not None) for job in batch)

    async with running(app):
        await until(app.list_schedules)
        app.run_now("t")
        await until(lambda: got)
    assert got == [({"n": 1}, True)]


# Ends from outside


async def test_one_job_is_aborted(app: App, jobs: Jobs, conn: Connection) -> None:
    """The handler sees it in that job alone, and goes on; what it says of the job holds."""
    started: set[str] = set()
    is_cancelled = False

    def are_told(batch: Batch) -> bool:
        return batch[1].should_abort() and batch[2].should_abort()

    def ended(batch: Batch) -> Any:
        assert not batch[0].should_abort()
        with pytest.raises(JobAborted):
            batch[1].check_abort()
        return {batch[1]: JobAborted("as told")}

    @app.task(batch=10)
    def in_thread(batch: Batch) -> Any:
        started.add("thread")
        wait_for(lambda: are_told(batch))
        return ended(batch)

    @app.task(batch=10)
    async def in_loop(batch: Batch) -> Any:
        nonlocal is_cancelled
        started.add("loop")
        try:
            await until(lambda: are_told(batch))
        except asyncio.CancelledError:
            is_cancelled = True
        return ended(batch)

    in_thread.defer_many([{}] * 3)
    in_loop.defer_many([{}] * 3)
    async with running(app):
        await until(lambda: len(started) == 2)
        for id in (2, 3, 5, 6):
            conn.execute("select queue.cancel(%s, abort => true)", [id])
        await jobs.end()
    # The third was aborted, and its handler succeeded all the same.
    assert [row["state"] for row in jobs()] == ["succeeded", "cancelled", "succeeded"] * 2
    assert not is_cancelled


async def test_a_coroutine_is_cancelled_when_all_are_aborted(
    app: App, jobs: Jobs, conn: Connection
) -> None:
    started = asyncio.Event()

    @app.task(batch=10)
    async def task(batch: Batch) -> None:
        started.set()
        await asyncio.Event().wait()

    task.defer_many([{}] * 3)
    async with running(app) as worker:
        await started.wait()
        conn.execute("select queue.cancel(id, abort => true) from generate_series(1, 3) id")
        await jobs.end()
        await until(lambda: worker.slots[0].used == 0)
    assert [row["state"] for row in jobs()] == ["cancelled"] * 3


async def test_a_timeout_ends_the_call(app: App, jobs: Jobs) -> None:
    reached: set[str] = set()

    @app.task(batch=10, timeout=dt.timedelta(seconds=2))
    def in_thread(batch: Batch) -> None:
        event = threading.Event()
        try:
            while not event.wait(0.01):
                pass
        except BaseException as error:
            reached.add(type(error).__name__)
            raise

    @app.task(batch=10, timeout=dt.timedelta(seconds=2))
    async def in_loop(batch: Batch) -> None:
        try:
            await asyncio.Event().wait()
        except BaseException as error:
            reached.add(type(error).__name__)
            raise

    in_thread.defer_many([{}] * 3)
    in_loop.defer_many([{}] * 3)
    async with running(app) as worker:
        await jobs.end()
        await until(lambda: worker.slots[0].used == 0)
    assert reached == {"CancelledError", "JobTimeout"}
    assert [(row["state"], row["error"]) for row in jobs()] == [
        ("failed", "TimeoutError: not done within 0:00:02")
    ] * 6
    assert {row["outcome"] for row in jobs.attempts()} == {"timed_out"}


async def test_a_stop_at_once_gives_all_back(app: App, jobs: Jobs) -> None:
    started: set[str] = set()
    release = threading.Event()

    @app.task(batch=10)
    def in_thread(batch: Batch) -> None:
        started.add("thread")
        release.wait(300)

    @app.task(batch=10)
    async def in_loop(batch: Batch) -> None:
        started.add("loop")
        await asyncio.Event().wait()

    in_thread.defer_many([{}] * 3)
    in_loop.defer_many([{}] * 3)
    async with running(app) as worker:
        await until(lambda: len(started) == 2)
        worker.stop_at_once()
    release.set()
    assert [(row["state"], row["attempts"]) for row in jobs()] == [("ready", 0)] * 6
    assert worker.given_back == 6


async def test_a_stop_waits_for_what_has_begun(app: App, jobs: Jobs) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    @app.task(batch=10)
    async def task(batch: Batch) -> None:
        started.set()
        await release.wait()

    task.defer_many([{}] * 3)
    async with running(app) as worker:
        await started.wait()
        worker.stop()
        release.set()
    assert outcomes(jobs) == [("succeeded", None)] * 3


async def test_the_end_of_a_lost_claim_is_refused_alone(
    app: App, jobs: Jobs, conn: Connection
) -> None:
    started, release = asyncio.Event(), asyncio.Event()

    @app.task(batch=10, name="t")
    async def task(batch: Batch) -> list[int]:
        if not started.is_set():
            started.set()
            await release.wait()
        return [len(batch)] * len(batch)

    task.defer_many([{}] * 3)
    async with running(app):
        await started.wait()
        conn.execute("select queue.retry(array[2], force => true)")
        release.set()
        await jobs.end()
    assert outcomes(jobs) == [("succeeded", 3), ("succeeded", 1), ("succeeded", 3)]


async def test_a_loop_of_ones_own_gets_single_jobs(app: App, jobs: Jobs) -> None:
    define(app, lambda batch: None, is_async=True).defer_many([{"n": n} for n in range(5)])
    async with app.stream_jobs(drain=True, concurrency=5) as stream:
        got = []
        async for job in stream:
            with job:
                got.append(job.args)
    assert sorted(got, key=str) == [{"n": n} for n in range(5)]
    assert outcomes(jobs) == [("succeeded", None)] * 5


# In tests of an application


@contextlib.contextmanager
def rolled_back(dsn: str) -> Iterator[Connection]:
    with psycopg.connect(dsn) as connection:
        yield connection
        connection.rollback()


def test_a_test_queue_makes_batches(app: App, dsn: str) -> None:
    got: list[tuple[int, int]] = []

    def handler(batch: Batch) -> Any:
        got.append((batch[0].args["n"], len(batch)))
        batch[0].progress(1)
        return {batch[1]: KeyError("x"), batch[0]: 7} if len(batch) > 1 else RetryLater("later")

    for is_async in (True, False):
        task = define(app, handler, is_async=is_async, name=str(is_async), batch=3)
        with rolled_back(dsn) as connection, TestQueue(app, connection) as queue:
            task.defer_many([{"n": n} for n in range(5)])
            ran = queue.run(raise_errors=False, max_jobs=100)
            assert [(one.state, one.result, repr(one.error)) for one in ran] == [
                ("succeeded", 7, "None"),
                ("failed", None, "KeyError('x')"),
                ("succeeded", None, "None"),
                ("succeeded", 7, "None"),
                ("failed", None, "KeyError('x')"),
            ]
            task.configure(max_progress=0).defer(n=9)
            assert [one.state for one in queue.run(raise_errors=False)] == ["failed"]
            task.defer_many([{"n": n} for n in range(2)])
            with pytest.raises(KeyError):
                queue.run()
    assert got == [(0, 3), (3, 2), (9, 1), (0, 2)] * 2


async def test_a_test_queue_in_the_tests_loop(app: App, dsn: str) -> None:
    loop = asyncio.get_running_loop()

    @app.task(batch=3)
    async def task(batch: Batch) -> None:
        assert asyncio.get_running_loop() is loop

    async with await psycopg.AsyncConnection.connect(dsn) as connection:
        async with TestQueue(app, connection) as queue:
            await task.defer_many_async([{}] * 4)
            assert [one.state for one in await queue.run_async()] == ["succeeded"] * 4
        await connection.rollback()


def test_a_transaction_that_a_batch_has_broken(app: App, dsn: str) -> None:
    with rolled_back(dsn) as connection, TestQueue(app, connection) as queue:

        def handler(batch: Batch) -> None:
            connection.execute("select 1 / 0")

        define(app, handler, is_async=False).defer_many([{}, {}])
        ran = queue.run(raise_errors=False)
        assert [one.state for one in ran] == ["failed", "failed"]
        assert isinstance(ran[0].error, psycopg.errors.DivisionByZero)


# Sudden ends

PROGRAM = """
import json, os, sys, time
from pgdefer import App
app = App({dsn!r})

@app.task(name="t", batch=100)
def task(jobs):
    with open({ran!r}, "a") as file:
        file.write(f"{{len(jobs)}}\\n")
    if not os.path.exists({release!r}):
        os.write(1, b"started\\n")
    while not os.path.exists({release!r}):
        time.sleep(0.005)

if __name__ == "__main__":
    app.run_worker(drain=True, **json.loads(sys.argv[1]))
"""


@pytest.fixture
def program(app: App, dsn: str, tmp_path: Path) -> Iterator[Program]:
    """Five jobs, which make one batch."""
    for _ in range(5):
        app.defer("t")
    with contextlib.closing(Program(PROGRAM, dsn, tmp_path)) as found:
        yield found


def start_batch(program: Program, jobs: Jobs, **options: Any) -> subprocess.Popen[str]:
    process = program.start(lines=1, **options)
    assert {(row["state"], row["attempts"]) for row in jobs()} == {("running", 1)}
    return process


def test_a_worker_that_is_killed(program: Program, jobs: Jobs, conn: Connection) -> None:
    """Any of the jobs may be the cause: each runs alone the next time."""
    start_batch(program, jobs).kill()
    give_up(conn)
    assert [(row["state"], row["crashes"]) for row in jobs()] == [("ready", 1)] * 5
    program.release.touch()
    assert program.start().wait(300) == 0
    assert [row["state"] for row in jobs()] == ["succeeded"] * 5
    assert program.ran() == [5] + [1] * 5


@pytest.mark.soak
def test_a_worker_that_freezes(program: Program, jobs: Jobs, conn: Connection) -> None:
    frozen = start_batch(program, jobs, heartbeat_every=0.3, dead_after=1.5)
    frozen.send_signal(signal.SIGSTOP)
    wait_for(lambda: conn.execute("select from queue.reap() r where r.reaped > 0").fetchall())
    program.release.touch()
    assert program.start().wait(300) == 0
    ended = jobs()
    assert [(row["state"], row["attempts"]) for row in ended] == [("succeeded", 2)] * 5
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait(300) == 0
    # What it says of its claims, which are lost, changes nothing.
    assert jobs() == ended
