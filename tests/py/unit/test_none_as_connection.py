"""A connection that is None is an error: the call would have a transaction of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from pgdefer import App

app = App("host=/nowhere")
call = app.prepare("task")
nothing: Any = None


@pytest.mark.parametrize(
    "defer",
    [
        lambda: app.defer("task", connection=nothing),
        lambda: app.defer_many([call], connection=nothing),
        lambda: app.chain([call], connection=nothing),
        lambda: app.group([call], connection=nothing),
        lambda: app.publish("event", connection=nothing),
        lambda: app.pause("queue", connection=nothing),
        lambda: app.resume("queue", connection=nothing),
        lambda: app.open_group("group", connection=nothing),
        lambda: app.list_queues(connection=nothing),
        lambda: app.job(1).cancel(connection=nothing),
        lambda: asyncio.run(app.defer_async("task", connection=nothing)),
        lambda: asyncio.run(app.defer_many_async([call], connection=nothing)),
        lambda: asyncio.run(app.job(1).state_async(connection=nothing)),
    ],
)
def test_none_is_no_connection(defer: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match="connection is None"):
        defer()
