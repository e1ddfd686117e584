"""Several worker processes under a supervisor that restarts them: `pgdefer worker --processes`.

The supervisor knows no jobs and has no connection to the database. A pair of sockets, the channel,
connects it to each worker. There the worker sends its id and, each second, a sign of life. When the
supervisor is gone, the worker finds the other end closed, and stops.
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
from collections.abc import Callable, Sequence

from pgdefer._text import logger
from pgdefer.database.growing_delay import GrowingDelay

__all__ = ["Supervisor", "SupervisorChannel"]

log = logger("pgdefer.supervisor")

# How often a worker sends a sign of life, in seconds, and how many it may miss: as long as the
# database waits for a heartbeat by default, and no less, because the worker has to start first.
BEAT = 1.0
MISSES = 30
# How long a process that must end at once may take to report its jobs.
MARGIN = 10.0
# How many signs of life a process may send when its worker has ended: hooks may take 20 seconds.
STAYS = 30


class SupervisorChannel:
    """A worker's end. `replaces` is the dead worker in whose place this one was started.

    When the supervisor is gone, `on_close` is called; without it the process ends.
    """

    def __init__(self, descriptor: int, replaces: int | None = None) -> None:
        self.replaces = replaces
        #: What to do once the supervisor is gone; None: end the process.
        self.on_close: Callable[[], None] | None = None
        self.is_closed = False
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._socket.settimeout(BEAT)
        threading.Thread(target=self._watch, daemon=True).start()

    def tell(self, worker: int) -> None:
        """Send the worker's id."""
        self._say(b"%d\n" % worker)

    def tell_done(self) -> None:
        """Report that nothing is left of the worker: if it ends now, that is not an accident."""
        self._say(b"done\n")

    def _say(self, what: bytes) -> None:
        with contextlib.suppress(OSError):
            self._socket.sendall(what)

    def _watch(self) -> None:
        """Send signs of life until the other end is closed."""
        with contextlib.suppress(OSError):
            while True:
                # A supervisor that is stopped, as by Ctrl-Z, reads nothing, but is not gone.
                with contextlib.suppress(TimeoutError):
                    self._socket.sendall(b"\n")
                try:
                    if not self._socket.recv(1):
                        break
                except TimeoutError:
                    pass
        self.is_closed = True
        log.warning("the supervisor is gone")
        if self.on_close is not None:
            self.on_close()
        else:
            os.kill(os.getpid(), signal.SIGTERM)


class Supervisor:
    """Keeps `processes` of a command running until it is told to stop.

    A process that has ended its worker is replaced at once, unless `is_drain` is set: then it has
    found nothing to do. A process that fails, dies or sends no sign of life for 30 seconds
    (`dead_after`, if that is longer) is replaced after a delay, which grows from 0.1 to 5 seconds
    until a process has lived for 30. One that stays for 30 seconds after its worker's end is
    killed. If a process fails before it has registered, all are ended if none has ever registered,
    or if its exit code is in `fatal`. A signal that kills a process says nothing about its
    configuration, so at first the process is replaced, as often as there are `processes`.

    `command` starts a worker; the options of its channel are appended, then `arguments`.

    The workers get `shutdown_timeout`, too; a process that runs 10 seconds longer is killed.
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
        self._running: set[WorkerProcess] = set()
        self._has_registered = False
        self._spared = 0
        self._was_asked = False
        self._code = 0

    def run(self) -> int:
        """Run until SIGTERM, SIGINT or SIGHUP, passed on as SIGTERM; return the exit code.

        This is the exit code of the worker that ended them all, or the first of those that were
        told to end that is not 0; it is 1 for a worker that a signal has killed.
        """
        return asyncio.run(self._run())

    async def _run(self) -> int:
        self._stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as by nohup
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        loop.add_signal_handler(signal.SIGQUIT, self._stop_at_once)
        log.info("%d processes", self._processes)
        await asyncio.gather(*(self._keep() for _ in range(self._processes)))
        return self._code

    async def _keep(self) -> None:
        """Keep one process running."""
        delays = GrowingDelay()
        replaces: int | None = None
        while not self._stopping.is_set():
            try:
                process = WorkerProcess(self._command, replaces, self._arguments, self._misses)
            except OSError as error:
                log.error("no process could be started: %s", error)
            else:
                code = await self._watch(process)
                if code == 0 and self._is_drain:
                    return
                replaces = process.worker or replaces
                if process.beats > MISSES:
                    delays.reset()
                if code == 0:
                    continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delays.next())

    async def _watch(self, process: WorkerProcess) -> int:
        """Wait until a process has ended; end the others if its exit code requires that."""
        self._running.add(process)
        code = await process.wait()
        self._has_registered |= any(one.worker is not None for one in self._running)
        self._running.discard(process)
        if self._stopping.is_set() and code in (0, -signal.SIGTERM, -signal.SIGQUIT):
            return 0  # it had not begun, or was done
        if process.is_done and code in (0, -signal.SIGKILL):
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

    def _on_hangup(self) -> None:
        # Where a terminal closes, the kernel and a shell send it, and systemd also SIGTERM.
        if not self._stopping.is_set():
            self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        log.info("stopping, running processes: %d", len(self._running))
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


class WorkerProcess:
    """A worker's process, and the supervisor's end of its channel."""

    def __init__(
        self,
        command: Sequence[str],
        replaces: int | None,
        arguments: Sequence[str],
        misses: int,
    ) -> None:
        #: The worker's id, once it is known, and whether nothing is left of the worker.
        self.worker: int | None = None
        self.is_done = False
        #: How many seconds it has lived.
        self.beats = 0
        self._misses = misses
        self._missed = 0
        # For how many seconds it has stayed after the end of its worker.
        self._stayed = 0
        self._rest = b""
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self._socket, other = socket.socketpair()
        self._socket.setblocking(False)
        options = ["--supervisor-fd", str(other.fileno())]
        if replaces is not None:
            options += ["--replaces", str(replaces)]
        with other, contextlib.ExitStack() as unless_started:
            unless_started.callback(self._socket.close)
            # A session of its own, so that the terminal's keys reach only the supervisor.
            self._process = subprocess.Popen(
                [*command, *options, *arguments], pass_fds=[other.fileno()], start_new_session=True
            )
            unless_started.pop_all()
        self._loop.add_reader(self._socket, self._on_told)

    def __repr__(self) -> str:
        return f"process {self._process.pid}, worker {self.worker or '(not registered)'},"

    async def wait(self) -> int:
        """Wait until it has ended; return its exit code, negative for the signal that killed it."""
        try:
            while (code := self._process.poll()) is None:
                await asyncio.wait([self._ended], timeout=BEAT)
                # Counted, not by the clock, because this process may have been stopped as well.
                self.beats += 1
                self._missed += 1
                if self._missed > self._misses:
                    silence = self._misses * BEAT
                    log.error("%r has shown no life for %g seconds: killed", self, silence)
                    self.send(signal.SIGKILL)
                self._stayed = self._stayed + 1 if self.is_done else 0
                if self._stayed > STAYS:
                    log.error("%r has ended its worker and goes on: killed", self)
                    self.send(signal.SIGKILL)
                if self._ended.done():
                    await asyncio.to_thread(self._process.wait)
            self._on_told()
            return code
        finally:
            self._loop.remove_reader(self._socket)
            self._socket.close()

    def send(self, number: signal.Signals) -> None:
        """Send it a signal if it is still running."""
        self._process.send_signal(number)

    def _on_told(self) -> None:
        """Process its messages. Its end of the channel closes only when it ends."""
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
