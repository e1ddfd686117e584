"""Tasks: names, arguments by name, options in SQL's form."""

from __future__ import annotations

import copy
import datetime as dt
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest

from pgdefer import App, DecodeError, Retry, UnknownTask
from pgdefer.database.source import DSN, LOCATING
from pgdefer.options import JobOptions, interval_text
from pgdefer.tasks.parameters import Parameters


def plain(a: int, b: int = 2) -> None: ...
def only_keywords(*, a: int, b: int = 2) -> None: ...
def only_positions(a: int, b: int = 2, /, c: int = 3) -> None: ...
def any_positions(a: int, *rest: int, k: int = 0) -> None: ...
def any_keywords(a: int, **more: int) -> None: ...
def both(a: int, /, *rest: int, **more: int) -> None: ...


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "bound"),
    [
        (plain, (1,), {}, {"a": 1}),
        (plain, (1,), {"b": 5}, {"a": 1, "b": 5}),
        (only_keywords, (), {"a": 1}, {"a": 1}),
        (only_positions, (1,), {"c": 9}, {"a": 1, "c": 9}),
        (only_positions, (1, 5, 6), {}, {"a": 1, "b": 5, "c": 6}),
        (any_positions, (1, 2, 3), {"k": 4}, {"a": 1, "rest": [2, 3], "k": 4}),
        (any_positions, (1,), {}, {"a": 1}),
        (any_keywords, (1,), {"x": 2}, {"a": 1, "x": 2}),
        (both, (1, 2), {"x": 3}, {"a": 1, "rest": [2], "x": 3}),
    ],
)
def test_arguments_are_stored_by_name_and_come_back(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], bound: dict[str, Any]
) -> None:
    parameters = Parameters.of(function)
    assert dict(parameters.bind(args, kwargs)) == bound
    given, named = parameters.unbind(dict(bound))
    again = parameters.signature.bind(*given, **named)
    expected = parameters.signature.bind(*args, **kwargs)
    again.apply_defaults()
    expected.apply_defaults()
    assert again.arguments == expected.arguments


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (plain, {}, "needs the argument a"),
        (plain, {"a": 1, "z": 2}, "takes no argument z"),
        (only_positions, {"b": 1}, "needs the argument a"),
        (any_positions, {"a": 1, "rest": 5}, "rest must be a list"),
    ],
)
def test_arguments_that_do_not_fit(function: Any, args: dict[str, Any], message: str) -> None:
    with pytest.raises(DecodeError, match=message):
        Parameters.of(function).unbind(args)


def test_a_positional_gap_is_filled_with_its_default() -> None:
    given, named = Parameters.of(only_positions).unbind({"a": 1, "c": 7})
    assert (given, named) == ([1], {"c": 7})

    def gap(a: int, b: int = 5, *rest: int) -> None: ...

    given, named = Parameters.of(gap).unbind({"a": 1, "rest": [8]})
    assert (given, named) == ([1, 5, 8], {})


