"""Reports how jobs ended: to the log, and to the hooks of the application."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pgdefer._text import escaped, logger
from pgdefer.tasks.context import JobContext, RetryLater
from pgdefer.tasks.hooks import JobEvent
from pgdefer.worker import outcomes
from pgdefer.worker.claim import Claim

__all__ = ["Reporter"]

# Separate from the worker's own log, because it gets a record for each job.
log = logger("pgdefer.job")

# How long hooks may continue when the worker ends, in seconds.
LAST = 10.0


class Reporter:
    """Reports ends of jobs. Called in the worker's loop; hooks that block run in threads."""

    def __init__(
        self,
        hooks: Mapping[str, Sequence[Callable[[Any], Any]]],
        meters: Sequence[Callable[[JobContext, str, float], object]] = (),
    ) -> None:
        self._hooks = hooks
        self._meters = meters
        self._running: set[asyncio.Task[None]] = set()

    def ended(self, claim: Claim, outcome: str | None) -> None:
        """Measure a run, and report it if it succeeded; None: its transaction wrote the outcome."""
        is_logged = log.isEnabledFor(logging.INFO)
        if not self._meters and not is_logged:
            return
        job = claim.job
        has_yielded = outcome is None and isinstance(job.result, RetryLater)
        kind = "yielded" if has_yielded else outcomes.kind(outcome)
        if claim.runner is not None:
            self._measure(job, kind, claim.duration)
        if is_logged and kind == "succeeded":
            said = f"{job!r} succeeded in {claim.duration:.3f} s"
            log.info("%s", said, extra=_fields(job, kind, kind, claim.duration))

    def _measure(self, job: JobContext, kind: str, seconds: float) -> None:
        for meter in self._meters:
            try:
                meter(job, kind, seconds)
            except Exception:
                log.exception("the meter %r failed", meter)

    def taken(self, claim: Claim, outcome: str, state: str) -> None:
        """Report how the database has settled an outcome other than a success."""
        kind = outcomes.kind(outcome)
        said = json.loads(outcome)
        if kind not in ("failed", "timed_out", "crashed"):
            return
        job, error = claim.job, str(said.get("error"))
        is_final = state == "failed"
        level = logging.ERROR if is_final else logging.WARNING
        self._log(level, claim, kind, state, said)
        event = JobEvent(job, kind, state, error, job._error, claim.duration)
        if kind == "crashed":
            self.fire("crash", event)
        if is_final:
            self.fire("exhausted", event)
        elif state != "cancelled":
            self.fire("retry", event)

    def _log(
        self, level: int, claim: Claim, kind: str, state: str, said: Mapping[str, Any]
    ) -> None:
        if not log.isEnabledFor(level):
            return
        job, error = claim.job, claim.job._error
        first = (str(said.get("error")).splitlines() or [""])[0]
        text = outcomes.headline(error) if error is not None else escaped(first)
        verb = "crashed" if kind == "crashed" else "failed"
        again = "" if state in ("failed", "cancelled") else " (it will be tried again)"
        has_trace = error is not None and error.__traceback__ is not None
        record = log.makeRecord(
            log.name,
            level,
            __file__,
            0,
            "%r %s: %s%s",
            (job, verb, text, again),
            (type(error), error, error.__traceback__) if error is not None and has_trace else None,
            extra=_fields(job, kind, state, claim.duration),
        )
        told = (said.get("details") or {}).get("traceback")
        if error is None and told:
            record.exc_text = "\n".join(f"  {escaped(line)}" for line in told.splitlines())
        log.handle(record)

    # Hooks

    def fire(self, event: str, about: Any) -> None:
        """Call the hooks of an event in the background."""
        for hook in self._hooks.get(event, ()):
            task = asyncio.get_running_loop().create_task(self._call(event, hook, about))
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def call(self, event: str, about: Any) -> None:
        """Call the hooks of an event, one after another, and wait for them."""
        for hook in self._hooks.get(event, ()):
            await self._call(event, hook, about)

    async def _call(self, event: str, hook: Callable[[Any], Any], about: Any) -> None:
        try:
            if inspect.iscoroutinefunction(hook):
                await hook(about)
            else:
                await asyncio.to_thread(hook, about)
        except Exception:
            log.exception("the hook %r of %s failed", hook, event)

    async def close(self) -> None:
        """Wait for running hooks."""
        if self._running:
            await asyncio.wait(self._running, timeout=LAST)


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
