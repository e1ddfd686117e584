"""A storm from outside: restricted roles, an owner who is no superuser, and a ledger that only the clients write.

Producers (savepoints, rollbacks, REPEATABLE READ, defer_many, two-phase commits), workers (each way to fetch and to
finish, in a transaction of the handler's too), clients that freeze with a fetch unread or a transaction open, and an
operator use only public functions of the queue. Each records a call before it sends it, and the answer afterwards. The
ledger is only appended to, and judged at the end. The order of these records decides what counts as an error: a claim is
certain from its answer on, until a call was sent that may end it.

The seed decides the actions of each client, not how they interleave. After an error the folder named in the message has
the ledger and all tables.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import random
import select
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgdefer.database.embedded import EmbeddedServer
from pgdefer.database.install import install

from . import storms
from .machines import matches
from .storms import PATIENCE, Connection

NEVER = float("inf")
FREEZE = 3.0  # s
PRODUCERS, WORKERS = 3, 4
DEAD_AFTER = 1.0
BACKLOG = 200  # unfinished jobs, at which producers wait
MAX_RUNNING = 2
RATE, PER = 5, 0.25
QUEUES = ["a", "b", "a.limited", "b.rated"]
FAT = "b.fat"  # its jobs' args are too large for a socket to hold
LOCKS = {f"{mode} {n}": mode for mode in ("ordered", "mutex", "mixed") for n in range(3)}
LIMITS = {f"key {n}": n for n in range(1, 4)}
FINAL = {"succeeded", "failed", "cancelled"}
ROLES = {"web": "producer", "hand": "worker", "oncall": "operator"}
RUNNING_ENDS = {"cancel", "delete", "done", "fail_jobs", "move", "retry"}  # may end a claim


@dataclasses.dataclass(eq=False)
class Claim:
    id: int
    claim: int
    queue: str
    sent: float  # the fetch
    got: float  # the answer
    serial: int
    may_end: float = NEVER
    starts_at: float | None = None  # by the database's clock, of the rated queue

    def ends(self, at: float) -> None:
        self.may_end = min(self.may_end, at)


@dataclasses.dataclass(eq=False)
class Job:
    id: int
    queue: str
    lock: str | None = None
    is_mutex: bool = False
    keys: tuple[str, ...] = ()
    discards: bool = False
    expires_at: float = NEVER
    revived: float = NEVER  # when a retry by force was sent, which lifts an expiry that is past
    needs: tuple[int, ...] = ()
    commit_sent: float = NEVER
    committed: float = NEVER
    may_end: float = NEVER  # for good
    may_succeed: float = NEVER
    is_done: bool = False  # an answer said that it succeeded
    may_be_gone: bool = False
    touched: list[tuple[float, float, str]] = dataclasses.field(default_factory=list)
    claims: list[Claim] = dataclasses.field(default_factory=list)


class Ledger(storms.Ledger):
    """Records of calls and answers; nothing in it comes from the tables."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[Any, ...]] = []
        self.jobs: dict[int, Job] = {}
        self.rolled_back: set[int] = set()  # ids
        self.void: set[int] = set()  # serials of args that were rolled back
        self.claims: list[Claim] = []
        self.pauses: list[tuple[float, float, str]] = []
        self.effects: set[tuple[int, int]] = set()

    def note(self, *what: Any) -> None:
        self.notes.append((time.time(), threading.current_thread().name, *what))

    def fault(self, text: str) -> None:
        self.note("fault", text)
        super().fault(text)

    def lines(self) -> Iterable[str]:
        return [json.dumps(note, default=str) for note in list(self.notes)]

    def claimed(self, claims: list[Claim]) -> None:
        with self.mutex:
            for claim in claims:
                self.note("claimed", claim.id, claim.claim, claim.queue, claim.sent)
                self.claims.append(claim)
                if claim.id not in self.jobs:
                    self.fault(f"{claim.id} runs, and no commit of it was sent")
                else:
                    self.jobs[claim.id].claims.append(claim)
        self.counts["claims"] += len(claims)


