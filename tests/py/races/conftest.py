"""Sleepers: workers in threads that follow the protocol of queue.before_sleep to the letter."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from workers import CheckedThread


@dataclasses.dataclass
class Claimed:
    id: int
    task: str
    at: float
    after: str  # the previous event: busy, notified, polled or timed out


@dataclasses.dataclass
class Sleep:
    asked_at: float
    answered_at: float
    seconds: float

    def ends_on_a_second(self) -> bool:
        """Whether the answer may have meant a whole second of the clock, to 20 ms."""
        earliest, latest = self.asked_at + self.seconds, self.answered_at + self.seconds
        return math.ceil(earliest - 0.02) <= latest + 0.02


class Sleeper(CheckedThread):
    """A worker without handlers: it claims, records the time, and reports success."""

    def __init__(self, dsn: str, name: str, info: dict[str, Any], in_line: bool) -> None:
        super().__init__(name)
        self._dsn = dsn
        self._info = info
        self._in_line = in_line
        self.claimed: list[Claimed] = []
        self.polls: list[float] = []
        self.sleeps: list[Sleep] = []
        self.is_asleep = False

    def work(self) -> None:
        with (
            psycopg.connect(self._dsn, autocommit=True) as main,
            psycopg.connect(self._dsn, autocommit=True) as listener,
        ):
            self._work(main, listener)

    def _work(self, main: psycopg.Connection[Any], listener: psycopg.Connection[Any]) -> None:
        row = main.execute(
            "select * from queue.register_worker(%s, null, %s)",
            (self.name, json.dumps(self._info)),
        ).fetchone()
        assert row is not None
        worker = row[0]
        listened: set[str] = set()
        has_slept = False
        after = "busy"
        while not self.is_over.is_set():
            if self._run_jobs(main, worker, after):
                if has_slept:
                    listener.execute("select * from queue.after_sleep(%s)", (worker,))
                    has_slept = False
                after = "busy"
                continue
            asked_at = time.time()
            row = listener.execute(
                "select may_sleep, wait_for, channels, look_after"
                " from queue.before_sleep(%s, null, jsonb_build_object('in_line', %s::boolean))",
                (worker, self._in_line),
            ).fetchone()
            assert row is not None
            may_sleep, wait_for, channels, look_after = row
            has_slept = True
            for channel in listened - set(channels):
                listener.execute(f'unlisten "{channel}"')
                listened.discard(channel)
            for channel in set(channels) - listened:
                listener.execute(f'listen "{channel}"')
                listened.add(channel)
            if self._run_jobs(main, worker, after):
                listener.execute("select * from queue.after_sleep(%s)", (worker,))
                has_slept = False
                continue
            seconds = wait_for.total_seconds()
            if may_sleep:
                self.sleeps.append(Sleep(asked_at, time.time(), seconds))
                self.is_asleep = True
                heard = list(listener.notifies(timeout=seconds, stop_after=1))
                self.is_asleep = False
                if heard and heard[0].channel == "pgdefer":
                    time.sleep(look_after.total_seconds())
                after = "notified" if heard else "timed out"
            else:
                self.polls.append(seconds)
                time.sleep(seconds)
                after = "polled"
        listener.execute("select * from queue.after_sleep(%s)", (worker,))

    def _run_jobs(self, main: psycopg.Connection[Any], worker: int, after: str) -> bool:
        rows = main.execute(
            "select id, claim, task from queue.fetch(%s, null, 5)", (worker,)
        ).fetchall()
        now = time.monotonic()
        self.claimed += [Claimed(id, task, now, after) for id, _, task in rows]
        if rows:
            outcomes = [{"id": id, "claim": claim, "outcome": "succeeded"} for id, claim, _ in rows]
            refused = main.execute(
                "select * from queue.finish_many(%s) where error is not null",
                (json.dumps(outcomes),),
            ).fetchall()
            assert not refused
        return bool(rows)


@pytest.fixture
def start_sleepers(dsn: str) -> Iterator[Callable[..., list[Sleeper]]]:
    """Start sleepers; they are stopped after the test, and none may have failed."""
    started: list[Sleeper] = []

    def start(n: int, *, in_line: bool = False, **info: Any) -> list[Sleeper]:
        new = [Sleeper(dsn, f"sleeper {len(started) + i}", info, in_line) for i in range(n)]
        for sleeper in new:
            sleeper.start()
        started.extend(new)
        return new

    yield start
    for sleeper in started:
        sleeper.is_over.set()
    with contextlib.suppress(psycopg.Error), psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("notify pgdefer")
    with contextlib.ExitStack() as stack:
        for sleeper in started:
            stack.callback(sleeper.end)
