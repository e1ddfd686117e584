"""`pgdefer demo`: jobs over the files of the running Python's standard library.

Every file gets a job, deferred in one transaction per folder. The job reads and digests the file
and writes the result to a table. A trigger on that table, in SQL, defers a second kind of job,
which adds the file to its folder's totals.

Tests: integration/test_cli.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from pgdefer.app import App
from pgdefer.database import sql
from pgdefer.database.execute import execute
from pgdefer.database.source import PsycopgConnection, Source
from pgdefer.errors import PgDeferError
from pgdefer.worker.worker import Worker

__all__ = ["run"]

# Folders that are not part of the library: generated files, and installed packages.
SKIPPED = frozenset({"__pycache__", "site-packages", "dist-packages"})


def folders(root: Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the standard library's folders, each with its files."""
    for folder, inner, files in os.walk(root):
        inner[:] = sorted(set(inner) - SKIPPED)
        if files:
            yield Path(folder), sorted(files)


def run(source: Source, *, concurrency: int, limit: int | None, console: Console) -> None:
    """Run the demo and print the results."""
    console.print(
        "Starting the embedded server ..." if source.kind == "embedded" else "Connecting ...",
        end=" ",
    )
    dsn = source.conninfo()
    with psycopg.connect(dsn, autocommit=True) as connection:
        if connection.execute(sql.DEMO_LOCK.psycopg).fetchone() != (True,):
            raise PgDeferError("another demo runs on this database")
        connection.execute(sql.DEMO_PREPARE.psycopg)
        (last,) = connection.execute(sql.LAST_ID.psycopg).fetchone() or (0,)
        console.print("ready.")
        demo = Demo(App(dsn), connection, last, concurrency, limit)
        asyncio.run(demo.run(console))
        show(connection, last, console)


class Demo:
    """The two tasks, and one run of them."""

    def __init__(
        self,
        app: App,
        connection: PsycopgConnection,
        last: int,
        concurrency: int,
        limit: int | None,
    ) -> None:
        self.app = app
        self.connection = connection
        self.last = last
        self.root = Path(sysconfig.get_paths()["stdlib"])
        self.limit = limit
        self.local = threading.local()
        self.opened: list[PsycopgConnection] = []
        self.async_connection: psycopg.AsyncConnection[tuple[object, ...]] | None = None
        self.worker = Worker(app, ["demo"], concurrency=concurrency)
        self.deferred = 0
        self.digest = app.task(name="demo.digest", queue="demo")(self.digest_file)
        app.task(name="demo.index", queue="demo", priority=1)(self.index_file)

    def digest_file(self, path: str) -> None:
        """Digest one file. The task is synchronous, so it runs in a thread."""
        begun = time.perf_counter()
        content = (self.root / path).read_bytes()
        found = {
            "path": path,
            "folder": str(Path(path).parent),
            "bytes": len(content),
            "lines": content.count(b"\n"),
            "sha256": hashlib.sha256(content).hexdigest(),
            "blake2b": hashlib.blake2b(content).hexdigest(),
            "ms": (time.perf_counter() - begun) * 1000,
        }
        connection: PsycopgConnection | None = getattr(self.local, "connection", None)
        if connection is None:
            connection = self.local.connection = self.app.source.connect()
            self.opened.append(connection)
        connection.execute(sql.DEMO_ADD_FILE.psycopg, found)

    async def index_file(self, folder: str, bytes: int, **_: object) -> None:  # noqa: A002
        """Add a file to its folder's totals; its arguments are the trigger's row."""
        assert self.async_connection is not None
        await self.async_connection.execute(
            sql.DEMO_ADD_TO_FOLDER.psycopg, {"folder": folder, "bytes": bytes}
        )

    def defer_all(self) -> None:
        """Defer a job for every file, the jobs of a folder in one transaction."""
        for folder, files in folders(self.root):
            taken = files if self.limit is None else files[: self.limit - self.deferred]
            with self.connection.transaction():
                for name in taken:
                    path = str((folder / name).relative_to(self.root))
                    self.digest.defer_with(self.connection, path)
            self.deferred += len(taken)

    async def is_over(self, deferring: asyncio.Task[None]) -> bool:
        """Whether all deferred jobs have run, or deferring has failed."""
        if deferring.exception() is not None:
            return True
        rows = await asyncio.to_thread(
            execute, self.connection, sql.DEMO_UNFINISHED, {"after": self.last}
        )
        unfinished: int = rows[0][0]
        return unfinished == 0

    async def run(self, console: Console) -> None:
        """Defer and work at the same time until everything has run."""
        self.app.open()
        self.async_connection = await self.app.source.connect_async()
        working = asyncio.create_task(self.worker.run_async())
        deferring = asyncio.create_task(asyncio.to_thread(self.defer_all))
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console) as progress:
            bar = progress.add_task("jobs", total=None, rate="")
            begun = time.monotonic()
            while not working.done():
                done = self.worker.finished
                rate = f"{done / (time.monotonic() - begun):,.0f} jobs/s"
                total = 2 * self.deferred if deferring.done() else None
                progress.update(bar, completed=done, total=total, rate=rate)
                if deferring.done() and await self.is_over(deferring):
                    self.worker.stop()
                    break
                await asyncio.sleep(0.05)
            await working
            await deferring
        await self.async_connection.close()
        with contextlib.suppress(psycopg.Error):
            for connection in self.opened:
                connection.close()
        await self.app.close_async()


def show(connection: PsycopgConnection, after: int, console: Console) -> None:
    """Print the results: states, rates, waiting times, the files that took longest."""
    ran = Table("task", "state", title="Jobs", title_justify="left")
    for name in ("jobs", "p50 wait", "p99 wait"):
        ran.add_column(name, justify="right")
    for task, state, count, waits in connection.execute(sql.DEMO_STATES.psycopg, {"after": after}):
        p50, p99 = waits or (None, None)
        ran.add_row(task, state, f"{count:,}", _time(p50), _time(p99))
    console.print(ran)
    (jobs, seconds) = connection.execute(sql.DEMO_SPAN.psycopg, {"after": after}).fetchone() or (
        0,
        1,
    )
    row = connection.execute(sql.DEMO_FOLDERS.psycopg).fetchone()
    (count, files, size) = row or (0, 0, 0)
    rate = jobs / float(seconds or 1)
    console.print(
        f"{jobs:,} jobs in {float(seconds or 0):.2f} s: {rate:,.0f} jobs/s, deferring included."
    )
    console.print(f"Folders: {count:,}, files: {files or 0:,}, bytes: {int(size or 0):,}.")
    largest = Table("file", title="The ten files with the most work", title_justify="left")
    for name in ("bytes", "lines", "ms"):
        largest.add_column(name, justify="right")
    for path, size, lines, ms in connection.execute(sql.DEMO_LARGEST.psycopg):
        largest.add_row(path, f"{size:,}", f"{lines:,}", f"{ms:,.1f}")
    console.print(largest)


def _time(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:,.1f} ms"
