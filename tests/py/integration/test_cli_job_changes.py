"""Changing jobs from the command line, in each state that they may have."""

from __future__ import annotations

import os
import sys

import psycopg
import pytest

from pgdefer.cli import Exit, _job_changes
from pgdefer.database.source import PsycopgConnection

from .command_line import Claim, Run, claim, defer, run, zoo
from .conftest import Jobs

__all__ = ["claim", "run", "zoo"]

pytestmark = pytest.mark.client


def test_move(run: Run, jobs: Jobs, conn: PsycopgConnection, claim: Claim) -> None:
    retry = '{"retry": {"max_attempts": 5}}'
    id = defer(run, "t", '{"n": 1}', "--options", retry)
    ((_, number),) = claim().items()
    run("queue", "create", "q")
    done = run("job", "move", id, "--to", "q")
    assert (done.code, done.out) == (Exit.WRONG_STATE, "")
    assert (
        done.err == f"{id}: its state does not allow this (running)\nRunning jobs need --force.\n"
    )
    conn.execute("select queue.fail(%s, %s, 'once')", [id, number])
    run("queue", "pause", "q")
    assert run("job", "move", id, "--to", "q").out == f"{id}: ready\n"
    (job,) = jobs()
    assert (job["id"], job["queue"], job["args"], job["attempts"]) == (id, "q", {"n": 1}, 1)
    assert job["reason"] == "paused"
    assert [row["error"] for row in jobs.attempts()] == ["once"]
    run("queue", "resume", "q")
    ((_, number),) = claim().items()
    assert run("job", "move", id, "--to", "p", "--force").code == 0
    with pytest.raises(psycopg.Error) as lost:
        conn.execute("select queue.succeed(%s, %s)", [id, number])
    assert lost.value.sqlstate == "QJ002"
    assert run("job", "move", id, "--to", "x*").code == Exit.USAGE


def test_retry(run: Run, jobs: Jobs, conn: PsycopgConnection, claim: Claim) -> None:
    failed, running = defer(run, "t"), defer(run, "t")
    claims = claim()
    conn.execute("select queue.fail(%s, %s, 'no')", [failed, claims[failed]])
    done = run("job", "retry", failed, running)
    assert (done.code, done.out) == (Exit.PARTLY, f"{failed}: ready\n")
    assert jobs.states() == {failed: "ready", running: "running"}
    refused = run("job", "retry", running)
    assert refused.code == Exit.WRONG_STATE
    assert "Running jobs need --force." in refused.err
    assert run("job", "retry", running, "--force").out == f"{running}: ready\n"
    with pytest.raises(psycopg.Error, match="claim lost"):
        conn.execute("select queue.succeed(%s, %s)", [running, claims[running]])
    run("job", "fail", failed, running, "--yes")
    assert len(run("job", "retry", "--failed", "-n", 1, "--json").json) == 1
    assert len(run("job", "retry", "--failed", "-t", "other", "--json").json) == 0
    assert "no failed jobs" in run("job", "retry", "--failed", "-t", "other").err
    assert run("job", "retry").code == Exit.USAGE
    assert run("job", "retry", failed, "--failed").code == Exit.USAGE
    for option in (["-q", "default"], ["-t", "t"], ["-n", 1]):
        done = run("job", "retry", failed, *option)
        assert (done.code, done.out) == (Exit.USAGE, ""), option
        assert "-q, -t and -n go with --failed: ids name the jobs already" in done.err


def test_retry_with_changes(run: Run, jobs: Jobs, claim: Claim) -> None:
    first, second = defer(run, "t", "--lock", "l"), defer(run, "t")
    claim()
    run("job", "fail", first, second, "--yes")
    options = ["--to", "other", "--priority", 3, "--lock", "l"]
    assert run("job", "retry", first, second, *options).out.split() == [
        f"{first}:", "ready", f"{second}:", "blocked"
    ]  # fmt: skip
    assert {(row["queue"], row["priority"], row["lock"]) for row in jobs()} == {("other", 3, "l")}
    run("job", "fail", first, second, "--yes")
    assert run("job", "retry", first, "--at", "2999-01-01Z").out == f"{first}: scheduled\n"
    assert run("job", "retry", second, "--in", "1 day", "--lock", "").out.endswith("scheduled\n")
    at, later = [row["scheduled_at"] for row in jobs()]
    assert (at.year, later.year < 2900, jobs()[1]["lock"]) == (2999, True, None)
    for bad in (["--in", "-1 day"], ["--at", "x"], ["--to", "x*"], ["--at", "now", "--in", "1 s"]):
        assert run("job", "retry", first, *bad).code == Exit.USAGE, bad
    assert run("job", "retry", "--failed", "--to", "other").code == Exit.USAGE


