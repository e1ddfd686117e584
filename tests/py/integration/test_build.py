"""The build installs in both forms, for any role that may create schemas, and only there."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import psycopg
import pytest

import pgdefer.database.embedded
from pgdefer.database import install as install_module
from pgdefer.database.embedded import EmbeddedServer
from releases import load_build
from support import ROOT, install_as

DROP_FUNCTIONS = re.findall(
    r"^do \$\$.*?^end \$\$;",
    (ROOT / "docs/installing.md").read_text("utf-8"),
    re.DOTALL | re.MULTILINE,
)[0]

# All of the code, in either form.
CODE = """
select p.oid::regprocedure::text, pg_get_functiondef(p.oid), obj_description(p.oid, 'pg_proc'),
  p.proacl::text
from pg_proc p where p.pronamespace = 'queue'::regnamespace order by 1
"""


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
    install_as(blank, "plain")
    defer_one(blank)
    install_as(blank, "plain")
    assert blank.execute("select count(*) from queue.job").fetchone() == (1,)
    assert blank.execute("select * from queue.check()").fetchall() == []


def test_dropping_the_extension_keeps_the_jobs(
    blank: psycopg.Connection, server: EmbeddedServer
) -> None:
    if server.major < 18:
        pytest.skip("the extension needs extension_control_path, which PostgreSQL 18 brought")
    install_as(blank, "extension")
    defer_one(blank)
    blank.execute("drop extension pgdefer")
    assert blank.execute("select count(*) from queue.job").fetchone() == (1,)
    install_as(blank, "extension")
    assert blank.execute("select count(*) from queue.job").fetchone() == (1,)
    assert blank.execute("select * from queue.check()").fetchall() == []


def test_both_forms_make_the_same_code(blank: psycopg.Connection, server: EmbeddedServer) -> None:
    if server.major < 18:
        pytest.skip("the extension needs extension_control_path, which PostgreSQL 18 brought")
    install_as(blank, "extension")
    extension = blank.execute(CODE).fetchall()
    blank.execute("drop extension pgdefer")
    blank.execute("drop schema queue cascade")
    install_as(blank, "plain")
    assert blank.execute(CODE).fetchall() == extension


def test_no_superuser_is_needed(blank: psycopg.Connection, owner: str, form: str) -> None:
    blank.execute(f"set role {owner}")
    install_as(blank, form)
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
        install_as(blank, form)
    blank.execute("rollback")
    assert blank.execute(CODE).fetchall() == []
    blank.execute(f"set role {owner}")
    install_as(blank, form)


@pytest.mark.parametrize("whose", ["PUBLIC", "test_evil"])
def test_a_schema_that_others_may_create_in_is_refused(
    blank: psycopg.Connection, owner: str, form: str, whose: str
) -> None:
    """A function beside the queue's that fits a call better would run with the owner's rights."""
    blank.execute(f"set role {owner}")
    blank.execute("create schema queue")
    blank.execute("reset role")
    blank.execute("create role test_evil")
    try:
        blank.execute(f"grant usage, create on schema queue to {whose}")
        blank.execute(f"set role {owner}")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="others may create") as no:
            install_as(blank, form)
        assert no.value.diag.message_detail == f"Roles: {whose}."
        blank.execute("rollback")
        blank.execute("set role test_evil")
        blank.execute(
            "create function queue._allowed_queues(text) returns text[] language sql as"
            " 'select null::text[]'"
        )
        blank.execute("reset role")
        blank.execute(f"revoke create on schema queue from {whose}")
        blank.execute(f"set role {owner}")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="others may create"):
            install_as(blank, form)
        blank.execute("rollback")
        blank.execute("reset role")
        blank.execute("drop function queue._allowed_queues(text)")
        blank.execute(f"set role {owner}")
        install_as(blank, form)
        assert blank.execute("select * from queue.check()").fetchall() == []
    finally:
        blank.execute("rollback")
        blank.execute("reset role")
        blank.execute("drop owned by test_evil")
        blank.execute("drop role test_evil")


def test_the_forms_do_not_mix(blank: psycopg.Connection, server: EmbeddedServer) -> None:
    if server.major < 18:
        pytest.skip("the extension needs extension_control_path, which PostgreSQL 18 brought")
    install_as(blank, "plain")
    defer_one(blank)
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="in the plain form"):
        install_as(blank, "extension")
    blank.execute("rollback")
    # As docs/installing.md says, also of triggers.
    trigger = "create trigger t after insert on customer execute function queue.defer_trigger('t')"
    blank.execute("create table customer ()")
    blank.execute(trigger.encode())
    with pytest.raises(psycopg.errors.DependentObjectsStillExist, match="defer_trigger"):
        blank.execute(DROP_FUNCTIONS.encode())
    blank.execute("drop trigger t on customer")
    blank.execute(DROP_FUNCTIONS.encode())
    install_as(blank, "extension")
    blank.execute(trigger.encode())
    blank.execute("drop trigger t on customer")
    assert blank.execute("select count(*) from queue.job").fetchone() == (1,)
    assert blank.execute("select * from queue.check()").fetchall() == []
    with pytest.raises(psycopg.errors.ObjectNotInPrerequisiteState, match="as an extension"):
        install_as(blank, "plain")
    blank.execute("rollback")
    blank.execute("drop extension pgdefer")
    install_as(blank, "plain")
    assert blank.execute("select count(*) from queue.job").fetchone() == (1,)


def test_a_schema_of_ones_group_is_taken(blank: psycopg.Connection, owner: str) -> None:
    blank.execute(f"create schema queue authorization {owner}")
    blank.execute(f"create role test_member in role {owner}")
    blank.execute(f"grant create on database {blank.info.dbname} to test_member")
    try:
        blank.execute("set role test_member")
        install_as(blank, "plain")
    finally:
        blank.execute("rollback")
        blank.execute("reset role")
        blank.execute("drop owned by test_member cascade")
        blank.execute("drop role test_member")


# The build


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return load_build()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The smallest sources that build."""
    for folder in ("base", "tables", "work", "upgrades"):
        (tmp_path / folder).mkdir()
    (tmp_path / "manifest").write_text(
        "base/a.sql  # first\ntables/u.sql\ntables/t.sql\nwork/b.sql\n"
    )
    (tmp_path / "macros").write_text(
        "one = 1  # the first\ntwo = 2\nboth = one | two\npair = 7, 8\nsay := return 'so';\n"
    )
    (tmp_path / "base" / "a.sql").write_text("-- a\n")
    (tmp_path / "work" / "b.sql").write_text("-- b @VERSION@\n")
    (tmp_path / "tables" / "u.sql").write_text("create table u ();\n")
    (tmp_path / "tables" / "t.sql").write_text("create table t ();\n")
    (tmp_path / "pgdefer.control").write_text("default_version = '@VERSION@'\n")
    return tmp_path


