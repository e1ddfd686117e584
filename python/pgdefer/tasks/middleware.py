"""Middleware around handlers and calls that defer: checked when it is passed, entered when used."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from pgdefer.options import as_list
from pgdefer.tasks.context import JobContext, Middleware

__all__ = ["check_middleware", "check_task_middleware", "entered", "entered_async"]


def check_middleware(name: str, given: Any, of: str = "a JobContext") -> list[Any]:
    """Return middleware. Raises TypeError if it does not return a context manager."""
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
    """Whether a middleware can't surround a function; for some this is only known at the call."""
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


@contextlib.contextmanager
def entered(job: JobContext, middleware: Sequence[Middleware]) -> Iterator[None]:
    """Enter middleware around a function, the first one outermost."""
    with contextlib.ExitStack() as stack:
        for surround in middleware:
            found: Any = surround(job)
            stack.enter_context(found)
        yield


@contextlib.asynccontextmanager
async def entered_async(job: JobContext, middleware: Sequence[Middleware]) -> AsyncIterator[None]:
    """Enter middleware around a coroutine, the first one outermost."""
    async with contextlib.AsyncExitStack() as stack:
        for surround in middleware:
            found: Any = surround(job)
            if hasattr(found, "__aenter__"):
                await stack.enter_async_context(found)
            else:
                stack.enter_context(found)
        yield
