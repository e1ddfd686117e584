"""A Django project, examples/django_shop, with a separate database for every test; and the page."""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psycopg
import pytest

from pgdefer.contrib import web
from pgdefer.contrib.django.application import DjangoApp
from pgdefer.database.embedded import EmbeddedServer
from support import ROOT, create_database
from web_page import (
    ask_for_passwords,
    grant,
    lift_time_limits,
    location,
    logged_in,
    server_of_pages,
    serving,
)

PROJECT = ROOT / "examples" / "django_shop"
sys.path.insert(0, str(PROJECT))
os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"

import django

django.setup()

from django.core.management import call_command
from django.db import connections
from django.db.backends.signals import connection_created
from shop.models import Order

import pgdefer.contrib.django
from pgdefer.contrib.django.models import Job

# Tests put other tasks in place of these, and put these back.
importlib.import_module("shop.tasks")


def use(server: EmbeddedServer, name: str) -> None:
    """Make all of Django's connections lead to this database."""
    connections.close_all()
    place = {"HOST": str(server.socket_folder), "USER": "postgres", "NAME": name}
    connections.settings["default"].update(place)


def environment_of(dsn: str) -> dict[str, str]:
    """Return the environment in which the project's programs use this database."""
    info = psycopg.conninfo.conninfo_to_dict(dsn)
    return os.environ | {
        "PGHOST": str(info["host"]),
        "PGUSER": str(info["user"]),
        "PGDATABASE": str(info["dbname"]),
        "PYTHONPATH": str(ROOT / "python"),
    }


@pytest.fixture(scope="session")
def _migrated(server: EmbeddedServer) -> str:
    create_database(server, "django_base")
    use(server, "django_base")
    call_command("migrate", verbosity=0)
    connections.close_all()
    return "django_base"


@pytest.fixture
def shop(server: EmbeddedServer, _migrated: str) -> Iterator[str]:
    """The DSN of the project's database; its invariants are checked after the test."""
    create_database(server, "django", _migrated)
    use(server, "django")
    dsn = server.dsn("django")
    opened: list[psycopg.Connection[Any]] = []

    def note(connection: Any, **_: Any) -> None:
        opened.append(connection.connection)

    connection_created.connect(note)
    yield dsn
    connection_created.disconnect(note)
    connections.close_all()
    # The threads of workers may have kept theirs open.
    for thread in threading.enumerate():
        if re.fullmatch(r"pgdefer-\d+", thread.name):
            thread.join(60)
    for each in opened:
        each.close()
    app = pgdefer.contrib.django.app
    app.close()
    app.client._registered.clear()
    with psycopg.connect(dsn, autocommit=True) as connection:
        broken = connection.execute("select * from queue.check()").fetchall()
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute("drop database django with (force)")
    assert not broken, f"queue.check() after the test: {broken}"


def order(customer: str = "Ann", total: int = 7) -> Order:
    """Make an order."""
    return Order.objects.create(customer=customer, total=total)


def customers() -> list[str]:
    """Return the customers of all orders."""
    return sorted(Order.objects.values_list("customer", flat=True))


def states() -> list[str]:
    """Return the states of all jobs, oldest first."""
    return [job.state for job in Job.objects.order_by("id")]


@pytest.fixture
def app(shop: str) -> DjangoApp:
    """The project's App."""
    return pgdefer.contrib.django.app


@pytest.fixture
def own_tasks(app: DjangoApp) -> Iterator[None]:
    """Forget the tasks of a test, after it."""
    tasks, defaults = dict(app.tasks), dict(app.client.defaults)
    yield
    app.tasks.clear()
    app.tasks.update(tasks)
    app.client.defaults.clear()
    app.client.defaults.update(defaults)


@pytest.fixture
def drain(app: DjangoApp) -> Callable[..., None]:
    """Run jobs until none is left that would start by itself."""

    def run(**options: Any) -> None:
        app.run_worker(drain=True, **options)

    return run


@pytest.fixture(scope="module")
def page_server() -> Iterator[None]:
    """The one server of the page."""
    with server_of_pages():
        yield


@pytest.fixture
def granted(page_server: None, server: EmbeddedServer, conn: psycopg.Connection[Any]) -> None:
    """Passwords and rights of the page's roles."""
    ask_for_passwords(server)
    grant(conn)


@pytest.fixture
def site(dsn: str, granted: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The page's address. Its statements may take as long as on a busy machine."""
    lift_time_limits(monkeypatch)
    with serving(web.asgi(location(dsn))) as address:
        yield address


@pytest.fixture
def client(site: str) -> Iterator[httpx.Client]:
    """An operator, who has logged in."""
    with logged_in(site, "page_operator") as client:
        yield client
