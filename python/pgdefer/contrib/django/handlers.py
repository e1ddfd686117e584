"""Code around a handler: fresh connections, and a transaction that also ends the job.

Tests: contrib/test_django_handlers.py.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
from asgiref.sync import SyncToAsync, ThreadSensitiveContext
from django.db import OperationalError, connections, transaction

from pgdefer._text import logger
from pgdefer.contrib.django.connections import close_connections, renew_connections
from pgdefer.database.growing_delay import GrowingDelay
from pgdefer.database.own_threads import has_running_loop
from pgdefer.tasks.context import JobContext, running_job

__all__ = ["around_job", "atomic_handler", "without_connection"]

log = logger("pgdefer.worker")


@contextlib.contextmanager
def around_job(job: JobContext) -> Iterator[None]:
    """Give a handler working connections, and close those that should not be kept.

    Each coroutine has its own thread for the code that Django runs in threads, as a request has;
    in a test of the queue all code uses the test's connection.
    """
    if job.client.stand_in is not None:
        yield
    else:
        with _own_thread() if has_running_loop() else _fresh_connections():
            yield


@contextlib.contextmanager
def _fresh_connections() -> Iterator[None]:
    renew_connections()
    try:
        yield
    finally:
        close_connections()


@contextlib.contextmanager
def _own_thread() -> Iterator[None]:
    """Do the same as asgiref's ThreadSensitiveContext, and close the thread's connections."""
    context = ThreadSensitiveContext()
    token = SyncToAsync.thread_sensitive_context.set(context)
    try:
        yield
    finally:
        SyncToAsync.thread_sensitive_context.reset(token)
        executor = SyncToAsync.context_to_thread_executor.pop(context, None)
        if executor is not None:
            executor.submit(connections.close_all)
            executor.shutdown(wait=False)


@contextlib.contextmanager
def atomic_handler(alias: str) -> Iterator[Any]:
    """Begin the one transaction of a handler and its outcome, on Django's connection.

    In a TestCase of Django it is a savepoint of the test's transaction, or of a block within. In
    any other block it is refused, because the outcome would depend on that block's end.
    """
    connection = connections[alias]
    if connection.in_atomic_block:
        is_test = connection.atomic_blocks[0]._from_testcase  # type: ignore[attr-defined]
        with transaction.atomic(using=alias, durable=not is_test):
            yield connection
        return
    _open(connection)
    driver = connection.connection
    isolation, driver.isolation_level = (
        driver.isolation_level,
        psycopg.IsolationLevel.READ_COMMITTED,
    )
    try:
        with transaction.atomic(using=alias, durable=True):
            yield connection
    except Exception as error:
        if driver.closed:
            error.connection_invalidated = True  # type: ignore[attr-defined]
        raise
    finally:
        if not driver.closed:
            driver.isolation_level = isolation


def _open(connection: Any) -> None:
    """Connect. If that fails it waits, because this is not the job's fault."""
    job = running_job()  # None in a thread of the handler's own
    waits = GrowingDelay(last=1.0)
    while True:
        try:
            connection.ensure_connection()
        except OperationalError as error:
            log.warning("%r waits for a connection: %s", job or "a step", error)
        else:
            return
        time.sleep(waits.next())
        if job is not None:
            job.check_abort()


def without_connection(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in a form that accepts a connection; Django finds it by itself."""

    @functools.wraps(function)
    def handler(_connection: object, /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    first = inspect.Parameter("_connection", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [first, *signature.parameters.values()]
    handler.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return handler
