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


class Left(BaseException):
    """What not even `except Exception` catches."""


class SpeechlessError(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise self.args[0]

    __repr__ = __str__


class HidingType(type):
    """Hides the names of its classes."""

    def __getattribute__(cls, name: str) -> Any:
        if name in ("__qualname__", "__name__", "__module__"):
            raise Left
        return super().__getattribute__(name)


class HiddenError(Exception, metaclass=HidingType):
    """Does not tell what it is."""


class NumberedError(Exception):
    """Has no module."""

    __module__: Any = 5


class ClosedError(Exception):
    """Has nothing that could be asked for."""

    def __getattribute__(self, name: str) -> Any:
        raise Left


class UntracedError(Exception):
    """Does not tell where it was raised."""

    @property
    def __traceback__(self) -> Any:
        raise Left

    @__traceback__.setter
    def __traceback__(self, _: Any) -> None: ...


class Word(str):
    """A text that can't be stored."""

    __slots__ = ()

    def encode(self, *_: Any) -> bytes:
        raise Left

    __format__ = replace = encode  # type: ignore[assignment]


class WordyError(Exception):
    """Has such a text."""

    def __str__(self) -> str:
        return Word("a word")


RAISED = [
    (SpeechlessError(SystemExit(3)), "SpeechlessError: (its text could not be made: SystemExit)"),
    (
        SpeechlessError(KeyboardInterrupt()),
        "SpeechlessError: (its text could not be made: KeyboardInterrupt)",
    ),
    (SpeechlessError(Left()), "SpeechlessError: (its text could not be made: Left)"),
    (SpeechlessError(HiddenError()), "SpeechlessError: (its text could not be made: HiddenError)"),
    (HiddenError("hides"), "HiddenError: hides"),
    (NumberedError("one"), "NumberedError: one"),
    (WordyError(), "WordyError: a word"),
    (ClosedError(), "Left"),
    (UntracedError("hides"), "UntracedError: hides"),
]


@pytest.mark.parametrize("kind", ["function", "coroutine", "batch"])
async def test_an_error_that_does_not_say_what_it_is_fails_its_job(
    app: App, jobs: Jobs, kind: str
) -> None:
    def function(number: int) -> None:
        raise RAISED[number][0]

    async def coroutine(number: int) -> None:
        function(number)

    def batch(given: list[Any]) -> None:
        function(given[0].args["number"])

    if kind == "batch":
        app.task(name="t", batch=1)(batch)
    else:
        app.task(name="t")(function if kind == "function" else coroutine)
    async with running(app):
        for number in range(len(RAISED)):
            app.defer("t", {"number": number})
        rows = await jobs.end(seconds=20)
    assert {row["state"] for row in rows} == {"failed"}
    assert [row["error"] for row in rows] == [said for _, said in RAISED]


async def test_a_result_that_does_not_say_what_it_is_is_lost_alone(app: App, jobs: Jobs) -> None:
    @app.task(name="t")
    def task() -> object:
        return HiddenError()

    app.defer("t")
    async with running(app):
        (row,) = await jobs.end(seconds=20)
    name = f"{__name__}.HiddenError"
    assert (row["state"], row["result"]) == (
        "succeeded",
        {"__pgdefer__": "unencodable", "value": name},
    )
