"""A job queue whose every rule lives in PostgreSQL."""

import importlib
from typing import TYPE_CHECKING

from pgdefer._version import __version__ as __version__
from pgdefer.app import App
from pgdefer.codec import Codec, model_codec
from pgdefer.errors import (
    AlreadyQueued,
    ClaimLost,
    DecodeError,
    DependencyCycle,
    EncodeError,
    IncompatibleClient,
    InvalidParameter,
    InvalidState,
    JobCancelled,
    JobFailed,
    JobNotFound,
    NotInstalled,
    PgDeferError,
    QueueNotEmpty,
    StepChanged,
    StepFailed,
    TransactionLost,
    UnknownTask,
    WorkerGone,
    WrongIsolation,
)
from pgdefer.options import DeferOptions, RecurringOptions, Retry, TaskOptions
from pgdefer.tasks.batch import BatchJob
from pgdefer.tasks.blueprint import Blueprint
from pgdefer.tasks.context import (
    JobAborted,
    JobContext,
    JobTimeout,
    Middleware,
    RetryLater,
    current_job,
)
from pgdefer.tasks.deferral import DeferMiddleware, Deferral
from pgdefer.tasks.group import Group
from pgdefer.tasks.handling import Decision, HandlingOptions
from pgdefer.tasks.hooks import JobEvent
from pgdefer.tasks.infos import (
    GroupInfo,
    HealthCheck,
    JobDetails,
    JobInfo,
    LimitInfo,
    LockInfo,
    QueueInfo,
    ScheduleInfo,
    ShareInfo,
    TaskInfo,
    TaskStats,
    WorkerInfo,
)
from pgdefer.tasks.job import Job
from pgdefer.tasks.need import Need
from pgdefer.tasks.open_group import OpenGroup
from pgdefer.tasks.prepared_job import PreparedJob
from pgdefer.tasks.raised import JobSuspended
from pgdefer.tasks.task import AsyncTask, SyncTask, Task

if TYPE_CHECKING:
    from pgdefer.worker.many_databases import MultiWorker
    from pgdefer.worker.options import WorkerOptions
    from pgdefer.worker.stream import ClaimedJob, JobStream
    from pgdefer.worker.worker import Worker

__all__ = [
    "AlreadyQueued",
    "App",
    "AsyncTask",
    "BatchJob",
    "Blueprint",
    "ClaimLost",
    "ClaimedJob",
    "Codec",
    "Decision",
    "DecodeError",
    "DeferMiddleware",
    "DeferOptions",
    "Deferral",
    "DependencyCycle",
    "EncodeError",
    "Group",
    "GroupInfo",
    "HandlingOptions",
    "HealthCheck",
    "IncompatibleClient",
    "InvalidParameter",
    "InvalidState",
    "Job",
    "JobAborted",
    "JobCancelled",
    "JobContext",
    "JobDetails",
    "JobEvent",
    "JobFailed",
    "JobInfo",
    "JobNotFound",
    "JobStream",
    "JobSuspended",
    "JobTimeout",
    "LimitInfo",
    "LockInfo",
    "Middleware",
    "MultiWorker",
    "Need",
    "NotInstalled",
    "OpenGroup",
    "PgDeferError",
    "PreparedJob",
    "QueueInfo",
    "QueueNotEmpty",
    "RecurringOptions",
    "Retry",
    "RetryLater",
    "ScheduleInfo",
    "ShareInfo",
    "StepChanged",
    "StepFailed",
    "SyncTask",
    "Task",
    "TaskInfo",
    "TaskOptions",
    "TaskStats",
    "TransactionLost",
    "UnknownTask",
    "Worker",
    "WorkerGone",
    "WorkerInfo",
    "WorkerOptions",
    "WrongIsolation",
    "current_job",
    "model_codec",
]

# Imported when first used: producers need no worker, and it takes as long as the rest.
_LATER = {
    "ClaimedJob": "stream",
    "JobStream": "stream",
    "MultiWorker": "many_databases",
    "Worker": "worker",
    "WorkerOptions": "options",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(f"pgdefer.worker.{_LATER[name]}"), name)
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
