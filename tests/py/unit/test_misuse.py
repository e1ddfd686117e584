"""A caller's mistakes are refused at once, with clear messages."""

from __future__ import annotations

import collections
import datetime as dt
import functools
import math
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from pgdefer import App, Blueprint, Job, RetryLater, Worker

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
        (None, {"max_jobs": 2.5}, TypeError, "max_jobs must be a number, not 2.5"),
        (None, {"max_jobs": "5"}, TypeError, "max_jobs must be a number, not '5'"),
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
    ],
)
def test_options_of_a_worker(
    app: App, queues: Any, options: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Worker(app, queues, **options)
    with pytest.raises(kind, match=message):
        app.run_worker(queues, **options)


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
    for made in (functools.partial(handler_of_batches, 1), math.pi):
        given = made
        with pytest.raises(TypeError, match=r"a task must be a function, not .*: write a `def`"):
            app.task(name="x")(given)
    assert app.tasks == {}


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
        (2**31, ValueError, "priority must fit into 32 bits"),
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


def test_headers_are_a_mapping() -> None:
    app = App(NOWHERE, headers=lambda task: ["trace"])  # type: ignore[return-value, arg-type]
    with pytest.raises(TypeError, match=r"App\(headers=\.\.\.\) must return a mapping, not"):
        app.defer("t")


def test_imports_are_a_list() -> None:
    with pytest.raises(TypeError, match=r"imports must be a list, not 'tasks': give \['tasks'\]"):
        App(NOWHERE, imports="tasks")
