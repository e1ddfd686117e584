"""Blueprints: included by an App under a prefix, with defaults and aliases."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

import pytest

from pgdefer import App, Blueprint, JobContext

from .conftest import Jobs, running

pytestmark = pytest.mark.client


async def test_blueprints(dsn: str, jobs: Jobs) -> None:
    part = Blueprint(defaults={"queue": "mail"})

    @part.recurring("@daily", args={"to": "all"})
    @part.task(name="send", aliases=["old.send"], retry=2)
    async def send(to: str) -> str:
        return to

    with pytest.raises(
        RuntimeError, match=r"no App has included the blueprint of .*test_blueprints"
    ):
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


def test_a_refused_blueprint_adds_nothing() -> None:
    app = App("host=nowhere")

    @app.recurring("@daily", name="nightly")
    @app.task(name="taken")
    def taken() -> None: ...

    @contextlib.asynccontextmanager
    async def only_async(_: JobContext) -> AsyncIterator[None]:
        yield

    part = Blueprint()

    @part.task(name="first")
    def first() -> None: ...

    @part.recurring("@hourly", name="nightly")
    @part.task(name="taken")
    def second() -> None: ...

    with pytest.raises(ValueError, match="two tasks named 'taken'"):
        app.include(part)
    app.include(Blueprint())
    other = App("host=nowhere")

    @other.recurring("@daily", name="part.nightly")
    @other.task(name="taken")
    def also_taken() -> None: ...

    with pytest.raises(ValueError, match=r"two schedules named 'part\.nightly'"):
        other.include(part, "part.")
    with pytest.raises(TypeError, match=r"the task 'part\.first' is not a coroutine"):
        App("host=nowhere", middleware=[only_async]).include(part, "part.")
    assert (set(app.tasks), set(other.tasks)) == ({"taken"}, {"taken"})
    app.include(part, "part.")
    assert set(app.tasks) == {"taken", "part.first", "part.taken"}
    assert set(app.schedules) == {"nightly", "part.nightly"}