def test_more_jobs_than_one_call_may_change(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_job_changes, "SLICE", 2)
    ids = [defer(run, "t") for _ in range(5)]
    done = run("job", "fail", *ids, ids[0], 99, "--yes")
    assert (done.code, done.out) == (Exit.PARTLY, "".join(f"{id}: failed\n" for id in ids))
    assert len(run("job", "retry", *ids, "--dry-run").out.splitlines()) == 5
    found = [row["id"] for row in run("job", "retry", "--failed", "-n", 3, "--json").json]
    assert found == ids[:3]
    # refused jobs are read once
    run("job", "fail", defer(run, "t", "--queueing-lock", "k"), "--yes")
    defer(run, "t", "--queueing-lock", "k")
    done = run("job", "retry", "--failed")
    assert (done.code, done.out) == (Exit.PARTLY, "".join(f"{id}: ready\n" for id in ids[3:]))
    assert run("job", "retry", "--failed").code == Exit.ALREADY_QUEUED


def test_retry_where_another_has_the_queueing_lock(run: Run, jobs: Jobs) -> None:
    first = defer(run, "t", "--queueing-lock", "k")
    run("job", "fail", first, "--yes")
    second = defer(run, "t", "--queueing-lock", "k")
    for which in (first, "--failed"):
        done = run("job", "retry", which)
        assert (done.code, done.out) == (Exit.ALREADY_QUEUED, "")
        assert done.err == f"{first}: another job has its queueing lock (failed)\n"
    assert run("job", "retry", first, 99).code == Exit.PARTLY
    run("job", "delete", second, "--yes")
    assert run("job", "retry", first).out == f"{first}: ready\n"
    assert jobs.states() == {first: "ready"}


def test_fail(run: Run, jobs: Jobs, conn: PsycopgConnection, claim: Claim) -> None:
    retry = '{"retry": {"max_attempts": 10}}'
    need = defer(run, "t", "--options", retry)
    dependent = defer(run, "t", "--needs", need)
    assert run("job", "fail", need).code == Exit.USAGE, "nobody to ask"
    assert run("job", "fail", need, "-m", "broken", "-y").out == f"{need}: failed\n"
    assert jobs.states() == {need: "failed", dependent: "upstream_failed"}
    assert jobs()[0]["error"] == "broken"
    assert run("job", "fail", need, "-y").code == Exit.WRONG_STATE
    assert "a need failed" in run("job", "why", dependent).out
    running = defer(run, "t", "--options", retry)
    ((_, number),) = claim().items()
    assert run("job", "fail", running, "-y").out == f"{running}: failed\n"
    with pytest.raises(psycopg.Error, match="claim lost"):
        conn.execute("select queue.succeed(%s, %s)", [running, number])
    assert run("db", "tick").code == 0
    assert jobs.states()[running] == "failed", "it is not retried"
    assert claim() == {}


def test_done_on_each_state(run: Run, jobs: Jobs, zoo: dict[str, int]) -> None:
    before = jobs()
    done = run("job", "done", *zoo.values(), "--dry-run")
    assert done.code == Exit.PARTLY
    assert jobs() == before
    done = run("job", "done", *zoo.values(), "--yes")
    assert done.code == Exit.PARTLY
    assert done.err == f"{zoo['succeeded']}: its state does not allow this (succeeded)\n"
    assert set(jobs.states().values()) == {"succeeded"}
    assert run("job", "done", *zoo.values(), "--yes").code == Exit.WRONG_STATE


# The commands that change jobs, and the states in which each works.
CHANGES = {
    "move --to q": set(),
    "retry": {"failed", "succeeded", "cancelled", "retrying"},
    "delete --yes": set(),
    "fail --yes": set(),
    "priority 3": set(),
}
REFUSED = {
    "move --to q": {"running"},
    # needs are deleted together with their dependents
    "delete --yes": {"running"},
    "fail --yes": {"failed", "succeeded", "cancelled"},
    "priority 3": set(),
}


@pytest.mark.parametrize("command", CHANGES)
def test_each_change_on_each_state(run: Run, zoo: dict[str, int], command: str) -> None:
    done = run("job", *command.split(), *zoo.values(), "--json")
    accepted = {row["id"] for row in done.json if row["error"] is None}
    names = {name for name, id in zoo.items() if id in accepted}
    assert names == (CHANGES[command] or zoo.keys() - REFUSED[command])
    assert [row["id"] for row in done.json] == [*zoo.values()], "in the order given"
    assert done.code == (0 if len(names) == len(zoo) else Exit.PARTLY)


