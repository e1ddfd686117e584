"""Running a worker until a signal of the system ends it.

Tests: integration/test_worker_stops.py, integration/test_leftovers.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import queue
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from pgdefer._text import logger
from pgdefer.database.own_threads import has_running_loop, in_own_thread
from pgdefer.worker.state import GRACE

__all__ = ["not_ignored", "run_until_signal", "signals"]

log = logger("pgdefer.worker")

# The signals that stop a worker. SIGHUP: its terminal closes. It may be ignored, as by nohup.
HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP)


class _Run(Protocol):
    def __call__(self, *, handle_signals: bool) -> Coroutine[Any, Any, None]: ...


def run_until_signal(run: _Run, on_left: Callable[[int], object]) -> None:
    """Run a worker, which turns signals into stops, in an event loop of its own.

    asyncio.run would wait for every task and thread that handlers have left, perhaps forever. If
    some do not end when told to, `on_left` is called with their number, and the loop stays open.
    Raises RuntimeError within an event loop.
    """
    if has_running_loop():
        raise RuntimeError("an event loop runs here: await run_worker_async(...) or run_async()")
    runner = asyncio.Runner()
    # The default executor of the loop, which does not tell whether it is busy.
    threads = ThreadPoolExecutor(thread_name_prefix="asyncio")
    workers: list[asyncio.Task[Any] | None] = []

    async def work() -> None:
        asyncio.get_running_loop().set_default_executor(threads)
        workers.append(asyncio.current_task())
        await run(handle_signals=True)

    try:
        _run(runner, work(), workers)
    finally:
        if left := runner.run(_end(filter(None, workers), threads)):
            on_left(left)
        else:
            runner.close()


def _run(
    runner: asyncio.Runner, work: Coroutine[Any, Any, None], workers: list[asyncio.Task[Any] | None]
) -> None:
    """Run a worker to its end, even if a task that a handler has started interrupts the loop."""
    loop = runner.get_loop()
    run: Callable[[], None] = functools.partial(runner.run, work)
    while True:
        try:
            return run()
        except (SystemExit, KeyboardInterrupt) as error:
            worker = workers[0] if workers else None
            # Where the loop handles signals, none of them raises anything.
            if worker is None or worker.done() or loop not in _handling:
                raise
            said = "a task that a handler has started raised %s, which ends only that task"
            log.error(said, type(error).__name__, exc_info=error)
            run = functools.partial(loop.run_until_complete, worker)


async def _end(workers: Iterator[asyncio.Task[Any]], threads: ThreadPoolExecutor) -> int:
    """End all tasks and threads; return how many go on. A worker has limits of its own."""
    with signals(_nothing, _nothing):
        for worker in workers:
            if not worker.done():  # a handler has interrupted the loop
                _cancel_others()
                await asyncio.wait([worker])
        left = await _wait(_cancel_others())
        ends = [in_own_thread(threads.shutdown), asyncio.get_running_loop().shutdown_asyncgens()]
        return left + await _wait({asyncio.ensure_future(end) for end in ends})


def _cancel_others() -> set[asyncio.Task[Any]]:
    """Cancel the tasks beside the current one, and return them."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    return others


async def _wait(tasks: set[asyncio.Task[Any]]) -> int:
    """Let tasks end; return how many do not in time."""
    return len((await asyncio.wait(tasks, timeout=GRACE))[1]) if tasks else 0


def _nothing() -> None:
    """Ignore a signal: the end has a limit."""


class _Watch:
    """Calls a function, in a thread, if the loop has not heard of a signal after a second."""

    def __init__(self, on_deaf: Callable[[], None]) -> None:
        self._on_deaf = on_deaf
        # The numbers of signals that were told, and heard of.
        self._told = self._heard = 0
        # A signal's handler must start no thread and take no lock: it may interrupt what holds one.
        self._to_check: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._has_ended = threading.Event()
        if on_deaf is not _nothing:
            threading.Thread(target=self._check, name="pgdefer-signals", daemon=True).start()

    def tell(self) -> None:
        """Note that a signal has come. Called where the signal interrupts the main thread."""
        self._told += 1
        self._to_check.put(self._told)

    def hear(self) -> bool:
        """Note that the loop has heard of all signals; return whether it had heard none."""
        is_first = self._heard == 0
        self._heard = self._told
        return is_first

    def end(self) -> None:
        """Stop watching."""
        self._has_ended.set()
        self._to_check.put(0)

    def _check(self) -> None:
        while number := self._to_check.get():
            if not self._has_ended.wait(GRACE) and self._heard < number:
                self._on_deaf()


@contextlib.contextmanager
def signals(
    on_stop: Callable[[], None],
    on_quit: Callable[[], None],
    on_any: Callable[[], None] = _nothing,
    on_deaf: Callable[[], None] = _nothing,
) -> Iterator[None]:
    """Call `on_stop` at SIGTERM, SIGINT and SIGHUP, and `on_quit` at SIGQUIT.

    Outside of the main thread, do nothing: only that can handle signals. SIGHUP counts only as the
    first signal, and the next SIGTERM or SIGINT does not count as a second one: when a terminal
    closes, the kernel, a shell and systemd send them. `on_any` is called first and at once, even
    while a handler blocks the loop. `on_deaf` is called in a thread if the loop has not heard of a
    signal after a second. At the end the program's own handlers are put back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {
        number: on_quit if number == signal.SIGQUIT else on_stop for number in not_ignored()
    }
    loop = asyncio.get_running_loop()
    watch = _Watch(on_deaf)

    def tell(*_: object) -> None:
        on_any()
        watch.tell()

    has_hung_up = False  # and no other signal has come

    def hear(number: signal.Signals, handler: Callable[[], None]) -> None:
        nonlocal has_hung_up
        is_first, is_hangup = watch.hear(), number == signal.SIGHUP
        is_repeat = is_hangup or (has_hung_up and handler is on_stop)
        has_hung_up = is_hangup and (is_first or has_hung_up)
        if is_first or not is_repeat:
            handler()

    before: dict[int, Any] = {}
    try:
        for number, handler in handlers.items():
            own = signal.getsignal(number)
            if not loop.remove_signal_handler(number):  # what the loop calls can't be put back
                before[number] = own
            loop.add_signal_handler(number, hear, number, handler)
            # In place of asyncio's own, which does nothing: the loop hears of signals by its pipe.
            signal.signal(number, tell)
            signal.siginterrupt(number, False)
        _handling.append(loop)
        yield
    finally:
        watch.end()
        if loop in _handling:  # not in a forked child
            _handling.remove(loop)
        for number in handlers:
            loop.remove_signal_handler(number)
            if before.get(number) is not None:  # nor what Python can't name
                signal.signal(number, before[number])


def not_ignored() -> list[signal.Signals]:
    """Return the signals to handle: SIGHUP only if this program does not ignore it."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [number for number in HANDLED if number != signal.SIGHUP or not is_ignored]


# A process that a handler forks, as multiprocessing does, has the loop's pipe for signals: one that
# is sent to it, as by Process.terminate(), would be the worker's. So it gets back Python's own
# handlers. Until it has them, the thread that forks blocks these signals.

# The loops that handle signals; and what the threads that fork had blocked before.
_handling: list[asyncio.AbstractEventLoop] = []
_forking = threading.local()


def _block() -> None:
    if _handling:
        _forking.blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)


def _unblock() -> None:
    blocked = vars(_forking).pop("blocked", None)
    if blocked is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _in_child() -> None:
    if _handling:
        _handling.clear()
        signal.set_wakeup_fd(-1)
        for number in not_ignored():
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_in_child)
