"""Clients that freeze within a durable call, or roll it back, leave the queue sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

Connection = psycopg.Connection[Any]

CALLS = {
    "begin_step": "queue.begin_step({job}, {claim}, 'a', 'v1')",
    "finish_step": "queue.finish_step({job}, {claim}, 'a', '1')",
    "finish_steps": """queue.finish_steps({job}, {claim}, '[{{"name": "a"}}, {{"name": "b"}}]')""",
    "fail_step": "queue.fail_step({job}, {claim}, 'a', 'e')",
    "fail_step_again": """queue.fail_step({job}, {claim}, 'a', 'e', null, '{{"retryable": true}}')""",
    "sleep": "queue.sleep({job}, {claim}, 'a', now() + interval '1 day')",
    "wait_for_signal": "queue.wait({job}, {claim}, 'a', 's', timeout => '1 day')",
    "wait_for_event": "queue.wait({job}, {claim}, 'a', event => 'e')",
    "await_jobs": "queue.await_jobs({job}, {claim}, 'a', array[{child}, {ended}])",
    "emit": "queue.emit({job}, {claim}, 'lines', '1')",
    "set_progress": "queue.set_progress({job}, {claim}, 50, 'half')",
    "signal": "queue.signal({job}, 's')",
    "publish": "queue.publish('e')",
    "fork": "queue.fork({job}, 'before')",
}
SUSPENDING = {"fail_step_again", "sleep", "wait_for_signal", "wait_for_event", "await_jobs"}


class Queue:
    """A running job that has a step, a child that waits, and one that has ended."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        connection.execute("set statement_timeout = '60 s'")
        self.worker = self.one("queue.register_worker('w', info => '{\"dead_after\": \"1 day\"}')")
        self.job = self.one("queue.defer('durable')")
        self.claim = self.fetched()[self.job]
        child = f"""queue.defer('child', options => '{{"parent": {self.job}, "retain": "0 s"}}')"""
        self.ended = self.one(child)
        self.one(f"queue.succeed({self.ended}, {self.fetched()[self.ended]})")
        self.child = self.one(child)
        self.one(f"queue.hold({self.child})")
        self.one(f"queue.finish_step({self.job}, {self.claim}, 'before')")

    def one(self, call: str) -> Any:
        row = self.connection.execute(f"select {call}").fetchone()
        return None if row is None else row[0]

    def fetched(self) -> dict[int, int]:
        rows = self.connection.execute(
            "select id, claim from queue.fetch(%s, max_jobs => 9)", [self.worker]
        )
        return dict(rows.fetchall())

    def call(self, name: str) -> str:
        return "select " + CALLS[name].format(
            job=self.job, claim=self.claim, child=self.child, ended=self.ended
        )

    def check(self) -> None:
        self.one("queue.tick()")
        assert self.connection.execute("select * from queue.check()").fetchall() == []


@pytest.fixture
def queue(connect: Callable[..., Connection]) -> Queue:
    return Queue(connect())


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("ends", ["rollback", "commit"])
def test_a_client_that_freezes_keeps_nobody_waiting(
    connect: Callable[..., Connection], queue: Queue, name: str, ends: str
) -> None:
    frozen = connect()
    frozen.execute("begin")
    frozen.execute(queue.call(name))
    # all that others may do meanwhile
    other = queue.one("queue.defer('other')")
    queue.one(f"queue.succeed({other}, {queue.fetched()[other]})")
    for call in (
        "queue.tick()",
        "queue.prune()",
        f"queue.heartbeat({queue.worker})",
        f"queue.signal({queue.job}, 'else')",
        "queue.publish('else')",
        f"queue.read_stream({queue.job}, 'lines')",
        f"queue.fork({queue.job}, 'before')",
        f"queue.why({queue.job})",
        f"queue.cancel({queue.child})",
    ):
        queue.one(call)
    queue.check()
    frozen.execute(ends)
    queue.check()
    suspended = ends == "commit" and name in SUSPENDING
    if suspended:
        with pytest.raises(psycopg.Error) as refused:
            queue.one(f"queue.finish_step({queue.job}, {queue.claim}, 'after')")
        assert refused.value.sqlstate == "QJ002"
        queue.one(f"queue.cancel({queue.job})")
    else:
        queue.one(f"queue.succeed({queue.job}, {queue.claim})")
    queue.check()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_rolled_back_to_a_savepoint_has_not_happened(
    connect: Callable[..., Connection], queue: Queue, name: str
) -> None:
    handler = connect()
    handler.execute("begin")
    handler.execute("savepoint before_call")
    handler.execute(queue.call(name))
    handler.execute("rollback to before_call")
    # others may have read the row that the savepoint had changed
    queue.one("queue.tick()")
    queue.one("queue.prune()")
    handler.execute(f"select queue.finish_step({queue.job}, {queue.claim}, 'a', '2')")
    handler.execute("commit")
    rows = "select name, value from queue.steps where job_id = %s order by finished_at"
    found = queue.connection.execute(rows, [queue.job]).fetchall()
    assert found == [("before", None), ("a", 2)]
    queue.check()
    queue.one(f"queue.await_jobs({queue.job}, {queue.claim}, 'end', array[{queue.ended}])")
    assert queue.job in queue.fetched()
    queue.check()
