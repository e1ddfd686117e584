"""Jobs for an application's own loop: `app.stream_jobs()`."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime as dt
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer import (
    App,
    Decision,
    JobContext,
    NotInstalled,
    PgDeferError,
    RetryLater,
    current_job,
)

from .conftest import Jobs, Program, until, wait_for

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
UTC = dt.UTC


def states(jobs: Jobs) -> list[str]:
    return list(jobs.states().values())


def test_each_way_to_end_a_job(app: App, jobs: Jobs) -> None:
    when = dt.datetime(2030, 1, 1, tzinfo=UTC)
    deferred = {
        how: app.defer("any", {"how": how, "when": when}, retry={"max_attempts": 2, "base": 60})
        for how in ("leave", "return", "raise", "fail", "decide", "yield", "later", "release")
    }
    with app.stream_jobs(drain=True, max_jobs=8) as stream:
        for job in stream:
            with job as same:
                assert same is job is current_job()
                assert job.args.pop("when") == when
                match job.args["how"]:
                    case "return":
                        job.succeed({"at": when})
                    case "raise":
                        raise ValueError("no")
                    case "fail":
                        job.fail("not yet")
                    case "decide":
                        job.fail("never", Decision(retryable=False))
                    case "yield":
                        raise RetryLater(at=when)
                    case "later":
                        job.retry_later(RetryLater("waits", at=when))
                    case "release":
                        job.release()
            with pytest.raises(LookupError):
                current_job()
    by_id = {row["id"]: row for row in jobs()}
    rows = {how: by_id[job.id] for how, job in deferred.items()}
    assert {how: (row["state"], row["failures"]) for how, row in rows.items()} == {
        "leave": ("succeeded", 0),
        "return": ("succeeded", 0),
        "raise": ("scheduled", 1),
        "fail": ("scheduled", 1),
        "decide": ("failed", 1),
        "yield": ("scheduled", 0),
        "later": ("scheduled", 0),
        "release": ("ready", 0),
    }
    assert deferred["return"].result() == {"at": when}
    assert rows["raise"]["error"] == "ValueError: no"
    assert rows["decide"]["error"] == "never"


def test_a_job_ends_once(app: App, jobs: Jobs) -> None:
    app.defer("any")
    with app.stream_jobs(drain=True) as stream:
        for job in stream:
            with job:
                job.succeed()
                with pytest.raises(PgDeferError, match="was ended before"):
                    job.fail("no")
    assert states(jobs) == ["succeeded"]


def test_an_error_after_the_end_goes_on(app: App, jobs: Jobs) -> None:
    app.defer("any")

    def loop() -> None:
        with app.stream_jobs() as stream:
            for job in stream:
                with job:
                    job.succeed()
                    _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        loop()
    assert states(jobs) == ["succeeded"]


def test_leaving_gives_back_what_was_not_handed_out(app: App, jobs: Jobs) -> None:
    for _ in range(20):
        app.defer("any")
    with app.stream_jobs(concurrency=10) as stream:
        for job in stream:
            with job:
                wait_for(lambda: states(jobs).count("running") == 10)
            break
    assert states(jobs) == ["succeeded"] + ["ready"] * 19
    assert sum(row["attempts"] for row in jobs()) == 1


def test_leaving_fails_what_was_left_in_between(
    app: App, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    app.defer("any")
    with app.stream_jobs() as stream:
        job = next(iter(stream))
    (row,) = jobs()
    assert (row["state"], row["error"]) == (
        "failed",
        "PgDeferError: it was left without an outcome",
    )
    job.succeed()
    assert "its end comes too late" in caplog.text


def test_ctrl_c_gives_back_all_that_is_under_way(app: App, jobs: Jobs) -> None:
    for _ in range(5):
        app.defer("any")
    kept = []

    def loop() -> None:
        with app.stream_jobs(concurrency=3) as stream:
            for job in stream:
                kept.append(job)
                if len(kept) == 3:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert states(jobs) == ["ready"] * 5


def test_ctrl_c_just_when_a_job_comes(app: App, jobs: Jobs, monkeypatch: Any) -> None:
    """Nobody has the job yet."""
    app.defer("any")

    def loop() -> None:
        with app.stream_jobs() as stream:
            monkeypatch.setattr(stream, "_taken", interrupted)
            next(iter(stream))

    def interrupted(given: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert states(jobs) == ["ready"]


def test_threads_that_end_jobs_while_the_block_is_left(app: App, jobs: Jobs) -> None:
    """Each ends with its thread's outcome, or as left by the block."""
    for turn in range(20):
        before = len(jobs())
        app.defer_many([app.prepare("any") for _ in range(30)])
        with ThreadPoolExecutor(10) as pool, app.stream_jobs(concurrency=30) as stream:
            taken = list(itertools.islice(stream, 30))
            ended = [pool.submit(job.succeed) for job in taken]
            if turn % 2:
                ended[turn].result()
        del taken
        assert set(states(jobs)[before:]) <= {"succeeded", "failed"}


