"""Running a worker until a signal of the system ends it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

__all__ = ["run_until_signal", "signals"]


class _Runnable(Protocol):
    @property
    def unresponsive(self) -> int: ...

    def run_async(self, *, handle_signals: bool) -> Coroutine[Any, Any, None]: ...


def run_until_signal(worker: _Runnable) -> None:
    """Run a worker, which turns signals into stops, in an event loop of its own."""
    runner = asyncio.Runner()
    try:
        runner.run(worker.run_async(handle_signals=True))
    finally:
        # Closing waits for every coroutine: not for those that would not end when told to.
        if not worker.unresponsive:
            runner.close()


@contextlib.contextmanager
def signals(on_stop: Callable[[], None], on_quit: Callable[[], None]) -> Iterator[None]:
    """Call on SIGTERM and SIGINT, and on SIGQUIT; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signal.SIGTERM: on_stop, signal.SIGINT: on_stop, signal.SIGQUIT: on_quit}
    loop = asyncio.get_running_loop()
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
