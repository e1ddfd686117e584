"""Workers of several languages as subprocesses, on one server: see README.md."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from psycopg.rows import dict_row
from psycopg.types.json import Jsonb

from pgdefer.database.embedded import EmbeddedServer
from support import ROOT, count_from_one, create_database, make_base, server_program

HERE = Path(__file__).parent
EXAMPLES = ROOT / "examples"

#: How each worker is started; the names of queues follow.
COMMANDS: dict[str, list[str | Path]] = {
    "python": [sys.executable, HERE / "worker.py"],
    "sh": ["bash", EXAMPLES / "worker.sh", HERE / "handlers.sh"],
    "mjs": ["node", EXAMPLES / "worker.mjs", HERE / "handlers.mjs"],
}
FINAL = ("succeeded", "failed", "cancelled")
BASE = "protocol_base"
LIMIT = 60.0


def what_is_missing(kind: str, server: EmbeddedServer) -> str | None:
    """Return why an implementation can't run here, None if it can."""
    if kind == "sh" and server_program(server, "psql") is None:
        return "worker.sh: there is no psql"
    if kind == "mjs" and shutil.which("node") is None:
        return "worker.mjs: there is no node"
    if kind == "mjs" and not (EXAMPLES / "node_modules" / "pg").exists():
        return "worker.mjs: run `npm ci` in examples/"
    return None


def wait_for(condition: Callable[[], Any], what: str = "") -> Any:
    """Wait until the condition holds, and return its value."""
    end = time.monotonic() + LIMIT
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {LIMIT:g} s: {what or condition}"
        time.sleep(0.01)
    return found


class Subject:
    """A running worker: its events, and signals to it."""

    def __init__(
        self, command: list[str | Path], environment: dict[str, str], folder: Path
    ) -> None:
        self._log = folder / f"worker-{time.monotonic_ns()}.log"
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | environment,
                start_new_session=True,
                text=True,
                encoding="utf-8",
            )
        self.events: list[dict[str, Any]] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                event = json.loads(line)
                for name in ("id", "claim"):
                    event[name] = event.get(name) and int(event[name])
                with self._news:
                    self.events.append(event)
                    self._news.notify_all()
        with self._news:
            self._news.notify_all()

    def wait(self, event: str, id: int | None = None, *, after: int = 0) -> dict[str, Any]:
        """Wait for an event, of a job if given; `after`: the number of events already seen."""

        def found() -> dict[str, Any] | None:
            for one in self.events[after:]:
                if one["event"] == event and id in (None, one["id"]):
                    return one
            return None

        with self._news:
            self._news.wait_for(lambda: found() or not self._reader.is_alive(), LIMIT)
            one = found()
        assert one is not None, f"no {event} {id or ''}: {self.events}\n{self.log()}"
        return one

    def started(self) -> list[int]:
        """Return the ids of the jobs that were started, in order."""
        return [event["id"] for event in self.events if event["event"] == "started"]

    def log(self) -> str:
        return self._log.read_text("utf-8", "replace")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        code = self.process.wait(LIMIT)
        self._reader.join(LIMIT)
        return code

    def stop(self) -> int:
        """Stop it gracefully."""
        self.send(signal.SIGTERM)
        return self.ended()

    def kill(self) -> None:
        """Kill it and all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.ended()


class Lab:
    """A database, and the workers of one implementation in it."""

    def __init__(self, kind: str, dsn: str, folder: Path) -> None:
        self.kind = kind
        self.dsn = dsn
        self.folder = folder
        self.conn: psycopg.Connection[Any]
        self.connect()
        #: The worker that cases share, if they do.
        self.worker: Subject
        #: The search path for programs.
        self.programs = os.environ["PATH"]
        self._subjects: list[Subject] = []
        self._paths = itertools.count()

    def connect(self) -> None:
        self.conn = psycopg.connect(self.dsn, autocommit=True)

    def start(self, *queues: str, **settings: object) -> Subject:
        """Start a worker, and wait until it is registered."""
        given = conninfo_to_dict(self.dsn)
        environment = {
            "PATH": self.programs,
            "PGHOST": str(given["host"]),
            "PGUSER": str(given["user"]),
            "PGDATABASE": str(given["dbname"]),
            "MAX_WAIT": "0.1" if self.kind == "sh" else "60",
            "HEARTBEAT_EVERY": "1" if self.kind == "sh" else "0.3",  # bash has only integers
        } | {name: str(value) for name, value in settings.items()}
        subject = Subject([*COMMANDS[self.kind], *queues], environment, self.folder)
        self._subjects.append(subject)
        subject.wait("ready")
        return subject

    def path(self) -> str:
        """Return the name of a file that does not exist."""
        return str(self.folder / f"file{next(self._paths)}")

    def defer(self, task: str, args: dict[str, Any] | None = None, **given: Any) -> int:
        given = {"task": task, "args": Jsonb(args or {})} | given
        if "options" in given:
            given["options"] = Jsonb(given["options"])
        places = ", ".join(f"{name} => %({name})s" for name in given)
        return self.value(f"select queue.defer({places})", given)

    def hold(self, **given: Any) -> tuple[int, Path]:
        """Defer a job that runs until the file exists."""
        path = self.path()
        return self.defer("hold", {"path": path}, **given), Path(path)

    def value(self, statement: str, given: Any = None) -> Any:
        """Return the first value of a statement's answer."""
        row = self.conn.execute(statement, given).fetchone()
        return row and row[0]

    def job(self, id: int) -> dict[str, Any]:
        cursor = self.conn.cursor(row_factory=dict_row)
        row = cursor.execute("select * from queue.jobs where id = %s", [id]).fetchone()
        assert row is not None
        return row

    def attempts(self, id: int) -> list[str]:
        rows = self.conn.execute(
            "select outcome from queue.attempts where job_id = %s order by claim", [id]
        )
        return [outcome for (outcome,) in rows]

    def reach(self, id: int, *states: str) -> dict[str, Any]:
        """Wait until a job is in one of these states, and return it."""
        return wait_for(lambda: (job := self.job(id))["state"] in states and job, f"{id} {states}")

    def end(self, *ids: int) -> list[dict[str, Any]]:
        """Wait until these jobs have ended, and return them."""
        return [self.reach(id, *FINAL) for id in ids]

    def heartbeat(self) -> None:
        """Wait for a heartbeat."""
        seen = "select max(last_seen_at) from queue.workers where is_alive"
        before = self.value(seen)
        wait_for(lambda: self.value(seen) > before, "a heartbeat")

    def give_up(self) -> None:
        """Declare all workers dead."""
        with self.conn.transaction():  # otherwise a heartbeat comes between
            self.conn.execute(
                "update queue.worker"
                " set last_seen_at = last_seen_at - interval '1 h', dead_after = '0'"
            )
            self.conn.execute("select queue.reap()")

    def close(self) -> None:
        """End all workers. All invariants must hold."""
        for subject in self._subjects:
            subject.kill()
        broken = self.conn.execute("select * from queue.check()").fetchall()
        self.conn.close()
        assert not broken, f"queue.check(): {broken}"


