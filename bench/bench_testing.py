#!/usr/bin/env python3
"""How long 200 tests of an application take on pgdefer.testing, beside the same without a queue.

    bench/bench_testing.py [--runs N] [--check]

The application has customers and orders, by SQLAlchemy. A test places an order and reads it back,
in a transaction that is rolled back; with the queue it defers a job as well, and asserts that. Each
tenth test runs its job. The times are those of the whole pytest, with its database. What is limited
are the CPU seconds, with those of the server, as others disturb them less. Modules are compiled before, and
the server's files are in memory if they can be. Afterwards no job may be left in the database.
"""

from __future__ import annotations

import dataclasses
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import ROOT, Report, arguments, cpu, processes_of

from pgdefer.database.embedded import EmbeddedServer, temporary_server

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
    id = order.id  # SQLAlchemy reads it anew after the commit
    if jobs is not None:
        jobs.assert_deferred(shop.thank, id)
        if number % 10 == 0:
            assert [ran.state for ran in jobs.run()] == ["succeeded"]
"""


@dataclasses.dataclass(frozen=True)
class Took:
    """Seconds: of the whole pytest, and of CPU, its own and the server's."""

    seconds: float
    client: float
    server: float

    @property
    def cpu(self) -> float:
        return self.client + self.server


def run(folder: Path, server: EmbeddedServer, *, with_queue: bool) -> Took:
    """Run the tests."""
    environment = os.environ | {
        "PGDEFER_TEST_SERVER": server.dsn("postgres"),
        "WITH_QUEUE": str(int(with_queue)),
        "PYTHONPATH": str(ROOT / "python"),
        "PYTHONPYCACHEPREFIX": str(folder / "pycache"),
    }
    # As for a user, modules are compiled once; without it hypothesis alone takes a second each time.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    plugin = ["-p", "pgdefer.testing.plugin", "-o", "pgdefer_app=shop:app"] if with_queue else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *plugin]
    begun, client, of_server = time.monotonic(), used(), used(server)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    took = Took(time.monotonic() - begun, used() - client, used(server) - of_server)
    if done.returncode or f"{TESTS} passed" not in done.stdout:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])
    return took


def used(server: EmbeddedServer | None = None) -> float:
    """Return the CPU seconds of the server, or of the commands that have ended."""
    if server is None:
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        return ended.ru_utime + ended.ru_stime
    pid = server.status().pid
    assert pid is not None
    return cpu(processes_of(pid))


def spread(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    options = arguments(__doc__, runs=5).parse_args()
    report = Report()
    took: dict[bool, list[Took]] = {False: [], True: []}
    # ext4 passes over each inode deleted in the last minutes, one at a time, when it makes a file. So
    # on a disk the databases of earlier runs make the next one's files dearer.
    if os.access("/dev/shm", os.W_OK):
        tempfile.tempdir = "/dev/shm"
    with tempfile.TemporaryDirectory() as name, temporary_server() as server:
        folder = Path(name)
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "shop.py").write_text(SHOP)
        (folder / "conftest.py").write_text(CONFTEST)
        (folder / "test_shop.py").write_text(TEST.replace("COUNT", str(TESTS)))
        for number in range(options.runs + 1):
            for with_queue, runs in took.items():
                found = run(folder, server, with_queue=with_queue)
                if number > 0:  # the first one compiles the modules
                    runs.append(found)
    print("seconds: median (least to most)")
    for with_queue, runs in took.items():
        print(
            f"{'with' if with_queue else 'without'} the queue: {spread([r.seconds for r in runs])}, "
            f"of CPU {spread([r.cpu for r in runs])}: pytest {spread([r.client for r in runs])}, "
            f"server {spread([r.server for r in runs])}"
        )
    ratios = [
        one.seconds / other.seconds for one, other in zip(took[True], took[False], strict=True)
    ]
    of_cpu = [one.cpu / other.cpu for one, other in zip(took[True], took[False], strict=True)]
    print(f"the same with the queue: {spread(ratios)} times")
    report.below("its CPU", statistics.median(of_cpu), LIMIT, "times")
    print(f"{'least to most':<34}{min(of_cpu):>10.2f} to {max(of_cpu):.2f}")
    report.end(options)


if __name__ == "__main__":
    main()
