"""Wrong usages: each is reported at import or at `defer`, with the task and what to write."""

from __future__ import annotations

import copy
import datetime as dt
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import async_sessionmaker
from sqlalchemy.orm import sessionmaker

from pgdefer import App, Decision, Retry, RetryLater
from pgdefer.database.source import DSN, LOCATING
from pgdefer.tasks.claim_calls import extend

pytestmark = pytest.mark.client

HOUR = dt.timedelta(hours=1)
NAIVE = dt.datetime(2030, 1, 1)  # noqa: DTZ001
AWARE = NAIVE.replace(tzinfo=dt.UTC)


def greet(name: str, polite: bool = False) -> str:
    return name


async def greet_async(name: str) -> str:
    return name


def greet_rows(name: str) -> Any:
    yield name


class Greeter:
    def greet(self, name: str) -> str:
        return name


def task(app: App, function: Callable[..., Any] = greet, **options: Any) -> Any:
    return app.task(name="greet", **options)(function)


def recur(cron: str, args: Any = None, **options: Any) -> Callable[[App], object]:
    args = {"name": "Ann"} if args is None else args
    return lambda app: app.recurring(cron, args=args, **options)(task(app))


def at_import(**options: Any) -> Callable[[App], object]:
    return functools.partial(task, **options)


AT_IMPORT: dict[str, tuple[Callable[[App], object], str]] = {
    "a typo": (at_import(qeue="mail"), "did you mean queue?"),
    "a typo in name": (at_import(nme="mail"), "did you mean name?"),
    "an option of jobs": (at_import(needs=[1]), "takes no option needs"),
    "a number as queue": (at_import(queue=5), "queue must be text"),
    "a text as priority": (at_import(priority="high"), "priority must be an int"),
    "a large priority": (
        at_import(priority=2**40),
        "priority must be from -2147483648 to 2147483647",
    ),
    "retry for ever": (at_import(retry=True), "Retry(None) is for ever"),
    "retry once": (at_import(retry=1), "write retry=2 for one retry"),
    "retry never": (at_import(retry=0), "Retry(1) for none"),
    "retry as text": (at_import(retry="5"), "a number of attempts or a Retry(...)"),
    "retry very often": (at_import(retry=2**31), "retry must be from 1 to 999999999"),
    "retry's numbers": (
        at_import(retry={"max_attempts": 3, "factor": math.nan}),
        "factor must be at most",
    ),
    "retry's delays": (at_import(retry={"max_attempts": 3, "base": -HOUR}), "base must be from 0"),
    "retry's seconds": (
        at_import(retry={"max_attempts": 3, "base": -1.0}),
        "base must be at least",
    ),
    "a negative timeout": (at_import(timeout=-HOUR), "timeout must be from 0 to 4,000 years"),
    "no time": (at_import(timeout=0 * HOUR), "timeout must be longer than 0"),
    "a long retain": (at_import(retain=dt.timedelta.max), "retain must be from 0 to 4,000 years"),
    "a retain": (at_import(retain={"failed": -HOUR}), "retain must be from 0 to 4,000 years"),
    "no limit": (at_import(concurrency_key="a", concurrency_limit=0), "concurrency_limit must be"),
    "a key's limit": (
        at_import(concurrency=[{"key": "a", "limit": math.nan}]),
        "concurrency: limit must be an int",
    ),
    "a key's weight": (
        at_import(concurrency=[{"key": "a", "limit": 3, "weight": True}]),
        "concurrency: weight must be an int",
    ),
    "a key's rate": (
        at_import(concurrency=[{"key": "a", "rate": {"limit": 10**9, "per": HOUR}}]),
        "concurrency: the rate's limit must be from 1 to 999999999",
    ),
    "NaN in headers": (at_import(headers={"a": math.nan}), "the options can't be stored"),
    "retry's keys": (
        at_import(retry={"attempts": 3}),
        "retry has no attempts: it has max_attempts",
    ),
    "seconds as timeout": (at_import(timeout=5), "timeout must be a timedelta"),
    "seconds as delay": (at_import(delay=5), "delay must be a timedelta"),
    "Celery's name": (at_import(max_retries=3), "did you mean retry?"),
    "Celery's request": (at_import(bind=True), "use pgdefer.current_job() in the handler"),
    "Celery's rate": (at_import(rate_limit="10/m"), "did you mean concurrency?"),
    "days as retain": (at_import(retain=7), "retain must be a timedelta"),
    "no outcome": (at_import(retain={"ok": HOUR}), "give succeeded, failed, cancelled"),
    "a time as deadline": (at_import(deadline=AWARE), "deadline must be a timedelta"),
    "a lock's mode": (at_import(lock_mode="fifo"), "one of 'ordered', 'mutex'"),
    "a lock's field": (
        at_import(lock="c:{id}"),
        "names {id}, which is no argument: it takes name,",
    ),
    "a conflict": (at_import(on_conflict="skip"), "one of 'raise', 'ignore', 'replace'"),
    "a text as bool": (at_import(held="yes"), "held must be True or False"),
    "headers": (at_import(headers=["a"]), "headers must be a mapping"),
    "sensitive": (at_import(sensitive="card"), "give ['card']"),
    "run_in": (at_import(run_in="proces"), "one of 'thread', 'process'"),
    "max_memory": (at_import(max_memory=10**8), "max_memory needs run_in='process'"),
    "a coroutine in a process": (
        at_import(function=greet_async, run_in="process"),
        "run_in='process' is not for coroutine functions",
    ),
    "retry_on": (at_import(retry_on="ValueError"), "must be a class of errors"),
    "decide": (at_import(decide=5), "decide must be a function of the error and the job: 5"),
    "transactional": (at_import(transactional="yes"), "must be True or a sessionmaker"),
    "asynchronous sessions": (
        at_import(transactional=async_sessionmaker()),
        "transactional must be a sessionmaker, as this is no coroutine function",
    ),
    "sessions in a coroutine": (
        at_import(function=greet_async, transactional=sessionmaker()),
        "transactional must be an async_sessionmaker, as this is a coroutine function",
    ),
    "no parameter": (
        at_import(function=lambda: None, transactional=True),
        "its first parameter must be the connection",
    ),
    "batch": (at_import(batch=0), "batch must be from 1 to 1000"),
    "a method": (at_import(function=Greeter.greet), "it is a method, and a worker has no object"),
    "a generator": (at_import(function=greet_rows), "replace `yield` by `return`"),
    "one name twice": (lambda app: [task(app), task(app, greet_async)], "there are two tasks"),
    "four fields": (recur("0 6 * *"), "a cron expression has 5"),
    "hour 25": (recur("0 25 * * *"), "25 in '0 25 * * *' is above 23"),
    "no nickname": (recur("@hourli"), "'@hourli' is none of @hourly, @daily, "),
    "catch_up": (recur("0 6 * * *", catch_up="yes"), "one of 'none', 'latest', 'all'"),
    "a schedule's arguments": (recur("0 6 * * *", args={}), "missing a required argument: 'name'"),
}


