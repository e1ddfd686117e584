"""Testing code that defers jobs: see docs/testing.md.

`TestQueue` runs in the transaction of one test, which is rolled back; `CommittedTestQueue` uses a
real worker; `MemoryQueue` records jobs without a database. The pytest fixtures are in
`pgdefer.testing.plugin`; unittest uses `QueueTestCase`.
"""

from pgdefer.testing.cases import QueueTestCase
from pgdefer.testing.committed import CommittedTestQueue
from pgdefer.testing.database import queue_database
from pgdefer.testing.fake import FakeJob, fake_job
from pgdefer.testing.jobs import DeferredJob, RanJob, RecordedJob
from pgdefer.testing.memory import MemoryQueue
from pgdefer.testing.queue import TestQueue

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
