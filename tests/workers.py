"""Workers that run during a test, and waiting for what they do."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from pgdefer import App, Worker

__all__ = ["CheckedThread", "beside", "running", "slowness", "until", "wait_for", "working"]


@contextlib.asynccontextmanager
async def running(app: App, *arguments: Any, **options: Any) -> AsyncIterator[Worker]:
    """A worker that runs during the test and is stopped gracefully after it."""
    worker = Worker(app, *arguments, **options)
    task = asyncio.create_task(worker.run_async())
    try:
        yield worker
    finally:
        if not task.done():
            worker.stop()
        async with asyncio.timeout(300):
            await task
        await app.close_async()


@contextlib.contextmanager
def working(worker: Worker) -> Iterator[Worker]:
    """Run a worker in a thread during the block; after it, the worker was stopped and has ended."""
    thread = threading.Thread(target=worker.run, name=f"worker {worker.name}")
    thread.start()
    try:
        yield worker
    finally:
        worker.stop()
        thread.join(300)
        assert not thread.is_alive(), thread.name


class CheckedThread(threading.Thread):
    """A thread that works beside a test."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name=name, daemon=True)
        self.is_over = threading.Event()
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:
            self.error = error

    def work(self) -> None:
        """Go on until `is_over` is set."""
        raise NotImplementedError

    def end(self) -> None:
        """Wait until it has ended, and raise its error."""
        self.is_over.set()
        self.join(300)
        assert not self.is_alive(), f"{self.name} hangs"
        if self.error is not None:
            raise self.error


@contextlib.contextmanager
def beside(*threads: CheckedThread) -> Iterator[None]:
    """Run threads during the block; after it, they have ended without an error."""
    with contextlib.ExitStack() as started:  # ends each, whatever the others raise
        for thread in threads:
            thread.start()
            started.callback(thread.end)
        try:
            yield
        finally:
            for thread in threads:
                thread.is_over.set()


def slowness() -> float:
    """Return how many times longer than on an idle machine a thing may take now."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


async def until(condition: Callable[[], Any], seconds: float = 300.0) -> Any:
    """Wait until the condition holds, and return its value."""
    async with asyncio.timeout(seconds):
        while not (found := condition()):  # noqa: ASYNC110 (it may lie in the database)
            await asyncio.sleep(0.005)
        return found


def wait_for(condition: Callable[[], Any], seconds: float = 300.0) -> Any:
    """As `until`, for tests that have no event loop."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)
    return found
