"""Middleware around handlers and calls that defer: checks it, and enters it around a handler."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from pgdefer._text import traceback_of
from pgdefer.options import as_list
from pgdefer.tasks.context import JobContext, Middleware

__all__ = ["AsyncEntered", "Entered", "check_middleware", "check_task_middleware"]


def check_middleware(name: str, given: Any, of: str = "a JobContext") -> list[Any]:
    """Return the middleware as a list. Raises TypeError for one that can't be used.

    `of` names the argument with which it is called.
    """
    found = as_list(name, given)
    for surround in found:
        if not callable(surround):
            raise TypeError(f"{name} must be functions of {of}, not {surround!r}")
        called = surround if inspect.isroutine(surround) else type(surround).__call__
        if inspect.iscoroutinefunction(called):
            raise TypeError(
                f"{name}: {surround!r} is a coroutine: write it with `yield` where the handler "
                "runs, and decorate it with contextlib.asynccontextmanager"
            )
        if inspect.isgeneratorfunction(called) or inspect.isasyncgenfunction(called):
            kind = "asynccontextmanager" if inspect.isasyncgenfunction(called) else "contextmanager"
            raise TypeError(f"{name}: decorate {surround!r} with contextlib.{kind}")
        _check_parameters(name, surround, of)
    return found


def _check_parameters(name: str, surround: Callable[..., Any], of: str) -> None:
    try:
        signature = inspect.signature(surround)
    except (TypeError, ValueError):  # of some builtins there is none
        return
    try:
        signature.bind(None)
    except TypeError as error:
        raise TypeError(f"{name}: {surround!r} is called with {of}: {error}") from None


def _is_asynchronous_only(surround: Any) -> bool:
    """Whether it is certain, without a call, that a middleware can surround only coroutines."""
    if isinstance(surround, type):
        return hasattr(surround, "__aenter__") and not hasattr(surround, "__enter__")
    return inspect.isasyncgenfunction(inspect.unwrap(surround))


def check_task_middleware(task: str, middleware: Sequence[Middleware], *, is_async: bool) -> None:
    """Raise TypeError if a middleware can't surround this task's handler."""
    for surround in middleware:
        if not is_async and _is_asynchronous_only(surround):
            raise TypeError(
                f"the task {task!r} is not a coroutine, but its middleware {surround!r} is "
                "asynchronous: give it `__enter__` and `__exit__` too"
            )


class Entered:
    """Middleware around a function, the first one outermost, as nested `with` statements.

    Not contextlib's ExitStack: this runs for each job, and costs less.
    """

    __slots__ = ("_entered", "_job", "_middleware")

    def __init__(self, job: JobContext, middleware: Sequence[Middleware]) -> None:
        self._job = job
        self._middleware = middleware
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        try:
            for surround in self._middleware:
                found: Any = surround(self._job)
                found.__enter__()
                self._entered.append(found)
        except BaseException as error:
            if self.__exit__(type(error), error, traceback_of(error)):
                raise RuntimeError(_SWALLOWED) from error
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        is_swallowed = False
        while self._entered:
            found = self._entered.pop()
            try:
                if found.__exit__(kind, error, trace) and error is not None:
                    kind = error = trace = None
                    is_swallowed = True
            except BaseException as other:
                # The outer ones get this error.
                if self.__exit__(type(other), other, traceback_of(other)):
                    return True
                raise
        return is_swallowed


class AsyncEntered:
    """Middleware around a coroutine: as Entered."""

    __slots__ = ("_entered", "_job", "_middleware")

    def __init__(self, job: JobContext, middleware: Sequence[Middleware]) -> None:
        self._job = job
        self._middleware = middleware
        self._entered: list[Any] = []

    async def __aenter__(self) -> None:
        try:
            for surround in self._middleware:
                found: Any = surround(self._job)
                if hasattr(found, "__aenter__"):
                    await found.__aenter__()
                else:
                    found.__enter__()
                self._entered.append(found)
        except BaseException as error:
            if await self.__aexit__(type(error), error, traceback_of(error)):
                raise RuntimeError(_SWALLOWED) from error
            raise

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        is_swallowed = False
        while self._entered:
            found = self._entered.pop()
            try:
                if hasattr(found, "__aenter__"):
                    swallows = await found.__aexit__(kind, error, trace)
                else:
                    swallows = found.__exit__(kind, error, trace)
                if swallows and error is not None:
                    kind = error = trace = None
                    is_swallowed = True
            except BaseException as other:
                # The outer ones get this error.
                if await self.__aexit__(type(other), other, traceback_of(other)):
                    return True
                raise
        return is_swallowed


_SWALLOWED = "a middleware has swallowed the error of one within it, so the handler can't run"
