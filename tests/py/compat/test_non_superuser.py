"""As on a managed server: the queue's owner has no right except CREATE on the database."""

from __future__ import annotations

import asyncio
import datetime as dt
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from pgdefer import App, Retry, Worker
from pgdefer.contrib.cluster import install as install_cluster
from pgdefer.database.install import Form, install

Connection = psycopg.Connection[Any]
KINDS = {"web": "producer", "hand": "worker", "oncall": "operator", "grafana": "reader"}
ROLES = ["owner", *KINDS, "stranger"]

pytestmark = pytest.mark.unchecked("ends without a queue")


class Managed:
    """A database whose superuser has created roles and left."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def dsn(self, role: str) -> str:
        return make_conninfo(self._dsn, user=role)

    def connect(self, role: str) -> Connection:
        return psycopg.connect(self.dsn(role), autocommit=True)

    def ask(self, role: str, query: str, *parameters: object) -> list[tuple[Any, ...]]:
        with self.connect(role) as connection:
            return connection.execute(query, parameters).fetchall()


@pytest.fixture
def managed(blank_dsn: str) -> Iterator[Managed]:
    database = sql.Identifier(str(conninfo_to_dict(blank_dsn)["dbname"]))
    with psycopg.connect(blank_dsn, autocommit=True) as superuser:
        for role in ROLES:
            superuser.execute(
                sql.SQL("create role {} login nosuperuser nocreatedb nocreaterole").format(
                    sql.Identifier(role)
                )
            )
        superuser.execute(sql.SQL("grant create on database {} to owner").format(database))
    yield Managed(blank_dsn)
    with psycopg.connect(blank_dsn, autocommit=True) as superuser:
        for role in ROLES:
            superuser.execute(
                sql.SQL("drop owned by {0} cascade; drop role {0}").format(sql.Identifier(role))
            )


def test_the_owner_has_one_right(managed: Managed) -> None:
    ((is_super, memberships),) = managed.ask(
        "owner",
        "select rolsuper or rolcreaterole or rolcreatedb or rolreplication or rolbypassrls,"
        " (select count(*) from pg_auth_members where member = r.oid)"
        " from pg_roles r where rolname = current_user",
    )
    assert (is_super, memberships) == (False, 0)
    for form in ("plain", "extension"):
        command = [sys.executable, "-m", "pgdefer", "install", "--form", form]
        done = subprocess.run(
            [*command, "--dsn", managed.dsn("stranger")],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode
        assert "Traceback" not in done.stderr
    assert managed.ask("owner", "select to_regnamespace('queue')::text") == [(None,)]


async def test_an_owner_who_is_no_superuser_installs_operates_and_removes(
    managed: Managed, form: Form
) -> None:
    done = install(managed.dsn("owner"), form)
    assert (done.before, done.form) == (None, form)
    assert install(managed.dsn("owner"), form).before == done.version
    ((owners,),) = managed.ask(
        "owner",
        "select array_agg(distinct pg_get_userbyid(relowner)) from pg_class"
        " where relnamespace = 'queue'::regnamespace",
    )
    assert owners == ["owner"]
    for role, kind in KINDS.items():
        managed.ask("owner", "select queue.grant_access(%s, %s)", role, kind)
    await work(managed)
    for role in ("oncall", "owner"):
        operate(managed, role)
    be_refused(managed)
    remove(managed, form)
    assert install(managed.dsn("owner"), form).before is None
    managed.ask("owner", "select queue.defer('t')")
    assert managed.ask("owner", "select * from queue.check()") == []


def test_the_owner_of_the_schema_needs_no_right_on_the_database(
    managed: Managed, blank_dsn: str
) -> None:
    with psycopg.connect(blank_dsn, autocommit=True) as superuser:
        superuser.execute("create schema queue authorization stranger")
    assert install(managed.dsn("stranger"), "plain").before is None
    assert install(managed.dsn("stranger"), "plain").before is not None


def test_health_does_not_judge_sessions_that_the_owner_cannot_see(managed: Managed) -> None:
    install(managed.dsn("owner"))
    with managed.connect("stranger") as stranger:
        stranger.execute("begin isolation level repeatable read; select")
        found = managed.ask(
            "owner", "select status, detail from queue.health() where name = 'transactions'"
        )
    assert found == [("warn", "1 session of other roles can't be seen")]


def test_default_privileges_give_nobody_a_right(managed: Managed, form: Form) -> None:
    with managed.connect("owner") as owner:
        for kind in ("tables", "sequences", "functions"):
            for role in ("public", "grafana"):
                owner.execute(f"alter default privileges grant all on {kind} to {role}".encode())
    for _ in range(2):  # what the second installation creates gets them as well
        install(managed.dsn("owner"), form)
        managed.ask("owner", "select queue.grant_access('grafana', 'reader')")
        assert managed.ask("grafana", "select id from queue.jobs") == []
        for query in (
            "select from queue.log",
            "select nextval('queue.job_id_seq')",
            "select queue.uninstall(true)",
            "select queue.defer('t')",
        ):
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                managed.ask("grafana", query)
        managed.ask("owner", "select queue.uninstall(true)")


def test_default_privileges_beside_shards_and_objects_of_others(managed: Managed) -> None:
    with managed.connect("owner") as owner:
        owner.execute("alter default privileges grant execute on functions to grafana")
        owner.execute(
            "alter default privileges grant select on tables to grafana with grant option"
        )
        owner.execute("alter default privileges grant usage on types to web")
    install(managed.dsn("owner"), "plain")
    install_cluster(managed.dsn("owner"))
    managed.ask("owner", "select queue.grant_access('grafana', 'reader')")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="shard_leave"):
        managed.ask("grafana", "select queue.shard_leave(1, 'b')")
    with managed.connect("owner") as owner:
        owner.execute("grant usage, create on schema queue to stranger")
        owner.execute("grant usage on schema queue to web")
        owner.execute("create view queue.report as select 1")
        owner.execute("grant select on queue.report to web")
        owner.execute("grant select on queue.jobs to grafana with grant option")
    with managed.connect("stranger") as stranger:
        stranger.execute("create table queue.theirs ()")
    with managed.connect("grafana") as grafana:
        grafana.execute("grant select on queue.jobs to web")
    managed.ask("owner", "select queue.migrate()")
    assert managed.ask("web", "select * from queue.report") == [(1,)]
    assert managed.ask("grafana", "select id from queue.jobs") == []


async def work(managed: Managed) -> None:
    """Defer as a producer, run as a worker, read as a reader."""
    web, hand = App(managed.dsn("web")), App(managed.dsn("hand"))
    tried: list[int] = []

    @hand.recurring("* * * * * *", name="each second")
    @hand.task(name="tick")
    async def tick() -> None: ...

    @hand.task(name="add", lock="sum", retry=Retry(2))
    async def add(a: int, b: int) -> int:
        tried.append(a)
        if tried.count(a) < 2:
            raise ValueError("not yet")
        return a + b

    @hand.task(name="transactional", transactional=True)
    def transactional(connection: psycopg.Connection[Any]) -> None:
        connection.execute("select 1")

    held = web.defer("add", {"a": 9, "b": 9}, held=True)
    for late in (held.result_async(0.1), asyncio.to_thread(held.result, 0.1)):
        with pytest.raises(TimeoutError, match=r"within 0\.1 s: held$"):  # it may not ask why
            await late
    jobs = [web.defer("add", {"a": a, "b": 1}) for a in range(3)]
    other = web.defer("transactional", delay=dt.timedelta(milliseconds=50))
    ticked = "select from queue.jobs where task = 'tick' and state = 'succeeded'"
    worker = Worker(hand)
    running = asyncio.create_task(worker.run_async())
    try:
        assert [await job.result_async(300) for job in jobs] == [1, 2, 3]
        await other.result_async(300)
        async with asyncio.timeout(300):
            while not managed.ask("grafana", ticked):  # noqa: ASYNC110 (it lies in the database)
                await asyncio.sleep(0.05)
    finally:
        worker.stop()
        await running
        await web.close_async()
        await hand.close_async()
    failed = "select count(*) from queue.attempts where outcome = 'failed'"
    assert managed.ask("grafana", failed) == [(3,)]


def operate(managed: Managed, role: str) -> None:
    """Do what an operator does."""
    ((id,),) = managed.ask("owner", "select queue.defer('idle')")
    assert managed.ask(role, "select queue.why(%s)", id)[0][0]
    managed.ask(role, "select * from queue.stats()")
    assert managed.ask(role, "select * from queue.health()")
    managed.ask(role, "select queue.configure_queue('q', '{\"max_running\": 3}')")
    managed.ask(role, "select queue.pause('q'), queue.resume('q')")
    managed.ask(role, "select queue.cancel(%s)", id)
    managed.ask(role, "select * from queue.tick()")
    managed.ask(role, "select queue.schedule('yearly', '@yearly', 'tick')")
    assert managed.ask(role, "select queue.unschedule('yearly')") == [(True,)]
    pruned = "select queue.prune(state => 'cancelled', older_than => '0')"
    assert managed.ask(role, pruned) == [(1,)]
    assert managed.ask(role, "select * from queue.check()") == []


def be_refused(managed: Managed) -> None:
    """A role without grants may do nothing, and the others may not exceed theirs."""
    for role, query in {
        "stranger": "select queue.defer('t')",
        "web": "select * from queue.jobs",
        "hand": "select queue.pause()",
        "grafana": "select queue.defer('t')",
        "oncall": "select * from queue.job",
    }.items():
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            managed.ask(role, query)
    managed.ask("owner", "select queue.revoke_access('web')")
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        managed.ask("web", "select queue.defer('t')")


def remove(managed: Managed, form: Form) -> None:
    """Remove everything, without a trace."""
    managed.ask("owner", "select queue.uninstall(force => true)")
    with managed.connect("owner") as owner:
        if form == "extension":
            owner.execute("drop extension pgdefer")
            owner.execute("drop schema queue")
        else:
            owner.execute("drop schema queue cascade")
    ((left,),) = managed.ask(
        "owner",
        "select count(*) from pg_shdepend d join pg_roles r on r.oid = d.refobjid"
        " where r.rolname = current_user and d.dbid = (select oid from pg_database"
        " where datname = current_database())",
    )
    assert left == 0