class Judge:
    """Errors that the ledger alone shows."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.fault = ledger.fault

    def judge(self) -> None:
        for job in self.ledger.jobs.values():
            job.claims.sort(key=lambda claim: claim.claim)
            for sent, got, call in job.touched:
                if call in RUNNING_ENDS:
                    for claim in job.claims:
                        if claim.sent < got:
                            claim.ends(max(sent, claim.sent))
            self.judge_job(job)
        self.judge_locks()
        self.judge_limits()
        self.judge_rate()

    def judge_job(self, job: Job) -> None:
        for one, other in itertools.pairwise(job.claims):
            if other.got < one.may_end:
                self.fault(f"{job.id}: {other} began beside {one}")
        for claim in job.claims:
            if claim.got < job.commit_sent:
                self.fault(f"{claim} began before its commit")
            if claim.id in self.ledger.rolled_back:
                self.fault(f"{claim} was rolled back")
            if claim.serial in self.ledger.void:
                self.fault(f"{claim} has args that were rolled back")
            if job.expires_at < claim.sent < job.revived:
                self.fault(f"{claim} began after it had expired")
            for need in job.needs:
                if self.ledger.jobs[need].may_succeed > claim.got:
                    self.fault(f"{claim} needs {need}, which had not succeeded")
            for since, until, pattern in self.ledger.pauses:
                if since < claim.sent and claim.got < until and matches(claim.queue, pattern):
                    self.fault(f"{claim} began while {pattern} was paused")
            held = [touch for touch in job.touched if touch[2] == "hold" and touch[1] < claim.sent]
            if held and not any(
                sent > held[-1][0] and sent < claim.got for sent, _, _ in job.touched
            ):
                self.fault(f"{claim} began while it was held")

    def judge_locks(self) -> None:
        by_lock: dict[str, list[Job]] = collections.defaultdict(list)
        for job in self.ledger.jobs.values():
            if job.lock:
                by_lock[job.lock].append(job)
        for lock, jobs in by_lock.items():
            claims = sorted((claim for job in jobs for claim in job.claims), key=lambda c: c.got)
            for claim in claims:
                beside = next(
                    (c for c in claims if c.id != claim.id and c.got <= claim.got < c.may_end), None
                )
                if beside:
                    self.fault(f"{claim} has {lock} beside {beside}")
                if self.ledger.jobs[claim.id].is_mutex:
                    continue
                commit = self.ledger.jobs[claim.id].commit_sent
                for job in jobs:
                    if (
                        job.id < claim.id
                        and job.committed < commit
                        and claim.got < min(job.may_end, job.expires_at)
                        and not job.discards
                    ):
                        self.fault(f"{claim} overtook {job} at {lock}")

    def judge_limits(self) -> None:
        groups: dict[tuple[str, int], list[Claim]] = collections.defaultdict(list)
        for claim in self.ledger.claims:
            for key in self.ledger.jobs[claim.id].keys if claim.id in self.ledger.jobs else ():
                groups[key, LIMITS[key]].append(claim)
            if claim.queue == "a.limited":
                groups[claim.queue, MAX_RUNNING].append(claim)
        for (name, limit), claims in groups.items():
            changes = sorted(
                (at, change)
                for claim in claims
                if claim.got < claim.may_end
                for at, change in ((claim.got, 1), (claim.may_end, -1))
            )
            most = max(itertools.accumulate(change for _, change in changes), default=0)
            if most > limit:
                self.fault(f"{most} claims at once of {name}")
            self.ledger.counts[f"most of {name}"] = most

    def judge_rate(self) -> None:
        starts = sorted(claim.starts_at for claim in self.ledger.claims if claim.starts_at)
        for first, last in zip(starts, starts[RATE:], strict=False):
            if last - first < PER:
                self.fault(f"{RATE + 1} starts within {last - first} s")
        self.ledger.counts["rated"] = len(starts)


class Storm(storms.Storm):
    ledger: Ledger

    def __init__(self, dsn: str, seed: int, seconds: float) -> None:
        super().__init__(dsn, seed, seconds, Ledger())
        self.serials = itertools.count(1)
        self.rated = 0
        self.prepared: list[tuple[float, str, bool, list[Job], list[int]]] = []

    def run(self) -> None:
        with self.connect("storm_owner") as owner:
            for queue, options in {
                "a.limited": {"max_running": MAX_RUNNING},
                "b.rated": {"rate": {"limit": RATE, "per": PER}},
            }.items():
                owner.execute("select queue.configure_queue(%s, %s)", (queue, json.dumps(options)))
            first = [self.start(self.produce, n, "web") for n in range(PRODUCERS)]
            first += [self.start(self.operate, 0, "oncall")]
            concluding = self.start(self.conclude, 0, "web")
            others = [self.start(self.work, n, "hand") for n in range(WORKERS)]
            others += [
                self.start(client, 0, "hand")
                for client in (self.freeze_unread, self.idle, self.tick)
            ]
            others += [self.start(self.watch, 0, "storm_owner")]
            for thread in first:
                thread.join()
            self.is_over.set()
            concluding.join()
            self.end(owner, others)
            if not self.ledger.faults:
                Judge(self.ledger).judge()
                self.inspect(owner)

    def call(self, conn: Connection, query: str, *arguments: Any) -> list[Any]:
        return conn.execute(query, arguments).fetchall()

    # Producers

    def produce(self, conn: Connection, r: random.Random, n: int) -> None:
        end = time.monotonic() + self.seconds
        own: list[int] = []
        while self.goes_on(end) and not self.is_over.is_set():
            way = r.random()
            rolls_back = r.random() < 0.15
            # a transaction that notifies can't be prepared
            is_prepared = way > 0.85 and len(self.prepared) < 6
            jobs: list[Job] = []
            serials: list[int] = []
            conn.execute(f"set pgdefer.notify = {'off' if is_prepared else 'on'}")
            repeatable = r.random() < 0.15
            conn.execute(
                f"begin isolation level {'repeatable read' if repeatable else 'read committed'}"
            )
            try:
                self.defer_some(conn, r, own, jobs, serials)
            except psycopg.errors.SerializationFailure:
                assert repeatable
                conn.execute("rollback")
                self.rolled_back(jobs, serials)
                self.ledger.counts["40001"] += 1
                continue
            if is_prepared:
                name = f"storm {n} {next(self.serials)}"
                self.register(jobs)  # from its commit on, others may send a replacement of it
                conn.execute(f"prepare transaction '{name}'")
                self.prepared.append(
                    (time.monotonic() + r.random(), name, rolls_back, jobs, serials)
                )
                self.ledger.counts["prepared"] += 1
            elif rolls_back:
                if r.random() < 0.3:
                    time.sleep(r.random() * 0.3)
                conn.execute("rollback")
                self.rolled_back(jobs, serials)
            else:
                if r.random() < 0.05:
                    time.sleep(r.random() * 0.8)
                self.commit(conn, "commit", jobs)
                own = (own + [job.id for job in jobs])[-20:]
            time.sleep(r.random() * 0.03)
            while self.backlog() > BACKLOG and not self.is_over.is_set():
                time.sleep(0.02)

    def backlog(self) -> int:
        with self.ledger.mutex:
            return sum(job.may_end == NEVER for job in self.ledger.jobs.values())

    def conclude(self, conn: Connection, r: random.Random, n: int) -> None:
        """Commit transactions that others have prepared, or roll them back; their authors may wait for their keys."""
        while not self.is_over.is_set() or self.prepared:
            for item in [item for item in self.prepared if item[0] < time.monotonic()]:
                self.end_prepared(conn, item)
                self.prepared.remove(item)
            time.sleep(0.01)

    def end_prepared(
        self, conn: Connection, item: tuple[float, str, bool, list[Job], list[int]]
    ) -> None:
        _, name, rolls_back, jobs, serials = item
        if rolls_back:
            conn.execute(f"rollback prepared '{name}'")
            self.rolled_back(jobs, serials)
        else:
            self.commit(conn, f"commit prepared '{name}'", jobs)

    def register(self, jobs: list[Job]) -> None:
        with self.ledger.mutex:
            for job in jobs:
                self.ledger.jobs[job.id] = job

    def commit(self, conn: Connection, statement: str, jobs: list[Job]) -> None:
        for job in jobs:
            job.commit_sent = time.time()
        self.register(jobs)
        self.ledger.note(statement, [job.id for job in jobs])
        conn.execute(statement)
        now = time.time()
        for job in jobs:
            job.committed = now
        self.ledger.counts["deferred"] += len(jobs)

    def rolled_back(self, jobs: list[Job], serials: list[int]) -> None:
        with self.ledger.mutex:
            self.ledger.note("rolled back", [job.id for job in jobs], serials)
            self.ledger.rolled_back |= {job.id for job in jobs}
            self.ledger.void |= set(serials)
            for job in jobs:
                self.ledger.jobs.pop(job.id, None)
        self.ledger.counts["rolled back"] += len(jobs)

    def defer_some(
        self,
        conn: Connection,
        r: random.Random,
        own: list[int],
        jobs: list[Job],
        serials: list[int],
    ) -> None:
        has_key = False
        if r.random() < 0.1:
            pairs = [self.spec(r) for _ in range(r.choice([20, 50]))]
            for spec, _ in pairs:
                serials.append(spec["args"]["n"])
            rows = conn.execute("select queue.defer_many(%s)", [json.dumps([s for s, _ in pairs])])
            jobs += [Job(id, **kept) for (id,), (_, kept) in zip(rows, pairs, strict=True)]
            return
        for _ in range(r.choice([1, 1, 2, 4])):
            spec, kept = self.spec(r)
            if own and r.random() < 0.1:
                needs = r.sample(own, min(len(own), r.choice([1, 2])))
                spec["needs"] = needs
                mode, failure = r.choice(["all", "any"]), r.choice(["block", "proceed"])
                spec["options"] |= {"needs_mode": mode, "on_need_failure": failure}
                if (mode, failure) == ("all", "block"):
                    kept["needs"] = tuple(needs)
            if not has_key and r.random() < 0.15:
                # at most one per transaction: they wait for each other, as keys do
                has_key = True
                spec["queueing_lock"] = f"q{r.randrange(4)}"
                spec["options"]["unique_until"] = "start"
                spec["options"]["on_conflict"] = r.choice(["replace", "replace", "ignore", "raise"])
            serial = spec["args"]["n"]
            undoes = r.random() < 0.15
            conn.execute("savepoint s")
            try:
                ((before,),) = conn.execute(
                    "select max(id) from (values (queue.defer('high', '{\"n\": 0}'))) v (id)"
                )
                conn.execute("rollback to savepoint s")  # an id that no job gets
                ((id,),) = conn.execute("select queue.defer_many(%s)", [json.dumps([spec])])
            except psycopg.Error as error:
                if error.sqlstate not in {"QJ001", "QJ004"}:
                    raise
                conn.execute("rollback to savepoint s")
                self.ledger.counts[str(error.sqlstate)] += 1
                continue
            is_new = id > before and id not in self.ledger.jobs
            if undoes:
                conn.execute("rollback to savepoint s")
                self.rolled_back([Job(id, **kept)] if is_new else [], [serial])
                continue
            serials.append(serial)
            if is_new and id not in {job.id for job in jobs}:
                jobs.append(Job(id, **kept))
            else:
                self.ledger.counts["ignored or replaced"] += 1

    def spec(self, r: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
        """A job in the form of defer_many, and its entry in the ledger."""
        queue = r.choices([*QUEUES, FAT], [5, 5, 1, 1, 0.4])[0]
        if queue == "b.rated" and self.rated > RATE / PER / 3 * (time.monotonic() - self.started):
            queue = "b"
        self.rated += queue == "b.rated"
        options: dict[str, Any] = {}
        args: dict[str, Any] = {"n": next(self.serials)}
        if queue == FAT:
            args["fat"] = "x" * 400_000
        spec: dict[str, Any] = {
            "task": r.choice(["t", "u"]),
            "args": args,
            "queue": queue,
            "priority": r.choice([0, 0, 0, 1, -3, 5]),
            "options": options,
        }
        kept: dict[str, Any] = {"queue": queue}
        if r.random() < 0.5:
            lock = r.choice(list(LOCKS))
            mode = LOCKS[lock] if LOCKS[lock] != "mixed" else r.choice(["ordered", "mutex"])
            spec["lock"] = lock
            options["lock_mode"] = mode
            kept |= {"lock": lock, "is_mutex": mode == "mutex"}
        if r.random() < 0.4:
            keys = r.sample(list(LIMITS), r.choice([1, 1, 2, 3]))
            options["concurrency"] = [{"key": key, "limit": LIMITS[key]} for key in keys]
            kept["keys"] = tuple(keys)
            if r.random() < 0.1:
                options["on_limit"] = "discard"
                kept["discards"] = True
        if r.random() < 0.1:
            options["delay"] = r.random() * 0.3
        if r.random() < 0.05:
            spec["deadline"] = f"2090-01-01T00:00:{r.randrange(60):02}Z"
        if r.random() < 0.05:
            at = time.time() + r.random() * 0.5
            kept["expires_at"] = at
            whole, part = divmod(int(at * 1e6), 10**6)
            utc = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(whole))
            options["expires_at"] = f"{utc}.{part:06}Z"
        return spec, kept

    # The operator

    def operate(self, conn: Connection, r: random.Random, n: int) -> None:
        end = time.monotonic() + self.seconds
        while time.monotonic() < end and not self.is_over.wait(r.random() * 0.06):
            ids = self.some_jobs(r)
            way = r.choice(
                "pause task prune cancel cancel hold unhold reschedule many many many".split()
            )
            if way == "pause":
                pattern = r.choice(["a", "b", "a*", "b.*", "*"])
                self.call(conn, "select queue.pause(%s)", pattern)
                since = time.time()
                self.is_over.wait(r.random() * 0.15)
                self.ledger.pauses.append((since, time.time(), pattern))
                self.call(conn, "select queue.resume(%s)", pattern)
            elif way == "task":
                self.call(conn, "select queue.pause(task => 'u')")
                self.is_over.wait(r.random() * 0.05)
                self.call(conn, "select queue.resume(task => 'u')")
            elif way == "prune":
                ((pruned,),) = self.call(conn, "select queue.prune(50, 'succeeded', '0')")
                self.ledger.counts["pruned"] += pruned
                with self.ledger.mutex:
                    for job in self.ledger.jobs.values():
                        job.may_be_gone |= job.may_succeed < NEVER
            elif way == "many" and ids:
                call = r.choice("retry move delete done fail_jobs set_priority".split())
                more: list[Any] = {
                    "retry": [r.random() < 0.3],
                    "move": [r.choice(QUEUES[:3]), r.random() < 0.3],
                    "delete": [r.random() < 0.3],
                    "set_priority": [r.randint(-3, 5)],
                }.get(call, [])
                some = r.sample(ids, min(len(ids), r.randint(1, 5)))
                self.operation(conn, call, some, more)
            elif ids:
                more = [r.random() < 0.3] if way == "cancel" else []
                self.operation(conn, way, [r.choice(ids)], more)

    def operation(self, conn: Connection, call: str, ids: list[int], more: list[Any]) -> None:
        """Call one function on many ids, or on one; first record the claims that it may end."""
        ledger = self.ledger
        sent = time.time()
        ledger.note(call, ids, more)
        touches = {}
        for id in ids:
            job = ledger.jobs[id]
            touches[id] = len(job.touched)
            job.touched.append((sent, NEVER, call))
            if call in {"cancel", "delete", "done", "fail_jobs"}:
                job.may_end = min(job.may_end, sent)
            if call == "done":
                job.may_succeed = min(job.may_succeed, sent)
            job.may_be_gone |= call == "delete"
        marks = ", ".join(["%s"] * (1 + len(more)))
        if call in {"cancel", "hold", "unhold", "reschedule"}:
            try:
                rows = self.call(conn, f"select queue.{call}({marks})", ids[0], *more)
                answers = {ids[0]: (rows[0][0], None)}
            except psycopg.Error as error:
                if error.sqlstate not in {"QJ001", "QJ003"}:
                    raise
                answers = {ids[0]: (None, error.sqlstate)}
        else:
            rows = self.call(
                conn, f"select id, outcome, error from queue.{call}({marks})", ids, *more
            )
            answers = {id: (outcome, error) for id, outcome, error in rows}
            if not {error for _, error in answers.values()} <= {None, "QJ001", "QJ003", "QJ004"}:
                ledger.fault(f"{call}: {answers}")
        for id, (_, error) in answers.items():
            job = ledger.jobs[id]
            # refused: it has changed nothing, although its record stays
            job.touched[touches[id]] = (sent, time.time(), f"{call} refused" if error else call)
            ledger.counts[f"{call} refused" if error else call] += 1
            if call == "retry" and more == [True] and job.expires_at < time.time() and not error:
                job.revived = min(job.revived, sent)
        ledger.note("answered", answers)

    def some_jobs(self, r: random.Random) -> list[int]:
        with self.ledger.mutex:
            return [job.id for job in self.ledger.jobs.values() if job.committed < time.time()][
                -150:
            ]

    def tick(self, conn: Connection, r: random.Random, n: int) -> None:
        while not self.is_drained.wait(0.1):
            self.call(conn, "select * from queue.tick()")

    def watch(self, conn: Connection, r: random.Random, n: int) -> None:
        while not self.is_drained.wait(0.5):
            if found := self.call(conn, "select * from queue.check()"):
                self.ledger.fault(f"check: {found[:10]}")
                return

    # Workers

    def work(self, conn: Connection, r: random.Random, n: int) -> None:
        queues = [None, ["a*", "b*"], ["b*", "a.*"], ["a", "b", "b.rated"]][n % 4]
        with contextlib.closing(self.connect("storm_owner")) as owner:
            while not self.is_drained.is_set():
                with contextlib.closing(self.connect("hand")) as mine:
                    Worker(self, mine, owner, r, queues).live()

    def freeze_unread(self, conn: Connection, r: random.Random, n: int) -> None:
        """Send a fetch whose answer exceeds the socket's buffer, and read it late."""
        while not self.is_over.wait(FREEZE * (0.5 + 2 * r.random())):
            with contextlib.closing(self.connect("hand")) as mine:
                worker = Worker(self, mine, mine, r, [FAT])
                worker.register(r.choice([DEAD_AFTER, 60]))
                pgconn = mine.pgconn
                sent = time.time()
                query = f"select id, claim, queue, args ->> 'n', args from queue.fetch({worker.id}, '{{{FAT}}}', 10)"
                pgconn.send_query(query.encode())
                pgconn.flush()
                self.is_over.wait(FREEZE)
                rows = []
                while True:
                    while pgconn.is_busy():
                        select.select([pgconn.socket], [], [], 1)
                        pgconn.consume_input()
                    result = pgconn.get_result()
                    if result is None:
                        break
                    if result.error_message:
                        self.ledger.counts["frozen and ended"] += 1
                    values = [
                        [result.get_value(row, column) for column in range(4)]
                        for row in range(result.ntuples)
                    ]
                    rows += [
                        (int(id), int(claim), queue.decode(), int(serial))
                        for id, claim, queue, serial in values
                        if id and claim and queue and serial
                    ]
                if mine.closed or pgconn.status != psycopg.pq.ConnStatus.OK:
                    continue
                worker.take(rows, sent)
                self.ledger.counts["frozen"] += len(rows)
                if time.time() > worker.beat + worker.dead_after:
                    for claim in worker.claims:
                        claim.ends(worker.beat + worker.dead_after)
                    if r.random() < 0.5:
                        worker.dies()
                        continue
                worker.finish_all()
                worker.deregister()

    def idle(self, conn: Connection, r: random.Random, n: int) -> None:
        """Leave a transaction open after a tick or a fetch."""
        while not self.is_over.wait(FREEZE * (1 + 2 * r.random())):
            with contextlib.closing(self.connect("hand")) as mine:
                worker = Worker(self, mine, mine, r, None)
                worker.register(60)
                call = r.choice(
                    [
                        "select * from queue.tick()",
                        f"select * from queue.fetch({worker.id}, null, 3)",
                    ]
                )
                self.ledger.note("idles after", call)
                try:
                    mine.execute("begin")
                    mine.execute(call)
                    self.is_over.wait(FREEZE)
                    mine.execute("rollback")
                    worker.deregister()
                except psycopg.OperationalError:  # the server has ended it
                    self.ledger.counts["idle and ended"] += 1
                self.ledger.counts["idle"] += 1

    # The end

    def drain(self, conn: Connection) -> None:
        """Release everything, and wait until all jobs have ended."""
        conn.execute("select queue.resume(), queue.resume(task => 'u')")
        best, since = None, time.monotonic()
        changed = since
        left = sql.SQL(
            "select id, state, reason from queue.jobs where not state = any(%s) order by id"
        )
        while not self.ledger.faults:
            rows = conn.execute(left, [list(FINAL)]).fetchall()
            if not rows:
                return
            for id, state, _ in rows:
                if state == "held":
                    self.operation(conn, "unhold", [id], [])
            if len(rows) != best:
                best, since = len(rows), time.monotonic()
                changed = since
            elif time.monotonic() > since + 1:
                for id, state, _ in rows:
                    if state == "upstream_failed":
                        self.operation(conn, "cancel", [id], [False])
                since += 1
            if time.monotonic() > changed + PATIENCE:
                why = conn.execute("select queue.why(%s)", [rows[0][0]]).fetchone()
                self.ledger.fault(f"stuck with {len(rows)} jobs: {rows[:10]}: {why}")
                return
            time.sleep(0.05)

    def inspect(self, conn: Connection) -> None:
        """Compare the ledger with the database's state at the end."""
        ledger = self.ledger
        if found := conn.execute("select * from queue.check()").fetchall():
            ledger.fault(f"check: {found[:20]}")
        states = dict(conn.execute("select id, state from queue.jobs").fetchall())
        for job in ledger.jobs.values():
            state = states.pop(job.id, None)
            if state is None and not job.may_be_gone:
                ledger.fault(f"{job} is lost")
            elif job.is_done and state not in {None, "succeeded"} and not job.touched:
                ledger.fault(f"{job} had succeeded, and is {state}")
            elif state == "succeeded" and job.may_succeed == NEVER:
                ledger.fault(f"{job} has succeeded, and nobody said so")
            elif state == "cancelled" and not (
                job.may_end < NEVER or job.discards or job.expires_at < NEVER
            ):
                ledger.fault(f"{job} was cancelled by nobody")
        if states:
            ledger.fault(f"{list(states.items())[:20]}: no commit of these was sent")
        effects = conn.execute("select id, claim from effect").fetchall()
        if sorted(effects) != sorted(ledger.effects):
            ledger.fault(f"effects: {sorted(set(effects) ^ ledger.effects)}, {len(effects)}")
        for (
            table
        ) in "active_job waiting lock_member pending_settlement queueing_lock expiry lease".split():
            if rows := conn.execute(f"select to_jsonb(t) from queue.{table} t").fetchall():
                ledger.fault(f"left in {table}: {rows[:10]}")
        if rows := conn.execute("select * from queue.semaphore where used <> 0").fetchall():
            ledger.fault(f"slots left: {rows}")


