"""Threads for handlers; exceptions raised in them: in the call that they are for, or nowhere."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import sys
import threading
import time
from collections.abc import Callable

import pytest

from pgdefer import JobTimeout
from pgdefer.tasks.interruptible import Interruptible
from pgdefer.worker.threads import Threads
from workers import until


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


@pytest.mark.parametrize("is_late", [False, True])
def test_the_next_call_may_be_traced(is_late: bool) -> None:
    """By a debugger or coverage: Python 3.11 hangs there if it expects an exception."""
    ended: list[object] = []

    def called() -> None: ...

    def traced() -> None:
        sys.settrace(lambda *_: None)
        called()
        sys.settrace(None)

    def run() -> None:
        call = Interruptible(spin if is_late else lambda: None)
        with contextlib.suppress(JobTimeout):
            if is_late:
                threading.Timer(0.01, call.interrupt, [JobTimeout]).start()
            call.run()
        ended.append(Interruptible(traced).run())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert ended == [None]


@pytest.mark.parametrize("there_are", [0, 1])
async def test_threads_that_the_system_refuses(
    there_are: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The work of a pool waits for threads, also where there is none."""
    monkeypatch.setattr("pgdefer.worker.threads.AGAIN", 0.01)
    pool = Threads(asyncio.get_running_loop(), there_are + 2)
    release = threading.Event()
    done: list[int] = []
    refused = []
    real = threading.Thread.start

    def start(self: threading.Thread) -> None:
        if len(refused) < 5:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        real(self)

    def work(n: int) -> Callable[[], None]:
        release.wait(60)
        return functools.partial(done.append, n)

    for n in range(there_are):
        pool.submit(functools.partial(work, n))
    monkeypatch.setattr(threading.Thread, "start", start)
    for n in range(there_are, 5):
        pool.submit(functools.partial(work, n))
    await until(lambda: pool._threads == there_are + 2)
    release.set()
    await until(lambda: sorted(done) == [0, 1, 2, 3, 4])
    assert not pool.is_busy
    assert [record.message for record in caplog.records] == [
        "jobs wait until a thread can be started: can't start new thread"
    ]
    pool.close()


async def test_a_thread_survives_its_work(caplog: pytest.LogCaptureFixture) -> None:
    pool = Threads(asyncio.get_running_loop(), 1)
    done: list[int] = []

    def leave() -> Callable[[], None]:
        raise SystemExit(3)

    pool.submit(leave)
    pool.submit(lambda: functools.partial(done.append, 1))
    await until(lambda: done)
    assert not pool.is_busy
    assert "SystemExit: 3" in caplog.text
    pool.close()
