"""Testing code that defers jobs: see docs/testing.md.

`TestQueue` runs in the transaction of one test, which is rolled back; `CommittedTestQueue` uses a
real worker; `MemoryQueue` records jobs without a database. The pytest fixtures are in
`pgdefer.testing.plugin`; unittest uses `QueueTestCase`.
"""

from typing import TYPE_CHECKING

from pgdefer.testing.committed import CommittedTestQueue
from pgdefer.testing.database import queue_database
from pgdefer.testing.fake import FakeJob, fake_job
from pgdefer.testing.jobs import DeferredJob, RanJob, RecordedJob
from pgdefer.testing.memory import MemoryQueue
from pgdefer.testing.queue import TestQueue

if TYPE_CHECKING:
    from pgdefer.testing.cases import QueueTestCase

__all__ = [
    "CommittedTestQueue",
    "DeferredJob",
    "FakeJob",
    "MemoryQueue",
    "QueueTestCase",
    "RanJob",
    "RecordedJob",
    "TestQueue",
    "fake_job",
    "queue_database",
]

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name != "QueueTestCase":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from pgdefer.testing.cases import QueueTestCase  # noqa: PLC0415 (imports unittest)

        return QueueTestCase
