"""A shop's queue with a real worker, and jobs in each state: what the browser and pictures show."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from pgdefer import App, Retry, Worker, current_job
from workers import wait_for, working

Connection = psycopg.Connection[Any]
QUEUES = "mail payments pictures reports shipping".split()


class CardDeclinedError(Exception):
    """An error of a task, with a traceback."""


def define(app: App, go: threading.Event) -> None:
    """Define the shop's tasks; one runs until the event."""

    @app.task(name="send_receipt", queue="mail")
    def send_receipt(order: int, to: str) -> str:
        return f"receipt {order} sent to {to}"

    @app.task(name="charge_card", queue="payments", retry=Retry(2, base=timedelta(0)))
    def charge_card(order: int, cents: int) -> None:
        if order == 1009:
            raise CardDeclinedError(f"order {order}: the bank declined {cents / 100:.2f} EUR")

    @app.task(name="ship", queue="shipping", lock="customer:{customer}")
    def ship(order: int, customer: str) -> None:
        del order, customer

    @app.task(
        name="monthly_report", queue="reports", concurrency_key="reports", concurrency_limit=1
    )
    def monthly_report(month: str) -> None:
        assert go.wait(600), month

    @app.task(name="refund", queue="payments")
    def refund(order: int, cents: int) -> None:
        job = current_job()
        job.emit("log", f"order {order}: asked the bank")
        job.step("check", lambda: {"paid": cents})
        job.emit("log", {"order": order, "may be refunded": True})
        job.wait_for("approval", timeout=timedelta(days=7))

    @app.task(name="resize", queue="pictures", priority=5)
    def resize(picture: str, width: int = 800) -> str:
        return f"{picture} is {width} wide"

    @app.recurring("0 6 * * mon-fri", name="morning report", args={"month": "2026-11"})
    @app.recurring("30 2 * * *", name="night prices", timezone="Europe/Berlin")
    @app.task(name="prices", queue="reports")
    def prices(month: str = "") -> None:
        del month


@contextlib.contextmanager
def open_shop(dsn: str) -> Iterator[dict[str, int]]:
    """Run a worker during the block. Return the ids of a job in each state, by the state."""
    app = App(dsn, name="shop")
    go = threading.Event()
    define(app, go)
    worker = Worker(app, QUEUES, name="shop-1", concurrency=4)
    with contextlib.closing(app), working(worker):
        try:
            with psycopg.connect(dsn, autocommit=True) as connection:
                yield defer_all(app, connection)
        finally:
            go.set()


def defer_all(app: App, connection: Connection) -> dict[str, int]:
    """Defer the shop's jobs, and wait until each is in its state."""
    tomorrow = datetime.now(UTC).replace(microsecond=0) + timedelta(days=1)
    jobs = {
        "succeeded": app.defer("send_receipt", {"order": 1001, "to": "ann@example.com"}),
        "failed": app.defer("charge_card", {"order": 1009, "cents": 4990}, lock="order:1009"),
        "suspended": app.defer("refund", {"order": 1008, "cents": 1999}),
        "running": app.defer("monthly_report", {"month": "2026-10"}),
    }
    app.defer_many(
        [app.prepare("resize", {"picture": f"tea-{n}.jpg", "width": 400}) for n in range(30)]
    )
    wait_for(lambda: state(connection, jobs["running"].id) == "running")
    wait_for(lambda: state(connection, jobs["failed"].id) == "failed")
    wait_for(lambda: state(connection, jobs["suspended"].id) == "waiting")
    connection.execute("select queue.pause('shipping')")
    ship = {"order": 1002, "customer": "ann"}
    jobs |= {
        "blocked": app.defer("monthly_report", {"month": "2026-11"}),
        "scheduled": app.defer(
            "send_receipt", {"order": 1003, "to": "bo@example.com"}, scheduled_at=tomorrow
        ),
        "held": app.defer("charge_card", {"order": 1004, "cents": 700}, held=True),
        "upstream_failed": app.defer(
            "send_receipt", {"order": 1009, "to": "cy@example.com"}, needs=[jobs["failed"]]
        ),
        "ready": app.defer("ship", ship),
        "next": app.defer("ship", ship | {"order": 1005}),
        "cancelled": app.defer("charge_card", {"order": 1006, "cents": 1}, held=True),
        "unserved": app.defer("export", {"rows": 120_000, "format": "csv"}, queue="exports"),
        "waiting": app.defer(
            "send_receipt", {"order": 1007, "to": "di@example.com"}, needs=[jobs["running"]]
        ),
    }
    jobs["cancelled"].cancel()
    wait_for(lambda: state(connection, jobs["succeeded"].id) == "succeeded")
    connection.execute("select queue.tick()")
    return {name: job.id for name, job in jobs.items()}


def state(connection: Connection, id: int) -> str:
    """Return a job's state, empty if there is none."""
    (found,) = connection.execute(
        "select state from queue.jobs where id = %s", [id]
    ).fetchone() or ("",)
    return str(found)
