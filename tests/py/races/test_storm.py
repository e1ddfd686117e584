"""A storm over all of admission, checked by a ledger outside the database.

Producers with long, short and rolled-back transactions, an operator who pauses, holds and cancels, and
eight workers that finish, fail, yield, release, roll back and crash use the queue by SQL only. The
ledger records each call before it is sent, and the answer afterwards, so it never forbids what the
database may already have allowed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import json
import random
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import psycopg
import pytest

from . import storms
from .machines import matches
from .storms import PATIENCE, Connection

pytestmark = pytest.mark.long

WORKERS = 8
PRODUCERS = 4
DEAD_AFTER = 1.0
LIMIT = 3
MAX_RUNNING = 2
RATE, PER = 5, 0.25
QUEUES = ["a", "b", "a.limited", "b.rated"]
LOCKS = {f"{mode} {n}": mode for mode in ("ordered", "mutex", "mixed") for n in range(3)}


@contextlib.contextmanager
def refusing(sqlstate: str) -> Iterator[None]:
    """Let an error of this kind pass."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate != sqlstate:
            raise


@dataclasses.dataclass
class Job:
    id: int
    queue: str
    lock: str | None
    is_mutex: bool
    keys: list[str]
    queueing_lock: str | None
    is_unique_until_finish: bool
    discards: bool
    expires_at: float | None
    commit_started: float = float("inf")
    committed: float = float("inf")
    is_ended: bool = False
    may_have_ended: bool = False  # it is being cancelled, or its worker was told to abort it
    held: float = float("inf")
    claim: int = 0  # the current one while it runs
    last_claim: int = 0
    crashes: int = 0  # the third may end it (crash_loop)
    dead_at: float = float("inf")  # its worker has crashed: from then on its claim may be taken


