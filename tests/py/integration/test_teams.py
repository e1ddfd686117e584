"""An App's calls for operators; blueprints, aliases."""

from __future__ import annotations

import datetime as dt
from typing import Any

import psycopg
import pytest

from pgdefer import App, Blueprint, Retry

from .conftest import Jobs, running

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]


async def test_lists(app: App, conn: Connection, jobs: Jobs) -> None:
    @app.task(name="t", queue="mail", lock="customer:{customer}", retry=Retry(3))
    async def task(customer: int) -> None: ...

    @app.task(name="bad")
    async def bad() -> None:
        raise ValueError("no")

    for customer in (1, 1, 2):
        task.defer(customer=customer)
    app.defer("limited", concurrency_key="k", concurrency_limit=2)
    (failed,) = [bad.defer()]
    async with running(app, ["default"], name="w"):
        await jobs.end(failed.id)
        (worker,) = await app.list_workers_async()
        assert (worker.name, worker.queues, worker.is_alive) == ("w", ["default"], True)
    conn.execute("select queue.tick()")  # which settles what the worker could not
    assert [job.id for job in app.list_jobs(task)] == [3, 2, 1]
    assert [job.id for job in app.list_jobs(task, max_jobs=1, before=3)] == [2]
    assert [job.id for job in app.list_jobs("t", pattern='"customer": 2')] == [3]
    assert [job.id for job in app.list_jobs(pattern="customer:1", by="key")] == [2, 1]
    (found,) = app.list_jobs(state="failed")
    assert (found.id, found.task, found.queue, found.attempts) == (failed.id, "bad", "default", 1)
    queues = {queue.name: queue for queue in app.list_queues()}
    assert queues["mail"].ready == 2
    assert {known.name for known in app.list_tasks()} == {"t", "bad"}
    assert [(lock.lock, lock.waiting) for lock in app.list_locks()] == [
        ("customer:1", 2),
        ("customer:2", 1),
    ]
    assert [(slot.key, slot.limit, slot.used) for slot in app.list_slots()] in ([("k", 2, 0)], [])
    stats = {(row.queue, row.task): row for row in app.stats()}
    assert stats["mail", "t"].ready == 2
    assert stats["default", "bad"].failed_5m == 1
    assert {check.status for check in app.health()} <= {"ok", "warn", "fail"}
    assert [job.id for job in app.retry_failed(bad)] == [failed.id]
    app.move_jobs([failed], "slow")
    assert app.list_jobs(bad)[0].queue == "slow"
    failed.cancel()
    assert app.prune("cancelled", older_than=dt.timedelta(0)) == 1
    await app.close_async()


async def test_schedules_outside_of_the_code(app: App) -> None:
    @app.task(name="t")
    def task(customer: int, scheduled_for: str = "") -> None: ...

    next_run = app.schedule("customer 5", "0 9 * * *", task, {"customer": 5}, timezone="UTC")
    assert next_run is not None
    (found,) = await app.list_schedules_async()
    assert (found.name, found.task, found.args, found.next_run_at) == (
        "customer 5",
        "t",
        {"customer": 5},
        next_run,
    )
    job = await app.run_now_async("customer 5")
    assert job.state() == "ready"
    assert await app.unschedule_async("customer 5")
    assert not app.unschedule("customer 5")
    with pytest.raises(ValueError, match="the schedule 'x': 61 in '61 "):
        app.schedule("x", "61 * * * *", task)
    await app.close_async()


async def test_blueprints(dsn: str, jobs: Jobs) -> None:
    part = Blueprint(defaults={"queue": "mail"})

    @part.recurring("@daily", args={"to": "all"})
    @part.task(name="send", aliases=["old.send"], retry=2)
    async def send(to: str) -> str:
        return to

    with pytest.raises(RuntimeError, match=r"no App has included the blueprint of .*test_teams"):
        send.defer("Ann")
    app = App(dsn)
    app.include(part, "mail.")
    assert set(app.tasks) == {"mail.send", "old.send"}
    assert app.schedules["mail.send"].task == "mail.send"
    made = [send.defer("Ann").id, app.defer("old.send", {"to": "Bob"}).id]
    async with running(app):
        rows = await jobs.end(*made)
    assert {row["id"]: (row["task"], row["queue"], row["result"]) for row in rows} == {
        made[0]: ("mail.send", "mail", "Ann"),
        made[1]: ("old.send", "mail", "Bob"),
    }
    with pytest.raises(ValueError, match="was included before"):
        app.include(part, "again.")


