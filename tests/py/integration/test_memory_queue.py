"""A MemoryQueue accepts and refuses what a queue on a database does: the same calls to both."""

from __future__ import annotations

import datetime as dt
import enum
import math
import uuid
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from pgdefer import App, Retry
from pgdefer.testing import MemoryQueue, TestQueue
from support import ROOT

pytestmark = pytest.mark.client

NOWHERE = "postgresql://nowhere.invalid/x"
NOW = dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
HOUR = dt.timedelta(hours=1)
LATE = dt.datetime.max.replace(tzinfo=dt.timezone(-HOUR))

Call = Callable[[App], Any]


class Colour(enum.Enum):
    RED = 1


def call(*args: Any, **kwargs: Any) -> Call:
    return lambda app: app.get("greet").defer(*args, **kwargs)  # type: ignore[attr-defined]


def option(**options: Any) -> Call:
    return lambda app: app.get("greet").configure(**options).defer("Ann")  # type: ignore[attr-defined]


def prepared(app: App, name: str = "Ann", **options: Any) -> Any:
    return app.get("greet").configure(**options).prepare(name)  # type: ignore[attr-defined]


GOOD: dict[str, Call] = {
    "positional": call("Ann"),
    "by name": call(name="Ann", polite=True),
    "unknown task": lambda app: app.defer("unknown", {"when": NOW}, queue="other"),
    "another's task, wrong arguments": lambda app: app.defer("greet", {"nobody": "knows"}),
    "types beyond JSON": call([NOW, dt.date(2030, 1, 1), HOUR, uuid.UUID(int=1), Decimal("1.5")]),
    "more types": call([b"x", {1, 2}, (1, 2), {3: 4}, Colour.RED, "NUL \0", 1e300, None]),
    "a queue and priority": option(queue="mail", priority=-3),
    "a time": option(scheduled_at=NOW),
    "a delay": option(delay=HOUR),
    "locks": option(lock="a", lock_mode="mutex"),
    "a template": option(lock="name:{name}"),
    "a queueing lock": option(queueing_lock="b", on_conflict="ignore"),
    "a key": option(concurrency_key="c", concurrency_limit=2),
    "a retry": option(retry=Retry(5, backoff="exponential", base=HOUR)),
    "the task's own retry": option(retry=3),
    "times": option(timeout=HOUR, deadline=NOW, expires_at=NOW, retain=HOUR),
    "an idempotency key": option(idempotency_key="once", unique_for=HOUR),
    "texts": option(description="why", headers={"trace": "1"}, share="Ann"),
    "held": option(held=True),
    "many": lambda app: app.get("greet").defer_many([{"name": "A"}, {"name": "B"}]),  # type: ignore[attr-defined]
    "no call": lambda app: app.defer_many([]),
    "a chain": lambda app: app.chain([prepared(app), prepared(app, "Bob", queue="mail")]),
    "a group": lambda app: app.group([prepared(app)]).then(prepared(app, "Cid", priority=5)),
    "the longest and latest": option(
        retry=999_999_999,
        max_progress=999_999_999,
        timeout=dt.timedelta(days=1440000),
        scheduled_at=dt.datetime(1, 1, 3, tzinfo=dt.UTC),
        deadline=dt.datetime.max.replace(tzinfo=dt.UTC),
    ),
    "its needs": lambda app: option(needs=[call("first")(app)])(app),
}

