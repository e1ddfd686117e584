"""Citus: a coordinator that routes, and two nodes with a complete queue each.

These tests run where the system's PostgreSQL has Citus, and build nothing. The ledger of what was
acknowledged, undone or left in doubt is outside of the queue.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from clusters import Cluster as Server
from clusters import running
from pgdefer import App, Worker
from pgdefer.contrib.cluster import Cluster, shard_of
from pgdefer.contrib.cluster.install import folder as folder_of
from pgdefer.database.embedded import EmbeddedServer
from pgdefer.database.install import install
from support import ROOT, open_folder
from workers import wait_for, working

SETTINGS = """
shared_preload_libraries = 'citus'
max_prepared_transactions = 100
max_connections = 100
citus.node_conninfo = 'sslmode=disable'
citus.recover_2pc_interval = '1s'
"""
NAMES = ("a", "b")
LOCAL = " options='-c citus.enable_ddl_propagation=off'"


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The servers and the DSNs; the coordinator's are those of the empty name."""

    servers: dict[str, Server]

    def dsn(self, name: str) -> str:
        return self.servers[name].dsn("shop")

    def rows(self, name: str, statement: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.dsn(name), autocommit=True) as connection:
            done = connection.execute(statement.encode(), parameters)
            return done.fetchall() if done.description else []

    def jobs(self, task: str) -> list[tuple[str, int]]:
        """Return where the jobs of a task are, each with its number, in the order of ids."""
        statement = "select (args ->> 'n')::int from queue.jobs where task = %s order by id"
        return [(name, n) for name in NAMES for (n,) in self.rows(name, statement, [task])]


