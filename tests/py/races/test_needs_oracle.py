"""Needs against an oracle: a literal reading of section 7 of the contract, without SQL.

The oracle keeps the history of each job and derives every state from it, from scratch, each time.
The queue must agree after every step, fetch exactly the jobs that the oracle calls ready, in order,
and `queue.check()` must stay empty.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Iterator

import psycopg
import pytest
from psycopg import errors

from pgdefer.database.embedded import EmbeddedServer, temporary_server
from support import create_database, install

pytestmark = pytest.mark.client

NUMBERS = itertools.count()
FAILED = {"failed", "cancelled", "held", "upstream_failed"}
FINAL = {"succeeded", "failed", "cancelled"}
STATES = [
    "scheduled",
    "waiting",
    "upstream_failed",
    "blocked",
    "ready",
    "running",
    "held",
    "succeeded",
    "failed",
    "cancelled",
    "deleted after success",
    "deleted",
]
THERE = [state for state in STATES if not state.startswith("deleted")]


class Job:
    """The history of a job."""

    def __init__(self, needs=(), mode="all", failure="block", fixed=None):
        self.needs = list(dict.fromkeys(needs))
        self.mode = mode
        self.failure = failure
        self.fixed = fixed  # a state that does not follow from the needs; None: it does
        self.ignores = False  # its last yield had needs => NULL
        self.left = None  # under any, after a yield: needs not satisfied when the run began
        self.began = {}  # the states of all jobs when the run began
        self.changed = set()  # those whose state has changed since then
        self.is_deleted = False


class Oracle:
    """Section 7, read literally.

    Where it says nothing: a need that a yield names for the first time, and whose state has changed
    since the run began, counts as not satisfied then.
    """

    def __init__(self):
        self.jobs: dict[int, Job] = {}

    def states(self):
        known: dict[int, str] = {}
        return {number: self.state(number, known) for number in self.jobs}

    def state(self, number, known):
        if number not in known:
            job = self.jobs[number]
            known[number] = job.fixed or self.derived(job, known)
        return known[number]

    def visible(self):
        return {n: state for n, state in self.states().items() if not self.jobs[n].is_deleted}

    def delete(self, number):
        """Delete by force: a job that had not succeeded counts as failed."""
        job = self.jobs[number]
        job.fixed = "succeeded" if job.fixed == "succeeded" else "failed"
        job.needs = []
        job.is_deleted = True

    def derived(self, job, known):
        states = {need: self.state(need, known) for need in job.needs}
        good = {need for need in states if self.satisfies(job, states[need])}
        bad = {need for need in states if states[need] in FAILED}
        if not states or job.ignores:
            return "ready"
        if job.mode == "all":
            if good == set(states):
                return "ready"
            return "upstream_failed" if bad and job.failure == "block" else "waiting"
        wanted = set(states) if job.left is None else job.left
        if good & wanted or not wanted:
            return "ready"
        return "upstream_failed" if bad == set(states) and job.failure == "block" else "waiting"

    @staticmethod
    def satisfies(job, state):
        return state == "succeeded" or (job.failure == "proceed" and state in FAILED)

    def claim(self, number):
        job = self.jobs[number]
        job.began = self.states()
        job.changed = set()
        job.left = None
        job.fixed = "running"

    def note_changes(self):
        now = self.states()
        for job in self.jobs.values():
            if job.fixed == "running":
                job.changed |= {n for n, state in job.began.items() if now[n] != state}

    def yield_(self, number, needs):
        """Yield; False if the needs would close a cycle."""
        job = self.jobs[number]
        if needs is not None and self.reaches(needs, number):
            return False
        job.fixed = None
        job.ignores = needs is None
        if needs is not None:
            fresh = {need for need in needs if need not in job.needs}
            job.needs += [need for need in needs if need in fresh]
            job.left = {
                need
                for need in job.needs
                if not self.satisfies(job, job.began.get(need, "new"))
                or (need in fresh and need in job.changed)
            }
        return True

    def reaches(self, needs, number):
        seen, todo = set(), list(needs)
        while todo:
            at = todo.pop()
            if at == number:
                return True
            if at not in seen:
                seen.add(at)
                todo += self.jobs[at].needs
        return False

    def retry(self, number):
        job = self.jobs[number]
        job.fixed = None
        job.ignores = False
        job.left = None


@pytest.fixture(scope="module")
def own_server() -> Iterator[EmbeddedServer]:
    """A server without other users: no other transaction, not even of autovacuum, is in flight."""
    with temporary_server(settings={"autovacuum": "off"}) as running:
        create_database(running, "base")
        install(running, "base")
        yield running


@pytest.fixture
def connection(own_server) -> Iterator[psycopg.Connection]:
    name = f"needs_{next(NUMBERS)}"
    create_database(own_server, name, "base")
    with psycopg.connect(own_server.dsn(name), autocommit=True) as opened:
        yield opened


class Queue:
    """The queue, by a client's calls."""

    def __init__(self, connection):
        self.connection = connection
        self.worker = self.one(
            "select queue.register_worker('oracle', info => '{\"dead_after\": \"1 day\"}')"
        )
        self.claims: dict[int, int] = {}

    def one(self, text, *values):
        row = self.connection.execute(text, values).fetchone()
        return row[0] if row else None

    def defer(self, needs=(), mode="all", failure="block", queue="default", lock=None, **options):
        options = {"needs_mode": mode, "on_need_failure": failure} | options
        return self.one(
            "select queue.defer('t', needs => %s, queue => %s, lock => %s, options => %s)",
            list(needs) or None,
            queue,
            lock,
            json.dumps(options),
        )

    def fetch(self, count=1, queues=None, ids=None):
        rows = self.connection.execute(
            "select id, claim from queue.fetch(%s, %s, %s, %s)",
            [self.worker, queues, count, json.dumps({"ids": ids}) if ids else None],
        ).fetchall()
        self.claims |= dict(rows)
        return [row[0] for row in rows]

    def end(self, number, outcome, **more):
        claim = self.claims.pop(number)
        text = json.dumps([{"id": number, "claim": claim, "outcome": outcome} | more])
        state, error = self.connection.execute(
            "select state, error from queue.finish_many(%s)", [text]
        ).fetchone()
        if error:
            self.claims[number] = claim
        return error or state

    def call(self, text, *values):
        return self.connection.execute(text, values).fetchall()

    def states(self):
        self.call("select * from queue.tick()")
        return dict(self.call("select id, state from queue.jobs"))

    def agree(self, oracle, said):
        oracle.note_changes()
        assert self.states() == oracle.visible(), said
        broken = self.call("select * from queue.check()")
        assert not broken, (said, broken)


