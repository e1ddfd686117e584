"""Values come back unchanged: arguments, results, names, errors. All jobs are deferred at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from psycopg.types.json import Jsonb

NAMES = json.loads(Path(__file__).with_name("names.json").read_text("utf-8"))


def tagged(tag: str, value: Any, **more: Any) -> dict[str, Any]:
    return {"__pgdefer__": tag, "value": value} | more


VALUES = {
    "null": None,
    "booleans": [True, False],
    "integers": [0, -1, 2**31, -(2**53) + 1],
    "large_integers": [2**53 + 1, 2**63 - 1, -(2**63), 10**30],
    "floats": [0.5, -1e-7, 123456.75, 3.141592653589793],
    "texts": ["", " ", "a b", "a\\b", "\"'`$x${y}%s", "null"],
    "lines": "a\nb\r\nc\td\u0001\u007f\u2028",
    "unicode": "ünïcode 漢字 \U0001f600 \u202e \ufeff",
    "lists": [[], [[]], [1, [2, [3]]]],
    "objects": {"": {}, "a b": {"'": '"'}, "ü": None},
    "datetime": tagged("datetime", "2026-11-21T12:34:56.789012"),
    "datetime_offset": tagged("datetime", "2026-11-21T12:34:56+05:30"),
    "datetime_zone": tagged("datetime", "2026-10-25T02:30:00", zone="Europe/Berlin", fold=1),
    "date": tagged("date", "2026-02-28"),
    "time": tagged("time", "23:59:59.000001"),
    "time_zone": tagged("time", "12:00:00", zone="UTC"),
    "timedelta": tagged("timedelta", [-1, 3600, 1]),
    "uuid": tagged("uuid", "12345678-1234-5678-1234-567812345678"),
    "decimal": tagged("decimal", "1.10"),
    "float": tagged("float", "-0.0"),
    "large_float": tagged("float", "1e+16"),
    "str": tagged("str", "YQBi"),
    "bytes": tagged("bytes", "AP9hCg=="),
    "bytearray": tagged("bytearray", ""),
    "tuple": tagged("tuple", [1, tagged("tuple", [])]),
    "set": tagged("set", [1, 2]),
    "frozenset": tagged("frozenset", ["a"]),
    "dict": tagged("dict", [[1, "a"], [tagged("date", "2026-01-01"), "b"]]),
    "enum": tagged("enum", "RED", type="protocol_types:Color"),
    "dataclass": tagged(
        "dataclass", {"x": 1, "y": tagged("decimal", "2")}, type="protocol_types:Point"
    ),
    "nested": {
        "a": [tagged("tuple", [tagged("bytes", "AA=="), {"b": tagged("date", "2026-01-01")}])]
    },
    "large": "x" * 100_000,
    "larger_than_an_answer": "y" * 70_000,
    "of_many_characters": "ü" * 50_000,
}
ERRORS = {
    "plain": "it is bad",
    "quotes": 'it\'s "bad" `now`',
    "backslash": "a\\b\\n\\u0041",
    "lines": "first line\nsecond line",
    "unicode": "ünïcode 漢字 \U0001f600",
    "odd": "$(touch x) ${y} $1 %s {z} :name ?",
    "empty": "",
}
QUEUES = [
    "odd 'queue' \"x\"",
    "odd\\queue\n\t",
    "odd 漢字 \U0001f600",
    "odd*?[a]{b}",
    "odd,comma;$x",
]


@pytest.fixture(scope="module")
def ids(shared: Any) -> dict[tuple[str, str], int]:
    """The ids of all jobs."""
    jobs: dict[tuple[str, str], dict[str, Any]] = {
        **{("value", name): {"task": "echo", "args": {"value": v}} for name, v in VALUES.items()},
        ("value", "no_args"): {"task": "echo"},
        **{("error", name): {"task": "fail", "args": {"message": v}} for name, v in ERRORS.items()},
        **{("name", name): {"task": name, "args": {"a": 1}} for name in NAMES},
        **{("queue", name): {"task": "echo", "queue": name} for name in QUEUES},
        **{("task", name): {"task": name} for name in ("none", "large", "unstorable", "nul")},
        ("key", "lock"): {"task": "echo", "lock": "odd 'lock' \" \\ \n 漢"},
        ("key", "limit"): {"task": "echo", "concurrency_key": "odd 'key'", "concurrency_limit": 1},
    }
    given = Jsonb(list(jobs.values()))
    rows = shared.conn.execute("select * from queue.defer_many(%s)", [given]).fetchall()
    return dict(zip(jobs, [id for (id,) in rows], strict=True))


@pytest.mark.parametrize("name", VALUES)
def test_value(shared: Any, ids: dict[tuple[str, str], int], name: str) -> None:
    if shared.kind == "mjs" and name == "large_integers":
        pytest.skip("JavaScript has no such numbers in JSON")
    (job,) = shared.end(ids["value", name])
    assert (job["state"], job["error"]) == ("succeeded", None)
    assert job["result"] == {"value": VALUES[name]}


def test_no_args(shared: Any, ids: dict[tuple[str, str], int]) -> None:
    (job,) = shared.end(ids["value", "no_args"])
    assert (job["state"], job["result"]) == ("succeeded", {})


@pytest.mark.parametrize("name", ERRORS)
def test_error(shared: Any, ids: dict[tuple[str, str], int], name: str) -> None:
    (job,) = shared.end(ids["error", name])
    assert (job["state"], job["reason"]) == ("failed", "attempts")
    assert ERRORS[name] in job["error"]
    assert job["error"]
    assert shared.attempts(job["id"]) == ["failed"]


def test_error_with_nul(shared: Any, ids: dict[tuple[str, str], int]) -> None:
    (job,) = shared.end(ids["task", "nul"])
    assert job["state"] == "failed"
    assert "a" in job["error"]
    assert "b" in job["error"]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_task_name(shared: Any, ids: dict[tuple[str, str], int], name: str) -> None:
    (job,) = shared.end(ids["name", name])
    assert (job["state"], job["result"]) == ("succeeded", {"a": 1})


@pytest.mark.parametrize("name", QUEUES, ids=range(len(QUEUES)))
def test_queue_name(shared: Any, ids: dict[tuple[str, str], int], name: str) -> None:
    (job,) = shared.end(ids["queue", name])
    assert (job["state"], job["queue"]) == ("succeeded", name)


@pytest.mark.parametrize("name", ["lock", "limit"])
def test_key(shared: Any, ids: dict[tuple[str, str], int], name: str) -> None:
    (job,) = shared.end(ids["key", name])
    assert job["state"] == "succeeded"


def test_no_result(shared: Any, ids: dict[tuple[str, str], int]) -> None:
    (job,) = shared.end(ids["task", "none"])
    assert (job["state"], job["result"]) == ("succeeded", None)


def test_large_result(shared: Any, ids: dict[tuple[str, str], int]) -> None:
    (job,) = shared.end(ids["task", "large"])
    assert (job["state"], job["result"]) == ("succeeded", "x" * 100_000)


def test_result_that_can_not_be_stored(shared: Any, ids: dict[tuple[str, str], int]) -> None:
    """The work is done, so the job has succeeded; its result says why it could not be stored."""
    (job,) = shared.end(ids["task", "unstorable"])
    assert job["state"] == "succeeded"
    assert job["result"]["__pgdefer__"] == "unencodable"


def test_nothing_ran_twice(shared: Any, ids: dict[tuple[str, str], int]) -> None:
    shared.end(*ids.values())
    assert shared.value("select max(claims) from queue.jobs") == 1
