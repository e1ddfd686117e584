"""Prepares jobs to defer, with the options that depend on where they are deferred.

Tests: integration/test_defer.py, unit/test_task.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeAlias, TypeVar

from pgdefer.client.client import Client, client_here
from pgdefer.database.callers import CallersConnection, check_given
from pgdefer.errors import Naming
from pgdefer.options import DeferOptions, JobOptions, as_list, checked_mapping
from pgdefer.tasks.context import running_job
from pgdefer.tasks.job import Job
from pgdefer.tasks.option_checks import check_options
from pgdefer.tasks.parameters import Parameters
from pgdefer.tasks.prepared_job import PreparedJob

__all__ = [
    "DeferMiddleware",
    "Deferral",
    "Preparer",
    "deferring",
    "prepare",
]

P = ParamSpec("P")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True)
class Deferral:
    """One call that defers: the calls, and afterwards the jobs."""

    calls: Sequence[PreparedJob[Any]]
    jobs: list[Job[Any]] = dataclasses.field(default_factory=list)


# What to write for the methods that tasks have in other libraries.
_ELSEWHERE = {
    "delay": "defer(...)",
    "send": "defer(...)",
    "enqueue": "defer(...)",
    "aenqueue": "defer_async(...)",
    "apply_async": "configure(...).defer(...)",
    "send_with_options": "configure(...).defer(...)",
    "using": "configure(...)",
    "s": "prepare(...)",
    "signature": "prepare(...)",
    "batch_defer": "defer_many(...)",
    "batch_defer_async": "defer_many_async(...)",
}

DeferMiddleware: TypeAlias = Callable[[Deferral], AbstractContextManager[Any]]


def deferring(
    client: Client, calls: Sequence[PreparedJob[Any]]
) -> AbstractContextManager[Deferral | None]:
    """Enter the App's middleware around a call that defers; errors name the tasks."""
    return _deferring(client, calls) if client.defer_middleware else _naming(calls)


@contextlib.contextmanager
def _deferring(client: Client, calls: Sequence[PreparedJob[Any]]) -> Iterator[Deferral]:
    deferral = Deferral(tuple(calls))
    with contextlib.ExitStack() as stack:
        stack.enter_context(_naming(calls))
        for surround in client.defer_middleware:
            stack.enter_context(surround(deferral))
        yield deferral
        return
    raise RuntimeError("a defer_middleware has swallowed the call's error: there is no job")


def _naming(calls: Sequence[PreparedJob[Any]]) -> Naming:
    if len(calls) == 1:
        return Naming(f"a job of {calls[0].task!r}")
    tasks = list(dict.fromkeys(call.task for call in calls))
    return Naming(f"jobs of {', '.join(map(repr, tasks[:3]))}{', ...' if tasks[3:] else ''}")


def in_context(task: str, options: JobOptions, client: Client, *, is_child: bool) -> JobOptions:
    """Return a job's options, with those that depend on where it is deferred.

    These are the app's headers and, if `is_child`, the running job of this app as its parent.
    """
    rest = dict(options.options)
    if is_child and (job := running_job()) is not None and job.client is client:
        rest["parent"] = job.id
    if client.headers is not None and (headers := client.headers(task)):
        checked_mapping("what App(headers=...) returns", headers)
        defaults = client.defaults.get(task)
        registered = defaults.options.get("headers", {}) if defaults is not None else {}
        rest["headers"] = {**registered, **headers, **rest.get("headers", {})}
    return JobOptions(options.arguments, rest)


def prepare(
    client: Client, task: str, args: Mapping[str, Any] | None, options: Mapping[str, Any]
) -> PreparedJob[Any]:
    """Prepare a job of a task that need not be known here; its arguments are not checked."""
    if not isinstance(task, str):
        raise TypeError(f"task must be a name, not {task!r}; a task has a `defer` of its own")
    is_child = "parent" not in options
    with Naming(f"a job of {task!r}"):
        if options:
            check_options(f"a job of {task!r}", options, DeferOptions)
        job_options = in_context(task, JobOptions.of(options), client, is_child=is_child)
        return PreparedJob(task, client.dumps_args(task, args), job_options)


class Preparer(Generic[P, R]):
    """Makes jobs of a task's calls, with the options for all of them."""

    def __init__(
        self,
        client: Client,
        name: str,
        parameters: Parameters,
        options: Mapping[str, Any],
        connection: CallersConnection,
    ) -> None:
        with Naming(f"a job of {name!r}"):
            check_given(connection)
            if options:
                check_options(f"a job of {name!r}", options, DeferOptions)
            self._job_options = JobOptions.of(options)
        self.client = client
        self.name = name
        self.parameters = parameters
        self._is_child = "parent" not in options
        self._connection = connection

    @property
    def client(self) -> Client:
        """The client that defers."""
        return client_here(self._client)

    @client.setter
    def client(self, client: Client) -> None:
        self._client = client

    if not TYPE_CHECKING:  # to a type checker, every attribute would exist

        def __getattr__(self, attribute: str) -> NoReturn:
            advice = f": write {_ELSEWHERE[attribute]}" if attribute in _ELSEWHERE else ""
            message = f"the task {vars(self).get('name')!r} has no attribute {attribute!r}{advice}"
            raise AttributeError(message, name=attribute, obj=self)

    def encode(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return the JSON of a call's arguments. Raises TypeError, EncodeError."""
        with Naming(f"a job of {self.name!r}"):
            return self.client.codec.dumps_args(self.parameters.bind(args, kwargs))

    def prepare(self, /, *args: P.args, **kwargs: P.kwargs) -> PreparedJob[R]:
        """Return the call for `defer_many`."""
        return PreparedJob(self.name, self.encode(args, kwargs), self._options_here())

    def _options_here(self) -> JobOptions:
        return in_context(self.name, self._job_options, self.client, is_child=self._is_child)

    def _prepare_all(
        self, calls: Iterable[PreparedJob[Any] | Mapping[str, Any]]
    ) -> Iterator[PreparedJob[Any]]:
        # Headers are made for each job, as telemetry makes a span for each.
        options = self._options_here() if self.client.headers is None else None
        for call in as_list("calls", calls):
            if isinstance(call, PreparedJob):
                yield call
            elif not isinstance(call, Mapping):
                raise TypeError(
                    "a call must come from task.prepare(...), or be a dict of keyword arguments, "
                    f"not {call!r}"
                )
            else:
                yield PreparedJob(self.name, self.encode((), call), options or self._options_here())
