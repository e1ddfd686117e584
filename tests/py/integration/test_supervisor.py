"""`pgdefer worker --processes`: the fate of workers that are killed, and of their jobs."""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer import App
from pgdefer.cli import Exit

from .conftest import Jobs, wait_for

pytestmark = pytest.mark.client

MODULE = """
import asyncio, os, pathlib, signal, sys, time
from pgdefer import App

if pathlib.Path("broken").exists():
    sys.exit(int(pathlib.Path("broken").read_text()))
if pathlib.Path("deadly").exists():
    if not pathlib.Path("deadly").read_text():
        pathlib.Path("deadly").unlink()
    os.kill(os.getpid(), signal.SIGKILL)
app = App({dsn!r})

@app.task(name="note")
def note() -> int:
    return os.getpid()

@app.task(name="wait")
def wait() -> int:
    pathlib.Path("waiting").touch()
    # as a handler that asks whether it should end does
    while not pathlib.Path("go").exists():
        time.sleep(0.01)
    return os.getpid()

@app.task(name="nap")
async def nap() -> None:
    pathlib.Path("waiting").touch()
    await asyncio.sleep(1)

@app.task(name="vanish")
def vanish() -> None:
    if not pathlib.Path("vanished").exists():
        pathlib.Path("vanished").touch()
        os._exit(0)

@app.task(name="deadly")
def deadly() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
"""

Connection = psycopg.Connection[Any]
Supervise = Callable[..., "Supervisor"]


class Supervisor:
    """`pgdefer worker` as a separate process."""

    def __init__(self, folder: Path, options: Sequence[str]) -> None:
        self._log = folder / "log"
        # A worker gives back a job that it has claimed and not started, at a stop.
        self.has_started_wait = (folder / "waiting").exists
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "pgdefer", "worker", "-A", "mod", *options],
                stderr=log,
                cwd=folder,
            )
        self.pid = self.process.pid
        self.send = self.process.send_signal

    def log(self) -> str:
        """The log of it and its workers."""
        return self._log.read_text()

    def code(self) -> int:
        """Wait until it has ended, and return its exit code."""
        return self.process.wait(300)


@pytest.fixture
def folder(tmp_path: Path, dsn: str) -> Path:
    (tmp_path / "mod.py").write_text(MODULE.format(dsn=dsn))
    return tmp_path


@pytest.fixture
def supervise(folder: Path, conn: Connection) -> Iterator[Supervise]:
    """Start supervisors; killed with all their workers after the test."""
    started: list[Supervisor] = []

    def supervise(*options: str) -> Supervisor:
        started.append(Supervisor(folder, options))
        return started[-1]

    yield supervise
    for supervisor in started:
        supervisor.process.kill()
        supervisor.code()
    for pid in pids(conn):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pids(conn: Connection) -> list[int]:
    """The process ids of the registered workers."""
    rows = conn.execute("select info -> 'pid' from queue.workers where is_alive order by id")
    return [row[0] for row in rows]


