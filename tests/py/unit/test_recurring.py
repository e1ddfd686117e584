"""The schedules of @app.recurring, and the arguments of their handlers."""

from __future__ import annotations

import datetime as dt
import json
from typing import TYPE_CHECKING, Any

import pytest

from pgdefer import App, DecodeError, Retry
from pgdefer.tasks.parameters import Parameters
from pgdefer.tasks.schedule import removed_schedules, schedules_json

if TYPE_CHECKING:
    from datetime import datetime


@pytest.fixture
def app() -> App:
    return App("postgresql://h/d")


def noted(app: App) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(schedules_json(app.schedules.values(), "here"))
    return found


def test_what_is_registered(app: App) -> None:
    @app.recurring(
        "0 9 * * MON-FRI",
        timezone="Europe/Paris",
        name="report",
        args={"to": "all"},
        queue="mail",
        retry=Retry(3),
        deadline=dt.timedelta(hours=1),
        catch_up="all",
        max_delay=dt.timedelta(minutes=5),
        overlap="skip",
        enabled=False,
    )
    @app.task(name="send")
    def send(to: str, scheduled_for: dt.datetime) -> None: ...

    assert noted(app) == [
        {
            "name": "report",
            "cron": "0 9 * * MON-FRI",
            "timezone": "Europe/Paris",
            "task": "send",
            "args": {"to": "all"},
            "options": {
                "queue": "mail",
                "retry": {"max_attempts": 3},
                "deadline": "1:00:00.000000",
                "catch_up": "all",
                "max_delay": "0:05:00.000000",
                "overlap": "skip",
                "enabled": False,
                "source": "here",
            },
        }
    ]


def test_several_on_one_task(app: App) -> None:
    @app.recurring("0 3 * * *")
    @app.recurring("0 2 * * *", name="second")
    @app.recurring("0 1 * * *")
    @app.task(name="t")
    async def task() -> None: ...

    assert [(s["name"], s["cron"]) for s in noted(app)] == [
        ("second", "0 2 * * *"),
        ("t", "0 1 * * *"),
        ("t#2", "0 3 * * *"),
    ]
    assert set(app.tasks) == {"t"}


def test_a_plain_function_becomes_a_task(app: App) -> None:
    @app.recurring("@daily")
    def tidy() -> None: ...

    [name] = app.tasks
    assert name.endswith("test_a_plain_function_becomes_a_task.<locals>.tidy")
    assert noted(app)[0]["name"] == noted(app)[0]["task"] == name


def test_what_is_refused(app: App) -> None:
    @app.task(name="t")
    def task(a: int, scheduled_for: str) -> None: ...

    with pytest.raises(TypeError, match="missing a required argument: 'a'"):
        app.recurring("@daily")(task)
    with pytest.raises(TypeError, match="unexpected keyword argument 'b'"):
        app.recurring("@daily", args={"a": 1, "b": 1})(task)
    with pytest.raises(TypeError, match="scheduled_for is the run's own"):
        app.recurring("@daily", args={"a": 1, "scheduled_for": "x"})(task)
    app.recurring("@daily", name="n", args={"a": 1})(task)
    app.recurring("@daily", name="n", args={"a": 1})(task)
    with pytest.raises(ValueError, match="two schedules named 'n'"):
        app.recurring("@hourly", name="n", args={"a": 1})(task)


def test_an_app_is_named_by_its_module() -> None:
    assert App("postgresql://h/d").name == __name__
    assert App("postgresql://h/d", name="shop").name == "shop"


def test_schedules_that_the_code_no_longer_has_are_removed() -> None:
    assert removed_schedules(["a", "c", "b"], ["b", "x"]) == ["a", "c"]


def ignores() -> None: ...
def as_text(scheduled_for: str) -> None: ...
def as_moment(scheduled_for: dt.datetime) -> None: ...
def as_either(scheduled_for: dt.datetime | None = None) -> None: ...
def as_name_of_type_checkers(scheduled_for: datetime) -> None: ...
def among_others(**more: object) -> None: ...


TEXT = "2026-07-01T09:00:00+02:00"
MOMENT = dt.datetime(2026, 7, 1, 7, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (ignores, {}),
        (as_text, {"scheduled_for": TEXT}),
        (as_moment, {"scheduled_for": MOMENT}),
        (as_either, {"scheduled_for": MOMENT}),
        (as_name_of_type_checkers, {"scheduled_for": MOMENT}),
        (among_others, {}),
    ],
)
def test_scheduled_for(function: Any, given: dict[str, Any]) -> None:
    assert Parameters.of(function).unbind({"scheduled_for": TEXT}) == ([], given)


def test_a_time_that_is_none() -> None:
    with pytest.raises(DecodeError, match="scheduled_for is not a time: 'soon'"):
        Parameters.of(as_moment).unbind({"scheduled_for": "soon"})
    # A datetime in the call arrives as one.
    assert Parameters.of(as_moment).unbind({"scheduled_for": MOMENT})[1] == {
        "scheduled_for": MOMENT
    }
