"""A real pgbouncer in transaction mode, for tests."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

__all__ = ["PROGRAM", "Bouncer", "bouncing"]

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin")
CONFIGURATION = """
[databases]
* = host={host} port={port} user=postgres

[pgbouncer]
pool_mode = transaction
default_pool_size = 3
max_client_conn = 200
listen_port = 6432
unix_socket_dir = {folder}
auth_type = any
logfile = {folder}/log
pidfile = {folder}/pid
"""


class Bouncer:
    """pgbouncer in front of the tests' server, with three connections to each database."""

    def __init__(self, folder: Path, dsn: str) -> None:
        given = conninfo_to_dict(dsn)
        self._configuration = folder / "pgbouncer.ini"
        self._configuration.write_text(
            CONFIGURATION.format(folder=folder, host=given["host"], port=given.get("port", 5432))
        )
        self._folder = folder
        self._options: dict[str, Any] = {}
        if os.geteuid() == 0:
            # Neither runs as root; the server's socket belongs to its user alone.
            owner = Path(str(given["host"])).stat()
            self._options = {"user": owner.st_uid, "group": owner.st_gid, "extra_groups": []}
            os.chown(folder, owner.st_uid, owner.st_gid)
        self.dsn = make_conninfo(host=str(folder), port=6432, user="any", dbname=given["dbname"])
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert PROGRAM is not None
        self._process = subprocess.Popen(
            [PROGRAM, "-q", self._configuration], cwd="/", **self._options
        )
        end = time.monotonic() + 300
        while True:
            try:
                psycopg.connect(self.dsn, connect_timeout=5).close()
            except psycopg.OperationalError:
                log = self._folder / "log"
                text = log.read_text() if log.exists() else ""
                assert self._process.poll() is None, text
                assert time.monotonic() < end, text
                time.sleep(0.02)
            else:
                return

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)  # at once
            self._process.wait(300)


@contextlib.contextmanager
def bouncing(dsn: str) -> Iterator[Bouncer]:
    """Run pgbouncer in front of a server."""
    folder = Path(tempfile.mkdtemp(prefix="pgdefer-bouncer-"))
    bouncer = Bouncer(folder, dsn)
    try:
        bouncer.start()
        yield bouncer
    finally:
        bouncer.stop()
        shutil.rmtree(folder)
