"""The systems of bench_peers.py: how each is installed, started, and asked what it has done."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import LiteralString

from common import ROOT, Bench

WORKERS = Path(__file__).resolve().parent / "workers"
VENV = ROOT / ".tools" / "bench-venv"
NODE = ROOT / ".tools" / "bench-node"

DEFAULT, BEST = "drain, default", "drain, best"
SLEEP, CPU, TEN = "sleep 1 ms", "CPU 1 ms", "10 processes"
ONE, MANY = "enqueue", "enqueue many"
IDLE, HALF, OUTAGE = "latency idle", "latency half load", "after an outage"
SCENARIOS = (DEFAULT, BEST, SLEEP, CPU, TEN, ONE, MANY, IDLE, HALF, OUTAGE)


@dataclasses.dataclass(frozen=True)
class System:
    """A system with its settings: a row of the table."""

    name: str
    driver: str
    # how many jobs its tables have, and how many of them are done; without that, done ones have gone
    sent: LiteralString = ""
    done: LiteralString = ""
    setting: str = "best"
    # jobs a second, about, where it needs fewer jobs for a run of a few seconds
    paces: Mapping[str, float] = dataclasses.field(default_factory=dict)
    # the scenarios that it does not have
    without: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # sends %s jobs where the driver would take too long
    fill: LiteralString = ""

    def setting_for(self, scenario: str) -> str:
        return "default" if scenario == DEFAULT else self.setting

    def command(self, action: str) -> list[str]:
        """Return the beginning of its driver's command."""
        script = str(WORKERS / f"peer_{self.driver}")
        if self.is_node:
            return [str(NODE / "node_modules" / ".bin" / "node"), f"{script}.mjs", action]
        is_own = self.driver in {"pgdefer", "bare"}
        python = sys.executable if is_own else str(VENV / "bin" / "python")
        return [python, f"{script}.py", action]

    @property
    def is_node(self) -> bool:
        return self.driver in {"graphile", "pgboss"}

    @property
    def folder(self) -> Path:
        return NODE if self.is_node else WORKERS


OURS: tuple[LiteralString, LiteralString] = (
    "select count(*) from queue.job",
    "select count(*) from queue.finished where state = 'succeeded'",
)
NO_MANY = {MANY: "it has no such call"}
SYSTEMS = (
    System(
        "pgdefer, default",
        "pgdefer",
        *OURS,
        setting="default",
        without={BEST: "the next line"},
    ),
    System(
        "pgdefer, best",
        "pgdefer",
        *OURS,
        without={DEFAULT: "the line before", ONE: "the line before", MANY: "the line before"},
    ),
    System(
        "Procrastinate",
        "procrastinate",
        "select count(*) from procrastinate_jobs",
        "select count(*) from procrastinate_jobs where status = 'succeeded'",
        paces={DEFAULT: 350, BEST: 700, SLEEP: 600, CPU: 400, TEN: 700, MANY: 8000},
        fill="""
          select count(*) from unnest(procrastinate_defer_jobs_v1(array(
            select row('default', 'noop', 0, null, null, jsonb_build_object('n', g, 'at', null), null)
              ::procrastinate_job_to_defer_v1
            from generate_series(1, %s) g)))
        """,
    ),
    System(
        "pgqueuer",
        "pgqueuer",
        "select count(*) from pgqueuer",
        "select count(*) from pgqueuer_log where status = 'successful'",
        paces={DEFAULT: 3000},
    ),
    System(
        "awa-pg",
        "awa",
        # It deletes what is completed within seconds.
        "select count(*) from awa.jobs where state <> 'completed'",
        # The more jobs wait, the slower it claims: 3,290/s of 1,800 jobs, 216/s of 12,000.
        paces={DEFAULT: 400, BEST: 600, SLEEP: 400, TEN: 600},
    ),
    System(
        "absurd-sdk",
        "absurd",
        "select count(*) from absurd.t_default",
        "select count(*) from absurd.t_default where state = 'completed'",
        paces={DEFAULT: 400, BEST: 500, SLEEP: 500, CPU: 400, TEN: 900},
        without=NO_MANY,
        fill="""
          select count(*) from generate_series(1, %s) g,
            absurd.spawn_task('default', 'noop', jsonb_build_object('n', g, 'at', null), '{}')
        """,
    ),
    System(
        "graphile-worker",
        "graphile",
        "select count(*) from graphile_worker._private_jobs",
        paces={DEFAULT: 800},
    ),
    System(
        "pg-boss",
        "pgboss",
        "select count(*) from pgboss.job where name = 'noop'",
        "select count(*) from pgboss.job where name = 'noop' and state = 'completed'",
        paces={DEFAULT: 0.5},
    ),
    System(
        "Celery on Redis",
        "celery",
        paces={DEFAULT: 1500, BEST: 2000, SLEEP: 1500, CPU: 1200, TEN: 2000},
        without=NO_MANY | {OUTAGE: "Redis keeps all jobs in memory"},
    ),
    System(
        "a bare table",
        "bare",
        "select count(*) from q",
        without=dict.fromkeys((DEFAULT, SLEEP, CPU, HALF), "it has no worker"),
    ),
)


