"""Rows as arguments in a project of several databases: each comes from where it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from django.db import connections, router
from shop.models import Order

from pgdefer.contrib.django.application import DjangoApp
from pgdefer.database.embedded import EmbeddedServer
from support import create_database

pytestmark = pytest.mark.client


@pytest.fixture
def other(
    server: EmbeddedServer, _migrated: str, shop: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """The alias of a second database of the project."""
    create_database(server, "django_other", _migrated)
    settings = connections.settings["default"] | {"NAME": "django_other"}
    monkeypatch.setitem(connections.settings, "other", settings)
    yield "other"
    connections["other"].close()
    del connections["other"]
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute("drop database django_other with (force)")


class Replica:
    """Reads come from the other database, and writes go to the default one."""

    def db_for_read(self, _model: Any, **_: Any) -> str:
        return "other"

    def db_for_write(self, _model: Any, **_: Any) -> str:
        return "default"

    def allow_relation(self, *_: Any, **__: Any) -> bool:
        return True


class ByCustomer(Replica):
    """The row says to which database it belongs."""

    def db_for_write(self, _model: Any, instance: Any = None, **_: Any) -> str:
        return "default" if instance is None else instance.customer


def stored(app: DjangoApp, row: Order) -> Any:
    return app.codec.encode(row)["value"]


def test_a_row_of_another_database(app: DjangoApp, other: str, drain: Callable[..., None]) -> None:
    @app.task(name="who")
    def who(row: Order) -> list[str]:
        return [row.customer, str(row._state.db)]

    for alias in ("default", other):
        Order.objects.using(alias).create(pk=500, customer=f"in {alias}", total=1)
    jobs = [who.defer(Order.objects.using(alias).get(pk=500)) for alias in ("default", other)]
    drain()
    assert [job.result(0) for job in jobs] == [["in default", "default"], ["in other", other]]
    del app.tasks["who"], app.client.defaults["who"]


def test_a_row_of_a_replica(app: DjangoApp, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for alias in ("default", other):
        Order.objects.using(alias).create(pk=500, customer=f"in {alias}", total=1)
    monkeypatch.setattr(router, "routers", [Replica()])
    row = Order.objects.get(pk=500)
    assert row._state.db == other
    assert "database" not in stored(app, row)
    assert app.codec.loads(app.codec.dumps(row)).customer == "in default"


def test_a_row_that_names_its_database(
    app: DjangoApp, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for alias in ("default", other):
        Order.objects.using(alias).create(pk=500, customer=other, total=1)
    row = Order.objects.using(other).get(pk=500)
    monkeypatch.setattr(router, "routers", [ByCustomer()])
    assert stored(app, row)["database"] == other
    assert app.codec.loads(app.codec.dumps(row))._state.db == other
