"""The command line: each command is a call of the library, or of one SQL function."""

from __future__ import annotations

import contextlib
import enum
import importlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import psycopg
import typer
from rich.console import Console

from . import App, IncompatibleClient, NotInstalled, PgDeferError, Worker, __version__
from ._connect import Source
from ._errors import translate
from ._install import install, installed_version

__all__ = ["Exit", "main"]

cli = typer.Typer(
    name="pgdefer",
    help="A job queue whose every rule lives in PostgreSQL.",
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
out = Console()
err = Console(stderr=True)


class Exit(enum.IntEnum):
    """How a command ends."""

    DONE = 0
    ERROR = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_INSTALLED = 4
    INCOMPATIBLE = 5
    NO_APP = 6
    FORBIDDEN = 7
    GAVE_BACK = 8


class FormChoice(enum.StrEnum):
    """What `install --form` takes."""

    auto = "auto"
    extension = "extension"
    plain = "plain"


DSN = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        envvar="PGDEFER_DSN",
        help="The database. Else libpq's PG* variables; else the embedded server.",
        show_default=False,
    ),
]


@cli.command()
def worker(  # noqa: PLR0917 (options, which are given by name)
    app: Annotated[
        str,
        typer.Option(
            "--app",
            "-A",
            envvar="PGDEFER_APP",
            metavar="MODULE[:NAME]",
            help="Where the App is, as package.module:name.",
        ),
    ],
    dsn: DSN = None,
    queues: Annotated[
        list[str] | None,
        typer.Option(
            "--queues",
            "-q",
            help="Queues to serve, separated by commas; prefix* is a pattern. All by default.",
        ),
    ] = None,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", min=1, help="How many jobs run at once.")
    ] = 20,
    name: Annotated[
        str | None, typer.Option(help="The worker's name.", show_default="host:pid")
    ] = None,
    shutdown_timeout: Annotated[
        float | None,
        typer.Option(
            help="Seconds that running jobs have to end once the worker is asked to stop.",
            show_default="no limit",
        ),
    ] = None,
    drain: Annotated[
        bool, typer.Option("--drain", help="End when there is nothing to do.")
    ] = False,
    prune_schedules: Annotated[
        bool,
        typer.Option("--prune-schedules", help="Remove recurring runs that the app no longer has."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
) -> None:
    """Run jobs. SIGTERM and SIGINT: let the running ones end; twice, or SIGQUIT: at once.

    Ends with 8 where running jobs were given back because they did not end in time.
    """
    logging.basicConfig(
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    found = _load(app)
    if dsn is not None:
        found.move(dsn)
    wanted = [part for item in queues or [] for part in item.split(",") if part] or None
    running = Worker(
        found,
        wanted,
        concurrency=concurrency,
        name=name,
        shutdown_timeout=shutdown_timeout,
        drain=drain,
        prune_schedules=prune_schedules,
    )
    with _reported():
        running.run()
    if running.given_back:
        _leave(Exit.GAVE_BACK)
    if running.deserters:
        _leave(Exit.DONE)


@cli.command("install")
def install_command(
    dsn: DSN = None,
    form: Annotated[
        FormChoice,
        typer.Option(help="plain is the same as the extension, by ordinary SQL."),
    ] = FormChoice.auto,
) -> None:
    """Install the queue into a database, or upgrade it; a second call changes nothing."""
    with _reported():
        source = Source(dsn)
        done = install(source.conninfo(), form.value)
    if done.before == done.version:
        out.print(f"pgdefer {done.version} was installed already.")
    elif done.before is None:
        out.print(f"pgdefer {done.version} is installed ({done.form}).")
    else:
        out.print(f"pgdefer was upgraded from {done.before} to {done.version} ({done.form}).")


@cli.command()
def version(dsn: DSN = None) -> None:
    """Show the client's version, and the database's where one is named."""
    out.print(f"client {__version__}")
    source = Source(dsn)
    if source.is_chosen:
        with _reported(), source.connect() as connection:
            tables = installed_version(connection)
        out.print(f"database {tables or 'none: run `pgdefer install`'}")
        if tables is None:
            raise typer.Exit(Exit.NOT_INSTALLED)


@cli.command()
def demo(
    dsn: DSN = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1)] = 20,
    limit: Annotated[int | None, typer.Option(help="Take this many files at most.")] = None,
) -> None:
    """Run jobs over the files of Python's standard library, and show what ran."""
    from ._demo import run  # noqa: PLC0415 (no other command needs it)

    with _reported():
        run(Source(dsn), concurrency=concurrency, limit=limit, console=out)


def _load(where: str) -> App:
    """Import the App. The current folder is where modules are looked for first."""
    module_name, _, attribute = where.partition(":")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        _fail(Exit.NO_APP, f"{where}: {error}")
    found: Any = module
    for part in attribute.split(".") if attribute else ():
        found = getattr(found, part, None)
    if not attribute:
        apps = [value for value in vars(module).values() if isinstance(value, App)]
        if len({id(value) for value in apps}) != 1:
            _fail(Exit.NO_APP, f"{where} holds {len(apps)} Apps: name one, as {where}:name")
        return apps[0]
    if not isinstance(found, App):
        _fail(Exit.NO_APP, f"{where} is no App")
    return found


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Turn errors into one line and an exit code."""
    from ._server import ServerError  # noqa: PLC0415 (not on every system)

    try:
        yield
    except psycopg.Error as error:
        better = translate(error)
        if better is not None:
            _fail_for(better)
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            _fail(Exit.FORBIDDEN, _line(error))
        is_lost = isinstance(error, psycopg.OperationalError) and error.sqlstate is None
        _fail(Exit.UNREACHABLE if is_lost else Exit.ERROR, _line(error))
    except PgDeferError as error:
        _fail_for(error)
    except ServerError as error:
        _fail(Exit.UNREACHABLE, str(error))


def _fail_for(error: PgDeferError) -> NoReturn:
    codes = {NotInstalled: Exit.NOT_INSTALLED, IncompatibleClient: Exit.INCOMPATIBLE}
    _fail(codes.get(type(error), Exit.ERROR), str(error))


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _fail(code: Exit, message: str) -> NoReturn:
    err.print(f"pgdefer: {message}", style="red", markup=False, highlight=False)
    raise typer.Exit(code)


def _leave(code: Exit) -> NoReturn:
    """End at once: handlers that did not end when told to would keep the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)


def main() -> None:
    """Run the command line."""
    cli()
