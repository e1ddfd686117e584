"""A caller's mistakes are refused at once, with clear messages."""

from __future__ import annotations

import collections
import datetime as dt
import functools
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from pgdefer import App, Blueprint, Decision, InvalidParameter, Job, Retry, RetryLater, Worker
from pgdefer.contrib.cluster import Cluster, shard_of
from pgdefer.testing import CommittedTestQueue, MemoryQueue, TestQueue, fake_job

NOWHERE = "postgresql://nowhere.invalid/x"


@pytest.fixture
def app() -> App:
    return App(NOWHERE)


@pytest.mark.parametrize(
    ("queues", "options", "kind", "message"),
    [
        (None, {"queue": ["a"]}, TypeError, "takes no option queue: it takes queues, concurrency,"),
        (["a"], {"concurency": 3, "x": 1}, TypeError, "takes no option concurency, x: it takes"),
        ("default", {}, TypeError, r"queues must be a list, not 'default': give \['default'\]"),
        (None, {"slots": "12"}, TypeError, r"slots must be a list, not '12': give \['12'\]"),
        (None, {"shutdown_timeout": -1}, ValueError, "shutdown_timeout must be at least 0, not -1"),
        (None, {"concurrency": 0}, ValueError, "concurrency must be at least 1, not 0"),
        (None, {"jobs_per_process": 0}, ValueError, "jobs_per_process must be at least 1, not 0"),
        (None, {"concurrency": 2**40}, ValueError, "concurrency must be at most 2147483647"),
        (None, {"max_jobs": 2.5}, TypeError, "max_jobs must be a whole number, not 2.5"),
        (None, {"max_jobs": "5"}, TypeError, "max_jobs must be a whole number, not '5'"),
        (None, {"shutdown_timeout": "5"}, TypeError, "shutdown_timeout must be a number, not '5'"),
        (None, {"dead_after": 10}, ValueError, "heartbeat_every must be above 0 and below dead"),
        (None, {"heartbeat_every": 0}, ValueError, "heartbeat_every must be above 0 and below"),
        (None, {"poll_every": 0}, ValueError, "poll_every must be at least 0.01, not 0"),
        (None, {"poll_every": -1}, ValueError, "poll_every must be at least 0.01, not -1"),
        (None, {"poll_every": 61}, ValueError, "poll_every must be at most 60, not 61"),
        (None, {"poll_every": math.nan}, ValueError, "poll_every must be at most 60, not nan"),
        (None, {"poll_every": math.inf}, ValueError, "poll_every must be at most 60, not inf"),
        (None, {"poll_every": True}, TypeError, "poll_every must be a number, not True"),
        (None, {"poll_every": "1"}, TypeError, "poll_every must be a number, not '1'"),
        (None, {"max_running": "a=1"}, TypeError, "max_running must be a mapping such as"),
        (None, {"slots": []}, ValueError, "slots is empty"),
        (None, {"tasks": []}, ValueError, "tasks is empty: leave it out to run all"),
        (None, {"tasks": ()}, ValueError, "tasks is empty: leave it out to run all"),
        (None, {"tasks": set()}, ValueError, "tasks is empty: leave it out to run all"),
        (None, {"slots": ["1:99999999999w"]}, ValueError, "the horizon of '1:99999999999w' is too"),
        ([5], {}, TypeError, "each of queues must be text, such as 'mail', not 5"),
        (["a", ""], {}, ValueError, "each of queues is empty"),
        (
            None,
            {"tasks": [None]},
            TypeError,
            "each of tasks must be text, such as 'mail.send', not",
        ),
        (["a"], {"order": ["listed"]}, ValueError, r"order is mixed or listed, not \['listed'\]"),
        (None, {"name": 5}, TypeError, "name must be text, such as 'mail-1', not 5"),
        (None, {"drain": "no"}, TypeError, "drain must be True or False, not 'no'"),
        (None, {"prune_schedules": 0}, TypeError, "prune_schedules must be True or False, not 0"),
        (None, {"register_schedules": None}, TypeError, "register_schedules must be True or False"),
        (None, {"http": 9000}, TypeError, "http must be text, such as '127.0.0.1:9000', not 9000"),
        (None, {"max_running": {5: 1}}, TypeError, "each queue of max_running must be text"),
    ],
)
def test_options_of_a_worker(
    app: App, queues: Any, options: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Worker(app, queues, **options)
    with pytest.raises(kind, match=message):
        app.run_worker(queues, **options)


@pytest.mark.parametrize("given", ["x", True, 2.5])
def test_a_worker_of_many_databases(app: App, given: Any) -> None:
    with pytest.raises(TypeError, match=f"per_database must be a whole number, not {given!r}"):
        app.run_worker(dsns=["dbname=a"], per_database=given)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"max_connections": "x"}, TypeError, "max_connections must be a whole number, not 'x'"),
        ({"max_connections": True}, TypeError, "max_connections must be a whole number, not True"),
        ({"max_connections": 2.5}, TypeError, r"max_connections must be a whole number, not 2\.5"),
        (
            {"max_connections": math.nan},
            TypeError,
            "max_connections must be a whole number, not nan",
        ),
        ({"max_connections": 0}, ValueError, "max_connections must be at least 1, not 0"),
        ({"name": 5}, TypeError, "name must be text, such as 'shop', not 5"),
        ({"pgbouncer": "no"}, TypeError, "pgbouncer must be True or False, not 'no'"),
        ({"embedded": "no", "dsn": None}, TypeError, "embedded must be True, False or an Embedd"),
        ({"listen_dsn": 5}, TypeError, "listen_dsn must be text, not of type int"),
        ({"imports": [5]}, TypeError, "each of imports must be text, such as 'shop.tasks', not 5"),
    ],
)
def test_options_of_an_app(options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        App(**{"dsn": NOWHERE, **options})


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"name": ""}, ValueError, "the name of a task is empty: give a text such as 'mail.send'"),
        ({"name": 5}, TypeError, "the name of a task must be text, such as 'mail.send', not 5"),
        ({"aliases": [5]}, TypeError, "each of aliases must be text, such as 'mail.send_old'"),
        ({"max_progress": "x"}, TypeError, "max_progress must be an int, not 'x'"),
        ({"max_progress": True}, TypeError, "max_progress must be an int, not True"),
        ({"max_progress": math.nan}, TypeError, "max_progress must be an int, not nan"),
        ({"max_progress": -1}, ValueError, "max_progress must be from 0 to 999999999, not -1"),
        ({"lock": "a\ud800"}, ValueError, r"lock is no text, but half of a character: 'a\\ud800'"),
        ({"share": "{x}"}, ValueError, r"share names \{x\}, which is no argument: it takes none"),
        ({"group": "{x}"}, ValueError, r"group names \{x\}, which is no argument: it takes none"),
        (
            {"concurrency": [{"key": "{x}", "limit": 1}]},
            ValueError,
            r"a key of concurrency names \{x\}, which is no argument: it takes none",
        ),
        ({"version": 0}, ValueError, "version must be from 1 to 2147483647, not 0"),
        ({"min_version": 0}, ValueError, "min_version must be from 1 to 2147483647, not 0"),
        (
            {"min_version": 3, "version": 2},
            ValueError,
            "min_version, 3, must not be above version, 2$",
        ),
        (
            {"min_version": 3},
            ValueError,
            "min_version, 3, must not be above version, which is 1 if it is left out",
        ),
    ],
)
def test_options_of_a_task(
    app: App, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        app.task(**options)(lambda: None)
    assert app.tasks == {}


@pytest.mark.parametrize("given", ["5", True, 2.5])
def test_memory_is_a_number_of_bytes(app: App, given: Any) -> None:
    with pytest.raises(TypeError, match=f"max_memory must be a whole number, not {given!r}"):
        app.task(run_in="process", max_memory=given)(handler_of_batches)


def test_none_removes_a_default_of_words() -> None:
    app = App(NOWHERE, defaults={"lock_mode": "mutex"})
    task = app.task(name="t", lock_mode=None)(lambda: None)  # type: ignore[call-overload]
    assert "lock_mode" not in task.defaults.options


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"timezone": 5}, TypeError, "timezone must be text, such as 'Europe/Berlin', not 5"),
        ({"timezone": ""}, ValueError, "timezone is empty"),
        ({"name": 5}, TypeError, "name must be text, such as 'nightly', not 5"),
        ({"name": ""}, ValueError, "name is empty"),
        ({"args": 5}, TypeError, "args must be a mapping, not 5"),
        ({"args": "x"}, TypeError, "args must be a mapping, not 'x'"),
        ({"args": []}, TypeError, r"args must be a mapping, not \[\]"),
    ],
)
def test_arguments_of_a_schedule(
    app: App, options: Any, kind: type[Exception], message: str
) -> None:
    task = app.task(name="t")(lambda: None)
    with pytest.raises(kind, match=f"the schedule of the task 't': {message}"):
        app.recurring("@daily", **options)(task)
    assert app.schedules == {}


