"""Dump and restore, and pg_upgrade: every job comes back unchanged, and workers continue."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer.database.embedded import EmbeddedServer, sql_folder, temporary_server
from releases import catalog, difference
from support import ROOT, create_database, install_as, open_folder, refused, server_program

pytestmark = pytest.mark.long

ROLES = ["dumped_producer", "dumped_worker", "dumped_limited"]

# Jobs in every state, by every gate; the task names the expected outcome.
FILL = """
do $fill$
declare
  v_worker bigint;
  v_dead bigint;
  v_other bigint;
  v record;
begin
  perform queue.register_task('registered', '{"queue": "q", "retry": {"max_attempts": 3, "base": "1 hour"}, "lock": "r {n}"}');
  perform queue.configure_queue('limited', '{"max_running": 1, "rate": {"limit": 100, "per": "1 min"}, "retain": "3 days"}');
  perform queue.create_queue('empty');
  perform queue.schedule('yearly', '@yearly', 'by schedule', timezone => 'Europe/Paris', options => '{"queue": "cron"}');
  perform queue.schedule('disabled', 'every 90 seconds', 'by schedule', options => '{"enabled": false}');
  v_worker := queue.register_worker('kept', null, '{"host": "h"}');
  v_dead := queue.register_worker('dead', null, '{"dead_after": "1 day"}');
  perform queue.defer('succeeded', '{"n": 1}');
  perform queue.defer('failed', '{"n": 2}');
  perform queue.defer('retried', options => '{"retry": {"max_attempts": 5, "base": "1 hour"}}');
  perform queue.defer('cancelled');
  perform queue.defer('running', lock => 'running');
  perform queue.defer('handed over', lock => 'h');
  commit;
  for v in select f.id, f.claim, f.task from queue.fetch(v_worker, null, 4) f loop
    case v.task
      when 'succeeded' then perform queue.succeed(v.id, v.claim, '{"r": [1, null]}');
      when 'cancelled' then perform queue.release(v.id, v.claim);
      else perform queue.fail(v.id, v.claim, 'it failed', '{"traceback": "t"}');
    end case;
  end loop;
  commit;
  perform queue.cancel((select j.id from queue.jobs j where j.task = 'cancelled'));
  commit;
  perform queue.fetch(v_dead, null, 2);
  commit;
  perform queue.defer('blocked by running', lock => 'running');
  perform queue.defer('after the handover', lock => 'h');
  perform queue.defer('ordered 1', lock => 'ordered');
  perform queue.defer('ordered 2', lock => 'ordered', priority => 9);
  perform queue.defer('mutex 1', lock => 'mutex', options => '{"lock_mode": "mutex"}');
  perform queue.defer('mutex 2', lock => 'mutex', options => '{"lock_mode": "mutex"}');
  perform queue.defer('slot', concurrency_key => 'k', concurrency_limit => 1) from generate_series(1, 3);
  perform queue.defer('slots', options => '{"concurrency": [{"key": "k", "limit": 1}, {"key": "l", "limit": 2}]}');
  perform queue.defer('limited', queue => 'limited') from generate_series(1, 3);
  perform queue.defer('unique', queueing_lock => 'u', options => '{"unique_until": "finish"}');
  perform queue.defer('once', options => '{"idempotency_key": "k"}');
  perform queue.defer('scheduled', scheduled_at => '2199-01-01');
  perform queue.defer('held', options => '{"held": true}');
  perform queue.defer('paused', queue => 'paused');
  perform queue.defer('expires', options => '{"expires_at": "2199-01-01", "timeout": "5 min", "retain": "1 day"}');
  perform queue.defer('ready', '{"text": "é ☃ \\\\ '' \\" % $$", "n": 1.50}', queue => 'a "queue" of ''words'' é', priority => -3, deadline => '2190-01-01',
                      options => '{"description": "d", "headers": {"h": "1"}}');
  perform queue.defer('registered', '{"n": 1}');
  v_other := queue.defer('needed');
  perform queue.defer('needs', needs => array[v_other]);
  perform queue.defer('upstream failed', needs => array[(select min(j.id) from queue.jobs j where j.task = 'failed')]);
  perform queue.defer('proceeds', needs => array[(select min(j.id) from queue.jobs j where j.task = 'failed')], options => '{"on_need_failure": "proceed"}');
  commit;
  perform queue.pause('paused'), queue.pause(task => 'mutex 2');
  commit;
  perform queue.tick();
  commit;
  perform queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'backlog')) from generate_series(1, 30) n));
  commit;
  perform queue._lock_admission(true);
  perform queue._admit(10);
  commit;
  -- what nobody has admitted or settled yet
  perform queue.succeed(j.id, j.claim) from queue.jobs j where j.task = 'handed over';
  commit;
  perform queue.defer('not admitted');
  perform queue.defer('not admitted', queueing_lock => 'v');
  commit;
  perform queue.deregister_worker(v_worker);
  perform queue.register_worker('kept', null, '{"host": "h"}');
  commit;
