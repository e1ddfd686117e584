"""What is lost where the server goes back: exactly what the standby, or the archive, had not received.

A journal outside of the server has each acknowledged defer, claim and outcome with the number of its
transaction; the WAL of the lost server says where each of these was committed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from clusters import Cluster, running
from failover import SETTINGS, Connection, Pair, folder_of_servers, refused
from pgdefer.database.embedded import EmbeddedServer, sql_folder
from proxy import Proxy
from support import ROOT, server_program
from workers import wait_for

pytestmark = [pytest.mark.client, pytest.mark.long]

PAGE = ROOT / "docs" / "how-to" / "failover.md"


@pytest.fixture
def folder(server: EmbeddedServer) -> Iterator[Path]:
    with folder_of_servers(server) as made:
        yield made


DEFER = """
select queue.defer('pay', jsonb_build_object('number', %s::int),
  options => '{"idempotency_key": "{number}"}'), pg_current_xact_id()::text::bigint
"""


class Claimed(NamedTuple):
    """A job with its own number, and its claim."""

    number: int
    id: int
    claim: int


class Journal:
    """What clients were told, with the numbers of their transactions."""

    def __init__(self, connection: Connection) -> None:
        self.deferred: dict[int, int] = {}
        self.ids: set[int] = set()
        self.claimed: dict[Claimed, int] = {}
        self.ended: dict[Claimed, int] = {}
        self._numbers = itertools.count(1)
        self._connection = connection
        ((self.worker,),) = self._rows("select queue.register_worker('old')")

    def _rows(self, call: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self._connection.execute(call.encode(), parameters).fetchall()

    def defer(self, connection: Connection | None = None) -> int:
        """Defer a job that carries a number of its own."""
        number = next(self._numbers)
        used = connection or self._connection
        ((id_, self.deferred[number]),) = used.execute(DEFER, [number]).fetchall()
        self.ids.add(id_)
        return number

    def claim(self, jobs: int) -> list[Claimed]:
        rows = self._rows(
            "select args ->> 'number', id, claim, pg_current_xact_id()::text::bigint"
            " from queue.fetch(%s, null, %s)", self.worker, jobs,
        )  # fmt: skip
        assert len(rows) == jobs
        claims = {Claimed(int(number), id_, claim): xid for number, id_, claim, xid in rows}
        self.claimed |= claims
        return list(claims)

    def succeed(self, claimed: Claimed) -> None:
        call = "select queue.succeed(%s, %s), pg_current_xact_id()::text::bigint"
        ((_, self.ended[claimed]),) = self._rows(call, claimed.id, claimed.claim)

    def work(self, jobs: int, claims: int) -> None:
        """Defer jobs, claim some, and end half of those.

        Each claim has its own number, as a server that goes back knows up to 32 further ones.
        """
        for _ in range(jobs):
            self.defer()
        for turn in range(claims):
            (claimed,) = self.claim(1)
            if turn % 2 == 0:
                self.succeed(claimed)

    def defer_again(self, connection: Connection) -> None:
        """Defer all again: those that are known are not deferred twice."""
        for number in self.deferred:
            connection.execute(DEFER, [number])
        call = "select count(*), count(distinct args) from queue.jobs where task = 'pay'"
        count = len(self.deferred)
        assert connection.execute(call.encode()).fetchall() == [(count, count)]

    def compare(self, connection: Connection, kept: set[int]) -> dict[str, int]:
        """Check that the server knows exactly what these transactions did; count what it lacks."""
        jobs = {
            number: (id_, state, claim)
            for number, id_, state, claim in connection.execute(
                "select (args ->> 'number')::int, id, state, claim from queue.jobs where task = 'pay'"
            )
        }
        assert set(jobs) == {number for number, xid in self.deferred.items() if xid in kept}
        for claimed, xid in self.claimed.items():
            if xid in kept and self.ended.get(claimed) not in kept:
                assert jobs[claimed.number] == (claimed.id, "running", claimed.claim)
            elif xid not in kept and claimed.number in jobs:
                assert jobs[claimed.number][1:] == ("ready", None)
        succeeded = {number for number, job in jobs.items() if job[1] == "succeeded"}
        assert succeeded == {done.number for done, xid in self.ended.items() if xid in kept}
        return {
            "jobs": len(self.deferred) - len(jobs),
            "claims": sum(xid not in kept for xid in self.claimed.values()),
            "ends": sum(xid not in kept for xid in self.ended.values()),
        }

    def refuse(self, connection: Connection, kept: set[int]) -> None:
        """Others claim: no number comes again, and reports on lost claims are refused."""
        ((new,),) = connection.execute("select queue.register_worker('new')").fetchall()
        assert new > self.worker
        connection.execute("select queue.defer('pay') from generate_series(1, 60)")
        call = "select id, claim from queue.fetch(%s, null, 200)"
        others = dict(connection.execute(call, [new]).fetchall())
        assert min(others.values()) > max(claimed.claim for claimed in self.claimed)
        lost = [claimed for claimed, xid in self.claimed.items() if xid not in kept]
        assert {claimed.id for claimed in lost} & set(others), "claimed again, or others' ids"
        for claimed in lost:
            for call in ("succeed(%s, %s)", "release(%s, %s)", "extend(%s, %s, '1 h')"):
                told = refused(connection, f"select queue.{call}", claimed.id, claimed.claim)
                assert told in ("QJ001", "QJ002"), told
        # A claim that is known is still its worker's: what it has done meanwhile is taken.
        for claimed, xid in self.claimed.items():
            if xid in kept and self.ended.get(claimed) not in kept:
                call = "select queue.succeed(%s, %s)"
                assert refused(connection, call, claimed.id, claimed.claim) == "accepted"
        ended = json.dumps(
            [{"id": id_, "claim": claim, "outcome": "succeeded"} for id_, claim in others.items()]
        )
        call = "select error from queue.finish_many(%s) where error is not null"
        assert connection.execute(call, [ended]).fetchall() == []
        assert connection.execute("select * from queue.check()").fetchall() == []


def commits(cluster: Cluster, server: EmbeddedServer, since: str) -> dict[int, int]:
    """Return where the transactions of a server's WAL were committed: positions by their numbers."""
    program = server_program(server, "pg_waldump") or server.bin_dir / "pg_waldump"
    command = [program, "-p", cluster.data / "pg_wal", "-r", "Transaction", "-s", since]
    # It ends with an error where the WAL ends.
    text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    found = re.finditer(r"tx: +(\d+), lsn: (\w+/\w+), .*desc: COMMIT ", text)
    return {int(line[1]): position(line[2]) for line in found}


