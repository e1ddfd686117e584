"""`pgdefer worker`, `install`, `version` and `demo`."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import importlib
import json
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from pgdefer import App, Worker, WorkerOptions, __version__, _sql
from pgdefer._connect import Source
from pgdefer._install import install, installed_version
from pgdefer._supervisor import Supervisor, Tether
from pgdefer._worker import check_options

from . import _show
from ._base import DSN, AsJson, Exit, fail, out, reported, session


class FormChoice(enum.StrEnum):
    """What `install --form` takes."""

    auto = "auto"
    extension = "extension"
    plain = "plain"


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"pgdefer {__version__}", highlight=False)
        raise typer.Exit


def program(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the client's version."
        ),
    ] = False,
) -> None:
    """Take what stands before a command."""


workers = typer.Typer(invoke_without_command=True)
# What a new process would end with again.
_UNMENDABLE = (Exit.USAGE, Exit.NOT_INSTALLED, Exit.INCOMPATIBLE, Exit.NO_APP, Exit.FORBIDDEN)


@workers.callback()
def worker(
    context: typer.Context,
    app: Annotated[
        str | None,
        typer.Option(
            "--app",
            "-A",
            envvar="PGDEFER_APP",
            metavar="MODULE[:NAME]",
            help="Where the App is, as package.module:name.",
            show_default=False,
        ),
    ] = None,
    dsn: DSN = None,
    pgbouncer: Annotated[
        bool,
        typer.Option(
            "--pgbouncer", help="--dsn leads through pgbouncer in transaction mode: poll."
        ),
    ] = False,
    listen_dsn: Annotated[
        str | None,
        typer.Option(
            "--listen-dsn",
            envvar="PGDEFER_LISTEN_DSN",
            help="The same database past pgbouncer: be woken there.",
            show_default=False,
        ),
    ] = None,
    queues: Annotated[
        list[str] | None,
        typer.Option(
            "--queues",
            "-q",
            help="Queues to serve, separated by commas; prefix* is a pattern. All by default.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", "-c", min=1, help="How many jobs run at once.", show_default="20"
        ),
    ] = None,
    slots: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N[:HORIZON]",
            help="In place of -c: N jobs at once whose deadline is nearer than 5s, 30m, 2h, 1d, "
            "1w; without a horizon any jobs. May be given several times.",
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Run so many worker processes, and start anew those that end or die: each with "
            "these options.",
            show_default="one, without a supervisor",
        ),
    ] = None,
    jobs_per_process: Annotated[
        int,
        typer.Option(min=1, help="Replace a process of tasks with run_in='process' after so many."),
    ] = 100,
    name: Annotated[
        str | None, typer.Option(help="The worker's name.", show_default="host:pid")
    ] = None,
    shutdown_timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds that running jobs have to end once the worker is asked to stop.",
            show_default="no limit",
        ),
    ] = None,
    heartbeat_every: Annotated[
        float, typer.Option(min=0, metavar="SECONDS", help="Say so often that the worker lives.")
    ] = 10.0,
    dead_after: Annotated[
        float,
        typer.Option(
            min=0, metavar="SECONDS", help="After such a silence its jobs are given to others."
        ),
    ] = 30.0,
    drain: Annotated[
        bool, typer.Option("--drain", help="End when nothing is left that would start by itself.")
    ] = False,
    max_jobs: Annotated[
        int | None,
        typer.Option(min=1, help="End once so many jobs have been run.", show_default="no limit"),
    ] = None,
    prune_schedules: Annotated[
        bool,
        typer.Option("--prune-schedules", help="Remove recurring runs that the app no longer has."),
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log each job.")] = False,
    tether: Annotated[int | None, typer.Option(hidden=True)] = None,
    replaces: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run jobs; `worker ls` lists the workers.

    SIGTERM and SIGINT let the running ones end; twice, or SIGQUIT: they end at once.

    Ends with 8 where running jobs were given back because they did not end in time.
    """
    if context.invoked_subcommand is not None:
        return
    if app is None:
        fail(Exit.USAGE, "Missing option '--app' / '-A'.")
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    if verbose:
        logging.getLogger("pgdefer").setLevel(logging.DEBUG)
    tied = _tied(tether, replaces)
    options: WorkerOptions = {
        "name": name,
        "shutdown_timeout": shutdown_timeout,
        "heartbeat_every": heartbeat_every,
        "dead_after": dead_after,
        "drain": drain,
        "max_jobs": max_jobs,
        "prune_schedules": prune_schedules,
        "jobs_per_process": jobs_per_process,
    }
    if concurrency is not None:
        options["concurrency"] = concurrency
    if slots:
        options["slots"] = slots
    with _checked():
        check_options(options)
    if processes is not None and tied is None:
        if drain and max_jobs is not None:
            fail(Exit.USAGE, "with --processes give --drain or --max-jobs, not both.")
        _supervise(processes, options)
    found = _moved(_load(app), dsn, listen_dsn, pgbouncer=pgbouncer)
    wanted = _names(queues or []) or None
    with _checked():
        running = Worker(found, wanted, **options)
    if tied is not None:
        running.tether, tied.worker = tied, running
    _run(running)


