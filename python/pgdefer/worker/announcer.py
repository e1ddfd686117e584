"""Announces how jobs ended: to the log, and to the meters and hooks of the application."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pgdefer._text import escaped, logger, traceback_of
from pgdefer.tasks.context import JobContext
from pgdefer.tasks.hooks import JobEvent
from pgdefer.worker import outcomes
from pgdefer.worker.claim import Claim
from pgdefer.worker.state import GRACE
from pgdefer.worker.threads import Threads

__all__ = ["Announcer"]

# Separate from the worker's own log, because it gets a record for each job.
log = logger("pgdefer.job")

# How long hooks may continue when the worker ends, in seconds.
HOOK_SECONDS = 10.0
# How many hooks that are not coroutines run at a time.
MOST = 32


class Announcer:
    """Announces ends of jobs. Called in the worker's loop; hooks that block run in threads."""

    def __init__(
        self,
        hooks: Mapping[str, Sequence[Callable[[Any], Any]]],
        meters: Sequence[Callable[[JobContext, str, float], object]] = (),
    ) -> None:
        self._hooks = hooks
        self._meters = meters
        self._running: set[asyncio.Task[None]] = set()
        # The hooks that `call` has yet to call, by event, and the functions that run in threads.
        self._left: dict[str, Iterator[Callable[[Any], Any]]] = {}
        self._in_threads: set[asyncio.Future[tuple[Any, BaseException | None]]] = set()
        self._threads: Threads | None = None

    @property
    def announces_successes(self) -> bool:
        """Whether a meter or the log needs to hear of successes."""
        return bool(self._meters) or log.isEnabledFor(logging.INFO)

    def taken(self, claim: Claim, outcome: str, state: str) -> None:
        """Announce an outcome that the database has accepted, and the job's state afterwards."""
        if outcomes.is_success(outcome):
            self.settled(claim, outcomes.SUCCEEDED)
            return
        said = json.loads(outcome)
        is_aborted = state == "cancelled" and claim.job._abort_reason is not None
        kind = "aborted" if is_aborted else outcomes.kind(said)
        told = (said.get("details") or {}).get("traceback")
        error = str(said.get("error") or said.get("message") or "")
        self.settled(claim, outcomes.Settled(kind, state, error), told)

    def settled(self, claim: Claim, end: outcomes.Settled, trace: str | None = None) -> None:
        """Announce the end of a claim; `trace` is the traceback, if the exception is not here."""
        job, kind, state = claim.job, end.kind, end.state
        if claim.runner is not None:
            self._measure(job, kind, claim.duration)
        if kind == "succeeded":
            if log.isEnabledFor(logging.INFO):
                said = f"{job!r} succeeded in {claim.duration:.3f} s"
                log.info("%s", said, extra=_fields(job, kind, state, claim.duration))
            return
        is_final = state == "failed"
        if kind not in ("failed", "timed_out", "crashed") and not is_final:
            return
        self._log(logging.ERROR if is_final else logging.WARNING, claim, end, trace)
        event = JobEvent(job, kind, state, end.error, job._error, claim.duration)
        if kind == "crashed":
            self.fire("crash", event)
        if is_final:
            self.fire("exhausted", event)
        elif state != "cancelled":
            self.fire("retry", event)

    def _measure(self, job: JobContext, kind: str, seconds: float) -> None:
        for meter in self._meters:
            try:
                meter(job, kind, seconds)
            except Exception:
                log.exception("the meter %r failed", meter)

    def _log(self, level: int, claim: Claim, end: outcomes.Settled, trace: str | None) -> None:
        if not log.isEnabledFor(level):
            return
        job, error = claim.job, claim.job._error
        first = (end.error.splitlines() or [""])[0]
        text = outcomes.headline(error) if error is not None else escaped(first)
        verb = "crashed" if end.kind == "crashed" else "failed"
        again = "" if end.state in ("failed", "cancelled") else " (it will be tried again)"
        told = None if error is None else traceback_of(error)
        record = log.makeRecord(
            log.name,
            level,
            __file__,
            0,
            "%r %s: %s%s",
            (job, verb, text, again),
            None if error is None or told is None else (type(error), error, told),
            extra=_fields(job, end.kind, end.state, claim.duration),
        )
        if error is None and trace:
            record.exc_text = "\n".join(f"  {escaped(line)}" for line in trace.splitlines())
        log.handle(record)

    # Hooks

    def fire(self, event: str, about: Any) -> None:
        """Call the hooks of an event in the background."""
        for hook in self._hooks.get(event, ()):
            task = asyncio.get_running_loop().create_task(self._call(event, hook, about))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def call(self, event: str, about: Any, limit: asyncio.Timeout | None = None) -> None:
        """Call the hooks of an event one after another, for at most `HOOK_SECONDS`, or a limit.

        A repeated call, after a cancelled one, calls only the hooks that are left.
        """
        left = self._left.setdefault(event, iter(self._hooks.get(event, ())))
        try:
            async with limit or asyncio.timeout(HOOK_SECONDS):
                for hook in left:
                    await self._call_in_time(event, hook, about)
        except TimeoutError:
            log.warning("the worker no longer waits for the hook %r of %s", hook, event)
            self._in_threads.clear()

    async def _call_in_time(self, event: str, hook: Callable[[Any], Any], about: Any) -> None:
        """Call a hook. If this is cancelled, cancel the hook, and wait for it at most for GRACE."""
        calling = asyncio.get_running_loop().create_task(self._call(event, hook, about))
        try:
            await asyncio.wait([calling])
        except asyncio.CancelledError:
            calling.cancel()
            await asyncio.wait([calling], timeout=GRACE)
            raise
        if not calling.cancelled():  # by the hook itself
            calling.result()

    async def _call(self, event: str, hook: Callable[[Any], Any], about: Any) -> None:
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        try:
            if inspect.iscoroutinefunction(hook):
                await hook(about)
                return
            # A function goes on when the wait for it is cancelled: `close` waits for it.
            result, error = await asyncio.shield(self._in_thread(hook, about))
            if error is not None:
                raise error
            if inspect.isawaitable(result):
                await result
        except (GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            is_cancelled = task.cancelling() > cancels  # and not by the hook itself
            if not (is_cancelled and isinstance(error, asyncio.CancelledError)):
                log.exception("the hook %r of %s failed", hook, event)
            if is_cancelled:
                raise asyncio.CancelledError from error

    def _in_thread(
        self, hook: Callable[[Any], Any], about: Any
    ) -> asyncio.Future[tuple[Any, BaseException | None]]:
        """Call a hook in a thread. Return a future of its result and its error."""
        loop = asyncio.get_running_loop()
        if self._threads is None:
            self._threads = Threads(loop, MOST)
        ended: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()
        self._in_threads.add(ended)
        ended.add_done_callback(self._in_threads.discard)
        context = contextvars.copy_context()

        def tell(end: tuple[Any, BaseException | None]) -> None:
            if not ended.done():
                ended.set_result(end)

        def work() -> Callable[[], None]:
            try:
                return functools.partial(tell, (context.run(hook, about), None))
            except BaseException as error:
                return functools.partial(tell, (None, error))

        self._threads.submit(work)
        return ended

    async def close(self) -> None:
        """Wait for running hooks."""
        if running := self._running | self._in_threads:
            await asyncio.wait(running, timeout=HOOK_SECONDS)
        if self._threads is not None:
            self._threads.close()
            self._threads = None


def _fields(job: JobContext, outcome: str, state: str, duration: float) -> dict[str, Any]:
    """Return the fields of a record about a job."""
    return {
        "id": job.id,
        "task": job.task,
        "queue": job.queue,
        "attempt": job.attempt,
        "outcome": outcome,
        "state": state,
        "duration": round(duration, 6),
    }