def bring_into(queue: Queue, oracle: Oracle, number: int, state: str, helpers: dict) -> None:
    """Bring a ready job of queue `needed` to a state."""
    job = oracle.jobs[number]
    if state.startswith("deleted"):
        if state != "deleted":
            bring_into(queue, oracle, number, "succeeded", helpers)
        queue.call("select * from queue.delete(%s, true)", [number])
        oracle.delete(number)
        return
    if state in {"ready", "held", "cancelled"}:
        if state != "ready":
            queue.call(f"select queue.{'hold' if state == 'held' else 'cancel'}(%s)", number)
            job.fixed = state
        return
    assert queue.fetch(1, ["needed"], [number]) == [number]
    oracle.claim(number)
    match state:
        case "succeeded":
            queue.end(number, "succeeded")
        case "failed":
            queue.end(number, "failed", options={"retryable": False})
        case "scheduled":
            queue.end(number, "failed", options={"retry_in": 3600})
        case "blocked":
            queue.end(number, "failed", options={"retry_in": 0, "lock": "taken"})
        case "waiting" | "upstream_failed":
            need = helpers["pending" if state == "waiting" else "failed"]
            queue.end(number, "retry_later", needs=[need])
            job.needs = [need]
    job.fixed = None if state in {"waiting", "upstream_failed"} else state


def make_helpers(queue: Queue, oracle: Oracle) -> dict:
    """Create jobs that others wait for: an unfinished one, a failed one, one that holds a lock."""
    helpers = {
        "pending": queue.defer(queue="apart"),
        "failed": queue.defer(queue="needed"),
        "locked": queue.defer(queue="needed", lock="taken"),
    }
    for number in helpers.values():
        oracle.jobs[number] = Job()
    bring_into(queue, oracle, helpers["failed"], "failed", helpers)
    queue.fetch(1, ["needed"], [helpers["locked"]])
    oracle.jobs[helpers["locked"]].fixed = "running"
    return helpers


KINDS = list(itertools.product(["all", "any"], ["block", "proceed"]))