def test_build_puts_the_parts_in_order(build: ModuleType, source: Path, tmp_path: Path) -> None:
    out = tmp_path.with_name("out")
    build.build(source, out)
    text = (out / "pgdefer.sql").read_text()
    parts = ["-- a\n", "create table u", "create table t", "end\n$pgdefer_tables$;", "-- b "]
    places = [text.index(part) for part in parts]
    assert places == sorted(places)
    assert f"-- b {build.version()}\n" in text
    names = {path.name for path in (out / "extension").iterdir()}
    assert names == {"pgdefer.control", f"pgdefer--{build.version()}.sql"}


def test_build_removes_what_is_stale(build: ModuleType, source: Path, tmp_path: Path) -> None:
    out = tmp_path.with_name("out")
    step = source / "upgrades" / f"pgdefer--0.0.1--{build.version()}.sql"
    step.write_text("-- a step\n")
    build.build(source, out)
    assert (out / "extension" / step.name).exists()
    step.unlink()
    build.build(source, out)
    assert not list(out.rglob("*--0.0.1--*.sql"))


def test_all_files_state_the_same_version(build: ModuleType) -> None:
    meta = json.loads((ROOT / "META.json").read_text("utf-8"))
    (provided,) = meta["provides"].values()
    assert {meta["version"], provided["version"]} == {build.version()}
    assert (ROOT / provided["file"]).name == f"pgdefer--{build.version()}.sql"
    assert (ROOT / provided["file"]).is_file()
    assert f"\nversion: {build.version()}\n" in (ROOT / "CITATION.cff").read_text("utf-8")
    assert f"\n## {build.version()} (" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_make_install_copies_the_extension(build: ModuleType, tmp_path: Path) -> None:
    config = tmp_path / "pg_config"
    config.write_text("#!/bin/sh\n[ $1 = --sharedir ] && echo '/usr/share/a server'\n", "utf-8")
    config.chmod(0o755)
    subprocess.run(
        ["make", "install", f"PG_CONFIG={config}", f"DESTDIR={tmp_path}/root"], cwd=ROOT, check=True
    )
    installed = tmp_path / "root/usr/share/a server/extension"
    made = {path.name: path.read_bytes() for path in (build.BUILD / "extension").iterdir()}
    assert {path.name: path.read_bytes() for path in installed.iterdir()} == made