@workers.command("ls")
def ls(dsn: DSN = None, as_json: AsJson = False) -> None:
    """List the workers that are registered, and those that have gone within the last minute."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(_sql.WORKERS)
    columns = {
        "id": "id",
        "name": "name",
        "queues": "queues",
        "is_alive": "alive",
        "running": "running",
        "silent_for": "last seen ago",
        "up_for": "up for",
    }
    _show.table(
        rows,
        columns,
        right=("silent_for", "up_for"),
        least=("up_for",),
        empty="There are no workers.",
    )


def install_command(
    dsn: DSN = None,
    form: Annotated[
        FormChoice,
        typer.Option(help="plain is the same as the extension, by ordinary SQL."),
    ] = FormChoice.auto,
    as_json: AsJson = False,
) -> None:
    """Install the queue into a database, or upgrade it; a second call changes nothing."""
    with reported():
        source = Source(dsn)
        done = install(source.conninfo(), form.value)
    if as_json:
        _show.write(json.dumps(dataclasses.asdict(done)))
    elif done.before == done.version:
        out.print(f"pgdefer {done.version} was installed already.")
    elif done.before is None:
        out.print(f"pgdefer {done.version} is installed ({done.form}).")
    else:
        out.print(f"pgdefer was upgraded from {done.before} to {done.version} ({done.form}).")


def upgrade(dsn: DSN = None, as_json: AsJson = False) -> None:
    """Bring the queue of a database to this version."""
    with reported():
        source = Source(dsn)
        with source.connect() as connection:
            if installed_version(connection) is None:
                fail(Exit.NOT_INSTALLED, "the queue is not installed here: `pgdefer install`")
        done = install(source.conninfo())
    was = "already" if done.before == done.version else f"from {done.before}"
    if as_json:
        _show.write(json.dumps(dataclasses.asdict(done)))
        return
    out.print(f"pgdefer is at {done.version}, {was} ({done.form}).")


def version(dsn: DSN = None, as_json: AsJson = False) -> None:
    """Show the client's version, and the database's where one is named."""
    tables = None
    with reported():
        source = Source(dsn)
    if not as_json:
        out.print(f"client {__version__}")
    if source.is_chosen:
        with reported(), source.connect() as connection:
            tables = installed_version(connection)
    if as_json:
        _show.write(json.dumps({"client": __version__, "database": tables}))
    elif source.is_chosen:
        out.print(f"database {tables or 'none: run `pgdefer install`'}")
    if source.is_chosen and tables is None:
        raise typer.Exit(Exit.NOT_INSTALLED)


def demo(
    dsn: DSN = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1)] = 20,
    limit: Annotated[int | None, typer.Option(help="Take this many files at most.")] = None,
) -> None:
    """Run jobs over the files of Python's standard library, and show what ran."""
    from pgdefer._demo import run  # noqa: PLC0415 (no other command needs it)

    with reported():
        run(Source(dsn), concurrency=concurrency, limit=limit, console=out)


def _names(given: list[str]) -> list[str]:
    """Return the names that are separated by commas."""
    names = [name for text in given for name in text.split(",")]
    if "" in names:
        fail(Exit.USAGE, "-q holds an empty name: leave -q out to serve all queues")
    return names


def _load(where: str) -> App:
    """Import the App and its tasks. The current folder is where modules are looked for first."""
    found = _find(where)
    try:
        found.import_tasks()
    except ModuleNotFoundError as error:
        fail(Exit.NO_APP, f"{where}, imports={list(found.imports)}: {error}")
    return found


def _find(where: str) -> App:
    module_name, _, attribute = where.partition(":")
    if not module_name or module_name.startswith("."):
        fail(Exit.NO_APP, f"{where} names no module: give package.module, or package.module:name")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        fail(Exit.NO_APP, f"{where}: {error}")
    found: Any = module
    for part in attribute.split(".") if attribute else ():
        found = getattr(found, part, None)
    if not attribute:
        apps = [value for value in vars(module).values() if isinstance(value, App)]
        if len({id(value) for value in apps}) != 1:
            fail(Exit.NO_APP, f"{where} holds {len(apps)} Apps: name one, as {where}:name")
        return apps[0]
    if not isinstance(found, App):
        fail(Exit.NO_APP, f"{where} is no App")
    return found


def _moved(app: App, dsn: str | None, listen_dsn: str | None, *, pgbouncer: bool) -> App:
    """Have the App use the database that the options name, if they do."""
    if dsn is not None:
        with reported():
            app.move(dsn, listen_dsn, pgbouncer=pgbouncer or None)
    elif pgbouncer or listen_dsn is not None:
        fail(Exit.USAGE, "--pgbouncer and --listen-dsn go with --dsn; else the App says them.")
    return app


@contextlib.contextmanager
def _checked() -> Iterator[None]:
    """End with a message where the worker does not take an option's value."""
    try:
        yield
    except ValueError as error:
        fail(Exit.USAGE, str(error))


def _supervise(processes: int, options: WorkerOptions) -> NoReturn:
    """Run this command in several processes, and end as they do."""
    # As the program does, without the current folder before Python's own modules.
    supervisor = Supervisor(
        [sys.executable, "-P", "-m", "pgdefer", sys.argv[1]],
        sys.argv[2:],
        processes,
        is_drain=options["drain"],
        shutdown_timeout=options["shutdown_timeout"],
        dead_after=options["dead_after"],
        fatal=_UNMENDABLE,
    )
    raise typer.Exit(supervisor.run())


def _tied(descriptor: int | None, replaces: int | None) -> Tether | None:
    """Take hold of a supervisor's tether, if there is one, before anything can fail."""
    return None if descriptor is None else Tether(descriptor, replaces)


def _run(worker: Worker) -> None:
    with reported():
        worker.run()
    if worker.given_back:
        _leave(Exit.GAVE_BACK)
    if worker.deserters:
        _leave(Exit.DONE)


def _leave(code: Exit) -> NoReturn:
    """End at once: handlers that did not end when told to would keep the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)
