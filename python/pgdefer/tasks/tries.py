"""How often a step is tried, and for how long.

Tests: integration/test_step_tries.py.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import functools
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from pgdefer.errors import ClaimLost, Naming, TransactionLost
from pgdefer.options import RetryPolicy, checked_option
from pgdefer.tasks.error_report import error_details, error_text, storable_in
from pgdefer.tasks.interruptible import Interruptible
from pgdefer.tasks.option_checks import check_options
from pgdefer.tasks.raised import JobAborted, RetryLater

__all__ = ["Tries", "called_within", "called_within_async", "fitted"]

# How often the timeout is raised again in a thread that goes on, in seconds.
AGAIN = 10.0


class _Options(TypedDict, total=False):
    fingerprint: str | None
    retry: RetryPolicy | None
    timeout: dt.timedelta | None


class Tries:
    """The options of a step. Raises TypeError and ValueError for options that are invalid."""

    __slots__ = ("_deadline", "_retry", "fingerprint", "timeout")

    def __init__(
        self,
        fingerprint: str | None,
        retry: RetryPolicy | None,
        timeout: dt.timedelta | None,
        deadline: dt.datetime | dt.timedelta | None,
    ) -> None:
        self.fingerprint = fingerprint
        self.timeout = timeout
        self._retry = None if retry is None else checked_option("retry", retry)
        self._deadline: dict[str, Any] = {}
        if retry is None and timeout is None and deadline is None:
            return
        options = {"fingerprint": fingerprint, "retry": retry, "timeout": timeout}
        check_options("a step", options, _Options)
        if timeout is not None and timeout <= dt.timedelta(0):
            raise ValueError(f"a step: timeout must be positive, not {timeout!r}")
        if deadline is not None and retry is None:
            raise ValueError("a step: deadline ends the attempts of a policy: pass retry too")
        if not isinstance(deadline, dt.datetime | dt.timedelta | None):
            raise TypeError(f"a step: deadline must be a datetime or timedelta, not {deadline!r}")
        if deadline is not None:
            key = "deadline_in" if isinstance(deadline, dt.timedelta) else "deadline"
            with Naming("a step"):
                self._deadline[key] = checked_option(key, deadline)

    def count(self, error: Exception) -> bool:
        """Whether an error counts for the step's own retries; otherwise it is the handler's."""
        others = (ClaimLost, JobAborted, RetryLater, TransactionLost)
        return self._retry is not None and not isinstance(error, others)

    def failure(self, error: Exception) -> dict[str, Any]:
        """Return the parameters of queue.fail_step that describe an error."""
        options: dict[str, Any] = {"retry": self._retry, **self._deadline}
        if self.fingerprint is not None:
            options["fingerprint"] = self.fingerprint
        if self.timeout is not None and isinstance(error, TimeoutError):
            options["outcome"] = "timed_out"
        return {
            "error": error_text(error),
            "details": json.dumps(error_details(error), ensure_ascii=False),
            "options": json.dumps(options),
        }


def fitted(failure: Mapping[str, Any], encoding: str | None) -> dict[str, Any]:
    """Return these parameters of queue.fail_step without characters that an encoding lacks."""
    error = storable_in(json.dumps(failure["error"]), encoding or "ASCII")
    details = storable_in(failure["details"], encoding or "ASCII")
    return {**failure, "error": json.loads(error), "details": details}


def called_within(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    timeout: dt.timedelta | None,
) -> Any:
    """Call a function and return its value. Raises TimeoutError at the timeout.

    Raises TypeError if the value is a coroutine.
    """
    if timeout is None:
        return _called(function, args, kwargs)
    call = Interruptible(functools.partial(_called, function, args, kwargs))

    class Timeout(BaseException):
        """Raised in the thread at the timeout of this call: one step may contain another."""

    over = threading.Event()
    seconds = timeout.total_seconds()

    def watch() -> None:
        wait = seconds
        while not over.wait(wait):
            call.interrupt(Timeout)
            wait = AGAIN

    threading.Thread(target=watch, name="pgdefer-step", daemon=True).start()
    try:
        return call.run()
    except Timeout as error:
        raise TimeoutError(f"not done within {timeout}") from error
    finally:
        over.set()


def _called(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    value = function(*args, **kwargs)
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError("the step is a coroutine function: use step_async")
    return value


async def called_within_async(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    timeout: dt.timedelta | None,  # noqa: ASYNC109
) -> Any:
    """Call a function or coroutine function and return its value.

    Raises TimeoutError at the timeout, which does not interrupt an ordinary function.
    """
    value = function(*args, **kwargs)
    if not inspect.isawaitable(value):
        return value
    if timeout is None:
        return await value
    scope = asyncio.timeout(timeout.total_seconds())
    try:
        async with scope:
            return await value
    except TimeoutError as error:
        if scope.expired():
            raise TimeoutError(f"not done within {timeout}") from error
        raise