def is_alive(pid: int) -> bool:
    """Whether it runs: a supervisor leaves not even a zombie of a process that has ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_worker_that_is_killed_is_replaced_and_its_jobs_run_again_at_once(
    supervise: Supervise, conn: Connection, jobs: Jobs, app: App, folder: Path
) -> None:
    supervisor = supervise("--processes", "2", "-c", "1", "--dead-after", "3600")
    before = wait_for(lambda: len(found := pids(conn)) == 2 and found)
    app.defer("wait")
    app.defer("wait")
    wait_for(lambda: set(jobs.states().values()) == {"running"})
    os.kill(before[0], signal.SIGKILL)
    # long before an hour without a heartbeat
    crash = wait_for(jobs.attempts)
    assert [(row["outcome"], row["attempt"]) for row in crash] == [("crashed", 1)]
    after = wait_for(lambda: len(found := pids(conn)) == 2 and found)
    assert before[1] in after
    assert before[0] not in after
    (folder / "go").touch()
    wait_for(lambda: set(jobs.states().values()) == {"succeeded"})
    assert {row["result"] for row in jobs()} <= set(after)
    supervisor.send(signal.SIGTERM)
    assert supervisor.code() == Exit.DONE, supervisor.log()
    assert f"process {before[0]}, worker 1, ended with SIGKILL" in supervisor.log()
    assert pids(conn) == []


@pytest.mark.long
def test_a_job_that_kills_its_worker_fails_in_the_end(
    supervise: Supervise, jobs: Jobs, app: App
) -> None:
    app.defer("deadly")
    supervise("--processes", "1")
    wait_for(lambda: jobs()[0]["state"] == "failed")
    (job,) = jobs()
    assert (job["reason"], job["crashes"]) == ("crash_loop", 3)


def test_workers_whose_supervisor_is_killed_end_when_their_jobs_have(
    supervise: Supervise, conn: Connection, jobs: Jobs, app: App, folder: Path
) -> None:
    supervisor = supervise("--processes", "2", "-c", "1")
    before = wait_for(lambda: len(found := pids(conn)) == 2 and found)
    app.defer("wait")
    wait_for(supervisor.has_started_wait)
    supervisor.process.kill()
    # the idle one at once
    wait_for(lambda: len(pids(conn)) == 1)
    assert set(jobs.states().values()) == {"running"}
    (folder / "go").touch()
    wait_for(lambda: pids(conn) == [])
    assert set(jobs.states().values()) == {"succeeded"}
    wait_for(lambda: not any(is_alive(pid) for pid in before))


@pytest.mark.long
@pytest.mark.parametrize("again", [signal.SIGTERM, signal.SIGQUIT])
def test_to_stop_waits_and_to_stop_twice_does_not(
    supervise: Supervise,
    conn: Connection,
    jobs: Jobs,
    app: App,
    again: signal.Signals,
) -> None:
    supervisor = supervise("--processes", "2", "-c", "1")
    app.defer("wait")
    wait_for(lambda: supervisor.has_started_wait() and len(pids(conn)) == 2)
    supervisor.send(signal.SIGTERM)
    (busy,) = wait_for(lambda: len(found := pids(conn)) == 1 and found)
    # as systemd sends to all processes of a service
    os.kill(busy, signal.SIGTERM)
    app.defer("note")
    assert jobs.states()[1] == "running"
    supervisor.send(again)
    assert supervisor.code() == Exit.GAVE_BACK, supervisor.log()
    assert jobs.states() == {1: "ready", 2: "ready"}


@pytest.mark.usefixtures("hangup_is_not_ignored")
def test_a_hangup_lets_jobs_end(supervise: Supervise, jobs: Jobs, app: App) -> None:
    """Also if others follow: where a terminal closes, several programs send them."""
    supervisor = supervise("--processes", "1")
    app.defer("nap")
    wait_for(supervisor.has_started_wait)
    supervisor.send(signal.SIGHUP)
    wait_for(lambda: "stopping, running processes" in supervisor.log())
    supervisor.send(signal.SIGHUP)
    supervisor.send(signal.SIGTERM)
    assert supervisor.code() == Exit.DONE, supervisor.log()
    assert jobs.states() == {1: "succeeded"}


def test_the_timeout_of_a_stop(supervise: Supervise, jobs: Jobs, app: App) -> None:
    supervisor = supervise("--processes", "1", "--shutdown-timeout", "0.5")
    app.defer("wait")
    wait_for(supervisor.has_started_wait)
    supervisor.send(signal.SIGTERM)
    assert supervisor.code() == Exit.GAVE_BACK, supervisor.log()
    assert jobs.states() == {1: "ready"}


def test_keys_of_a_terminal_reach_the_supervisor_alone(
    supervise: Supervise, conn: Connection
) -> None:
    """A terminal sends SIGINT to its process group: a worker would get it twice."""
    supervisor = supervise("--processes", "1")
    (pid,) = wait_for(lambda: pids(conn))
    assert os.getpgid(pid) != os.getpgid(supervisor.pid)


@pytest.mark.long
def test_workers_that_end_after_some_jobs_are_replaced(
    supervise: Supervise, conn: Connection, jobs: Jobs, app: App
) -> None:
    for _ in range(7):
        app.defer("note")
    supervisor = supervise("--processes", "1", "--max-jobs", "2")
    wait_for(lambda: set(jobs.states().values()) == {"succeeded"})
    assert len({row["result"] for row in jobs()}) == 4
    supervisor.send(signal.SIGINT)
    assert supervisor.code() == Exit.DONE, supervisor.log()
    assert jobs.attempts() == []


def test_to_drain(supervise: Supervise, jobs: Jobs, app: App) -> None:
    for _ in range(20):
        app.defer("note")
    supervisor = supervise("--processes", "2", "--drain")
    assert supervisor.code() == Exit.DONE, supervisor.log()
    assert set(jobs.states().values()) == {"succeeded"}


def test_to_drain_although_a_worker_dies(supervise: Supervise, jobs: Jobs, app: App) -> None:
    app.defer("deadly")
    app.defer("note")
    supervisor = supervise("--processes", "1", "--drain")
    assert supervisor.code() == Exit.DONE, supervisor.log()
    assert jobs.states() == {1: "failed", 2: "succeeded"}


@pytest.mark.long
def test_a_first_process_that_is_killed_is_tried_once_more(
    supervise: Supervise, jobs: Jobs, app: App, folder: Path
) -> None:
    """Perhaps the kernel did, for lack of memory: then its setup is not to blame."""
    app.defer("note")
    (folder / "deadly").write_text("")
    supervisor = supervise("--processes", "1", "--drain")
    assert supervisor.code() == Exit.DONE, supervisor.log()
    assert jobs.states() == {1: "succeeded"}
    (folder / "deadly").write_text("always")
    supervisor = supervise("--processes", "1", "--drain")
    assert supervisor.code() == Exit.ERROR, supervisor.log()
    assert supervisor.log().count("ended with SIGKILL") == 1 + 2


def test_an_exit_code_of_0_that_was_no_end(
    supervise: Supervise, jobs: Jobs, app: App, folder: Path
) -> None:
    """A handler ended the process: one job is left, which the successor runs."""
    app.defer("vanish")
    supervisor = supervise("--processes", "1", "--drain")
    assert supervisor.code() == Exit.DONE, supervisor.log()
    assert (jobs.states(), len(jobs.attempts())) == ({1: "succeeded"}, 1)
    assert "ended with exit code 0" in supervisor.log()
    (folder / "broken").write_text("0")
    supervisor = supervise("--processes", "1", "--drain")
    assert supervisor.code() == Exit.ERROR, supervisor.log()


@pytest.mark.long
def test_modules_of_the_folder_do_not_hide_those_of_python(
    supervise: Supervise, jobs: Jobs, app: App, folder: Path
) -> None:
    (folder / "queue.py").write_text("")
    (folder / "pgdefer.py").write_text("")
    app.defer("note")
    supervisor = supervise("--processes", "1", "--drain", "--")
    assert supervisor.code() == Exit.DONE, supervisor.log()
    assert jobs.states() == {1: "succeeded"}


def test_a_connection_that_is_lost_while_a_death_is_reported(
    supervise: Supervise, conn: Connection, jobs: Jobs, app: App
) -> None:
    supervise("--processes", "1", "-c", "1", "--dead-after", "3600")
    app.defer("wait")
    wait_for(lambda: set(jobs.states().values()) == {"running"})
    (pid,) = pids(conn)
    with conn.transaction():
        # the session that reports the death waits for this, and is cut off
        conn.execute("select from queue.worker for update")
        os.kill(pid, signal.SIGKILL)
        cut = (
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where wait_event_type = 'Lock' and query like '%worker_died%'"
        )
        with psycopg.connect(app.source.conninfo(), autocommit=True) as other:
            wait_for(lambda: other.execute(cut).fetchone())
    wait_for(jobs.attempts)


@contextlib.contextmanager
def running_program(text: str, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a Python program for the block."""
    program = subprocess.Popen([sys.executable, "-c", text], cwd=folder)
    try:
        yield program
    finally:
        program.kill()
        program.wait()