def test_what_is_no_longer_to_be_run_is_not_handed_out(
    app: App, jobs: Jobs, conn: Connection
) -> None:
    for n in range(3):
        app.defer("any", {"n": n})
    app.defer("any", {"n": 3}, timeout=dt.timedelta(seconds=0.1))
    with app.stream_jobs(concurrency=4) as stream:
        taken = iter(stream)
        with next(taken) as job:
            assert job.args == {"n": 0}
        conn.execute("select queue.cancel(2, true)")
        wait_for(lambda: any(claim.job.should_abort() for claim in stream._worker.executor.running))
        wait_for(
            lambda: sum(claim.job.should_abort() for claim in stream._worker.executor.running) == 2
        )
        with next(taken) as job:
            assert job.args == {"n": 2}
        app.defer("any", {"n": 4})
        with next(taken) as job:
            assert job.args == {"n": 4}
    assert states(jobs) == ["succeeded", "cancelled", "succeeded", "failed", "succeeded"]
    assert [row["outcome"] for row in jobs.attempts()] == ["aborted", "timed_out"]


def test_what_cannot_be_an_end(app: App, jobs: Jobs) -> None:
    app.defer("any")
    with app.stream_jobs() as stream:
        job = next(iter(stream))
        for wrong in (RetryLater, "5 minutes"):
            with pytest.raises(TypeError, match="must be a RetryLater"):
                job.retry_later(wrong)  # type: ignore[arg-type]
        for nothing in (None, ValueError):
            with pytest.raises(TypeError, match="must be a text or an exception"):
                job.fail(nothing)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"must be a Decision\(\.\.\.\) or None, not 5"):
            job.fail("no", 5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="pass it to retry_later"):
            job.succeed(RetryLater())
        job.release()
        with pytest.raises(PgDeferError, match="was ended before"), job:
            pass
    assert states(jobs) == ["ready"]


def test_a_stream_that_is_not_open(app: App) -> None:
    stream = app.stream_jobs()
    with pytest.raises(PgDeferError, match="is not open here"):
        next(iter(stream))
    with stream:
        with pytest.raises(PgDeferError, match="is not open here"):
            asyncio.run(anext(aiter(stream)))  # type: ignore[arg-type]
        with pytest.raises(PgDeferError, match="can be used once"):
            stream.__enter__()
    with pytest.raises(PgDeferError, match="can be used once"):
        stream.__enter__()


def test_a_job_that_is_dropped_fails(app: App, jobs: Jobs) -> None:
    """A loop that ends none would otherwise wait forever once it has as many as it may."""
    for n in range(10):
        app.defer("any", {"n": n})
    with app.stream_jobs(concurrency=3, drain=True) as stream:
        for job in stream:
            if job.args["n"] % 2:
                job.succeed()
        del job
    assert states(jobs) == ["failed", "succeeded"] * 5
    assert {row["error"] for row in jobs()} == {
        None,
        "PgDeferError: it was dropped without an outcome",
    }


