"""`pgdefer pg`: backups of the queue's schema by PostgreSQL's tools, and restores.

Tests: compat/test_dump_restore.py, integration/test_cli_database.py.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Annotated

import psycopg
import typer
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgdefer.database import sql
from pgdefer.database.execute import execute
from pgdefer.database.source import Source
from pgdefer.database.sql import Statement

from ._base import DSN, Exit, Yes, confirm, fail, reported

pg = typer.Typer(help="Backups by pg_dump and pg_restore.", no_args_is_help=True)


@pg.command("backup")
def backup(
    everything: Annotated[
        bool, typer.Option("--all", help="The whole database, not only the queue.")
    ] = False,
    dsn: DSN = None,
) -> None:
    """Write a backup to standard output, in pg_dump's custom format."""
    if os.isatty(1):
        fail(Exit.USAGE, "standard output is a terminal: write to a file, as in > queue.dump")
    only = [] if everything else ["--schema=queue"]
    _run("pg_dump", ["--format=custom", *only], dsn, sql.MAY_DUMP)


@pg.command("restore")
def restore(yes: Yes = False, dsn: DSN = None) -> None:
    """Restore a backup from standard input into a database that has none of its contents."""
    if os.isatty(0):
        fail(Exit.USAGE, "standard input is a terminal: read from a file, as in < queue.dump")
    confirm("Restore into this database?", yes=yes)
    _run("pg_restore", ["--exit-on-error", "--single-transaction"], dsn, sql.MAY_RESTORE)


def _run(name: str, arguments: list[str], dsn: str | None, may: Statement) -> None:
    """Run one of PostgreSQL's programs, of a version that fits the server, in place of this one.

    Before that, `may` asks what this role has no right to read or write: the program's own exit
    code would not tell.
    """
    with reported("Run it as the owner of the queue."):
        source = Source(dsn)
        conninfo = source.conninfo()
        with source.connect() as connection:
            version = connection.info.server_version // 10000
            ((lacking,),) = execute(connection, may, {})
            if lacking is not None:
                raise psycopg.errors.InsufficientPrivilege(f"permission denied for {lacking}")
    program = find_program(name, version)
    if program is None:
        fail(
            Exit.ERROR,
            f"{name} {version} is not installed: apt install postgresql-client-{version}",
        )
    shown, environment = without_password(conninfo)
    os.execve(program, [program, *arguments, "-d", shown], environment)  # noqa: S606


def without_password(conninfo: str) -> tuple[str, dict[str, str]]:
    """Return a DSN for a command line, which anybody can read, and the password's environment."""
    parts = {name: str(value) for name, value in conninfo_to_dict(conninfo).items()}
    password = parts.pop("password", None)
    environment = dict(os.environ)
    if password is not None:
        environment["PGPASSWORD"] = password
    return make_conninfo("", **parts), environment


def find_program(name: str, version: int = 0) -> str | None:
    """Return one of PostgreSQL's client programs, of this major version or a later one."""
    from pgdefer.database.embedded import ServerError, find_binaries  # noqa: PLC0415 (not on every system)

    found = [shutil.which(name)]
    with contextlib.suppress(ServerError):
        found.append(str(find_binaries() / name))
    found += map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    for program in filter(None, found):
        if Path(program).exists() and _version(program) >= version:
            return program
    return None


def _version(program: str) -> int:
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    number = re.search(r"\d+", done.stdout)
    return int(number[0]) if number else 0
