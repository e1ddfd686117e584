"""The models match the views. They can be read, but not written."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
import typing
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import orm
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.ext import asyncio as sa_async

from pgdefer import models
from pgdefer.models import (
    LAST,
    Attempt,
    Base,
    Job,
    Lock,
    Queue,
    ReadOnly,
    Schedule,
    ScheduleRun,
    Worker,
)
from support import url_of

Connection = psycopg.Connection[Any]
MODELS: list[type[Base]] = [mapper.class_ for mapper in Base.registry.mappers]


@pytest.fixture
def session(engine: sa.Engine) -> Iterator[orm.Session]:
    with orm.Session(engine) as session:
        yield session


def defer(conn: Connection, task: str = "t", **options: Any) -> int:
    """Defer by SQL: values are cast from their text."""
    given = "".join(f", {name} => {value}" for name, value in options.items())
    ((id,),) = conn.execute(f"select queue.defer('{task}'{given})")
    return int(id)


def fetch(conn: Connection, worker: int, n: int = 100) -> dict[int, int]:
    return dict(conn.execute(f"select id, claim from queue.fetch({worker}, null, {n})").fetchall())


# The views

COLUMNS = """
    select c.relname, a.attname, format_type(a.atttypid, a.atttypmod)
    from pg_class c
    join pg_attribute a on a.attrelid = c.oid and a.attnum > 0
    where c.relnamespace = 'queue'::regnamespace and c.relkind = 'v'
      and obj_description(c.oid, 'pg_class') is not null
    order by c.relname, a.attnum
