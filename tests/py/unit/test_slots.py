"""Slots in the command line's notation."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from pgdefer import App, Worker
from pgdefer.worker.slots import Slots, parse_slots


@pytest.mark.parametrize(
    ("text", "size", "horizon"),
    [
        (3, 3, None),
        ("3", 3, None),
        ("3:none", 3, None),
        ("1:0s", 1, dt.timedelta(0)),
        ("2:30m", 2, dt.timedelta(minutes=30)),
        ("2:4h", 2, dt.timedelta(hours=4)),
        ("2:1d", 2, dt.timedelta(days=1)),
        ("2:1w", 2, dt.timedelta(weeks=1)),
    ],
)
def test_what_slots_say(text: Any, size: int, horizon: dt.timedelta | None) -> None:
    slots = Slots.parse(text)
    assert (slots.size, slots.horizon) == (size, horizon)


@pytest.mark.parametrize(
    "text", [0, "0", -1, "", "x", "2:", "2:30", "2:30x", ":30m", "2:-1m", "2 "]
)
def test_what_slots_cannot_say(text: Any) -> None:
    with pytest.raises(ValueError, match="slots are N or N:HORIZON"):
        Slots.parse(text)


def test_those_with_the_nearest_horizon_come_first() -> None:
    app = App("postgresql://nowhere.invalid/x")
    assert [str(s) for s in parse_slots(["3", "2:30m", "1:0s"])] == ["1:0:00:00", "2:0:30:00", "3"]
    worker = Worker(app, slots=["3", "2:30m"])
    assert worker.concurrency == 5
    with pytest.raises(ValueError, match="not both"):
        Worker(app, slots=[1], concurrency=2)
    with pytest.raises(ValueError, match="concurrency must be at least 1"):
        Worker(app, concurrency=0)


def test_what_fetch_is_asked_for() -> None:
    assert Slots(1).options() is None
    assert Slots(1, dt.timedelta(hours=1)).options() == '{"deadline_within": "1:00:00.000000"}'