def job(*args: Any, **options: Any) -> Callable[[App], object]:
    return lambda app: task(app).configure(**options).defer(*(args or ("Ann",)))


def call(*args: Any, **kwargs: Any) -> Callable[[App], object]:
    return lambda app: task(app).defer(*args, **kwargs)


AT_DEFER: dict[str, tuple[Callable[[App], object], str]] = {
    "nothing": (call(), "missing a required argument: 'name'"),
    "too much": (call(1, 2, 3), "too many positional arguments"),
    "an unknown argument": (call("Ann", polit=True), "unexpected keyword argument 'polit'"),
    "an option": (call("Ann", queue="mail"), "task.configure(queue=...).defer(...)"),
    "an object": (call(object()), "register the type with app.codec.register"),
    "NaN": (call(math.nan), "JSON has no NaN"),
    "a typo": (job(prioriti=1), "did you mean priority?"),
    "Procrastinate's arguments": (job(task_kwargs={"a": 1}), "pass all arguments to defer"),
    "Celery's time": (job(eta=AWARE), "did you mean scheduled_at?"),
    "a fraction": (job(priority=1.5), "priority must be an int"),
    "no time zone": (job(scheduled_at=NAIVE), "scheduled_at has no time zone"),
    "a time as text": (job(scheduled_at="tomorrow"), "a datetime with a time zone"),
    "an interval as time": (job(deadline=HOUR), "a datetime with a time zone"),
    "both times": (job(scheduled_at=AWARE, delay=HOUR), "pass delay or scheduled_at"),
    "a text as need": (job(needs=["1"]), "a job, or its id as an int, is needed"),
    "one need": (job(needs=5), "give [5]"),
    "None as connection": (job(connection=None), "omit it for a transaction of the job's own"),
    "an option of tasks": (job(transactional=True), "takes no option transactional"),
    "headers": (job(headers={"a": math.nan}), "the options can't be stored"),
    "a key without limit": (job(concurrency_key="c"), "Give a limit with the key"),
    "a pattern": (job(queue="mail*"), "a queue needs a plain name"),
    "a long name": (job(queue="x" * 1001), "Names are at most 1,000 bytes"),
    "a negative delay": (job(delay=-HOUR), "from 0 to 4,000 years"),
    "a list of arguments": (
        lambda app: app.defer("greet", ["Ann"]),  # type: ignore[arg-type]
        "args must be a mapping",
    ),
    "no idempotency key": (job(unique_for=HOUR), "Pass an idempotency_key"),
    "a lock's field": (job(lock="c:{id}"), "Pass each {field} in args as a text"),
    "a number as argument's name": (
        lambda app: app.defer("greet", {1: 2}),  # type: ignore[dict-item]
        "the names in args must be text, not 1",
    ),
    "a number as argument's name of a prepared job": (
        lambda app: app.prepare("greet", {(1,): 2}),  # type: ignore[dict-item]
        "the names in args must be text, not (1,)",
    ),
    "a number as header's name": (job(headers={1: "x"}), "the names in headers must be text"),
    "keys of concurrency": (job(concurrency=[{"kee": 1}]), "Known keys: key, limit, rate, weight"),
    "no group": (job(group="none"), "Open it first by queue.open_group"),
}


