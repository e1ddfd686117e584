"""A call in a thread, into which another thread can raise an exception.

Tests: unit/test_threads.py.
"""

from __future__ import annotations

import ctypes
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

    def interrupt(self, kind: type[BaseException]) -> None:
        """Raise an exception in the call's thread, as soon as that runs Python code.

        Call it from another thread.
        """
        with self._lock:
            if self._thread is not None:
                _raise_in(self._thread, kind)
            elif not self._is_over:
                self._raised = kind

    def run(self) -> T:
        """Call the function and return its value. Raises its errors, and that of `interrupt`."""
        try:
            with self._lock:
                self._thread = threading.get_ident()
                if self._raised is not None:
                    raise self._raised
            return self._function()
        finally:
            # The exception may be raised in here too, but only once: the next comes much later.
            try:
                self._end()
            finally:
                self._end()

    def _end(self) -> None:
        """Prevent exceptions from now on: one that has not been raised yet is dropped."""
        with self._lock:
            self._thread, self._is_over = None, True
            _raise_in(threading.get_ident(), None)


def _raise_in(thread: int, kind: type[BaseException] | None) -> None:
    what = None if kind is None else ctypes.py_object(kind)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), what)
