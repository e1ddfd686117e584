"""What the build makes installs in both forms, as whoever may create schemas, and only there."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psycopg
import pytest

from pgdefer._server import EmbeddedServer, sql_folder
from support import ROOT

FORMS = ["extension", "plain"]

# Everything that the code consists of, in either form.
CODE = """
select p.oid::regprocedure::text, pg_get_functiondef(p.oid), obj_description(p.oid, 'pg_proc'),
  p.proacl::text
from pg_proc p where p.pronamespace = 'queue'::regnamespace order by 1
"""


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, server: EmbeddedServer) -> str:
    if request.param == "extension" and server.major < 18:
        pytest.skip("the extension needs extension_control_path, which PostgreSQL 18 brought")
    return str(request.param)


def install(connection: psycopg.Connection, form: str) -> None:
    if form == "extension":
        connection.execute("create extension pgdefer")
        connection.execute("select queue.install()")
    else:
        connection.execute((sql_folder() / "pgdefer.sql").read_bytes())


@pytest.fixture
def blank(blank_dsn: str) -> Iterator[psycopg.Connection]:
    with psycopg.connect(blank_dsn, autocommit=True) as connection:
        yield connection


@pytest.fixture
def owner(blank: psycopg.Connection) -> Iterator[str]:
    """A role that may create schemas in the test's database, and nothing else."""
    blank.execute("create role test_owner login")
    blank.execute(f"grant create on database {blank.info.dbname} to test_owner")
    yield "test_owner"
    blank.execute("reset role")
    blank.execute("drop owned by test_owner cascade")
    blank.execute("drop role test_owner")


def defer_one(connection: psycopg.Connection) -> None:
    connection.execute("select queue.defer('a')")


def test_plain_form_twice_keeps_the_jobs(blank: psycopg.Connection) -> None:
    install(blank, "plain")
    defer_one(blank)
    install(blank, "plain")
    assert blank.execute("select count(*) from queue.job").fetchone() == (1,)
    assert blank.execute("select * from queue.check()").fetchall() == []


def test_dropping_the_extension_keeps_the_jobs(
    blank: psycopg.Connection, server: EmbeddedServer
) -> None:
    if server.major < 18:
        pytest.skip("the extension needs extension_control_path, which PostgreSQL 18 brought")
    install(blank, "extension")
    defer_one(blank)
    blank.execute("drop extension pgdefer")
    assert blank.execute("select count(*) from queue.job").fetchone() == (1,)
    install(blank, "extension")
    assert blank.execute("select count(*) from queue.job").fetchone() == (1,)
    assert blank.execute("select * from queue.check()").fetchall() == []


def test_both_forms_make_the_same_code(blank: psycopg.Connection, server: EmbeddedServer) -> None:
    if server.major < 18:
        pytest.skip("the extension needs extension_control_path, which PostgreSQL 18 brought")
    install(blank, "extension")
    extension = blank.execute(CODE).fetchall()
    blank.execute("drop extension pgdefer")
    blank.execute("drop schema queue cascade")
    install(blank, "plain")
    assert blank.execute(CODE).fetchall() == extension


def test_no_superuser_is_needed(blank: psycopg.Connection, owner: str, form: str) -> None:
    blank.execute(f"set role {owner}")
    install(blank, form)
    defer_one(blank)
    assert blank.execute("select * from queue.check()").fetchall() == []
    owners = blank.execute(
        "select distinct relowner::regrole::text from pg_class"
        " where relnamespace = 'queue'::regnamespace"
    ).fetchall()
    assert owners == [(owner,)]


def test_a_schema_of_another_role_is_refused(
    blank: psycopg.Connection, owner: str, form: str
) -> None:
    blank.execute(f"create schema queue authorization {owner}")
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match="belongs to another role"):
        install(blank, form)
    blank.execute("rollback")
    assert blank.execute(CODE).fetchall() == []
    blank.execute(f"set role {owner}")
    install(blank, form)


def test_a_schema_of_ones_group_is_taken(blank: psycopg.Connection, owner: str) -> None:
    blank.execute(f"create schema queue authorization {owner}")
    blank.execute(f"create role test_member in role {owner}")
    blank.execute(f"grant create on database {blank.info.dbname} to test_member")
    try:
        blank.execute("set role test_member")
        install(blank, "plain")
    finally:
        blank.execute("rollback")
        blank.execute("reset role")
        blank.execute("drop owned by test_member cascade")
        blank.execute("drop role test_member")


# The build itself


@pytest.fixture(scope="module")
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pgdefer_build", ROOT / "extension" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The smallest sources that build."""
    for folder in ("sql", "tables", "upgrades"):
        (tmp_path / folder).mkdir()
    (tmp_path / "manifest").write_text("sql/10_a.sql  # first\n@tables\nsql/20_b.sql\n")
    (tmp_path / "sql" / "10_a.sql").write_text("-- a\n")
    (tmp_path / "sql" / "20_b.sql").write_text("-- b @VERSION@\n")
    (tmp_path / "tables" / "20_u.sql").write_text("create table u ();\n")
    (tmp_path / "tables" / "10_t.sql").write_text("create table t ();\n")
    (tmp_path / "pgdefer.control").write_text("default_version = '@VERSION@'\n")
    return tmp_path


def test_build_puts_the_parts_in_order(build: ModuleType, source: Path, tmp_path: Path) -> None:
    build.build(source, tmp_path / "out")
    text = (tmp_path / "out" / "pgdefer.sql").read_text()
    parts = ["-- a\n", "create table t", "create table u", "end\n$pgdefer_tables$;", "-- b "]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert f"-- b {build.version()}\n" in text
    names = {path.name for path in (tmp_path / "out" / "extension").iterdir()}
    assert names == {"pgdefer.control", f"pgdefer--{build.version()}.sql"}


def test_build_removes_what_is_stale(build: ModuleType, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (source / "upgrades" / "pgdefer--0.0.1--0.0.2.sql").write_text("-- upgrade\n")
    build.build(source, out)
    assert (out / "extension" / "pgdefer--0.0.1--0.0.2.sql").exists()
    (source / "upgrades" / "pgdefer--0.0.1--0.0.2.sql").unlink()
    build.build(source, out)
    assert not list(out.rglob("*--0.0.2.sql"))


@pytest.mark.parametrize(
    ("manifest", "complaint"),
    [
        ("@tables\nsql/10_a.sql\n", "does not list sql/20_b.sql"),
        ("sql/10_a.sql\nsql/20_b.sql\n", "lacks the line @tables"),
        ("@tables\nsql/10_a.sql\nsql/20_b.sql\nsql/30_c.sql\n", "30_c.sql is listed"),
        ("@tables\nsql/10_a.sql\nsql/20_b.sql\nsql/10_a.sql\n", "names sql/10_a.sql twice"),
        ("@tables\nsql/10_a.sql\nsql/20_b.sql\n../secret.sql\n", "cannot read the entry"),
    ],
)
def test_build_refuses(build: ModuleType, source: Path, manifest: str, complaint: str) -> None:
    (source / "manifest").write_text(manifest)
    with pytest.raises(build.BuildError, match=complaint):
        build.build(source, source / "out")
    assert not (source / "out").exists()


def test_build_refuses_psql_commands(build: ModuleType, source: Path) -> None:
    (source / "sql" / "10_a.sql").write_text("-- a\n\\set x 1\n")
    with pytest.raises(build.BuildError, match=r"10_a\.sql:2: psql commands"):
        build.build(source, source / "out")
