"""The runs of bench_peers.py: workers and producers in processes of their own, and what they cost."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import time
from collections.abc import Iterator, Sequence

from bench_hot_path import BARE_CLAIM_DELETE, BARE_INSERT, BARE_INSERT_MANY, BATCH, JOBS, fill_bare
from common import Bench, cpu, create_database, processes_of, short
from peer_process import Process, until
from peers import BEST, MANY, ONE, OUTAGE, Place, Redis, System

# Left out of latencies: in the first calls a session loads tables of the system and plans statements.
WARM_UP_SECONDS = 0.5


@dataclasses.dataclass
class Found:
    """What one run has found; CPU in microseconds and WAL in bytes, a job."""

    jobs: int
    rate: float
    server: float | None = None
    client: float | None = None
    wal: float | None = None
    waits: list[float] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        text = f"{self.jobs:>7,} jobs  {short(self.rate):>6}/s"
        if self.waits:
            ordered = sorted(1000 * wait for wait in self.waits)
            middle, last = ordered[len(ordered) // 2], ordered[round(0.99 * (len(ordered) - 1))]
            text += f"  p50 {middle:.2f} ms, p99 {last:.2f} ms"
        if self.server is not None:
            text += f"  server {self.server:.0f} us, clients {self.client:.0f} us"
        return text + (f", WAL {self.wal:.0f} B" if self.wal is not None else "")


@dataclasses.dataclass
class Used:
    """What the server and the clients have used so far."""

    server: float
    client: float
    wal: float | None

    def costs(self, jobs: int, after: Used) -> dict[str, float | None]:
        return {
            "server": (after.server - self.server) / jobs * 1e6,
            "client": (after.client - self.client) / jobs * 1e6,
            "wal": None if self.wal is None or after.wal is None else (after.wal - self.wal) / jobs,
        }


class Runner:
    """Runs one system at a time."""

    def __init__(self, on: Bench, redis: Redis | None) -> None:
        self.on = on
        self.redis = redis
        self._templates: dict[tuple[str, int], str] = {}

    def used(self, place: Place, processes: Sequence[Process]) -> Used:
        client = cpu([pid for process in processes for pid in process.pids()])
        if place.redis:
            return Used(cpu([place.redis.process.pid]), client, None)
        pid = self.on.server.status().pid
        assert pid is not None
        return Used(cpu(processes_of(pid)), client, self._wal())

    def _wal(self) -> float:
        with self.on.connect("postgres") as connection:
            row = connection.execute("select pg_current_wal_insert_lsn() - '0/0'").fetchone()
        assert row is not None
        return float(row[0])

    @contextlib.contextmanager
    def place(self, system: System, jobs: int = 0) -> Iterator[Place]:
        """Provide a place for one run, in which so many jobs wait."""
        if system.driver == "celery":
            assert self.redis is not None
            place = Place(self.on, system, "", self.redis)
            self.redis.call("flushall")
            self._fill(place, jobs)
            yield place
        else:
            with self.on.fresh(self._template(system, jobs)) as database:
                yield Place(self.on, system, database, None)

    def _template(self, system: System, jobs: int) -> str:
        """Return a database in which so many jobs wait; make it once."""
        key = (system.driver, jobs)
        if key not in self._templates:
            name = f"{system.driver}_{jobs}"
            if jobs:
                create_database(self.on.server, name, self._template(system, 0))
            else:
                create_database(
                    self.on.server, name, "ours" if system.driver == "pgdefer" else "template1"
                )
            place = Place(self.on, system, name, None)
            if jobs:
                self._fill(place, jobs)
            else:
                installing = Process(place, "install")
                installing.wait()
                installing.kill()
            self.on.settle(name)
            self._templates[key] = name
        return self._templates[key]

    def _fill(self, place: Place, jobs: int) -> None:
        if place.system.fill:
            with self.on.connect(place.database) as connection:
                connection.execute(place.system.fill, [jobs])
        elif jobs:
            size = 0 if MANY in place.system.without and ONE not in place.system.without else 1000
            self._send(place, jobs, size)

    def forget(self) -> None:
        """Drop the databases with jobs."""
        for key in [key for key in self._templates if key[1]]:
            with self.on.connect("postgres") as connection:
                name = self._templates.pop(key)
                connection.execute(f'drop database "{name}" with (force)'.encode())

    def _send(
        self,
        place: Place,
        jobs: int,
        size: int,
        rate: float = 0,
        workers: Sequence[Process] = (),
    ) -> tuple[dict[str, float], Used]:
        """Send jobs; return the producer's answer, and what was used before, less what the producer uses."""
        producer = Process(place, "produce", jobs=jobs, size=size, rate=rate)
        try:
            until(producer.ready.is_set, producer.check)
            before = self.used(place, workers)
            producer.go()
            answer = producer.wait()
            return answer, dataclasses.replace(before, client=before.client - answer["cpu"])
        finally:
            producer.kill()

    def produce(self, system: System, jobs: int, size: int) -> Found:
        """Send jobs to an empty queue."""
        with self.place(system) as place:
            answer, before = self._send(place, jobs, size)
            costs = before.costs(jobs, self.used(place, []))
            assert place.sent() == jobs, f"{system.name}: there are {place.sent()} jobs, not {jobs}"
        return Found(jobs, jobs / (answer["ended"] - answer["begun"]), **costs)

    @contextlib.contextmanager
    def workers(
        self, place: Place, setting: str, kind: str = "noop", processes: int = 1
    ) -> Iterator[list[Process]]:
        """Run workers, of which Celery's starts the others."""
        count = 1 if place.redis else processes
        options = {"setting": setting, "kind": kind, "processes": processes}
        made = [Process(place, "work", **options) for _ in range(count)]
        try:
            for one in made:
                until(one.ready.is_set, one.check)
            for one in made:
                one.go()
            yield made
        finally:
            for one in made:
                one.kill()

    def drain(self, system: System, setting: str, kind: str, jobs: int, processes: int) -> Found:
        """Run all jobs that wait."""
        with (
            self.place(system, jobs) as place,
            self.workers(place, setting, kind, processes) as workers,
        ):
            first = self.first(workers)
            before = self.used(place, workers)
            self.finish(place, workers, jobs)
            ended = time.monotonic()
            costs = before.costs(jobs, self.used(place, workers))
            return Found(jobs, jobs / (ended - first), **costs)

    def first(self, workers: list[Process]) -> float:
        """Return when the first handler began, once it has."""

        def check() -> None:
            for one in workers:
                one.check()

        until(lambda: any(one.first for one in workers), check, 0.001)
        return min(one.first for one in workers if one.first)

    def finish(self, place: Place, workers: list[Process], jobs: int) -> None:
        """Wait until all is done: by the handlers, then by the tables. Raise an error if it is not."""
        before = -1
        while (ran := sum(one.ran for one in workers)) < jobs:
            assert ran > before, f"{place.system.name}: {ran} of {jobs} handlers have begun"
            before = ran
            goal = min(jobs, ran + max(1, jobs // 100))

            def check() -> None:
                for one in workers:
                    one.check()

            until(lambda goal=goal: sum(one.ran for one in workers) >= goal, check)
        until(lambda: place.done(jobs) >= jobs, lambda: None)
        ran, done = sum(one.ran for one in workers), place.done(jobs)
        assert ran == done == jobs, f"{place.system.name}: {ran} runs, {done} done, of {jobs} jobs"

    def latency(self, system: System, setting: str, jobs: int, rate: float, size: int) -> Found:
        """Send jobs to a worker that waits; return how long each waited."""
        warm_up = round(rate * WARM_UP_SECONDS)
        with self.place(system) as place, self.workers(place, setting) as workers:
            self._send(place, 1, 0)
            self.first(workers)
            time.sleep(1)  # until it idles; how it does is its own matter
            answer, before = self._send(place, jobs + warm_up, size, rate, workers)
            self.finish(place, workers, jobs + warm_up + 1)
            costs = before.costs(jobs + warm_up, self.used(place, workers))
            sent = (jobs + warm_up) / (answer["ended"] - answer["begun"])
            until(lambda: len(workers[0].waits) >= jobs + warm_up, workers[0].check)
            return Found(jobs, sent, waits=workers[0].waits[warm_up:], **costs)

    def outage(self, system: System, setting: str, jobs: int) -> Found:
        """Return how long a worker takes to its first job, where many wait."""
        with self.place(system, jobs) as place:
            worker = Process(place, "work", setting=setting, kind="noop", processes=1)
            try:
                until(worker.ready.is_set, worker.check)
                begun = time.monotonic()
                worker.go()
                wait = self.first([worker]) - begun
            finally:
                worker.kill()
        return Found(jobs, 1 / wait, waits=[wait])


def bare(on: Bench, scenario: str, jobs: int) -> Found:
    """Do the same with a bare table, by pgbench: insert, and delete by SKIP LOCKED."""
    clients = 10 if scenario == "10 processes" else 1
    script, size = {ONE: (BARE_INSERT, 1), MANY: (BARE_INSERT_MANY, JOBS)}.get(
        scenario, (BARE_CLAIM_DELETE, BATCH)
    )
    calls = max(1, jobs // size // clients) * clients
    fill = 0 if scenario in {ONE, MANY} else calls * size
    with on.fresh("bare") as database:
        fill_bare(on, database, jobs if scenario == OUTAGE else fill)
        place = Place(on, System("a bare table", "bare"), database, None)
        if scenario == OUTAGE:
            begun = time.monotonic()
            with on.connect(database) as connection:
                connection.execute(BARE_CLAIM_DELETE.encode())
            return Found(jobs, 1 / (time.monotonic() - begun), waits=[time.monotonic() - begun])
        runner = Runner(on, None)
        before, own = runner.used(place, []), _children()
        rate = on.pgbench(database, script, clients=clients, transactions=calls)
        costs = before.costs(calls * size, runner.used(place, []))
        costs["client"] = (_children() - own) / (calls * size) * 1e6
        with on.connect(database) as connection:
            row = connection.execute("select count(*) from q").fetchone()
        assert row == (0 if scenario in {BEST, "10 processes"} else calls * size,), row
    return Found(calls * size, rate * size, **costs)


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