def test_deferring_with_wrong_arguments_is_a_type_error() -> None:
    app = App("postgresql://nowhere.invalid/x")

    @app.task
    def send(account: int, subject: str = "") -> None: ...

    with pytest.raises(TypeError, match="missing a required argument: 'account'"):
        send.defer()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'acount'"):
        send.defer(1, acount=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'acount'"):
        send.defer(acount=1)  # type: ignore[call-arg]


def test_names() -> None:
    app = App("postgresql://nowhere.invalid/x")

    @app.task
    def first() -> int:
        """Do it."""
        return 1

    @app.task(name="mail.send")
    async def second() -> int:
        return 2

    assert first.name == f"{__name__}.test_names.<locals>.first"
    assert first() == 1
    assert first.__doc__ == "Do it."
    assert second.name == "mail.send"
    assert (first.is_async, second.is_async) == (False, True)
    with pytest.raises(ValueError, match=r"two tasks named 'mail\.send'"):
        app.task(name="mail.send")(plain)


def test_a_decorator_without_wraps_gives_its_functions_one_name() -> None:
    app = App()

    def logged(function: Callable[[], int]) -> Callable[[], int]:
        def call() -> int:
            return function()

        return call

    def one() -> int:
        return 1

    def two() -> int:
        return 2

    app.task(logged(one))
    again = app.task(logged(one))  # as when a module is loaded again
    assert app.tasks == {again.name: again}
    with pytest.raises(ValueError, match=r"two tasks named .*: a decorator .* functools\.wraps"):
        app.task(logged(two))
    assert app.task(name="two")(logged(two))() == 2


def test_a_task_that_replaces_another_one_of_its_name_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App()

    def make(tenant: str) -> None:
        @app.task(name=f"import.{tenant}")
        def named() -> str:
            return tenant

        @app.task
        def unnamed() -> str:
            return tenant

    make("a")
    make("a")  # as when its module is loaded again
    assert not caplog.records
    make("b")
    (record,) = caplog.records
    assert "unnamed' is defined again with other values" in record.message
    assert app.tasks["import.a"]() == "a"


@App().task
def doubled(n: int) -> int:
    return 2 * n


def test_a_task_is_pickled_by_its_name() -> None:
    """So it may be called in a multiprocessing.Pool, as any function."""
    assert pickle.loads(pickle.dumps(doubled)) is doubled
    assert copy.deepcopy([doubled]) == [doubled]


def test_options_of_a_task_and_of_a_job() -> None:
    settings = JobOptions.of(
        {
            "queue": "mail",
            "lock": "account:{id}",
            "deadline": dt.timedelta(hours=1),
            "timeout": dt.timedelta(seconds=1.5),
            "retry": Retry(5, backoff="exponential", base=dt.timedelta(seconds=10)),
            "retain": {"succeeded": dt.timedelta(0), "failed": dt.timedelta(days=90)},
            "max_progress": None,
            "held": None,
        }
    )
    assert settings.defaults() == {
        "queue": "mail",
        "lock": "account:{id}",
        "deadline": "1:00:00.000000",
        "timeout": "0:00:01.500000",
        "retry": {"max_attempts": 5, "backoff": "exponential", "base": "0:00:10.000000"},
        "retain": {"succeeded": "0:00:00.000000", "failed": "2160:00:00.000000"},
        "max_progress": None,
    }
    assert JobOptions.of({"retry": 3}).options == {"retry": {"max_attempts": 3}}
    assert JobOptions.of({"retry": Retry(None)}).options == {"retry": {"max_attempts": None}}
    at = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    assert JobOptions.of({"scheduled_at": at}).arguments == {"scheduled_at": at.isoformat()}
    with pytest.raises(ValueError, match="scheduled_at has no time zone"):
        JobOptions.of({"scheduled_at": dt.datetime(2030, 1, 1)})  # noqa: DTZ001


def test_intervals() -> None:
    assert interval_text(dt.timedelta(0)) == "0:00:00.000000"
    assert interval_text(dt.timedelta(days=1, microseconds=1)) == "24:00:00.000001"
    assert interval_text(dt.timedelta(seconds=-90)) == "-0:01:30.000000"


def test_prepared_calls_are_objects_of_defer_many() -> None:
    app = App("postgresql://nowhere.invalid/x")

    @app.task(name="t")
    def task(a: int) -> None: ...

    call = task.configure(queue="q", delay=dt.timedelta(seconds=1)).prepare(a=1)
    assert json.loads(call.to_json()) == {
        "task": "t",
        "args": {"a": 1},
        "queue": "q",
        "options": {"delay": "0:00:01.000000"},
    }


def test_where_the_database_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (DSN, *LOCATING):
        monkeypatch.delenv(name, raising=False)
    assert App().source.kind == "embedded"
    assert App("postgresql://h/d").source.kind == "dsn"
    with pytest.raises(ValueError, match="not both"):
        App("postgresql://h/d", embedded=True)
    monkeypatch.setenv("PGDATABASE", "d")
    assert App().source.kind == "environment"
    monkeypatch.setenv(DSN, "postgresql://h/of_the_variable")
    assert "of_the_variable" in App().source.conninfo()
    assert "of_the_variable" not in App("postgresql://h/d").source.conninfo()
    assert App(embedded=True).source.kind == "embedded"


def test_a_dsn_keeps_what_it_says() -> None:
    conninfo = App("postgresql+psycopg://h/d?connect_timeout=3&application_name=mine").source
    text = conninfo.conninfo()
    assert "connect_timeout=3" in text
    assert "application_name=mine" in text
    assert "tcp_user_timeout=20000" in text


def test_a_policy_without_attempts() -> None:
    for number in (0, -1):
        with pytest.raises(ValueError, match=f"max_attempts must be at least 1, not {number}"):
            Retry(number)


def test_max_crashes_of_none_is_never() -> None:
    assert Retry(1).as_options() == {"max_attempts": 1}
    assert Retry(1, max_crashes=None).as_options() == {"max_attempts": 1, "max_crashes": None}
    assert Retry(1, max_crashes=5).as_options() == {"max_attempts": 1, "max_crashes": 5}
    assert Retry(1) == Retry(1)
    assert "max_crashes=not set" in repr(Retry(1))


def test_an_app_in_the_main_program_says_why_it_lacks_tasks() -> None:
    made = "import pgdefer\napp = pgdefer.App('dbname=nowhere')"
    for name, says_so in (("__main__", True), ("shop", False)):
        module: dict[str, Any] = {"__name__": name}
        exec(made, module)
        with pytest.raises(UnknownTask) as caught:
            module["app"].get("mail")
        assert ("Give the App a module of its own" in str(caught.value)) is says_so