def key(number: int, name: str) -> str:
    """Return a key of a shard."""
    return next(
        found
        for found in (f"{number} {n}" for n in range(1000))
        if NAMES[shard_of(found) * 2 // 1024] == name
    )


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    found = subprocess.run(
        [ROOT / "tests" / "system-postgres"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not found:
        pytest.skip("the system has no PostgreSQL 15, 16 or 17")
    version = Path(found).parent.name
    if not Path(f"/usr/share/postgresql/{version}/extension/citus.control").exists():
        pytest.skip(f"Citus is not installed in {found}: nothing about it was tested")
    with open_folder("citus") as folder:
        programs = EmbeddedServer(folder / "programs", bin_dir=found)
        servers = {name: Server(folder, programs, 5432 + n) for n, name in enumerate(("", *NAMES))}
        with running(*servers.values()):
            for server in servers.values():
                server.initdb(SETTINGS)
                server.start()
                with server.connect() as connection:
                    connection.execute("create database shop")
                with server.connect("shop") as connection:
                    connection.execute("create extension citus")
            made = Nodes(servers)
            for name in NAMES:
                install(made.dsn(name) + LOCAL, "plain")
                made.rows(name, "alter database shop set citus.enable_ddl_propagation = off")
            shards = {name: made.dsn(name) for name in NAMES}
            Cluster.create(App(), shards).close()
            with psycopg.connect(made.dsn("") + LOCAL, autocommit=True) as connection:
                connection.execute("create schema queue")
                connection.execute((folder_of("cluster") / "cluster.sql").read_bytes())
                connection.execute("select queue.shard_start(null, %s)", [Jsonb(shards)])
                connection.execute((folder_of("citus") / "router.sql").read_bytes())
            with psycopg.connect(made.dsn(""), autocommit=True) as connection:
                connection.execute("select citus_set_coordinator_host(%s, 5432)", [str(folder)])
                for name in NAMES:
                    connection.execute(
                        "select citus_add_node(%s, %s)", [str(folder), servers[name].port]
                    )
                places = {name: f"{folder}:{servers[name].port}" for name in NAMES}
                connection.execute("select queue.citus_start(%s)", [Jsonb(places)])
            yield made


def test_the_router_defers_in_the_node_of_the_key(nodes: Nodes) -> None:
    with psycopg.connect(nodes.dsn(""), autocommit=True) as router:
        for n in range(10):
            router.execute(
                "select queue.defer('one', %s, lock => %s)",
                [Jsonb({"n": n}), key(n, NAMES[n % 2])],
            )
        jobs = [
            {"task": "many", "shard_key": key(n, NAMES[n % 3 % 2]), "args": {"n": n}}
            for n in range(30)
        ]
        ids = router.execute("select queue.defer_many(%s)", [Jsonb(jobs)]).fetchall()
    assert sorted(nodes.jobs("one")) == sorted((NAMES[n % 2], n) for n in range(10))
    assert sorted(nodes.jobs("many")) == sorted((NAMES[n % 3 % 2], n) for n in range(30))
    for n, (id,) in enumerate(ids):
        name = NAMES[n % 3 % 2]
        assert nodes.rows(name, "select args from queue.jobs where id = %s", [id]) == [({"n": n},)]


def test_jobs_commit_with_the_caller_or_are_undone(nodes: Nodes) -> None:
    """Also with a table of the application in the nodes, and with one in the coordinator."""
    nodes.rows("", "create table orders (n integer primary key)")
    nodes.rows("", "select create_distributed_table('orders', 'n')")
    nodes.rows("", "create table here (n integer primary key)")
    with psycopg.connect(nodes.dsn("")) as router:
        for n in range(20):
            for name in NAMES if n % 4 < 2 else NAMES[:1]:
                router.execute(
                    "select queue.defer('with', %s, shard_key => %s)",
                    [Jsonb({"n": n}), key(n, name)],
                )
            router.execute("insert into orders values (%s)", [n])
            router.execute("insert into here values (%s)", [n])
            router.execute("savepoint s")
            router.execute("select queue.defer('undone', '{\"n\": 0}', shard_key => 'x')")
            router.execute("rollback to s")
            (router.commit if n % 2 else router.rollback)()
    wanted = [(name, n) for n in range(1, 20, 2) for name in (NAMES if n % 4 < 2 else NAMES[:1])]
    assert sorted(nodes.jobs("with")) == sorted(wanted)
    assert nodes.jobs("undone") == []
    for table in ("orders", "here"):
        assert [n for (n,) in nodes.rows("", f"select n from {table} order by n")] == [
            *range(1, 20, 2)
        ]


def test_errors_of_a_shard_reach_the_caller(nodes: Nodes) -> None:
    with psycopg.connect(nodes.dsn(""), autocommit=True) as router:
        with pytest.raises(psycopg.Error) as refused:
            router.execute("select queue.defer('work', '[]', shard_key => 'a')")
        assert refused.value.sqlstate == "22023"
        with pytest.raises(psycopg.errors.InvalidParameterValue, match="no shard key"):
            router.execute("select queue.defer('work')")
        router.execute("select queue.defer('work', shard_key => 'a', queueing_lock => 'q')")
        with pytest.raises(psycopg.Error) as refused:
            router.execute("select queue.defer('work', shard_key => 'a', queueing_lock => 'q')")
        assert refused.value.sqlstate == "QJ004"


def test_a_role_defers_with_its_own_rights(nodes: Nodes) -> None:
    nodes.rows("", "create role citus_web login")  # which Citus creates in the nodes too
    nodes.rows("", "grant usage on schema queue to citus_web")
    nodes.rows("", "grant execute on all functions in schema queue to citus_web")
    for name in NAMES:
        nodes.rows(name, "select queue.grant_access('citus_web', 'producer', '{web}')")
    with psycopg.connect(nodes.dsn("").replace("postgres", "citus_web"), autocommit=True) as web:
        web.execute("select queue.defer('mine', '{\"n\": 1}', 'web', shard_key => 'a')")
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            web.execute("select queue.defer('mine', '{\"n\": 2}', 'other', shard_key => 'a')")
    assert [n for _, n in nodes.jobs("mine")] == [1]


def test_a_sleeping_worker_hears_of_the_job(nodes: Nodes) -> None:
    """Nobody notifies in the transaction: the worker is woken after it, or looks by itself."""
    ran: dict[int, float] = {}
    app = App(nodes.dsn("a"))

    @app.task(name="wake")
    def wake(n: int) -> None:
        ran[n] = time.monotonic()

    asleep = (
        "select count(*) > 0 and bool_and(state_change < clock_timestamp() - interval '0.5 s')"
        " from pg_stat_activity where datname = 'shop' and query ~ 'queue'"
        " and pid <> pg_backend_pid()"
    )
    with working(Worker(app, ["wakes"])), psycopg.connect(nodes.dsn(""), autocommit=True) as router:
        for n in range(2):
            wait_for(lambda: nodes.rows("a", asleep)[0][0])
            with router.transaction():
                for name in NAMES:
                    router.execute(
                        "select queue.defer('wake', %s, 'wakes', shard_key => %s)",
                        [Jsonb({"n": n}), key(n, name)],
                    )
            began = time.monotonic()
            if n:
                router.execute("select queue.wake()")
            wait_for(lambda: n in ran)  # noqa: B023 (used at once)
            print(f"{'woken' if n else 'not woken'}: runs after {ran[n] - began:.2f} s")
    app.close()


def test_prepared_transactions_of_a_node_that_stopped(nodes: Nodes) -> None:
    """What the coordinator has committed comes, with its job; what it has not is undone."""
    group = nodes.rows("", "select groupid from pg_dist_node where nodeport = 5434")[0][0]
    gids = [f"citus_0_{number}_1_1" for number in (1000001, 1000002)]
    for n, gid in enumerate(gids):
        with psycopg.connect(nodes.dsn("b"), autocommit=True) as node:
            node.execute("begin")
            jobs = [{"task": "prepared", "shard_key": key(n, "b"), "args": {"n": n}}]
            node.execute("select queue_citus.defer_many(0, %s)", [Jsonb(jobs)])
            node.execute(f"prepare transaction '{gid}'".encode())
    nodes.rows("", "insert into pg_dist_transaction values (%s, %s)", [group, gids[0]])
    assert nodes.jobs("prepared") == []
    nodes.servers["b"].stop("immediate")
    nodes.servers["b"].start()
    wait_for(lambda: not nodes.rows("b", "select gid from pg_prepared_xacts"))
    assert nodes.jobs("prepared") == [("b", 0)]


class Ledger:
    """What producers know of each transaction: the numbers of its jobs."""

    def __init__(self) -> None:
        self.acknowledged: list[list[int]] = []
        self.undone: list[list[int]] = []
        self.doubtful: list[list[int]] = []
        self.mutex = threading.Lock()
        self.last = 0

    def numbers(self, count: int) -> list[int]:
        with self.mutex:
            self.last += count
            return [*range(self.last - count, self.last)]

    def produce(self, dsn: str, seed: int, stop: threading.Event) -> None:
        """One transaction after another: some in both nodes, some rolled back."""
        rng = random.Random(seed)
        router: psycopg.Connection[Any] | None = None
        while not stop.is_set():
            numbers = self.numbers(rng.choice((1, 1, 2, 4)))
            try:
                router = router or psycopg.connect(dsn)
                for place, n in enumerate(numbers):
                    name = NAMES[place % 2] if len(numbers) > 1 else rng.choice(NAMES)
                    router.execute(
                        "select queue.defer('ledger', %s, shard_key => %s)",
                        [Jsonb({"n": n}), key(n, name)],
                    )
                if rng.random() < 0.2:
                    router.rollback()
                    self.undone.append(numbers)
                    continue
            except psycopg.Error:
                self.undone.append(numbers)
                router = self._end(router)
                continue
            try:
                router.commit()
                self.acknowledged.append(numbers)
            except psycopg.Error:
                self.doubtful.append(numbers)
                router = self._end(router)
        self._end(router)

    @staticmethod
    def _end(router: psycopg.Connection[Any] | None) -> None:
        if router is not None:
            router.close()


def run_all(dsn: str) -> collections.Counter[int]:
    """Run all jobs of a node; return how often each."""
    ran: collections.Counter[int] = collections.Counter()
    with psycopg.connect(dsn, autocommit=True) as connection:
        ((worker,),) = connection.execute("select queue.register_worker('w')").fetchall()
        while fetched := connection.execute(
            "select id, claim, args from queue.fetch(%s, '{default}', 100)", [worker]
        ).fetchall():
            for id, claim, args in fetched:
                ran[args.get("n", -1)] += 1
                connection.execute("select queue.succeed(%s, %s)", [id, claim])
    return ran


def test_no_job_is_lost_or_doubled_while_a_node_stops(nodes: Nodes) -> None:
    ledger, stop = Ledger(), threading.Event()
    for name in NAMES:
        run_all(nodes.dsn(name))  # those of other tests
    producers = [
        threading.Thread(target=ledger.produce, args=(nodes.dsn(""), seed, stop))
        for seed in range(4)
    ]
    for producer in producers:
        producer.start()
    try:
        for turn in range(3):
            enough = len(ledger.acknowledged) + 150
            wait_for(lambda: len(ledger.acknowledged) >= enough)  # noqa: B023 (used at once)
            nodes.servers[NAMES[turn % 2]].stop("immediate")
            failed = len(ledger.undone) + len(ledger.doubtful) + 20
            wait_for(lambda: len(ledger.undone) + len(ledger.doubtful) >= failed)  # noqa: B023
            nodes.servers[NAMES[turn % 2]].start()
        enough = len(ledger.acknowledged) + 150
        wait_for(lambda: len(ledger.acknowledged) >= enough)
    finally:
        stop.set()
        for producer in producers:
            producer.join()
    # the coordinator's daemon ends what was prepared when a node stopped
    prepared = "select count(*) from pg_prepared_xacts"
    recovered = [nodes.rows(name, prepared)[0][0] for name in NAMES]
    wait_for(lambda: not any(nodes.rows(name, prepared)[0][0] for name in NAMES))
    there = collections.Counter(n for _, n in nodes.jobs("ledger"))
    assert set(there.values()) == {1}
    for numbers in ledger.acknowledged:
        assert all(n in there for n in numbers), numbers
    for numbers in ledger.undone:
        assert not any(n in there for n in numbers), numbers
    for numbers in ledger.doubtful:
        assert len({n in there for n in numbers}) == 1, numbers
    ran = run_all(nodes.dsn("a")) + run_all(nodes.dsn("b"))
    assert ran == there
    for name in NAMES:
        assert nodes.rows(name, "select * from queue.check()") == []
    counts = [sum(map(len, kind)) for kind in (ledger.acknowledged, ledger.undone, ledger.doubtful)]
    print(f"jobs acknowledged: {counts[0]}, undone: {counts[1]}, in doubt: {counts[2]}; there, and"
          f" run once: {len(ran)}; prepared transactions to recover: {sum(recovered)}")  # fmt: skip


def test_the_rate_of_the_router(nodes: Nodes) -> None:
    """Prints it: a machine that is busy shows less."""
    (there,) = (key(0, "a"),)
    calls = {"": "select queue.defer('rate', shard_key => %s)",
             "a": "select queue.shard_defer(%s, 'rate')"}  # fmt: skip
    spent = {"": 0.0, "a": 0.0}
    connections = {name: psycopg.connect(nodes.dsn(name), autocommit=True) for name in calls}
    for turn in range(10):
        for name, call in calls.items():
            began = time.monotonic()
            for _ in range(60):
                connections[name].execute(call.encode(), [there])
            if turn:  # the first warms up
                spent[name] += time.monotonic() - began
    for connection in connections.values():
        connection.close()
    print(f"defers a second, one client: {540 / spent['']:.0f} by the coordinator,"
          f" {540 / spent['a']:.0f} directly: {spent['a'] / spent['']:.2f}")  # fmt: skip
