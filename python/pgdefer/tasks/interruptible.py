"""A call in a thread, into which another thread can raise an exception.

Tests: unit/test_threads.py.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Interruptible"]

T = TypeVar("T")


class Interruptible(Generic[T]):
    """One call, in whose thread an exception can be raised while it lasts, and never afterwards."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._is_over = False
        self._raised: type[BaseException] | None = None
        self._is_interrupted = False

    def interrupt(self, kind: type[BaseException]) -> None:
        """Raise an exception in the call's thread, as soon as that runs Python code.

        Call it from another thread.
        """
        with self._lock:
            if self._thread is not None:
                self._is_interrupted = True
                _raise_in(self._thread, kind)
            elif not self._is_over:
                self._raised = kind

    def run(self) -> T:
        """Call the function and return its value. Raises its errors, and that of `interrupt`."""
        tracing = sys.gettrace()
        try:
            with self._lock:
                self._thread = threading.get_ident()
                if self._raised is not None:
                    raise self._raised
            return self._function()
        finally:
            # The exception may be raised in here too, but only once: the next comes much later.
            try:
                sys.settrace(tracing)  # the function's own is not for what follows, and may raise
                self._end()
            finally:
                self._end()

    def _end(self) -> None:
        """Prevent exceptions from now on: one that has not been raised yet is dropped."""
        with self._lock:
            self._thread, self._is_over = None, True
        if self._is_interrupted:
            # Put another one in its place and catch that. To take it away only would leave Python
            # looking for one: slowly, and in 3.11 for ever if a debugger traces the thread.
            with contextlib.suppress(_Nothing):
                _raise_in(threading.get_ident(), _Nothing)
                while True:
                    pass


class _Nothing(BaseException):
    """Raised and caught, so that nothing is left to be raised."""


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    what = ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