@pytest.mark.long
def test_a_worker_that_shows_no_life_is_killed_and_replaced(
    conn: Connection, jobs: Jobs, app: App, folder: Path
) -> None:
    """Like one whose handler holds Python's lock. One that has begun may be silent for 3 s here."""
    program = """
import sys
from pgdefer.worker import supervisor

class Process(supervisor.WorkerProcess):
    def _on_told(self):
        super()._on_told()
        self._misses = 30 if self.worker is None else 3

supervisor.WorkerProcess = Process
command = [sys.executable, "-m", "pgdefer", "worker", "-A", "mod"]
sys.exit(supervisor.Supervisor(command, ["--dead-after", "3600"], 1).run())
"""
    with running_program(program, folder) as supervisor:
        (frozen,) = wait_for(lambda: pids(conn))
        app.defer("wait")
        wait_for(lambda: set(jobs.states().values()) == {"running"})
        os.kill(frozen, signal.SIGSTOP)
        (folder / "go").touch()
        wait_for(lambda: set(jobs.states().values()) == {"succeeded"})
        assert not is_alive(frozen)
        assert [row["outcome"] for row in jobs.attempts()] == ["crashed"]
        # the supervisor itself was stopped, for longer: the worker was not silent
        (busy,) = pids(conn)
        supervisor.send_signal(signal.SIGSTOP)
        conn.execute("select pg_sleep(5)")
        supervisor.send_signal(signal.SIGCONT)
        conn.execute("select pg_sleep(0.5)")
        assert pids(conn) == [busy]
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(300) == 0


