"""Prepares jobs to defer, with the options that depend on where they are deferred.

Tests: integration/test_defer.py, unit/test_task.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, TypeVar

from pgdefer.client.client import Client, client_here
from pgdefer.database.callers import CallersConnection, check_given
from pgdefer.errors import Naming
from pgdefer.options import DeferOptions, JobOptions, as_list, checked_mapping
from pgdefer.tasks.context import running_job
from pgdefer.tasks.option_checks import check_options
from pgdefer.tasks.parameters import Parameters
from pgdefer.tasks.prepared_job import PreparedJob

__all__ = ["Preparer", "prepare"]

P = ParamSpec("P")
R = TypeVar("R")


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


def in_context(
    task: str, options: JobOptions, client: Client, *, is_child: bool
) -> tuple[JobOptions, Callable[[JobOptions], JobOptions] | None]:
    """Return what PreparedJob takes: the options, and a function that adds the app's headers.

    If `is_child`, the running job of this app is the parent.
    """
    if is_child and (job := running_job()) is not None and job.client is client:
        options = JobOptions(options.arguments, {**options.options, "parent": job.id})
    if client.headers is None:
        return options, None
    return options, functools.partial(_add_headers, client, task)


def _add_headers(client: Client, task: str, options: JobOptions) -> JobOptions:
    """Return the options of a job with the app's headers."""
    if client.headers is None or not (headers := client.headers(task)):
        return options
    checked_mapping("what App(headers=...) returns", headers)
    defaults = client.defaults.get(task)
    registered = defaults.options.get("headers", {}) if defaults is not None else {}
    merged = {**registered, **headers, **options.options.get("headers", {})}
    return JobOptions(options.arguments, {**options.options, "headers": merged})


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
        here = in_context(task, JobOptions.of(options), client, is_child=is_child)
        return PreparedJob(task, client.dumps_args(task, args), *here)


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
        return PreparedJob(self.name, self.encode(args, kwargs), *self._in_context())

    def _in_context(self) -> tuple[JobOptions, Callable[[JobOptions], JobOptions] | None]:
        return in_context(self.name, self._job_options, self.client, is_child=self._is_child)

    def _prepare_all(
        self, calls: Iterable[PreparedJob[Any] | Mapping[str, Any]]
    ) -> Iterator[PreparedJob[Any]]:
        here = self._in_context()
        for call in as_list("calls", calls):
            if isinstance(call, PreparedJob):
                yield call
            elif not isinstance(call, Mapping):
                raise TypeError(
                    "a call must come from task.prepare(...), or be a dict of keyword arguments, "
                    f"not {call!r}"
                )
            else:
                yield PreparedJob(self.name, self.encode((), call), *here)