def test_a_job_that_the_loop_drops_fails(app: App, jobs: Jobs) -> None:
    app.defer("any")
    with app.stream_jobs(drain=True, concurrency=2) as stream:
        for job in stream:
            del job  # the stream waits for its end, and must not keep it alive
    assert states(jobs) == ["failed"]


async def test_a_job_that_a_coroutine_drops_fails(app: App, jobs: Jobs) -> None:
    app.defer("any")
    async with app.stream_jobs(drain=True, concurrency=2) as stream:
        async for job in stream:
            del job
    assert states(jobs) == ["failed"]


def test_to_ask_for_the_next_before_the_last_has_ended(app: App, jobs: Jobs) -> None:
    """It would never come."""
    app.defer("any")
    app.defer("any")
    with app.stream_jobs() as stream:
        taken = iter(stream)
        job = next(taken)
        with pytest.raises(PgDeferError, match="the last job has not ended"):
            next(taken)
        job.succeed()
        with next(iter(stream)):
            pass
    assert states(jobs) == ["succeeded", "succeeded"]


def test_ctrl_c_gives_the_job_back(app: App, jobs: Jobs) -> None:
    app.defer("any")

    def loop() -> None:
        with app.stream_jobs() as stream:
            for job in stream:
                with job:
                    raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert states(jobs) == ["ready"]
    assert [row["attempts"] for row in jobs()] == [0]


def test_threads_of_ones_own(app: App, jobs: Jobs) -> None:
    for n in range(100):
        app.defer("any", {"n": n}, lock=str(n % 3))
    order: dict[str | None, list[int]] = {}

    def handle(job: Any) -> None:
        with job:
            assert current_job() is job
            order.setdefault(job.lock, []).append(job.args["n"])

    with app.stream_jobs(concurrency=4, drain=True) as stream, ThreadPoolExecutor(4) as pool:
        for job in stream:
            pool.submit(handle, job)
    assert set(states(jobs)) == {"succeeded"}
    assert order == {str(lock): list(range(lock, 100, 3)) for lock in range(3)}


def test_several_threads_at_one_stream(app: App, jobs: Jobs) -> None:
    for _ in range(50):
        app.defer("any")
    took: dict[int, int] = {}

    def work() -> None:
        for job in stream:
            with job:
                took[threading.get_ident()] = took.get(threading.get_ident(), 0) + 1

    with app.stream_jobs(concurrency=3, drain=True) as stream:
        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(300)
            assert not thread.is_alive()
    assert set(states(jobs)) == {"succeeded"}
    assert sum(took.values()) == 50


def test_a_job_that_is_cancelled_meanwhile(app: App, jobs: Jobs, conn: Connection) -> None:
    id = app.defer("any").id
    with app.stream_jobs() as stream:
        for job in stream:
            with job:
                conn.execute("select queue.cancel(%s, true)", (id,))
                wait_for(job.should_abort)
                job.check_abort()
            break
    assert states(jobs) == ["cancelled"]


def test_a_job_that_takes_too_long(app: App, jobs: Jobs) -> None:
    app.defer("any", timeout=dt.timedelta(seconds=0.2))
    with app.stream_jobs() as stream:
        for job in stream:
            with job:
                wait_for(job.should_abort)
                job.check_abort()
            break
    assert [row["outcome"] for row in jobs.attempts()] == ["timed_out"]


def test_arguments_that_cannot_be_read_fail_their_job_alone(
    app: App, jobs: Jobs, conn: Connection
) -> None:
    conn.execute("""select queue.defer('any', '{"x": {"__pgdefer__": "no such", "value": 1}}')""")
    app.defer("any", {"x": 1})
    with app.stream_jobs(drain=True) as stream:
        assert [ended(job) for job in stream] == [{"x": 1}]
    assert states(jobs) == ["failed", "succeeded"]


@dataclasses.dataclass
class Row:
    id: int


