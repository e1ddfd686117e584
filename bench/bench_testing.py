#!/usr/bin/env python3
"""How long 200 tests of an application take on pgdefer.testing, beside the same without a queue.

    bench/bench_testing.py [--runs N] [--check]

The application has customers and orders, by SQLAlchemy. A test places an order and reads it back,
in a transaction that is rolled back; with the queue it defers a job as well, and asserts that. Each
tenth test runs its job. The times are those of the whole pytest, with its database; the ratio of the
CPU seconds, with those of the server, is less disturbed by others. Afterwards no job may be left in
the database.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, Report, arguments, cpu, processes_of

from pgdefer.database.server import EmbeddedServer, temporary_server

TESTS = 200
LIMIT = 1.2
SHOP = """
import sqlalchemy as sa
from sqlalchemy import orm
import pgdefer

app = pgdefer.App()


class Base(orm.DeclarativeBase):
    pass


class Customer(Base):
    __tablename__ = "customer"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    name: orm.Mapped[str]
    orders: orm.Mapped[list["Order"]] = orm.relationship(back_populates="customer")


class Order(Base):
    __tablename__ = "orders"
    id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
    customer_id: orm.Mapped[int] = orm.mapped_column(sa.ForeignKey(Customer.id))
    total: orm.Mapped[int]
    customer: orm.Mapped[Customer] = orm.relationship(back_populates="orders")


@app.task(name="thank")
def thank(order: int) -> str:
    return f"thank you for {order}"


def place(session, name, total, *, is_thanked):
    customer = session.scalar(sa.select(Customer).where(Customer.name == name))
    if customer is None:
        customer = Customer(name=name)
        session.add(customer)
        session.flush()
    order = Order(customer=customer, total=total)
    session.add(order)
    session.flush()
    if is_thanked:
        thank.defer_with(session, order.id)
    session.commit()
    return order


def totals(session):
    rows = sa.select(Customer.name, sa.func.sum(Order.total)).join(Order).group_by(Customer.name)
    return dict(session.execute(rows).all())
"""
CONFTEST = """
import os
import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import orm
import shop

WITH_QUEUE = os.environ["WITH_QUEUE"] == "1"


@pytest.fixture(scope="session")
def engine(request):
    if WITH_QUEUE:
        dsn = request.getfixturevalue("pgdefer_dsn")
    else:
        with psycopg.connect(os.environ["PGDEFER_TEST_SERVER"], autocommit=True) as connection:
            connection.execute("create database plain")
        dsn = psycopg.conninfo.make_conninfo(os.environ["PGDEFER_TEST_SERVER"], dbname="plain")
    engine = sa.create_engine("postgresql+psycopg://", creator=lambda: psycopg.connect(dsn))
    shop.Base.metadata.create_all(engine)
    yield engine
    if WITH_QUEUE:
        with engine.connect() as connection:
            assert connection.scalar(sa.text("select count(*) from queue.jobs")) == 0
    engine.dispose()
    if not WITH_QUEUE:
        with psycopg.connect(os.environ["PGDEFER_TEST_SERVER"], autocommit=True) as connection:
            connection.execute("drop database plain with (force)")


@pytest.fixture
def session(engine):
    with engine.connect() as connection:
        outer = connection.begin()
        with orm.Session(connection, join_transaction_mode="create_savepoint") as session:
            yield session
        outer.rollback()


if WITH_QUEUE:
    from pgdefer.testing import TestQueue

    @pytest.fixture
    def jobs(pgdefer_registered, session):
        with TestQueue(pgdefer_registered, session) as queue:
            yield queue
else:

    @pytest.fixture
    def jobs():
        return None
"""
TEST = """
import pytest
import shop


@pytest.mark.parametrize("number", range(COUNT))
def test_order(session, jobs, number):
    for name in ("Ann", "Bob"):
        order = shop.place(session, name, number, is_thanked=False)
        assert shop.totals(session)[name] == number
    order = shop.place(session, "Ann", 5, is_thanked=jobs is not None)
    assert shop.totals(session) == {"Ann": number + 5, "Bob": number}
    if jobs is not None:
        jobs.assert_deferred(shop.thank, order.id)
        if number % 10 == 0:
            assert [ran.state for ran in jobs.run()] == ["succeeded"]
"""


def run(folder: Path, server: EmbeddedServer, *, with_queue: bool) -> tuple[float, float]:
    """Return the seconds that the tests take, and those of CPU."""
    environment = os.environ | {
        "PGDEFER_TEST_SERVER": server.dsn("postgres"),
        "WITH_QUEUE": str(int(with_queue)),
        "PYTHONPATH": str(ROOT / "python"),
    }
    plugin = ["-p", "pgdefer.testing.plugin", "-o", "pgdefer_app=shop:app"] if with_queue else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin]
    begun, before = time.monotonic(), used(server)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    took, cpu_took = time.monotonic() - begun, used(server) - before
    if done.returncode or f"{TESTS} passed" not in done.stdout:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return took, cpu_took


def used(server: EmbeddedServer) -> float:
    """Return the CPU seconds of the server and of the commands that have ended."""
    pid = server.status().pid
    assert pid is not None
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return cpu(processes_of(pid)) + ended.ru_utime + ended.ru_stime


def main() -> None:
    options = arguments(__doc__, runs=3).parse_args()
    report = Report()
    with tempfile.TemporaryDirectory() as name, temporary_server() as server:
        folder = Path(name)
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "shop.py").write_text(SHOP)
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "test_shop.py").write_text(TEST.replace("COUNT", str(TESTS)))
        took: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(options.runs):
            for with_queue, seconds in took.items():
                seconds.append(run(folder, server, with_queue=with_queue))
    for with_queue, seconds in took.items():
        shown = ", ".join(f"{one:.2f} s ({of_cpu:.2f} of CPU)" for one, of_cpu in seconds)
        print(f"{'with' if with_queue else 'without'} the queue: {shown}")
    ratios = [
        statistics.median(one[part] for one in took[True])
        / statistics.median(one[part] for one in took[False])
        for part in (0, 1)
    ]
    report.below("the same with the queue", ratios[0], LIMIT, "times")
    print(f"{'its CPU':<34}{ratios[1]:>10.2f} times")
    report.end(options)


if __name__ == "__main__":
    main()
