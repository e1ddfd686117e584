"""The threads in which a synchronous test runs coroutines, and an asynchronous one functions.

Tests: contrib/test_django_testing.py, integration/test_testing.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any, TypeVar

from pgdefer.codec import Codec
from pgdefer.database.callers import CallersConnection, is_django
from pgdefer.database.own_threads import has_running_loop

__all__ = ["DjangoThreads", "Misuse", "ThreadLock", "Threads", "run_apart", "threads_for"]

T = TypeVar("T")


class Misuse(RuntimeError):  # noqa: N818
    """The queue can't run a task in this way: an error of the test, not of the task."""


def run_apart(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of a handler in an event loop of its own."""
    if not has_running_loop():
        return asyncio.run(coroutine)
    ended: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            ended.append(asyncio.run(coroutine))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,))
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return ended[0]


class ThreadLock:
    """Lets calls of threads take turns. They await nothing meanwhile, so no coroutine waits."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a hook of the test's connection may defer, too

    async def __aenter__(self) -> None:
        self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


class Threads:
    """Asynchronous tests run functions in any thread; others run coroutines in any event loop."""

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that may block, outside of the running event loop."""
        return await asyncio.to_thread(function, *args)

    async def decode(
        self, codec: Codec, texts: Iterable[str | None], function: Callable[..., T], *args: Any
    ) -> T:
        """Call a function that decodes these texts."""
        del codec, texts
        return function(*args)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine, and wait for its end."""
        return run_apart(coroutine)

    def restoring(self) -> contextlib.AbstractContextManager[None]:
        """Restore the state that the test's library keeps of its transaction, after a block.

        The block runs in a savepoint of which the library does not know.
        """
        return contextlib.nullcontext()


class DjangoThreads(Threads):
    """Runs all code that uses Django's connection in the connection's thread."""

    def __init__(self, connection: Any) -> None:
        from django.db import connections  # noqa: PLC0415 (the connection is Django's)

        self._alias = connection.alias
        self._connection = connections[self._alias]

    async def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in the thread that has the test's connection."""
        if not has_running_loop():
            return function(*args)
        from asgiref.sync import sync_to_async  # noqa: PLC0415 (Django's)

        return await sync_to_async(self._call, thread_sensitive=True)(function, *args)

    async def decode(
        self, codec: Codec, texts: Iterable[str | None], function: Callable[..., T], *args: Any
    ) -> T:
        """Call a function that decodes these texts; it may load rows of models."""
        if any(text is not None and codec.how(text) == "thread" for text in texts):
            return await self.call(function, *args)
        return function(*args)

    def _call(self, function: Callable[..., T], *args: Any) -> T:
        self._check()
        return function(*args)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine whose calls of Django return to this thread."""
        if has_running_loop():
            coroutine.close()
            raise Misuse(
                "this test is a coroutine, and its tasks use Django's connection: "
                "await run_async() instead of calling run()"
            )
        self._check()
        from asgiref.sync import async_to_sync  # noqa: PLC0415 (Django's)

        async def run() -> T:
            return await coroutine

        return async_to_sync(run)()

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Let Django run queries again, if an error within the block has forbidden that."""
        before = self._connection.needs_rollback
        try:
            yield
        finally:
            self._connection.needs_rollback = before

    def _check(self) -> None:
        from django.db import connections  # noqa: PLC0415

        if connections[self._alias] is not self._connection:
            raise Misuse(
                "this task would use another connection than the test: Django has one for each "
                "thread. Let the test be a method of Django's TestCase"
            )


def threads_for(connection: CallersConnection) -> Threads:
    """Return the threads that can use the test's connection."""
    return DjangoThreads(connection) if is_django(connection) else Threads()
