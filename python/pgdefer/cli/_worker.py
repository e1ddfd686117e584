"""`pgdefer worker`: runs jobs, lists workers.

Tests: integration/test_cli.py, integration/test_cli_lists.py.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

import pgdefer
from pgdefer import App
from pgdefer.database import sql
from pgdefer.worker.options import (
    DEAD_AFTER,
    HEARTBEAT_EVERY,
    JOBS_PER_PROCESS,
    check_options,
)
from pgdefer.worker.prefetch import MOST, MOST_OF_MANY
from pgdefer.worker.supervisor import Supervisor, SupervisorChannel

from . import _show
from ._base import (
    DSN,
    AsJson,
    Exit,
    check_one_place,
    dsn_file,
    fail,
    is_whole,
    reported,
    session,
)
from ._log import Format, Level, set_up_log
from ._reload import run_and_reload

if TYPE_CHECKING:
    from pgdefer import MultiWorker, Worker, WorkerOptions

workers = typer.Typer(invoke_without_command=True)
# Exit codes that a new process would end with, too.
_UNMENDABLE = (Exit.USAGE, Exit.NOT_INSTALLED, Exit.INCOMPATIBLE, Exit.NO_APP, Exit.FORBIDDEN)


AppName = Annotated[
    str | None,
    typer.Option(
        "--app",
        "-A",
        envvar="PGDEFER_APP",
        metavar="MODULE[:NAME]",
        help="The App, as package.module:name.",
        show_default=False,
    ),
]
Dsns = Annotated[
    list[str] | None,
    typer.Option(
        "--dsn",
        help="The database. Repeated: one process works for all of them. Else $PGDEFER_DSN, the "
        "App's database, libpq's PG* variables; else the embedded server.",
        show_default=False,
    ),
]
DsnFileName = Annotated[
    Path | None,
    dsn_file(
        "Work for many databases: one DSN per line, # begins a comment. It is read again "
        "when it changes."
    ),
]
PerDatabase = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="With many databases: how many jobs of one to run at once.",
        show_default="half of -c",
    ),
]
Pgbouncer = Annotated[
    bool,
    typer.Option("--pgbouncer", help="--dsn leads through pgbouncer in transaction mode: poll."),
]
ListenDsn = Annotated[
    str | None,
    typer.Option(
        "--listen-dsn",
        envvar="PGDEFER_LISTEN_DSN",
        help="A direct route to the same database, to wake workers.",
        show_default=False,
    ),
]
Queues = Annotated[
    list[str] | None,
    typer.Option(
        "--queues",
        "-q",
        help="Queues to serve, separated by commas; prefix* is a pattern. All by default.",
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="The order of -q comes before priority."),
]
Tasks = Annotated[
    list[str] | None,
    typer.Option(help="Run only these tasks, separated by commas. All by default."),
]
MaxRunning = Annotated[
    list[str] | None,
    typer.Option(
        metavar="QUEUE=N",
        help="Of this queue, or of each that prefix* selects, run at most N jobs at once. May be "
        "repeated.",
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency", "-c", min=1, help="How many jobs to run at once.", show_default="20"
    ),
]
SlotTexts = Annotated[
    list[str] | None,
    typer.Option(
        metavar="N[:HORIZON]",
        help="In place of -c: N jobs at once whose deadline is nearer than 5s, 30m, 2h, 1d, "
        "1w; without a horizon any jobs. May be repeated.",
    ),
]
Prefetch = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="How many jobs to claim ahead at most: as many as start within 50 ms. 0: none. By "
        f"default {MOST}; {MOST_OF_MANY} for each of many databases.",
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Run this many worker processes with these options, and replace those that "
        "end or die.",
        show_default="one, without a supervisor",
    ),
]
JobsPerProcess = Annotated[
    int,
    typer.Option(min=1, help="Replace a child process (run_in='process') after this many jobs."),
]
Name = Annotated[str | None, typer.Option(help="The worker's name.", show_default="host:pid")]
ShutdownTimeout = Annotated[
    float | None,
    typer.Option(
        min=0,
        help="The seconds that running jobs have to end after a stop.",
        show_default="no limit",
    ),
]
HeartbeatEvery = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="How often to report that the worker lives.")
]
DeadAfter = Annotated[
    float,
    typer.Option(min=0, metavar="SECONDS", help="Others get its jobs after this much silence."),
]
PollEvery = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="How long to sleep at most before asking the database, where notifications do not "
        "arrive: 0.01 to 60.",
        show_default="as the database says",
    ),
]
Drain = Annotated[
    bool, typer.Option("--drain", help="End when no job is left that would start by itself.")
]
MaxJobs = Annotated[
    int | None,
    typer.Option(min=1, help="End after this many jobs.", show_default="no limit"),
]
PruneSchedules = Annotated[
    bool,
    typer.Option("--prune-schedules", help="Remove recurring runs that the app no longer has."),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log each job, and its start.")]


LogLevel = Annotated[
    Level | None,
    typer.Option(
        help="info: also successes; warning: also retries; error: only final failures.",
        show_default="info without successes",
    ),
]
LogFormat = Annotated[
    Format | None,
    typer.Option(
        help="json: one object per line, with fields such as the task and outcome.",
        show_default="text",
    ),
]
Http = Annotated[
    str | None,
    typer.Option(metavar="HOST:PORT", help="Serve /healthz, /readyz and /metrics at this address."),
]
Reload = Annotated[
    bool,
    typer.Option(
        "--reload",
        help="For development: restart the worker when a Python file below this folder changes "
        "(pgdefer[reload]).",
    ),
]
SupervisorFd = Annotated[int | None, typer.Option(hidden=True)]
Replaces = Annotated[int | None, typer.Option(hidden=True)]


@workers.callback()
def worker(
    context: typer.Context,
    app: AppName = None,
    dsn: Dsns = None,
    dsns: DsnFileName = None,
    per_database: PerDatabase = None,
    pgbouncer: Pgbouncer = False,
    listen_dsn: ListenDsn = None,
    queues: Queues = None,
    strict: Strict = False,
    tasks: Tasks = None,
    max_running: MaxRunning = None,
    concurrency: Concurrency = None,
    slots: SlotTexts = None,
    prefetch: Prefetch = None,
    processes: Processes = None,
    jobs_per_process: JobsPerProcess = JOBS_PER_PROCESS,
    name: Name = None,
    shutdown_timeout: ShutdownTimeout = None,
    heartbeat_every: HeartbeatEvery = HEARTBEAT_EVERY,
    dead_after: DeadAfter = DEAD_AFTER,
    poll_every: PollEvery = None,
    drain: Drain = False,
    max_jobs: MaxJobs = None,
    prune_schedules: PruneSchedules = False,
    http: Http = None,
    reload: Reload = False,
    verbose: Verbose = False,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
    supervisor_fd: SupervisorFd = None,
    replaces: Replaces = None,
) -> None:
    """Run jobs. `worker ls` lists the workers.

    SIGTERM, SIGINT and SIGHUP let jobs end. A second SIGTERM or SIGINT, or SIGQUIT, aborts them.

    Exits with 8 if jobs that did not end in time were given back, or if ends could not be reported.
    """
    if context.invoked_subcommand is not None:
        return
    if app is None:
        fail(Exit.USAGE, "Missing option '--app' / '-A'.")
    if reload:
        is_plain = processes is None and max_jobs is None and not drain
        raise typer.Exit(run_and_reload(shutdown_timeout, is_plain=is_plain))
    channel = _channel(supervisor_fd, replaces)
    options: WorkerOptions = {
        "name": name,
        "shutdown_timeout": shutdown_timeout,
        "heartbeat_every": heartbeat_every,
        "dead_after": dead_after,
        "poll_every": poll_every,
        "drain": drain,
        "max_jobs": max_jobs,
        "prune_schedules": prune_schedules,
        "jobs_per_process": jobs_per_process,
        "http": http,
    }
    _slots(options, concurrency, slots, prefetch)
    _choose(options, queues, tasks, max_running, strict=strict)
    with _checked():
        check_options(options)
    wanted = _names(queues or []) or None
    databases = _databases(dsn, dsns, per_database)
    if processes is not None and channel is None and databases is None:
        set_up_log(log_level, log_format, verbose=verbose)
        _supervise(processes, options)
    loaded = _load(app)
    set_up_log(log_level, log_format, verbose=verbose)
    if databases is not None:
        is_single = processes is not None or pgbouncer or _is_given(context, "listen_dsn")
        _run_many(loaded, databases, wanted, per_database, options, is_single=is_single)
        return
    found = _moved(loaded, _one(dsn), listen_dsn, pgbouncer=pgbouncer)
    with _checked():
        running = pgdefer.Worker(found, wanted, **options)
    if channel is not None:
        running.supervisor, channel.on_close = channel, running.stop
    _run(running)


def _is_given(context: typer.Context, name: str) -> bool:
    """Whether an option is given on the command line, not in the environment."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def _one(dsn: list[str] | None) -> str | None:
    """Return the only DSN."""
    # Not the option's envvar: Typer would split a DSN of keywords at its spaces.
    return dsn[0] if dsn else os.environ.get("PGDEFER_DSN") or None


