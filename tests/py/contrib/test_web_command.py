"""`pgdefer web` as a process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from pgdefer.database.server import EmbeddedServer
from web_page import token

pytestmark = pytest.mark.client

COMMAND = [sys.executable, "-m", "pgdefer", "web", "--port", "0"]


@pytest.fixture
def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


@contextlib.contextmanager
def served(environment: Mapping[str, str]) -> Iterator[str]:
    """Start the page; give the address that it prints."""
    command = [*COMMAND, "--no-password"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while (found := re.search(r"running on (http://\S+)", said)) is None:
                line = process.stderr.readline()
                assert line, said
                said += line
            yield found[1]
        finally:
            process.send_signal(signal.SIGINT)


def log_in(address: str) -> str:
    """Log in as the superuser; return the page that comes first."""
    with httpx.Client(base_url=address, follow_redirects=True, timeout=60) as client:
        form = {"role": "postgres", "password": "any", "token": token(client.get("/login"))}
        answer = client.post("/login", data=form)
    assert answer.status_code == 200
    return answer.text


def test_it_serves_the_database_of_pgdefer_dsn_and_says_where(
    dsn: str, environment: dict[str, str]
) -> None:
    with served(environment | {"PGDEFER_DSN": dsn}) as address:
        assert "Log out" in log_in(address)


def test_it_serves_the_embedded_server_if_nothing_names_another(
    environment: dict[str, str],
) -> None:
    with tempfile.TemporaryDirectory(prefix="pgdefer-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)  # the server's user enters it
        home = Path(name) / "home"
        try:
            with served(environment | {"PGDEFER_HOME": str(home)}) as address:
                assert "Log out" in log_in(address)
        finally:
            EmbeddedServer(home).stop("immediate")


def test_the_embedded_server_must_be_permitted(tmp_path: Path, environment: dict[str, str]) -> None:
    environment["PGDEFER_HOME"] = str(tmp_path / "home")
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "add --no-password" in done.stderr
    assert not (tmp_path / "home").exists()
