"""For unittest, and for Django's TestCase.

Tests: contrib/test_django_testing.py.
"""

from __future__ import annotations

import unittest
from typing import Any, ClassVar

import psycopg

from pgdefer.app import App
from pgdefer.database.callers import is_django
from pgdefer.testing.queue import TestQueue

__all__ = ["QueueTestCase"]


class QueueTestCase(unittest.TestCase):
    """A test with `self.queue`, on a connection whose transaction is rolled back.

    Set `app`, and either `dsn`, for a database with the queue, or override `queue_connection` to
    return the connection that the test already has; in Django's TestCase `django.db.connection`.
    """

    app: ClassVar[App]
    dsn: ClassVar[str | None] = None

    queue: TestQueue

    def queue_connection(self) -> Any:
        """Return the test's own connection; by default a new one to `dsn`."""
        connection = psycopg.connect(self.dsn or self.app.source.conninfo())
        self.addCleanup(connection.close)
        self.addCleanup(connection.rollback)
        return connection

    def setUp(self) -> None:
        """Begin the test's transaction."""
        super().setUp()
        connection = self.queue_connection()
        if is_django(connection):
            # Django's TestCase would check constraints first, and a transaction in which jobs were
            # run fails that check, as it must not be committed.
            self.addCleanup(connection.set_rollback, True)
        self.queue = TestQueue(self.app, connection)
        self.queue.__enter__()
        self.addCleanup(self.queue.__exit__)