def _databases(
    dsn: list[str] | None, file: Path | None, per_database: int | None
) -> list[str] | Path | None:
    """Return the databases of a worker of many; None for a worker of one."""
    check_one_place(dsn, file)
    if file is None and len(dsn or []) < 2:
        if per_database is not None:
            fail(Exit.USAGE, "--per-database is for many databases: repeat --dsn, or give --dsns.")
        return None
    return dsn if file is None else file


@workers.command("ls")
def ls(dsn: DSN = None, as_json: AsJson = False) -> None:
    """List the registered workers, and those that have left within the last minute."""
    with session(dsn, as_json=as_json) as on:
        rows = on.call(sql.WORKERS)
    for row in rows.values:
        row["memory"] = _show.size(row["memory"])
        if row["has_left"]:
            row["is_alive"] = "left"
    columns = {
        "id": "id",
        "name": "name",
        "queues": "queues",
        "is_alive": "alive",
        "running": "running",
        "memory": "memory",
        "silent_for": "last seen ago",
        "up_for": "up for",
    }
    _show.table(
        rows,
        columns,
        right=("memory", "silent_for", "up_for"),
        least=("up_for", "memory"),
        empty="There are no workers.",
    )


def _slots(
    options: WorkerOptions, concurrency: int | None, slots: list[str] | None, prefetch: Any
) -> None:
    """Set the options that say how many jobs run at once, and are claimed ahead."""
    if prefetch is not None:
        options["prefetch"] = prefetch
    if concurrency is not None:
        options["concurrency"] = concurrency
    if slots:
        options["slots"] = slots


