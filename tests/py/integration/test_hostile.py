"""Workers survive what an application's code raises where nobody expects it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from pgdefer import App

from .conftest import Jobs, running

pytestmark = pytest.mark.client


class Raising(logging.Handler):
    """Raises in place of handling a record, as a handler or as a filter."""

    def __init__(self, kind: type[BaseException]) -> None:
        super().__init__()
        self._kind = kind

    def handle(self, record: logging.LogRecord) -> bool:
        raise self._kind("the log is broken")

    filter = handle


@pytest.fixture(params=[OSError, SystemExit])
def raising(request: pytest.FixtureRequest) -> Iterator[Raising]:
    raising = Raising(request.param)
    yield raising
    for name in ("pgdefer", "pgdefer.worker", "pgdefer.job"):
        logging.getLogger(name).removeHandler(raising)
        logging.getLogger(name).removeFilter(raising)


@pytest.mark.parametrize("where", ["handler", "filter"])
async def test_a_log_that_raises_ends_no_worker(
    app: App, jobs: Jobs, raising: Raising, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def function(fails: bool) -> object:
        if fails:
            raise ValueError("no")
        return object()  # a warning tells that it can't be stored

    async def coroutine(fails: bool) -> object:
        return function(fails)

    def batch(given: list[Any]) -> list[object]:
        return [function(job.args["fails"]) for job in given]

    app.task(name="function")(function)
    app.task(name="coroutine")(coroutine)
    app.task(name="batch", batch=1)(batch)
    logging.getLogger("pgdefer").setLevel(logging.DEBUG)
    if where == "handler":
        logging.getLogger("pgdefer").addHandler(raising)
    else:
        for name in ("pgdefer.worker", "pgdefer.job"):
            logging.getLogger(name).addFilter(raising)
    async with running(app):
        for fails in (True, False):
            for name in ("function", "coroutine", "batch"):
                app.defer(name, {"fails": fails})
            await jobs.end(seconds=20)
    assert list(jobs.states().values()) == ["failed"] * 3 + ["succeeded"] * 3
    assert "the log is broken" in capsys.readouterr().err