BAD: dict[str, Call] = {
    "an argument missing": call(),
    "an argument too many": call("Ann", True, 3),
    "an unknown argument": call("Ann", polit=True),
    "an option among the arguments": call("Ann", queue="mail"),
    "an object": call(object()),
    "NaN": call(math.nan),
    "a function": call(print),
    "an object within": call([{"deep": object()}]),
    "arguments by position of an unknown task": lambda app: app.defer("unknown", ["Ann"]),  # type: ignore[arg-type]
    "an unknown option": option(qeue="mail"),
    "a number as queue": option(queue=5),
    "a text as priority": option(priority="high"),
    "a priority too large": option(priority=2**31),
    "a time without zone": option(scheduled_at=dt.datetime(2030, 1, 1)),  # noqa: DTZ001
    "a time and a delay": option(scheduled_at=NOW, delay=HOUR),
    "seconds as delay": option(delay=5),
    "seconds as timeout": option(timeout=5),
    "an unknown mode": option(lock_mode="fifo"),
    "an unknown conflict": option(on_conflict="skip"),
    "a text as needs": option(needs="1"),
    "a text as need": option(needs=["1"]),
    "no id": option(needs=[-1]),
    "a list as headers": option(headers=["x"]),
    "headers that are not JSON": option(headers={"x": object()}),
    "headers with NaN": option(headers={"x": math.nan}),
    "retry for ever": option(retry=True),
    "retry once": option(retry=1),
    "retry as text": option(retry="5"),
    "no connection": lambda app: app.get("greet").configure(connection=None).defer("Ann"),  # type: ignore[attr-defined]
    "one wrong call of many": lambda app: app.get("greet").defer_many([{"name": "A"}, {"nam": 1}]),  # type: ignore[attr-defined]
    "calls that are none": lambda app: app.defer_many(["greet"]),  # type: ignore[list-item]
    "unknown keys of retry": option(retry={"attempts": 3}),
    "a number of retry": option(retry={"max_attempts": 0}),
    "a policy of two kinds": option(retry={"wait": 1, "base": HOUR}),
    "a retry too often": option(retry=2**31),
    "no limit": option(concurrency_key="c", concurrency_limit=0),
    "a limit in concurrency": option(concurrency=[{"key": "c", "limit": 10**9}]),
    "a negative delay": option(delay=-HOUR),
    "a delay too long": option(delay=dt.timedelta(days=1440000, microseconds=1)),
    "no time at all": option(timeout=dt.timedelta(0)),
    "unique for no time": option(idempotency_key="a", unique_for=dt.timedelta(0)),
    "too much progress": option(max_progress=10**9),
    "a time too early": option(scheduled_at=dt.datetime(1, 1, 2, tzinfo=dt.UTC)),
    "a deadline too early": option(deadline=dt.datetime.min.replace(tzinfo=dt.UTC)),
    "a time too late": option(expires_at=LATE),
    "a time as text": option(scheduled_at="tomorrow"),
    "retain of no outcome": option(retain={"done": HOUR}),
}

# What only a database refuses, by the words of docs/testing.md: it knows other jobs, or the rule
# is there alone.
ONLY_THE_DATABASE: dict[str, tuple[str, Call]] = {
    "a queueing lock in use": (
        "a `queueing_lock` that another job holds",
        lambda app: [option(queueing_lock="b")(app) for _ in range(2)],
    ),
    "a need that does not exist": ("`needs` of jobs that do not exist", option(needs=[10**9])),
    "an empty name": ("an empty name of a task", lambda app: app.defer("")),
    "a long name": ("longer than 1,000 bytes", option(queue="x" * 1001)),
    "a pattern as queue": ("end in `*`", option(queue="mail*")),
    "NUL in a name": ("contain NUL", option(lock="a\0b")),
    "a template's field": (
        "a template that the arguments do not fill",
        option(lock="c:{customer}"),
    ),
    "a key without limit": ("a `concurrency_key` without a limit", option(concurrency_key="c")),
    "unique for nothing": ("`unique_for` without a key", option(unique_for=HOUR)),
    "an unknown group": ("a group that is not open", option(group="none")),
    "keys of concurrency": ("the contents of `concurrency`", option(concurrency=[{"kee": 1}])),
    "NUL in headers": ("contain NUL", option(headers={"a": "\0"})),
}


def shop(dsn: str) -> App:
    app = App(dsn)

    @app.task(name="greet", description="greets", retry=4)
    def greet(name: str, polite: bool = False) -> str:
        return name

    return app


@pytest.fixture
def memory() -> Iterator[MemoryQueue]:
    with MemoryQueue(shop(NOWHERE)) as queue:
        yield queue


