"""`pgdefer web` as a process."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import httpx
import pytest

from pgdefer.database.embedded import EmbeddedServer
from web_page import COMMAND, log_in, plain_environment, served, visitor
from workers import wait_for

pytestmark = pytest.mark.client


@pytest.fixture
def environment() -> dict[str, str]:
    return plain_environment()


def first_page(address: str) -> str:
    """Log in as the superuser; return the page that comes first."""
    with visitor(address, follow_redirects=True) as client:

        def page() -> httpx.Response | None:
            answer = log_in(client, "postgres")
            return None if answer.status_code == 503 else answer  # on a busy machine

        answer: httpx.Response = wait_for(page)
    assert answer.status_code == 200
    return answer.text


def test_it_serves_the_database_of_pgdefer_dsn_and_says_where(
    dsn: str, environment: dict[str, str]
) -> None:
    with served(environment | {"PGDEFER_DSN": dsn}) as (address, _):
        assert "Log out" in first_page(address)
        for host, status in {
            "127.0.0.1:8080": 200,
            "localhost:8080": 200,
            "LOCALHOST": 200,
            "[::1]": 200,
            "[::1]:8080": 200,
            # by a name that another site lets resolve to this machine
            "evil.example": 400,
            "localhost.evil.example": 400,
            "localhost:80@evil.example": 400,
            "": 400,
        }.items():
            with visitor(address, headers={"host": host}) as client:
                assert client.get("/login").status_code == status, host


def test_it_serves_the_embedded_server_if_nothing_names_another(
    environment: dict[str, str],
) -> None:
    with tempfile.TemporaryDirectory(prefix="pgdefer-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o755)  # the server's user enters it
        home = Path(name) / "home"
        try:
            with served(environment | {"PGDEFER_HOME": str(home)}) as (address, _):
                assert "Log out" in first_page(address)
        finally:
            EmbeddedServer(home).stop("immediate")


def test_the_embedded_server_must_be_permitted(tmp_path: Path, environment: dict[str, str]) -> None:
    environment["PGDEFER_HOME"] = str(tmp_path / "home")
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "add --no-password" in done.stderr
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("path", ["queue", "https://example.org/queue"])
def test_a_root_path_begins_with_a_slash(path: str, environment: dict[str, str]) -> None:
    command = [*COMMAND, "--no-password", "--dsn", "dbname=nowhere", "--root-path", path]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, "begins with /" in done.stderr) == (2, True)


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help(option: str, environment: dict[str, str]) -> None:
    command = [*COMMAND, option]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "--role-header" in done.stdout) == (0, True), done.stderr