def test_every_pair_of_states_at_defer_time(connection):
    queue, oracle = Queue(connection), Oracle()
    helpers = make_helpers(queue, oracle)
    needs = {}
    for state in THERE:
        needs[state] = queue.defer(queue="needed")
        oracle.jobs[needs[state]] = Job()
        bring_into(queue, oracle, needs[state], state, helpers)
    queue.agree(oracle, "needs")
    assert {state: oracle.states()[need] for state, need in needs.items()} == {s: s for s in THERE}
    for mode, failure in KINDS:
        for one, other in itertools.combinations_with_replacement(THERE, 2):
            pair = [needs[one], needs[other]]
            number = queue.defer(pair, mode, failure)
            oracle.jobs[number] = Job(pair, mode, failure)
    queue.agree(oracle, "dependents")
    ready = [number for number, state in oracle.states().items() if state == "ready"]
    expected = [number for number in ready if oracle.jobs[number].needs]
    assert queue.fetch(1000, ["default"]) == expected


@pytest.mark.parametrize("seed", range(3))
def test_every_pair_of_states_in_flight(connection, seed):
    """All pairs again, deferred while every need is ready; the needs then change one by one."""
    queue, oracle = Queue(connection), Oracle()
    helpers = make_helpers(queue, oracle)
    needs = {state: queue.defer(queue="needed") for state in STATES}
    oracle.jobs |= {number: Job() for number in needs.values()}
    for mode, failure in KINDS:
        for one, other in itertools.combinations_with_replacement(STATES, 2):
            pair = [needs[one], needs[other]]
            number = queue.defer(pair, mode, failure)
            oracle.jobs[number] = Job(pair, mode, failure)
    queue.agree(oracle, "at first")
    order = random.Random(seed).sample(STATES, len(STATES))
    for state in order:
        bring_into(queue, oracle, needs[state], state, helpers)
        queue.agree(oracle, f"{state} of {order}")
    # and back: the dependents of finished or held needs wait again
    for state in random.Random(seed).sample(sorted(FINAL), 3):
        queue.call("select * from queue.retry(%s)", [needs[state]])
        oracle.retry(needs[state])
        queue.agree(oracle, f"retry of {state}")
    queue.call("select queue.unhold(%s)", needs["held"])
    oracle.jobs[needs["held"]].fixed = None
    queue.agree(oracle, "unhold")


