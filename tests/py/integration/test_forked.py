"""Processes that handlers fork: they are no workers."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pgdefer import App

from .conftest import Jobs

pytestmark = pytest.mark.client


FORKS = """
import os, signal, sys
from pgdefer import App

app = App({dsn!r})


def fork(how):
    child = os.fork()
    if not child:
        signal.alarm(30)  # or it would live on as a worker
        if how == "returns":
            return "from the child"
        raise SystemExit(3) if how == "exits" else ValueError(how)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@app.task(name="sync")
def sync(how):
    return fork(how)


@app.task(name="async")
async def coroutine(how):
    return fork(how)


@app.task(name="process", run_in="process")
def process(how):
    return fork(how)


@app.task(name="batch", batch=5)
def batch(jobs):
    return [fork(job.args["how"]) for job in jobs]


@app.task(name="async_batch", batch=5)
async def async_batch(jobs):
    return [fork(job.args["how"]) for job in jobs]


@app.task(name="transactional", transactional=True)
def transactional(connection, how):
    return fork(how)


if __name__ == "__main__":
    app.run_worker(drain=True)
"""


def test_what_a_handler_forks_is_no_second_worker(app: App, tmp_path: Path) -> None:
    """It ends where it leaves the handler, and the job goes on to its own end."""
    path = tmp_path / "forks.py"
    path.write_text(FORKS.format(dsn=app.source.conninfo()))
    codes = {"returns": 0, "exits": 3, "raises": 1}
    kinds = ["sync", "async", "process", "batch", "async_batch", "transactional"]
    made = {(kind, how): app.defer(kind, {"how": how}) for kind in kinds for how in codes}
    app.close()
    done = subprocess.run(
        [sys.executable, str(path)], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert {key: job.result(0) for key, job in made.items()} == {
        (kind, how): codes[how] for kind, how in made
    }


TERMINATES = """
import multiprocessing, time
from pgdefer import App

app = App({dsn!r})
fork = multiprocessing.get_context("fork")


def terminate():
    with fork.Pool(2) as pool:  # its end terminates them
        pool.map(abs, [1, 2])
    codes = set()
    for _ in range(20):
        child = fork.Process(target=time.sleep, args=[30])
        child.start()
        child.terminate()  # it may not have begun
        child.join()
        codes.add(child.exitcode)
    return list(codes)


@app.task(name="sync")
def sync():
    return terminate()


@app.task(name="async")
async def coroutine():
    return terminate()


@app.task(name="other")
def other():
    pass


if __name__ == "__main__":
    app.run_worker(drain=True, concurrency=1)
"""


@pytest.mark.parametrize("task", ["sync", "async"])
def test_a_signal_to_what_a_handler_forks_is_not_for_the_worker(
    app: App, jobs: Jobs, tmp_path: Path, task: str
) -> None:
    path = tmp_path / "terminates.py"
    path.write_text(TERMINATES.format(dsn=app.source.conninfo()))
    made = [app.defer(task), app.defer("other")]
    done = subprocess.run(
        [sys.executable, str(path)], check=False, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, set(jobs.states().values())) == (0, {"succeeded"}), done.stderr
    assert made[0].result(0) == [-signal.SIGTERM]
