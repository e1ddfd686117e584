"""How the worker handles the jobs of a task: where it runs them, and which errors it retries.

Tests: integration/test_failures.py.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from pgdefer.checks import check_flag, check_number
from pgdefer.errors import DecodeError, StepChanged, StepFailed, UnknownTask
from pgdefer.options import checked_interval, checked_option, checked_time
from pgdefer.tasks.context import JobContext, Middleware

__all__ = [
    "RETRY_POLICY_ONLY",
    "Decision",
    "Execution",
    "FailurePolicy",
    "HandlingOptions",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """A decision about a failed attempt. Where a field is None, the retry policy decides.

    `retryable`: False fails the job at once, True retries it even beyond the policy's limit.
    `queue`, `priority` and `lock` change the job for the retry. `reason` is stored with a failed
    job.
    """

    retryable: bool | None = None
    retry_at: dt.datetime | None = None
    retry_in: dt.timedelta | None = None
    queue: str | None = None
    priority: int | None = None
    lock: str | None = None
    reason: str | None = None

    def __post_init__(self) -> None:
        checked_time("retry_at", self.retry_at)
        checked_interval("retry_in", self.retry_in)
        if self.retry_at is not None and self.retry_in is not None:
            raise ValueError("retry_at and retry_in exclude each other")
        if self.retryable is not None:
            check_flag("retryable", self.retryable)
        for name in ("queue", "lock", "reason"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"{name} must be text, not {value!r}")
        if self.priority is not None:
            checked_option("priority", self.priority)

    def as_options(self) -> dict[str, Any]:
        """Return the options of queue.fail."""
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: checked_option(name, value) for name, value in values if value is not None}


Classes = type[BaseException] | tuple[type[BaseException], ...]
# The error is Any, so that a function may be declared for the errors that it expects.
Decide = Callable[[Any, JobContext], Decision | None]


class HandlingOptions(TypedDict, total=False):
    """The options of App.task that only the worker's process uses.

    `give_up_on`: errors that fail the job at once. `retry_on`: the only errors that are retried;
    the task's `retry` says how often and when. An ExceptionGroup, as a TaskGroup raises it, fails
    the job if one error in it would. `decide` is called with each error that these two do not rule
    out, and with the job; it returns a `Decision`, or None to let the retry policy decide.

    `run_in="process"` is for functions that use much CPU or memory, or may crash: a child process
    of the worker runs them, and is killed if they don't end in time. `max_memory` limits the memory
    of that process, in bytes; a job that exceeds it fails with the reason `memory`.

    `middleware` surrounds the handler, inside the App's middleware.
    """

    retry_on: Classes
    give_up_on: Classes
    decide: Decide
    run_in: Literal["thread", "process"]
    max_memory: int
    middleware: Sequence[Middleware]


T = TypeVar("T", bound="FailurePolicy | Execution")


def _split(kind: type[T], options: Mapping[str, Any]) -> tuple[T, dict[str, Any]]:
    """Return the options of this kind, and the others."""
    names = {field.name for field in dataclasses.fields(kind)}
    own = {name: value for name, value in options.items() if name in names}
    return kind(**own), {name: value for name, value in options.items() if name not in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """Decides which errors of a task are retried."""

    retry_on: Classes | None = None
    give_up_on: Classes = ()
    decide: Decide | None = None

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[FailurePolicy, dict[str, Any]]:
        """Return the policy, and the other options."""
        return _split(cls, options)

    def check(self) -> None:
        """Raise TypeError for a value that is not a class of errors, or no function."""
        if self.decide is not None and not callable(self.decide):
            raise TypeError(f"decide must be a function of the error and the job: {self.decide!r}")
        for name, classes in (("retry_on", self.retry_on or ()), ("give_up_on", self.give_up_on)):
            found: Any
            for found in _as_tuple(classes):
                if not (isinstance(found, type) and issubclass(found, BaseException)):
                    raise TypeError(
                        f"{name} must be a class of errors, or a tuple of classes: {found!r}"
                    )

    def decision(self, error: BaseException, job: JobContext) -> dict[str, Any]:
        """Return the options of queue.fail for an error."""
        final = (DecodeError, StepChanged, StepFailed, UnknownTask, *_as_tuple(self.give_up_on))
        if _split_error(error, final)[0] is not None:
            return {"retryable": False}
        if self.retry_on is not None:
            _, others = _split_error(error, _as_tuple(self.retry_on))
            if others is not None:
                return {"retryable": False}
        decided = None if self.decide is None else self.decide(error, job)
        return {} if decided is None else decided.as_options()


def _as_tuple(classes: Classes) -> tuple[type[BaseException], ...]:
    return classes if isinstance(classes, tuple) else (classes,)


def _split_error(
    error: BaseException, classes: tuple[type[BaseException], ...]
) -> tuple[BaseException | None, BaseException | None]:
    """Return the part of an error or its group that is of these classes, and the rest, or None."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(classes)
    return (error, None) if isinstance(error, classes) else (None, error)


#: Leaves every error to the job's retry policy.
RETRY_POLICY_ONLY = FailurePolicy()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Execution:
    """How a task's handler is run. `transactional`: True, or a maker of SQLAlchemy sessions.

    `batch`: how many jobs the handler takes at once, in a list; `batch_of` makes their `args`.
    """

    run_in: Literal["thread", "process"] = "thread"
    max_memory: int | None = None
    transactional: Any = False
    middleware: Sequence[Middleware] = ()
    batch: int | None = None
    batch_of: Callable[..., Any] | None = None

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[Execution, dict[str, Any]]:
        """Return the execution, and the other options."""
        return _split(cls, options)

    def check(self, *, is_async: bool, qualname: str) -> None:
        """Raise TypeError or ValueError for options that don't fit each other or the function."""
        if not isinstance(self.transactional, bool) and not callable(self.transactional):
            raise TypeError(
                f"transactional must be True or a sessionmaker, not {self.transactional!r}"
            )
        session = getattr(self.transactional, "class_", None)  # of SQLAlchemy's makers
        if session is not None and hasattr(session, "__aenter__") != is_async:
            maker, what = ("an async_", "a") if is_async else ("a ", "no")
            raise TypeError(
                f"transactional must be {maker}sessionmaker, as this is {what} coroutine function"
            )
        if self.run_in not in ("thread", "process"):
            raise ValueError(f"run_in must be 'thread' or 'process', not {self.run_in!r}")
        if self.run_in == "process":
            if is_async:
                raise ValueError("run_in='process' is not for coroutine functions")
            if "<locals>" in qualname:
                raise ValueError(
                    "run_in='process' is for functions at the top level of a module, "
                    "where the process can find them"
                )
        elif self.max_memory is not None:
            raise ValueError("max_memory needs run_in='process'")
        if self.max_memory is not None:
            check_number("max_memory", self.max_memory, int, at_least=1, at_most=2**63 - 1)
