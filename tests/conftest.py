"""The server of all tests in Python: one per process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pgdefer.database.embedded import EmbeddedServer
from support import quick_server


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """The session's server. A test that stops or kills one creates its own by temporary_server."""
    # The server's time zone, whatever that of the tests' process.
    settings = {
        "max_connections": "200",
        "max_prepared_transactions": "10",
        "jit": "off",
        "timezone": "UTC",
    }
    with quick_server(settings) as running:
        yield running