@pytest.mark.parametrize("given", ["x", 5, []])
def test_defaults_are_a_mapping(given: Any) -> None:
    kinds: tuple[Any, ...] = (Blueprint, functools.partial(App, NOWHERE))
    for kind in kinds:
        with pytest.raises(TypeError, match="defaults must be a dict of a task's options, not"):
            kind(defaults=given)


@pytest.mark.parametrize("given", ["x", True, 2.5, math.nan])
def test_crashes_are_counted(given: Any) -> None:
    with pytest.raises(TypeError, match=f"max_crashes must be a whole number, not {given!r}"):
        Retry(3, max_crashes=given)
    with pytest.raises(ValueError, match="Retry: max_crashes must be at least 1, not 0"):
        Retry(3, max_crashes=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"retryable": "no"}, "retryable must be True or False, not 'no'"),
        ({"queue": 5}, "queue must be text, not 5"),
        ({"lock": 5}, "lock must be text, not 5"),
        ({"reason": 5}, "reason must be text, not 5"),
        ({"priority": "x"}, "priority must be an int, not 'x'"),
    ],
)
def test_what_is_no_decision(options: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        Decision(**options)


@pytest.mark.parametrize(
    ("message", "text"), [(None, ""), ("later", "later"), (ValueError("busy"), "busy"), (5, "5")]
)
def test_any_message_is_shown_as_text(message: object, text: str) -> None:
    assert RetryLater(message).message == str(RetryLater(message)) == text


def test_an_empty_name_is_none() -> None:
    assert App(name="").name == App().name
    names: list[str] = [Worker(App(NOWHERE), **options).name for options in ({"name": ""}, {})]  # type: ignore[arg-type]
    assert names[0] == names[1]


async def test_steps_call_functions() -> None:
    wrong: Any
    with fake_job() as job:
        for wrong in (5, "b"):
            message = f"a step calls a function, not {wrong!r}"
            with pytest.raises(TypeError, match=message):
                job.step("a", wrong)
            with pytest.raises(TypeError, match=message):
                await job.step_async("a", wrong)
            with pytest.raises(TypeError, match=message):
                job.step("a")(wrong)
        wrong = 5
        with pytest.raises(TypeError, match="a step calls a function, not 5"):
            job.step(wrong)
        wrong = "no"
        with pytest.raises(TypeError, match="lazy must be True or False, not 'no'"):
            job.step("a", lazy=wrong)
        assert job.step("a", lambda: 7) == 7


def test_what_a_job_reports() -> None:
    wrong: Any
    with fake_job() as job:
        for wrong in ("x", True):
            with pytest.raises(TypeError, match=f"percent must be a number, not {wrong!r}"):
                job.progress(wrong)
        for wrong in (-1, 101, math.nan, 10**400):
            with pytest.raises(
                ValueError, match=f"percent must be at (least 0|most 100), not {wrong}"
            ):
                job.progress(wrong)
        wrong = 5
        with pytest.raises(TypeError, match="message must be text, not 5"):
            job.progress(50, wrong)
        for wrong in ("a\0b", "\ud800"):
            with pytest.raises(ValueError, match="message has a character that PostgreSQL can't"):
                job.progress(50, wrong)
        wrong = 5
        with pytest.raises(TypeError, match="stream must be a text, not 5"):
            job.emit(wrong, 1)
        with pytest.raises(TypeError, match="lease must be a timedelta, not 5"):
            job.extend(wrong)
        assert (job.progresses, job.emitted, job.leases) == ([], [], [])


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"args": [1]}, TypeError, r"args must be a mapping, not \[1\]"),
        ({"headers": 5}, TypeError, "headers must be a mapping, not 5"),
        ({"attempt": True}, TypeError, "attempt must be a whole number, not True"),
        ({"attempt": 0}, ValueError, "attempt must be at least 1, not 0"),
        ({"max_attempts": "x"}, TypeError, "max_attempts must be a whole number, not 'x'"),
        ({"deadline": 5}, TypeError, "deadline must be a datetime, not 5"),
        ({"scheduled_for": 5}, TypeError, "scheduled_for must be a datetime, not 5"),
        ({"timeout": 5}, TypeError, "timeout must be a timedelta, not 5"),
    ],
)
def test_what_is_no_fake_job(options: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message), fake_job(**options):
        pass