def test_a_decoder_that_gives_up_fails_its_job_alone(app: App, jobs: Jobs) -> None:
    async def decode(id: int) -> Row:
        if id == 1:
            raise asyncio.CancelledError
        return Row(id)

    app.codec.register(Row, "row", lambda row: row.id, decode)
    for id in (1, 2):
        app.defer("any", {"row": Row(id)})
    with app.stream_jobs(drain=True) as stream:
        assert [ended(job) for job in stream] == [{"row": Row(2)}]
    assert states(jobs) == ["failed", "succeeded"]


def ended(job: Any) -> Any:
    """Its arguments, once it has ended."""
    with job:
        return job.args


def test_middleware_is_around_the_block(dsn: str, jobs: Jobs) -> None:
    seen: list[object] = []

    @contextlib.contextmanager
    def trace(job: JobContext) -> Iterator[None]:
        seen.append(threading.get_ident())
        try:
            yield
        except ZeroDivisionError:
            seen.append("swallowed")

    @contextlib.contextmanager
    def refuse(job: JobContext) -> Iterator[None]:
        if job.task == "refused":
            raise PermissionError("not here")
        yield

    @contextlib.contextmanager
    def swallow(job: JobContext) -> Iterator[None]:
        with contextlib.suppress(Exception):
            yield

    with App(dsn, middleware=[trace, refuse, swallow]) as app:
        app.defer("yields", scheduled_at=dt.datetime(2020, 1, 1, tzinfo=UTC))
        with app.stream_jobs(max_jobs=1) as stream:
            for job in stream:
                with job:
                    raise RetryLater(at=dt.datetime(2030, 1, 1, tzinfo=UTC))
    assert states(jobs) == ["scheduled"]
    seen.clear()
    with App(dsn, middleware=[trace, refuse]) as app:
        app.defer("divides")
        app.defer("refused")
        with app.stream_jobs(drain=True) as stream:
            taken = iter(stream)
            with next(taken):
                _ = 1 / 0
            job = next(taken)
            with pytest.raises(PermissionError):
                job.__enter__()
    assert seen == [threading.get_ident(), "swallowed", threading.get_ident()]
    assert states(jobs) == ["scheduled", "succeeded", "failed"]


def test_it_lives_through_a_lost_connection(app: App, jobs: Jobs, conn: Connection) -> None:
    with app.stream_jobs() as stream:
        taken = iter(stream)
        app.defer("any")
        with next(taken):
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
        conn.execute("select queue.defer('any')")
        with next(taken):
            pass
    assert states(jobs) == ["succeeded", "succeeded"]


@pytest.mark.unchecked
def test_what_ends_the_worker_is_raised(blank_dsn: str) -> None:
    app = App(blank_dsn)
    with pytest.raises(NotInstalled), app.stream_jobs() as stream:
        for _ in stream:
            pass
    app.close()


def test_a_stream_has_the_jobs_of_its_queues(app: App, jobs: Jobs) -> None:
    app.defer("any", queue="a")
    app.defer("any", queue="b")
    with app.stream_jobs(["a"], drain=True) as stream:
        assert [ended(job) for job in stream] == [{}]
    assert states(jobs) == ["succeeded", "ready"]
    with pytest.raises(TypeError, match="no option wait"):
        app.stream_jobs(["a"], wait=1)  # type: ignore[call-arg]


@pytest.mark.anyio
async def test_an_asynchronous_stream(app: App, jobs: Jobs) -> None:
    for n in range(30):
        await app.defer_async("any", {"n": n})
    seen = []
    # Otherwise a slow worker may give back what it has claimed ahead, which changes the order.
    async with app.stream_jobs(concurrency=3, prefetch=0, drain=True) as stream:
        async for job in stream:
            with job:
                assert current_job() is job
                await asyncio.sleep(0)
                seen.append(job.args["n"])
                if job.args["n"] == 7:
                    raise ValueError("no")
    assert seen == list(range(30))
    assert [n for n, state in enumerate(states(jobs)) if state != "succeeded"] == [7]
    await app.close_async()


