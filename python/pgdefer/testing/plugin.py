"""pytest's fixtures: `pytest_plugins = ["pgdefer.testing.plugin"]` in the first conftest.py.

The option `pgdefer_app` in pytest's configuration, or the fixture of this name, selects the App.

Tests: integration/test_docs_testing.py.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import psycopg
import pytest

from pgdefer.app import App
from pgdefer.testing.committed import CommittedTestQueue
from pgdefer.testing.database import queue_database
from pgdefer.testing.memory import MemoryQueue
from pgdefer.testing.queue import TestQueue

__all__ = [
    "committed_queue",
    "memory_queue",
    "pgdefer_app",
    "pgdefer_connection",
    "pgdefer_dsn",
    "pgdefer_registered",
    "queue",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option `pgdefer_app`."""
    parser.addini("pgdefer_app", "where the App is: package.module:name")


@pytest.fixture(scope="session")
def pgdefer_app(pytestconfig: pytest.Config) -> App:
    """The App under test."""
    where = str(pytestconfig.getini("pgdefer_app"))
    module, _, name = where.partition(":")
    if not module or not name:
        raise pytest.UsageError("no App is named: set pgdefer_app = package.module:name")
    found: object = getattr(importlib.import_module(module), name)
    if not isinstance(found, App):
        raise pytest.UsageError(f"{where} is not an App")
    return found


@pytest.fixture(scope="session")
def pgdefer_dsn() -> Iterator[str]:
    """A database with the queue, for the session; override it to use your own."""
    with queue_database() as dsn:
        yield dsn


@pytest.fixture(scope="session")
def pgdefer_registered(pgdefer_app: App, pgdefer_dsn: str) -> App:
    """The App, moved to that database, with its tasks registered."""
    pgdefer_app.import_tasks()
    pgdefer_app.move(pgdefer_dsn)
    pgdefer_app.open()
    pgdefer_app.close()
    return pgdefer_app


@pytest.fixture
def pgdefer_connection(pgdefer_dsn: str) -> Iterator[psycopg.Connection]:
    """The test's connection, rolled back after the test; override it to use your own."""
    with psycopg.connect(pgdefer_dsn) as connection:
        yield connection
        connection.rollback()


@pytest.fixture
def queue(pgdefer_registered: App, pgdefer_connection: psycopg.Connection) -> Iterator[TestQueue]:
    """The queue of a test: the App defers jobs in the test's own transaction."""
    with TestQueue(pgdefer_registered, pgdefer_connection) as in_test:
        yield in_test


@pytest.fixture
def committed_queue(pgdefer_registered: App) -> Iterator[CommittedTestQueue]:
    """The queue of a test that commits and needs a worker; its jobs are removed after the test."""
    with CommittedTestQueue(pgdefer_registered) as in_test:
        yield in_test


@pytest.fixture
def memory_queue(pgdefer_app: App) -> Iterator[MemoryQueue]:
    """The queue of a test without a database: it only records what the App defers."""
    with MemoryQueue(pgdefer_app) as in_test:
        yield in_test