def test_queues_of_tests_need_an_app() -> None:
    wrong: Any = 5
    kinds: tuple[Any, ...] = (
        MemoryQueue,
        CommittedTestQueue,
        functools.partial(TestQueue, connection=None),
    )
    for kind in kinds:
        with pytest.raises(TypeError, match="app must be an App, not 5"):
            kind(wrong)


def test_a_cluster_may_wait_for_ever(app: App) -> None:
    assert Cluster(app, patience=math.inf).patience == math.inf


def test_arguments_of_a_cluster(app: App) -> None:
    cluster: Any = Cluster(app, NOWHERE)
    wrong: Any = 5
    cases: list[tuple[Callable[[], object], str]] = [
        (lambda: Cluster(wrong), "app must be an App, not 5"),
        (lambda: Cluster(app, patience="x"), "patience must be a number, not 'x'"),  # type: ignore[arg-type]
        (lambda: Cluster(app, patience=math.nan), "patience must be at most"),
        (lambda: Cluster.create(app, {}), "shards is empty: give the name and DSN of each"),
        (lambda: Cluster.create(app, [NOWHERE]), "shards must be a mapping"),  # type: ignore[arg-type]
        (lambda: Cluster.create(app, {"": NOWHERE}), "a shard's name is empty"),
        (lambda: Cluster.create(app, {"a": wrong}), "the DSN of shard 'a' must be text"),
        (lambda: cluster.add(5, NOWHERE), "a shard's name must be text, such as 'a', not 5"),
        (lambda: cluster.move("x", "b"), "slot must be a whole number, not 'x'"),
        (lambda: cluster.move(1, "b", patience=-1), "patience must be at least 0, not -1"),
        (lambda: cluster.stay(True), "slot must be a whole number, not True"),
        (lambda: cluster.split("mail", "x"), "max_running must be a whole number, not 'x'"),
        (lambda: cluster.split(5, 2), "queue must be text, such as 'mail', not 5"),
        (lambda: shard_of(wrong), "a key must be text, such as 'tenant-1', not 5"),
        (lambda: cluster.defer_many([5]), r"each of calls must be a key and a call"),
        (lambda: cluster.defer_many([(5, 5)]), "a key must be text"),
        (lambda: cluster.defer_many([("k", 5)]), r"a call must come from task\.prepare"),
    ]
    for call, message in cases:
        with pytest.raises((TypeError, ValueError), match=message):
            call()