class Worker:
    """One registration, and its claims."""

    def __init__(
        self,
        storm: Storm,
        conn: Connection,
        owner: Connection,
        r: random.Random,
        queues: list[str] | None,
    ) -> None:
        self.storm, self.conn, self.owner, self.r, self.queues = storm, conn, owner, r, queues
        self.ledger = storm.ledger
        self.claims: list[Claim] = []
        self.id = 0
        self.dead_after = 60.0
        self.beat = 0.0

    def call(self, query: str, *arguments: Any) -> list[Any]:
        return self.storm.call(self.conn, query, *arguments)

    def register(self, dead_after: float) -> None:
        self.dead_after = dead_after
        self.beat = time.time()
        info = json.dumps({"dead_after": dead_after})
        ((self.id,),) = self.call("select queue.register_worker('w', %s, %s)", self.queues, info)
        self.ledger.note("registered", self.id, dead_after)

    def deregister(self) -> None:
        for claim in self.claims:
            claim.ends(time.time())
        self.ledger.note("deregisters", self.id)
        self.call("select queue.deregister_worker(%s)", self.id)

    def dies(self) -> None:
        """From now on, or before, others may have its claims."""
        self.ledger.note("dies", self.id, [claim.id for claim in self.claims])
        for claim in self.claims:
            claim.ends(self.beat + self.dead_after)
            # the third crash may be the last
            job = self.ledger.jobs[claim.id]
            job.may_end = min(job.may_end, claim.may_end)
        self.ledger.counts["crashed"] += len(self.claims)
        self.conn.close()

    def live(self) -> None:
        r = self.r
        self.register(DEAD_AFTER if r.random() < 0.5 else 60)
        until = time.time() + 0.3 + r.random() * 4
        try:
            while not self.storm.is_drained.is_set():
                if time.time() > until and not self.storm.is_over.is_set():
                    # workers with a long dead_after must not die: nobody would notice for a minute
                    if self.dead_after == DEAD_AFTER and r.random() < 0.6:
                        return self.dies()
                    return self.deregister()
                if time.time() > self.beat + 0.2:
                    now = time.time()
                    self.call("select * from queue.heartbeat(%s)", self.id)
                    self.beat = now
                self.fetch()
                if not self.claims:
                    time.sleep(0.002 + r.random() * 0.01)
                for claim in list(self.claims):
                    if claim in self.claims and r.random() < 0.7:
                        self.finish_alone(claim)
                if r.random() < 0.5:
                    self.finish_all()
            self.finish_all()
            self.deregister()
        except psycopg.Error as error:
            if error.sqlstate != "QJ007" or time.time() < self.beat + self.dead_after:
                raise
            self.dies()

    def fetch(self) -> None:
        r = self.r
        n = r.choice([1, 1, 3, 10])
        options: dict[str, Any] = {}
        way = r.random()
        if way < 0.5:
            options = {"order": "listed"}
        elif way < 0.6:
            options = {"tasks": ["t"]}
        elif way < 0.65 and (ids := self.storm.some_jobs(r)):
            options = {"ids": r.sample(ids, min(3, len(ids)))}
        given = (self.id, self.queues, n, json.dumps(options) if options else None)
        query = "select id, claim, queue, (args ->> 'n')::bigint from queue.fetch(%s, %s, %s, %s)"
        sent = time.time()
        if r.random() < 0.1:
            self.conn.execute("begin")
            rows = self.call(query, *given)
            time.sleep(r.random() * 0.05)
            self.conn.execute("rollback")
            self.ledger.counts["given up"] += len(rows)
        elif r.random() < 0.5:
            self.take(self.call(query, *given), sent)
        else:
            self.finish_all(given)

    def take(self, rows: list[Any], sent: float) -> None:
        now = time.time()
        claims = [Claim(id, claim, queue, sent, now, serial) for id, claim, queue, serial in rows]
        for claim in claims:
            if claim.queue == "b.rated":
                at = self.owner.execute(
                    "select extract(epoch from v.claimed_at)::float8 from queue.active_job v where v.id = %s and v.claim = %s",
                    [claim.id, claim.claim],
                ).fetchone()
                claim.starts_at = at[0] if at else None
        self.claims += claims
        self.ledger.claimed(claims)

    def outcome(self, claim: Claim) -> dict[str, Any]:
        """Choose how a claim ends, and record it before it is sent."""
        r = self.r
        way = r.random()
        outcome: dict[str, Any] = {"id": claim.id, "claim": claim.claim, "outcome": "succeeded"}
        if way > 0.96:
            outcome["outcome"] = "released"
        elif way > 0.9:
            outcome |= {"outcome": "failed", "options": {"retry_in": r.random() * 0.1}}
        elif way > 0.87:
            outcome |= {"outcome": "failed", "options": {"retryable": False}}
        elif way > 0.83:
            outcome["outcome"] = "retry_later"
        now = time.time()
        job = self.ledger.jobs[claim.id]
        claim.ends(now)
        if outcome["outcome"] == "succeeded":
            job.may_succeed = min(job.may_succeed, now)
        if outcome["outcome"] != "released":  # one told to abort ends for good
            job.may_end = min(job.may_end, now)
        self.ledger.note("ends", outcome)
        return outcome

    def finish_all(self, fetch: tuple[Any, ...] | None = None) -> None:
        """End all claims in one call, which may also fetch."""
        claims, self.claims = self.claims, []
        before = {claim: claim.may_end for claim in claims}
        outcomes = [self.outcome(claim) for claim in claims]
        sent = time.time()
        if fetch is None:
            rows = self.call(
                "select id, claim, state, error from queue.finish_many(%s)", json.dumps(outcomes)
            )
            refused = {(id, claim): error for id, claim, _, error in rows if error}
        else:
            worker, queues, n, options = fetch
            try:
                rows = self.call(
                    "select id, claim, queue, (args ->> 'n')::bigint, error from queue.finish_and_fetch(%s, %s, %s, %s, %s)",
                    worker,
                    json.dumps(outcomes),
                    queues,
                    n,
                    options,
                )
            except psycopg.Error:
                self.claims = claims  # nothing was ended: the claims end with this worker
                for claim in claims:
                    claim.may_end = before[claim]
                raise
            refused = {(row[0], row[1]): row[4] for row in rows if row[4]}
            self.take([row[:4] for row in rows if not row[4]], sent)
        for claim, outcome in zip(claims, outcomes, strict=True):
            self.answered(claim, outcome, refused.get((claim.id, claim.claim)), before[claim])

    def answered(
        self, claim: Claim, outcome: dict[str, Any], error: str | None, before: float
    ) -> None:
        job = self.ledger.jobs[claim.id]
        if error is None:
            job.is_done |= outcome["outcome"] == "succeeded"
            if any(other.claim > claim.claim and other.got < claim.may_end for other in job.claims):
                self.ledger.fault(f"an outcome of {claim} was taken after another claim")
            return
        self.ledger.note("refused", claim.id, claim.claim, error)
        self.ledger.counts[f"refused {error}"] += 1
        is_dead = time.time() > self.beat + self.dead_after
        if not is_dead and not any(call in RUNNING_ENDS for _, _, call in job.touched):
            self.ledger.fault(f"an outcome of {claim} was refused: {error}")
        if is_dead:
            claim.ends(self.beat + self.dead_after)

    def finish_alone(self, claim: Claim) -> None:
        """End one claim in a separate call, mostly in a transaction that also does something else."""
        r = self.r
        way = r.random()
        if way < 0.3:
            return
        if way < 0.4:
            with contextlib.suppress(psycopg.Error):
                self.call("select queue.extend(%s, %s, '1 minute')", claim.id, claim.claim)
            # its own lease outlives the worker
            self.finish_all()
            return
        rolls_back, is_prepared = way < 0.55, way > 0.92
        job = self.ledger.jobs[claim.id]
        before = claim.may_end
        if not rolls_back:
            claim.ends(time.time())
            job.may_end = min(job.may_end, claim.may_end)
            job.may_succeed = min(job.may_succeed, claim.may_end)
            self.claims.remove(claim)
            self.ledger.note("succeeds", claim.id, claim.claim, is_prepared)
        self.conn.execute(f"set pgdefer.notify = {'off' if is_prepared else 'on'}")
        self.conn.execute("begin")
        try:
            self.conn.execute("insert into effect values (%s, %s)", [claim.id, claim.claim])
            if r.random() < 0.3:
                self.conn.execute("savepoint s")
                self.call("select queue.succeed(%s, %s)", claim.id, claim.claim)
                self.conn.execute("rollback to savepoint s")
            self.call("select queue.succeed(%s, %s)", claim.id, claim.claim)
        except psycopg.Error as error:
            self.conn.execute("rollback")
            if error.sqlstate not in {"QJ001", "QJ002"}:
                raise
            if rolls_back:
                self.claims.remove(claim)
            self.answered(claim, {"outcome": "succeeded"}, error.sqlstate, before)
            return
        time.sleep(r.random() * 0.03)
        if rolls_back:
            self.conn.execute("rollback")
            return
        if is_prepared:
            name = f"hand {claim.id} {claim.claim}"
            self.conn.execute(f"prepare transaction '{name}'")
            time.sleep(r.random() * 0.2)
            self.conn.execute(f"commit prepared '{name}'")
        else:
            self.conn.execute("commit")
        self.ledger.effects.add((claim.id, claim.claim))
        self.answered(claim, {"outcome": "succeeded"}, None, before)