def test_the_wheel_carries_the_code_once_and_makes_both_forms(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path)
    files = build.render(ROOT / "extension", build.version())
    wanted = {f"extension/{name}" for name in files.keys() - {"pgdefer.sql"}} | {"plain.sql"}
    for folder in build.ON_DEMAND:
        paths = (ROOT / "extension" / folder).iterdir()
        wanted |= {f"{folder}/{path.name}" for path in paths}
    assert sorted(name for name in names if name.startswith("pgdefer/_sql/")) == sorted(
        f"pgdefer/_sql/{name}" for name in wanted
    )
    folder = tmp_path / "pgdefer" / "_sql"
    assert (folder / "plain.sql").stat().st_size < 10_000
    monkeypatch.setattr(pgdefer.database.embedded, "sql_folder", lambda: folder)
    assert install_module._script() == files["pgdefer.sql"]


def test_a_wheel_has_what_else_the_plain_file_does(build: ModuleType, source: Path) -> None:
    """Also if steps of an upgrade drop something before the functions are replaced."""
    add_step(source, "0.9.0", "1.0.0", "-- @code\ndrop function if exists a();\n")
    files = build.render(source, "1.0.0")
    left = build.without_code(files["pgdefer--1.0.0.sql"], files["pgdefer.sql"])
    assert "drop function if exists a();" in left
    assert "create table t" not in left
    assert left.count(build.CODE_MARK) == 1
    with pytest.raises(build.BuildError, match="does not contain"):
        build.without_code(files["pgdefer--1.0.0.sql"], "select 1;")


def add_step(source: Path, before: str, after: str, text: str = "") -> None:
    (source / "upgrades" / f"pgdefer--{before}--{after}.sql").write_text(text)


def test_build_leads_from_each_release_to_this(build: ModuleType, source: Path) -> None:
    add_step(source, "0.9.0", "0.10.0", "-- @code\ndrop function if exists a();\n")
    index = "create index concurrently i on queue.job (x)"
    text = f"-- @tables\ncreate table one ();\n-- @concurrently\n{index};\n"
    add_step(source, "0.10.0", "1.0.0", text)
    files = build.render(source, "1.0.0")
    assert {name for name in files if name.count("--") == 2} == {
        "pgdefer--0.9.0--1.0.0.sql",
        "pgdefer--0.10.0--1.0.0.sql",
    }
    assert "drop function if exists a();" in files["pgdefer--0.9.0--1.0.0.sql"]
    assert "drop function if exists a();" in files["pgdefer.sql"]
    assert "drop function if exists a();" not in files["pgdefer--0.10.0--1.0.0.sql"]
    assert "drop function if exists a();" not in files["pgdefer--1.0.0.sql"]
    for name in ("pgdefer--0.9.0--1.0.0.sql", "pgdefer--1.0.0.sql", "pgdefer.sql"):
        code = files[name]
        assert "return array['0.9.0', '0.10.0', '1.0.0']::text[];" in code
        assert "when '0.10.0' then array['create index concurrently i on queue.job (x)']" in code
        assert "if p_from = '0.10.0' then\ncreate table one ();\n    return '1.0.0';" in code