# Installing


def missing(system: System) -> str | None:
    """Install what the system needs; return why that is impossible."""
    if system.driver in {"pgdefer", "bare"}:
        return None
    if system.driver == "celery" and shutil.which("redis-server") is None:
        return "there is no redis-server"
    try:
        _install_node() if system.is_node else install_python(VENV, WORKERS / "requirements.txt")
    except subprocess.CalledProcessError as error:
        return f"it could not be installed: {str(error.stderr or error)[-300:]}"
    except FileNotFoundError as error:
        return f"it could not be installed: {error}"
    return None


def install_python(venv: Path, requirements: Path) -> None:
    """Create a virtual environment of others, outside the project's, unless it is there."""
    wanted = requirements.read_text()
    stamp = venv / "requirements.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"Installing workers/{requirements.name} into {venv.relative_to(ROOT)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        pip = [venv / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps"]
        command = [*pip, "--disable-pip-version-check", "-r", requirements]
        subprocess.run(command, check=True, capture_output=True, text=True)
        stamp.write_text(wanted)


def _install_node() -> None:
    wanted = (WORKERS / "package-lock.json").read_text()
    stamp = NODE / "installed.json"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"Installing workers/package-lock.json into {NODE.relative_to(ROOT)}", flush=True)
        NODE.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(WORKERS / name, NODE)
        command = ["npm", "ci", "--silent"]
        subprocess.run(command, cwd=NODE, check=True, capture_output=True, text=True)
        stamp.write_text(wanted)


# Redis


class Redis:
    """A Redis that syncs to disk each second, which is its advice, in a folder of its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pgdefer-redis-")
        self.socket = f"{self._folder.name}/redis.sock"
        options = {"port": "0", "unixsocket": self.socket, "dir": self._folder.name, "save": ""}
        options |= {"appendonly": "yes", "appendfsync": "everysec"}
        words = [word for key, value in options.items() for word in (f"--{key}", value)]
        self.process = subprocess.Popen(["redis-server", *words], stdout=subprocess.DEVNULL)
        while not Path(self.socket).exists():
            assert self.process.poll() is None, "redis-server has ended"
            time.sleep(0.01)

    def call(self, command: str) -> str:
        """Return the answer to a command, of one line."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self.socket)
            connection.sendall(f"{command}\r\n".encode())
            return connection.recv(1000).decode()

    def left(self) -> int:
        """Return how many jobs have not been acknowledged."""
        return sum(int(self.call(command)[1:]) for command in ("llen celery", "hlen unacked"))

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait()
        self._folder.cleanup()


# Databases


@dataclasses.dataclass
class Place:
    """Where a system keeps its jobs in one run."""

    on: Bench
    system: System
    database: str
    redis: Redis | None

    @property
    def dsn(self) -> str:
        if self.redis:
            return f"redis+socket://{self.redis.socket}"
        return url(self.on, self.database)

    def sent(self) -> int:
        """Return how many jobs there are."""
        return self.redis.left() if self.redis else self._count(self.system.sent)

    def done(self, jobs: int) -> int:
        """Return how many of so many jobs are done."""
        return self._count(self.system.done) if self.system.done else jobs - self.sent()

    def _count(self, query: LiteralString) -> int:
        with self.on.connect(self.database) as connection:
            row = connection.execute(query).fetchone()
        assert row is not None
        return int(row[0])


def url(on: Bench, database: str) -> str:
    return f"postgresql:///{database}?host={on.server.socket_folder}&user=postgres"


@contextlib.contextmanager
def redis_if_needed(systems: list[System]) -> Iterator[Redis | None]:
    if not any(system.driver == "celery" for system in systems):
        yield None
        return
    redis = Redis()
    try:
        yield redis
    finally:
        redis.stop()