"""


def test_the_columns_are_those_of_the_public_views(conn: Connection) -> None:
    dialect = sa.create_engine("postgresql+psycopg://").dialect
    mapped = [
        (model.__table__.name, column.name, column.type.compile(dialect).lower())
        for model in sorted(MODELS, key=lambda model: str(model.__table__.name))
        for column in model.__table__.columns
    ]
    assert mapped == conn.execute(COLUMNS).fetchall()


def test_everything_is_typed() -> None:
    """The annotation of each column agrees with the loaded type, and with NULL."""
    for model in MODELS:
        hints = typing.get_type_hints(model)
        for column in model.__table__.columns:
            (inner,) = typing.get_args(hints[column.name])
            options = [kind for kind in typing.get_args(inner) if kind is not type(None)]
            is_optional = type(None) in typing.get_args(inner)
            assert is_optional == column.nullable, column
            kind = options[0] if is_optional else inner
            if isinstance(column.type, models._Json):
                assert kind in {Any, dict[str, Any]}
            else:
                loaded = getattr(column.type, "impl_instance", column.type).python_type
                assert (typing.get_origin(kind) or kind) is loaded, column


def fill(conn: Connection) -> None:
    """Create rows of every kind, so that each nullable column is NULL in one of them."""

    def query(text: str) -> list[tuple[Any, ...]]:
        cursor = conn.execute(text)
        return [] if cursor.description is None else cursor.fetchall()

    query("select queue.register_task('t', '{\"priority\": 1}')")
    query('select queue.configure_queue(\'limited\', \'{"max_running": 1, "retain": "1 day"}\')')
    query('select queue.configure_queue(\'rated\', \'{"rate": {"limit": 1, "per": "1 h"}}\')')
    query("select queue.defer('t', options => '{\"share\": \"a\"}', priority => -9)")
    query("select queue.open_group('g')")
    query("select queue.pause('paused')")
    query("select queue.create_queue('paused')")
    ((worker,),) = query("select queue.register_worker('w', null, '{}')")
    query("select queue.register_worker('v', '{a,b*}', '{}')")
    full = '\'{"description": "d", "headers": {"a": 1}, "expires_at": "2090-01-01"}\''
    first = defer(conn, lock="'l'")
    defer(conn, lock="'l'", deadline="'infinity'")
    defer(conn, lock="'m'", options='\'{"lock_mode": "mutex"}\'')
    defer(conn, queueing_lock="'q'", scheduled_at="'2090-01-01'", options=full)
    defer(conn, needs=f"array[{first}]", options=f"'{{\"parent\": {first}}}'")
    claims = fetch(conn, worker)
    rate = '{"concurrency": [{"key": "r", "rate": {"limit": 1, "per": "1 s"}}]}'
    defer(conn, options=f"'{rate}'")
    limited = [defer(conn, concurrency_key="'k'", concurrency_limit=1) for _ in range(3)]
    defer(conn, queue="'limited'")
    defer(conn, queue="'paused'")
    failed, yielded = defer(conn, "fails"), defer(conn, "yields")
    claims |= fetch(conn, worker)
    query(f"select queue.fail({failed}, {claims[failed]}, 'no', '{{\"a\": 1}}')")
    step = f"{yielded}, {claims[yielded]}"
    query(f"select queue.begin_step({step}, 'a', 'v1')")
    query(f"select queue.finish_step({step}, 'a', '1')")
    query(f"select queue.finish_step({step}, 'b'), queue.set_progress({step}, 50, 'half')")
    query(f"select queue.fail_step({step}, 'c', 'no')")
    query(f"select queue.retry_later({yielded}, {claims[yielded]}, '2090-01-01')")
    query(f"select queue.succeed({claims and limited[0]}, {claims[limited[0]]}, '[1]')")
    released = defer(conn, "released")
    claims |= fetch(conn, worker)
    query(f"select queue.release({released}, {claims[released]})")
    query(f"select queue.cancel({released})")
    query("select queue.schedule('daily', '0 9 * * *', 't')")
    query("select queue.schedule('off', '0 9 * * *', 't', options => '{\"enabled\": false}')")
    late = '{"max_delay": "1 h", "source": "here", "overlap": "skip"}'
    query(f"select queue.schedule('hourly', '@hourly', 't', options => '{late}')")
    query("select queue.run_now('hourly')")
    query("select queue.run_now('hourly')")
    with conn.transaction():
        query("select queue._lock_admission(true)")
        query("select queue._count_minutes('1 minute', '0')")


# NULL only in cases that take long to create: a job claimed by hand, a run that was skipped.
SELDOM = {"attempts.worker_id", "schedule_runs.detail", "schedule_runs.job_id"}


def test_null_is_where_the_models_say(conn: Connection, session: orm.Session) -> None:
    fill(conn)
    wrong = []
    for model in MODELS:
        table = model.__table__
        name = table.name
        (rows,) = conn.execute(f"select count(*) from queue.{name}").fetchone() or (0,)
        assert rows, f"{name} is empty: nothing would be seen"
        for column in table.columns:
            query = f'select count(*) from queue.{name} where "{column.name}" is null'
            (nulls,) = conn.execute(query).fetchone() or (0,)
            if nulls and not column.nullable:
                wrong.append(f"{name}.{column.name} may be NULL")
            elif not nulls and column.nullable and f"{name}.{column.name}" not in SELDOM:
                wrong.append(f"{name}.{column.name} is never NULL")
        assert len(session.scalars(sa.select(model)).all()) == rows
    assert not wrong


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "Pacific/Pago_Pago"])
def test_what_has_no_end(conn: Connection, session: orm.Session, zone: str) -> None:
    session.execute(sa.text(f"set timezone = '{zone}'"))
    conn.execute("select queue.pause('p'), queue.create_queue('p')")
    id = defer(conn, deadline="'infinity'")
    early = defer(conn, deadline="'0001-01-03 00:00+00'")
    usual = defer(conn, deadline="'2030-01-01 00:00+00'")
    assert session.get_one(Queue, "p").paused_until == LAST
    assert session.get_one(Job, id).deadline is None
    assert session.get_one(Job, early).deadline == dt.datetime(1, 1, 3, tzinfo=dt.UTC)
    assert session.get_one(Job, usual).deadline == dt.datetime(2030, 1, 1, tzinfo=dt.UTC)
    assert session.get_one(Job, usual).expires_at is None
    query = sa.select(Job.id).where(Job.deadline < dt.datetime(2031, 1, 1, tzinfo=dt.UTC))
    assert set(session.scalars(query)) == {early, usual}


# Relationships


def test_from_a_job_to_its_attempts_needs_and_worker(
    conn: Connection, session: orm.Session, engine: sa.Engine
) -> None:
    ((worker,),) = conn.execute("select queue.register_worker('w', null, '{}')")
    a = defer(conn, options='\'{"retry": {"max_attempts": 3}}\'')
    for outcome in ("one", "two"):
        claim = fetch(conn, worker, 1)[a]
        conn.execute(f"select queue.fail({a}, {claim}, '{outcome}')")
    b = defer(conn, "other", lock="'l'")
    fetch(conn, worker)
    c = defer(conn, "last", needs=f"array[{b}, {a}]", options=f"'{{\"parent\": {b}}}'")
    conn.execute(f"select queue.fail_jobs('{{{a}}}', 'x')")

    job = session.get_one(Job, a)
    assert [(one.error, one.outcome, one.job) for one in job.history][:2] == [
        ("one", "failed", job),
        ("two", "failed", job),
    ]
    assert job.history[0].worker is session.get_one(Worker, worker)
    last = session.get_one(Job, c)
    assert [needed.id for needed in last.needed_jobs] == [a, b]
    assert last.needed_jobs[0] is job
    assert last.parent_job is session.get_one(Job, b)
    assert (last.worker, last.history, job.parent_job, job.needed_jobs) == (None, [], None, [])
    assert session.get_one(Job, b).worker is session.get_one(Worker, worker)
    assert session.get_one(Lock, "l").job is session.get_one(Job, b)
    for load in (orm.selectinload, orm.joinedload):
        with orm.Session(engine) as other:
            query = (
                sa.select(Job)
                .order_by(Job.id)
                .options(
                    load(Job.needed_jobs), load(Job.history), load(Job.worker), orm.raiseload("*")
                )
            )
            found = other.scalars(query).unique().all()
            assert [[needed.id for needed in one.needed_jobs] for one in found] == [[], [], [a, b]]
            assert [len(one.history) for one in found] == [len(job.history), 0, 0]
            assert [one.worker and one.worker.name for one in found][1:] == ["w", None]
    # The query of a page about failures.
    query = sa.select(Job.id, Attempt.error).join(Job.history).where(Attempt.outcome == "failed")
    assert set(session.execute(query.where(Attempt.error != "x"))) == {
        (a, "one"),
        (a, "two"),
    }


def test_from_a_schedule_to_its_runs(conn: Connection, session: orm.Session) -> None:
    conn.execute("select queue.schedule('s', '0 0 1 1 *', 't')")
    ((id,),) = conn.execute("select queue.run_now('s')")
    schedule = session.get_one(Schedule, "s")
    (run,) = schedule.runs
    assert isinstance(run, ScheduleRun)
    assert (run.manual, run.schedule, run.job) == (True, schedule, session.get_one(Job, id))
    assert schedule.last_job is None or schedule.last_job.id == id
    assert repr(run).startswith("ScheduleRun(name='s', run_at=")
    job = session.get_one(Job, id)
    assert repr(job) == f"Job(id={id})"
    session.commit()  # which expires it
    assert repr(job) == f"Job(id={id})"
    session.close()
    assert (repr(job), repr(Job())) == (f"Job(id={id})", "Job(id=None)")


def test_a_job_is_found_by_its_index(conn: Connection, session: orm.Session) -> None:
    """The models add nothing that keeps the planner from an index."""
    conn.execute(
        'select queue.defer_many(jsonb_agg(\'{"task": "t"}\'::jsonb)) from generate_series(1, 5000)'
    )
    conn.execute("analyze queue.log")
    needs = sa.literal([1, 17], ARRAY(sa.BigInteger))
    for query in (
        sa.select(Job).where(Job.id == 17),
        sa.select(Job).where(Job.id == sa.any_(needs)),
    ):
        text = query.compile(session.get_bind(), compile_kwargs={"literal_binds": True})
        plan = session.execute(sa.text(f"explain {text}")).scalars().all()
        assert not [line for line in plan if "Seq Scan on job " in line], "\n".join(plan)


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_json_that_python_can_not_read_is_text(
    conn: Connection, dsn: str, driver: str
) -> None:
    number, nested = f'{{"a": {"1" * 5_000}}}', f'{{"a": {"[" * 5_000}{"]" * 5_000}}}'
    try:
        read: Any = json.loads(nested)
    except RecursionError:  # before Python 3.12
        read = nested
    for args in ('{"a": {"b": [1, null]}}', number, nested):
        conn.execute("select queue.defer('t', %s::text::jsonb)", [args])
    engine = sa_async.create_async_engine(url_of(dsn, driver))
    async with sa_async.AsyncSession(engine) as session:
        jobs = (await session.scalars(sa.select(Job).order_by(Job.id))).all()
        assert [job.args for job in jobs] == [{"a": {"b": [1, None]}}, number, read]
        assert [job.headers for job in jobs] == [None] * 3
        by_path = sa.select(Job.args["a"]["b"], Job.args["a"]["b"][0].as_integer(), Job.id).where(
            Job.args.contains({"a": {"b": [1]}}), Job.args[("a", "b", 0)].astext == "1"
        )
        assert (await session.execute(by_path)).all() == [([1, None], 1, jobs[0].id)]
        inner = sa.select(Job).where(Job.args["a"]["b"] == [1, None]).subquery()
        assert (await session.scalars(sa.select(inner.c.args))).all() == [jobs[0].args]
    await engine.dispose()


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
async def test_json_of_a_statement_that_is_text(conn: Connection, dsn: str, driver: str) -> None:
    id = defer(conn, args="""'{"a": ["5", null]}'""")
    engine = sa_async.create_async_engine(url_of(dsn, driver))
    async with sa_async.AsyncSession(engine) as session:
        text = sa.text("select * from queue.jobs")
        job = await session.scalar(sa.select(Job).from_statement(text))
        assert job is not None
        assert (job.id, job.args, job.result) == (id, {"a": ["5", None]}, None)
        some = sa.text("select args, args -> 'a' -> 0 from queue.jobs")
        some = some.columns(Job.args, Job.result)
        assert (await session.execute(some)).all() == [({"a": ["5", None]}, "5")]
        listed = await session.scalar(sa.select(sa.func.array_agg(Job.args)))
        assert listed == [{"a": ["5", None]}]
    await engine.dispose()


def test_an_engine_reads_json_in_its_way(conn: Connection, dsn: str) -> None:
    id = defer(conn)
    engine = sa.create_engine(url_of(dsn), json_deserializer=lambda text: f"read {text}")
    with orm.Session(engine) as session:
        assert session.get_one(Job, id).args == "read {}"
    engine.dispose()


async def test_async(conn: Connection, dsn: str) -> None:
    ((worker,),) = conn.execute("select queue.register_worker('w', '{a}', '{}')")
    a = defer(conn, deadline="'infinity'")
    b = defer(conn, needs=f"array[{a}]")
    for driver in ("psycopg", "asyncpg"):
        engine = sa_async.create_async_engine(url_of(dsn, driver))
        async with sa_async.AsyncSession(engine) as session:
            query = sa.select(Job).options(orm.selectinload(Job.needed_jobs)).order_by(Job.id)
            first, second = (await session.scalars(query)).all()
            assert (first.id, first.deadline, first.args) == (a, None, {})
            assert (second.id, second.needed_jobs) == (b, [first])
            assert (await session.get_one(Worker, worker)).queues == ["a"]
        await engine.dispose()


# Not written


def test_nothing_can_be_written(conn: Connection, session: orm.Session) -> None:
    id = defer(conn)
    conn.execute("select queue.register_task('t', '{}')")
    job = session.get_one(Job, id)
    writes: list[Callable[[], object]] = [
        lambda: (session.add(Job(task="x")), session.flush()),
        lambda: (session.delete(job), session.flush()),
        lambda: (setattr(job, "priority", 9), session.flush()),
        lambda: session.execute(sa.insert(models.Task).values(name="x", defaults={})),
        lambda: session.execute(sa.insert(models.Task), [{"name": "x", "defaults": {}}]),
        lambda: session.execute(sa.update(models.Task).values(defaults={"priority": 1})),
        lambda: session.execute(sa.delete(models.Task)),
        lambda: session.query(models.Task).delete(),
        lambda: session.query(models.Task).update({"defaults": {}}),
        lambda: Base.metadata.create_all(session.get_bind()),
        lambda: Base.metadata.drop_all(session.get_bind()),
    ]
    for write in writes:
        with pytest.raises(ReadOnly, match="view") as caught:
            write()
        assert caught.value.hint
        session.rollback()
    statements = [
        sa.insert(models.Task).values(name="x", defaults={}),
        sa.update(models.Task).values(defaults={"priority": 1}),
        sa.delete(models.Task),
    ]
    for statement in statements:
        with pytest.raises(sa.exc.DBAPIError, match="view"):
            session.connection().execute(statement)
        session.rollback()
    assert conn.execute("select id, priority from queue.jobs").fetchall() == [(id, 0)]
    assert conn.execute("select name, defaults from queue.tasks").fetchall() == [("t", {})]


def test_an_application_keeps_its_own(conn: Connection, engine: sa.Engine) -> None:
    class Own(orm.DeclarativeBase):
        pass

    class Job(Own):  # also a name that the models have
        __tablename__ = "jobs"
        id: orm.Mapped[int] = orm.mapped_column(primary_key=True)
        queue_job_id: orm.Mapped[int | None]
        queue_job: orm.Mapped[models.Job | None] = orm.relationship(
            models.Job,
            primaryjoin=lambda: orm.foreign(Job.queue_job_id) == models.Job.id,
            viewonly=True,
        )

    assert list(Own.metadata.tables) == ["jobs"]
    assert {table.schema for table in Base.metadata.tables.values()} == {"queue"}
    Own.metadata.create_all(engine)
    id = defer(conn)
    with orm.Session(engine) as session:
        session.add(Job(queue_job_id=id))
        session.flush()
        session.execute(sa.update(Job).values(id=Job.id + 1))
        session.commit()
        (own,) = session.scalars(sa.select(Job))
        assert own.queue_job is not None
        assert own.queue_job.state == "ready"
        session.execute(sa.delete(Job))
        session.commit()
    Own.metadata.drop_all(engine)


def test_imports() -> None:
    """The models need no connection; without them, SQLAlchemy is not imported."""
    code = """
import sys
import pgdefer
assert "sqlalchemy" not in sys.modules
import sqlalchemy.pool
def refuse(*_, **__): raise AssertionError("connects")
import psycopg
psycopg.connect = psycopg.Connection.connect = refuse
from pgdefer import models
from sqlalchemy.orm import configure_mappers
configure_mappers()
"""
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
