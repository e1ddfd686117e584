"""A job queue whose every rule lives in PostgreSQL."""

from importlib.metadata import PackageNotFoundError, version

from ._app import App
from ._codec import Codec, model_codec
from ._context import (
    JobAborted,
    JobContext,
    JobTimeout,
    Middleware,
    Need,
    RetryLater,
    current_job,
)
from ._errors import (
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
    TransactionLost,
    UnknownTask,
    WorkerGone,
    WrongIsolation,
)
from ._groups import Group
from ._handling import Decision, HandlingOptions
from ._job import Job
from ._options import DeferOptions, RecurringOptions, Retry, TaskOptions
from ._stream import ClaimedJob, JobStream
from ._task import AsyncTask, Prepared, SyncTask, Task
from ._worker import Worker, WorkerOptions

__all__ = [
    "AlreadyQueued",
    "App",
    "AsyncTask",
    "ClaimLost",
    "ClaimedJob",
    "Codec",
    "Decision",
    "DecodeError",
    "DeferOptions",
    "DependencyCycle",
    "EncodeError",
    "Group",
    "HandlingOptions",
    "IncompatibleClient",
    "InvalidParameter",
    "InvalidState",
    "Job",
    "JobAborted",
    "JobCancelled",
    "JobContext",
    "JobFailed",
    "JobNotFound",
    "JobStream",
    "JobTimeout",
    "Middleware",
    "Need",
    "NotInstalled",
    "PgDeferError",
    "Prepared",
    "QueueNotEmpty",
    "RecurringOptions",
    "Retry",
    "RetryLater",
    "SyncTask",
    "Task",
    "TaskOptions",
    "TransactionLost",
    "UnknownTask",
    "Worker",
    "WorkerGone",
    "WorkerOptions",
    "WrongIsolation",
    "current_job",
    "model_codec",
]

try:
    __version__ = version("pgdefer")
except PackageNotFoundError:  # run from the sources
    __version__ = "0.1.0"
