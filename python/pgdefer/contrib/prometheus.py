"""Prometheus: metrics of handlers and queues, served by a worker's `http` option.

Call `instrument(app)` after `App(...)`; the extra is `pgdefer[prometheus]`.

Tests: integration/test_telemetry.py, integration/test_many_databases.py.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future

import prometheus_client
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pgdefer._text import database_in_logs, logger
from pgdefer.app import App
from pgdefer.contrib._attach import claim
from pgdefer.database import sql
from pgdefer.database.execute import execute
from pgdefer.database.execute_async import execute_async
from pgdefer.errors import describe
from pgdefer.tasks.context import JobContext
from pgdefer.tasks.hooks import JobEvent
from pgdefer.tasks.infos import TaskStats, WorkerInfo
from pgdefer.worker.turnstile import Turnstile

__all__ = ["QueueCollector", "instrument"]

log = logger("pgdefer.worker")

LACKING = "the metrics lack figures from the database: %s"
LATE = "no answer within {:g} s"
# How long a scrape waits for the database: it also has figures of the process to return.
TIMEOUT = 5.0  # s
# How much of that a scrape waits for the slowest of many databases.
PART = 0.8
# The time limit of each statement in the database, so that abandoned ones end.
STATEMENT_TIMEOUT = "3s"
# How many of many databases are asked at a time.
MOST = 20
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

_Answer = tuple[list[TaskStats], list[WorkerInfo]]


class QueueCollector(Collector):
    """At each scrape, reads from the database how many jobs there are, by queue, task and state.

    Also how much memory the workers use, by id and name. In a worker of many databases it asks
    those that are served, and the label `database` has their names.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._question: Future[list[Metric]] | None = None

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that the database is not read before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return the present figures. After an error, which is logged, some are missing."""
        try:
            yield from self._asked().result(TIMEOUT)
        except TimeoutError:
            log.warning(LACKING, LATE.format(TIMEOUT))
        except RuntimeError as error:  # no thread can be started
            log.warning(LACKING, describe(error))

    def _asked(self) -> Future[list[Metric]]:
        """Return the question to the database that is under way, or begin one. Scrapes share it.

        It is asked in a thread of its own: connecting may take long, and a stopped server never
        answers.
        """
        with self._lock:
            if self._question is None or self._question.done():
                question: Future[list[Metric]] = Future()
                threading.Thread(target=self._ask, args=[question], daemon=True).start()
                self._question = question
            return self._question

    def _ask(self, question: Future[list[Metric]]) -> None:
        databases = self._app.databases
        try:
            if databases is not None:
                asyncio.run(_ask_many(databases(), question))
            else:
                question.set_result(_metrics({(): _read(self._app)}))
        except Exception as error:
            log.warning(LACKING, describe(error))
        finally:
            if not question.done():
                question.set_result([])


def _read(app: App) -> _Answer:
    with app.client.transaction(callers=False) as connection:
        execute(connection, sql.SET_STATEMENT_TIMEOUT, {"timeout": STATEMENT_TIMEOUT})
        return app.stats(connection=connection), app.list_workers(connection=connection)


async def _read_async(app: App) -> _Answer:
    async with app.client.transaction_async(callers=False) as connection:
        await execute_async(connection, sql.SET_STATEMENT_TIMEOUT, {"timeout": STATEMENT_TIMEOUT})
        stats = await app.stats_async(connection=connection)
        return stats, await app.list_workers_async(connection=connection)


async def _ask_many(apps: Mapping[str, App], question: Future[list[Metric]]) -> None:
    """Ask databases in an event loop of its own, so that late ones can be given up."""
    answers: dict[tuple[str, ...], _Answer] = {}
    turnstile = Turnstile(MOST, MOST)
    end = PART * TIMEOUT

    async def ask(name: str, app: App) -> None:
        database_in_logs.set(name)
        try:
            async with turnstile.entered(None):
                answers[(name,)] = await _read_async(app)
        except Exception as error:
            log.warning(LACKING, describe(error))
        finally:
            app.client.own_pool_async.close()

    asked = [asyncio.create_task(ask(name, app), name=name) for name, app in apps.items()]
    late = (await asyncio.wait(asked, timeout=end))[1] if asked else ()
    for task in late:
        database_in_logs.set(task.get_name())
        log.warning(LACKING, LATE.format(end))
    question.set_result(_metrics(answers, "database"))  # then those that are late are cancelled


def _metrics(answers: Mapping[tuple[str, ...], _Answer], *more: str) -> list[Metric]:
    """Return what databases have answered, by the values of these further labels."""
    jobs = GaugeMetricFamily("pgdefer_jobs", "Jobs.", labels=[*more, "queue", "task", "state"])
    oldest = GaugeMetricFamily(
        "pgdefer_oldest_ready_seconds",
        "How long the oldest ready job has been due.",
        labels=[*more, "queue", "task"],
    )
    memory = GaugeMetricFamily(
        "pgdefer_worker_memory_bytes",
        "Resident bytes of a live worker's processes.",
        labels=[*more, "worker", "name"],
    )
    for values, (stats, workers) in answers.items():
        for row in stats:
            for state in STATES:
                jobs.add_metric([*values, row.queue, row.task, state], getattr(row, state))
            if row.oldest_ready_for is not None:
                due = row.oldest_ready_for.total_seconds()
                oldest.add_metric([*values, row.queue, row.task], due)
        for worker in workers:
            if worker.is_alive and worker.memory is not None:
                memory.add_metric([*values, str(worker.id), worker.name], worker.memory)
    return [jobs, oldest, memory]


_with_queues: weakref.WeakSet[prometheus_client.CollectorRegistry] = weakref.WeakSet()


@functools.cache
def _handler_metrics(
    registry: prometheus_client.CollectorRegistry,
) -> tuple[prometheus_client.Histogram, prometheus_client.Counter]:
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
    return duration, ended


def instrument(
    app: App,
    *,
    registry: prometheus_client.CollectorRegistry = prometheus_client.REGISTRY,
    queues: bool = False,
) -> None:
    """Measure an App's handlers; with `queues`, also its queues, which reads the database.

    Apps with one registry share the metrics of their handlers; with `queues` each needs its own.
    Raises RuntimeError in a second call for an App, ValueError if the registry has such queues.
    """
    if queues and registry in _with_queues:
        raise ValueError("this registry has the queues of an App: pass another one as registry")
    claim(app, "prometheus")
    duration, ended = _handler_metrics(registry)

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
        _with_queues.add(registry)
    app.metrics = lambda: (
        prometheus_client.CONTENT_TYPE_LATEST,
        prometheus_client.generate_latest(registry),
    )
