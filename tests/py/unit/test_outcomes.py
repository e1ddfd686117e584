"""Outcomes are JSON that jsonb accepts, whatever a handler raised or returned."""

from __future__ import annotations

import datetime as dt
import json
import uuid
from typing import Any

import pytest

from pgdefer import Codec, RetryLater
from pgdefer.tasks.error_report import MAX_MESSAGE, MAX_TRACEBACK
from pgdefer.worker.outcomes import (
    MAX_HEADLINE,
    failed,
    headline,
    released,
    retry_later,
    succeeded,
    unencodable,
)


class BrokenError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_success() -> None:
    assert json.loads(succeeded(1, 2)) == {"id": 1, "claim": 2, "outcome": "succeeded"}
    value = uuid.uuid4()
    outcome = json.loads(succeeded(1, 2, Codec().dumps({"a": value})))
    assert Codec().decode(outcome["result"]) == {"a": value}
    outcome = json.loads(succeeded(1, 2, unencodable("builtins.object")))
    assert outcome["result"] == {"__pgdefer__": "unencodable", "value": "builtins.object"}


def test_the_first_line_of_an_error() -> None:
    assert headline(ValueError("one\ntwo")) == "ValueError: one"
    assert headline(ValueError()) == "ValueError"
    assert headline(ValueError("\n")) == "ValueError"
    assert headline(BrokenError()) == "BrokenError: (its text could not be made: RuntimeError)"
    assert len(headline(ValueError("x" * 1000))) == MAX_HEADLINE


def test_failure() -> None:
    outcome = json.loads(failed(1, 2, raised(ValueError("no"))))
    assert outcome["outcome"] == "failed"
    assert outcome["error"] == "ValueError: no"
    assert outcome["details"]["type"] == "builtins.ValueError"
    assert outcome["details"]["message"] == "no"
    assert "raise error" in outcome["details"]["traceback"]
    assert "options" not in outcome
    outcome = json.loads(failed(1, 2, ValueError(), {"retryable": False}))
    assert outcome["error"] == "ValueError"
    assert outcome["options"] == {"retryable": False}


@pytest.mark.parametrize("error", [ValueError("a\0b\ud800"), BrokenError(), KeyError("x" * 99_999)])
def test_every_failure_can_be_stored(error: BaseException) -> None:
    text = failed(1, 2, raised(error))
    outcome: dict[str, Any] = json.loads(text)
    assert "\\u0000" not in text
    assert "\\ud800" not in text
    assert len(outcome["error"]) <= MAX_MESSAGE
    assert len(outcome["details"]["traceback"]) <= MAX_TRACEBACK


def test_the_end_of_a_long_traceback_is_kept() -> None:
    def deep(n: int) -> None:
        if n == 0:
            raise ValueError("the end" + "." * 2 * MAX_TRACEBACK)
        deep(n - 1)

    with pytest.raises(ValueError, match="the end") as caught:
        deep(50)
    trace = json.loads(failed(1, 2, caught.value))["details"]["traceback"]
    assert trace.startswith("... ")
    assert trace.endswith("...\n")


def test_yield_and_release() -> None:
    at = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    assert json.loads(retry_later(1, 2, RetryLater("soon", at=at, needs=[3]))) == {
        "id": 1,
        "claim": 2,
        "outcome": "retry_later",
        "needs": [3],
        "at": at.isoformat(),
        "message": "soon",
    }
    assert json.loads(retry_later(1, 2, RetryLater(needs=None)))["needs"] is None
    assert json.loads(released(1, 2))["outcome"] == "released"
    with pytest.raises(ValueError, match="no time zone"):
        RetryLater(at=dt.datetime(2030, 1, 1))  # noqa: DTZ001
