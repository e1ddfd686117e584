"""Random limits, rates and weights of keys, from two connections, against a plain model.

The model knows which job of each key is the newest, what is configured, and which starts a window holds. No
start may exceed a limit or a rate, whatever the order of admissions, and no job waits that has room by all of
its keys and nobody before it. Workers with tasks pass the jobs of others that have room.

Time passes only where the test lets it: a window has 60 minutes, of which each step takes 25.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from pgdefer.database.embedded import EmbeddedServer

from .machines import matches, short, thorough, with_databases

NONE = 10**9
WINDOW, PASSES = 60, 25  # minutes
KEYS = ["a1", "a2", "b"]
TASKS = ["t", "t", "u"]
PATTERNS = ["a1", "a*", "b"]
Connection = psycopg.Connection[Any]


@dataclasses.dataclass
class Entry:
    key: str
    limit: int | None
    rate: int | None
    weight: int

    def as_option(self) -> dict[str, Any]:
        option: dict[str, Any] = {"key": self.key, "weight": self.weight}
        if self.limit is not None:
            option["limit"] = self.limit
        if self.rate is not None:
            option["rate"] = as_rate(self.rate)
        return option


@dataclasses.dataclass
class Job:
    entries: list[Entry]
    discards: bool
    priority: int
    task: str
    state: str = "new"  # waiting, running, done
    claim: int = 0


def as_rate(limit: int) -> dict[str, Any]:
    return {"limit": limit, "per": f"{WINDOW} minutes"}


@st.composite
def jobs(draw: st.DrawFn) -> list[Job]:
    """Draw one to four jobs that are alike, with one or two keys."""
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True))
    discards = draw(st.sampled_from([False, False, False, True]))
    priority = draw(st.sampled_from([0, 0, 0, 5]))
    n = draw(st.integers(1, 4))
    entries = [draw(entry(key)) for key in keys]
    task = draw(st.sampled_from(TASKS))
    return [Job(entries, discards, priority, task) for _ in range(n)]


@st.composite
def entry(draw: st.DrawFn, key: str) -> Entry:
    limit = draw(st.sampled_from([None, 1, 3, 5]))
    rate = draw(st.sampled_from([None, None, 1, 5])) if limit else draw(st.sampled_from([1, 3, 5]))
    weight = draw(st.integers(1, min(limit or 5, rate or 5)))
    return Entry(key, limit, rate, weight)


class Semaphores(RuleBasedStateMachine):
    new_dsn: Any

    def __init__(self) -> None:
        super().__init__()
        dsn = self.new_dsn()
        self.conn = psycopg.connect(dsn, autocommit=True)
        self.late = psycopg.connect(dsn)
        self.late.execute("set lock_timeout = '20 s'")
        self.late.commit()
        info = json.dumps({"dead_after": "1 day"})
        self.worker = self.value("select queue.register_worker('w', info => %s)", info)
        self.jobs: dict[int, Job] = {}
        self.open: dict[int, Job] = {}  # not committed
        self.newest: dict[str, int] = {}
        self.configured: dict[str, dict[str, int]] = {}
        self.starts: dict[str, list[tuple[int, int]]] = {key: [] for key in KEYS}  # at, weight
        self.rated_since: dict[str, int] = dict.fromkeys(KEYS, 0)  # the number of the first start
        self.minute = 0

    def value(self, query: str, *params: Any) -> Any:
        ((value,),) = self.conn.execute(query.encode(), params)
        return value

    # The model

    def terms(self, key: str) -> tuple[int, int]:
        """Return the limit and the rate that hold for a key."""
        own = next(e for e in self.jobs[self.newest[key]].entries if e.key == key)
        patterns = [p for p in self.configured if matches(key, p)]
        best = max(patterns, key=lambda p: (p == key, len(p)), default="")
        config = self.configured.get(best, {})
        return config.get("limit", own.limit or NONE), config.get("rate", own.rate or NONE)

    def used(self, key: str) -> int:
        running = (job for job in self.jobs.values() if job.state == "running")
        return sum(e.weight for job in running for e in job.entries if e.key == key)

    def started(self, key: str, since: int = 0) -> int:
        starts = self.starts[key][since:]
        return sum(weight for at, weight in starts if self.minute - at <= WINDOW)

    def admit(self) -> None:
        self.conn.execute("select queue.tick()")
        for job_id, job in self.jobs.items():
            if job.state == "new":
                job.state = "waiting"
                for e in job.entries:
                    self.newest[e.key] = max(self.newest.get(e.key, 0), job_id)
        for key in self.newest:
            if self.terms(key)[1] == NONE:
                self.rated_since[key] = len(self.starts[key])
        rows = self.conn.execute("select id from queue.jobs where state = 'cancelled'").fetchall()
        for (job_id,) in rows:
            if self.jobs[job_id].state == "waiting":
                assert self.jobs[job_id].discards, job_id
            self.jobs[job_id].state = "done"

    # The calls

    @rule(jobs=jobs())
    def defer(self, jobs: list[Job]) -> None:
        self.jobs.update((self.deferred(self.conn, job), job) for job in jobs)

    @precondition(lambda self: len(self.open) < 3)
    @rule(jobs=jobs())
    def defer_late(self, jobs: list[Job]) -> None:
        self.open.update((self.deferred(self.late, job), job) for job in jobs)

    def deferred(self, conn: Connection, job: Job) -> int:
        options: dict[str, Any] = {"concurrency": [e.as_option() for e in job.entries]}
        if job.discards:
            options["on_limit"] = "discard"
        ((job_id,),) = conn.execute(
            "select queue.defer(%s, priority => %s, options => %s)",
            [job.task, job.priority, json.dumps(options)],
        )
        return int(job_id)

    @precondition(lambda self: self.open)
    @rule(commits=st.booleans())
    def end_late(self, commits: bool) -> None:
        if commits:
            self.late.commit()
            self.jobs.update(self.open)
        else:
            self.late.rollback()
        self.open = {}

    @rule()
    def tick(self) -> None:
        self.admit()

    @rule(n=st.sampled_from([1, 2, 5, 20]), task=st.none() | st.sampled_from(TASKS))
    def fetch(self, n: int, task: str | None) -> None:
        self.fetched(n, task)

    def fetched(self, n: int, task: str | None = None) -> int:
        self.admit()
        options = None if task is None else json.dumps({"tasks": [task]})
        rows = self.conn.execute(
            "select id, claim from queue.fetch(%s, null, %s, %s)", [self.worker, n, options]
        ).fetchall()
        for job_id, claim in rows:
            job = self.jobs[job_id]
            assert job.state == "waiting", (job_id, job)
            assert task in (None, job.task), (job_id, job)
            for e in job.entries:
                limit, rate = self.terms(e.key)
                used, started = self.used(e.key), self.started(e.key, self.rated_since[e.key])
                assert used + min(e.weight, limit) <= limit, (job_id, e, used, limit)
                assert started + min(e.weight, rate) <= rate, (job_id, e, started, rate)
            job.state, job.claim = "running", claim
            for e in job.entries:
                self.starts[e.key].append((self.minute, e.weight))
        return len(rows)

    @precondition(lambda self: self.in_state("running"))
    @rule(data=st.data(), way=st.sampled_from(["succeed", "succeed", "release"]))
    def end(self, data: st.DataObject, way: str) -> None:
        job_id = data.draw(st.sampled_from(self.in_state("running")))
        job = self.jobs[job_id]
        self.conn.execute(f"select queue.{way}(%s, %s)".encode(), [job_id, job.claim])
        job.state = "done" if way == "succeed" else "waiting"

    @precondition(lambda self: self.in_state("waiting"))
    @rule(data=st.data(), queue=st.sampled_from(["default", "other"]))
    def change(self, data: st.DataObject, queue: str) -> None:
        job_id = data.draw(st.sampled_from(self.in_state("waiting")))
        if data.draw(st.booleans()):
            self.conn.execute("select queue.cancel(%s)", [job_id])
            self.jobs[job_id].state = "done"
        else:
            self.conn.execute("select queue.move(%s, %s)", [[job_id], queue])

    def in_state(self, state: str) -> list[int]:
        return [job_id for job_id, job in self.jobs.items() if job.state == state]

    @rule(
        pattern=st.sampled_from(PATTERNS),
        name=st.sampled_from(["limit", "rate"]),
        n=st.none() | st.integers(1, 5),
    )
    def configure(self, pattern: str, name: str, n: int | None) -> None:
        self.admit()
        value: Any = n if n is None or name == "limit" else as_rate(n)
        self.conn.execute(
            "select queue.configure_key(%s, %s)", [pattern, json.dumps({name: value})]
        )
        config = self.configured.setdefault(pattern, {})
        if n is None:
            config.pop(name, None)
        else:
            config[name] = n
        if not config:
            del self.configured[pattern]
        self.admit()

    @rule()
    def time_passes(self) -> None:
        self.minute += PASSES
        way = f"{PASSES} minutes"
        self.conn.execute("update queue.rate_start set at = at - %s::interval", [way])
        self.conn.execute(
            "update queue.waiting set at = at - %s::interval where reason = 'slot'", [way]
        )
        self.conn.execute("update queue.cursor set due_at = due_at - %s::interval", [way])

    @rule()
    def all_that_have_room_start(self) -> None:
        while self.fetched(20):
            pass
        seen: set[str] = set()
        for job_id in self.in_state("waiting"):
            keys = {e.key for e in self.jobs[job_id].entries}
            if not keys & seen and self.has_room(job_id):
                why = self.value("select queue.why(%s)", job_id)
                raise AssertionError(f"{job_id} waits: {self.jobs[job_id]}: {why}")
            seen |= keys

    @rule(task=st.sampled_from(TASKS))
    def all_of_a_task_start(self, task: str) -> None:
        """Those of other tasks are passed, unless they have no room."""
        while self.fetched(20, task):
            pass
        shut: set[str] = set()
        for job_id in sorted(self.in_state("waiting")):
            job = self.jobs[job_id]
            keys = {e.key for e in job.entries}
            if not self.has_room(job_id):
                shut |= keys
            elif job.task == task and not keys & shut:
                why = self.value("select queue.why(%s)", job_id)
                raise AssertionError(f"{job_id} waits: {job}: {why}")

    def has_room(self, job_id: int) -> bool:
        for e in self.jobs[job_id].entries:
            limit, rate = self.terms(e.key)
            if self.used(e.key) + min(e.weight, limit) > limit:
                return False
            if self.started(e.key) + min(e.weight, rate) > rate:
                return False
        return True

    @invariant()
    def agrees(self) -> None:
        self.admit()
        rows = self.conn.execute(
            'select key, "limit", rate_limit, used from queue.semaphores'
            " where kind = 'concurrency_key'"
        ).fetchall()
        for key, limit, rate, used in rows:
            assert used == self.used(key), (key, used)
            assert (limit or NONE, rate or NONE) == self.terms(key), (key, self.newest[key])
        assert not self.conn.execute("select * from queue.check()").fetchall()

    def teardown(self) -> None:
        self.late.close()
        self.conn.close()


@pytest.fixture
def machine(server: EmbeddedServer, _base: Any) -> Iterator[type[RuleBasedStateMachine]]:
    with with_databases(Semaphores, server, _base.template_dbname, "semaphores") as made:
        yield made


@pytest.mark.long
def test_no_limit_or_rate_is_exceeded_and_none_idles(machine: type[RuleBasedStateMachine]) -> None:
    short(machine, 40, 40)


@pytest.mark.soak
@pytest.mark.parametrize("n", range(4))
def test_the_same_with_other_choices(machine: type[RuleBasedStateMachine], n: int) -> None:
    thorough(machine, n, steps=100)