class Ledger(storms.Ledger):
    """What may be and what must not be, as far as is known outside the database."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs: dict[int, Job] = {}
        self.by_lock: dict[str, list[Job]] = collections.defaultdict(list)
        self.running: set[int] = set()
        self.paused: dict[str, float] = {}

    def lines(self) -> Iterable[str]:
        return [repr(job) for _, job in sorted(self.jobs.items())]

    def commit(self, jobs: list[Job]) -> None:
        now = time.time()
        with self.mutex:
            for job in jobs:
                job.commit_started = now
                self.jobs[job.id] = job
                if job.lock:
                    self.by_lock[job.lock].append(job)

    def committed(self, jobs: list[Job]) -> None:
        now = time.time()
        for job in jobs:
            job.committed = now
        self.counts["deferred"] += len(jobs)

    def claimed(self, rows: list[tuple[int, int]], fetch_started: float) -> None:
        now = time.time()
        with self.mutex:
            for id, claim in rows:
                job = self.jobs.get(id)
                if job is None:
                    self.fault(f"{id} was claimed and never committed")
                    continue
                self._check_claim(job, claim, fetch_started, now)
                job.claim = job.last_claim = claim
                job.dead_at = float("inf")
                self.running.add(id)
                self.counts["claims"] += 1

    def _check_claim(self, job: Job, claim: int, fetch_started: float, now: float) -> None:
        if job.claim and now < job.dead_at:
            self.fault(f"{job.id} was claimed by {claim} while {job.claim} has it")
        if claim <= job.last_claim:
            self.fault(f"{job.id} was claimed by {claim} after {job.last_claim}")
        if job.is_ended:
            self.fault(f"{job.id} was claimed after its end")
        if job.held < fetch_started:
            self.fault(f"{job.id} was claimed while it is held")
        if self.paused.get(job.queue, float("inf")) < fetch_started:
            self.fault(f"{job.id} was claimed while {job.queue} is paused")
        if job.expires_at and job.expires_at < fetch_started:
            self.fault(f"{job.id} was claimed after it had expired")
        beside = [
            other
            for other in (self.jobs[id] for id in self.running)
            if other is not job and other.claim and now < other.dead_at
        ]
        for other in beside:
            if job.lock and other.lock == job.lock:
                self.fault(f"{job.id} was claimed while {other.id} has its lock {job.lock}")
        for key in job.keys:
            n = 1 + sum(key in other.keys for other in beside)
            if n > LIMIT:
                self.fault(f"{job.id} is number {n} under its key {key}")
        if job.queue == "a.limited":
            n = 1 + sum(other.queue == job.queue for other in beside)
            if n > MAX_RUNNING:
                self.fault(f"{job.id} is number {n} of its queue {job.queue}")
        if job.lock and not job.is_mutex:
            for other in self.by_lock[job.lock]:
                # a job that becomes visible late waits for the one that already had the turn
                if (
                    other.id < job.id
                    and other.committed < job.commit_started
                    and not other.is_ended
                    and not other.may_have_ended
                    and other.crashes < 3
                    and not other.discards
                    and not (other.expires_at and other.expires_at < now)
                ):
                    self.fault(f"{job.id} overtook {other.id} at its lock {job.lock}")

    def ends(self, id: int, is_final: bool) -> None:
        """The claim may end from now on; with is_final the job too."""
        with self.mutex:
            job = self.jobs[id]
            job.claim = 0
            job.is_ended = is_final
            self.running.discard(id)

    def goes_on(self, id: int, claim: int) -> None:
        """The claim was not ended after all."""
        with self.mutex:
            job = self.jobs[id]
            if job.last_claim != claim:
                self.fault(f"{id} was claimed again while {claim} goes on")
            job.claim = claim
            job.is_ended = False
            self.running.add(id)

    def revokes(self, id: int) -> None:
        """An end that was announced never reached the database."""
        with self.mutex:
            self.jobs[id].is_ended = False

    def crashes(self, ids: list[int], dead_at: float) -> None:
        with self.mutex:
            for id in ids:
                self.jobs[id].dead_at = dead_at
                self.jobs[id].crashes += 1


class Storm(storms.Storm):
    ledger: Ledger

    def __init__(self, dsn: str, seed: int, seconds: float = 6) -> None:
        super().__init__(dsn, seed, seconds, Ledger())
        self.rated = 0  # jobs deferred to b.rated

    def run(self) -> None:
        with self.connect() as conn:
            conn.execute(
                "select queue.configure_queue('a.limited', %s)",
                (json.dumps({"max_running": MAX_RUNNING}),),
            )
            conn.execute(
                "select queue.configure_queue('b.rated', %s)",
                (json.dumps({"rate": {"limit": RATE, "per": PER}}),),
            )
            producers = [self.start(self.produce, n) for n in range(PRODUCERS)]
            others = [self.start(self.work, n) for n in range(WORKERS)]
            others += [self.start(self.operate, 0), self.start(self.tick, 0)]
            for thread in producers:
                thread.join()
            self.is_over.set()
            self.end(conn, others)
            self.inspect(conn)

    # Producers

    def produce(self, conn: Connection, r: random.Random, n: int) -> None:
        end = time.monotonic() + self.seconds
        own: list[int] = []
        while self.goes_on(end) and not self.is_over.is_set() and not self.ledger.faults:
            kind = r.random()
            rolls_back = r.random() < 0.1
            jobs: list[Job] = []
            with contextlib.suppress(psycopg.Rollback), conn.transaction():
                if kind < 0.1:
                    jobs = self.defer_many(conn, r, r.choice([30, 60]))
                else:
                    for _ in range(r.choice([1, 1, 1, 2, 5])):
                        jobs += self.defer(conn, r, own)
                        if r.random() < 0.1:
                            time.sleep(r.random() * 0.01)
                if kind > 0.97:
                    time.sleep(r.random() * 0.8)
                if rolls_back:
                    raise psycopg.Rollback
                self.ledger.commit(jobs)
            if rolls_back:
                self.ledger.counts["rolled back"] += len(jobs)
                continue
            self.ledger.committed(jobs)
            own = (own + [job.id for job in jobs])[-20:]
            time.sleep(r.random() * 0.02)

    def queue(self, r: random.Random) -> str:
        """Choose a queue; few enough jobs go to the rated one that drain need not wait for it."""
        queue = r.choices(QUEUES, [5, 5, 1, 1])[0]
        if queue == "b.rated":
            if self.rated > RATE / PER / 2 * (time.monotonic() - self.started):
                return "b"
            self.rated += 1
        return queue

    def spec(self, r: random.Random) -> tuple[dict[str, Any], dict[str, Any]]:
        """A job in the form of defer_many, and its entry in the ledger."""
        options: dict[str, Any] = {}
        spec: dict[str, Any] = {
            "task": r.choice(["t", "u"]),
            "queue": self.queue(r),
            "priority": r.choice([0, 0, 0, 1, -3, 5]),
        }
        kept: dict[str, Any] = {
            "lock": None,
            "is_mutex": False,
            "keys": [],
            "discards": False,
            "expires_at": None,
        }
        if r.random() < 0.5:
            lock = r.choice(list(LOCKS))
            mode = LOCKS[lock] if LOCKS[lock] != "mixed" else r.choice(["ordered", "mutex"])
            spec["lock"] = kept["lock"] = lock
            options["lock_mode"] = mode
            kept["is_mutex"] = mode == "mutex"
        keys = r.random()
        if keys < 0.25:
            kept["keys"] = [f"key {r.randrange(4)}"]
            spec |= {"concurrency_key": kept["keys"][0], "concurrency_limit": LIMIT}
        elif keys < 0.35:
            kept["keys"] = [f"key {n}" for n in r.sample(range(4), r.choice([2, 3]))]
            options["concurrency"] = [{"key": key, "limit": LIMIT} for key in kept["keys"]]
        if kept["keys"] and r.random() < 0.1:
            options["on_limit"] = "discard"
            kept["discards"] = True
        if r.random() < 0.1:
            options["delay"] = r.random() * 0.3
        if r.random() < 0.05:
            spec["deadline"] = f"2030-01-01T00:00:{r.randrange(60):02}Z"
        if r.random() < 0.03:
            options["held"] = True
        if r.random() < 0.05:
            kept["expires_at"] = time.time() + r.random() * 0.5
            options["expires_at"] = time.strftime(
                "%Y-%m-%dT%H:%M:%S", time.gmtime(kept["expires_at"])
            ) + f"{kept['expires_at'] % 1:.6f}Z".lstrip("0")
        if r.random() < 0.1:
            options["timeout"] = "1 minute"
        spec["options"] = options
        return spec, kept | {
            "queue": spec["queue"],
            "queueing_lock": None,
            "is_unique_until_finish": False,
        }

    def defer(self, conn: Connection, r: random.Random, own: list[int]) -> list[Job]:
        spec, kept = self.spec(r)
        if own and r.random() < 0.05:
            spec["needs"] = r.sample(own, min(len(own), 2))
            spec["options"]["on_need_failure"] = "proceed"
        if r.random() < 0.15:
            # at most one per transaction, and always in one order: they wait for each other, as keys do
            until_finish = r.random() < 0.3
            spec["queueing_lock"] = (
                f"{'finish' if until_finish else 'start'} {threading.current_thread().name} {r.randrange(2)}"
            )
            if r.random() < 0.5:
                spec["queueing_lock"] = "finish shared" if until_finish else "start shared"
            spec["options"]["unique_until"] = "finish" if until_finish else "start"
            spec["options"]["on_conflict"] = r.choice(["raise", "ignore", "replace"])
            kept |= {"queueing_lock": spec["queueing_lock"], "is_unique_until_finish": until_finish}
        high = conn.execute(
            "select last_value - (not is_called)::integer from queue.job_id_seq"
        ).fetchone()
        assert high is not None
        id = None
        with refusing("QJ004"), conn.transaction():
            ((id,),) = self.call(conn, "select queue.defer_many(%s)", (json.dumps([spec]),))
        if id is None:
            self.ledger.counts["conflicts"] += 1
            return []
        if spec.get("queueing_lock") and (id <= high[0] or id in self.ledger.jobs):
            self.ledger.counts["ignored or replaced"] += 1
            return []
        return [Job(id=id, **kept)]

    def defer_many(self, conn: Connection, r: random.Random, n: int) -> list[Job]:
        pairs = [self.spec(r) for _ in range(n)]
        ids = self.call(
            conn, "select queue.defer_many(%s)", (json.dumps([spec for spec, _ in pairs]),)
        )
        return [Job(id=id, **kept) for (id,), (_, kept) in zip(ids, pairs, strict=True)]

    # The operator

    def operate(self, conn: Connection, r: random.Random, n: int) -> None:
        ledger = self.ledger
        held: list[int] = []
        while not self.is_over.wait(r.random() * 0.05):
            kind = r.random()
            if kind < 0.15:
                pattern = r.choice(["a", "b", "a*", "b.*", "*"])
                covered = [queue for queue in QUEUES if matches(queue, pattern)]
                self.call(conn, "select queue.pause(%s)", (pattern,))
                with ledger.mutex:
                    ledger.paused |= dict.fromkeys(covered, time.time())
                self.is_over.wait(r.random() * 0.1)
                with ledger.mutex:
                    for queue in covered:
                        ledger.paused.pop(queue, None)
                self.call(conn, "select queue.resume(%s)", (pattern,))
                ledger.counts["pauses"] += 1
            elif kind < 0.2:
                self.call(conn, "select queue.pause(task => 'u')")
                self.is_over.wait(r.random() * 0.05)
                self.call(conn, "select queue.resume(task => 'u')")
            elif kind < 0.6 and (id := self.some_job(r)):
                with ledger.mutex:
                    job = ledger.jobs[id]
                    was_aborted = job.may_have_ended
                    job.may_have_ended = True
                answer = None
                with refusing("QJ003"):
                    ((answer,),) = self.call(
                        conn, "select queue.cancel(%s, %s)", (job.id, r.random() < 0.2)
                    )
                    ledger.counts["told to abort" if answer == "running" else answer] += 1
                job.is_ended |= answer == "cancelled"
                job.may_have_ended = was_aborted or answer is not None
            elif kind < 0.9 and (id := self.some_job(r)):
                with refusing("QJ003"):
                    self.call(conn, "select queue.hold(%s)", (id,))
                    ledger.jobs[id].held = time.time()
                    held.append(id)
                    ledger.counts["held"] += 1
            elif held:
                self.unhold(conn, held.pop(r.randrange(len(held))))

    def some_job(self, r: random.Random) -> int | None:
        with self.ledger.mutex:
            committed = [job.id for job in self.ledger.jobs.values() if job.committed < time.time()]
        return r.choice(committed[-200:]) if committed else None

    def unhold(self, conn: Connection, id: int) -> None:
        if id in self.ledger.jobs:
            self.ledger.jobs[id].held = float("inf")
        with refusing("QJ003"):
            self.call(conn, "select queue.unhold(%s)", (id,))

    def tick(self, conn: Connection, r: random.Random, n: int) -> None:
        while not self.is_drained.wait(0.05):
            self.call(conn, "select * from queue.tick()")

    # Workers

    def work(self, conn: Connection, r: random.Random, n: int) -> None:
        queues = [None, ["a*", "b*"], ["b*"], ["a", "b"]][n % 4]
        while not self.is_drained.is_set():
            self.live(conn, r, queues)

    def live(self, conn: Connection, r: random.Random, queues: list[str] | None) -> None:
        """A worker's life, until it stops or crashes."""
        dead_after = DEAD_AFTER if r.random() < 0.3 else 60.0
        lives_until = time.time() + (0.1 + r.random() if dead_after == DEAD_AFTER else 3600)
        beaten = time.time()
        ((worker,),) = self.call(
            conn,
            "select queue.register_worker('w', %s, %s)",
            (queues, json.dumps({"dead_after": dead_after})),
        )
        claims: dict[int, int] = {}
        outcomes: list[dict[str, Any]] = []
        while not self.is_drained.is_set():
            started = time.time()
            options = r.choice([None, None, None, {"order": "listed"}])
            rows = None
            with refusing("QJ007"):
                rows = self.call(
                    conn,
                    "select id, claim, error from queue.finish_and_fetch(%s, %s, %s, %s, %s)",
                    (
                        worker,
                        json.dumps(outcomes),
                        queues,
                        r.choice([1, 1, 3, 10]),
                        options and json.dumps(options),
                    ),
                )
            if rows is None:
                # so slow that it was declared dead: its outcomes are lost with the rest
                for outcome in outcomes:
                    claims[outcome["id"]] = outcome["claim"]
                    self.ledger.revokes(outcome["id"])
                self.crash(conn, claims, beaten)
                return
            outcomes = []
            for id, claim, error in rows:
                if error:
                    self.ledger.fault(f"the outcome of {id}, {claim} was refused: {error}")
            fetched = [(id, claim) for id, claim, error in rows if not error]
            self.ledger.claimed(fetched, started)
            claims |= dict(fetched)
            if lives_until < time.time() and claims:
                self.crash(conn, claims, beaten)
                return
            if not claims:
                time.sleep(0.002 + r.random() * 0.01)
                continue
            if r.random() < 0.5:
                time.sleep(r.random() * 0.004)
            outcomes = self.finish(conn, r, claims)
            if dead_after == DEAD_AFTER or time.time() > beaten + 1:
                now = time.time()
                with refusing("QJ007"):
                    self.call(conn, "select * from queue.heartbeat(%s)", (worker,))
                    beaten = now
        self.call(conn, "select * from queue.finish_many(%s)", (json.dumps(outcomes),))
        self.call(conn, "select queue.deregister_worker(%s)", (worker,))

    def finish(
        self, conn: Connection, r: random.Random, claims: dict[int, int]
    ) -> list[dict[str, Any]]:
        """End claims in every possible way; return those left for finish_and_fetch."""
        later = []
        for id, claim in list(claims.items()):
            way = r.random()
            outcome = {"id": id, "claim": claim, "outcome": "succeeded"}
            if way < 0.05:
                continue
            if way < 0.1:
                self.finish_in_transaction(conn, r, id, claim, claims)
                continue
            if way > 0.98:
                outcome["outcome"] = "released"
            elif way > 0.93:
                outcome |= {"outcome": "failed", "options": {"retry_in": r.random() * 0.1}}
            elif way > 0.9:
                outcome |= {"outcome": "failed", "options": {"retryable": False}}
            elif way > 0.86:
                at = (
                    time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) if r.random() < 0.5 else None
                )
                outcome |= {"outcome": "retry_later", "at": at}
            is_final = outcome["outcome"] == "succeeded" or outcome.get("options") == {
                "retryable": False
            }
            self.ledger.ends(id, is_final)
            del claims[id]
            later.append(outcome)
        if later and r.random() < 0.3:
            half = later[: len(later) // 2]
            for row in self.call(conn, "select * from queue.finish_many(%s)", (json.dumps(half),)):
                if row[3]:
                    self.ledger.fault(f"the outcome of {row} was refused")
            later = later[len(half) :]
        return later

    def finish_in_transaction(
        self, conn: Connection, r: random.Random, id: int, claim: int, claims: dict[int, int]
    ) -> None:
        """Like a handler that commits its writes and its outcome together, or neither."""
        rolls_back = r.random() < 0.5
        self.ledger.ends(id, not rolls_back)
        with contextlib.suppress(psycopg.Rollback), conn.transaction():
            self.call(conn, "select queue.succeed(%s, %s)", (id, claim))
            time.sleep(r.random() * 0.02)
            if rolls_back:
                self.ledger.goes_on(id, claim)
                raise psycopg.Rollback
        if not rolls_back:
            del claims[id]

    def crash(self, conn: Connection, claims: dict[int, int], beaten: float) -> None:
        """Fall silent until the reaper has come, then report, like a zombie."""
        self.ledger.crashes(list(claims), beaten + DEAD_AFTER)
        self.ledger.counts["crashed"] += len(claims)
        time.sleep(max(0, beaten + DEAD_AFTER - time.time()))
        for id, claim in claims.items():
            while self.call(
                conn, "select from queue.jobs where id = %s and claim = %s", (id, claim)
            ):
                time.sleep(0.02)
            with self.ledger.mutex:
                job = self.ledger.jobs[id]
                if job.claim == claim:
                    job.claim = 0
                    self.ledger.running.discard(id)
            with refusing("QJ002"):
                self.call(conn, "select queue.succeed(%s, %s)", (id, claim))
                self.ledger.fault(f"the zombie's outcome of {id}, {claim} was taken")
            self.ledger.counts["zombies refused"] += 1

    def call(self, conn: Connection, query: str, arguments: tuple[Any, ...] = ()) -> list[Any]:
        return conn.execute(query, arguments).fetchall()

    # The end

    def drain(self, conn: Connection) -> None:
        """Release everything and wait until all jobs have ended."""
        conn.execute("select queue.resume()")
        best = None
        since = time.monotonic()
        while not self.ledger.faults:
            for (id,) in conn.execute("select id from queue.jobs where state = 'held'").fetchall():
                self.unhold(conn, id)
            (left,) = conn.execute(
                "select count(*) from queue.jobs where state not in ('succeeded', 'failed', 'cancelled')"
            ).fetchone() or (0,)
            if left == 0:
                return
            if left != best:
                best, since = left, time.monotonic()
            elif time.monotonic() > since + PATIENCE:
                rows = conn.execute(
                    "select id, state, reason, queue.why(id) from queue.jobs"
                    " where state not in ('succeeded', 'failed', 'cancelled') order by id limit 20"
                ).fetchall()
                self.ledger.fault(f"stuck with {left} jobs: {rows}")
                return
            time.sleep(0.05)

    def inspect(self, conn: Connection) -> None:
        """Check the database's own records."""
        ledger = self.ledger
        if found := conn.execute("select * from queue.check()").fetchall():
            ledger.fault(f"check: {found[:20]}")
        if ledger.faults:
            return
        known = dict(conn.execute("select id, state from queue.jobs").fetchall())
        if missing := [id for id in ledger.jobs if id not in known]:
            ledger.fault(f"lost: {missing[:20]}")
        if unknown := [id for id in known if id not in ledger.jobs]:
            ledger.fault(f"never committed: {unknown[:20]}")
        for job in ledger.jobs.values():
            if known.get(job.id) == "cancelled" and not (
                job.may_have_ended or job.expires_at or job.discards
            ):
                ledger.fault(f"{job.id} was cancelled by nobody")
        left = conn.execute(
            "select (select count(*) from queue.active_job) + (select count(*) from queue.waiting)"
            " + (select count(*) from queue.lock_member) + (select count(*) from queue.pending_settlement)"
            " + (select count(*) from queue.queueing_lock) + (select count(*) from queue.expiry)"
            " + (select coalesce(sum(used), 0) from queue.semaphore)"
        ).fetchone()
        if left != (0,):
            ledger.fault(f"{left} rows are left behind")
        starts: dict[int, list[float]] = collections.defaultdict(list)
        rated: list[float] = []
        for id, queue, at in conn.execute(
            "select j.id, j.queue, extract(epoch from s.at)::float8 from queue.jobs j cross join lateral"
            " (select a.started_at from queue.attempts a where a.job_id = j.id union all"
            "  select j.started_at where j.state = 'succeeded') s (at)"
        ).fetchall():
            starts[id].append(at)
            if queue == "b.rated":
                rated.append(at)
        rated.sort()
        for first, last in zip(rated, rated[RATE:], strict=False):
            if last - first <= PER:
                ledger.fault(f"{RATE + 1} starts within {last - first} s")
        by_key: dict[str, list[Job]] = collections.defaultdict(list)
        for job in sorted(ledger.jobs.values(), key=lambda job: job.id):
            if (
                job.queueing_lock
                and known[job.id] == "succeeded"
                and not job.is_unique_until_finish
            ):
                by_key[job.queueing_lock].append(job)
        for jobs in by_key.values():
            for one, other in itertools.pairwise(jobs):
                if min(starts[one.id]) > other.committed and min(starts[other.id]) > one.committed:
                    ledger.fault(f"{one.id} and {other.id} waited with one queueing lock")
        ledger.counts["rated"] = len(rated)


def test_a_storm_keeps_what_it_fails_with(dsn: str) -> None:
    storm = Storm(dsn, 0)
    storm.ledger.fault("made up")
    with storm.connect() as connection:
        connection.execute("select queue.defer('t')")
    folder = storm.keep()
    try:
        assert "made up" in (folder / "faults.txt").read_text("utf-8")
        assert len((folder / "log.csv").read_text("utf-8").splitlines()) == 2
    finally:
        shutil.rmtree(folder)


def test_storm(dsn: str) -> None:
    Storm(dsn, 1).check()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(12, 212))
def test_two_hundred_storms(dsn: str, seed: int) -> None:
    Storm(dsn, seed).check()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2, 12))
def test_long_storm(dsn: str, seed: int) -> None:
    Storm(dsn, seed, 60).check()