end $fill$
"""

# Transaction ids of the source are far ahead of a new cluster's.
BURN = """
do $$
begin
  for i in 1 .. 3000 loop
    perform pg_current_xact_id();
    commit;
  end loop;
end $$
"""

STATES = {
    "succeeded", "failed", "cancelled", "running", "ready", "scheduled", "waiting",
    "upstream_failed", "blocked", "held",
}  # fmt: skip

# The tasks that run once everything is released, and how often.
EXPECTED = {
    "running": 1, "blocked by running": 1, "after the handover": 1, "ordered 1": 1, "ordered 2": 1,
    "mutex 1": 1, "mutex 2": 1, "slot": 3, "slots": 1, "limited": 3, "unique": 1, "once": 1, "paused": 1,
    "held": 1, "expires": 1, "ready": 1, "registered": 1, "needed": 1, "needs": 1, "proceeds": 1,
    "backlog": 30, "not admitted": 2,
}  # fmt: skip

TABLES = """
select c.relname from pg_class c
where c.relnamespace = 'queue'::regnamespace and c.relkind = 'r' and c.relname <> 'installation' order by 1
"""


@dataclasses.dataclass
class Contents:
    """All of the queue in a database."""

    jobs: list[Any]
    views: dict[str, list[Any]]
    tables: dict[str, tuple[int, str]]
    sequences: list[Any]
    catalog: dict[tuple[str, str], str]


def look(connection: psycopg.Connection[Any]) -> Contents:
    def rows(statement: str) -> list[Any]:
        return connection.execute(statement.encode()).fetchall()

    views = ["attempts", "audit", "queues", "tasks", "locks", "semaphores", "shares", "schedules"]
    views += ["schedule_runs"]
    return Contents(
        rows("select to_jsonb(j) from queue.jobs j order by id"),
        {v: rows(f"select to_jsonb(x) from queue.{v} x order by to_jsonb(x)::text") for v in views},
        {
            table: rows(
                f"select count(*), md5(string_agg(x::text, ' ' order by x::text)) from queue.{table} x"
            )[0]
            for (table,) in rows(TABLES)
        },
        rows(
            "select sequencename, last_value from pg_sequences where schemaname = 'queue' order by 1"
        ),
        catalog(connection),
    )


def fill(connection: psycopg.Connection[Any]) -> None:
    connection.execute("set pgdefer.notify = off")
    connection.execute(FILL.encode())
    connection.execute(BURN.encode())
    states = {row[0] for row in connection.execute("select distinct state from queue.jobs")}
    assert states == STATES
    for table in (
        "pending_settlement",
        "backlog_part",
        "lease",
        "need",
        "expiry",
        "queueing_lock",
        "idempotency_key",
        "semaphore",
    ):
        row = connection.execute(f"select count(*) > 0 from queue.{table}".encode()).fetchone()
        assert row == (True,) or table == "lease", table
    assert connection.execute("select * from queue.check()").fetchall() == []


def carry_on(connection: psycopg.Connection[Any]) -> None:
    """Release everything, run it, and check that each job ran as often as it should, in order."""
    connection.execute("set pgdefer.notify = off")
    row = connection.execute(
        "select max(id), (select max(claim) from queue.active_job) from queue.job"
    ).fetchone()
    assert row
    largest, last_claim = row
    row = connection.execute("select queue.defer('new')").fetchone()
    assert row
    assert row[0] > largest
    row = connection.execute(
        "select queue.defer('once', options => '{\"idempotency_key\": \"k\"}') = id"
        " from queue.jobs where task = 'once'"
    ).fetchone()
    assert row == (True,)
    connection.execute("select queue.resume('paused'), queue.resume(task => 'mutex 2')")
    connection.execute("select queue.unhold(id) from queue.jobs where task = 'held'")
    # The earlier worker has died: its claim ends, and no other's.
    connection.execute(
        "update queue.worker set last_seen_at = now() - interval '1 hour', dead_after = '0' where name = 'dead'"
    )
    reaped = connection.execute("select reaped from queue.tick()").fetchone()
    assert reaped == (1,)
    worker = connection.execute("select queue.register_worker('runner')").fetchone()
    assert worker
    ran: list[str] = []
    for _ in range(63):
        for id, claim, task in connection.execute(
            "select id, claim, task from queue.fetch(%s, null, 5)", worker
        ).fetchall():
            assert claim > last_claim
            ran.append(task)
            connection.execute(
                "select queue.finish_many(jsonb_build_array(jsonb_build_object('id', %s::bigint,"
                " 'claim', %s::bigint, 'outcome', 'succeeded')))",
                (id, claim),
            )
    ran.remove("new")
    assert {task: ran.count(task) for task in ran} == EXPECTED
    assert ran.index("ordered 1") < ran.index("ordered 2")
    assert ran.index("needed") < ran.index("needs")
    left = connection.execute(
        "select task, state from queue.jobs where state not in ('succeeded', 'cancelled') order by 1"
    ).fetchall()
    assert left == [
        ("failed", "failed"),
        ("retried", "scheduled"),
        ("scheduled", "scheduled"),
        ("upstream failed", "upstream_failed"),
    ]
    connection.execute("select queue.retry(array[min(id)]) from queue.jobs where task = 'failed'")
    row = connection.execute(
        "select state from queue.jobs where task = 'upstream failed'"
    ).fetchone()
    assert row == ("waiting",)
    assert connection.execute("select * from queue.check()").fetchall() == []


def compare(before: Contents, after: Contents, *, from_wal: bool = False) -> None:
    assert after.jobs == before.jobs
    assert after.views == before.views
    assert {k: v[0] for k, v in after.tables.items()} == {k: v[0] for k, v in before.tables.items()}
    if from_wal:
        # Which is 32 numbers ahead of a sequence.
        for (name, value), (_, was) in zip(after.sequences, before.sequences, strict=True):
            assert (value or 0) >= (was or 0), name
    else:
        assert after.sequences == before.sequences
    assert difference(after.catalog, before.catalog) == {}


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for dumps."""
    with open_folder("dump") as made:
        yield made


