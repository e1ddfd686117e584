"""Servers and databases for the tests.

One server per session, of the binaries in $PGDEFER_PG_BIN or the embedded ones. Every test has its
own database, copied from one with pgdefer installed. After every test all invariants must hold:
`select * from queue.check()` is empty. $PGDEFER_TEST_OWNER names a role without superuser rights
that owns the queue; the tests' own sessions are those of a superuser.
"""

from __future__ import annotations

import dataclasses
import logging
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from pytest_postgresql import factories

from pgdefer.database.embedded import EmbeddedServer
from support import count_from_one, make_base

# No test judges how fast the machine is.
settings.register_profile("any", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any")


# If a shell runs the tests in the background they, and the programs that they start, would
# ignore these signals, which end some of those.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "unchecked(reason): breaks an invariant on purpose, or uninstalls: no check()"
    )


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    """Undo what a test does to the log: a command that it calls sets that up as for a process."""
    names = None, "pgdefer", "pgdefer.job"
    before = {name: logging.getLogger(name).level for name in names}
    root = logging.getLogger()
    handlers = list(root.handlers)
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)
    for added in set(root.handlers).difference(handlers):
        root.removeHandler(added)


@dataclasses.dataclass(frozen=True)
class _Base:
    """The session's server and a database to copy, in the form for pytest-postgresql."""

    host: str
    template_dbname: str
    port: int = 5432
    user: str = "postgres"
    password: str = ""
    options: str = ""
    maintenance_dbname: str = "postgres"


@pytest.fixture(scope="session")
def _base(server: EmbeddedServer) -> _Base:
    make_base(server, "pgdefer_base")
    return _Base(str(server.socket_folder), "pgdefer_base")


@pytest.fixture(scope="session")
def _blank_base(server: EmbeddedServer) -> _Base:
    return _Base(str(server.socket_folder), "template1")


_installed = factories.postgresql_noproc(dbname="test", depends_on="_base")
_blank = factories.postgresql_noproc(dbname="blank", depends_on="_blank_base")
_installed_database = factories.postgresql("_installed")
_blank_database = factories.postgresql("_blank")


def _take(connection: psycopg.Connection[Any]) -> str:
    """Return the DSN of a fixture's connection, and close that: nothing idles beside the test."""
    info = connection.info
    dsn = make_conninfo(host=info.host, port=info.port, user=info.user, dbname=info.dbname)
    connection.close()
    return dsn


@pytest.fixture
def blank_dsn(_blank_database: psycopg.Connection[Any]) -> str:
    """A fresh database without pgdefer."""
    return _take(_blank_database)


@pytest.fixture
def blank(blank_dsn: str) -> Iterator[psycopg.Connection[Any]]:
    """An autocommit connection to that database."""
    with psycopg.connect(blank_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture(params=["extension", "plain"])
def form(request: pytest.FixtureRequest, server: EmbeddedServer) -> str:
    if request.param == "extension" and server.major < 18:
        pytest.skip("the extension needs extension_control_path, which PostgreSQL 18 brought")
    return str(request.param)


@pytest.fixture
def dsn(
    _installed_database: psycopg.Connection[Any], request: pytest.FixtureRequest
) -> Iterator[str]:
    """A fresh database with pgdefer installed; its invariants are checked after the test."""
    dsn = _take(_installed_database)
    count_from_one(dsn)
    yield dsn
    if request.node.get_closest_marker("unchecked") is None:
        with psycopg.connect(dsn, autocommit=True, row_factory=dict_row) as connection:
            broken = connection.execute("select * from queue.check()").fetchall()
        assert not broken, f"queue.check() after the test: {broken}"


@pytest.fixture
def connect(dsn: str) -> Iterator[Callable[..., psycopg.Connection[Any]]]:
    """Open another autocommit connection to the test's database; all are closed after the test."""
    opened: list[psycopg.Connection[Any]] = []

    def open_one(**options: Any) -> psycopg.Connection[Any]:
        opened.append(psycopg.connect(dsn, **({"autocommit": True} | options)))
        return opened[-1]

    yield open_one
    for connection in opened:
        connection.close()


@pytest.fixture
def conn(connect: Callable[..., psycopg.Connection[Any]]) -> psycopg.Connection[Any]:
    """An autocommit connection to the test's database."""
    return connect()
