"""Workers that take only some jobs, or take queues in a strict order."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer import App, Worker

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client


async def test_listed_queues_and_only_some_tasks(app: App, jobs: Jobs) -> None:
    ran: list[str] = []

    @app.task
    async def task(name: str) -> None:
        ran.append(name)

    @app.task(name="other")
    async def other() -> None:
        ran.append("other")

    for n in range(2):
        await task.configure(queue="second", priority=9).defer_async(f"second {n}")
        await task.configure(queue="first").defer_async(f"first {n}")
    left = await other.configure(queue="first", priority=5).defer_async()
    options = {"order": "listed", "tasks": [task.name], "concurrency": 1}
    async with running(app, ["first", "second"], **options):
        await until(lambda: len(ran) == 4)
    assert ran == ["first 0", "first 1", "second 0", "second 1"]
    assert jobs.states()[left.id] == "ready"


def test_what_is_no_order(app: App) -> None:
    with pytest.raises(ValueError, match="order is mixed or listed, not 'strict'"):
        Worker(app, ["a"], order="strict")  # type: ignore[typeddict-item]
    with pytest.raises(ValueError, match="order='listed' needs a list of queues"):
        Worker(app, order="listed")
    with pytest.raises(ValueError, match="tasks is empty"):
        Worker(app, tasks=[])


async def test_tasks_that_the_app_does_not_have(
    app: App, jobs: Jobs, conn: psycopg.Connection[Any], caplog: pytest.LogCaptureFixture
) -> None:
    conn.execute("create function public.known(args jsonb) returns void language sql as ''")
    conn.execute("""select queue.register_task('known', '{"function": "public.known"}')""")
    app.defer("known")
    await Worker(app, tasks=["known", "tpyo"], drain=True).run_async()
    assert list(jobs.states().values()) == ["succeeded"]
    assert "the task 'tpyo' isn't known here" in caplog.text


async def test_queues_that_nobody_knows(
    app: App, jobs: Jobs, caplog: pytest.LogCaptureFixture
) -> None:
    @app.task(name="a", queue="of a task")
    def task() -> None: ...

    app.recurring("@daily", name="daily", queue="of the code")(task)
    app.defer("b", queue="of a job")
    app.create_queue("created")
    queues = ["of a task", "of the code", "of a job", "created", "default", "prefix*", "tpyo"]
    await Worker(app, queues, drain=True, tasks=["a"]).run_async()
    said = [record.getMessage() for record in caplog.records if "misspelt" in record.getMessage()]
    assert said == ["the queue 'tpyo' is new or misspelt: no job was ready in it, no task names it"]


async def test_limits_of_queues_that_nobody_knows(
    app: App, caplog: pytest.LogCaptureFixture
) -> None:
    app.create_queue("created")
    await Worker(app, max_running={"created": 1, "prefix*": 2, "tpyo": 3}, drain=True).run_async()
    limits = {"created": 1, "creat*": 1, "made": 1, "made too": 1, "other": 2, "oth*": 2, "tpyo": 1}
    queues = ["created", "made*", "tpyo"]
    await Worker(app, queues, max_running=limits, drain=True).run_async()
    new = "the queue {!r} is new or misspelt: no job was ready in it, no task names it"
    unserved = "max_running limits the queue {!r}, which this worker does not serve"
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        new.format("tpyo"),
        unserved.format("other"),
        unserved.format("oth*"),
        *(new.format(name) for name in ("tpyo", "made", "made too")),
    ]


async def test_at_most_so_many_of_a_queue(app: App, jobs: Jobs) -> None:
    running_now: dict[str, int] = {}
    most: dict[str, int] = {}
    free = asyncio.Event()

    @app.task
    async def task(queue: str) -> None:
        running_now[queue] = running_now.get(queue, 0) + 1
        most[queue] = max(most.get(queue, 0), running_now[queue])
        await free.wait()
        running_now[queue] -= 1

    for queue in ["few", "many", "others"] * 4:
        await task.configure(queue=queue).defer_async(queue)
    async with running(app, max_running={"few": 1, "m*": 2}):
        await until(lambda: running_now == {"few": 1, "many": 2, "others": 4})
        free.set()
        await until(lambda: set(jobs.states().values()) == {"succeeded"})
    assert most["few"] == 1
    assert most["many"] == 2


def test_what_is_no_max_running(app: App) -> None:
    with pytest.raises(ValueError, match="max_running of 'a' must be at least 1"):
        Worker(app, max_running={"a": 0})
    with pytest.raises(TypeError, match="max_running of 'a' must be a whole number"):
        Worker(app, max_running={"a": "1"})  # type: ignore[dict-item]


@pytest.mark.long
def test_on_the_command_line(app: App, dsn: str, tmp_path: Path) -> None:
    (tmp_path / "choice.py").write_text(
        "from pgdefer import App\n"
        f"app = App({dsn!r})\n"
        "@app.task(name='say')\n"
        "def say(what): print(what, flush=True)\n"
        "@app.task(name='other')\n"
        "def other(): print('other', flush=True)\n"
    )
    app.defer("say", {"what": "second"}, queue="second", priority=9)
    app.defer("say", {"what": "first"}, queue="first")
    app.defer("other", queue="first")

    def worker(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pgdefer", "worker", "-A", "choice", "-c", "1", "--drain"]
        return subprocess.run(
            [*command, *options], cwd=tmp_path, capture_output=True, text=True, check=False
        )

    done = worker("-q", "first,second", "--strict", "--tasks", "say")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["first", "second"]
    refused = worker("--strict")
    assert refused.returncode != 0
    assert "--strict needs -q" in refused.stderr
    assert worker("--tasks", "say,").returncode != 0
    app.defer("say", {"what": "third"}, queue="first")
    done = worker("--max-running", "first=1", "--max-running", "second*=2", "--tasks", "say")
    assert done.stdout.split() == ["third"], done.stderr
    for text in ("first", "=1", "first=", "first=x"):
        refused = worker("--max-running", text)
        assert f"--max-running is QUEUE=N, such as reports=2, not {text}" in refused.stderr
    assert "at least 1" in worker("--max-running", "first=0").stderr
