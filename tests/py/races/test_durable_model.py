"""Random calls of durable jobs against a plain model: steps, waits, signals, kills, forks, retries.

After each call the states of all jobs and their steps are compared, and `queue.check()` has to be
empty. A call of a claim that was taken away has to be refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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

from .machines import short, thorough, with_databases

Connection = psycopg.Connection[Any]
NAMES = ["a", "b"]
SIGNALS = ["s", "r"]
EVENTS = ["e", "f"]
FAR = "2999-01-01T00:00:00+00:00"  # when a long sleep ends, as it is shown
MAX_JOBS = 8
MAX_ATTEMPTS = 2  # of a step
OPTIONS = json.dumps({"retry": {"max_attempts": None, "max_crashes": None}})
names, signals, events, a_job = (
    st.sampled_from(NAMES),
    st.sampled_from(SIGNALS),
    st.sampled_from(EVENTS),
    st.integers(0, MAX_JOBS),
)


@dataclasses.dataclass
class Step:
    """A row: the claim that finished or began it, the run that used it last, its place in order."""

    claim: int
    run: int
    order: int
    is_finished: bool = True
    value: Any = None
    failures: int = 0
    has_failed: bool = False


Key = tuple[str, int]


def text(key: Key) -> str:
    return key[0] if key[1] == 1 else f"{key[0]}#{key[1]}"


@dataclasses.dataclass
class Job:
    id: int
    state: str = "ready"
    claim: int = 0
    claims: int = 0
    steps: dict[Key, Step] = dataclasses.field(default_factory=dict)
    inbox: list[tuple[str, Any]] = dataclasses.field(default_factory=list)
    waits: tuple[Key, str, str] | None = None  # the step, signal or event, and its name
    child: int | None = None
    awaits: Key | None = None  # the step that waits for the child
    is_child: bool = False

    def use(self, name: str) -> Key:
        """The use of a name that is meant in this run."""
        rows = sorted((key, step) for key, step in self.steps.items() if key[0] == name)
        for key, step in rows:
            if step.run != self.claim or not step.is_finished:
                return key
        return name, max((key[1] for key, _ in rows), default=0) + 1

    def finished(self) -> dict[str, Any]:
        return {text(key): step.value for key, step in self.steps.items() if step.is_finished}

    def forget(self, key: Key) -> None:
        """Forget a step, and all that finished later or only began."""
        since = self.steps[key]
        self.steps = {
            other: step
            for other, step in self.steps.items()
            if step.claim < since.claim
            or (step.claim == since.claim and step.is_finished and step.order < since.order)
        }

    def reset(self) -> None:
        """Count failures of steps anew; the step that has failed last may run again."""
        last = max(
            ((s.claim, s.order if s.is_finished else 10**9) for s in self.steps.values()),
            default=None,
        )
        for key, step in list(self.steps.items()):
            if not step.is_finished:
                step.failures = 0
            elif step.has_failed and (step.claim, step.order) == last:
                del self.steps[key]


class Machine(RuleBasedStateMachine):
    @staticmethod
    def new_dsn() -> str:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.conn = psycopg.connect(self.new_dsn(), autocommit=True)
        self.conn.execute("set lock_timeout = '10 s'")
        info = '{"dead_after": "1 day"}'
        ((self.worker,),) = self.call("register_worker", "w", None, info)
        self.jobs: dict[int, Job] = {}
        self.events: dict[str, Any] = {}
        self.numbers = itertools.count(1)

    def call(self, function: str, *args: Any) -> list[tuple[Any, ...]]:
        marks = ", ".join(["%s"] * len(args))
        return self.conn.execute(
            f"select * from queue.{function}({marks})".encode(), args
        ).fetchall()

    @contextlib.contextmanager
    def refused(self, sqlstate: str) -> Iterator[None]:
        with pytest.raises(psycopg.Error) as found:
            yield
        assert found.value.sqlstate == sqlstate

    def pick(self, n: int, *states: str) -> Job | None:
        found = [job for job in self.jobs.values() if not states or job.state in states]
        return found[n % len(found)] if found else None

    def claimed(self, n: int) -> Job | None:
        """A running job: if there is none, the next ones are fetched."""
        if not self.pick(n, "running"):
            if not self.jobs:
                self.defer()
            self.fetch()
        return self.pick(n, "running")

    def add(self, id: int) -> Job:
        job = self.jobs[id] = Job(id)
        return job

    def suspend(self, job: Job, state: str) -> None:
        """The claim ends."""
        with self.refused("QJ002"):
            self.call("finish_step", job.id, job.claim, "late")
        job.state = state

    def begin(self, job: Job, name: str) -> Key | None:
        """Ask about a step; return it unless it is finished."""
        key = job.use(name)
        step = job.steps.get(key)
        ((finished, value),) = self.call("begin_step", job.id, job.claim, name)
        if step is not None and step.is_finished:
            assert (finished, value) == (True, step.value)
            step.run = job.claim
            return None
        assert (finished, value) == (False, None)
        if key[1] > 1:
            job.steps[key] = Step(job.claim, job.claim, 0, False, None, self.failures(job, key))
        return key

    def begin_new(self, job: Job, name: str) -> Key:
        """Ask about the uses of a name in their order, up to one that is not finished."""
        while not (key := self.begin(job, name)):
            pass
        return key

    def failures(self, job: Job, key: Key) -> int:
        return job.steps[key].failures if key in job.steps else 0

    def store(self, job: Job, key: Key, value: Any, **more: Any) -> None:
        job.steps[key] = Step(job.claim, job.claim, next(self.numbers), True, value, **more)

    # Jobs

    @rule()
    def defer(self) -> None:
        if len(self.jobs) < MAX_JOBS:
            sql = "select queue.defer('t', options => %s::jsonb)"
            ((id,),) = self.conn.execute(sql, [OPTIONS]).fetchall()
            self.add(id)

    @rule()
    def fetch(self) -> None:
        query = "select id, claim, steps from queue.fetch(%s, null, 50)"
        rows = self.conn.execute(query, [self.worker]).fetchall()
        ready = {job.id for job in self.jobs.values() if job.state == "ready"}
        # Jobs that crashed before are claimed alone, so not all need come at once.
        assert {row[0] for row in rows} <= ready
        assert bool(rows) == bool(ready) or any(j.state == "running" for j in self.jobs.values())
        for id, claim, steps in rows:
            job = self.jobs[id]
            assert claim > job.claim
            assert (steps or {}) == job.finished()
            job.state, job.claim, job.claims = "running", claim, job.claims + 1

    @rule(n=a_job, how=st.sampled_from(["succeed", "fail", "give_up", "release"]))
    def end(self, n: int, how: str) -> None:
        if not (job := self.claimed(n)):
            return
        if how == "succeed":
            self.succeed(job)
        elif how == "release":
            self.call("release", job.id, job.claim)
            self.suspend(job, "ready")
        else:
            options = json.dumps({"retryable": how == "fail"})
            self.call("fail", job.id, job.claim, "no", None, options)
            self.suspend(job, "ready" if how == "fail" else "failed")
            self.wake_parents(job)

    def succeed(self, job: Job) -> None:
        self.call("succeed", job.id, job.claim)
        self.suspend(job, "succeeded")
        self.wake_parents(job)

    def wake_parents(self, child: Job) -> None:
        for job in self.jobs.values():
            if job.state == "awaiting" and job.child == child.id and child.state in FINAL:
                job.state = "ready"

    @rule(n=a_job)
    def kill(self, n: int) -> None:
        """The claim is taken away, in the middle of a step."""
        if job := self.claimed(n):
            self.call("extend", job.id, job.claim, "1 microsecond")
            self.call("reap")
            self.suspend(job, "ready")
            for call in (
                ("finish_step", "a", "0"),
                ("sleep", "a", "2999-01-01"),
                ("fail_step", "a", "e"),
                ("emit", "a", "0"),
                ("wait", "a", "s"),
            ):
                with self.refused("QJ002"):
                    self.call(call[0], job.id, job.claim, *call[1:])

    @rule(n=a_job)
    def cancel(self, n: int) -> None:
        if job := self.pick(n, "ready", "sleeping", "waiting", "awaiting"):
            self.call("cancel", job.id)
            job.state, job.waits = "cancelled", None
            self.wake_parents(job)

    # Steps

    @rule(n=a_job, name=names, is_committed=st.booleans())
    def step(self, n: int, name: str, is_committed: bool) -> None:
        if (job := self.claimed(n)) and (key := self.begin(job, name)):
            if is_committed:
                self.finish(job, key)
                with self.refused("QJ003"):
                    self.call("finish_step", job.id, job.claim, text(key), "0")
            else:
                with self.conn.transaction(force_rollback=True):
                    self.call("finish_step", job.id, job.claim, text(key), "0")

    def finish(self, job: Job, key: Key) -> None:
        value = next(self.numbers)
        self.call("finish_step", job.id, job.claim, text(key), str(value))
        self.store(job, key, value, failures=self.failures(job, key))

    @rule(n=a_job, name=names)
    def fail_step(self, n: int, name: str) -> None:
        if (job := self.claimed(n)) and (key := self.begin(job, name)):
            self.fail_once(job, key, MAX_ATTEMPTS)

    def fail_once(self, job: Job, key: Key, attempts: int) -> None:
        failures = self.failures(job, key) + 1
        options = json.dumps({"retry": {"max_attempts": attempts}})
        found = self.call("fail_step", job.id, job.claim, text(key), "e", None, options)
        if failures < attempts:
            assert found == [("ready",)]
            job.steps[key] = Step(job.claim, job.claim, 0, False, None, failures)
            self.suspend(job, "ready")
        else:
            assert found == [(None,)]
            note = {"__pgdefer__": "step_failed", "value": "e"}
            self.store(job, key, note, failures=failures, has_failed=True)

    @rule(
        n=a_job,
        name=names,
        then=st.sampled_from([*NAMES, None, "fail"]),
        since=st.sampled_from([None, None, None, *NAMES]),
    )
    def give_up(self, n: int, name: str, then: str | None, since: str | None) -> None:
        """A step fails for good, the handler may go on to another one, and the job is retried."""
        if not (job := self.claimed(n)) or job.is_child:
            return
        self.fail_once(job, self.begin_new(job, name), 1)
        if then == "fail":
            self.fail_once(job, self.begin_new(job, NAMES[0]), 1)
        elif then:
            self.finish(job, self.begin_new(job, then))
        self.call("fail", job.id, job.claim, "no", None, '{"retryable": false}')
        self.suspend(job, "failed")
        self.go_back(job, since)

    @rule(n=a_job, name=names, is_long=st.booleans())
    def sleep(self, n: int, name: str, is_long: bool) -> None:
        if (job := self.claimed(n)) and (key := self.begin(job, name)):
            self.call("sleep", job.id, job.claim, name, FAR if is_long else "2001-01-01")
            self.store(job, key, self.value(job, key))
            assert (job.steps[key].value == FAR) == is_long
            self.suspend(job, "sleeping" if is_long else "ready")

    def value(self, job: Job, key: Key) -> Any:
        query = "select value from queue.steps where job_id = %s and name = %s"
        ((value,),) = self.conn.execute(query, [job.id, text(key)]).fetchall()
        return value

    def wake(self, job: Job) -> None:
        """The value of a sleep that was cut short is when it ended."""
        for key, step in job.steps.items():
            if step.value == FAR:
                step.value = self.value(job, key)
                assert step.value < FAR

    @rule(n=a_job, name=names, kind=st.sampled_from(["signal", "event"]), w=st.integers(0, 1))
    def wait(self, n: int, name: str, kind: str, w: int) -> None:
        if (job := self.claimed(n)) and (key := self.begin(job, name)):
            what = (SIGNALS if kind == "signal" else EVENTS)[w]
            both = (what, None) if kind == "signal" else (None, what)
            self.call("wait", job.id, job.claim, name, *both)
            job.steps[key] = Step(job.claim, job.claim, 0, False, None, self.failures(job, key))
            job.waits = (key, kind, what)
            self.suspend(job, "waiting")
            self.deliver(job)

    @rule(n=a_job, name=names, s=signals)
    def wait_no_time(self, n: int, name: str, s: str) -> None:
        """A signal that is there comes first; else the wait has timed out."""
        if (job := self.claimed(n)) and (key := self.begin(job, name)):
            self.call("wait", job.id, job.claim, name, s, None, "0 s")
            self.suspend(job, "ready")
            found = next((item for item in job.inbox if item[0] == s), None)
            if found:
                job.inbox.remove(found)
            self.store(job, key, found[1] if found else None)

    def deliver(self, job: Job) -> None:
        if job.state != "waiting" or job.waits is None:
            return
        key, kind, what = job.waits
        if kind == "event":
            if what not in self.events:
                return
            value = self.events[what]
        else:
            found = next((item for item in job.inbox if item[0] == what), None)
            if found is None:
                return
            job.inbox.remove(found)
            value = found[1]
        begun = job.steps[key]
        job.steps[key] = Step(begun.claim, begun.run, next(self.numbers), True, value)
        job.state, job.waits = "ready", None

    @rule(n=a_job, name=signals)
    def signal(self, n: int, name: str) -> None:
        if job := self.pick(n):
            value = next(self.numbers)
            self.call("signal", job.id, name, str(value))
            job.inbox.append((name, value))
            self.deliver(job)

    @rule(name=events)
    def publish(self, name: str) -> None:
        value = next(self.numbers)
        assert self.call("publish", name, str(value)) == [(name not in self.events,)]
        self.events.setdefault(name, value)
        for job in self.jobs.values():
            self.deliver(job)

    @rule(n=a_job, name=names)
    def call_child(self, n: int, name: str) -> None:
        """Defer a child and wait for it, as two steps: the first one may not run again."""
        if not (job := self.claimed(n)) or len(self.jobs) >= MAX_JOBS:
            return
        if not (key := self.begin(job, name)):
            return
        with self.conn.transaction():
            sql = "select queue.defer('t', options => %s::jsonb)"
            ((id,),) = self.conn.execute(sql, [OPTIONS]).fetchall()
            self.call("finish_step", job.id, job.claim, text(key), str(id))
        self.store(job, key, id)
        self.add(id).is_child = True
        ended = (f"{text(key)} ended", 1)
        self.call("await_jobs", job.id, job.claim, text(ended), [id])
        self.store(job, ended, None)
        job.child, job.awaits = id, ended
        self.suspend(job, "awaiting")

    # Going back

    @rule(n=a_job, name=st.sampled_from([*NAMES, None]))
    def retry(self, n: int, name: str | None) -> None:
        """Of a finished job, or one that waits for a time or a signal."""
        job = self.pick(n, *FINAL, "sleeping", "waiting", "awaiting", "running")
        if job is not None and not job.is_child:
            self.go_back(job, name)

    def go_back(self, job: Job, name: str | None) -> None:
        ((_, _, error),) = self.call("retry", [job.id], False, name)
        since = None if name is None else job.steps.get((name, 1))
        if name is not None and (since is None or not since.is_finished):
            assert error == "QJ009"
            return
        if job.state in ("running", "awaiting"):
            assert error == "QJ003"
            return
        assert error is None
        job.reset()
        if name is not None and (name, 1) in job.steps:
            job.forget((name, 1))
        self.wake(job)
        # a job that was cancelled while it waited for its child waits for it again, unless it has
        # forgotten that step
        if job.awaits not in job.steps:
            job.child = None
        child = self.jobs[job.child] if job.child else None
        is_ready = child is None or child.state in FINAL
        job.state, job.waits = "ready" if is_ready else "awaiting", None

    @precondition(lambda self: len(self.jobs) < MAX_JOBS)
    @rule(n=a_job, name=names)
    def fork(self, n: int, name: str) -> None:
        if not (job := self.pick(n)):
            return
        since = job.steps.get((name, 1))
        if since is None or not since.is_finished:
            with self.refused("QJ009"):
                self.call("fork", job.id, name)
            return
        ((id,),) = self.call("fork", job.id, name)
        copy = self.add(id)
        copy.claim = 0
        copy.steps = {
            key: dataclasses.replace(step)
            for key, step in job.steps.items()
            if step.is_finished and (step.claim, step.order) < (since.claim, since.order)
        }

    # Comparing

    @invariant()
    def agrees(self) -> None:
        self.call("tick")
        rows = self.conn.execute("select id, state from queue.jobs order by id").fetchall()
        assert rows == [(id, SHOWN.get(job.state, job.state)) for id, job in self.jobs.items()]
        steps: dict[int, dict[str, Any]] = {id: {} for id in self.jobs}
        query = "select job_id, name, value from queue.steps"
        for id, name, value in self.conn.execute(query).fetchall():
            steps[id][name] = value
        assert steps == {id: job.finished() for id, job in self.jobs.items()}
        query = "select job_id, name, no, failures from queue.step where finished_at is null and failures > 0"
        assert sorted(self.conn.execute(query).fetchall()) == sorted(
            (id, *key, step.failures)
            for id, job in self.jobs.items()
            for key, step in job.steps.items()
            if not step.is_finished and step.failures
        )
        broken = self.conn.execute("select * from queue.check()").fetchall()
        assert not broken, broken

    def teardown(self) -> None:
        """Whatever waits goes on, and every job comes to its end."""
        try:
            for job in self.jobs.values():
                if job.state == "sleeping":
                    self.call("reschedule", job.id)
                    self.wake(job)
                    job.state = "ready"
                elif job.state == "waiting" and job.waits and job.waits[1] == "signal":
                    self.signal(list(self.jobs).index(job.id), job.waits[2])
            for name in EVENTS:
                self.publish(name)
            for _ in range(3 * MAX_JOBS):
                if all(job.state in FINAL for job in self.jobs.values()):
                    break
                self.fetch()
                for job in list(self.jobs.values()):
                    if job.state == "running":
                        self.succeed(job)
            self.agrees()
            assert {job.state for job in self.jobs.values()} <= set(FINAL)
        finally:
            self.conn.close()


FINAL = ("succeeded", "failed", "cancelled")
# What queue.jobs calls the model's states.
SHOWN = {"sleeping": "scheduled", "awaiting": "waiting"}


@pytest.fixture
def machine(server: EmbeddedServer, _base: Any) -> Iterator[type[RuleBasedStateMachine]]:
    with with_databases(Machine, server, _base.template_dbname, "durable_model") as made:
        yield made


@pytest.mark.long
def test_model(machine: type[RuleBasedStateMachine]) -> None:
    short(machine, examples=10, steps=50)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(5))
def test_model_long(machine: type[RuleBasedStateMachine], number: int) -> None:
    thorough(machine, number)
