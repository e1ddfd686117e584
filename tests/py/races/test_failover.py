"""The primary dies under load, and its synchronous standby takes over: nothing acknowledged is lost.

Producers and workers have a DSN of both servers. Two ledgers are kept outside of the database: the
producer's has the jobs whose commit was acknowledged, the workers' has when each job ran. And a
worker that holds claims of the old primary is refused once others have its jobs.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

import pgdefer
from failover import (
    SYNCHRONOUS,
    Load,
    OldWorker,
    Pair,
    Producer,
    dsn_of,
    folder_of_servers,
    kill,
    refused,
)
from pgdefer.database.embedded import EmbeddedServer
from proxy import Proxy
from workers import wait_for

pytestmark = [pytest.mark.client, pytest.mark.long]


@pytest.fixture
def folder(server: EmbeddedServer) -> Iterator[Path]:
    with folder_of_servers(server) as made:
        yield made


@pytest.fixture
def pair(folder: Path, server: EmbeddedServer) -> Iterator[Pair]:
    made = Pair(folder, server)
    yield made
    made.stop()


def fail_over_under_load(pair: Pair, folder: Path, times: int) -> tuple[list[float], str]:
    """Fail over; returns the seconds from each promotion to the end of the next job, and the sum."""
    promoted = []
    with Load(pair.dsn, folder) as load:
        for _ in range(times):
            load.go_on()
            promoted.append(pair.fail_over())
        load.go_on()
        told = load.end(pair.primary)
    return [load.waited(at) for at in promoted], told


def test_a_synchronous_standby_takes_over(pair: Pair, tmp_path: Path) -> None:
    fail_over_under_load(pair, tmp_path, 2)


@pytest.mark.soak
def test_fifty_failovers(pair: Pair, tmp_path: Path) -> None:
    waits, told = fail_over_under_load(pair, tmp_path, 50)
    print(f"50 failovers: {told}; from promotion to the next job's end: median"
          f" {statistics.median(waits):.2f} s, {min(waits):.2f} to {max(waits):.2f}")  # fmt: skip
    assert statistics.median(waits) <= 2


def test_a_switch_over(pair: Pair, tmp_path: Path) -> None:
    """The primary is stopped in order, and follows the standby: there and back."""
    with Load(pair.dsn, tmp_path) as load:
        for _ in range(2):
            load.go_on()
            with pair.primary.connect() as connection:
                old = OldWorker(connection)
            pair.switch_over()
            with pair.primary.connect() as connection:
                old.is_refused(connection)
        load.go_on()
        load.end(pair.primary)


def test_promoted_twice(pair: Pair, tmp_path: Path) -> None:
    """The same standby, with pg_rewind of the old primary between; and again while it is one."""
    with Load(pair.dsn, tmp_path) as load:
        for _ in range(3):
            load.go_on(50)
            with pair.primary.connect() as connection:
                old = OldWorker(connection)
            pair.kill()
            pair.promote()
            pair.rewind()
            with pair.primary.connect() as connection:
                old.is_refused(connection)
                current = OldWorker(connection)
                with pytest.raises(pytest.fail.Exception, match="not in standby mode"):
                    pair.primary.run("pg_ctl", "-w", "-D", pair.primary.data, "promote")
                for claim in current.pairs.items():
                    assert refused(connection, "select queue.succeed(%s, %s)", *claim) == "accepted"
        load.go_on(50)
        load.end(pair.primary)


def test_workers_that_come_back_late(pair: Pair) -> None:
    """A failover may take longer than a worker may be silent: its time counts from the promotion."""
    with pair.primary.connect() as connection:
        old = OldWorker(connection)
        connection.execute("update queue.worker set last_seen_at = now() - interval '2 hours'")
    pair.kill()
    with pair.standby.connect() as connection:
        ((before,),) = connection.execute("select clock_timestamp()").fetchall()
    pair.promote()
    with pair.primary.connect() as connection:
        connection.execute("set synchronous_commit = local")
        # Whoever comes first does what is due.
        late = "select reaped, next_expiry >= %s + interval '1 hour' from queue.reap()"
        assert connection.execute(late, [before]).fetchall() == [(0, True)]
        ((first,),) = connection.execute("select queue.register_worker('first')").fetchall()
        connection.execute("select queue.fetch(%s)", [first])
        assert connection.execute("select reaped from queue.tick()").fetchall() == [(0,)]
        assert refused(connection, "select queue.heartbeat(%s)", old.id) == "accepted"
        for claim in old.pairs.items():
            assert refused(connection, "select queue.succeed(%s, %s)", *claim) == "accepted"


def test_a_primary_that_was_made_read_only(pair: Pair, tmp_path: Path) -> None:
    """Its connections live on, as some tools demote: clients leave it, and look for the new one."""
    with pgdefer.App(pair.dsn) as app, Load(pair.dsn, tmp_path) as load:
        app.defer("pay", {"lock": "app"}, lock="app")
        load.go_on()
        with pair.primary.connect() as connection:
            connection.execute("alter system set default_transaction_read_only = on")
            connection.execute("select pg_reload_conf()")
            shown = "show transaction_read_only"
            wait_for(lambda: connection.execute(shown).fetchall() == [("on",)])
        wait_for(lambda: is_refused(app))  # each session reads the setting in its own time
        pair.promote()
        wait_for_standbys(pair, on=False)
        app.defer("pay", {"lock": "app"}, lock="app")
        load.go_on()
        load.end(pair.primary)


def is_refused(app: pgdefer.App) -> bool:
    try:
        app.defer("pay", {"lock": "app"}, lock="app")
    except psycopg.errors.ReadOnlySqlTransaction:
        return True
    return False


def wait_for_standbys(pair: Pair, *, on: bool) -> None:
    """Let commits wait for a standby, or not: after a failover there may be none for a while."""
    with pair.primary.connect() as connection:
        names = "'*'" if on else "''"
        connection.execute(f"alter system set synchronous_standby_names = {names}".encode())
        connection.execute("select pg_reload_conf()")


def test_a_partition(folder: Path, tmp_path: Path, server: EmbeddedServer) -> None:
    """The primary is cut off, and goes on: for clients on its side, nothing is acknowledged."""
    network = [Proxy(folder, 6432, 5432), Proxy(folder, 6433, 5433), Proxy(folder, 7432, 5432)]
    pair = Pair(folder, server, SYNCHRONOUS + "wal_receiver_timeout = '2 s'\n", through=7432)
    beside = Producer(dsn_of(folder, 5432, 5433), "neighbour")  # on the primary's side
    try:
        with Load(dsn_of(folder, 6432, 6433), tmp_path) as load:
            beside.start()
            load.go_on()
            with pair.primary.connect() as connection:
                old = OldWorker(connection)
                for proxy in (network[0], network[2]):
                    proxy.hold()
                pair.promote()
                wait_for_standbys(pair, on=False)
                told: list[str] = []
                one = next(iter(old.pairs.items()))
                report = threading.Thread(
                    target=lambda: told.append(
                        refused(connection, "select queue.succeed(%s, %s)", *one)
                    )
                )
                report.start()
                count = len(beside.acknowledged)
                network[0].cut()  # as the clients' time limits do
                load.go_on()
                assert len(beside.acknowledged) == count, "acknowledged without the standby"
                assert told == []
                kill(pair.standby)  # it is fenced
                report.join(60)
                assert told not in ([], ["accepted"])
            pair.rewind()
            wait_for_standbys(pair, on=True)
            for proxy in network:
                proxy.heal()
            with pair.primary.connect() as connection:
                old.is_refused(connection)
            count = len(beside.acknowledged)
            wait_for(lambda: len(beside.acknowledged) > count + 20)
            load.go_on()
            load.end(pair.primary, beside)
    finally:
        pair.stop()
        for proxy in network:
            proxy.close()


async def test_a_commit_that_is_cancelled(folder: Path, server: EmbeddedServer) -> None:
    """While it waits for the standby: PostgreSQL acknowledges it with a warning, and Python raises."""
    network = Proxy(folder, 7432, 5432)
    pair = Pair(folder, server, through=7432)
    waiting = "select pid from pg_stat_activity where wait_event = 'SyncRep'"
    try:
        with pair.primary.connect() as connection, pair.primary.connect() as admin:
            network.hold()
            said: list[str] = []
            connection.add_notice_handler(lambda notice: said.append(str(notice.message_primary)))
            defer = "select queue.defer('cancelled')"
            call = asyncio.create_task(asyncio.to_thread(refused, connection, defer))
            await asyncio.to_thread(wait_for, lambda: admin.execute(waiting).rowcount)
            admin.execute(f"select pg_cancel_backend(pid) from ({waiting}) w".encode())
            assert await call == "accepted"
            assert said == ["canceling wait for synchronous replication due to user request"]
            app = pgdefer.App(pair.dsn)
            job = asyncio.create_task(app.defer_async("cancelled"))
            await asyncio.to_thread(wait_for, lambda: admin.execute(waiting).rowcount)
            job.cancel()
            with pytest.raises(asyncio.CancelledError):
                await job
            await app.close_async()
        pair.kill()
        network.cut()
        pair.promote()
        with pair.primary.connect() as connection:
            assert connection.execute("select from queue.jobs").fetchall() == []
    finally:
        pair.stop()
        network.close()


async def test_without_any_standby(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls wait for it until their time is over; the sessions that go on waiting stay few."""
    monkeypatch.setattr("pgdefer.database.watchdog.CALL_TIMEOUT", 0.3)
    app = pgdefer.App(pair.dsn)
    sessions = (
        "select state from pg_stat_activity where backend_type = 'client backend'"
        " and pid <> pg_backend_pid()"
    )

    @app.task(name="t")
    async def task() -> None: ...

    def tries() -> int:
        return sum(record.name == "pgdefer.worker" for record in caplog.records)

    worker = pgdefer.Worker(app, heartbeat_every=0.3)
    running = asyncio.create_task(worker.run_async())
    with pair.primary.connect() as connection:
        await asyncio.to_thread(wait_for, lambda: worker.id)
        pair.standby.stop("immediate")
        connection.execute("set synchronous_commit = local")
        connection.execute("select queue.defer('t') from generate_series(1, 3)")
        await asyncio.to_thread(wait_for, lambda: tries() >= 40)
        # For jobs, sleep and heartbeats, one that waits, and one that looks whether it still does.
        assert connection.execute(sessions).rowcount <= 6
        await asyncio.to_thread(pair.standby.start)
        await asyncio.to_thread(wait_for, lambda: worker.finished >= 3)
        states = "select state, attempts from queue.jobs"
        await asyncio.to_thread(
            wait_for, lambda: connection.execute(states).fetchall() == [("succeeded", 1)] * 3
        )
        await asyncio.to_thread(wait_for, lambda: connection.execute(sessions).rowcount <= 3)
    worker.stop()
    await running
    await app.close_async()