def test_a_mixed_list(run: Run, jobs: Jobs, claim: Claim) -> None:
    running = defer(run, "t")
    claim()
    valid = defer(run, "t")
    done = run("job", "delete", valid, 99, running, "--yes")
    assert done.code == Exit.PARTLY
    assert done.out == f"{valid}: deleted\n"
    assert done.err.splitlines() == [
        "99: there is no such job",
        f"{running}: its state does not allow this (running)",
        "Running jobs need --force.",
    ]
    assert run("job", "delete", 98, 99, "--yes").code == Exit.NOT_FOUND
    assert run("job", "delete", running, "--yes").code == Exit.WRONG_STATE
    assert run("job", "delete", running, "--yes", "--json").json == [
        {"id": running, "outcome": "running", "error": "QJ003"}
    ]
    assert run("job", "delete", "x", "--yes").code == Exit.USAGE
    assert jobs.states() == {running: "running"}
    assert run("job", "delete", running, "--yes", "--force").code == 0
    assert jobs() == []


def test_asking(dsn: str, run: Run, jobs: Jobs) -> None:
    """On a terminal destructive commands ask for confirmation."""
    id = defer(run, "t")

    def ask(answer: bytes) -> int:
        pid, terminal = os.forkpty()
        if pid == 0:
            arguments = ["-m", "pgdefer", "job", "delete", str(id)]
            os.execv(sys.executable, [sys.executable, *arguments])
        asked = b""
        while b"[y/N]" not in asked:
            asked += os.read(terminal, 1000)
        os.write(terminal, answer)
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
        return os.waitstatus_to_exitcode(status)

    assert ask(b"n\n") == Exit.ERROR
    assert jobs.states() == {id: "ready"}
    assert ask(b"y\n") == 0
    assert jobs() == []


def test_one_job(run: Run, jobs: Jobs, claim: Claim) -> None:
    id = defer(run, "t")
    assert run("job", "hold", id).out == f"{id}: held\n"
    assert run("job", "hold", 99).code == Exit.NOT_FOUND
    assert run("job", "unhold", id).out == f"{id}: ready\n"
    assert run("job", "unhold", id).code == Exit.WRONG_STATE
    assert run("job", "reschedule", id, "--at", "2999-01-01").out == f"{id}: scheduled\n"
    assert run("job", "reschedule", id, "--json").json == {"state": "ready"}
    for words in (("hold", "1x"), ("cancel", id, "1x", "-y"), ("retry", "1x")):
        done = run("job", *words)
        assert done.code == Exit.USAGE
        assert "'1x': an id is a whole number" in done.err
    assert run("job", "priority", "-5", id).out == f"{id}: ready\n"
    assert jobs()[0]["priority"] == -5
    assert run("job", "priority", 5, id, 99).code == Exit.PARTLY
    assert jobs()[0]["priority"] == 5
    claim()
    assert run("job", "cancel", id, "-y").code == Exit.WRONG_STATE
    done = run("job", "cancel", id, "-y", "--json")
    assert done.code == Exit.WRONG_STATE
    assert done.json == [{"id": id, "outcome": "running", "error": "QJ003"}]
    assert run("job", "cancel", id, "-y", "--abort").out == f"{id}: running\n"
    assert run("job", "reschedule", id).code == Exit.WRONG_STATE


def test_hold_many(run: Run) -> None:
    one, other = defer(run, "t"), defer(run, "t")
    done = run("job", "hold", one, 99, other, one)
    assert (done.code, done.out) == (Exit.PARTLY, f"{one}: held\n{other}: held\n")
    assert "99" in done.err
    done = run("job", "unhold", other, one, "--json")
    assert (done.code, done.json) == (
        0,
        [{"id": id, "outcome": "ready", "error": None} for id in (other, one)],
    )


def test_args(run: Run, jobs: Jobs, claim: Claim) -> None:
    id = defer(run, "t", '{"n": 1, "m": 1}')
    assert run("job", "args", id, '{"n": 2}').out == f"{id}: ready\n"
    assert jobs()[0]["args"] == {"n": 2}
    assert run("job", "args", id, "-", input='{"n": 3}').code == 0
    assert jobs()[0]["args"] == {"n": 3}
    for wrong in ("[]", "null", "{", "7"):
        assert run("job", "args", id, wrong).code == Exit.USAGE
    assert run("job", "args", 99, "{}").code == Exit.NOT_FOUND
    claim()
    assert run("job", "args", id, "{}").code == Exit.WRONG_STATE
    assert jobs()[0]["args"] == {"n": 3}


def test_copy(run: Run, jobs: Jobs) -> None:
    id = defer(run, "t", '{"n": 1}', "-p", 3, "--queueing-lock", "k")
    assert run("job", "copy", id, "--json").json == {"id": id + 1}
    (_, copied) = jobs()
    assert (copied["args"], copied["priority"], copied["queueing_lock"]) == ({"n": 1}, 3, None)
    assert run("job", "copy", 99).code == Exit.NOT_FOUND
