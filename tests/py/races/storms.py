"""What storms with a ledger share: clients in threads, draining, and what a failure leaves for analysis."""

from __future__ import annotations

import collections
import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

Connection = psycopg.Connection[Any]
Client = Callable[[Connection, random.Random, int], None]

ENOUGH = 100  # claims
PATIENCE = 300  # s; a fault may take this long


class Ledger:
    """What is known outside the database."""

    def __init__(self) -> None:
        self.mutex = threading.Lock()
        self.faults: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()

    def fault(self, text: str) -> None:
        self.faults.append(text)

    def lines(self) -> Iterable[str]:
        """Return the records, for analysis."""
        raise NotImplementedError


class Storm:
    """Clients in threads. Their choices follow from the seed, but not how they interleave."""

    def __init__(self, dsn: str, seed: int, seconds: float, ledger: Ledger) -> None:
        self.dsn = dsn
        self.seed = seed
        self.seconds = seconds
        self.ledger = ledger
        self.started = time.monotonic()
        self.is_over = threading.Event()  # no more jobs are deferred or operated on
        self.is_drained = threading.Event()

    def run(self) -> None:
        """Start clients, drain, and judge."""
        raise NotImplementedError

    def drain(self, conn: Connection) -> None:
        """Release everything, and wait until all jobs have ended."""
        raise NotImplementedError

    def check(self) -> None:
        """Run; if there are faults, fail, and keep everything for analysis."""
        self.run()
        ledger = self.ledger
        print(f"seed {self.seed}:", dict(ledger.counts))
        if ledger.faults:
            faults = "\n".join(ledger.faults[:20])
            pytest.fail(
                f"seed {self.seed}, kept in {self.keep()}: {len(ledger.faults)} faults\n{faults}"
            )
        assert ledger.counts["claims"] > ENOUGH

    def connect(self, role: str | None = None) -> Connection:
        return psycopg.connect(self.dsn, user=role, autocommit=True, prepare_threshold=0)

    def start(self, client: Client, n: int, role: str | None = None) -> threading.Thread:
        """Start a client with a connection of its own; an error of it is a fault."""

        def run() -> None:
            try:
                with contextlib.closing(self.connect(role)) as conn:
                    client(conn, random.Random(f"{self.seed} {client.__name__} {n}"), n)
            except BaseException as error:
                self.ledger.fault(f"{client.__name__} {n}: {type(error).__name__}: {error}")
                self.is_over.set()

        thread = threading.Thread(target=run, name=f"{client.__name__} {n}", daemon=True)
        thread.start()
        return thread

    def goes_on(self, end: float) -> bool:
        """Until the time is over; on a slow machine longer, until enough has been claimed."""
        late = time.monotonic() - end
        return late < 0 or (late < PATIENCE and self.ledger.counts["claims"] <= ENOUGH)

    def end(self, conn: Connection, clients: Iterable[threading.Thread]) -> None:
        """Drain, and wait for the clients that go on until then."""
        drained = time.monotonic()
        self.drain(conn)
        self.ledger.counts["seconds of draining"] = round(time.monotonic() - drained)
        self.is_drained.set()
        for thread in clients:
            thread.join(PATIENCE)
            if thread.is_alive():
                self.ledger.fault(f"{thread.name} hangs")

    def keep(self) -> Path:
        """Write the queue's tables and views, the faults and the ledger to a new folder."""
        folder = Path(tempfile.mkdtemp(prefix=f"pgdefer-storm-{self.seed}-"))
        (folder / "faults.txt").write_text("\n".join(self.ledger.faults), "utf-8")
        (folder / "ledger.txt").write_text("\n".join(self.ledger.lines()), "utf-8")
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            tables = connection.execute(
                "select relname from pg_class where relnamespace = 'queue'::regnamespace"
                " and relkind in ('r', 'v') order by relname"
            ).fetchall()
            for (table,) in tables:
                copy = sql.SQL("copy (select * from queue.{}) to stdout (format csv, header)")
                with (
                    (folder / f"{table}.csv").open("wb") as file,
                    connection.cursor().copy(copy.format(sql.Identifier(table))) as rows,
                ):
                    file.writelines(bytes(row) for row in rows)
        return folder