@pytest.mark.parametrize(
    ("steps", "complaint"),
    [
        ({("0.1.0", "0.2.0"): ""}, "no chain that ends with 0.3.0"),
        ({("0.1.0", "0.2.0"): "", ("0.2.1", "0.3.0"): ""}, "no chain"),
        ({("0.3.0", "0.3.0"): ""}, "no chain"),
        ({("0.2.0", "0.3.0"): ""}, "leads from the release 0.1.0 to 0.3.0"),
        ({("0.1.0", "0.3.0"): "-- @table\n"}, "each section once, of code, concurrently, tables"),
        ({("0.1.0", "0.3.0"): "-- @code\n-- @code\n"}, "each section once"),
        ({("0.1.0", "0.3.0"): "select 1;\n-- @code\n"}, "before the first section"),
        ({("0.1.0", "0.3.0"): "-- @code\n\\echo\n"}, "psql commands"),
        (
            {("0.1.0", "0.3.0"): "-- @concurrently\ncreate index a on queue.b (c);"},
            "not of the form",
        ),
    ],
)
def test_build_refuses_steps(
    build: ModuleType, source: Path, steps: dict[tuple[str, str], str], complaint: str
) -> None:
    build.freeze(source, "0.1.0")
    for (before, after), text in steps.items():
        add_step(source, before, after, text)
    with pytest.raises(build.BuildError, match=complaint):
        build.render(source, "0.3.0")


def test_a_release_is_frozen(build: ModuleType, source: Path) -> None:
    path = build.freeze(source, "1.2.3")
    assert path == source / "releases" / "pgdefer--1.2.3.sql"
    assert path.read_text() == build.render(source, "1.2.3")[path.name]
    assert "@VERSION@" not in path.read_text()
    build.freeze(source, "1.2.3")
    (source / "base" / "a.sql").write_text("-- changed\n")
    with pytest.raises(build.BuildError, match="is frozen and differs"):
        build.freeze(source, "1.2.3")
    build.freeze(source, "1.2.3", force=True)
    assert "-- changed" in path.read_text()


def test_what_is_released_has_not_changed(build: ModuleType) -> None:
    """The sources may differ from a frozen release only under another version."""
    path = ROOT / "extension" / "releases" / f"pgdefer--{build.version()}.sql"
    if not path.exists():
        pytest.skip(f"{build.version()} is not released yet")
    rendered = build.render(ROOT / "extension", build.version())[path.name]
    assert rendered == path.read_text("utf-8")


ALL = "base/a.sql\ntables/t.sql\ntables/u.sql\nwork/b.sql\n"


@pytest.mark.parametrize(
    ("manifest", "complaint"),
    [
        ("tables/t.sql\ntables/u.sql\nbase/a.sql\n", "does not list work/b.sql"),
        ("tables/t.sql\nbase/a.sql\nwork/b.sql\n", "does not list tables/u.sql"),
        ("base/a.sql\nwork/b.sql\n", "must name the files of tables/"),
        ("tables/t.sql\nbase/a.sql\ntables/u.sql\nwork/b.sql\n", "one after another"),
        (f"{ALL}work/c.sql\n", "c.sql is listed"),
        (f"{ALL}base/a.sql\n", "names base/a.sql twice"),
        (f"{ALL}../secret.sql\n", "cannot read the entry"),
    ],
)
def test_build_refuses(build: ModuleType, source: Path, manifest: str, complaint: str) -> None:
    (source / "manifest").write_text(manifest)
    with pytest.raises(build.BuildError, match=complaint):
        build.build(source, source / "out")
    assert not (source / "out").exists()


def test_build_refuses_psql_commands(build: ModuleType, source: Path) -> None:
    (source / "base" / "a.sql").write_text("-- a\n\\set x 1\n")
    with pytest.raises(build.BuildError, match=r"a\.sql:2: psql commands"):
        build.build(source, source / "out")


def test_build_puts_macros_in(build: ModuleType, source: Path) -> None:
    (source / "base" / "a.sql").write_text("{{both}} {{one}} ({{pair}}) {{say}}\n")
    text = build.render(source, "1.0.0")["pgdefer.sql"]
    assert "3/* both */ 1/* one */ (7, 8/* pair */) return 'so';\n" in text


@pytest.mark.parametrize(
    ("macros", "complaint"),
    [
        ("one = 1\n", "two.* is not defined in"),
        ("two = 2\ntwo = 3\n", "names two twice"),
        ("two := 'a'\ntwo := 'b'\n", "names two twice"),
        ("two = 2\ntwo := 'b'\n", "names two twice"),
        ("two = one | 1\n", "two names 'one', which is not a bit"),
        ("two\n", "cannot read 'two'"),
    ],
)
def test_build_refuses_macros(build: ModuleType, source: Path, macros: str, complaint: str) -> None:
    (source / "macros").write_text(macros)
    (source / "base" / "a.sql").write_text("{{two}}\n")
    with pytest.raises(build.BuildError, match=complaint):
        build.render(source, "1.0.0")