class Walk:
    """Random calls on random graphs."""

    def __init__(self, connection, seed):
        self.random = random.Random(seed)
        self.queue, self.oracle = Queue(connection), Oracle()

    def some(self, *states):
        found = [n for n, state in self.oracle.visible().items() if state in states]
        return self.random.choice(found) if found else None

    def recent(self):
        return list(self.oracle.visible())[-12:]

    def defer(self):
        number_of_needs = self.random.choice([0, 0, 1, 1, 2, 3, 6])
        known = self.recent()
        needs = self.random.sample(known, min(number_of_needs, len(known)))
        mode = self.random.choice(["all", "any"])
        failure = self.random.choice(["block", "proceed"])
        held = self.random.random() < 0.1
        number = self.queue.defer(needs, mode, failure, held=held, max_progress=None)
        self.oracle.jobs[number] = Job(needs, mode, failure, "held" if held else None)
        return f"defer {number} {mode} {failure} needs {needs} held {held}"

    def fetch(self):
        count = self.random.choice([1, 2, 5])
        ready = sorted(n for n, state in self.oracle.states().items() if state == "ready")
        got = self.queue.fetch(count)
        assert got == ready[:count], (got, ready)
        began = self.oracle.states()
        for number in got:
            self.oracle.claim(number)
            self.oracle.jobs[number].began = began
        return f"fetch {got}"

    def end(self):
        number = self.some("running")
        if number is None:
            return ""
        job = self.oracle.jobs[number]
        kind = self.random.choice(
            ["succeeded", "succeeded", "failed", "again", "released", "aborted"]
        )
        match kind:
            case "succeeded":
                self.queue.end(number, "succeeded")
                job.fixed = "succeeded"
            case "failed":
                self.queue.end(number, "failed", error="e", options={"retryable": False})
                job.fixed = "failed"
            case "again":
                self.queue.end(number, "failed", error="e", options={"retry_in": 0})
                job.fixed = None
            case "released":
                self.queue.end(number, "released")
                job.fixed = None
            case "aborted":
                self.queue.call("select queue.cancel(%s, true)", number)
                self.queue.end(number, "failed", error="e")
                job.fixed = "cancelled"
        return f"{kind} {number}"

    def retry_later(self):
        number = self.some("running")
        if number is None:
            return ""
        known = self.recent()
        some = [self.random.sample(known, min(count, len(known))) for count in (1, 3)]
        needs = self.random.choice([None, [], [], *some])
        # whether that one has failed it all the time, or another does now, can't be distinguished
        doomed = {n for n, s in self.oracle.jobs[number].began.items() if s == "upstream_failed"}
        needs = needs and [need for need in needs if need not in doomed]
        said = self.queue.end(number, "retry_later", needs=needs)
        if not self.oracle.yield_(number, needs):
            assert said == "QJ005", (number, needs)
        else:
            assert said == self.oracle.state(number, {}), (number, needs, said)
        return f"retry_later {number} needs {needs}: {said}"

    def hold(self):
        number = self.some("waiting", "upstream_failed", "ready")
        if number is not None:
            self.queue.call("select queue.hold(%s)", number)
            self.oracle.jobs[number].fixed = "held"
        return f"hold {number}"

    def unhold(self):
        number = self.some("held")
        if number is not None:
            self.queue.call("select queue.unhold(%s)", number)
            self.oracle.jobs[number].fixed = None
        return f"unhold {number}"

    def cancel(self):
        number = self.some("waiting", "upstream_failed", "ready", "held")
        if number is not None:
            self.queue.call("select queue.cancel(%s)", number)
            self.oracle.jobs[number].fixed = "cancelled"
        return f"cancel {number}"

    def retry(self):
        number = self.some("failed", "cancelled", *self.random.sample(["succeeded", "failed"], 1))
        if number is not None:
            rows = self.queue.call("select * from queue.retry(%s, true)", [number])
            assert rows[0][2] is None, rows
            self.oracle.retry(number)
        return f"retry {number}"

    def operate(self):
        number = self.some("waiting", "upstream_failed", "ready", "held", *sorted(FINAL))
        if number is None:
            return ""
        kind = self.random.choice(["fail_jobs", "done", "delete"])
        before = self.oracle.jobs[number].fixed
        more = ", true" if kind == "delete" else ""
        rows = self.queue.call(f"select * from queue.{kind}(%s{more})", [number])
        if kind == "delete":
            self.oracle.delete(number)
        elif kind == "done" and before != "succeeded":
            self.oracle.jobs[number].fixed = "succeeded"
        elif kind == "fail_jobs" and before not in FINAL:
            self.oracle.jobs[number].fixed = "failed"
        else:
            assert rows[0][2] == "QJ003", rows
            return ""
        assert rows[0][2] is None, rows
        return f"{kind} {number}"

    def run(self, steps):
        weights = {
            self.defer: 5,
            self.fetch: 4,
            self.end: 6,
            self.retry_later: 3,
            self.hold: 1,
            self.unhold: 1.5,
            self.cancel: 0.7,
            self.retry: 2,
            self.operate: 1,
        }
        said = []
        for _ in range(steps):
            action = self.random.choices(list(weights), list(weights.values()))[0]
            said.append(action())
            self.queue.agree(self.oracle, "\n".join(said[-60:]))


@pytest.mark.parametrize("seed", range(int(os.environ.get("PGDEFER_NEEDS_WALKS", "6"))))
def test_random_graphs(connection, seed):
    Walk(connection, seed).run(120)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 200))
def test_random_graphs_for_long(connection, seed):
    Walk(connection, seed).run(400)


def test_a_need_named_anew_that_had_ended_before_the_run(connection):
    """Under any it was satisfied when the run began: the job waits for the other need."""
    queue = Queue(connection)
    job, ended = queue.defer(mode="any"), queue.defer()
    queue.fetch(1, ids=[ended])
    queue.end(ended, "succeeded")
    queue.fetch(1, ids=[job])
    pending, meanwhile = queue.defer(), queue.defer()
    queue.end(job, "retry_later", needs=[ended, pending])
    assert queue.states()[job] == "waiting"
    queue.fetch(1, ids=[pending])
    queue.end(pending, "succeeded")
    queue.fetch(1, ids=[job])
    queue.fetch(1, ids=[meanwhile])
    queue.end(meanwhile, "succeeded")
    queue.end(job, "retry_later", needs=[meanwhile, queue.defer()])
    assert queue.states()[job] == "ready", "one that ended during the run is news"


def test_circles_are_refused_with_their_path(connection):
    queue = Queue(connection)
    first = queue.defer()
    second = queue.defer([first])
    third = queue.defer([second])
    queue.fetch()
    with pytest.raises(errors.DatabaseError) as refused:
        queue.call(
            "select queue.retry_later(%s, %s, needs => %s)", first, queue.claims[first], [third]
        )
    assert refused.value.sqlstate == "QJ005"
    assert refused.value.diag.message_detail == f"path: {first} -> {third} -> {second} -> {first}"
