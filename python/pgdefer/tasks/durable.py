# Generated from durable_async.py: change that, and run `make generate`.
"""The methods of a durable job's handler: steps, sleeps, waits, children, streams."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from pgdefer.client.client import Client
from pgdefer.database import sql
from pgdefer.database.execute import execute
from pgdefer.database.source import PsycopgConnection
from pgdefer.options import interval_text, to_json
from pgdefer.tasks.steps import (
    JobSuspended,
    StepDecorator,
    StepFunction,
    Steps,
    StepValue,
    TakeSteps,
    called,
    check_is_decorator,
    ids_of,
    name_of_step,
    results_of,
    step_json,
)

__all__ = ["DurableCalls"]

P = ParamSpec("P")
R = TypeVar("R")


class _Call(Protocol):
    """A call that `task.prepare` returned."""

    @property
    def task(self) -> str:
        """The task's name."""

    def to_json(self) -> str:
        """Return the object that queue.defer_many takes."""


class DurableCalls:
    """The calls of a job that continues after its last finished step.

    Each step has a name that is unique in its job. If a run uses a name again, as in a loop, the
    second use is another step than the first. So the order in which a name is used must stay the
    same from run to run.
    """

    __slots__ = ()

    id: int
    claim: int
    client: Client
    steps: Steps

    # Steps

    @overload
    def step(
        self,
        name: str,
        function: Callable[..., Any],
        /,
        *args: Any,
        fingerprint: str | None = None,
        **kwargs: Any,
    ) -> StepValue: ...
    @overload
    def step(self, function: StepFunction[P, R], /) -> StepFunction[P, R]: ...
    @overload
    def step(
        self, name: str | None = None, /, *, fingerprint: str | None = None, lazy: bool = False
    ) -> StepDecorator: ...
    def step(
        self,
        name: str | Callable[..., Any] | None = None,
        function: Callable[..., Any] | None = None,
        /,
        *args: Any,
        fingerprint: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function, once in all runs of the job, and return the value that it returned then.

        If the run ends before the value is stored, the function is called again: it runs at least
        once. Put writes to the database that must happen exactly once into `transaction`. With a
        fingerprint, a step that was finished with another one is refused: StepChanged.

        Without a function it is a decorator: each call of the decorated function is a step, which
        has the function's name unless another is passed. A lazy step is not stored at once, but
        with the next step that is, or with the run's outcome: it needs no call of its own, but runs
        again if the worker dies before that.
        """
        if function is not None:
            return self._run_step(name_of_step(name), function, args, kwargs, fingerprint)
        is_lazy = bool(kwargs.pop("lazy", False))
        check_is_decorator(args, kwargs)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            key = name_of_step(function if name is None else name)

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                return self._run_step(key, function, args, kwargs, fingerprint, is_lazy=is_lazy)

            return call

        return decorate(name) if callable(name) else decorate

    def _run_step(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        fingerprint: str | None,
        *,
        is_lazy: bool = False,
    ) -> Any:
        with self._step(name, fingerprint) as (key, value):
            if key is None:
                return value
            made = called(function, args, kwargs)
            if not is_lazy or not self.steps.keep(self._finished(key, made, fingerprint)):
                self._finish(key, made, fingerprint)
            return made

    @contextlib.contextmanager
    def transaction(self, name: str) -> Iterator[PsycopgConnection | None]:
        """Begin a transaction that finishes the step when it commits: exactly once.

        Yields its connection, or None if the step is finished: then there is nothing to do.
        """
        with self._step(name, None) as (key, _):
            if key is None:
                yield None
                return
            with (
                self.steps.storing() as take,
                self.client.pool.connection() as connection,
                connection.transaction(),
            ):
                yield connection
                self._finish_in(connection, take, key, None)

    @contextlib.contextmanager
    def _step(self, name: str, fingerprint: str | None) -> Iterator[tuple[str | None, Any]]:
        """Yield the step's name and None, or None and its value if the step is finished."""
        key = self.steps.take(name)
        try:
            if self.steps.finished is None:
                self._read_steps()
            finished = self.steps.finished or {}
            if key in finished:
                if fingerprint is not None:
                    parameters = {**self._keyed(key), "fingerprint": fingerprint}
                    self.client.call(sql.BEGIN_STEP, parameters)
                yield None, self.client.codec.decode(finished[key])
            else:
                yield key, None
        except BaseException:
            self.steps.give_back(name)
            raise

    def _read_steps(self) -> None:
        found: list[Any] = []
        after = None
        while True:
            parameters = {"id": self.id, "claim": self.claim, "after": after}
            rows = self.client.call(sql.READ_STEPS, parameters)
            if not rows:
                break
            found += rows
            after = rows[-1][0]
        self.steps.complete(found)

    def _finish(self, key: str, value: Any, fingerprint: str | None = None) -> None:
        """Store a step, after the lazy ones before it."""
        with self.steps.storing() as take:
            self._finish_in(None, take, key, value, fingerprint)

    def _finish_in(
        self,
        connection: PsycopgConnection | None,
        take: TakeSteps,
        key: str,
        value: Any,
        fingerprint: str | None = None,
    ) -> None:
        """Store a step, after the lazy ones before it; with a connection, in its transaction."""
        if fingerprint is None and not self.steps.kept:
            self._call(sql.FINISH_STEP, self._finishing(key, value), connection)
            return
        steps = take(self._finished(key, value, fingerprint))
        parameters = {"id": self.id, "claim": self.claim, "steps": steps}
        self._call(sql.FINISH_STEPS, parameters, connection)

    def _store_kept(self) -> None:
        """Store the lazy steps before the claim ends."""
        if self.steps.kept:
            with self.steps.storing() as take:
                parameters = {"id": self.id, "claim": self.claim, "steps": take()}
                self.client.call(sql.FINISH_STEPS, parameters)

    def _call(
        self,
        statement: sql.Statement,
        parameters: Mapping[str, Any],
        connection: PsycopgConnection | None,
    ) -> None:
        if connection is None:
            self.client.call(statement, parameters)
        else:
            execute(connection, statement, parameters)

    # Waiting

    def sleep(self, name: str, until: dt.datetime | dt.timedelta) -> None:
        """Sleep until a time, or for a duration by the database's clock; the next run continues.

        The job holds no slot, worker or connection meanwhile.
        """
        with self._step(name, None) as (key, _):
            if key is None:
                return
            is_delay = isinstance(until, dt.timedelta)
            at = None if is_delay else to_json("until", until)
            delay = interval_text(until) if isinstance(until, dt.timedelta) else None
            parameters = {**self._keyed(key), "at": at, "delay": delay}
            self._store_kept()
            self.client.call(sql.SLEEP, parameters)
            raise JobSuspended

    def wait_for(
        self,
        name: str,
        *,
        signal: str | None = None,
        event: str | None = None,
        timeout: dt.timedelta | None = None,
    ) -> Any:
        """Wait for a signal to this job, or for an event. The next run continues with its payload.

        It continues with None if `timeout` passes first. With neither a signal nor an event, it
        waits for a signal that has the step's name.
        """
        with self._step(name, None) as (key, value):
            if key is None:
                return value
            parameters = {
                **self._keyed(key),
                "signal": name if signal is None and event is None else signal,
                "event": event,
                "timeout": None if timeout is None else interval_text(timeout),
            }
            self._store_kept()
            self.client.call(sql.WAIT, parameters)
            raise JobSuspended

    # Children

    def call(self, call: _Call, *, name: str | None = None) -> Any:
        """Defer a job, once, and wait for its result. The next run continues with that.

        `call` is a call that `task.prepare(...)` returned. Raises JobFailed or JobCancelled if the
        job has not succeeded. The step has the task's name, unless another is passed.
        """
        (result,) = self.gather([call], name=call.task if name is None else name)
        return result

    def gather(
        self, calls: Iterable[_Call], *, name: str = "gather", return_errors: bool = False
    ) -> list[Any]:
        """Defer jobs, once, and wait for all their results. The next run continues with these.

        They are in the order of the calls. Raises the error of the first job that has not
        succeeded; with `return_errors` the list contains the errors. The job holds no slot
        meanwhile.
        """
        with self._step(name, None) as (key, value):
            ids = ids_of(value) if key is None else self._defer(key, list(calls))
        with self._step(f"{name} ended", None) as (key, _):
            if key is not None and ids:
                self._store_kept()
                self.client.call(sql.AWAIT_JOBS, {**self._keyed(key), "jobs": ids})
                raise JobSuspended
        rows = self.client.call(sql.NEEDS, {"id": self.id})
        decode = self.client.codec.decode
        results = {row[0]: (row[2], decode(row[3]), row[4]) for row in rows}
        return results_of(ids, results, return_errors=return_errors)

    def _defer(self, key: str, calls: list[_Call]) -> list[int]:
        """Defer jobs, and store their ids as a step, in one transaction."""
        ids: list[int] = []
        with (
            self.steps.storing() as take,
            self.client.pool.connection() as connection,
            connection.transaction(),
        ):
            if calls:
                jobs = f"[{','.join(call.to_json() for call in calls)}]"
                tasks = [call.task for call in calls]
                rows = self.client.call(sql.DEFER_MANY, {"jobs": jobs}, connection, tasks=tasks)
                ids = [row[0] for row in rows]
            self._finish_in(connection, take, key, ids)
        return ids

    # Reporting

    def emit(self, stream: str, value: Any) -> int:
        """Append a value to a stream of the job, which `Job.stream` reads; return its number."""
        text = self.client.codec.dumps(value)
        parameters = {"id": self.id, "claim": self.claim, "stream": stream, "value": text}
        ((number,),) = self.client.call(sql.EMIT, parameters)
        return int(number)

    def progress(self, percent: float | None, message: str | None = None) -> None:
        """Set the progress that queue.jobs shows. None as the message keeps the last one."""
        parameters = {"id": self.id, "claim": self.claim, "percent": percent, "message": message}
        self.client.call(sql.SET_PROGRESS, parameters)

    # Parameters

    def _keyed(self, key: str) -> dict[str, Any]:
        return {"id": self.id, "claim": self.claim, "name": key}

    def _finishing(self, key: str, value: Any) -> dict[str, Any]:
        return {**self._keyed(key), "value": self._value_text(value)}

    def _finished(self, key: str, value: Any, fingerprint: str | None) -> str:
        return step_json(key, self._value_text(value), fingerprint)

    def _value_text(self, value: Any) -> str | None:
        return None if value is None else self.client.codec.dumps(value)
