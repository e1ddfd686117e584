"""Random calls of the whole SQL API from two connections, against a plain model of the contract.

The model knows jobs and rules, but no gates, lanes or semaphores. Where the contract leaves the choice to
the implementation, the model accepts any allowed choice: the order between queues while limits
apply, the order between shares, `ready` or `blocked` of jobs that compete for a free slot, and which of these are
discarded.

After each step the states of all jobs are compared, and `queue.check()` has to be empty. Calls that
would wait for the other transaction are not made, so every wait is an error: `lock_timeout` ends it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
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

from . import machines
from .machines import short, thorough, with_databases

QUEUES = ["a", "b", "b.limited", "rated"]
PATTERNS = ["a", "b", "b*", "*", None]
LIMITS = {"k1": 1, "k2": 2, "k3": 3}
RATED = "r1"  # a key with a rate in place of a limit
FINAL = ("succeeded", "failed", "cancelled")
FUTURE, PAST = "2999-01-01T00:00:00Z", "2001-01-01T00:00:00Z"
MAX_CRASHES = 3
Connection = psycopg.Connection[Any]


def matches(queue: str, pattern: str | None) -> bool:
    return pattern is None or machines.matches(queue, pattern)


# The model


@dataclasses.dataclass
class Job:
    id: int
    task: str
    args: dict[str, Any]
    queue: str
    priority: int
    own_deadline: str
    lock: str | None
    is_mutex: bool
    keys: list[str]
    discards: bool
    is_later: bool
    needs: list[int]
    any: bool
    proceed: bool
    is_held: bool
    share: str | None
    attempts_allowed: int | None
    backs_off: bool
    key: str | None  # of its queueing lock
    until_finish: bool
    deadline: str = "9999"  # its own, or that of a dependent
    final: str | None = None
    claim: int | None = None
    worker: int | None = None
    last_claim: int = 0
    attempts: int = 0
    failures: int = 0
    crashes: int = 0
    claims: int = 0
    is_aborting: bool = False
    has_turn: bool = False
    is_admitted: bool = False  # it has passed all gates once, so it is not discarded
    waits_for_retry: bool = False
    is_touched: bool = False  # it may have left its place among the ready jobs

    @property
    def holds_key(self) -> bool:
        return self.key is not None and not self.final and (self.until_finish or not self.claims)


class Model:
    """The rules of the contract."""

    def __init__(self) -> None:
        self.jobs: dict[int, Job] = {}
        self.gone: dict[int, bool] = {}  # deleted, and whether they had succeeded
        self.pauses: list[tuple[str | None, str | None, bool]] = []
        self.max_running: dict[str, int] = {}
        self.rate: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        self.key_rate = 3
        self.key_starts = 0
        self.shared: set[tuple[str, int]] = set()  # queues and priorities where shares take turns
        self.replaced: set[int] = set()  # by open transactions

    def standing(self, id: int) -> str:
        """The state of a need."""
        if id in self.gone:
            return "satisfied" if self.gone[id] else "failed"
        states = self.states(self.jobs[id])
        if states == {"succeeded"}:
            return "satisfied"
        return (
            "failed" if states & {"failed", "cancelled", "held", "upstream_failed"} else "pending"
        )

    def needs(self, job: Job) -> str:
        all_standings = [self.standing(id) for id in job.needs]
        standings = ["satisfied" if s == "failed" and job.proceed else s for s in all_standings]
        if not standings:
            return "satisfied"
        if job.any:
            if "satisfied" in standings:
                return "satisfied"
            return "failed" if set(standings) == {"failed"} else "pending"
        if "failed" in standings:
            return "failed"
        return "pending" if "pending" in standings else "satisfied"

    def is_paused(self, job: Job) -> bool:
        for queue, task, is_pause in reversed(self.pauses):
            if task is None and matches(job.queue, queue):
                return is_pause
        return False

    def is_task_paused(self, job: Job) -> bool:
        for queue, task, is_pause in reversed(self.pauses):
            if (task == job.task or (task is None and not is_pause)) and matches(job.queue, queue):
                return is_pause
        return False

    def is_at_slots(self, job: Job) -> bool:
        """Only a slot, or a mutex, can block it."""
        return (
            not job.final
            and job.claim is None
            and not job.is_held
            and self.needs(job) == "satisfied"
            and not job.is_later
            and not self.is_task_paused(job)
            and (job.lock is None or job.is_mutex or job.has_turn)
        )

    def running(self) -> Iterator[Job]:
        return (job for job in self.jobs.values() if job.claim is not None)

    def has_slots(self, job: Job) -> bool:
        if job.lock and any(other.lock == job.lock for other in self.running()):
            return False
        return all(
            self.key_starts < self.key_rate
            if key == RATED
            else sum(key in other.keys for other in self.running()) < LIMITS[key]
            for key in job.keys
        )

    def has_room(self, queue: str) -> bool:
        running = sum(job.queue == queue for job in self.running())
        return running < self.max_running.get(queue, 999) and self.starts.get(
            queue, 0
        ) < self.rate.get(queue, 999)

    def may_start(self, job: Job, *, alone: bool = False) -> bool:
        return (
            self.is_at_slots(job)
            and not self.is_paused(job)
            and self.has_slots(job)
            and self.has_room(job.queue)
            and job.id not in self.replaced
            and (alone or not job.crashes)
        )

    def is_limited(self, job: Job) -> bool:
        """It may have to wait for a slot."""
        return bool(job.keys) or (
            job.lock is not None
            and any(
                other.lock == job.lock and other.is_mutex and not other.final
                for other in self.jobs.values()
            )
        )

    def states(self, job: Job) -> set[str]:
        if job.final:
            return {job.final}
        if job.claim is not None:
            return {"running"}
        if job.is_held:
            return {"held"}
        needs = self.needs(job)
        if needs != "satisfied":
            return {"upstream_failed" if needs == "failed" else "waiting"}
        if job.is_later:
            return {"scheduled"}
        if self.is_task_paused(job):
            return {"ready", "blocked"}
        if job.lock and not job.is_mutex and not job.has_turn:
            return {"blocked"}
        return {"ready", "blocked"} if self.is_limited(job) else {"ready"}

    def give_turns(self) -> None:
        self.note_shares()
        for lock in {job.lock for job in self.jobs.values() if job.lock and not job.final}:
            members = sorted(
                (job for job in self.jobs.values() if job.lock == lock and not job.final),
                key=lambda job: job.id,
            )
            holder = next((job for job in members if job.has_turn), None)
            if holder is not None and holder.claim is None and members[0].id < holder.id:
                holder.has_turn = False
                holder = None
            if holder is None and not members[0].is_mutex:
                members[0].has_turn = True

    def spread(self, job: Job, deadline: str) -> None:
        """Apply a deadline to it and its needs."""
        if not job.final:
            job.deadline = min(job.deadline, deadline)
            self.spread_to_needs(job, deadline)

    def spread_to_needs(self, job: Job, deadline: str) -> None:
        for id in job.needs:
            if id in self.jobs:
                self.spread(self.jobs[id], deadline)

    def goes_straight(self, job: Job) -> bool:
        """It became ready when it was admitted, and has been so since."""
        return not (
            job.is_touched
            or job.claims
            or job.lock
            or job.keys
            or job.needs
            or job.key
            or job.is_later
            or job.is_held
            or job.deadline != "9999"
            or any(task for _, task, _ in self.pauses)
            or any(job.id in other.needs for other in self.jobs.values())
        )

    def end(self, job: Job, final: str) -> None:
        job.final = final
        job.claim = job.worker = None
        job.has_turn = job.is_held = job.is_aborting = job.waits_for_retry = False
        if job.claims:
            job.key = None  # once it has started, the key is not taken again

    def give_back(self, job: Job) -> None:
        job.claim = job.worker = None

    def claimed(self, job: Job, claim: int, worker: int) -> None:
        job.claim, job.worker, job.last_claim = claim, worker, claim
        job.attempts += 1
        job.claims += 1
        job.waits_for_retry = False
        job.is_admitted = True
        self.starts[job.queue] = self.starts.get(job.queue, 0) + 1
        self.key_starts += RATED in job.keys

    def finish(self, job: Job, way: str, options: dict[str, Any]) -> str:
        """End its claim; return the new state, as far as it is reported."""
        if way == "succeeded":
            self.end(job, "succeeded")
        elif job.is_aborting:
            self.end(job, "cancelled")
        elif way == "failed":
            allowed = job.attempts_allowed
            if options.get("retryable") is True:
                allowed = None
            elif allowed is None:
                allowed = None if "retry_in" in options else 1
            if options.get("retryable") is False or (
                allowed is not None and job.failures + 1 >= allowed
            ):
                job.failures += 1
                self.end(job, "failed")
                return "failed"
            job.failures += 1
            self.give_back(job)
            job.is_later = options.get("retry_in", "1 h" if job.backs_off else "0") != "0"
            job.waits_for_retry = job.is_later
            job.queue = options.get("queue", job.queue)
            job.priority = options.get("priority", job.priority)
            lock = options.get("lock", job.lock or "") or None
            if lock != job.lock:
                job.lock, job.has_turn = lock, False
            return "scheduled" if job.is_later else "ready"
        elif way == "retry_later":
            self.give_back(job)
            job.is_later = job.waits_for_retry = options.get("at") is not None
            needs = self.needs(job)
            if needs != "satisfied":
                return "upstream_failed" if needs == "failed" else "waiting"
            return "scheduled" if job.is_later else "ready"
        else:
            job.attempts -= 1
            self.give_back(job)
            return "ready"
        return job.final or ""

    def crash(self, job: Job) -> None:
        job.crashes += 1
        if job.is_aborting:
            self.end(job, "cancelled")
        elif job.crashes >= MAX_CRASHES:
            self.end(job, "failed")
        else:
            self.give_back(job)
            job.is_later = False

    def retry(self, job: Job) -> None:
        job.failures = job.crashes = 0
        job.is_later = job.is_later and not job.claims
        job.waits_for_retry = job.is_aborting = False
        job.final = None

    def note_shares(self) -> None:
        self.shared |= {(job.queue, job.priority) for job in self.jobs.values() if job.share}

    def is_before(self, job: Job, other: Job) -> bool:
        """It certainly has the earlier place in their share: committed before, with a lesser id."""
        if job.share != other.share or job.id >= other.id:
            return False
        order = list(self.jobs)
        return (
            self.goes_straight(job)
            and self.goes_straight(other)
            and order.index(job.id) < order.index(other.id)
        )

    def holder(self, key: str) -> Job | None:
        return next((job for job in self.jobs.values() if job.key == key and job.holds_key), None)

    def unfinished_dependents(self, id: int, without: list[int]) -> bool:
        return any(
            id in job.needs and not job.final and job.id not in without
            for job in self.jobs.values()
        )


class Client:
    """A connection, and the changes of its open transaction."""

    def __init__(self, dsn: str) -> None:
        self.conn: Connection = psycopg.connect(
            dsn, autocommit=True, options="-c lock_timeout=60s -c statement_timeout=300s"
        )
        self.is_open = False
        self.forget()

    def forget(self) -> None:
        self.effects: list[Callable[[], None]] = []
        self.deferred: dict[int, Job] = {}
        self.ended: set[int] = set()
        self.replaced: set[int] = set()
        self.keys: set[str] = set()

    def call(self, function: str, *arguments: Any) -> list[tuple[Any, ...]]:
        """Call a function of schema queue; dicts are passed as JSON."""
        given = ", ".join(f"{name} => %s" for name, _ in arguments)
        values = [json.dumps(v) if isinstance(v, dict) else v for _, v in arguments]
        return self.conn.execute(
            f"select * from queue.{function}({given})".encode(), values
        ).fetchall()


# What is drawn at random

some_queue = st.sampled_from(QUEUES)
priorities = st.sampled_from([0, 0, 0, 5, -1])
a_job = st.integers(0, 40)
jobs_ids = st.lists(a_job, min_size=1, max_size=4)
fetch_sizes = st.sampled_from([1, 1, 2, 5, 50])
clients = st.sampled_from([0, 0, 1])
specs = st.fixed_dictionaries(
    {
        "task": st.sampled_from(["t", "t", "u"]),
        "n": st.integers(0, 99),
        "queue": some_queue,
        "priority": priorities,
        "lock": st.sampled_from([None, None, "l1", "l1", "l2"]),
        "is_mutex": st.sampled_from([False, False, True]),
        "keys": st.sampled_from(
            [[], [], [], ["k1"], ["k2"], ["k1", "k2"], ["k2", "k3"], [RATED], ["k1", RATED]]
        ),
        "share": st.sampled_from([None] * 6 + ["x", "x", "y"]),
        "discards": st.sampled_from([False, False, False, True]),
        "time": st.sampled_from([None, None, None, FUTURE, PAST]),
        "deadline": st.sampled_from([None, None, None, "2990-01-01Z", "2991-01-01Z"]),
        "needs": st.sampled_from([[], [], []]) | st.lists(a_job, max_size=2),
        "any": st.booleans(),
        "proceed": st.booleans(),
        "held": st.sampled_from([False] * 7 + [True]),
        "retry": st.sampled_from(
            [None, None, {"max_attempts": 2}, {"max_attempts": 3, "base": "1 h"}]
        ),
        "key": st.sampled_from([None, None, None, "q1", "q2"]),
        "on_conflict": st.sampled_from(["raise", "ignore", "replace"]),
        "until_finish": st.booleans(),
    }
)
endings = st.sampled_from(
    [
        ("succeeded", {}),
        ("succeeded", {}),
        ("succeeded", {}),
        ("failed", {}),
        ("failed", {"retryable": False}),
        ("failed", {"retryable": True}),
        ("failed", {"retry_in": "1 h"}),
        ("failed", {"retry_in": "0", "queue": "a", "priority": 7}),
        ("failed", {"retry_in": "0", "lock": "l2"}),
        ("failed", {"retry_in": "0", "lock": ""}),
        ("released", {}),
        ("retry_later", {}),
        ("retry_later", {"at": FUTURE}),
    ]
)


class Machine(RuleBasedStateMachine):
    new_dsn: Callable[[], str]

    def __init__(self) -> None:
        super().__init__()
        dsn = type(self).new_dsn()
        self.model = Model()
        self.clients = [Client(dsn), Client(dsn)]
        self.operator = Client(dsn)  # is never in a transaction
        self.workers = [self.register(), self.register()]
        self.must_tick = False
        self.steps = 0
        self.configure("b.limited", "max_running", 1)
        self.configure("rated", "rate", 2)

    def register(self) -> int:
        ((id,),) = self.operator.call(
            "register_worker", ("name", "w"), ("info", {"dead_after": "1 day"})
        )
        return int(id)

    def idle(self, n: int) -> Client:
        """A connection without a transaction, the n-th if that has none."""
        for client in (self.clients[n], self.clients[1 - n]):
            if not client.is_open:
                return client
        return self.operator

    def touched(self) -> set[int]:
        """Jobs that an open transaction has locked: an operator would wait for it."""
        return {id for client in self.clients for id in client.ended | client.replaced}

    def pick(self, n: int) -> Job | None:
        jobs = [job for id, job in self.model.jobs.items() if id not in self.touched()]
        return jobs[-1 - n % len(jobs)] if jobs else None

    def pick_all(self, ns: list[int]) -> list[Job]:
        picked = {job.id: job for n in ns if (job := self.pick(n))}
        return list(picked.values())

    def effect(self, client: Client, effect: Callable[[], None]) -> None:
        """Apply a change now, or at the end of the client's transaction."""
        if client.is_open:
            client.effects.append(effect)
        else:
            effect()
            self.model.give_turns()

    @contextlib.contextmanager
    def refused(self, client: Client, sqlstate: str | None) -> Iterator[None]:
        """The call must be refused with this error, or not at all."""
        if client.is_open:
            client.conn.execute("savepoint s")
        try:
            yield
        except psycopg.Error as error:
            if error.sqlstate != sqlstate:
                raise
            if client.is_open:
                client.conn.execute("rollback to savepoint s")
        else:
            assert sqlstate is None, f"not refused, expected {sqlstate}"

    # Deferring

    def defer_arguments(self, client: Client, spec: dict[str, Any]) -> tuple[dict[str, Any], Job]:
        visible = [*self.model.jobs, *client.deferred]
        needs = sorted({visible[-1 - n % len(visible)] for n in spec["needs"]} if visible else [])
        options = {
            "needs_mode": "any" if spec["any"] else "all",
            "on_need_failure": "proceed" if spec["proceed"] else "block",
            "lock_mode": "mutex" if spec["is_mutex"] else "ordered",
        }
        is_named = len(spec["keys"]) == 1 and spec["keys"] != [RATED]
        if spec["keys"] and not is_named:
            options["concurrency"] = [
                {"key": k, "rate": {"limit": 3, "per": "10 years"}}
                if k == RATED
                else {"key": k, "limit": LIMITS[k]}
                for k in spec["keys"]
            ]
        discards = spec["discards"] and RATED not in spec["keys"]
        if discards:
            options["on_limit"] = "discard"
        if spec["share"]:
            options["share"] = spec["share"]
        if spec["held"]:
            options["held"] = True
        if spec["retry"]:
            options["retry"] = spec["retry"]
        if spec["key"]:
            options["on_conflict"] = spec["on_conflict"]
            options["unique_until"] = "finish" if spec["until_finish"] else "start"
        arguments = {
            "task": spec["task"],
            "args": {"n": spec["n"]},
            "queue": spec["queue"],
            "priority": spec["priority"],
            "lock": spec["lock"],
            "queueing_lock": spec["key"],
            "scheduled_at": spec["time"],
            "deadline": spec["deadline"] if not spec["keys"] and not spec["lock"] else None,
            "needs": needs or None,
            "concurrency_key": spec["keys"][0] if is_named else None,
            "concurrency_limit": LIMITS[spec["keys"][0]] if is_named else None,
            "options": options,
        }
        job = Job(
            id=0,
            task=spec["task"],
            args={"n": spec["n"]},
            queue=spec["queue"],
            priority=spec["priority"],
            own_deadline=arguments["deadline"] or "9999",
            lock=spec["lock"],
            is_mutex=spec["is_mutex"],
            keys=spec["keys"],
            discards=discards and bool(spec["keys"]),
            is_later=spec["time"] == FUTURE,
            needs=needs,
            any=spec["any"],
            proceed=spec["proceed"],
            is_held=spec["held"],
            share=spec["share"],
            attempts_allowed=spec["retry"] and spec["retry"]["max_attempts"],
            backs_off=bool(spec["retry"]) and "base" in spec["retry"],
            key=spec["key"],
            until_finish=spec["until_finish"],
        )
        return arguments, job

    def take(self, client: Client, job: Job, on_conflict: str) -> tuple[str, Job | None]:
        """The result of a defer: new, refused, kept or replaced, and the job that holds its key."""
        if job.key is None:
            return "new", None
        holder = next((own for own in client.deferred.values() if own.key == job.key), None)
        if holder is None:
            holder = self.model.holder(job.key)
            if holder and holder.id in client.ended:
                holder = None
        if holder is None:
            return "new", None
        if on_conflict == "ignore":
            return "kept", holder
        if on_conflict == "replace" and holder.claim is None:
            return "replaced", holder
        return "refused", holder

    def added(self, client: Client, id: int, job: Job, what: str, holder: Job | None) -> None:
        if what == "new":
            job.id = id
            assert id not in self.model.jobs
            if client.is_open:
                client.deferred[id] = job
                client.keys |= {job.key} if job.key else set()

            def appear() -> None:
                self.model.jobs[id] = job
                self.model.spread(job, job.own_deadline)

            self.effect(client, appear)
        elif what == "replaced":
            assert holder
            assert id == holder.id
            if client.is_open:
                client.replaced.add(id)
                self.model.replaced |= {id}
                client.keys.add(holder.key or "")

            def replace() -> None:
                assert holder
                holder.args, holder.priority, holder.is_touched = job.args, job.priority, True
                holder.is_later = job.is_later

            self.effect(client, replace)
        else:
            assert holder
            assert id == holder.id

    def would_wait(self, client: Client, spec: dict[str, Any]) -> bool:
        """The other transaction may take or free its queueing lock."""
        others = [other for other in self.clients if other is not client]
        return any(spec["key"] in other.keys for other in others)

    def admit(self) -> None:
        """Admit all visible jobs, so that later ones come later."""
        self.operator.call("tick")

    @rule(c=clients, spec=specs)
    def defer(self, c: int, spec: dict[str, Any]) -> None:
        client = self.clients[c]
        if self.would_wait(client, spec):
            return
        if not client.is_open:
            self.admit()
        arguments, job = self.defer_arguments(client, spec)
        what, holder = self.take(client, job, spec["on_conflict"])
        with self.refused(client, "QJ004" if what == "refused" else None):
            ((id,),) = client.call("defer", *arguments.items())
            self.added(client, id, job, what, holder)

    @rule(c=clients, drawn=st.lists(specs, min_size=1, max_size=6))
    def defer_many(self, c: int, drawn: list[dict[str, Any]]) -> None:
        client = self.clients[c]
        drawn = [spec | {"key": None} for spec in drawn]
        if not client.is_open:
            self.admit()
        pairs = [self.defer_arguments(client, spec) for spec in drawn]
        ids = client.conn.execute(
            "select * from queue.defer_many(%s)", [json.dumps([a for a, _ in pairs])]
        ).fetchall()
        assert ids == sorted(ids)
        is_open, client.is_open = client.is_open, True
        for (id,), (_, job) in zip(ids, pairs, strict=True):
            self.added(client, id, job, "new", None)
        client.is_open = is_open
        if not is_open:
            self.happen(client)

    @rule(c=clients, n=a_job, queue=st.none() | some_queue)
    def copy(self, c: int, n: int, queue: str | None) -> None:
        client = self.clients[c]
        original = self.pick(n)
        if original is None:
            return
        if not client.is_open:
            self.admit()
        ((id,),) = client.call("copy", ("id", original.id), ("queue", queue))
        copied = dataclasses.replace(
            original,
            queue=queue or original.queue,
            deadline="9999",
            key=None,
            is_later=original.is_later and not original.claims,
            needs=[need for need in original.needs if need not in self.model.gone],
            final=None,
            claim=None,
            worker=None,
            last_claim=0,
            attempts=0,
            failures=0,
            crashes=0,
            claims=0,
            is_aborting=False,
            has_turn=False,
            is_admitted=False,
            waits_for_retry=False,
            is_touched=False,
        )
        self.added(client, id, copied, "new", None)

    # Transactions

    @rule(c=clients)
    def begin(self, c: int) -> None:
        client = self.clients[c]
        if not client.is_open:
            client.conn.execute("begin")
            client.is_open = True

    def happen(self, client: Client) -> None:
        effects = client.effects
        client.forget()
        for effect in effects:
            effect()
        self.model.replaced = {id for other in self.clients for id in other.replaced}
        self.model.give_turns()

    @precondition(lambda self: any(client.is_open for client in self.clients))
    @rule(c=clients, commits=st.sampled_from([True, True, False]))
    def close(self, c: int, commits: bool) -> None:
        client = self.clients[c] if self.clients[c].is_open else self.clients[1 - c]
        if commits:
            self.admit()
        client.conn.execute("commit" if commits else "rollback")
        client.is_open = False
        if not commits:
            client.effects = []
        self.happen(client)

    # Fetching

    @rule(
        c=clients,
        w=st.integers(0, 1),
        queues=st.sampled_from([None, None, None, ["a"], ["b*"], ["rated", "b"], ["*"], ["b*", "a"]]),
        n=fetch_sizes,
        options=st.sampled_from(
            [None, None, None, {"order": "listed"}, {"tasks": ["u"]}, {"tasks": ["u"]},
             {"deadline_within": "2000 years"}, {"ids": [1, 3, 5, 7, 9, 2, 4, 6, 8]}]
        ),
    )  # fmt: skip
    def fetch(
        self, c: int, w: int, queues: list[str] | None, n: int, options: dict[str, Any] | None
    ) -> None:
        client = self.idle(c)
        ready = self.ready()
        rows = client.conn.execute(
            "select id, claim, task, args, queue, priority, lock, attempt"
            " from queue.fetch(%s, %s, %s, %s)",
            [self.workers[w], queues, n, options and json.dumps(options)],
        ).fetchall()
        self.fetched(rows, self.workers[w], queues, n, options or {}, ready)

    def ready(self) -> set[int]:
        rows = self.operator.conn.execute("select id from queue.jobs where state = 'ready'")
        return {id for (id,) in rows}

    def fetched(  # noqa: PLR0917
        self,
        rows: list[tuple[Any, ...]],
        worker: int,
        queues: list[str] | None,
        n: int,
        options: dict[str, Any],
        ready: set[int],
    ) -> None:
        model = self.model
        model.note_shares()
        held = [job for job in model.running() if job.worker == worker]
        # a job that has crashed comes alone, to a worker that runs nothing, as far as is known
        alone = any(row[0] in model.jobs and model.jobs[row[0]].crashes for row in rows)
        if alone:
            n = 1
            assert not [job for job in held if job.id not in self.touched()], (
                f"{rows} beside {held}"
            )
        elif any(job.crashes for job in held if job.id not in self.touched()):
            assert not rows, f"{rows} beside {held}"
        assert len(rows) <= n
        may_stand_apart = held and any(job.crashes for job in model.jobs.values())

        def places(job: Job) -> int:
            listed = queues or ["*"]
            return next((i for i, q in enumerate(listed) if matches(job.queue, q)), -1)

        def startable() -> list[Job]:
            return [
                job
                for job in model.jobs.values()
                if model.may_start(job, alone=alone)
                and bool(job.crashes) == alone
                and places(job) >= 0
                and ("tasks" not in options or job.task in options["tasks"])
                and ("ids" not in options or job.id in options["ids"])
                and ("deadline_within" not in options or job.deadline != "9999")
            ]

        def rank(job: Job) -> tuple[int, int]:
            is_listed = options.get("order") == "listed" and not alone
            return (places(job) if is_listed else 0, -job.priority)

        first: dict[tuple[str, int], int] = {}
        candidates = startable()
        for job in sorted(candidates, key=lambda job: (job.deadline, job.id)):
            first.setdefault((job.queue, job.priority), job.id)
        has_deadlines = any(job.deadline != "9999" for job in candidates)
        is_plain = (
            not model.replaced
            and not has_deadlines
            and not model.shared
            and not any(
                model.is_limited(job) or job.queue in (*model.rate, *model.max_running)
                for job in model.jobs.values()
                if not job.final
            )
        )
        is_chosen = options.keys() & {"tasks", "ids", "deadline_within"}
        for id, claim, task, args, queue, priority, lock, attempt in rows:
            candidates = startable()
            job = model.jobs.get(id)
            assert job, f"{id} was fetched and never committed"
            assert job in candidates, f"{job} must not start: {self.explain(job)}"
            # jobs that compete for a slot come in order once they are ready
            candidates = [
                other
                for other in candidates
                if other is job or other.id in ready or not model.is_limited(other)
            ]
            if not is_chosen:
                best = min(rank(other) for other in candidates)
                higher = [other for other in candidates if rank(other) < rank(job)]
                assert not higher, f"{job} before {higher}"
                same = [
                    other
                    for other in candidates
                    if other.queue == job.queue and other.priority == job.priority
                ]
                if (job.queue, job.priority) in model.shared:
                    earlier = [other for other in same if model.is_before(other, job)]
                    assert not earlier, f"{job} before {earlier} of its share"
                else:
                    nearest = min(same, key=lambda other: (other.deadline, other.id))
                    assert job is nearest, f"{job} before {nearest}"
                if is_plain:
                    oldest = min(
                        first[other.queue, other.priority]
                        for other in candidates
                        if rank(other) == best
                    )
                    assert first[job.queue, job.priority] == oldest, f"{job} before {oldest}'s"
            assert claim > job.last_claim
            assert (task, args, queue, priority, lock) == (
                job.task,
                job.args,
                job.queue,
                job.priority,
                job.lock,
            )
            model.claimed(job, claim, worker)
            assert attempt == job.attempts
        if len(rows) < n and not may_stand_apart:
            assert not (left := startable()), f"{left} were not fetched"

    def explain(self, job: Job) -> str:
        model = self.model
        return (
            f"at slots {model.is_at_slots(job)}, slots {model.has_slots(job)}, "
            f"room {model.has_room(job.queue)}, paused {model.is_paused(job)}, "
            f"replaced {job.id in model.replaced}"
        )

    @rule(c=clients)
    def fetch_as_nobody(self, c: int) -> None:
        client = self.idle(c)
        with self.refused(client, "QJ007"):
            client.call("fetch", ("worker", 0))

    # Finishing

    def claims(self) -> list[Job]:
        taken = self.touched()
        return [job for job in self.model.running() if job.id not in taken]

    @precondition(lambda self: any(self.model.running()))
    @rule(c=clients, n=a_job, ending=endings)
    def finish(self, c: int, n: int, ending: tuple[str, dict[str, Any]]) -> None:
        client = self.clients[c]
        jobs = self.claims()
        if not jobs:
            return
        job = jobs[n % len(jobs)]
        way, options = ending
        if way == "retry_later" and job.any:
            return
        function = {"succeeded": "succeed", "failed": "fail", "released": "release"}.get(way, way)
        given: list[tuple[str, Any]] = [("id", job.id), ("claim", job.claim)]
        if way == "failed":
            given += [("error", "e"), ("options", options)]
        elif way == "retry_later":
            given += options.items()
        ((state,),) = client.call(function, *given)
        if client.is_open:
            client.ended.add(job.id)
            client.keys |= {job.key} if job.holds_key and job.key else set()
        # its needs may change until the transaction ends
        is_unsure = client.is_open and way == "retry_later" and job.needs

        def end() -> None:
            expected = self.model.finish(job, way, options)
            assert is_unsure or state in ("", None, expected), f"{state} for {expected}"
            self.must_tick = True

        self.effect(client, end)

    @precondition(lambda self: any(self.model.running()))
    @rule(
        c=clients,
        drawn=st.lists(st.tuples(a_job, endings), min_size=1, max_size=5),
        fetches=st.booleans(),
        n=fetch_sizes,
    )
    def finish_many(
        self, c: int, drawn: list[tuple[int, tuple[str, dict[str, Any]]]], fetches: bool, n: int
    ) -> None:
        client, model = self.idle(c), self.model
        jobs = self.claims()
        chosen = {jobs[n % len(jobs)].id: ending for n, ending in drawn} if jobs else {}
        outcomes = [{"id": 10**9, "claim": 1, "outcome": "succeeded"}]
        expected: dict[int, tuple[str | None, str | None]] = {10**9: (None, "QJ002")}
        for id, (way, options) in chosen.items():
            job = self.model.jobs[id]
            if way == "retry_later" and job.any:
                continue
            outcome = {"id": id, "claim": job.claim, "outcome": way}
            outcome |= {"options": options} if way == "failed" else options
            outcomes += [outcome, outcome | {"claim": (job.claim or 0) - 1}]
            expected[id] = (self.model.finish(job, way, options), None)
        self.model.give_turns()
        worker = self.workers[0]
        if fetches:
            rows = client.conn.execute(
                "select id, claim, task, args, queue, priority, lock, attempt, error"
                " from queue.finish_and_fetch(%s, %s, null, %s)",
                [worker, json.dumps(outcomes), n],
            ).fetchall()
            refused = [(row[0], row[-1]) for row in rows if row[-1]]
            assert sorted(refused) == sorted(
                [(10**9, "QJ002")] + [(id, "QJ002") for id in expected if id != 10**9]
            )
            self.decide(self.found())  # a discarded job may have had the turn, and passed it on
            self.fetched([row[:-1] for row in rows if not row[-1]], worker, None, n, {}, set())
        else:
            rows = client.conn.execute(
                "select id, state, error from queue.finish_many(%s)", [json.dumps(outcomes)]
            ).fetchall()
            told = {id: (state, error) for id, state, error in rows if error is None}
            for id, (way, _) in chosen.items():
                # its needs may end in the same call, before it or after
                job = model.jobs[id]
                if way == "retry_later" and id in told and told[id][0] in model.states(job):
                    expected[id] = told[id]
            assert told == {id: both for id, both in expected.items() if id != 10**9}
            assert len(rows) == len(outcomes)

    @rule(c=clients, n=a_job)
    def finish_late(self, c: int, n: int) -> None:
        """A claim that is no longer the current one is refused."""
        client = self.clients[c]
        if job := self.pick(n):
            claim = job.last_claim if job.claim is None else job.last_claim - 1
            for call in ("succeed", "release", "fail"):
                with self.refused(client, "QJ002"):
                    error = [("error", "e")] if call == "fail" else []
                    client.call(call, ("id", job.id), ("claim", claim), *error)

    # Operating

    @rule(c=clients, n=a_job, abort=st.booleans())
    def cancel(self, c: int, n: int, abort: bool) -> None:
        if (job := self.pick(n)) is None:
            return
        client = self.idle(c)
        refused = job.final or (job.claim is not None and not abort)
        with self.refused(client, "QJ003" if refused else None):
            ((state,),) = client.call("cancel", ("id", job.id), ("abort", abort))
            if job.claim is None:
                assert state == "cancelled"
                self.model.end(job, "cancelled")
            else:
                assert state == "running"
                job.is_aborting = True
            self.model.give_turns()

    @rule(c=clients, n=a_job, what=st.sampled_from(["hold", "hold", "unhold"]))
    def hold(self, c: int, n: int, what: str) -> None:
        if (job := self.pick(n)) is None:
            return
        client = self.idle(c)
        is_over = bool(job.final) or job.claim is not None
        refused = not job.is_held if what == "unhold" else is_over
        with self.refused(client, "QJ003" if refused else None):
            client.call(what, ("id", job.id))
            job.is_held, job.is_touched = what == "hold", True

    @rule(c=clients, n=a_job, later=st.booleans())
    def reschedule(self, c: int, n: int, later: bool) -> None:
        if (job := self.pick(n)) is None:
            return
        client = self.idle(c)
        refused = job.final or job.claim is not None
        with self.refused(client, "QJ003" if refused else None):
            client.call("reschedule", ("id", job.id), ("at", FUTURE if later else None))
            job.is_later, job.is_touched = later, True
            job.waits_for_retry = job.waits_for_retry and later

    @rule(c=clients, n=a_job, value=st.integers(100, 199))
    def set_args(self, c: int, n: int, value: int) -> None:
        if (job := self.pick(n)) is None:
            return
        client = self.idle(c)
        refused = job.claim is not None or job.final == "succeeded"
        with self.refused(client, "QJ003" if refused else None):
            client.call("set_args", ("id", job.id), ("args", {"n": value}))
            job.args, job.is_touched = {"n": value}, True

    def told(
        self, client: Client, function: str, jobs: list[Job], *more: Any
    ) -> dict[int, str | None]:
        """Call a function on many ids, one of them unknown; return the errors by id."""
        rows = client.call(function, ("ids", [job.id for job in jobs] + [10**9]), *more)
        assert [row[0] for row in rows] == [job.id for job in jobs] + [10**9]
        assert rows[-1][2] == "QJ001"
        return {id: error for id, _, error in rows[:-1]}

    @rule(
        c=clients,
        ns=jobs_ids,
        what=st.sampled_from([
            "move", "set_priority", "set_deadline", "retry", "retry", "done", "fail_jobs"]),
        queue=some_queue,
        priority=priorities,
        deadline=st.sampled_from([None, "2980-01-01Z", "2990-01-01Z", "2995-01-01Z"]),
        force=st.booleans(),
    )  # fmt: skip
    def operate(  # noqa: PLR0917
        self,
        c: int,
        ns: list[int],
        what: str,
        queue: str,
        priority: int,
        deadline: str | None,
        force: bool,
    ) -> None:
        client, model = self.idle(c), self.model
        jobs = self.pick_all(ns)
        if what == "retry":
            at_stake = {key for other in self.clients for key in other.keys}
            jobs = [job for job in jobs if not (job.final and job.key in at_stake)]
        given: dict[str, Any] = {
            "move": [("queue", queue)],
            "set_priority": [("priority", priority)],
            "set_deadline": [("at", deadline)],
            "retry": [("force", force)],
        }
        errors = self.told(client, what, jobs, *given.get(what, []))
        for job in sorted(jobs, key=lambda job: job.id):
            is_running, is_taken = job.claim is not None, False
            match what:
                case "move":
                    refused = is_running
                case "set_priority" | "set_deadline":
                    refused = False
                case "retry":
                    waits = job.waits_for_retry and model.states(job) == {"scheduled"}
                    refused = not (job.final or waits or (is_running and force))
                    is_taken = bool(job.final and job.key and model.holder(job.key))
                case "done":
                    refused = job.final == "succeeded"
                case _:
                    refused = bool(job.final)
            if what == "retry" and refused and job.claims and model.states(job) == {"scheduled"}:
                refused = errors[job.id] is not None  # waits after its start, for a retry or not
            expected = "QJ004" if is_taken else "QJ003" if refused else None
            assert errors[job.id] == expected, f"{what}: {job}"
            if expected:
                continue
            job.is_touched = True
            match what:
                case "move":
                    job.queue = queue
                case "set_priority":
                    job.priority = priority
                case "set_deadline":
                    job.deadline = deadline or "9999"
                case "retry":
                    if is_running:
                        model.give_back(job)
                        job.is_later = False
                    model.retry(job)
                case "done":
                    model.end(job, "succeeded")
                case _:
                    job.failures += is_running
                    model.end(job, "failed")
        if what == "set_deadline" and deadline:
            for job in jobs:
                model.spread_to_needs(job, deadline)
        model.give_turns()

    @rule(c=clients, ns=jobs_ids, force=st.booleans())
    def delete(self, c: int, ns: list[int], force: bool) -> None:
        client, model = self.idle(c), self.model
        jobs = self.pick_all(ns)
        open_needs = {
            id for other in self.clients for own in other.deferred.values() for id in own.needs
        }
        jobs = [job for job in jobs if job.id not in open_needs]
        errors = self.told(client, "delete", jobs, ("force", force))
        going = {job.id for job in jobs if force or job.claim is None}
        while not force:
            kept = {id for id in going if model.unfinished_dependents(id, list(going))}
            if not kept:
                break
            going -= kept
        for job in jobs:
            assert errors[job.id] == (None if job.id in going else "QJ003"), f"{job}"
        for id in going:
            model.gone[id] = model.jobs.pop(id).final == "succeeded"
        model.give_turns()

    @rule(
        c=clients,
        pattern=st.sampled_from(PATTERNS),
        task=st.sampled_from([None, None, "t", "u"]),
        is_pause=st.sampled_from([True, False, False]),
        until=st.sampled_from([None, FUTURE]),
    )
    def pause(
        self, c: int, pattern: str | None, task: str | None, is_pause: bool, until: str | None
    ) -> None:
        client = self.idle(c)
        self.admit()
        self.compare()  # some may be discarded only now
        given = [("queue", pattern), ("task", task)] + ([("until", until)] if is_pause else [])
        ((n,),) = client.call("pause" if is_pause else "resume", *given)
        self.model.pauses.append((pattern, task, is_pause))
        self.compare()  # jobs that it releases may be discarded
        assert n == sum(
            matches(job.queue, pattern) and task in (None, job.task)
            for job in self.model.jobs.values()
            if not job.final and job.claim is None
        )

    @rule(
        queue=st.sampled_from(["b.limited", "rated", "a"]),
        what=st.sampled_from(["max_running", "max_running", "rate"]),
        n=st.sampled_from([1, 2, 4, None]),
    )
    def configure_queue(self, queue: str, what: str, n: int | None) -> None:
        if what == "rate":
            if queue != "rated":
                return
            # a queue that was not rated has not counted: it starts with its rate and only gets more
            n = self.model.rate["rated"] + 2
        self.configure(queue, what, n)

    @rule(more=st.sampled_from([1, 2, 5]))
    def configure_key(self, more: int) -> None:
        # starts before a key had a rate do not count: it has one from its first job, and only gets more
        self.model.key_rate += more
        self.rate_key(self.model.key_rate)

    def rate_key(self, n: int) -> None:
        rate = {"rate": {"limit": n, "per": "10 years"}}
        self.operator.call("configure_key", ("pattern", "r*"), ("options", rate))

    @rule(share=st.sampled_from(["x", "y", "*"]), weight=st.sampled_from([None, 0.5, 3]))
    def configure_share(self, share: str, weight: float | None) -> None:
        self.operator.call("configure_share", ("pattern", share), ("options", {"weight": weight}))

    def configure(self, queue: str, what: str, n: int | None) -> None:
        limits = self.model.max_running if what == "max_running" else self.model.rate
        value = n if what == "max_running" else {"limit": n, "per": "10 years"}
        self.operator.call("configure_queue", ("name", queue), ("options", {what: value}))
        limits.pop(queue, None)
        if n is not None:
            limits[queue] = n

    # Workers

    @precondition(lambda self: any(self.model.running()))
    @rule(c=clients, n=a_job)
    def crash(self, c: int, n: int) -> None:
        """Its own lease ends."""
        client = self.idle(c)
        if jobs := self.claims():
            job = jobs[n % len(jobs)]
            client.call("extend", ("id", job.id), ("claim", job.claim), ("lease", "1 microsecond"))
            client.call("reap")
            self.model.crash(job)
            self.model.give_turns()

    @rule(c=clients, w=st.integers(0, 1))
    def deregister(self, c: int, w: int) -> None:
        worker = self.workers[w]
        claims = [job for job in self.model.running() if job.worker == worker]
        if any(job.id in self.touched() for job in claims):
            return
        client = self.idle(c)
        ((n,),) = client.call("deregister_worker", ("worker", worker))
        assert n == len(claims)
        for job in claims:
            self.model.finish(job, "released", {})
        self.model.give_turns()
        with self.refused(client, "QJ007"):
            client.call("heartbeat", ("worker", worker))
        self.workers[w] = self.register()

    # Comparing

    @invariant()
    def agrees(self) -> None:
        self.steps += 1
        is_undecided = any(
            job.discards and not job.is_admitted and self.model.is_at_slots(job)
            for job in self.model.jobs.values()
        )
        if self.must_tick or is_undecided or self.steps % 3:
            self.operator.call("tick")
            self.compare()
            self.must_tick = False
        else:
            # undecided jobs are read from the admitted ones
            self.must_tick = True
        broken = self.operator.conn.execute("select * from queue.check()").fetchall()
        assert not broken, broken

    def found(self) -> dict[int, tuple[Any, ...]]:
        rows = self.operator.conn.execute(
            "select id, state, reason, task, queue, priority, args, lock, claim, attempts, failures,"
            " crashes from queue.jobs order by id"
        ).fetchall()
        return {row[0]: row for row in rows}

    def compare(self) -> None:
        found = self.found()
        assert found.keys() == self.model.jobs.keys()
        self.decide(found)
        for id, state, _, *rest in found.values():
            job = self.model.jobs[id]
            expected = self.model.states(job)
            assert state in expected, f"{job} is {state}, expected {expected}"
            assert rest == [
                job.task,
                job.queue,
                job.priority,
                job.args,
                job.lock,
                job.claim,
                job.attempts,
                job.failures,
                job.crashes,
            ], f"{job} is {rest}"

    def decide(self, found: dict[int, tuple[Any, ...]]) -> None:
        """Of jobs that are discarded if no slot is free: those that were."""
        model = self.model
        for id, job in sorted(model.jobs.items()):
            if job.is_admitted or job.final or not model.is_at_slots(job):
                continue
            if job.discards and found[id][1:3] == ("cancelled", "limit"):
                assert any(
                    sum(
                        key in other.keys
                        for other in model.jobs.values()
                        if other is not job and not other.final
                    )
                    >= LIMITS[key]
                    for key in job.keys
                ) or (job.lock and model.is_limited(job)), (
                    f"{job} was discarded though a slot is free"
                )
                model.end(job, "cancelled")
                model.give_turns()
                self.decide(found)  # the turn may have passed to one with a smaller id
                return
            job.is_admitted = True

    # The end

    def teardown(self) -> None:
        try:
            self.drain()
        finally:
            for client in (*self.clients, self.operator):
                client.conn.close()

    def drain(self) -> None:
        """Release everything: nothing may be stuck."""
        for client in self.clients:
            if client.is_open:
                client.conn.execute("rollback")
                client.is_open = False
                client.effects = []
                self.happen(client)
        call, model = self.operator.call, self.model
        call("resume")
        model.pauses.append((None, None, False))
        self.compare()  # jobs that it releases may be discarded before the next call blocks them again
        for queue in QUEUES:
            call(
                "configure_queue", ("name", queue), ("options", {"max_running": None, "rate": None})
            )
        model.rate, model.max_running = {}, {}
        model.key_rate = 10**6
        self.rate_key(model.key_rate)
        for job in model.jobs.values():
            if job.is_held:
                call("unhold", ("id", job.id))
                job.is_held = False
                self.compare()
        call("tick")
        self.compare()
        for job in model.jobs.values():
            if job.is_later and not job.final:
                call("reschedule", ("id", job.id))
                job.is_later = False
        for _ in itertools.count():
            call("tick")
            self.compare()
            ready = self.ready()
            rows = self.operator.conn.execute(
                "select id, claim, task, args, queue, priority, lock, attempt"
                " from queue.fetch(%s, null, 50)",
                [self.workers[0]],
            ).fetchall()
            self.fetched(rows, self.workers[0], None, 50, {}, ready)
            running = list(model.running())
            if not running:
                break
            for job in running:
                call("succeed", ("id", job.id), ("claim", job.claim))
                model.finish(job, "succeeded", {})
                model.give_turns()
        # dependents of a failed job remain, and jobs that wait behind them at their lock
        left = [job for job in model.jobs.values() if not job.final]
        doomed = [job for job in left if model.needs(job) != "satisfied"]
        for job in left:
            assert job in doomed or any(other.lock == job.lock for other in doomed), job
        broken = self.operator.conn.execute("select * from queue.check()").fetchall()
        assert not broken, broken


@pytest.fixture
def machine(server: EmbeddedServer, _base: Any) -> Iterator[type[RuleBasedStateMachine]]:
    with with_databases(Machine, server, _base.template_dbname, "model") as made:
        yield made


@pytest.mark.long
def test_model(machine: type[RuleBasedStateMachine]) -> None:
    short(machine, examples=8, steps=30)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(10))
def test_model_long(machine: type[RuleBasedStateMachine], number: int) -> None:
    thorough(machine, number)