@pytest.mark.anyio
async def test_async_tasks_of_ones_own(app: App, jobs: Jobs) -> None:
    """One waits for a job when it comes; all end with the stream."""
    took: list[int] = []

    async def work(who: int) -> None:
        async for job in stream:
            with job:
                took.append(who)
                await until(lambda: len(took) >= 2)

    async with app.stream_jobs(concurrency=2, max_jobs=2) as stream:
        tasks = [asyncio.create_task(work(who)) for who in range(3)]
        await app.defer_async("any")
        await app.defer_async("any")
        await asyncio.wait_for(asyncio.gather(*tasks), 300)
    assert len(set(took)) == 2
    assert states(jobs) == ["succeeded", "succeeded"]
    await app.close_async()


@pytest.mark.anyio
async def test_a_cancelled_coroutine_gives_its_job_back(app: App, jobs: Jobs) -> None:
    async def work() -> None:
        async with app.stream_jobs() as stream:
            async for job in stream:
                with job:
                    await asyncio.Event().wait()

    task = asyncio.create_task(work())
    await app.defer_async("any")
    await until(lambda: states(jobs) == ["running"])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert states(jobs) == ["ready"]
    await app.close_async()


def test_what_a_pause_stops_is_not_handed_out(app: App, jobs: Jobs, conn: Connection) -> None:
    for _ in range(3):
        app.defer("any")
    with app.stream_jobs(concurrency=3) as stream:
        taken = iter(stream)
        with next(taken):
            wait_for(lambda: states(jobs) == ["running"] * 3)
            conn.execute("select queue.pause('default')")
            wait_for(lambda: stream._worker.executor._paused_at)
        app.defer("any", queue="other")
        with next(taken) as job:
            assert job.queue == "other"
    assert states(jobs) == ["succeeded", "ready", "ready", "succeeded"]


PROGRAM = """
import json, logging, os, sys, time
from pgdefer import App
logging.basicConfig(filename={ran!r} + ".log", level="INFO")

if __name__ == "__main__":
    with App({dsn!r}).stream_jobs(**json.loads(sys.argv[1])) as stream:
        for job in stream:
            with job, open({ran!r}, "a") as file:
                file.write(f"{{job.id}}\\n")
                file.flush()
                if not os.path.exists({release!r}):
                    os.write(1, b"started\\n")
                while not os.path.exists({release!r}):
                    time.sleep(0.005)
"""


@pytest.fixture
def program(dsn: str, tmp_path: Path) -> Iterator[Program]:
    with contextlib.closing(Program(PROGRAM, dsn, tmp_path)) as found:
        yield found


def test_what_others_may_run_by_now_is_not_handed_out(
    app: App, jobs: Jobs, connect: Callable[..., Connection], program: Program, tmp_path: Path
) -> None:
    """The process was frozen, and no heartbeat tells it that its jobs are lost."""
    for _ in range(3):
        app.defer("any")
    frozen = program.start(lines=1, concurrency=3, heartbeat_every=0.3, dead_after=1.5)
    wait_for(lambda: states(jobs) == ["running"] * 3)
    frozen.send_signal(signal.SIGSTOP)
    with connect(autocommit=False) as silence:
        reap = "select from queue.reap() r where r.reaped > 0"
        wait_for(lambda: silence.execute(reap).fetchall() or silence.rollback())
        silence.execute("lock table queue.worker")
        program.release.touch()
        frozen.send_signal(signal.SIGCONT)
        log = tmp_path / "ran.log"
        wait_for(lambda: len(program.ran()) == 3 or log.read_text().count("is given back") == 2)
        assert program.ran() == [1]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_stream_that_nobody_reads(
    app: App, jobs: Jobs, moment: str, connect: Callable[..., Connection]
) -> None:
    if moment == "before":
        app.defer("any")
    with app.stream_jobs():
        if moment == "after":
            app.defer("any")
        wait_for(lambda: states(jobs) == ["running"])
    assert states(jobs) == ["ready"]
    with app.stream_jobs():  # closed at once, whatever it is about to do
        pass
    assert states(jobs) == ["ready"]
