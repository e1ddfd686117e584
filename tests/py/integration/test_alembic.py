"""Migrations, as Alembic runs them: inside an application's history, and as a branch of its own."""

from __future__ import annotations

import io
import itertools
import shutil
import subprocess
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import alembic.util
import psycopg
import pytest
from alembic import command
from alembic.config import CommandLine, Config

import pgdefer.database.install
from pgdefer import InvalidParameter, NotInstalled, PgDeferError, __version__
from pgdefer.database.embedded import EmbeddedServer
from pgdefer.database.install import install
from pgdefer.errors import sqlstate_of
from support import ROOT, create_database, has_extension, server_program, url_of

Connection = psycopg.Connection[Any]
RunScript = Callable[[str, str], None]

pytestmark = pytest.mark.unchecked("each test says what there must be")

INI = """
[alembic]
script_location = %(here)s/migrations
path_separator = newline
{options}
"""
# The output of `alembic init`, without the logging. ASYNC is from its template async.
ENV = """
import asyncio
import sqlalchemy as sa
from alembic import context
from sqlalchemy.ext.asyncio import create_async_engine
import pgdefer.alembic
import pgdefer.models
import own

{settings}
url = context.config.attributes["url"]

def run(connection):
    context.configure(connection=connection, target_metadata=target_metadata, **options)
    with context.begin_transaction():
        context.run_migrations()

async def run_async():
    engine = create_async_engine(url, poolclass=sa.NullPool)
    async with engine.connect() as connection:
        await connection.run_sync(run)

if context.is_offline_mode():
    context.configure(
        url=url, target_metadata=target_metadata, literal_binds=True,
        dialect_opts={{"paramstyle": "named"}}, **options,
    )
    with context.begin_transaction():
        context.run_migrations()
elif url.drivername.endswith("asyncpg"):
    asyncio.run(run_async())
else:
    engine = sa.create_engine(url, poolclass=sa.NullPool)
    with engine.connect() as connection:
        run(connection)
"""
OWN = """
import sqlalchemy as sa

metadata = sa.MetaData()
customer = sa.Table("customer", metadata, sa.Column("id", sa.BigInteger, primary_key=True))
"""
MIGRATION = """
from alembic import op
import sqlalchemy as sa
import pgdefer.alembic

revision = {revision!r}
down_revision = {down!r}
branch_labels = {labels!r}
depends_on = {depends!r}

def upgrade():
{up}

def downgrade():
{down_body}
"""
CUSTOMER = """
op.create_table("customer", sa.Column("id", sa.BigInteger, primary_key=True))
op.execute('''
    create trigger welcome after insert on customer
    for each row execute function queue.defer_trigger('welcome')
''')
"""
ONLY_OWN = "target_metadata, options = own.metadata, {}"


class Project:
    """An application's migrations."""

    def __init__(self, folder: Path, dsn: str) -> None:
        self.folder = folder
        self.dsn = dsn
        (folder / "migrations" / "versions").mkdir(parents=True)
        (folder / "own.py").write_text(OWN)
        template = Path(alembic.__file__).parent / "templates" / "generic" / "script.py.mako"
        shutil.copy(template, folder / "migrations")
        self.output = io.StringIO()
        self.settings()

    def settings(self, settings: str = ONLY_OWN, *, own_branch: bool = False) -> None:
        options = ""
        if own_branch:
            options = (
                "version_locations =\n    %(here)s/migrations/versions\n"
                "    pgdefer.alembic:versions\n"
            )
        (self.folder / "alembic.ini").write_text(INI.format(options=options))
        (self.folder / "migrations" / "env.py").write_text(ENV.format(settings=settings))

    def migration(
        self,
        revision: str,
        up: str,
        down: str = "pass",
        *,
        after: str | None = None,
        labels: str | None = None,
        depends: str | None = None,
    ) -> None:
        text = MIGRATION.format(
            revision=revision,
            down=after,
            labels=labels,
            depends=depends,
            up=textwrap.indent(up.strip(), "    "),
            down_body=textwrap.indent(down.strip(), "    "),
        )
        (self.folder / "migrations" / "versions" / f"{revision}.py").write_text(text)

    def config(self, driver: str = "psycopg", *, x: tuple[str, ...] = ()) -> Config:
        self.output = io.StringIO()
        config = Config(
            str(self.folder / "alembic.ini"), output_buffer=self.output, stdout=self.output
        )
        config.attributes["url"] = url_of(self.dsn, driver)
        config.cmd_opts = type("Options", (), {"x": list(x)})()  # type: ignore[assignment]
        return config