@pytest.fixture(scope="session")
def place(server: EmbeddedServer) -> EmbeddedServer:
    """The session's server, with the database that `make_lab` copies."""
    make_base(server, BASE)
    return server


@pytest.fixture(scope="module", params=COMMANDS)
def kind(request: pytest.FixtureRequest, server: EmbeddedServer) -> str:
    """The implementation under test."""
    kind: str = request.param
    if why := what_is_missing(kind, server):
        pytest.skip(why)
    return kind


_numbers = itertools.count()


def make_lab(server: EmbeddedServer, kind: str, folder: Path) -> Lab:
    name = f"{kind}_{next(_numbers)}"
    create_database(server, name, BASE)
    count_from_one(server.dsn(name))
    lab = Lab(kind, server.dsn(name), folder)
    if psql := server_program(server, "psql"):
        lab.programs = f"{Path(psql).parent}{os.pathsep}{lab.programs}"
    return lab


@pytest.fixture
def lab(place: EmbeddedServer, kind: str, tmp_path: Path) -> Iterator[Lab]:
    """A separate database, for cases that start and end workers."""
    lab = make_lab(place, kind, tmp_path)
    yield lab
    lab.close()


@pytest.fixture(scope="module")
def shared(
    place: EmbeddedServer,
    kind: str,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Lab]:
    """A database with a worker for the queues that the module SERVES, or all, for all its cases."""
    shared = make_lab(place, kind, tmp_path_factory.mktemp(kind))
    shared.worker = shared.start(*getattr(request.module, "SERVES", []))
    yield shared
    code = shared.worker.stop()
    shared.close()
    assert code == 0, shared.worker.log()
