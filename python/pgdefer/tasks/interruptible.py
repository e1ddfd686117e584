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
    """One call of a function. While it lasts, an exception can be raised in its thread."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._is_over = False
        self._raised: type[BaseException] | None = None
        self._is_interrupted = False

    def interrupt(self, kind: type[BaseException]) -> None:
        """Raise an exception in the call's thread as soon as that runs Python code.

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
            # The exception may be raised here, too, but only once: the next one comes much later.
            try:
                sys.settrace(tracing)  # one that the function set is not for what follows
                self._end()
            finally:
                self._end()

    def _end(self) -> None:
        """Prevent exceptions from now on; drop one that has not been raised yet."""
        with self._lock:
            self._thread, self._is_over = None, True
        if self._is_interrupted:
            # Replace it by another one, and catch that. If it were only cleared, Python would go on
            # looking for one: slowly, and in 3.11 forever if a debugger traces the thread.
            with contextlib.suppress(_Nothing):
                _raise_in(threading.get_ident(), _Nothing)
                while True:
                    pass


class _Nothing(BaseException):
    """Raised and caught in place of an exception that is no longer wanted."""


def _raise_in(thread: int, kind: type[BaseException]) -> None:
    what = ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