def handler_of_batches(jobs: Any) -> None: ...


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"batch": 0}, ValueError, "batch must be from 1 to 1000, not 0"),
        ({"batch": 1001}, ValueError, "batch must be from 1 to 1000, not 1001"),
        ({"batch": True}, TypeError, "batch must be a number of jobs, not True"),
        ({"batch": "5"}, TypeError, "batch must be a number of jobs, not '5'"),
        ({"batch": 5.0}, TypeError, "batch must be a number of jobs, not 5.0"),
        ({"batch": 5, "transactional": True}, ValueError, "batch is not for transactional tasks"),
        ({"batch": 5, "run_in": "process"}, ValueError, "batch is not for tasks with run_in="),
        ({"batch_of": dict}, ValueError, "batch_of needs batch"),
        ({"batch": 5, "batch_of": 5}, TypeError, "batch_of must make an object of a job's arg"),
    ],
)
def test_options_of_batches(
    app: App, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        app.task(**options)(handler_of_batches)
    assert app.tasks == {}


def test_handlers_of_batches_take_a_list(app: App) -> None:
    functions: list[Any] = [lambda: None, lambda a, b: None, lambda *, jobs: None]
    for function in functions:
        with pytest.raises(TypeError, match="of batches is called with the list of jobs: "):
            app.task(batch=5)(function)
    kinds: tuple[Any, ...] = (App, Blueprint)
    for kind in kinds:
        with pytest.raises(TypeError, match="takes no option batch"):
            kind(defaults={"batch": 5})


def test_arguments_of_batches_have_names(app: App) -> None:
    task = app.task(batch=5)(lambda jobs: None)
    with pytest.raises(TypeError, match="too many positional arguments"):
        task.prepare(1)


@pytest.mark.parametrize(
    ("first", "second"), [("rec", "newer rec"), ("rec newer", "newer"), ("a rec", "b rec")]
)
def test_names_and_aliases_are_of_one_task(app: App, first: str, second: str) -> None:
    def older() -> None: ...
    def newer() -> None: ...

    def add(names: str, function: Any) -> None:
        name, *aliases = names.split()
        app.task(name=name, aliases=aliases)(function)

    add(first, older)
    both = f"'{first.split()[0]}' and '{second.split()[0]}'"
    message = f"there are two tasks named '(rec|newer)': {both}"
    with pytest.raises(ValueError, match=message):
        add(second, newer)
    assert {task.function for task in app.tasks.values()} == {older}
    add(first, older)


def test_tasks_are_functions(app: App) -> None:
    given: Any = "greet"
    with pytest.raises(TypeError, match="must be a function, not 'greet': write name='greet'"):
        app.task(given)
    for made in (functools.partial(handler_of_batches, 1), math.pi, SimpleNamespace):
        given = made
        with pytest.raises(TypeError, match=r"a task must be a function, not .*: write a `def`"):
            app.task(name="x")(given)
    assert app.tasks == {}

    @app.recurring("@daily")
    def tidy() -> None: ...

    with pytest.raises(TypeError, match=r"tidy>: put @app\.recurring above @app\.task"):
        app.task(name="x")(tidy)


def test_a_url_of_sqlalchemy() -> None:
    url: Any = sa.make_url("postgresql+psycopg://me:secret@host/shop")
    whole = r"pass url\.render_as_string\(hide_password=False\)"
    with pytest.raises(TypeError, match=f"dsn must be text, not of type URL: {whole}"):
        App(url)
    with pytest.raises(InvalidParameter, match=rf"the password in the DSN is \*\*\*.*{whole}"):
        App(str(url))
    assert "secret" in App(url.render_as_string(hide_password=False)).source.conninfo()
    with pytest.raises(InvalidParameter, match=r"can't be read.*libpq's, such as sslmode"):
        App("postgresql+asyncpg://host/shop?ssl=require")


def test_what_is_no_blueprint_and_no_dsn(app: App) -> None:
    given: Any = 5
    with pytest.raises(TypeError, match="blueprint must be a Blueprint, not 5"):
        app.include(given)
    with pytest.raises(TypeError, match=r"namespace must be text, such as 'mail.', not 5"):
        app.include(Blueprint(), given)
    with pytest.raises(TypeError, match="dsn must be text, not of type int"):
        App(given)
    given = "5"
    with pytest.raises(TypeError, match="timeout must be a number of seconds or a timedelta"):
        app.result(1, given)


def test_a_rate_may_be_per_timedelta(app: App) -> None:
    rate = {"jobs": 5, "per": dt.timedelta(minutes=1)}
    task = app.task(name="t", concurrency=[{"key": "k", "rate": rate}])(lambda: None)
    assert task.defaults.options["concurrency"][0]["rate"]["per"] == "0:01:00.000000"
    assert rate["per"] == dt.timedelta(minutes=1)


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_settings_are_finite(app: App, weight: float) -> None:
    with pytest.raises(ValueError, match=r"must be finite: \{'weight': (nan|inf)\}"):
        app.configure_share("tenant", {"weight": weight})


def test_hooks_may_be_builtins(app: App) -> None:
    seen: collections.deque[Any] = collections.deque()
    app.on("retry")(seen.append)
    app.hooks["retry"][0]("event")
    assert seen == collections.deque(["event"])


def test_generators_are_no_tasks(app: App) -> None:
    def rows() -> Iterator[int]:
        yield 1

    async def async_rows() -> AsyncIterator[int]:
        yield 1

    for function in (rows, async_rows, functools.partial(rows)):
        with pytest.raises(TypeError, match="the task 'export' is a generator, whose code nobody"):
            app.task(name="export")(function)
    assert app.tasks == {}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"needs": ["1"]}, "a job, or its id as an int, is needed, not '1'"),
        ({"needs": [True]}, "is needed, not True"),
        ({"needs": 1}, r"needs must be a list, not 1: give \[1\]"),
        ({"parent": "1"}, "a job, or its id as an int, is needed, not '1'"),
        ({"priority": "high"}, "priority must be an int, not 'high'"),
        ({"priority": 1.5}, r"priority must be an int, not 1\.5"),
        ({"concurrency_limit": 1.0}, r"concurrency_limit must be an int, not 1\.0"),
        ({"priority": dt.timedelta(1)}, "priority must be an int, not datetime.timedelta"),
        ({"priority": Retry(3)}, r"priority must be an int, not Retry\("),
        ({"max_progress": dt.timedelta(1)}, "max_progress must be an int, not datetime.timedelta"),
        ({"needs": dt.timedelta(1)}, "needs must be a list, not datetime.timedelta"),
        ({"parent": dt.timedelta(1)}, "a job, or its id as an int, is needed, not datetime.time"),
        ({"headers": dt.timedelta(1)}, "headers must be a mapping, not datetime.timedelta"),
        ({"retry": dt.timedelta(1)}, r"retry must be a number of attempts or a Retry\(...\), not"),
        ({"concurrency": dt.timedelta(1)}, "concurrency must be a list of mappings, not datetime."),
    ],
)
def test_options_of_a_job(app: App, options: Any, message: str) -> None:
    task = app.task(name="t")(lambda: None)
    with pytest.raises(TypeError, match=message):
        task.configure(**options)
    with pytest.raises(TypeError, match=message):
        app.defer("t", **options)


