"""The command line: each command is a call of the library, or of one SQL function."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from pathlib import Path

import typer

from . import _db, _defer, _graph, _job, _pg, _psql, _queue, _run, _schedule, _top
from ._base import Exit, cli, fail

__all__ = ["Exit", "main"]

cli.callback()(_run.program)
cli.command("install")(_run.install_command)
cli.command()(_run.upgrade)
cli.command()(_run.version)
cli.command()(_run.demo)
cli.add_typer(_run.workers, name="worker")
cli.command()(_defer.defer)
cli.add_typer(_job.jobs, name="job")
cli.add_typer(_queue.queues, name="queue")
cli.add_typer(_schedule.schedules, name="schedule")
cli.command()(_graph.graph)
cli.command()(_top.top)
cli.add_typer(_db.db, name="db")
cli.add_typer(_pg.pg, name="pg")
cli.command()(_psql.psql)
cli.command()(_psql.psqlrc)


def main() -> None:
    """Run the command line."""
    if sys.stdout is None:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 (to the end)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None where it is closed
            stream.reconfigure(errors="replace")
    try:
        cli()
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        with contextlib.suppress(typer.Exit):
            fail(Exit.ERROR, f"the output can't be written: {error.strerror}")
        sys.exit(Exit.ERROR)
