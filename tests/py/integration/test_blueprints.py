"""Blueprints: included by an App under a prefix, with defaults and aliases."""

from __future__ import annotations

import pytest

from pgdefer import App, Blueprint

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