def position(lsn: str) -> int:
    high, low = lsn.split("/")
    return (int(high, 16) << 32) + int(low, 16)


def rows(connection: Connection, call: str) -> list[tuple[Any, ...]]:
    return connection.execute(call.encode()).fetchall()


def fork_of(connection: Connection) -> int:
    """Return where a promoted server has left its primary's WAL."""
    ((line,),) = rows(connection, "select pg_read_file('pg_wal/00000002.history')")
    return position(line.split()[1])


def commands(marker: str) -> str:
    """Return the block of the page that contains the marker."""
    blocks = re.findall(
        r"^```console\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    (found,) = [block for block in blocks if marker in block]
    return str(found)


def test_an_asynchronous_standby(folder: Path, server: EmbeddedServer) -> None:
    network = Proxy(folder, 7432, 5432)
    pair = Pair(folder, server, "", through=7432)
    try:
        with pair.primary.connect() as connection, pair.primary.connect() as slow:
            ((start,),) = rows(connection, "select pg_current_wal_insert_lsn()")
            journal = Journal(connection)
            journal.work(100, 50)
            slow.execute("begin")
            # Deferred before the cut, and committed after it.
            late = journal.defer(slow)
            ((now,),) = rows(connection, "select pg_current_wal_insert_lsn()::text")
            with pair.standby.connect() as reader:
                received = f"select pg_last_wal_replay_lsn() >= '{now}'"
                wait_for(lambda: rows(reader, received) == [(True,)])
            network.hold()
            slow.execute("commit")
            journal.work(100, 80)
            for claimed in list(journal.claimed)[1:30:2]:
                journal.succeed(claimed)
        pair.kill()
        network.cut()
        pair.promote()
        where = commits(pair.standby, server, start)
        with pair.primary.connect() as connection:
            end = fork_of(connection)
            kept = {xid for xid, at in where.items() if at < end}
            lost = journal.compare(connection, kept)
            assert lost == {"jobs": 101, "claims": 80, "ends": 55}
            assert journal.deferred[late] not in kept
            look_up(connection)
            jobs, ends = compare_with_the_old(pair, server)
            assert jobs == {number for number, xid in journal.deferred.items() if xid not in kept}
            assert ends == {
                done.number
                for done, xid in journal.ended.items()
                if xid not in kept and journal.deferred[done.number] in kept
            }
            assert ends
            defer_under_other_ids(connection, journal)
            journal.refuse(connection, kept)
        back_as_a_standby(pair, journal, kept)
    finally:
        pair.stop()
        network.close()


def defer_under_other_ids(connection: Connection, journal: Journal) -> None:
    """Defer all again: as the page says, no id of a lost job is used again."""
    (jump,) = re.findall('psql -c "(.*)"', commands("setval"))
    kept = rows(connection, "select id from queue.jobs")
    rows(connection, jump)
    journal.defer_again(connection)
    made = set(rows(connection, "select id from queue.jobs")) - set(kept)
    assert made
    assert not {id_ for (id_,) in made} & journal.ids


def look_up(connection: Connection) -> None:
    """What the page says of the promoted server alone: where, and when, its WAL ends."""
    (query,) = re.findall('psql -c "(.*)"', commands("pg_last_wal_replay_lsn"))
    ((lsn, at),) = rows(connection, query)
    assert position(lsn) == fork_of(connection)
    # The last job that it has received was deferred before that time.
    ((last,),) = rows(connection, "select max(created_at) from queue.jobs where task = 'pay'")
    assert last <= at


def compare_with_the_old(pair: Pair, server: EmbeddedServer) -> tuple[set[int], set[int]]:
    """What the page says where the old primary's disk is left: its jobs and ends that are lost."""
    psql = server_program(server, "psql") or "psql"
    options = dict(pair.primary._options)
    environment = dict(options.get("env") or os.environ) | {
        "PATH": os.pathsep.join([str(server.bin_dir), str(Path(psql).parent), os.environ["PATH"]]),
        "DATA": str(pair.standby.data),
        "OLD": f"host={pair.folder} port=5999 user=postgres dbname=postgres",
        "NEW": pair.primary.dsn(),
    }
    work = pair.folder / "work"
    work.mkdir()
    work.chmod(0o777)
    options |= {"cwd": work, "env": environment}
    # The first line names the servers.
    script = commands("comm -23").partition("\n")[2]
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        **options,
    )
    assert not done.returncode, done.stdout + done.stderr

    def numbers(name: str) -> set[int]:
        found = re.findall(r'"number": (\d+)', (work / name).read_text())
        assert len(found) == len(set(found))
        return set(map(int, found))

    return numbers("lost-jobs"), numbers("lost-ends")


