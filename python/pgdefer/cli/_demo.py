"""`pgdefer demo`.

Tests: integration/test_cli.py.
"""

from __future__ import annotations

from typing import Annotated

import typer

from pgdefer.database.source import Source

from ._base import DSN, out, reported


def demo(
    dsn: DSN = None,
    concurrency: Annotated[int, typer.Option("--concurrency", "-c", min=1)] = 20,
    limit: Annotated[int | None, typer.Option(min=1, help="The maximum number of files.")] = None,
) -> None:
    """Run jobs over the files of Python's standard library, and show the results."""
    from pgdefer.cli._demo_jobs import run  # noqa: PLC0415 (slow to import)

    with reported():
        run(Source(dsn), concurrency=concurrency, limit=limit, console=out)
