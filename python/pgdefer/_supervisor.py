"""Several worker processes under one that starts them anew: `pgdefer worker --processes`.

The supervisor knows no jobs and has no connection to the database. What binds a worker to it is a
pair of sockets, the tether: the worker says its id there and, each second, that it lives; when the
supervisor is gone the worker finds the other end closed, and stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ._link import Backoff
from ._text import logger

if TYPE_CHECKING:
    from ._worker import Worker

__all__ = ["Supervisor", "Tether"]

log = logger("pgdefer.supervisor")

# How often a worker says that it lives, in seconds, and how often it may miss that: as long as the
# database waits for a heartbeat unless told otherwise, and not less, as it has yet to start.
BEAT = 1.0
MISSES = 30
# How long a process that was told to end at once may take to report that.
MARGIN = 10.0


class Tether:
    """A worker's end. `replaces` is the worker that this one stands in for: its process died.

    When the supervisor is gone `worker` is told to stop, or without one the process ended.
    """

    def __init__(self, descriptor: int, replaces: int | None = None) -> None:
        self.replaces = replaces
        self.worker: Worker | None = None
        self.is_loose = False
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._socket.settimeout(BEAT)
        threading.Thread(target=self._watch, daemon=True).start()

    def tell(self, worker: int) -> None:
        """Say that this process is that worker."""
        self._say(b"%d\n" % worker)

    def tell_done(self) -> None:
        """Say that nothing is left of the worker: to end now is no accident."""
        self._say(b"done\n")

    def _say(self, what: bytes) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendall(what)

    def _watch(self) -> None:
        """Say that this process lives, until the other end is closed."""
        with contextlib.suppress(OSError):
            while True:
                # A supervisor that is stopped, as by Ctrl-Z, reads nothing: that is no end.
                with contextlib.suppress(TimeoutError):
                    self._socket.sendall(b"\n")
                try:
                    if not self._socket.recv(1):
                        break
                except TimeoutError:
                    pass
        self.is_loose = True
        log.warning("the supervisor is gone")
        if self.worker is not None:
            self.worker.stop()
        else:
            os.kill(os.getpid(), signal.SIGTERM)


class Supervisor:
    """Keeps `processes` of a command running until it is told to stop.

    One that has ended its worker is followed by another at once, unless `is_drain`: then it has
    found nothing to do. One that fails, dies or shows no life for 30 seconds (`dead_after`, where
    that is longer) is followed after a delay, which grows from 0.1 to 5 seconds until one has lived
    for 30. One that fails before it has registered ends them all if none ever has, or if its exit
    code is in `fatal`; but where a signal has killed it, which says nothing of how it is set up,
    each is tried once more.

    `command` is a worker's command, and `arguments` what follows the options of its tether.

    `shutdown_timeout` is what the workers know, too; one that runs 10 seconds longer is killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        arguments: Sequence[str],
        processes: int,
        *,
        is_drain: bool = False,
        shutdown_timeout: float | None = None,
        dead_after: float = 0.0,
        fatal: Sequence[int] = (),
    ) -> None:
        self._command = command
        self._arguments = arguments
        self._processes = processes
        self._is_drain = is_drain
        self._shutdown_timeout = shutdown_timeout
        self._misses = max(MISSES, math.ceil(dead_after / BEAT))
        self._fatal = frozenset(fatal)
        self._running: set[_Process] = set()
        self._has_registered = False
        self._spared = 0
        self._was_asked = False
        self._code = 0

    def run(self) -> int:
        """Run until SIGTERM or SIGINT, which the workers are sent too; return the exit code.

        It is that of the worker that ended them all, or the first that is not 0 of those that were
        told to end; 1 for one that a signal has killed.
        """
        return asyncio.run(self._run())

    async def _run(self) -> int:
        self._stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        loop.add_signal_handler(signal.SIGQUIT, self._stop_at_once)
        log.info("%d processes", self._processes)
        await asyncio.gather(*(self._keep() for _ in range(self._processes)))
        return self._code

    async def _keep(self) -> None:
        """Keep one process running."""
        backoff = Backoff()
        replaces: int | None = None
        while not self._stopping.is_set():
            try:
                process = _Process(self._command, replaces, self._arguments, self._misses)
            except OSError as error:
                log.error("no process could be started: %s", error)
            else:
                code = await self._watch(process)
                if code == 0 and self._is_drain:
                    return
                replaces = process.worker or replaces
                if process.beats > MISSES:
                    backoff.reset()
                if code == 0:
                    continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), backoff.delay())

    async def _watch(self, process: _Process) -> int:
        """Wait until a process has ended; end the others where its exit code says so."""
        self._running.add(process)
        code = await process.wait()
        self._has_registered |= any(one.worker is not None for one in self._running)
        self._running.discard(process)
        if self._stopping.is_set() and code in (0, -signal.SIGTERM, -signal.SIGQUIT):
            return 0  # it had not begun, or was through
        if code == 0 and process.is_done:
            return 0
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        log.error("%r ended with %s", process, how)
        if self._stopping.is_set():
            self._code = self._code or max(code, 1)
        elif process.worker is None and (code in self._fatal or not self._has_registered):
            if code < 0 and self._spared < self._processes:
                self._spared += 1
                return code
            self._code = max(code, 1)
            self._stop()
        return code or 1

    def _on_signal(self) -> None:
        if self._was_asked:
            self._stop_at_once()
        self._was_asked = True
        if not self._stopping.is_set():
            self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        log.info("stopping %d processes", len(self._running))
        self._send(signal.SIGTERM)
        if self._shutdown_timeout is not None:
            self._kill_after(self._shutdown_timeout + MARGIN)

    def _stop_at_once(self) -> None:
        self._stopping.set()
        self._send(signal.SIGQUIT)
        self._kill_after(MARGIN)

    def _kill_after(self, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._send, signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for process in self._running:
            process.send(number)


class _Process:
    """A worker's process, and the supervisor's end of its tether."""

    def __init__(
        self,
        command: Sequence[str],
        replaces: int | None,
        arguments: Sequence[str],
        misses: int,
    ) -> None:
        #: The worker's id, once it has told it, and whether it has said that nothing is left of it.
        self.worker: int | None = None
        self.is_done = False
        #: How many seconds it has lived.
        self.beats = 0
        self._misses = misses
        self._missed = 0
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._socket, other = socket.socketpair()
        self._socket.setblocking(False)
        options = ["--tether", str(other.fileno())]
        if replaces is not None:
            options += ["--replaces", str(replaces)]
        with other, contextlib.ExitStack() as unless_started:
            unless_started.callback(self._socket.close)
            # A session of its own: the keys of a terminal reach the supervisor alone.
            self._process = subprocess.Popen(
                [*command, *options, *arguments], pass_fds=[other.fileno()], start_new_session=True
            )
            unless_started.pop_all()
        self._loop.add_reader(self._socket, self._on_told)

    def __repr__(self) -> str:
        return f"process {self._process.pid}, worker {self.worker or '(not registered)'},"

    async def wait(self) -> int:
        """Wait until it has ended; return its exit code, below 0 the signal that killed it."""
        try:
            while (code := self._process.poll()) is None:
                await asyncio.wait([self._ended], timeout=BEAT)
                # Counted, not by the clock: this process may have been stopped, too.
                self.beats += 1
                self._missed += 1
                if self._missed > self._misses:
                    silence = self._misses * BEAT
                    log.error("%r has shown no life for %g seconds: killed", self, silence)
                    self.send(signal.SIGKILL)
                if self._ended.done():
                    await asyncio.to_thread(self._process.wait)
            self._on_told()
            return code
        finally:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it still runs."""
        self._process.send_signal(number)

    def _on_told(self) -> None:
        """Take in what it has said. It closes its end only by ending."""
        try:
            said = self._socket.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._loop.remove_reader(self._socket)
            if not self._ended.done():
                self._ended.set_result(None)
            return
        self._missed = 0
        *lines, self._rest = (self._rest + said).split(b"\n")
        for line in filter(None, lines):
            if line == b"done":
                self.is_done = True
            else:
                self.worker, self.is_done = int(line), False