def test_there_are_enough() -> None:
    assert len(AT_IMPORT) + len(AT_DEFER) >= 40


@pytest.mark.parametrize("what", AT_IMPORT)
def test_at_import(what: str) -> None:
    usage, instead = AT_IMPORT[what]
    app = App("postgresql://nowhere.invalid/x")
    with pytest.raises((TypeError, ValueError)) as raised:
        usage(app)
    assert "'greet'" in str(raised.value)
    assert instead in str(raised.value)


def test_at_defer(dsn: str) -> None:
    for what, (usage, instead) in AT_DEFER.items():
        app = App(dsn)
        with pytest.raises((TypeError, ValueError)) as raised:
            usage(app)
        app.close()
        assert "'greet'" in str(raised.value), what
        assert instead in str(raised.value), what


MANAGING: dict[str, tuple[Callable[[App], object], str]] = {
    "seconds as age": (
        lambda app: app.prune("succeeded", older_than=5),  # type: ignore[arg-type]
        "older_than must be a timedelta, not 5",
    ),
    "an interval until": (
        lambda app: app.pause("mail", until=HOUR),  # type: ignore[arg-type]
        "until must be a datetime",
    ),
    "a number as task": (
        lambda app: app.defer(5),  # type: ignore[arg-type]
        "task must be a name, not 5",
    ),
    "a task of an App": (
        lambda app: app.defer(task(app), {"name": "x"}),
        "a task has a `defer` of its own",
    ),
    "a paused number": (
        lambda app: app.pause(task=5),  # type: ignore[arg-type]
        "task must be a task or its name, not 5",
    ),
    "a text as time": (
        lambda app: app.job(1).reschedule("2030-01-01"),  # type: ignore[arg-type]
        "at must be a datetime, not '2030-01-01'",
    ),
    "an interval as deadline": (
        lambda app: app.job(1).set_deadline(HOUR),  # type: ignore[arg-type]
        "at must be a datetime",
    ),
    "a time without a zone": (lambda app: app.job(1).retry(at=NAIVE), "at has no time zone"),
    "seconds as delay": (
        lambda app: app.job(1).retry(delay=5),  # type: ignore[arg-type]
        "delay must be a timedelta, not 5",
    ),
    "a list of arguments": (
        lambda app: app.job(1).set_args([1]),  # type: ignore[arg-type]
        "args must be a mapping, not [1]",
    ),
    "a number as argument's name": (
        lambda app: app.job(1).set_args({1: 2}),  # type: ignore[dict-item]
        "the names in args must be text, not 1",
    ),
    "a number as argument's name of a schedule": (
        lambda app: app.schedule("nightly", "@daily", "t", args={1: 2}),  # type: ignore[dict-item]
        "the names in args must be text, not 1",
    ),
    "a time zone as time zone": (
        lambda app: app.schedule("nightly", "@daily", "t", timezone=dt.UTC),  # type: ignore[arg-type]
        "timezone must be text, such as 'Europe/Berlin', not datetime.timezone.utc",
    ),
    "a time zone of runs": (
        lambda app: app.next_runs("@daily", timezone=dt.UTC),  # type: ignore[arg-type]
        "timezone must be text, such as 'Europe/Berlin', not datetime.timezone.utc",
    ),
    "a schedule without an expression": (
        lambda app: app.recurring(greet),  # type: ignore[arg-type]
        "a cron expression, or text such as 'every 5 minutes', is needed, not <function greet",
    ),
    "a hook without an event": (
        lambda app: app.on(greet),  # type: ignore[call-overload]
        "events are exhausted, retry, crash, worker_start, worker_stop",
    ),
    "days as retain": (
        lambda app: app.publish("paid", retain=30),  # type: ignore[arg-type]
        "retain must be a timedelta, not 30",
    ),
}


