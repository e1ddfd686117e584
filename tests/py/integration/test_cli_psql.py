"""`pgdefer psql`, and errors as psql shows them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from pgdefer.cli import Exit
from pgdefer.database.embedded import EmbeddedServer
from support import server_program

from .command_line import Run, defer, run

__all__ = ["run"]

pytestmark = pytest.mark.client


def test_psqlrc(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    own = tmp_path / ".psqlrc"
    own.write_text("\\set mine 1")
    for _ in range(2):
        assert "reads" in run("psqlrc").out
    assert own.read_text() == f"\\set mine 1\n\\i '{tmp_path}/config/pgdefer/psqlrc'\n"
    assert run("psqlrc", "--print").out == (tmp_path / "config/pgdefer/psqlrc").read_text()
    assert run("psqlrc", "--remove").code == 0
    assert own.read_text() == "\\set mine 1\n"


def test_psqlrc_without_a_home(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", os.devnull)
    for words in (["psqlrc"], ["psqlrc", "--remove"]):
        done = run(*words)
        assert (done.code, done.out) == (Exit.ERROR, "")
        assert f"{os.devnull}/.config/pgdefer can't be created: " in done.err


def test_psqlrc_either_prints_or_removes(run: Run) -> None:
    done = run("psqlrc", "--print", "--remove")
    assert (done.code, done.out) == (Exit.USAGE, "")
    assert "--print and --remove exclude each other" in done.err


def test_psql(run: Run, dsn: str, tmp_path: Path, server: EmbeddedServer) -> None:
    if server_program(server, "psql") is None:
        pytest.skip("there is no psql")
    id = defer(run, "t", "-q", "q")
    (tmp_path / ".psqlrc").write_text("\\set mine 'select 12345;'\n")
    shortcuts = (
        "failed running queues workers schedules stats health check job args attempts why graph"
    )
    script = "\\set ON_ERROR_STOP 1\n:jobs\n:mine\n:help\n\\set id " + str(id) + "\n"
    script += "".join(f":{name}\n" for name in shortcuts.split())
    script += "\\set find \"'t'\"\n:search\n:cancel\n"
    done = subprocess.run(
        [sys.executable, "-m", "pgdefer", "psql", "--", "-A"],
        input=script,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{id}|q|t|ready" in done.stdout
    assert "12345" in done.stdout
    assert done.stdout.rstrip().endswith("cancelled\n(1 row)")


@pytest.mark.parametrize("own", ["", "\\set SHOW_CONTEXT always\n"])
def test_errors_in_psql(
    run: Run, dsn: str, tmp_path: Path, server: EmbeddedServer, own: str
) -> None:
    if server_program(server, "psql") is None:
        pytest.skip("there is no psql")
    (tmp_path / ".psqlrc").write_text(own)
    done = subprocess.run(
        [sys.executable, "-m", "pgdefer", "psql"],
        input="select queue.cancel(99);\n\\errverbose\n",
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert done.stderr.startswith("ERROR:  job not found\nDETAIL:  id: 99\nHINT:  The id is wrong")
    first, _, whole = done.stderr.partition("QJ001")
    assert ("CONTEXT" in first) == bool(own)
    assert "CONTEXT:  PL/pgSQL function queue." in whole


SECRET = "to'p se\\cret"


@pytest.mark.parametrize(
    "command",
    [["psql", "--", "-c", "select pg_sleep(60)"], ["pg", "backup"], ["pg", "restore", "--yes"]],
)
def test_no_password_on_a_command_line(
    command: list[str],
    dsn: str,
    conn: psycopg.Connection[Any],
    tmp_path: Path,
    server: EmbeddedServer,
) -> None:
    """Checked while they run: psql sleeps, pg_dump waits for a lock, pg_restore for input."""
    name = {"--": "psql", "backup": "pg_dump", "restore": "pg_restore"}[command[1]]
    if server_program(server, name) is None or not Path("/proc/self/cmdline").exists():
        pytest.skip(f"there is no {name}, or no /proc")
    with conn.transaction():
        conn.execute("lock table queue.task in access exclusive mode")
        process = subprocess.Popen(
            [sys.executable, "-m", "pgdefer", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ
            | {"PGDEFER_DSN": make_conninfo(dsn, password=SECRET), "XDG_CACHE_HOME": str(tmp_path)},
        )
        try:
            folder = Path(f"/proc/{process.pid}")
            deadline = time.monotonic() + 300
            while name not in (words := (folder / "cmdline").read_text().split("\0"))[0]:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert not any("se" in word and "cret" in word for word in words), words
            assert f"PGPASSWORD={SECRET}" in (folder / "environ").read_text().split("\0")
        finally:
            process.kill()
            process.communicate()