@pytest.mark.parametrize(
    ("retain", "kind", "message"),
    [
        ({"ok": dt.timedelta(0)}, ValueError, "the task 't': retain has the outcome 'ok': give"),
        ({"failed": 7}, TypeError, r"the task 't': retain\['failed'\] must be a timedelta, not 7"),
    ],
)
def test_retention_by_outcome(app: App, retain: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        app.task(name="t", retain=retain)(lambda: None)


def test_what_is_no_job(app: App) -> None:
    assert app.job(7) == Job(7, app.client)
    assert app.job(SimpleNamespace(id="7")) == Job(7, app.client)  # as Django's TaskResult
    for wrong in ("7", True, 7.0, None, SimpleNamespace(id="-7"), SimpleNamespace(id="x7")):
        with pytest.raises(TypeError, match="a job, or its id as an int, is needed, not"):
            app.job(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="-1 is no job's id"):
        app.job(-1)


async def test_arguments_of_a_job(app: App) -> None:
    job = app.job(7)
    naive: Any = dt.datetime(2030, 1, 1)  # noqa: DTZ001
    for wrong, kind, message in (
        ("high", TypeError, "priority must be an int, not 'high'"),
        (True, TypeError, "priority must be an int, not True"),
        (2**31, ValueError, "priority must be from -2147483648 to 2147483647"),
    ):
        number: Any = wrong
        with pytest.raises(kind, match=message):
            job.set_priority(number)
        with pytest.raises(kind, match=message):
            await job.set_priority_async(number)
    with pytest.raises(ValueError, match="at has no time zone"):
        job.reschedule(naive)
    with pytest.raises(ValueError, match="at has no time zone"):
        await job.reschedule_async(naive)
    with pytest.raises(ValueError, match="at has no time zone"):
        job.set_deadline(naive)


def test_what_is_no_call(app: App) -> None:
    @app.task(name="t")
    def task(a: int) -> None: ...

    job: Any = Job(7, app.client)
    wrong: Any = task.prepare(1234)
    for take in (app.chain, app.group, app.defer_many):
        message = r"a call must come from task\.prepare\(\.\.\.\), not Job\(id=7\)"
        with pytest.raises(TypeError, match=message):
            take([task.prepare(1), job])
        with pytest.raises(TypeError, match="calls must be a list, not PreparedJob") as raised:
            take(wrong)
        assert "1234" not in str(raised.value)
    with pytest.raises(TypeError, match=", not Job"):
        app.group([task.prepare(1)]).then(job)
    calls: Any = [1]
    with pytest.raises(TypeError, match="or be a dict of keyword arguments, not 1"):
        task.defer_many(calls)
    needs: Any = 1
    with pytest.raises(TypeError, match="needs must be a list, not 1"):
        RetryLater(needs=needs)


def test_options_among_the_arguments(app: App) -> None:
    @app.task
    def task(a: int, queue: str = "") -> None: ...

    defer: Any = task.defer
    message = r"argument 'delay'; .* to configure: task\.configure\(delay=\.\.\.\)\.defer"
    with pytest.raises(TypeError, match=message):
        defer(1, delay=5)
    with pytest.raises(TypeError, match=r"missing a required argument: 'a'$"):
        defer(queue="its own")


@pytest.mark.parametrize("given", [ValueError("x"), [ValueError], (ValueError, "x"), "ValueError"])
@pytest.mark.parametrize("name", ["give_up_on", "retry_on"])
def test_errors_are_classes(app: App, name: str, given: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a class of errors, or a tuple of classes"):
        app.task(**{name: given})(lambda: None)


@pytest.mark.parametrize("kind", [int, str, list, dict, bool, type(None)])
def test_what_is_json_is_not_encoded_otherwise(app: App, kind: type[Any]) -> None:
    with pytest.raises(ValueError, match="which are stored as they are"):
        app.codec.register(kind, "mine", str, str)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["trace"], "what App(headers=...) returns must be a mapping, not ['trace']"),
        ({1: "trace"}, "the names in what App(headers=...) returns must be text, not 1"),
    ],
)
def test_headers_are_a_mapping_of_names(given: Any, said: str) -> None:
    app = App(NOWHERE, headers=lambda _: given)
    with pytest.raises(TypeError, match=re.escape(said)):
        app.defer("t")


def test_imports_are_a_list() -> None:
    with pytest.raises(TypeError, match=r"imports must be a list, not 'tasks': give \['tasks'\]"):
        App(NOWHERE, imports="tasks")
