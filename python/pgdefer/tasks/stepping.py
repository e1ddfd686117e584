# Generated from stepping_async.py: change that, and run `make generate`.
"""The steps of a durable job's handler.

Tests: integration/test_durable.py, integration/test_durable_steps.py.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar, overload

import psycopg

from pgdefer._text import logger
from pgdefer.checks import check_flag
from pgdefer.client.client import Client
from pgdefer.database import sql
from pgdefer.database.callers import OWN, CallersConnection, Rows
from pgdefer.database.source import PsycopgConnection
from pgdefer.errors import InvalidParameter, Naming, StepFailed, TransactionLost, is_lost
from pgdefer.options import RetryPolicy
from pgdefer.tasks.raised import JobSuspended
from pgdefer.tasks.steps import (
    LOST,
    StepCall,
    StepDecorator,
    StepFunction,
    Steps,
    TakeSteps,
    check_function,
    check_is_decorator,
    failure_of,
    losses_translated,
    name_of_step,
    step_json,
)
from pgdefer.tasks.tries import Tries, called_within, fitted

__all__ = ["StepCalls", "until"]

log = logger("pgdefer.steps")

# How long a call that ends the claim waits for concurrent steps, which may wait for it in turn, and
# how long the end of the handler waits for steps that it has left running, in seconds.
PATIENCE = 60.0

P = ParamSpec("P")
R = TypeVar("R")


class StepCalls:
    """The steps of a job."""

    __slots__ = ()

    id: int
    claim: int
    client: Client
    steps: Steps

    def _is_here(self) -> bool:
        raise NotImplementedError

    def _log_fields(self) -> dict[str, object]:
        raise NotImplementedError

    # Steps

    @overload
    def step(
        self,
        name: str,
        function: StepCall[R],
        /,
        *args: Any,
        fingerprint: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: dt.timedelta | None = None,
        deadline: dt.datetime | dt.timedelta | None = None,
        **kwargs: Any,
    ) -> R: ...
    @overload
    def step(self, function: StepFunction[P, R], /) -> StepFunction[P, R]: ...
    @overload
    def step(
        self,
        name: str | None = None,
        /,
        *,
        fingerprint: str | None = None,
        lazy: bool = False,
        retry: RetryPolicy | None = None,
        timeout: dt.timedelta | None = None,
        deadline: dt.datetime | dt.timedelta | None = None,
    ) -> StepDecorator: ...
    def step(
        self,
        name: str | Callable[..., Any] | None = None,
        function: Callable[..., Any] | None = None,
        /,
        *args: Any,
        fingerprint: str | None = None,
        retry: RetryPolicy | None = None,
        timeout: dt.timedelta | None = None,
        deadline: dt.datetime | dt.timedelta | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call a function once in all runs of the job, and store its value; return that value.

        Later runs return the stored value without a call. If a run ends before the value is stored,
        the next one calls the function again: it runs at least once. Put writes to the database
        that must happen exactly once into `transaction`. With a fingerprint, raises StepChanged if
        the step was finished with another fingerprint.

        Without a function this returns a decorator. Each call of the decorated function is a step,
        which has the function's name unless another is passed. A lazy step is not stored at once,
        but with the next step that is, or with the run's outcome. So it costs no call to the
        database, but it runs again if the worker dies before that.

        `timeout` limits each call. With `retry`, an error of the function counts for the step, not
        for the job. It ends the run by JobSuspended, and a later run tries again. The policy's last
        attempt raises StepFailed instead, as do all later runs. No call begins after `deadline`: a
        time, or a timedelta from the step's first failure.
        """
        tries = Tries(fingerprint, retry, timeout, deadline)
        if function is not None:
            check_function(function)
            return self._run_step(name_of_step(name), function, args, kwargs, tries)
        is_lazy = kwargs.pop("lazy", False)
        check_flag("lazy", is_lazy)
        check_is_decorator(args, kwargs)
        if name is not None and not isinstance(name, str):
            check_function(name)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            check_function(function)
            key = name_of_step(function if name is None else name)

            @functools.wraps(function)
            def call(*args: Any, **kwargs: Any) -> Any:
                return self._run_step(key, function, args, kwargs, tries, is_lazy=is_lazy)

            return call

        return decorate(name) if callable(name) else decorate

    def _run_step(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        tries: Tries,
        *,
        is_lazy: bool = False,
    ) -> Any:
        with self._step(name, tries.fingerprint) as (key, known):
            call = (function, args, kwargs)
            value = known if key is None else self._try_step(key, call, tries, is_lazy)
        if isinstance(value, StepFailed):
            raise value  # outside of the block, which would give the step's name back
        return value

    def _try_step(
        self,
        key: str,
        call: tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]],
        tries: Tries,
        is_lazy: bool,
    ) -> Any:
        try:
            value = called_within(*call, tries.timeout)
        except Exception as error:
            if not tries.count(error):
                raise
            return self._fail(key, error, tries)
        fingerprint = tries.fingerprint
        if not is_lazy or not self.steps.keep(self._finished(key, value, fingerprint)):
            self._finish(key, value, fingerprint)
        return value

    def _fail(self, key: str, error: Exception, tries: Tries) -> StepFailed:
        """Store a failure. Raises JobSuspended if the step is to be tried again."""
        parameters = {**self._keyed(key), **tries.failure(error)}
        with self._ending():
            try:
                ((state, outcome),) = self._call(sql.FAIL_STEP, parameters)
            except InvalidParameter as refused:
                if not isinstance(refused.__cause__, psycopg.errors.UntranslatableCharacter):
                    raise
                with self._storing(callers=False) as (_, connection):
                    encoding = connection.info.parameter_status("server_encoding")
                    parameters = fitted(parameters, encoding)
                    rows = self.client.call(sql.FAIL_STEP, parameters, connection)
                ((state, outcome),) = rows
            if state is not None:
                said = "%r: its step %s failed, the job is %s: %s"
                log.info(said, self, key, state, error, extra=self._log_fields())
                self.steps.ended_as = (outcome, state)
                raise JobSuspended from error
        failed = StepFailed(key, parameters["error"])
        failed.__cause__ = error
        return failed

    @contextlib.contextmanager
    def transaction(
        self,
        name: str,
        *,
        retry: RetryPolicy | None = None,
        deadline: dt.datetime | dt.timedelta | None = None,
    ) -> Iterator[PsycopgConnection | None]:
        """Begin a transaction whose commit finishes the step, so that it takes effect exactly once.

        Yields its connection, or None if the step is finished: then there is nothing to do. With
        `retry`, an error that leaves the block rolls the transaction back and counts for the step.
        `retry` and `deadline` are those of `step`.
        """
        tries = Tries(None, retry, None, deadline)
        failed: StepFailed | None = None
        with self._step(name, None) as (key, known):
            if isinstance(known, StepFailed):
                failed = known
            elif key is None:
                yield None
            else:
                try:
                    with self._storing(callers=True) as (take, connection):
                        yield connection
                        self._finish_in(connection, take, key, None)
                except Exception as error:
                    if not tries.count(error):
                        raise
                    failed = self._fail(key, error, tries)
        if failed is not None:
            raise failed  # outside of the block, which would give the step's name back

    @contextlib.contextmanager
    def _step(
        self, name: str, fingerprint: str | None, taken: str | None = None
    ) -> Iterator[tuple[str | None, Any]]:
        """Yield the step's numbered name and None; if it is finished, None and its value.

        The value is a StepFailed if the step has failed for good. `taken` is what `Steps.take` has
        returned, if the caller has called it.
        """
        key = self.steps.take(name, fingerprint) if taken is None else taken
        begun = self.steps.running.begin()
        try:
            self._check_claim()
            if self.steps.finished is None:
                self._read_steps()
            finished = self.steps.finished or {}
            if key in finished:
                if fingerprint is not None:
                    parameters = {**self._keyed(key), "fingerprint": fingerprint}
                    self._call(sql.BEGIN_STEP, parameters)
                failure = failure_of(finished[key])
                if failure is None:
                    yield None, self.client.codec.decode(finished[key])
                else:
                    yield None, StepFailed(key, failure)
            else:
                yield key, None
        except BaseException:
            self.steps.give_back(name, key)
            raise
        finally:
            self.steps.running.end(begun)

    def _check_claim(self) -> None:
        """Raise JobSuspended if a concurrent call has ended the claim; wait for one that may."""
        if not self.steps.running.is_decided():
            until(self.steps.running.is_decided)
        if self.steps.ended_as is not None:
            raise JobSuspended

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        """Let the block end the claim, once all concurrent steps have ended.

        The job's next run may begin when the claim ends, and no step of this one may overlap it.
        Raises JobSuspended if a concurrent call has ended the claim.
        """
        running = self.steps.running
        with running.resting():
            time.sleep(0)  # let steps begin that were created together with this call
            if self._is_here() and not until(running.may_end):
                said = "%r: its run ends, though concurrent steps still run"
                log.warning(said, self, extra=self._log_fields())
            self._check_claim()
            with running.ending():
                self._store_kept()
                yield

    def _end_steps(self) -> None:
        """Cancel the steps that the handler has left running, and wait for them."""
        self.steps.running.cancel()
        until(self.steps.running.is_over)

    def _read_steps(self) -> None:
        found: list[Any] = []
        after = None
        while True:
            parameters = {"id": self.id, "claim": self.claim, "after": after}
            rows = self._call(sql.READ_STEPS, parameters)
            if not rows:
                break
            found += rows
            after = rows[-1][0]
        self.steps.complete(found)

    def _finish(self, key: str, value: Any, fingerprint: str | None = None) -> None:
        """Store a step, after the lazy ones before it."""
        with self.steps.storing() as take:
            self._finish_in(OWN, take, key, value, fingerprint)

    def _finish_in(
        self,
        connection: PsycopgConnection,
        take: TakeSteps,
        key: str,
        value: Any,
        fingerprint: str | None = None,
    ) -> None:
        """Store a step, after the lazy ones before it; with a connection, in its transaction."""
        if fingerprint is None and not self.steps.kept:
            finishing = self._finishing(key, value)
            self._call(sql.FINISH_STEP, finishing, connection)
            return
        steps = take(self._finished(key, value, fingerprint))
        parameters = {"id": self.id, "claim": self.claim, "steps": steps}
        self._call(sql.FINISH_STEPS, parameters, connection)

    def _store_kept(self) -> None:
        """Store the lazy steps before the claim ends."""
        if self.steps.kept:
            with self.steps.storing() as take:
                parameters = {"id": self.id, "claim": self.claim, "steps": take()}
                self._call(sql.FINISH_STEPS, parameters)

    # Calls

    def _call(
        self,
        statement: sql.Statement,
        parameters: Mapping[str, Any],
        connection: CallersConnection = OWN,
    ) -> Rows:
        """Call the database. Raises TransactionLost if the client's own connection is lost."""
        with losses_translated(lambda error: connection is OWN and is_lost(error)):
            return self.client.call(statement, parameters, connection)

    @contextlib.contextmanager
    def _storing(self, *, callers: bool) -> Iterator[tuple[TakeSteps, PsycopgConnection]]:
        """Begin a transaction in which steps are stored; `callers` as for `Client.transaction`.

        Raises TransactionLost if its connection is lost.
        """
        is_inside = False
        try:
            with (
                self.steps.storing() as take,
                self.client.transaction(callers=callers) as connection,
            ):
                is_inside = True
                with losses_translated(
                    lambda error: isinstance(error, psycopg.Error) and connection.broken
                ):
                    yield take, connection
                is_inside = False
        except Exception as error:
            if not is_inside and is_lost(error):
                raise TransactionLost(LOST) from error
            raise

    # Parameters

    def _keyed(self, key: str) -> dict[str, Any]:
        return {"id": self.id, "claim": self.claim, "name": key}

    def _finishing(self, key: str, value: Any) -> dict[str, Any]:
        return {**self._keyed(key), "value": self._value_text(key, value)}

    def _finished(self, key: str, value: Any, fingerprint: str | None) -> str:
        return step_json(key, self._value_text(key, value), fingerprint)

    def _value_text(self, key: str, value: Any) -> str | None:
        with Naming(f"the value of the step {key!r}"):
            return None if value is None else self.client.codec.dumps(value)


def until(is_true: Callable[[], bool]) -> bool:
    """Wait until `is_true`, at most for PATIENCE; return whether it is.

    The steps may be in other threads and event loops, so this polls.
    """
    pause, end = 0.001, time.monotonic() + PATIENCE
    while not is_true():
        if time.monotonic() > end:
            return False
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    return True
