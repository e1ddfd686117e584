"""How a worker runs a task: what is said in Python and not kept in the database."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypedDict

from ._context import JobContext
from ._errors import DecodeError, UnknownTask
from ._options import to_json

__all__ = ["Decision", "Handling", "HandlingOptions"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What is to become of a failed attempt; what isn't given is left to the retry policy.

    `retryable`: False fails the job at once, True retries it whatever the policy's limit is.
    `queue`, `priority` and `lock` change it for the retry. `reason` is kept with a job that failed.
    """

    retryable: bool | None = None
    retry_at: dt.datetime | None = None
    retry_in: dt.timedelta | None = None
    queue: str | None = None
    priority: int | None = None
    lock: str | None = None
    reason: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the options of queue.fail."""
        given = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {name: to_json(name, value) for name, value in given if value is not None}


Classes = type[BaseException] | tuple[type[BaseException], ...]
Decide = Callable[[BaseException, JobContext], Decision | None]


class HandlingOptions(TypedDict, total=False):
    """What App.task takes that only the worker's process knows.

    `give_up_on`: errors that fail the job at once. `retry_on`: the only errors that are retried.
    How often and when is said by `retry`. `decide` is asked for all other errors.

    `run_in="process"` is for functions that use much CPU or memory, or may crash: a process of the
    worker's runs them, and is killed where they don't end in time. `max_memory`: how many bytes the
    process may use while it does; what goes beyond fails with the reason `memory`.
    """

    retry_on: Classes
    give_up_on: Classes
    decide: Decide
    run_in: Literal["thread", "process"]
    max_memory: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Handling:
    """The same, checked; `transactional` is True or what makes SQLAlchemy's sessions."""

    retry_on: Classes | None = None
    give_up_on: Classes = ()
    decide: Decide | None = None
    run_in: Literal["thread", "process"] = "thread"
    max_memory: int | None = None
    transactional: Any = False

    @classmethod
    def split(cls, options: Mapping[str, Any]) -> tuple[Handling, dict[str, Any]]:
        """Return what is said of handling, and the other options."""
        names = {field.name for field in dataclasses.fields(cls)}
        ours = {name: value for name, value in options.items() if name in names}
        return cls(**ours), {n: value for n, value in options.items() if n not in names}

    def check(self, *, is_async: bool, qualname: str) -> None:
        """Raise ValueError for what a function can't have, TypeError for what is no class."""
        for name, classes in (("retry_on", self.retry_on or ()), ("give_up_on", self.give_up_on)):
            found: Any
            for found in classes if isinstance(classes, tuple) else (classes,):
                if not (isinstance(found, type) and issubclass(found, BaseException)):
                    raise TypeError(
                        f"{name} must be a class of errors, or a tuple of such: {found!r}"
                    )
        if self.run_in not in ("thread", "process"):
            raise ValueError(f"run_in must be 'thread' or 'process', not {self.run_in!r}")
        if self.run_in == "process":
            if is_async:
                raise ValueError("run_in='process' is for functions that are no coroutines")
            if "<locals>" in qualname:
                raise ValueError(
                    "run_in='process' is for functions at the top level of a module, "
                    "where the process can find them"
                )
        elif self.max_memory is not None:
            raise ValueError("max_memory needs run_in='process'")
        if self.max_memory is not None and self.max_memory < 1:
            raise ValueError("max_memory must be at least 1")

    def decision(self, error: BaseException, job: JobContext) -> dict[str, Any]:
        """Return the options of queue.fail for an error."""
        if isinstance(error, (DecodeError, UnknownTask, self.give_up_on)):
            return {"retryable": False}
        if self.retry_on is not None and not isinstance(error, self.retry_on):
            return {"retryable": False}
        decided = None if self.decide is None else self.decide(error, job)
        options = {} if decided is None else decided.to_json()
        if isinstance(error, MemoryError) and self.max_memory is not None:
            options.setdefault("reason", "memory")
        return options
