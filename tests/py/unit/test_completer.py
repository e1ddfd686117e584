"""Outcomes are sent in calls of bounded length, and put back only if there was no answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any, cast

import psycopg
import pytest

from pgdefer import App
from pgdefer.database import sql
from pgdefer.database.connection import Connection, ConnectionLost
from pgdefer.tasks.context import JobContext
from pgdefer.worker import completer, outcomes
from pgdefer.worker.announcer import Announcer
from pgdefer.worker.claim import Claim
from pgdefer.worker.completer import Completer


class Database:
    """Accepts outcomes, but raises instead of the answers to the calls with these numbers.

    The first outcomes of the jobs `refused` are refused.
    """

    encoding = "UTF8"

    def __init__(
        self, answers: dict[int, Exception] | None = None, refused: Iterable[int] = ()
    ) -> None:
        self.calls: list[str] = []
        self._answers = answers or {}
        self._refused = set(refused)

    async def call(self, statement: sql.Statement, **given: Any) -> list[Any]:
        assert statement in (sql.FINISH_MANY, sql.TRY_FINISH_MANY)
        self.calls.append(given["outcomes"])
        if error := self._answers.get(len(self.calls)):
            raise error
        rows = []
        for each in self.ids()[-1]:
            error = "22023" if each["id"] in self._refused else None
            self._refused.discard(each["id"])
            rows.append((each["id"], each["claim"], "failed", error))
        return rows

    def ids(self) -> list[list[dict[str, Any]]]:
        return [json.loads(text) for text in self.calls]


class Taken(Announcer):
    """Records the jobs whose outcomes were accepted."""

    def __init__(self) -> None:
        super().__init__({})
        self.ids: list[int] = []

    def taken(self, claim: Claim, outcome: str, state: str) -> None:
        self.ids.append(claim.job.id)


def claim(id: int) -> Claim:
    row: Any = (id, 100 + id, "t", "\1{}", "q", 0, None, 1, *[None] * 6)
    return Claim(JobContext(App("dbname=nowhere").client, row), None, 0.0)


def filled(announcer: Announcer, lengths: list[int]) -> Completer:
    """Return one with successes of these lengths, for jobs from 1."""
    made = Completer(announcer)
    for id, length in enumerate(lengths, 1):
        bare = outcomes.succeeded(id, 100 + id, '""')
        text = outcomes.succeeded(id, 100 + id, f'"{"x" * (length - len(bare))}"')
        assert len(text) == length
        made.add(claim(id), text)
    return made


def sent(database: Database) -> list[list[int]]:
    return [[each["id"] for each in call] for call in database.ids()]


async def test_long_outcomes_are_sent_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completer, "MAX_CALL", 1000)
    taken, database = Taken(), Database()
    sender = filled(taken, [400, 600, 400, 601, 100, 2000, 100])
    await sender.send_all(cast("Connection", database))
    assert sent(database) == [[1, 2], [3], [4, 5], [6], [7]]
    assert taken.ids == [1, 2, 3, 4, 5, 6, 7]
    assert sender.unsent == []


async def test_a_refusal_in_the_first_of_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completer, "MAX_CALL", 3000)
    taken, database = Taken(), Database(refused=[1])
    sender = filled(taken, [2900, 200])
    async with asyncio.timeout(10):
        await sender.send_all(cast("Connection", database))
    assert sent(database) == [[1], [2, 1]]
    assert sender.unsent == []


async def test_an_outcome_that_is_too_long_is_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(completer, "MAX_CALL", 1000)
    monkeypatch.setattr(completer, "MAX_OUTCOME", 3000)
    taken, database = Taken(), Database()
    sender = filled(taken, [100, 3001, 100])
    await sender.send_all(cast("Connection", database))
    assert taken.ids == [1, 2, 3]
    assert sent(database) == [[1], [2], [3]]
    noted = outcomes.without_result('{"id":2,"claim":102,"outcome":"succeeded","result":1}', 2, 102)
    assert database.calls[1] == f"[{noted}]"
    assert "more than 3,000 characters" in caplog.text


async def test_a_loss_amid_outcomes_that_are_sent_alone() -> None:
    """Those that the database has accepted are not sent, and not reported, again."""
    refusal = psycopg.errors.QueryCanceled("canceling statement due to user request")
    taken, database = Taken(), Database({1: refusal, 3: ConnectionLost("it was cut")})
    sender = filled(taken, [100, 100, 100])
    with pytest.raises(ConnectionLost):
        await sender.send_all(cast("Connection", database))
    assert taken.ids == [1]
    assert [each.job.id for each, _ in sender.unsent] == [2, 3]
    await sender.send_all(cast("Connection", database))
    assert sent(database) == [[1, 2, 3], [1], [2], [2, 3]]
    assert taken.ids == [1, 2, 3]


async def test_locked_outcomes_go_at_once_when_they_may() -> None:
    """While some are still locked, two are tried, and the others next time."""
    locked = psycopg.errors.LockNotAvailable("canceling statement due to lock timeout")
    taken, database = Taken(), Database(dict.fromkeys([*range(1, 8), 9], locked))
    sender = filled(taken, [100] * 5)
    await sender.send_apart(cast("Connection", database), sender.take())
    assert (sender.unsent, len(sender.locked)) == ([], 5)
    await sender.send_locked(cast("Connection", database))
    assert sent(database)[6:] == [[1], [2], [3]]
    await sender.send_locked(cast("Connection", database))
    assert taken.ids == [2, 4, 5, 1, 3]
    assert sender.left == []
