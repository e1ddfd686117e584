"""Prometheus: metrics of handlers and queues, served by a worker's `http` option.

Call `instrument(app)` after `App(...)`; the extra is `pgdefer[prometheus]`.

Tests: integration/test_telemetry.py.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future

import prometheus_client
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pgdefer._text import logger
from pgdefer.app import App
from pgdefer.database import sql
from pgdefer.database.execute import execute
from pgdefer.database.source import PsycopgConnection
from pgdefer.errors import describe
from pgdefer.tasks.context import JobContext
from pgdefer.tasks.hooks import JobEvent

__all__ = ["QueueCollector", "instrument"]

log = logger("pgdefer.worker")

LACKING = "the metrics lack figures from the database: %s"
# How long a scrape waits for the database: it has more to tell than these figures.
TIMEOUT = 5.0  # s
# The time limit of each statement there, so that what nobody waits for ends.
STATEMENT_TIMEOUT = "3s"
STATES = (
    "scheduled",
    "waiting",
    "upstream_failed",
    "blocked",
    "ready",
    "running",
    "held",
    "failed",
)


class QueueCollector(Collector):
    """At each scrape, reads from the database how many jobs there are, by queue, task and state.

    Also how much memory the workers use, by id and name.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._question: Future[list[Metric]] | None = None

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that the database is not read before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return the present figures. An error is logged, and figures are missing."""
        try:
            yield from self._asked().result(TIMEOUT)
        except TimeoutError:
            log.warning(LACKING, f"no answer within {TIMEOUT:g} s")
        except RuntimeError as error:  # no thread can be started
            log.warning(LACKING, describe(error))

    def _asked(self) -> Future[list[Metric]]:
        """Return the question to the database that is under way, which scrapes share, or begin one.

        In a thread of its own: a connection may take long, and a stopped server never answers.
        """
        with self._lock:
            if self._question is None or self._question.done():
                question: Future[list[Metric]] = Future()
                threading.Thread(target=self._ask, args=[question], daemon=True).start()
                self._question = question
            return self._question

    def _ask(self, question: Future[list[Metric]]) -> None:
        found: list[Metric] = []
        try:
            with self._app.client.transaction(callers=False) as connection:
                execute(connection, sql.SET_STATEMENT_TIMEOUT, {"timeout": STATEMENT_TIMEOUT})
                found += self._jobs(connection)
                found += self._memory(connection)
        except Exception as error:
            log.warning(LACKING, describe(error))
        finally:
            question.set_result(found)

    def _jobs(self, connection: PsycopgConnection) -> Iterator[Metric]:
        jobs = GaugeMetricFamily("pgdefer_jobs", "Jobs.", labels=["queue", "task", "state"])
        oldest = GaugeMetricFamily(
            "pgdefer_oldest_ready_seconds",
            "How long the oldest ready job has been due.",
            labels=["queue", "task"],
        )
        for row in self._app.stats(connection=connection):
            for state in STATES:
                jobs.add_metric([row.queue, row.task, state], getattr(row, state))
            if row.oldest_ready_for is not None:
                oldest.add_metric([row.queue, row.task], row.oldest_ready_for.total_seconds())
        yield jobs
        yield oldest

    def _memory(self, connection: PsycopgConnection) -> Iterator[Metric]:
        memory = GaugeMetricFamily(
            "pgdefer_worker_memory_bytes",
            "Resident bytes of a live worker's processes.",
            labels=["worker", "name"],
        )
        for worker in self._app.list_workers(connection=connection):
            if worker.is_alive and worker.memory is not None:
                memory.add_metric([str(worker.id), worker.name], worker.memory)
        yield memory


def instrument(
    app: App,
    *,
    registry: prometheus_client.CollectorRegistry = prometheus_client.REGISTRY,
    queues: bool = False,
) -> None:
    """Measure an App's handlers; with `queues`, also its queues, which reads the database."""
    duration = prometheus_client.Histogram(
        "pgdefer_run_seconds",
        "How long handlers ran.",
        ["task", "queue", "outcome"],
        registry=registry,
    )
    ended = prometheus_client.Counter(
        "pgdefer_failures",
        "Failures, by what became of the job.",
        ["task", "queue", "state"],
        registry=registry,
    )

    # By task, queue and outcome: to look them up takes as long as to measure.
    bound: dict[tuple[str, str, str], prometheus_client.Histogram] = {}

    def observe(job: JobContext, outcome: str, seconds: float) -> None:
        key = (job.task, job.queue, outcome)
        found = bound.get(key)
        if found is None:
            found = bound[key] = duration.labels(*key)
        found.observe(seconds)

    async def count(event: JobEvent) -> None:
        state = "failed" if event.state == "failed" else "retried"
        ended.labels(event.job.task, event.job.queue, state).inc()

    app.meters.append(observe)
    app.on("exhausted")(count)
    app.on("retry")(count)
    if queues:
        registry.register(QueueCollector(app))
    app.metrics = lambda: (
        prometheus_client.CONTENT_TYPE_LATEST,
        prometheus_client.generate_latest(registry),
    )
