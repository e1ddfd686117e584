"""Failures, aborts, lost claims, and being declared dead."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from .conftest import wait_for


def lives(lab: Any) -> None:
    """The worker runs jobs."""
    assert lab.end(lab.defer("echo"))[0]["state"] == "succeeded"


def test_retry(shared: Any) -> None:
    retry = {"max_attempts": 2, "base": "10 ms"}
    (job,) = shared.end(shared.defer("fail", {"message": "bad"}, options={"retry": retry}))
    assert (job["state"], job["reason"], job["attempts"]) == ("failed", "attempts", 2)
    assert shared.attempts(job["id"]) == ["failed", "failed"]


def test_fail_for_good(shared: Any) -> None:
    retry = {"max_attempts": 5, "base": "10 ms"}
    (job,) = shared.end(shared.defer("fail_for_good", {"message": "bad"}, options={"retry": retry}))
    assert (job["state"], job["reason"], job["attempts"]) == ("failed", "not_retryable", 1)


def test_retry_later(shared: Any) -> None:
    (job,) = shared.end(shared.defer("again", {"path": shared.path()}))
    assert (job["state"], job["failures"]) == ("succeeded", 0)
    assert shared.attempts(job["id"]) == ["yielded"]
    message = "select error from queue.attempts where job_id = %s"
    assert shared.value(message, [job["id"]]) == "not yet"


def test_retry_later_after_a_job_that_does_not_exist(shared: Any) -> None:
    (job,) = shared.end(shared.defer("again_after_none"))
    assert (job["state"], job["reason"], job["attempts"]) == ("failed", "not_retryable", 1)


def test_abort(shared: Any) -> None:
    id, _ = shared.hold()
    shared.reach(id, "running")
    assert shared.value("select queue.cancel(%s, abort => true)", [id]) == "running"
    assert shared.end(id)[0]["state"] == "cancelled"
    assert shared.attempts(id) == ["aborted"]
    lives(shared)


def test_cancel_before_it_starts(shared: Any) -> None:
    id = shared.defer("echo", options={"delay": "1 hour"})
    assert shared.value("select queue.cancel(%s)", [id]) == "cancelled"
    lives(shared)
    assert id not in shared.worker.started()


def test_timeout(shared: Any) -> None:
    """The worker ends it, not `reap`, which would do so 10 seconds later."""
    id, _ = shared.hold(options={"timeout": "500 ms"})
    job = shared.end(id)[0]
    assert job["state"] == "failed"
    assert shared.attempts(id) == ["timed_out"]
    assert not job["error"].startswith("not done within its timeout")
    lives(shared)


@pytest.mark.long
def test_outlives_its_timeout(lab: Any) -> None:
    """Its claim is kept until it ends, though heartbeats are 30 seconds apart."""
    lab.start(HEARTBEAT_EVERY=30, DEAD_AFTER=60)
    path = Path(lab.path())
    id = lab.defer("stubborn", {"path": str(path)}, options={"timeout": "1 s"})
    claimed_at = lab.reach(id, "running")["started_at"]
    over = "select clock_timestamp() > %s::timestamptz + interval '13 s'"
    # some can kill the handler
    wait_for(lambda: lab.value(over, [claimed_at]) or lab.job(id)["state"] == "failed")
    lab.conn.execute("select queue.reap()")
    path.touch()
    (job,) = lab.end(id)
    assert not job["error"].startswith("not done within its timeout")
    assert (lab.attempts(id), job["claims"]) == (["timed_out"], 1)


@pytest.mark.long
def test_a_claim_that_is_heard_of_too_late(lab: Any) -> None:
    """It goes back: 10 seconds after the timeout, counted from the claim, others may end it."""
    worker = lab.start(HEARTBEAT_EVERY=30, DEAD_AFTER=60)
    lives(lab)
    waits = (
        "select true from pg_stat_activity where wait_event_type = 'Lock'"
        " and query ~ 'fetch' and pid <> pg_backend_pid()"
    )
    with psycopg.connect(lab.dsn) as other:
        other.execute("lock table queue.active_job in exclusive mode")
        id = lab.defer("echo", options={"timeout": "1 s"})
        wait_for(lambda: lab.value(waits))
        worker.send(signal.SIGSTOP)
    try:
        claim = lab.reach(id, "running")["claim"]
        over = (
            "select started_at < clock_timestamp() - interval '7 s' from queue.jobs where id = %s"
        )
        wait_for(lambda: lab.value(over, [id]))
    finally:
        worker.send(signal.SIGCONT)
    job = lab.end(id)[0]
    assert (job["state"], lab.attempts(id)) == ("succeeded", ["released"])
    starts = [event["claim"] for event in worker.events if event["event"] == "started"]
    assert claim not in starts


def test_within_its_timeout(shared: Any) -> None:
    id, path = shared.hold(options={"timeout": "1 minute"})
    shared.reach(id, "running")
    path.touch()
    assert shared.end(id)[0]["state"] == "succeeded"


def test_claim_lost(shared: Any) -> None:
    """Another has ended its claim: the worker reports the refusal, and continues."""
    id, path = shared.hold()
    claim = shared.reach(id, "running")["claim"]
    shared.conn.execute("select queue.succeed(%s, %s, '1')", [id, claim])
    path.touch()
    assert shared.worker.wait("refused", id)["what"] == "QJ002"
    assert shared.job(id)["result"] == 1
    lives(shared)


def test_claim_taken(shared: Any) -> None:
    """An operator has ended its job: the worker is told to abort it, and continues."""
    id, _ = shared.hold()
    shared.reach(id, "running")
    shared.conn.execute("select queue.done(array[%s::bigint])", [id])
    assert shared.worker.wait("finished", id)
    assert shared.job(id)["state"] == "succeeded"
    lives(shared)


def test_heartbeat_while_a_job_runs(shared: Any) -> None:
    id, path = shared.hold()
    shared.reach(id, "running")
    shared.heartbeat()
    shared.heartbeat()
    path.touch()
    assert shared.end(id)[0]["claims"] == 1


def test_retry_is_kept(shared: Any) -> None:
    """A failure changes nothing else: the job is retried in its place at its lock."""
    given = {"retry": {"max_attempts": 2, "base": "10 ms"}}
    path = shared.path()
    first = shared.defer("fail", {"message": path}, lock="kept", options=given)
    second = shared.defer("echo", lock="kept")
    shared.end(first, second)
    assert shared.job(first)["finished_at"] <= shared.job(second)["started_at"]


# Maintenance, which only the worker does here, by heartbeat and when it is idle


def test_recurring_run(shared: Any) -> None:
    shared.conn.execute("select queue.schedule('often', 'every 1 second', 'none')")
    runs = "select count(*) from queue.jobs where task = 'none' and state = 'succeeded'"
    wait_for(lambda: shared.value(runs) >= 2)
    assert shared.value("select queue.unschedule('often')")


def test_expired(shared: Any) -> None:
    shared.conn.execute("select queue.pause('nobody')")
    expires_at = shared.value("select clock_timestamp() + interval '300 ms'").isoformat()
    id = shared.defer("echo", queue="nobody", options={"expires_at": expires_at})
    job = shared.end(id)[0]
    assert (job["state"], job["reason"]) == ("cancelled", "expired")


def test_another_worker_dies(shared: Any) -> None:
    """Its job runs again, here."""
    other = shared.value(
        "select queue.register_worker('other', array['theirs'], '{\"dead_after\": \"1 s\"}')"
    )
    shared.conn.execute("select queue.pause('theirs')")
    id = shared.defer("echo", queue="theirs")
    shared.conn.execute("select queue.resume('theirs')")
    if shared.value("select id from queue.fetch(%s)", [other]) is None:
        shared.end(id)  # this worker was faster
        return
    job = shared.end(id)[0]
    assert (job["state"], job["crashes"], job["claims"]) == ("succeeded", 1, 2)


def test_lease_ends(shared: Any) -> None:
    other = shared.value("select queue.register_worker('other', array['leased'])")
    id = shared.defer("echo", queue="elsewhere", options={"held": True})
    shared.conn.execute("select queue.move(array[%s::bigint], 'leased')", [id])
    shared.conn.execute("select queue.unhold(%s)", [id])
    row = shared.conn.execute("select id, claim from queue.fetch(%s)", [other]).fetchone()
    if row is not None:
        shared.conn.execute("select queue.extend(%s, %s, '100 ms')", row)
    assert shared.end(id)[0]["state"] == "succeeded"
    shared.conn.execute("select queue.deregister_worker(%s)", [other])


# Declared dead, connection lost. Each of these leaves a worker that works.


def test_taken_for_dead(shared: Any) -> None:
    """It aborts its jobs, and registers again; the jobs run again."""
    id, path = shared.hold()
    shared.reach(id, "running")
    seen = len(shared.worker.events)
    shared.give_up()
    shared.worker.wait("gone", after=seen)
    shared.worker.wait("ready", after=seen)
    path.touch()
    job = shared.end(id)[0]
    assert (job["state"], job["crashes"], job["claims"]) == ("succeeded", 1, 2)
    lives(shared)


def test_taken_for_dead_while_idle(shared: Any) -> None:
    seen = len(shared.worker.events)
    shared.give_up()
    shared.worker.wait("ready", after=seen)
    lives(shared)


def test_frozen(shared: Any) -> None:
    """A frozen worker is declared dead; when it continues, it ends no job that another runs."""
    id, path = shared.hold()
    claim = shared.reach(id, "running")["claim"]
    shared.worker.send(signal.SIGSTOP)
    try:
        seen = len(shared.worker.events)
        shared.give_up()
        wait_for(lambda: shared.job(id)["claim"] != claim)
    finally:
        shared.worker.send(signal.SIGCONT)
    shared.worker.wait("ready", after=seen)
    path.touch()
    job = shared.end(id)[0]
    assert (job["state"], job["claims"]) == ("succeeded", 2)
    lives(shared)


def test_connections_lost(shared: Any) -> None:
    """Running jobs continue, and their outcomes are reported once there is a connection again."""
    id, path = shared.hold()
    shared.reach(id, "running")
    shared.conn.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where datname = current_database() and pid <> pg_backend_pid()"
    )
    path.touch()
    job = shared.end(id)[0]
    assert (job["state"], job["claims"]) == ("succeeded", 1)
    lives(shared)


def test_connections_lost_again_and_again(shared: Any) -> None:
    ids = [shared.defer("echo") for _ in range(20)]
    for _ in range(5):
        shared.conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity "
            "where datname = current_database() and pid <> pg_backend_pid()"
        )
        ids.append(shared.defer("echo"))
    assert {job["state"] for job in shared.end(*ids)} == {"succeeded"}


def test_woken(shared: Any) -> None:
    """The sleeping worker is notified of a commit, or finds the job when it polls."""
    wait_for(lambda: not shared.value("select count(*) from queue.jobs where state = 'running'"))
    for _ in range(3):
        lives(shared)


def test_woken_without_notifications(shared: Any) -> None:
    with shared.conn.transaction():
        shared.conn.execute("set local pgdefer.notify = off")
        id = shared.defer("echo")
    assert shared.end(id)[0]["state"] == "succeeded"


def test_rolled_back(shared: Any) -> None:
    with shared.conn.transaction(force_rollback=True):
        id = shared.defer("echo")
    lives(shared)
    assert id not in shared.worker.started()


# Tasks that it does not know


def test_unknown_task(shared: Any) -> None:
    """The job goes back, as if never claimed, and `why` names the worker."""
    id = shared.defer("nobody knows this")
    assert shared.reach(id, "scheduled")["attempts"] == 0
    assert shared.attempts(id)[0] == "released"
    assert "not known to worker" in shared.value("select queue.why(%s)", [id])
    shared.conn.execute("select queue.cancel(%s)", [id])
    lives(shared)


def test_unknown_task_that_another_knows(shared: Any) -> None:
    """A worker that knows the task takes the job once it is offered again.

    Ours sleeps to that moment, too, and is as likely to get it: so it is frozen meanwhile.
    """
    id = shared.defer("only another knows this")
    shared.reach(id, "scheduled")
    shared.worker.send(signal.SIGSTOP)
    while shared.job(id)["state"] != "scheduled":
        shared.worker.send(signal.SIGCONT)
        shared.reach(id, "scheduled")
        shared.worker.send(signal.SIGSTOP)
    other = shared.value("select queue.register_worker('other')")
    options = Jsonb({"tasks": ["only another knows this"]})
    take = "select id, claim from queue.fetch(%s, options => %s)"

    def taken() -> bool:
        row = shared.conn.execute(take, [other, options]).fetchone()
        if row is not None:
            shared.conn.execute("select queue.succeed(%s, %s)", row)
        return row is not None

    try:
        wait_for(taken)
    finally:
        shared.worker.send(signal.SIGCONT)
    shared.conn.execute("select queue.deregister_worker(%s)", [other])
    assert shared.job(id)["state"] == "succeeded"
    lives(shared)


def test_unknown_task_without_grace(shared: Any) -> None:
    shared.conn.execute('select queue.configure(\'{"unknown_task_grace": "0 s"}\')')
    (job,) = shared.end(shared.defer("nobody ever knows this"))
    shared.conn.execute("select queue.configure('{\"unknown_task_grace\": null}')")
    assert (job["state"], job["reason"]) == ("failed", "unknown_task")
    lives(shared)