@pytest.fixture
def project(tmp_path: Path, blank_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.syspath_prepend(tmp_path)
    yield Project(tmp_path, blank_dsn)
    sys.modules.pop("own", None)


@pytest.fixture
def run_script(server: EmbeddedServer) -> RunScript:
    psql = server_program(server, "psql") or pytest.skip("there is no psql here")

    def run_script(dsn: str, script: str) -> None:
        done = subprocess.run(
            [psql, "-X", "-q", "-v", "ON_ERROR_STOP=1", "-d", dsn],
            input=script,
            capture_output=True,
            text=True,
            check=False,
        )
        assert not done.returncode, done.stderr

    return run_script


def query(dsn: str, text: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn, autocommit=True) as connection:
        return connection.execute(text).fetchall()


def is_extension(dsn: str) -> bool:
    return query(dsn, "select count(*) from pg_extension where extname = 'pgdefer'") == [(1,)]


def assert_works(dsn: str) -> None:
    assert query(dsn, "select * from queue.version()") == [(__version__, __version__)]
    query(dsn, "insert into customer values (1) returning id")
    assert query(dsn, "select task, args, state from queue.jobs") == [
        ("welcome", {"id": 1}, "ready")
    ]
    assert query(dsn, "select * from queue.check()") == []


def make_history(project: Project, form: str = "auto", force: bool = False) -> None:
    project.migration(
        "one",
        f"pgdefer.alembic.install(op, form={form!r})\n{CUSTOMER}",
        f"op.drop_table('customer')\npgdefer.alembic.downgrade(op, force={force})",
    )


@pytest.mark.long
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
@pytest.mark.parametrize("form", ["auto", "plain"])
def test_inside_the_history(
    project: Project, server: EmbeddedServer, driver: str, form: str
) -> None:
    make_history(project, form, force=True)
    config = project.config(driver)
    command.upgrade(config, "head")
    assert_works(project.dsn)
    with psycopg.connect(server.dsn("postgres")) as connection:
        assert is_extension(project.dsn) == (form == "auto" and has_extension(connection))
    command.check(config)

    command.downgrade(config, "base")
    assert not is_extension(project.dsn)
    relations = "select count(*) from pg_class where relnamespace = to_regnamespace('queue')"
    assert query(project.dsn, relations) == [(0,)]
    command.upgrade(config, "head")
    assert_works(project.dsn)


def test_a_downgrade_refuses_to_lose_jobs(project: Project) -> None:
    make_history(project)
    config = project.config()
    command.upgrade(config, "head")
    assert_works(project.dsn)
    with pytest.raises(InvalidParameter, match=r"every job. Pass force=True .* pgdefer_force=yes"):
        command.downgrade(config, "base")
    assert query(project.dsn, "select count(*) from customer, queue.jobs") == [(1,)]
    assert query(project.dsn, "select * from queue.check()") == []


@pytest.mark.parametrize(
    ("up", "message"),
    [
        ("upgrade(op, '0.1.0')", "there is no queue to upgrade. Install it before"),
        ("upgrade(op, '99.0.0')", "the migration wants pgdefer 99.0.0"),
        ("form_of('other')", "pgdefer=other: give one of auto, extension, plain"),
    ],
)
def test_a_refusal_is_one_line(
    project: Project, capsys: pytest.CaptureFixture[str], up: str, message: str
) -> None:
    project.migration("one", f"pgdefer.alembic.{up}")
    assert run(project, capsys, "upgrade", "head").startswith(f"FAILED: {message}")


def test_the_refusal_of_a_downgrade_is_one_line(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    make_history(project)
    command.upgrade(project.config(), "head")
    message = "uninstall removes every job. Pass force=True to downgrade"
    assert run(project, capsys, "downgrade", "base").startswith(f"FAILED: {message}")


def run(project: Project, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command of alembic that fails; return what it prints, in one line."""
    program = CommandLine()
    with pytest.raises(SystemExit):
        program.run_cmd(project.config(), program.parser.parse_args(arguments))
    return " ".join(capsys.readouterr().out.split())


def test_the_first_migration_beside_the_branch(project: Project) -> None:
    """As docs/alembic.md says, in a project without migrations of its own."""
    project.settings(own_branch=True)
    command.upgrade(project.config(), "heads")
    first = {"head": "base", "branch_label": "app", "autogenerate": True}
    with pytest.raises(alembic.util.CommandError, match="please specify --version-path"):
        command.revision(project.config(), "first", **first)  # type: ignore[arg-type]
    folder = project.folder / "migrations" / "versions"
    command.revision(project.config(), "first", version_path=str(folder), **first)  # type: ignore[arg-type]
    command.upgrade(project.config(), "heads")
    command.revision(project.config(), "second", head="app@head")
    assert len(list(folder.glob("*.py"))) == 2
    assert "--version-path migrations/versions" in (ROOT / "docs" / "alembic.md").read_text()


def test_a_branch_of_its_own(project: Project) -> None:
    project.settings(own_branch=True)
    project.migration(
        "one", CUSTOMER, "op.drop_table('customer')", labels="app", depends="pgdefer_0_1_0"
    )
    # The application's own migration pulls in its dependencies.
    command.upgrade(project.config(), "app@head")
    assert_works(project.dsn)
    command.upgrade(project.config(), "heads")
    config = project.config()
    command.heads(config)
    shown = project.output.getvalue()
    assert "pgdefer_0_1_0 (pgdefer) (effective head)" in shown
    assert "one (app) (head)" in shown
    command.check(project.config())

    # The application's next migration goes to its own branch and folder.
    config = project.config()
    command.revision(config, "two", head="app@head", rev_id="two", autogenerate=True)
    command.upgrade(config, "heads")
    assert (project.folder / "migrations" / "versions" / "two_two.py").exists()
    assert ("two",) in query(project.dsn, "select version_num from alembic_version")

    with pytest.raises(InvalidParameter, match="removes every job"):
        command.downgrade(project.config(), "pgdefer@base")
    assert query(project.dsn, "select count(*) from queue.jobs") == [(1,)]
    command.downgrade(project.config(x=("pgdefer_force=yes",)), "pgdefer@base")
    assert query(project.dsn, "select to_regclass('queue.job')::text") == [(None,)]
    assert query(project.dsn, "select count(*) from pg_extension where extname = 'pgdefer'") == [
        (0,)
    ]


def test_a_branch_that_nothing_depends_on(project: Project) -> None:
    project.settings(own_branch=True)
    project.migration("one", "op.create_table('customer', sa.Column('id', sa.BigInteger))")
    with pytest.raises(ValueError, match="pgdefer=other: give one of auto, extension, plain"):
        command.upgrade(project.config(x=("pgdefer=other",)), "pgdefer@head")
    command.upgrade(project.config(x=("pgdefer=plain",)), "pgdefer@head")
    assert not is_extension(project.dsn)
    assert query(project.dsn, "select to_regclass('customer')::text") == [(None,)]
    command.upgrade(project.config(), "heads")
    assert query(project.dsn, "select version_num from alembic_version order by 1") == [
        ("one",),
        ("pgdefer_0_1_0",),
    ]


# Autogenerate

WITHOUT_MODELS = "target_metadata = own.metadata"
WITH_MODELS = "target_metadata = [own.metadata, pgdefer.models.Base.metadata]"
BY_OBJECT = "options = {'include_object': pgdefer.alembic.include_object}"
BY_SCHEMA = (
    "options = {'include_object': pgdefer.alembic.include_object,"
    " 'include_name': pgdefer.alembic.include_name, 'include_schemas': True}"
)


@pytest.mark.parametrize(
    "settings",
    [
        ONLY_OWN,
        f"{WITHOUT_MODELS}\n{BY_OBJECT}",
        f"{WITH_MODELS}\n{BY_OBJECT}",
        f"{WITHOUT_MODELS}\n{BY_SCHEMA}",
        f"{WITH_MODELS}\n{BY_SCHEMA}",
    ],
)
def test_check_is_clean(project: Project, settings: str) -> None:
    project.settings(settings)
    make_history(project)
    command.upgrade(project.config(), "head")
    command.check(project.config())
    # It still sees the application's own tables.
    with psycopg.connect(project.dsn, autocommit=True) as connection:
        connection.execute("alter table customer add column name text")
    with pytest.raises(alembic.util.AutogenerateDiffsDetected, match=r"remove_column.*customer"):
        command.check(project.config())


# Offline

DEFINITIONS = """
    select p.oid::regprocedure::text, md5(pg_get_functiondef(p.oid)), p.proacl::text
    from pg_proc p where p.pronamespace = 'queue'::regnamespace
    union all
    select c.relname, md5(coalesce(pg_get_viewdef(c.oid), '')), c.relacl::text
    from pg_class c where c.relnamespace = 'queue'::regnamespace
    order by 1
"""


@pytest.fixture
def other_dsn(server: EmbeddedServer) -> Iterator[str]:
    create_database(server, "other")
    yield server.dsn("other")
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute("drop database other with (force)")


@pytest.mark.parametrize("form", ["auto", "extension"])
def test_offline(
    project: Project, server: EmbeddedServer, other_dsn: str, form: str, run_script: RunScript
) -> None:
    if form == "extension" and server.major < 18:
        pytest.skip("its server has no files of the extension")
    make_history(project, form, force=True)
    config = project.config()
    command.upgrade(config, "head", sql=True)
    script = project.output.getvalue()
    assert ("CREATE EXTENSION" in script.upper()) == (form == "extension")
    run_script(project.dsn, script)
    assert_works(project.dsn)
    assert is_extension(project.dsn) == (form == "extension")
    # Nothing was lost on the way through Alembic: no %, no colon.
    install(other_dsn, "extension" if form == "extension" else "plain")
    assert query(project.dsn, DEFINITIONS) == query(other_dsn, DEFINITIONS)
    command.check(project.config())

    config = project.config()
    command.downgrade(config, "one:base", sql=True)
    run_script(project.dsn, project.output.getvalue())
    assert not is_extension(project.dsn)
    assert query(project.dsn, "select to_regclass('queue.job')::text") == [(None,)]


def test_what_the_plain_file_sets_does_not_stay(project: Project) -> None:
    project.migration(
        "one",
        """
pgdefer.alembic.install(op, form="plain")
op.execute("create table seen as select current_setting('check_function_bodies') as bodies,"
           " current_setting('client_min_messages') as messages")
""",
    )
    command.upgrade(project.config(), "head")
    assert query(project.dsn, "select * from seen") == [("on", "notice")]


def test_where_no_extension_may_be_made(project: Project, server: EmbeddedServer) -> None:
    """As with a provider that allows only some."""
    with psycopg.connect(project.dsn, autocommit=True) as connection:
        connection.execute("""
            create function refuse() returns event_trigger language plpgsql as $$
            begin raise insufficient_privilege using message = 'not this one'; end $$;
            create event trigger refuse on ddl_command_start
              when tag in ('CREATE EXTENSION') execute function refuse()
        """)
    make_history(project)
    command.upgrade(project.config(), "head")
    assert not is_extension(project.dsn)
    assert_works(project.dsn)
    # An existing installation keeps its form, whatever files the server gets later.
    project.migration("two", "pgdefer.alembic.install(op)", after="one")
    project.migration("three", "pgdefer.alembic.install(op, form='extension')", after="two")
    command.upgrade(project.config(), "two")
    with pytest.raises(PgDeferError, match="installed by plain SQL"):
        command.upgrade(project.config(), "three")


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_an_error_is_short(project: Project, driver: str) -> None:
    """It does not contain the whole script."""
    name = psycopg.conninfo.conninfo_to_dict(project.dsn)["dbname"]
    with psycopg.connect(project.dsn, autocommit=True) as connection:
        connection.execute("create role somebody")
        connection.execute(f"grant create on database {name} to somebody")
        connection.execute("set role somebody")
        connection.execute("create schema queue")
    try:
        make_history(project, "plain")
        with pytest.raises(Exception, match="schema queue belongs to another role") as caught:
            command.upgrade(project.config(driver), "head")
        assert sqlstate_of(caught.value) == "42501"
        shown = "".join(traceback.format_exception(caught.value))
        assert "create or replace function" not in shown
    finally:
        with psycopg.connect(project.dsn, autocommit=True) as connection:
            connection.execute("drop owned by somebody cascade; drop role somebody")


@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_a_role_that_does_not_own_the_queue(project: Project, driver: str) -> None:
    project.settings(own_branch=True)
    command.upgrade(project.config(), "heads")
    with psycopg.connect(project.dsn, autocommit=True) as connection:
        connection.execute("create role somebody login; delete from alembic_version")
        connection.execute("grant all on alembic_version to somebody")
    try:
        project.dsn = psycopg.conninfo.make_conninfo(project.dsn, user="somebody")
        advice = "owner of the queue.*alembic stamp pgdefer@head"
        with pytest.raises(
            alembic.util.CommandError, match=f"permission denied for schema queue.*{advice}"
        ):
            command.upgrade(project.config(driver), "heads")
        command.stamp(project.config(driver), "pgdefer@head")
        command.upgrade(project.config(driver), "heads")
        later = "pgdefer.alembic.upgrade(op, '0.1.0')"
        project.migration("later", later, after="pgdefer_0_1_0")
        with pytest.raises(
            alembic.util.CommandError, match=f"permission denied for schema queue.*{advice}"
        ):
            command.upgrade(project.config(driver), "heads")
    finally:
        with psycopg.connect(project.dsn, user="postgres", autocommit=True) as connection:
            connection.execute("drop owned by somebody cascade; drop role somebody")


# Upgrades


def test_upgrade_to_what_is_there_or_is_not(project: Project) -> None:
    project.migration("one", f"pgdefer.alembic.upgrade(op, {__version__!r})")
    with pytest.raises(NotInstalled, match="no queue to upgrade"):
        command.upgrade(project.config(), "head")
    project.migration("one", "pgdefer.alembic.install(op)")
    project.migration("two", f"pgdefer.alembic.upgrade(op, {__version__!r})", after="one")
    project.migration("three", "pgdefer.alembic.upgrade(op, '99.0.0')", after="two")
    command.upgrade(project.config(), "two")
    with pytest.raises(PgDeferError, match=r"wants pgdefer 99\.0\.0.*pip install"):
        command.upgrade(project.config(), "three")


NEXT = "0.1.9999"
STEP = """
-- @tables
    alter table queue.installation add column note text;

-- @concurrently
create index concurrently log_task_idx on queue.log (task);
"""


@pytest.fixture
def next_release() -> Iterator[Path]:
    """The SQL of a later release, which changes a table and adds a large index."""
    folder = Path(tempfile.mkdtemp(prefix="pgdefer-next-"))
    folder.chmod(0o755)
    source, target = folder / "extension", folder / "build"
    shutil.copytree(ROOT / "extension", source, ignore=shutil.ignore_patterns("__pycache__"))
    (source / "upgrades").mkdir(exist_ok=True)
    (source / "upgrades" / f"pgdefer--{__version__}--{NEXT}.sql").write_text(STEP)
    build = [sys.executable, str(ROOT / "extension" / "build.py"), str(source), str(target), NEXT]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    yield target
    shutil.rmtree(folder)


@pytest.mark.long
@pytest.mark.parametrize(
    "how", list(itertools.product(["psycopg", "asyncpg"], ["auto", "plain"])), ids="-".join
)
def test_upgrade_to_a_later_release(
    project: Project,
    server: EmbeddedServer,
    next_release: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: tuple[str, str],
) -> None:
    driver, form = how
    with psycopg.connect(server.dsn("postgres")) as connection:
        if form == "auto" and server.major < 18 and has_extension(connection):
            pytest.skip(
                "the next release needs extension_control_path, which PostgreSQL 18 brought"
            )
    project.migration("one", f"pgdefer.alembic.install(op, form={form!r})\n{CUSTOMER}")
    project.migration(
        "two",
        f"pgdefer.alembic.upgrade(op, {NEXT!r}, form={form!r})",
        f"pgdefer.alembic.downgrade(op, {__version__!r})",
        after="one",
    )
    command.upgrade(project.config(driver), "one")
    assert_works(project.dsn)
    with psycopg.connect(project.dsn, autocommit=True) as connection:
        # Large, so that its index is built concurrently, later.
        connection.execute("""
            select queue.defer_many(jsonb_agg(jsonb_build_object(
              'task', 't', 'args', jsonb_build_object('text', repeat(md5(n::text), 60)))))
            from generate_series(1, 10000) n
        """)
    with pytest.raises(PgDeferError, match=f"wants pgdefer {NEXT}, and this is"):
        command.upgrade(project.config(driver), "two")

    monkeypatch.setattr(pgdefer.database.embedded, "sql_folder", lambda: next_release)
    if server.major >= 18:
        if form == "auto":
            with pytest.raises(PgDeferError, match=f"server has the files of {__version__}"):
                command.upgrade(project.config(driver), "two")
        name = psycopg.conninfo.conninfo_to_dict(project.dsn)["dbname"]
        with psycopg.connect(project.dsn, autocommit=True) as connection:
            path = f"{next_release}:$system"
            connection.execute(f"alter database {name} set extension_control_path = '{path}'")
    command.upgrade(project.config(driver), "two")
    assert query(project.dsn, "select * from queue.version()") == [(NEXT, NEXT)]
    assert query(project.dsn, "select note from queue.installation") == [(None,)]
    assert query(
        project.dsn,
        "select indisvalid from pg_index where indexrelid = 'queue.log_task_idx'::regclass",
    ) == [(True,)]
    assert query(project.dsn, "select * from queue.migration()") == []
    assert query(project.dsn, "select version_num from alembic_version") == [("two",)]
    assert query(project.dsn, "select count(*) from queue.jobs") == [(10001,)]
    assert query(project.dsn, "select * from queue.check()") == []
    # It does not go back, which harms nobody; and again there is nothing to do.
    command.downgrade(project.config(driver), "one")
    assert query(project.dsn, "select * from queue.version()") == [(NEXT, NEXT)]
    command.upgrade(project.config(driver), "two")
    command.check(project.config(driver))
