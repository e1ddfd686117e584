"""Exceptions raised in another thread: in the call that they are for, or nowhere."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

import pytest

from pgdefer import JobTimeout
from pgdefer.tasks.interruptible import Interruptible


def spin() -> None:
    while True:
        time.sleep(0.001)


def begun(call: Interruptible[None], ends: list[object]) -> threading.Thread:
    def run() -> None:
        try:
            ends.append(call.run())
        except BaseException as error:
            ends.append(type(error))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_a_call_that_runs() -> None:
    ends: list[object] = []
    call = Interruptible(spin)
    thread = begun(call, ends)
    while call._thread is None:
        time.sleep(0.001)
    call.interrupt(JobTimeout)
    thread.join(10)
    assert ends == [JobTimeout]


def test_a_call_that_has_not_begun() -> None:
    call = Interruptible(spin)
    call.interrupt(JobTimeout)
    with pytest.raises(JobTimeout):
        call.run()


def test_a_call_that_has_ended() -> None:
    call = Interruptible(lambda: 1)
    assert call.run() == 1
    call.interrupt(JobTimeout)
    time.sleep(0)


def test_never_after_the_call() -> None:
    """However the call ends, later code in the thread is not hit."""
    calls: list[Interruptible[None]] = []
    is_over = threading.Event()
    spared: list[bool] = []

    def brief(seconds: float) -> Callable[[], None]:
        return lambda: time.sleep(seconds)

    def work() -> None:
        try:
            for n in range(2000):
                call = Interruptible(brief(n % 5 * 1e-5))
                calls.append(call)
                with contextlib.suppress(JobTimeout):
                    call.run()
                sum(range(200))  # there it would hit another job
            spared.append(True)
        finally:
            is_over.set()

    def interrupt() -> None:
        while not is_over.is_set():
            if calls:
                calls.pop().interrupt(JobTimeout)
            else:
                time.sleep(0)

    threads = [threading.Thread(target=work), threading.Thread(target=interrupt)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert spared == [True]