@pytest.fixture
def ends(dsn: str) -> Iterator[Callable[[Call], tuple[Any, Any]]]:
    """How a call ends with each kind of queue, neither of which has any other job."""
    app = shop(dsn)

    def run(call: Call) -> tuple[Any, Any]:
        with psycopg.connect(dsn) as connection:
            with TestQueue(app, connection) as real, connection.transaction(force_rollback=True):
                ended = ending(real, call)
            connection.rollback()
        with MemoryQueue(shop(NOWHERE)) as memory:
            return ending(memory, call), ended

    yield run
    app.close()


def ending(queue: MemoryQueue | TestQueue, call: Call) -> Any:
    """What a call raised; else its jobs, whose ids count from 1."""
    try:
        call(queue.app)
    except Exception as error:
        return type(error), str(error)
    jobs = queue.deferred()
    before = min((job.id for job in jobs), default=1) - 1
    return [(job.id - before, job.task, job.args, job.queue, job.priority) for job in jobs]


def test_both_accept(ends: Callable[[Call], tuple[Any, Any]]) -> None:
    for what, call in GOOD.items():
        memory, real = ends(call)
        assert isinstance(memory, list), (what, memory)
        assert memory == real, what


def test_both_refuse(ends: Callable[[Call], tuple[Any, Any]]) -> None:
    for what, call in BAD.items():
        memory, real = ends(call)
        assert isinstance(memory, tuple), what
        assert issubclass(memory[0], TypeError | ValueError), (what, memory)
        assert memory == real, what


def test_what_only_the_database_refuses(ends: Callable[[Call], tuple[Any, Any]]) -> None:
    page = " ".join((ROOT / "docs" / "testing.md").read_text("utf-8").split())
    for what, (words, call) in ONLY_THE_DATABASE.items():
        memory, real = ends(call)
        assert isinstance(memory, list), (what, memory)
        assert isinstance(real, tuple), what
        assert words in page, words


def test_what_was_recorded(memory: MemoryQueue) -> None:
    memory.assert_not_deferred()
    option(lock="name:{name}", headers={"a": 1}, delay=HOUR)(memory.app)
    job = memory.assert_deferred(memory.app.get("greet"), "Ann")
    assert job.options == {
        "description": "greets",
        "retry": {"max_attempts": 4},
        "lock": "name:{name}",
        "headers": {"a": 1},
        "delay": "1:00:00.000000",
    }
    assert memory.deferred("greet", name="Bob") == []
    with pytest.raises(AssertionError, match=r"unknown\(\) was not deferred, but\n  1: greet\(n"):
        memory.assert_deferred("unknown")
    with pytest.raises(AssertionError, match="deferred:"):
        memory.assert_not_deferred("greet")


async def test_coroutines_and_connections(memory: MemoryQueue) -> None:
    greet: Any = memory.app.get("greet")
    mine: Any = object()
    await greet.defer_async("Ann")
    await greet.defer_with_async(mine, "Bob")
    await memory.assert_deferred_async(greet, "Bob")


async def test_what_needs_a_database(memory: MemoryQueue) -> None:
    greet: Any = memory.app.get("greet")
    job = greet.defer("Ann")
    for ask in (job.state, job.cancel, job.result, memory.app.stats):
        with pytest.raises(RuntimeError, match="only records what is deferred: use a TestQueue"):
            ask()
    with pytest.raises(RuntimeError, match="use a TestQueue"):
        await job.result_async()
    unfit: Any = memory
    for name in ("run", "run_async", "travel", "immediate"):
        with pytest.raises(AttributeError, match="only records what is deferred: use a TestQueue"):
            getattr(unfit, name)
    with pytest.raises(AttributeError, match=r"object has no attribute 'rum'$"):
        unfit.rum()


def test_queues_may_be_nested(memory: MemoryQueue) -> None:
    with MemoryQueue(memory.app) as inner:
        option()(memory.app)
        assert len(inner.deferred()) == 1
    option()(memory.app)
    assert len(memory.deferred()) == 1
