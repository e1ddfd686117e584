"""The command line: each command is a call of the library, or of one SQL function."""

from __future__ import annotations

from . import _db, _defer, _job, _psql, _queue, _run
from ._base import Exit, cli

__all__ = ["Exit", "main"]

cli.command()(_run.demo)
cli.command()(_defer.defer)
cli.command("install")(_run.install_command)
cli.add_typer(_job.jobs, name="job")
cli.add_typer(_queue.queues, name="queue")
cli.add_typer(_run.workers, name="worker")
cli.add_typer(_db.db, name="db")
cli.command()(_psql.psql)
cli.command()(_psql.psqlrc)
cli.command()(_run.version)


def main() -> None:
    """Run the command line."""
    cli()
