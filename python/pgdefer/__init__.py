"""A job queue whose every rule lives in PostgreSQL."""

from importlib.metadata import PackageNotFoundError, version

from ._app import App
from ._codec import Codec, model_codec
from ._context import JobAborted, JobContext, RetryLater, current_job
from ._errors import (
    AlreadyQueued,
    ClaimLost,
    DecodeError,
    DependencyCycle,
    EncodeError,
    IncompatibleClient,
    InvalidParameter,
    InvalidState,
    JobNotFound,
    NotInstalled,
    PgDeferError,
    QueueNotEmpty,
    UnknownTask,
    WorkerGone,
    WrongIsolation,
)
from ._options import DeferOptions, RecurringOptions, Retry, TaskOptions
from ._task import AsyncTask, Job, Prepared, SyncTask, Task
from ._worker import Worker

__all__ = [
    "AlreadyQueued",
    "App",
    "AsyncTask",
    "ClaimLost",
    "Codec",
    "DecodeError",
    "DeferOptions",
    "DependencyCycle",
    "EncodeError",
    "IncompatibleClient",
    "InvalidParameter",
    "InvalidState",
    "Job",
    "JobAborted",
    "JobContext",
    "JobNotFound",
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
    "UnknownTask",
    "Worker",
    "WorkerGone",
    "WrongIsolation",
    "current_job",
    "model_codec",
]

try:
    __version__ = version("pgdefer")
except PackageNotFoundError:  # run from the sources
    __version__ = "0.1.0"