@pytest.mark.parametrize("what", MANAGING)
def test_a_wrong_call_that_manages_is_told_the_right_one(what: str) -> None:
    usage, instead = MANAGING[what]
    with pytest.raises((TypeError, ValueError)) as raised:
        usage(App("postgresql://nowhere.invalid/x"))
    assert instead in str(raised.value)


def test_methods_of_other_libraries() -> None:
    greeting = task(App("postgresql://nowhere.invalid/x"))
    for each in (greeting, greeting.configure(priority=1)):
        with pytest.raises(AttributeError, match=r"'greet' has no attribute 'delay': write defer"):
            each.delay("Ann")
        with pytest.raises(AttributeError, match=r"'greet' has no attribute 'spell'$"):
            each.spell("Ann")
        assert copy.copy(each).name == "greet"


def test_times_that_a_handler_gives() -> None:
    wrong: Any = 5
    with pytest.raises(TypeError, match="at must be a datetime, not 5"):
        RetryLater(at=wrong)
    with pytest.raises(TypeError, match="retry_at must be a datetime, not 5"):
        Decision(retry_at=wrong)
    with pytest.raises(TypeError, match="retry_in must be a timedelta, not 5"):
        Decision(retry_in=wrong)
    with pytest.raises(TypeError, match="lease must be a timedelta, not 5"):
        extend(App("dbname=nowhere").client, 1, 1, wrong)


def test_calls_of_several_tasks(dsn: str) -> None:
    app = App(dsn)
    calls = [app.prepare(name, {}, queue="x*") for name in ("a", "b", "a", "c", "d")]
    with pytest.raises(ValueError, match=r"^jobs of 'a', 'b', 'c', \.\.\.: a queue's name may not"):
        app.defer_many(calls)
    app.close()


WRONG_OPTIONS: list[tuple[str, Any]] = [
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
    ("the task 't': retry=0 is a number of attempts: write retry=2", {"retry": 0}),
    ("priority must be an int", {"priority": "high"}),
    ("concurrency must be a list of mappings, not {'key'", {"concurrency": {"key": "a"}}),
    ("each item of concurrency must be a mapping, not 'a'", {"concurrency": ["a"]}),
    ("retry_on must be a class of errors", {"retry_on": "OSError"}),
    ("max_memory needs run_in='process'", {"max_memory": 5}),
    ("aliases must be a list, not 'old'", {"aliases": "old"}),
    ("middleware must be a list", {"middleware": 5}),
]


@pytest.mark.parametrize(
    ("message", "options"), WRONG_OPTIONS, ids=[text for text, _ in WRONG_OPTIONS]
)
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
        ("Retry: factor must be at most 1.7976931348623157e+308, not inf", {"factor": math.inf}),
        ("Retry: exponential_wait must be at most", {"exponential_wait": math.nan}),
        ("Retry: wait must be a number, not '5'", {"wait": "5"}),
        ("Retry: jitter must be at most 1, not 2", {"jitter": 2}),
        ("Retry: cap must be from 0 to 4,000 years, not -1", {"cap": -HOUR}),
        ("Retry: max_crashes must be at most 999999999", {"max_crashes": 2**31}),
        ("Retry: wait and base exclude each other", {"wait": 1, "base": HOUR}),
    ],
)
def test_wrong_policies(message: str, options: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        Retry(3, **options)
    assert message in str(raised.value)
    wrong: Any = True
    with pytest.raises(TypeError, match="Retry: max_attempts must be a whole number, not True"):
        Retry(wrong)


@pytest.mark.parametrize(
    ("message", "cron", "options"),
    [
        ("the schedule of the task 't': 61 in '61 * * * *' is above 59", "61 * * * *", {}),
        ("the schedule of the task 't': '* * *' has 3 fields", "* * *", {}),
        ("the schedule of the task 't': 25 in '0 25 * * *' is above 23", "0 25 * * *", {}),
        ("the schedule of the task 't': a cron expression, or text ", "", {}),
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


def test_a_missing_variable_starts_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (DSN, *LOCATING):
        monkeypatch.delenv(name, raising=False)
    assert App().source.kind == "embedded"
    app = App(embedded=False)
    assert app.source.kind == "environment"
    assert app.source.is_chosen
