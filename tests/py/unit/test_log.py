"""Foreign text can't forge lines of the log, nor control a terminal that shows it."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from pgdefer import App
from pgdefer._text import escaped, logger
from pgdefer.logs import JsonFormatter
from pgdefer.tasks.context import JobContext
from pgdefer.worker.announcer import Announcer
from pgdefer.worker.claim import Claim
from pgdefer.worker.ending import failed

EVIL = "x\n2026-11-21 17:00:00,000 CRITICAL root: forged\r\x1b]0;owned\x07\x9b31m\u202e\u2028"
CONTROLS = "\r\x1b\x07\x9b\u202e\u2028"


def job(task: str) -> JobContext:
    row: Any = (5, 4, task, "{}", "q", 0, None, 1, None, None, None, None, None, None)
    return JobContext(App("dbname=nowhere").client, row)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    text = "\n".join(map(logging.Formatter("LOG %(message)s").format, caplog.records))
    assert not set(CONTROLS) & set(text)
    return text.split("\n")


def test_a_job_is_shown_on_one_line() -> None:
    shown = repr(job(EVIL))
    assert shown == escaped(shown)
    assert r"x\n2026-11-21" in shown


def test_an_error_is_one_line_and_its_traceback_holds_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    try:
        try:
            raise KeyError(EVIL)
        except KeyError as first:
            raise ValueError(EVIL) from ExceptionGroup(EVIL, [first, OSError(EVIL)])
    except ValueError as error:
        claim = Claim(job(EVIL), None, 0.0)
        outcome = failed(claim.job, None, error)
    Announcer({}).taken(claim, outcome, "failed")
    said = lines(caplog)
    assert said[0] == rf"LOG {job(EVIL)!r} failed: ValueError: x"
    assert not [line for line in said[1:] if line.startswith(("2026", "LOG"))]
    assert rf"ValueError: {escaped(EVIL)}" in said
    assert "Traceback (most recent call last):" in "\n".join(said)
    (record,) = caplog.records
    assert record.exc_info is not None  # for handlers that inspect errors
    assert record.levelname == "ERROR"
    assert (record.id, record.task, record.outcome) == (5, EVIL, "failed")
    (line,) = JsonFormatter().format(record).splitlines()
    assert json.loads(line)["task"] == EVIL
    assert not set(CONTROLS) & set(line)
    assert r"x\n2026" in outcome  # the stored text is unchanged


def test_whatever_a_message_is_given_is_escaped(caplog: pytest.LogCaptureFixture) -> None:
    log = logger("pgdefer.worker")
    log.warning("%s and %s, %d", EVIL, OSError(EVIL), 1)
    log.warning("%(what)s", {"what": EVIL})
    assert lines(caplog) == [f"LOG {escaped(EVIL)} and {escaped(EVIL)}, 1", f"LOG {escaped(EVIL)}"]


def test_an_error_whose_text_can_not_be_made(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    try:
        raise BrokenError
    except BrokenError as error:
        logger("pgdefer.worker").error("%s", error, exc_info=error)
    assert "BrokenError" in lines(caplog)[0]


def test_an_error_with_a_long_text_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    error = ValueError("x" * 1_000_000)
    error.add_note("y" * 1_000_000)
    logger("pgdefer.worker").error("%s", error, exc_info=error)
    said = lines(caplog)
    assert said[0] == f"LOG {'x' * 15_996} ..."
    assert said[1].startswith("ValueError: xxx")
    assert said[2] == f"{'y' * 15_996} ..."
    assert [len(line) for line in said[1:]] == [16_000, 16_000]


@pytest.mark.parametrize(
    ("message", "arguments", "shown"),
    [("%d of", ("x",), "%d of ('x',)"), ("no place", (1,), "no place (1,)"), (5, (), "5")],
)
def test_a_message_that_does_not_fit_its_arguments(
    message: Any, arguments: Any, shown: str
) -> None:
    record = logging.LogRecord("a", logging.ERROR, "a.py", 1, message, arguments, None)
    assert json.loads(JsonFormatter().format(record))["message"] == shown


def test_whatever_a_field_holds_is_json() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError

    circle: list[Any] = []
    circle.append(circle)
    fields = {
        "nan": float("nan"),
        "keys": {(1, 2): 3},
        "circle": circle,
        "broken": Broken(),
        "fits": {"a": [1, None]},
        "level": "forged",
        "time": 1,
        "stack_info": "Stack:\n  here",
    }
    record = logging.makeLogRecord({"msg": "said", "levelname": "INFO"} | fields)

    def refuse(name: str) -> None:
        raise AssertionError(name)

    line = json.loads(JsonFormatter().format(record), parse_constant=refuse)
    assert str(line.pop("time")).endswith("Z")
    assert line == {
        "level": "INFO",
        "logger": None,
        "message": "said",
        "nan": "nan",
        "keys": "{(1, 2): 3}",
        "circle": "[[...]]",
        "broken": Broken.__qualname__,
        "fits": {"a": [1, None]},
        "stack": "Stack:\n  here",
    }


REPEATS = """
import copy, logging
from pgdefer.cli._log import set_up_log

class NoRepeats:
    last = None

    def filter(self, record):
        last, self.last = self.last, record.getMessage()
        return copy.copy(record) if last != self.last else False

console = logging.StreamHandler()
console.setFormatter(logging.Formatter("own %(message)s"))
console.addFilter(NoRepeats())
logger = logging.getLogger("shop")
logger.addHandler(console)
set_up_log(None, None, verbose=False)
for message in ("one", "two", "two"):
    logger.warning(message)
late = logging.getLogger("late")
late.addHandler(logging.StreamHandler())
for message in ("three", "four", "five"):
    late.warning(message)
"""


def test_what_another_handler_writes_is_written_once() -> None:
    """Its filters are called once for each record: they may remember what they have seen."""
    done = subprocess.run(
        [sys.executable, "-c", REPEATS], capture_output=True, check=True, text=True
    )
    *own, last, three, repeat, four, five = done.stderr.splitlines()
    assert own == ["own one", "own two"]
    assert last.endswith(" WARNING shop: two"), "no other handler writes it"
    assert [three, four, five] == ["three", "four", "five"], "of a handler that came later"
    assert repeat.endswith(" WARNING late: three"), "as it was not known"