def back_as_a_standby(pair: Pair, journal: Journal, kept: set[int]) -> None:
    """pg_rewind makes the old primary forget; when it is promoted, it refuses the old claims too."""
    pair.rewind()
    with pair.primary.connect() as connection:
        ((current,),) = rows(connection, "select queue.register_worker('current')")
        rows(connection, "select queue.defer('mail')")
        ((id_, claim),) = rows(connection, f"select id, claim from queue.fetch({current})")
    pair.switch_over()
    assert pair.primary.port == 5432
    with pair.primary.connect() as connection:
        assert refused(connection, "select queue.succeed(%s, %s)", id_, claim) == "accepted"
        for claimed, xid in journal.claimed.items():
            if xid not in kept:
                call = "select queue.succeed(%s, %s)"
                told = refused(connection, call, claimed.id, claimed.claim)
                assert told in ("QJ001", "QJ002"), told
        ((new,),) = rows(connection, "select queue.register_worker('newer')")
        assert new > current
        rows(connection, "select queue.defer('mail')")
        ((_, later),) = rows(connection, f"select id, claim from queue.fetch({new})")
        assert later > claim
        assert rows(connection, "select * from queue.check()") == []


def test_a_point_in_time(folder: Path, server: EmbeddedServer) -> None:
    archive = folder / "archive"
    archive.mkdir()
    archive.chmod(0o777)
    first, second = Cluster(folder, server), Cluster(folder, server, 5433)
    first.initdb(f"{SETTINGS}archive_mode = on\narchive_command = 'cp %p {archive}/%f'\n")
    with running(first, second):
        first.start()
        with first.connect() as connection:
            connection.execute((sql_folder() / "pgdefer.sql").read_bytes())
            ((start,),) = rows(connection, "select pg_current_wal_insert_lsn()")
            journal = Journal(connection)
            journal.work(40, 20)
            command = ("-d", first.dsn(), "-D", second.data, "-c", "fast")
            first.run("pg_basebackup", *command)
            journal.work(40, 20)
            ((point,),) = rows(connection, "select pg_create_restore_point('here')")
            journal.work(80, 60)
            ((file,),) = rows(connection, "select pg_walfile_name(pg_switch_wal())")
            wait_for((archive / file).exists)
            where = commits(first, server, start)
        first.stop("immediate")
        with (second.data / "postgresql.conf").open("a") as conf:
            conf.write(f"restore_command = 'cp {archive}/%f %p'\narchive_mode = off\n")
            conf.write("recovery_target_name = 'here'\nrecovery_target_action = 'promote'\n")
        (second.data / "recovery.signal").touch()
        second.start()
        with second.connect() as connection:
            wait_for(lambda: rows(connection, "select pg_is_in_recovery()") == [(False,)])
            kept = {xid for xid, at in where.items() if at < position(point)}
            lost = journal.compare(connection, kept)
            assert lost == {"jobs": 80, "claims": 60, "ends": 30}
            journal.refuse(connection, kept)