# A database whose owner has no right except CREATE


@pytest.fixture
def owned(blank_dsn: str, server: EmbeddedServer) -> Iterator[str]:
    database = sql.Identifier(str(conninfo_to_dict(blank_dsn)["dbname"]))
    roles = ["storm_owner", *ROLES]
    with psycopg.connect(blank_dsn, autocommit=True) as superuser:
        for role in roles:
            superuser.execute(sql.SQL("create role {} login").format(sql.Identifier(role)))
        superuser.execute(sql.SQL("grant create on database {} to storm_owner").format(database))
        superuser.execute("create table effect (id bigint, claim bigint)")
        superuser.execute("grant insert, select on effect to hand, storm_owner")
    owner_dsn = make_conninfo(blank_dsn, user="storm_owner")
    install(owner_dsn, "extension" if server.major >= 18 else "plain")
    with psycopg.connect(owner_dsn, autocommit=True) as owner:
        for role, kind in ROLES.items():
            owner.execute("select queue.grant_access(%s, %s)", (role, kind))
    yield blank_dsn
    with psycopg.connect(blank_dsn, autocommit=True) as superuser:
        mine = "from pg_prepared_xacts where database = current_database()"
        for (gid,) in superuser.execute(f"select gid {mine}").fetchall():
            superuser.execute(f"rollback prepared '{gid}'")
        superuser.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where datname = current_database() and pid <> pg_backend_pid()"
        )
        for role in roles:
            superuser.execute(
                sql.SQL("drop owned by {0} cascade; drop role {0}").format(sql.Identifier(role))
            )


def test_ledger_storm(owned: str) -> None:
    Storm(owned, 1, 8).check()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_long_ledger_storm(owned: str, seed: int) -> None:
    Storm(owned, seed, 90).check()
