"""The protocol of bench_peers.py, for drivers of systems in Python: peer_SYSTEM.py ACTION DSN OPTIONS.

A driver prints JSON, one object a line. `install` creates what the system needs. The other actions print
{"ready": true}, wait for a line of input, and begin:

produce   sends `jobs` jobs in calls of `size` (0: singly), `rate` a second (0: as fast as it can);
          prints when it began and ended, and its CPU time
work      runs a worker with a `setting` (default, best) whose handlers do what `kind` says (noop, sleep, cpu),
          until it is killed; prints when the first handler began, then {"ran"}: how many have begun so far; once
          none has for QUIET, {"waits"}: how long the latest had waited since they were sent, in seconds (to print
          these meanwhile would delay the handlers that it times)

Times are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

MILLISECOND = 0.001
TICK = 0.01
QUIET = 0.2
Args = dict[str, Any]


def say(**line: Any) -> None:
    """Print a line, also from a process whose output something else has taken."""
    os.write(1, (json.dumps(line) + "\n").encode())


class Ran:
    """What a worker process has run."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._waits: list[float | None] = []
        threading.Thread(target=self._tell, daemon=True).start()

    def _tell(self) -> None:
        said = ran = 0
        changed = time.monotonic()
        while True:
            time.sleep(TICK)
            if ran != (ran := len(self._waits)):
                changed = time.monotonic()
                say(pid=os.getpid(), ran=ran)
            elif said < ran and time.monotonic() - changed > QUIET:
                say(waits=[wait for wait in self._waits[said:ran] if wait is not None])
                said = ran

    def begun(self, at: float | None) -> None:
        """Note that a handler has begun."""
        now = time.monotonic()
        if not self._waits:
            say(first=now)
        self._waits.append(None if at is None else now - at)

    async def run(self, at: float | None = None) -> None:
        """Be a handler."""
        self.begun(at)
        if self.kind == "sleep":
            await asyncio.sleep(MILLISECOND)
        elif self.kind == "cpu":
            burn()

    def run_sync(self, at: float | None = None) -> None:
        self.begun(at)
        if self.kind == "sleep":
            time.sleep(MILLISECOND)
        elif self.kind == "cpu":
            burn()


def burn() -> None:
    """Use CPU time: by the wall clock, as the other languages do, whose clocks of CPU time are coarse."""
    end = time.perf_counter() + MILLISECOND
    while time.perf_counter() < end:
        pass


class Producer:
    """How a system takes jobs: one, and many in one call if it has that."""

    def __init__(
        self,
        one: Callable[[Args], Any],
        many: Callable[[Sequence[Args]], Any] | None = None,
    ) -> None:
        self.one, self.many = one, many

    async def send(self, jobs: Sequence[Args], *, single: bool) -> None:
        if single or self.many is None:
            for args in jobs:
                result = self.one(args)
                if inspect.isawaitable(result):
                    await result
        else:
            result = self.many(jobs)
            if inspect.isawaitable(result):
                await result

    async def produce(self, jobs: int, size: int, rate: float) -> None:
        begun, cpu = time.monotonic(), time.process_time()
        for first in range(0, jobs, size or 1):
            if rate:
                await asyncio.sleep(max(0.0, begun + first / rate - time.monotonic()))
            at = time.monotonic() if rate else None
            last = min(first + (size or 1), jobs)
            await self.send([{"n": n, "at": at} for n in range(first, last)], single=not size)
        say(begun=begun, ended=time.monotonic(), cpu=time.process_time() - cpu)


def ready() -> None:
    """Wait until all others are ready as well; from then on, end with the input."""
    say(ready=True)
    if not sys.stdin.readline():
        os._exit(1)
    threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()


def drive(
    install: Callable[[str], Awaitable[None] | None],
    producer: Callable[[str], Awaitable[Producer]],
    work: Callable[[str, Ran, str], Awaitable[None] | None],
) -> None:
    """Be a driver."""
    action, dsn, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])

    async def produce() -> None:
        made = await producer(dsn)
        ready()
        await made.produce(**options)

    if action == "install":
        done = install(dsn)
        if done is not None:
            asyncio.run(wait(done))
    elif action == "produce":
        asyncio.run(produce())
    else:
        ready()
        running = work(dsn, Ran(options["kind"]), options["setting"])
        if running is not None:
            asyncio.run(wait(running))
    os._exit(0)  # what systems leave running needs no end


async def wait(what: Awaitable[None]) -> None:
    await what
