"""Servers of a test's own, of the tests' binaries: to be copied, crashed, promoted."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pgdefer.database.embedded import EmbeddedServer
from support import server_program


class Cluster:
    """A server that listens on a socket in its folder."""

    def __init__(self, folder: Path, programs: EmbeddedServer, port: int = 5432) -> None:
        self.folder, self.port, self._programs = folder, port, programs
        self.data = folder / f"data{port}"
        self._options = programs._as_user() | {"cwd": folder}

    def run(self, program: str, *arguments: str | Path) -> None:
        path = server_program(self._programs, program) or self._programs.bin_dir / program
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, check=False, **self._options
        )
        if done.returncode:
            log = self.folder / "log"
            pytest.fail(f"{program}: {done.stdout}{done.stderr}{log.read_text()[-3000:]}")

    def initdb(self, settings: str = "") -> None:
        self.run("initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8",
                 "--locale=C.UTF-8", "--no-sync")  # fmt: skip
        with (self.data / "postgresql.conf").open("a") as file:
            file.write(f"listen_addresses = ''\nunix_socket_directories = '{self.folder}'\n")
            file.write(f"max_prepared_transactions = 5\n{settings}")

    def start(self) -> None:
        self.run("pg_ctl", "-w", "-D", self.data, "-l", self.folder / "log",
                 "-o", f"-p {self.port}", "start")  # fmt: skip

    def stop(self, mode: str = "fast") -> None:
        self.run("pg_ctl", "-w", "-D", self.data, "-m", mode, "stop")

    def dsn(self, database: str = "postgres") -> str:
        return f"host={self.folder} port={self.port} user=postgres dbname={database}"

    def connect(self, database: str = "postgres") -> psycopg.Connection[Any]:
        return psycopg.connect(self.dsn(database), autocommit=True)


@contextlib.contextmanager
def running(*clusters: Cluster) -> Iterator[None]:
    """Stop for good, afterwards, those that still run."""
    try:
        yield
    finally:
        for cluster in clusters:
            if (cluster.data / "postmaster.pid").exists():
                cluster.stop("immediate")
