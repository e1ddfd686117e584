"""Calls in threads of their own, because handlers may fill the event loop's default executor.

Also tells whether this thread runs an event loop, perhaps that of a worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

__all__ = ["blocks_worker", "enter_coroutine", "has_running_loop", "in_own_thread"]

P = ParamSpec("P")
T = TypeVar("T")

# The event loop of the worker whose handler this context is.
_loop: contextvars.ContextVar[asyncio.AbstractEventLoop | None] = contextvars.ContextVar(
    "pgdefer_loop", default=None
)


def has_running_loop() -> bool:
    """Whether this thread runs an event loop.

    A function of its own: errors raised within an `except RuntimeError` would get that one as their
    context.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def enter_coroutine() -> None:
    """Note that code in this context is a handler that runs in its worker's event loop."""
    _loop.set(asyncio.get_running_loop())


def blocks_worker() -> bool:
    """Whether a call that waits here would block the event loop of a worker."""
    return has_running_loop() and asyncio.get_running_loop() is _loop.get()


async def in_own_thread(function: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Call a function in a thread of its own, and return what it returns, or raise what it raises.

    asyncio.to_thread would wait for handlers that fill the default executor, perhaps forever. Nor
    does this thread keep the process alive.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    context = contextvars.copy_context()
    results: list[T] = []
    errors: list[BaseException] = []

    def tell() -> None:
        if not ended.done():
            ended.set_result(None)

    def work() -> None:
        try:
            results.append(context.run(function, *args, **named))
        except BaseException as error:
            errors.append(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=work, name="pgdefer-call", daemon=True).start()
    await ended
    if errors:
        raise errors[0]
    return results[0]