def _choose(
    options: WorkerOptions,
    queues: list[str] | None,
    tasks: list[str] | None,
    max_running: list[str] | None,
    *,
    strict: bool,
) -> None:
    """Set the options that select jobs: the order of queues, the tasks, how many of a queue."""
    if strict:
        options["order"] = "listed"
        if not queues:
            fail(Exit.USAGE, "--strict needs -q: the queues in their order.")
    if tasks:
        options["tasks"] = _names(tasks, "--tasks")
    if max_running:
        options["max_running"] = dict(map(_limit, max_running))


def _limit(text: str) -> tuple[str, int]:
    queue, _, most = text.rpartition("=")
    if not (queue and is_whole(most)):
        fail(Exit.USAGE, f"--max-running is QUEUE=N, such as reports=2, not {text}")
    return queue, int(most)


def _names(texts: list[str], option: str = "-q") -> list[str]:
    """Return names separated by commas, and perhaps blanks."""
    names = [name.strip() for text in texts for name in text.split(",")]
    if "" in names:
        whole = "to serve all queues" if option == "-q" else "to run all tasks"
        fail(Exit.USAGE, f"{option} contains an empty name: leave {option} out {whole}")
    return names


def _load(where: str) -> App:
    """Import the App and its tasks. Modules in the current folder come first."""
    found = _find(where)
    try:
        found.import_tasks()
    except ModuleNotFoundError as error:
        fail(Exit.NO_APP, f"{where}, imports={list(found.imports)}: {_place(error)}{error}")
    except Exception as error:
        _fail_to_import(where, error)
    return found


_OURS = str(Path(pgdefer.__file__).parent)


