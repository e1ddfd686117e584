"""What a caller gets wrong is refused where it is said, and clearly."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from pgdefer import App, Worker

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
    ],
)
def test_options_of_a_worker(
    app: App, queues: Any, options: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        Worker(app, queues, **options)
    with pytest.raises(kind, match=message):
        app.run_worker(queues, **options)


def test_generators_are_no_tasks(app: App) -> None:
    def rows() -> Iterator[int]:
        yield 1

    async def async_rows() -> AsyncIterator[int]:
        yield 1

    for function in (rows, async_rows, functools.partial(rows)):
        with pytest.raises(TypeError, match="the task 'export' is a generator, whose code nobody"):
            app.task(name="export")(function)
    assert app.tasks == {}


def test_imports_are_a_list() -> None:
    with pytest.raises(TypeError, match=r"imports must be a list, not 'tasks': give \['tasks'\]"):
        App(NOWHERE, imports="tasks")