WRONG: list[tuple[str, Any]] = [
    ("the task 't' takes no option qeue: did you mean queue?", {"qeue": "x"}),
    ("the task 't' takes no option x: it takes aliases, batch, batch_of", {"x": 1}),
    ("the task 't': lock_mode must be one of 'ordered', 'mutex', not 'x'", {"lock_mode": "x"}),
    ("the task 't': on_conflict must be one of 'raise', 'ig", {"on_conflict": "skip"}),
    ("the task 't': unique_until must be one of", {"unique_until": "end"}),
    ("the task 't': needs_mode must be one of", {"needs_mode": "some"}),
    ("the task 't': on_need_failure must be one of", {"on_need_failure": "fail"}),
    ("the task 't': on_limit must be one of", {"on_limit": "drop"}),
    ("the task 't': run_in must be one of 'thread', 'process'", {"run_in": "fork"}),
    ("the task 't': queue must be text, not 5", {"queue": 5}),
    ("the task 't': lock must be text", {"lock": ["a"]}),
    ("the task 't': timeout must be a timedelta, not 30", {"timeout": 30}),
    ("the task 't': deadline must be a timedelta", {"deadline": "1 day"}),
    ("the task 't': retain must be a timedelta", {"retain": 5}),
    ("the task 't': delay must be a timedelta, not 5", {"delay": 5}),
    ("the task 't': held must be True or False", {"held": "yes"}),
    ("the task 't': retry=True does not say how often: Retry(None) is for ever", {"retry": True}),
    ("the task 't': retry=1 is one attempt, and so no retry: write retry=2", {"retry": 1}),
    ("the task 't': retry must be at least 2", {"retry": 0}),
    ("priority must be an int", {"priority": "high"}),
    ("retry_on must be a class of errors", {"retry_on": "OSError"}),
    ("max_memory needs run_in='process'", {"max_memory": 5}),
    ("aliases must be a list, not 'old'", {"aliases": "old"}),
    ("middleware must be a list", {"middleware": 5}),
]


@pytest.mark.parametrize(("message", "options"), WRONG, ids=[text for text, _ in WRONG])
def test_wrong_options_of_a_task(message: str, options: dict[str, Any]) -> None:
    app = App("dbname=nowhere")
    with pytest.raises((TypeError, ValueError)) as raised:
        app.task(name="t", **options)(lambda: None)
    assert message in str(raised.value)
    assert app.tasks == {}


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("Retry: backoff must be one of 'constant', 'linear', 'exponential'", {"backoff": "expo"}),
        ("Retry: on_crash must be one of", {"on_crash": "stop"}),
        ("Retry: base must be a timedelta, not 5", {"base": 5}),
        ("Retry: cap must be a timedelta", {"cap": "1 h"}),
        ("Retry: jitter must be from 0 to 1, not 2", {"jitter": 2}),
    ],
)
def test_wrong_policies(message: str, options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        Retry(3, **options)
    assert message in str(raised.value)
    wrong: Any = True
    with pytest.raises(TypeError, match="Retry: max_attempts must be a number, not True"):
        Retry(wrong)


@pytest.mark.parametrize(
    ("message", "cron", "options"),
    [
        ("the schedule of the task 't': 61 in '61 * * * *' is above 59", "61 * * * *", {}),
        ("the schedule of the task 't': '* * *' has 3 fields", "* * *", {}),
        ("the schedule of the task 't': 25 in '0 25 * * *' is above 23", "0 25 * * *", {}),
        ("the schedule of the task 't': a cron expression is needed", "", {}),
        ("takes no option catchup: did you mean catch_up?", "@daily", {"catchup": "all"}),
        ("overlap must be one of 'allow', 'skip', not 'no'", "@daily", {"overlap": "no"}),
        ("catch_up must be one of", "@daily", {"catch_up": True}),
    ],
)
def test_wrong_schedules(message: str, cron: str, options: dict[str, Any]) -> None:
    app = App("dbname=nowhere")
    task = app.task(name="t")(lambda: None)
    with pytest.raises((TypeError, ValueError)) as raised:
        app.recurring(cron, **options)(task)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("a job of 't' takes no option qeue: did you mean queue?", {"qeue": "x"}),
        ("a job of 't': pass delay or scheduled_at, not both", {}),
        ("a job of 't': lock_mode must be one of", {"lock_mode": "x"}),
    ],
)
def test_wrong_options_of_a_job(message: str, options: dict[str, Any]) -> None:
    app = App("dbname=nowhere")
    task = app.task(name="t")(lambda: None)
    both = {"delay": dt.timedelta(1), "scheduled_at": dt.datetime.now(dt.UTC)}
    for call in (task.configure, lambda **given: app.defer("t", **given)):
        with pytest.raises((TypeError, ValueError)) as raised:
            call(**(options or both))
        assert message in str(raised.value)