def _place(error: Exception) -> str:
    """Return where a module of the application raises, without the frames of others, or ""."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((_OURS, "<frozen"))]
    own = [frame for frame in own if frame.filename != importlib.__file__]
    return f"{own[-1].filename}:{own[-1].lineno}: " if own else ""


def _fail_to_import(where: str, error: Exception) -> NoReturn:
    """Print where a module of the application raises."""
    frames = traceback.extract_tb(error.__traceback__)
    at = _place(error)
    # Errors of pgdefer have a message that says enough; for others the type says more.
    if (
        frames
        and frames[-1].filename.startswith(_OURS)
        and isinstance(error, TypeError | ValueError)
    ):
        fail(Exit.USAGE, f"{at}{error}")
    fail(Exit.NO_APP, f"{where}: {at}{type(error).__qualname__}: {error}")


def _find(where: str) -> App:
    module_name, _, attribute = where.partition(":")
    if not module_name or module_name.startswith("."):
        fail(Exit.NO_APP, f"{where} names no module: pass package.module, or package.module:name")
    sys.path.insert(0, str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if (path := Path(module_name)).suffix == ".py" and path.exists():
            stem = ".".join(path.with_suffix("").parts)
            fail(Exit.NO_APP, f"{where} is a file: pass its module, {stem}")
        fail(Exit.NO_APP, f"{where}: {_place(error)}{error}")
    except Exception as error:
        _fail_to_import(where, error)
    found: Any = module
    for part in attribute.split(".") if attribute else ():
        found = getattr(found, part, None)
    if not attribute:
        apps = _apps(module)
        if not apps:
            fail(Exit.NO_APP, f"{where} has no App")
        if len(apps) > 1:
            names = " or ".join(f"{where}:{name}" for name in apps.values())
            fail(Exit.NO_APP, f"{where} has several Apps: name one, as {names}")
        return next(iter(apps))
    if not isinstance(found, App):
        fail(Exit.NO_APP, _no_app(where, module, attribute, found))
    return found


def _apps(module: ModuleType) -> dict[App, str]:
    """Return a module's Apps, each with the first of its names."""
    found: dict[App, str] = {}
    for name, value in vars(module).items():
        if isinstance(value, App):
            found.setdefault(value, name)
    return found


def _no_app(where: str, module: ModuleType, attribute: str, found: object) -> str:
    """Say what is wrong with the name of an App, and which App there is."""
    said = f"{where} is a {type(found).__name__}, not an App"
    if found is None:
        said = f"{module.__name__} has no {attribute}"
    names = list(_apps(module).values())
    return f"{said}; its App is {module.__name__}:{names[0]}" if len(names) == 1 else said


def _moved(app: App, dsn: str | None, listen_dsn: str | None, *, pgbouncer: bool) -> App:
    """Make the App use the database of the options, if they name one."""
    if dsn is not None:
        with reported():
            app.move(dsn, listen_dsn, pgbouncer=pgbouncer or None)
    elif pgbouncer or listen_dsn is not None:
        fail(Exit.USAGE, "--pgbouncer and --listen-dsn need --dsn: without it, the App sets them.")
    return app


@contextlib.contextmanager
def _checked() -> Iterator[None]:
    """Print a message and exit if the worker rejects an option's value."""
    try:
        yield
    except ValueError as error:
        fail(Exit.USAGE, str(error))


def _supervise(processes: int, options: WorkerOptions) -> NoReturn:
    """Run this command in several processes, and exit as they do."""
    if options["http"] is not None:
        fail(Exit.USAGE, "--http is a single worker's: --processes would share the port.")
    if options["drain"] and options["max_jobs"] is not None:
        fail(Exit.USAGE, "with --processes give --drain or --max-jobs, not both.")
    # Like the program itself, without the current folder before Python's own modules.
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


def _channel(descriptor: int | None, replaces: int | None) -> SupervisorChannel | None:
    """Open the supervisor's channel, if there is one, before anything can fail."""
    return None if descriptor is None else SupervisorChannel(descriptor, replaces)


def _run_many(
    app: App,
    databases: list[str] | Path,
    queues: list[str] | None,
    per_database: int | None,
    options: WorkerOptions,
    *,
    is_single: bool,
) -> None:
    """Run a worker of many databases; `is_single`: there are options of a worker of one."""
    if is_single:
        fail(Exit.USAGE, "--processes, --pgbouncer and --listen-dsn are for one database.")
    with reported(), _checked():
        worker = pgdefer.MultiWorker(app, databases, queues, per_database=per_database, **options)
    _run(worker)


def _run(worker: Worker | MultiWorker) -> None:
    # What has been imported stays. Full collections, several a second in a busy worker, need not
    # read it, so jobs wait less long for them (docs/benchmarks.md).
    gc.collect()
    gc.freeze()
    try:
        with reported():
            worker.run()
    except BaseException as error:
        if not worker.unresponsive:
            raise
        if isinstance(error, typer.Exit):
            _leave(error.exit_code)
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            _leave(error.code)
        sys.excepthook(type(error), error, error.__traceback__)
        _leave(Exit.ERROR)
    if worker.given_back or worker.unreported:
        _leave(Exit.GAVE_BACK)
    if worker.unresponsive:
        _leave(Exit.DONE)


def _leave(code: int) -> NoReturn:
    """Exit at once: threads that did not end when told to would keep the process alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    os._exit(code)