def test_its_workers_send_heartbeats_as_its_options_say(
    supervise: Supervise, conn: Connection
) -> None:
    supervise("--processes", "1", "--heartbeat-every", "0.1", "--dead-after", "60")
    seen = "select dead_after, info -> 'heartbeat_every', last_seen_at from queue.workers"
    dead_after, every, first = wait_for(lambda: conn.execute(seen).fetchone())
    assert (dead_after, every) == (dt.timedelta(seconds=60), 0.1)
    wait_for(lambda: conn.execute(f"{seen} where last_seen_at > %s", [first]).fetchone())


@pytest.mark.long
def test_a_worker_may_show_no_life_for_as_long_as_dead_after(
    conn: Connection, folder: Path
) -> None:
    program = (
        "import sys; from pgdefer import cli; from pgdefer.worker import supervisor;"
        "supervisor.MISSES = 1;"
        "sys.argv = ['pgdefer', 'worker', '-A', 'mod', '--processes', '1', '--dead-after', '60'];"
        "cli.main()"
    )
    with running_program(program, folder) as supervisor:
        (silent,) = wait_for(lambda: pids(conn))
        os.kill(silent, signal.SIGSTOP)
        conn.execute("select pg_sleep(3)")
        os.kill(silent, signal.SIGCONT)
        supervisor.send_signal(signal.SIGTERM)
        assert supervisor.wait(300) == Exit.DONE


@pytest.mark.long
def test_what_no_new_process_mends_ends_the_supervisor(
    supervise: Supervise, conn: Connection, folder: Path
) -> None:
    (folder / "broken").write_text("3")
    supervisor = supervise("--processes", "3")
    assert supervisor.code() == 3, supervisor.log()
    # once one has worked, others are tried again in this case
    (folder / "broken").unlink()
    supervisor = supervise("--processes", "1")
    wait_for(lambda: "serves all queues" in supervisor.log())
    (pid,) = pids(conn)
    (folder / "broken").write_text("3")
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: supervisor.log().count("ended with exit code 3") >= 4)
    (folder / "broken").unlink()
    # but not for an App that is gone
    (pid,) = wait_for(lambda: pid not in (found := pids(conn)) and found)
    (folder / "broken").write_text(str(int(Exit.NO_APP)))
    os.kill(pid, signal.SIGKILL)
    assert supervisor.code() == Exit.NO_APP, supervisor.log()


@pytest.mark.long
def test_options_that_do_not_go_together(supervise: Supervise) -> None:
    supervisor = supervise("--processes", "1", "--drain", "--max-jobs", "5")
    assert supervisor.code() == Exit.USAGE
    assert "--drain or --max-jobs, not both" in supervisor.log()
    supervisor = supervise("--processes", "1", "--dead-after", "5")
    assert supervisor.code() == Exit.USAGE
    assert "1 processes" not in supervisor.log()
