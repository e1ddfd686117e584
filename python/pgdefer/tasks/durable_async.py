"""The methods of a durable job's handler: steps, sleeps, waits, children, streams."""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any, ParamSpec, Protocol, TypeVar, overload

from pgdefer.client.client import Client
from pgdefer.database import sql
from pgdefer.database.execute_async import execute_async
from pgdefer.database.source import AsyncPsycopgConnection
from pgdefer.options import interval_text, to_json
from pgdefer.tasks.steps import (
    AsyncStepDecorator,
    AsyncStepFunction,
    AsyncStepValue,
    JobSuspended,
    Steps,
    TakeSteps,
    called_async,
    check_is_decorator,
    ids_of,
    name_of_step,
    results_of,
    step_json,
)

__all__ = ["AsyncDurableCalls"]

P = ParamSpec("P")
R = TypeVar("R")


class _Call(Protocol):
    """A call that `task.prepare` returned."""

    @property
    def task(self) -> str:
        """The task's name."""

    def to_json(self) -> str:
        """Return the object that queue.defer_many takes."""


class AsyncDurableCalls:
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
    def step_async(
        self,
        name: str,
        function: Callable[..., Any],
        /,
        *args: Any,
        fingerprint: str | None = None,
        **kwargs: Any,
    ) -> AsyncStepValue: ...
    @overload
    def step_async(self, function: AsyncStepFunction[P, R], /) -> AsyncStepFunction[P, R]: ...
    @overload
    def step_async(
        self, name: str | None = None, /, *, fingerprint: str | None = None, lazy: bool = False
    ) -> AsyncStepDecorator: ...
    def step_async(
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
            return self._run_step_async(name_of_step(name), function, args, kwargs, fingerprint)
        is_lazy = bool(kwargs.pop("lazy", False))
        check_is_decorator(args, kwargs)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            key = name_of_step(function if name is None else name)

            @functools.wraps(function)
            async def call_async(*args: Any, **kwargs: Any) -> Any:
                return await self._run_step_async(
                    key, function, args, kwargs, fingerprint, is_lazy=is_lazy
                )

            return call_async

        return decorate(name) if callable(name) else decorate

    async def _run_step_async(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        fingerprint: str | None,
        *,
        is_lazy: bool = False,
    ) -> Any:
        async with self._step_async(name, fingerprint) as (key, value):
            if key is None:
                return value
            made = await called_async(function, args, kwargs)
            if not is_lazy or not self.steps.keep(self._finished(key, made, fingerprint)):
                await self._finish_async(key, made, fingerprint)
            return made

    @contextlib.asynccontextmanager
    async def transaction_async(self, name: str) -> AsyncIterator[AsyncPsycopgConnection | None]:
        """Begin a transaction that finishes the step when it commits: exactly once.

        Yields its connection, or None if the step is finished: then there is nothing to do.
        """
        async with self._step_async(name, None) as (key, _):
            if key is None:
                yield None
                return
            async with (
                self.steps.storing_async() as take,
                self.client.pool_async.connection() as connection,
                connection.transaction(),
            ):
                yield connection
                await self._finish_in_async(connection, take, key, None)

    @contextlib.asynccontextmanager
    async def _step_async(
        self, name: str, fingerprint: str | None
    ) -> AsyncIterator[tuple[str | None, Any]]:
        """Yield the step's name and None, or None and its value if the step is finished."""
        key = self.steps.take(name)
        try:
            if self.steps.finished is None:
                await self._read_steps_async()
            finished = self.steps.finished or {}
            if key in finished:
                if fingerprint is not None:
                    parameters = {**self._keyed(key), "fingerprint": fingerprint}
                    await self.client.call_async(sql.BEGIN_STEP, parameters)
                yield None, await self.client.codec.decode_async(finished[key])
            else:
                yield key, None
        except BaseException:
            self.steps.give_back(name)
            raise

    async def _read_steps_async(self) -> None:
        found: list[Any] = []
        after = None
        while True:
            parameters = {"id": self.id, "claim": self.claim, "after": after}
            rows = await self.client.call_async(sql.READ_STEPS, parameters)
            if not rows:
                break
            found += rows
            after = rows[-1][0]
        self.steps.complete(found)

    async def _finish_async(self, key: str, value: Any, fingerprint: str | None = None) -> None:
        """Store a step, after the lazy ones before it."""
        with self.steps.storing() as take:
            await self._finish_in_async(None, take, key, value, fingerprint)

    async def _finish_in_async(
        self,
        connection: AsyncPsycopgConnection | None,
        take: TakeSteps,
        key: str,
        value: Any,
        fingerprint: str | None = None,
    ) -> None:
        """Store a step, after the lazy ones before it; with a connection, in its transaction."""
        if fingerprint is None and not self.steps.kept:
            await self._call_async(sql.FINISH_STEP, self._finishing(key, value), connection)
            return
        steps = take(self._finished(key, value, fingerprint))
        parameters = {"id": self.id, "claim": self.claim, "steps": steps}
        await self._call_async(sql.FINISH_STEPS, parameters, connection)

    async def _store_kept_async(self) -> None:
        """Store the lazy steps before the claim ends."""
        if self.steps.kept:
            with self.steps.storing() as take:
                parameters = {"id": self.id, "claim": self.claim, "steps": take()}
                await self.client.call_async(sql.FINISH_STEPS, parameters)

    async def _call_async(
        self,
        statement: sql.Statement,
        parameters: Mapping[str, Any],
        connection: AsyncPsycopgConnection | None,
    ) -> None:
        if connection is None:
            await self.client.call_async(statement, parameters)
        else:
            await execute_async(connection, statement, parameters)

    # Waiting

    async def sleep_async(self, name: str, until: dt.datetime | dt.timedelta) -> None:
        """Sleep until a time, or for a duration by the database's clock; the next run continues.

        The job holds no slot, worker or connection meanwhile.
        """
        async with self._step_async(name, None) as (key, _):
            if key is None:
                return
            is_delay = isinstance(until, dt.timedelta)
            at = None if is_delay else to_json("until", until)
            delay = interval_text(until) if isinstance(until, dt.timedelta) else None
            parameters = {**self._keyed(key), "at": at, "delay": delay}
            await self._store_kept_async()
            await self.client.call_async(sql.SLEEP, parameters)
            raise JobSuspended

    async def wait_for_async(
        self,
        name: str,
        *,
        signal: str | None = None,
        event: str | None = None,
        timeout: dt.timedelta | None = None,  # noqa: ASYNC109
    ) -> Any:
        """Wait for a signal to this job, or for an event. The next run continues with its payload.

        It continues with None if `timeout` passes first. With neither a signal nor an event, it
        waits for a signal that has the step's name.
        """
        async with self._step_async(name, None) as (key, value):
            if key is None:
                return value
            parameters = {
                **self._keyed(key),
                "signal": name if signal is None and event is None else signal,
                "event": event,
                "timeout": None if timeout is None else interval_text(timeout),
            }
            await self._store_kept_async()
            await self.client.call_async(sql.WAIT, parameters)
            raise JobSuspended

    # Children

    async def call_async(self, call: _Call, *, name: str | None = None) -> Any:
        """Defer a job, once, and wait for its result. The next run continues with that.

        `call` is a call that `task.prepare(...)` returned. Raises JobFailed or JobCancelled if the
        job has not succeeded. The step has the task's name, unless another is passed.
        """
        (result,) = await self.gather_async([call], name=call.task if name is None else name)
        return result

    async def gather_async(
        self, calls: Iterable[_Call], *, name: str = "gather", return_errors: bool = False
    ) -> list[Any]:
        """Defer jobs, once, and wait for all their results. The next run continues with these.

        They are in the order of the calls. Raises the error of the first job that has not
        succeeded; with `return_errors` the list contains the errors. The job holds no slot
        meanwhile.
        """
        async with self._step_async(name, None) as (key, value):
            ids = ids_of(value) if key is None else await self._defer_async(key, list(calls))
        async with self._step_async(f"{name} ended", None) as (key, _):
            if key is not None and ids:
                await self._store_kept_async()
                await self.client.call_async(sql.AWAIT_JOBS, {**self._keyed(key), "jobs": ids})
                raise JobSuspended
        rows = await self.client.call_async(sql.NEEDS, {"id": self.id})
        decode_async = self.client.codec.decode_async
        results = {row[0]: (row[2], await decode_async(row[3]), row[4]) for row in rows}
        return results_of(ids, results, return_errors=return_errors)

    async def _defer_async(self, key: str, calls: list[_Call]) -> list[int]:
        """Defer jobs, and store their ids as a step, in one transaction."""
        ids: list[int] = []
        async with (
            self.steps.storing_async() as take,
            self.client.pool_async.connection() as connection,
            connection.transaction(),
        ):
            if calls:
                jobs = f"[{','.join(call.to_json() for call in calls)}]"
                tasks = [call.task for call in calls]
                rows = await self.client.call_async(
                    sql.DEFER_MANY, {"jobs": jobs}, connection, tasks=tasks
                )
                ids = [row[0] for row in rows]
            await self._finish_in_async(connection, take, key, ids)
        return ids

    # Reporting

    async def emit_async(self, stream: str, value: Any) -> int:
        """Append a value to a stream of the job, which `Job.stream` reads; return its number."""
        text = self.client.codec.dumps(value)
        parameters = {"id": self.id, "claim": self.claim, "stream": stream, "value": text}
        ((number,),) = await self.client.call_async(sql.EMIT, parameters)
        return int(number)

    async def progress_async(self, percent: float | None, message: str | None = None) -> None:
        """Set the progress that queue.jobs shows. None as the message keeps the last one."""
        parameters = {"id": self.id, "claim": self.claim, "percent": percent, "message": message}
        await self.client.call_async(sql.SET_PROGRESS, parameters)

    # Parameters

    def _keyed(self, key: str) -> dict[str, Any]:
        return {"id": self.id, "claim": self.claim, "name": key}

    def _finishing(self, key: str, value: Any) -> dict[str, Any]:
        return {**self._keyed(key), "value": self._value_text(value)}

    def _finished(self, key: str, value: Any, fingerprint: str | None) -> str:
        return step_json(key, self._value_text(value), fingerprint)

    def _value_text(self, value: Any) -> str | None:
        return None if value is None else self.client.codec.dumps(value)
