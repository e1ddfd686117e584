"""The command line: each command calls the library, or one SQL function."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from pathlib import Path

import typer

from . import (
    _db,
    _defer,
    _demo,
    _graph,
    _group,
    _install,
    _job,
    _job_changes,  # noqa: F401 (it adds its commands to those of _job)
    _job_durable,
    _limit,
    _lock,
    _move_in,
    _pg,
    _psql,
    _queue,
    _schedule,
    _share,
    _task,
    _top,
    _web,
    _worker,
)
from ._base import Exit, cli, fail

__all__ = ["Exit", "main"]

cli.callback()(_install.program)
cli.command("install")(_install.install_command)
cli.command()(_install.upgrade)
cli.command()(_install.version)
cli.command()(_demo.demo)
cli.add_typer(_worker.workers, name="worker")
cli.command()(_defer.defer)
cli.add_typer(_job.jobs, name="job")
cli.command()(_job_durable.publish)
cli.add_typer(_queue.queues, name="queue")
cli.add_typer(_task.tasks, name="task")
cli.add_typer(_lock.locks, name="lock")
cli.add_typer(_limit.limits, name="limit")
cli.add_typer(_share.shares, name="share")
cli.add_typer(_group.groups, name="group")
cli.add_typer(_schedule.schedules, name="schedule")
cli.command("move-in")(_move_in.move_in)
cli.command()(_graph.graph)
cli.command()(_top.top)
cli.command(
    cls=_web.WebCommand,
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
)(_web.web)
cli.add_typer(_db.db, name="db")
cli.add_typer(_pg.pg, name="pg")
cli.command()(_psql.psql)
cli.command()(_psql.psqlrc)


def main() -> None:
    """Run the command line."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (open until the end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None if it is closed
            stream.reconfigure(errors="replace")
    _leave_out_others(sys.argv[1:2])
    try:
        cli()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        # What is left to write would fail again at the end, and change the exit code.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        with contextlib.suppress(typer.Exit):
            fail(Exit.ERROR, f"the output can't be written: {error.strerror}")
        sys.exit(Exit.ERROR)


def _leave_out_others(words: list[str]) -> None:
    """Keep only the command that is called: building all takes as long as importing them."""
    groups = [group for group in cli.registered_groups if group.name in words]
    commands = [
        command
        for command in cli.registered_commands
        if (command.name or getattr(command.callback, "__name__", None)) in words
    ]
    if groups or commands:
        cli.registered_groups, cli.registered_commands = groups, commands