def make_roles(server: EmbeddedServer) -> None:
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        for name in ROLES:
            connection.execute(
                f"do $$ begin create role {name}; exception when duplicate_object then null; end $$".encode()
            )


def grant(connection: psycopg.Connection[Any]) -> None:
    connection.execute("select queue.grant_access('dumped_producer', 'producer')")
    connection.execute("select queue.grant_access('dumped_worker', 'worker')")
    connection.execute("select queue.grant_access('dumped_limited', 'reader', '{a*}')")


def run(command: list[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done


def round_trip(  # noqa: PLR0917
    source: str, target: str, programs: EmbeddedServer, method: str, form: str, folder: Path
) -> None:
    """Dump a database and restore it into another, as docs/backup.md says."""
    tools = {name: server_program(programs, name) for name in ("pg_dump", "pg_restore", "psql")}
    missing = [name for name, path in tools.items() if path is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is missing")
    dump, restore, psql = (str(path) for path in tools.values())
    path = folder / "dump"
    stop = ["-X", "-q", "-v", "ON_ERROR_STOP=1", "-o", os.devnull]
    if method == "plain":
        run([dump, "-d", source, "-f", path])
        done = run([psql, *stop, "-d", target, "-f", path])
    elif method == "custom":
        run([dump, "-d", source, "-Fc", "-f", path])
        done = run([restore, "--exit-on-error", "-d", target, path])
    elif method == "directory":
        run([dump, "-d", source, "-Fd", "-j2", "-f", path])
        done = run([restore, "--exit-on-error", "-j2", "-d", target, path])
    else:
        run([dump, "-d", source, "-n", "queue", "-Fc", "-f", path])
        done = run([restore, "--exit-on-error", "-d", target, path])
        if form == "extension":
            with psycopg.connect(target, autocommit=True) as connection:
                connection.execute("create extension pgdefer")
                connection.execute("select queue.install()")
    assert done.stderr == ""


METHODS = ["plain", "custom", "directory", "-n queue"]


@pytest.mark.parametrize("method", METHODS)
def test_round_trip(
    server: EmbeddedServer, blank_dsn: str, scratch: Path, form: str, method: str
) -> None:
    make_roles(server)
    with psycopg.connect(blank_dsn, autocommit=True) as connection:
        install_as(connection, form)
        grant(connection)
        fill(connection)
        before = look(connection)
    name = f"restored_{form}_{METHODS.index(method)}"
    create_database(server, name, "template0")
    try:
        round_trip(blank_dsn, server.dsn(name), server, method, form, scratch)
        with psycopg.connect(server.dsn(name), autocommit=True) as connection:
            compare(before, look(connection))
            assert connection.execute("select * from queue.check()").fetchall() == []
            carry_on(connection)
    finally:
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"drop database {name} with (force)".encode())
            for role in ROLES:
                connection.execute(f"drop owned by {role}".encode())


def test_without_owners_and_privileges(
    server: EmbeddedServer, blank_dsn: str, scratch: Path
) -> None:
    """Whoever restores owns the queue, and install gives each role its own rights, and no more."""
    dump, restore = (server_program(server, name) for name in ("pg_dump", "pg_restore"))
    if dump is None or restore is None:
        pytest.skip("pg_dump or pg_restore is missing")
    make_roles(server)
    path = scratch / "dump"
    with psycopg.connect(blank_dsn, autocommit=True) as connection:
        install_as(connection, "plain")
        grant(connection)
        fill(connection)
        before = look(connection)
    run([dump, "-d", blank_dsn, "-Fc", "-f", path])
    name = "restored_bare"
    create_database(server, name, "template0")
    target = server.dsn(name)
    try:
        run([restore, "--exit-on-error", "--no-owner", "--no-privileges", "-d", target, path])
        with psycopg.connect(target, autocommit=True) as connection:
            connection.execute("select queue.install()")
            compare(before, look(connection))
            connection.execute("set role dumped_producer")
            assert refused(connection, "select queue.defer(%s)", "t") == "accepted"
            assert refused(connection, "select queue.uninstall(true)") == "42501"
    finally:
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"drop database {name} with (force)".encode())


def test_a_worker_comes_during_a_restore(older: EmbeddedServer, scratch: Path) -> None:
    """It is refused until the restore has ended. Else it would begin to number transactions anew,
    and jobs that were restored later would never run."""
    programs = older
    dump, restore = (server_program(programs, name) for name in ("pg_dump", "pg_restore"))
    if dump is None or restore is None:
        pytest.skip("pg_dump or pg_restore is missing")
    path, order = scratch / "dump", scratch / "order"
    make_roles(older)
    create_database(older, "early_source")
    with psycopg.connect(older.dsn("early_source"), autocommit=True) as connection:
        install_as(connection, "plain")
        fill(connection)
    run([dump, "-d", older.dsn("early_source"), "-Fc", "-f", path])
    with temporary_server(older.bin_dir) as server:
        target = server.dsn("postgres")
        run([restore, "--exit-on-error", "--section=pre-data", "-d", target, path])
        data = [
            line
            for line in run([restore, "-l", path]).stdout.splitlines()
            if " TABLE DATA " in line or " SEQUENCE SET " in line
        ]
        places = [n for n, line in enumerate(data) if " TABLE DATA queue log " in line]
        for part in (data[: places[0]], data[places[0] :]):
            order.write_text("\n".join(part))
            run([restore, "--exit-on-error", "-L", order, "-d", target, path])
            with psycopg.connect(target, autocommit=True) as connection:
                assert refused(connection, "select queue.register_worker('w')") == "55000"
                assert refused(connection, "select queue.tick()") == "55000"
        run([restore, "--exit-on-error", "--section=post-data", "-d", target, path])
        with psycopg.connect(target, autocommit=True) as connection:
            carry_on(connection)


@pytest.mark.parametrize("what", ["--schema-only", "--exclude-table-data=queue.*"])
def test_without_data(server: EmbeddedServer, blank_dsn: str, form: str, what: str) -> None:
    with psycopg.connect(blank_dsn, autocommit=True) as connection:
        install_as(connection, form)
        connection.execute("select queue.defer('t')")
    dump, psql = (server_program(server, name) for name in ("pg_dump", "psql"))
    if dump is None or psql is None:
        pytest.skip("pg_dump or psql is missing")
    schema = run([dump, what, "-d", blank_dsn]).stdout
    name = f"no_data_{form}_{len(what)}"
    create_database(server, name, "template0")
    try:
        run([psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", server.dsn(name)], input=schema)
        with psycopg.connect(server.dsn(name), autocommit=True) as connection:
            connection.execute("select queue.defer('t')")
            connection.execute("select queue.install()")
            connection.execute("select queue.register_worker('w')")
            claimed = "select f.task from queue.workers w, queue.fetch(w.id) f"
            assert connection.execute(claimed.encode()).fetchall() == [("t",)]
            assert connection.execute("select * from queue.check()").fetchall() == []
    finally:
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"drop database {name} with (force)".encode())


def system_binaries() -> Path | None:
    found = subprocess.run(
        [ROOT / "tests" / "system-postgres"], capture_output=True, text=True, check=True
    ).stdout.strip()
    return Path(found) if found else None


@pytest.fixture(scope="module")
def older(server: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A server of the system's older PostgreSQL."""
    binaries = system_binaries()
    if binaries is None or int(binaries.parent.name) >= server.major:
        pytest.skip("there is no PostgreSQL here that is older than the tests'")
    with temporary_server(binaries) as running:
        with (
            psycopg.connect(running.dsn("postgres")) as old,
            psycopg.connect(server.dsn("postgres")) as new,
        ):
            skip_if_unknown(old, new)
        yield running


def skip_if_unknown(old: psycopg.Connection, new: psycopg.Connection) -> None:
    """Skip if the older release, as 15.20, stores an option of each column that the later one does not know."""
    noted = "select count(*) > 0 from pg_attribute where attoptions::text like '{pg_attver=%'"
    if old.execute(noted).fetchone() != new.execute(noted).fetchone():
        pytest.skip(
            "dumps of this older PostgreSQL need a later minor release of the newer (pg_attver)"
        )


@pytest.mark.parametrize("method", METHODS)
def test_into_a_later_version(
    older: EmbeddedServer, server: EmbeddedServer, blank_dsn: str, scratch: Path, method: str
) -> None:
    """Another cluster, whose transaction ids are far behind the stored ones."""
    make_roles(older)
    make_roles(server)
    source = f"source_{METHODS.index(method)}"
    create_database(older, source)
    with psycopg.connect(older.dsn(source), autocommit=True) as connection:
        install_as(connection, "plain")
        grant(connection)
        fill(connection)
        before = look(connection)
    try:
        round_trip(older.dsn(source), blank_dsn, server, method, "plain", scratch)
        with psycopg.connect(blank_dsn, autocommit=True) as connection:
            after = look(connection)
            # PostgreSQL's messages differ between versions.
            before.catalog = after.catalog
            compare(before, after)
            carry_on(connection)
            row = connection.execute(
                "select i.system_identifier = c.system_identifier"
                " from queue.installation i, pg_control_system() c"
            ).fetchone()
            assert row == (True,)
    finally:
        with psycopg.connect(blank_dsn, autocommit=True) as connection:
            for role in ROLES:
                connection.execute(f"drop owned by {role}".encode())


class Upgrade:
    """Clusters for pg_upgrade, run as the user that servers run as."""

    def __init__(self, folder: Path, programs: EmbeddedServer) -> None:
        self.folder = folder
        self._options = programs._as_user() | {"cwd": folder}

    def run(self, *command: str | Path) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False, **self._options)
        if done.returncode:
            logs = "\n".join(path.read_text() for path in self.folder.rglob("pg_upgrade_*.log"))
            pytest.fail(f"{command}\n{done.stdout}\n{done.stderr}\n{logs[-3000:]}")

    def dsn(self, database: str) -> str:
        return f"host={self.folder} user=postgres dbname={database}"

    def initdb(self, binaries: Path, data: str) -> None:
        later = ["--no-data-checksums"] if binaries_major(binaries) >= 18 else []
        self.run(binaries / "initdb", "-D", self.folder / data, "-U", "postgres", "-A", "trust",
                 "-E", "UTF8", "--locale=C.UTF-8", "--no-sync", *later)  # fmt: skip
        with (self.folder / data / "postgresql.conf").open("a") as file:
            file.write(f"listen_addresses = ''\nunix_socket_directories = '{self.folder}'\n")
            file.write("fsync = off\n")

    def start(self, binaries: Path, data: str) -> None:
        self.run(
            binaries / "pg_ctl", "-w", "-D", self.folder / data, "-l", self.folder / "log", "start"
        )

    def stop(self, binaries: Path, data: str) -> None:
        self.run(binaries / "pg_ctl", "-w", "-D", self.folder / data, "-m", "fast", "stop")


def binaries_major(binaries: Path) -> int:
    text = subprocess.run(
        [binaries / "postgres", "--version"], capture_output=True, text=True, check=True
    ).stdout
    return int(text.split()[2].split(".")[0])


@pytest.mark.parametrize("from_", ["older", pytest.param("same", marks=pytest.mark.soak)])
def test_pg_upgrade(server: EmbeddedServer, from_: str, scratch: Path) -> None:
    new = server.bin_dir
    old = new
    if from_ == "older":
        found = system_binaries()
        if found is None or binaries_major(found) >= server.major:
            pytest.skip("there is no PostgreSQL here that is older than the tests'")
        old = found
    for program in ("pg_upgrade", "pg_dumpall", "pg_restore"):
        if not (new / program).exists():
            pytest.skip(f"{new} has no {program}")
    form = "extension" if binaries_major(old) >= 18 else "plain"
    clusters = Upgrade(scratch, server)
    clusters.initdb(old, "old")
    clusters.initdb(new, "new")
    if form == "extension":
        for data in ("old", "new"):
            with (scratch / data / "postgresql.conf").open("a") as file:
                share = server.folder / "share"
                file.write(f"extension_control_path = '{share}:$system'\n")
    clusters.start(old, "old")
    try:
        with psycopg.connect(clusters.dsn("postgres"), autocommit=True) as connection:
            with psycopg.connect(server.dsn("postgres")) as later:
                skip_if_unknown(connection, later)
            for role in ROLES:
                connection.execute(f"create role {role}".encode())
            install_as(connection, form)
            grant(connection)
            fill(connection)
            before = look(connection)
    finally:
        clusters.stop(old, "old")
    clusters.run(
        new / "pg_upgrade", "-b", old, "-B", new, "-d", scratch / "old", "-D", scratch / "new",
        "-U", "postgres", "-s", scratch, "--link",
    )  # fmt: skip
    clusters.start(new, "new")
    try:
        with psycopg.connect(clusters.dsn("postgres"), autocommit=True) as connection:
            after = look(connection)
            if old != new:
                before.catalog = after.catalog
            compare(before, after)
            carry_on(connection)
    finally:
        clusters.stop(new, "new")


def test_base_backup_and_point_in_time(scratch: Path, server: EmbeddedServer) -> None:
    """The commands of docs/backup.md: a base backup, WAL archived, and a restore to a moment."""
    binaries = server.bin_dir
    if not (binaries / "pg_basebackup").exists():
        pytest.skip(f"{binaries} has no pg_basebackup")
    clusters = Upgrade(scratch, server)
    clusters.initdb(binaries, "main")
    archive = scratch / "archive"
    archive.mkdir()
    archive.chmod(0o777)
    with (scratch / "main" / "postgresql.conf").open("a") as file:
        file.write("wal_level = replica\narchive_mode = on\n")
        file.write(f"archive_command = 'test ! -f {archive}/%f && cp %p {archive}/%f'\n")
    clusters.start(binaries, "main")
    try:
        with psycopg.connect(clusters.dsn("postgres"), autocommit=True) as connection:
            connection.execute((sql_folder() / "pgdefer.sql").read_bytes())
            clusters.run(binaries / "pg_basebackup", "-d", clusters.dsn("postgres"), "-D",
                         scratch / "backup", "-c", "fast")  # fmt: skip
            fill(connection)
            before = look(connection)
            row = connection.execute(
                "select pg_create_restore_point('before the accident')"
            ).fetchone()
            assert row
            connection.execute("select queue.uninstall(force => true)")
            connection.execute("select pg_switch_wal()")
    finally:
        clusters.stop(binaries, "main")
    with (scratch / "backup" / "postgresql.conf").open("a") as file:
        file.write("archive_mode = off\n")
        file.write(f"restore_command = 'cp {archive}/%f %p'\n")
        file.write("recovery_target_name = 'before the accident'\n")
        file.write("recovery_target_action = 'promote'\n")
    (scratch / "backup" / "recovery.signal").touch()
    clusters.start(binaries, "backup")
    try:
        with psycopg.connect(clusters.dsn("postgres"), autocommit=True) as connection:
            row = None
            while row != (False,):
                row = connection.execute("select pg_is_in_recovery()").fetchone()
            compare(before, look(connection), from_wal=True)
            carry_on(connection)
    finally:
        clusters.stop(binaries, "backup")
