"""Examples of pages that explain more than they show are typed in, too."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from pgdefer.database.embedded import EmbeddedServer
from support import ROOT

from .test_docs import Block, Reader, blocks, reader, squeezed
from .test_docs_blocks import reason
from .test_docs_operating import matches

__all__ = ["reader"]

pytestmark = pytest.mark.client

ROLES = ["web", "jobs", "oncall", "grafana", "shop", "shop_web", "shop_jobs", "shop_team"]


DAY = r"\d{4}-\d\d-\d\d \d\d:"


def shown(page: str) -> list[Block]:
    """Return the blocks of a page that can be typed in."""
    return [block for block in blocks(page) if reason(page, block) is None]


@pytest.fixture
def roles(server: EmbeddedServer) -> Iterator[None]:
    """Let the pages' roles exist during a test."""
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        for name in ROLES:
            connection.execute(f"create role {name}".encode())
        yield
        connection.execute("drop database if exists shop with (force)")
        for name in [*ROLES, "ann"]:
            connection.execute(f"drop role if exists {name}".encode())


def sql_of(reader: Reader, page: str) -> None:
    """Type in the SQL of a page, and compare its output."""
    reader.install()
    output = ""
    for block in shown(page):
        if block.language == "text":
            # The pages show a day and an hour, which differ.
            said, text = (re.sub(DAY, "2000-01-01 00:", t) for t in (output, block.text))
            assert matches(said, text), f"{page}:{block.line}: {output}"
        elif block.language == "sql":
            output = reader.type_in(block)


@pytest.mark.usefixtures("roles")
@pytest.mark.parametrize("page", ["docs/security.md", "docs/installing.md", "docs/page.md"])
def test_the_roles(reader: Reader, page: str) -> None:
    sql_of(reader, page)
    query = "select count(*) > 0 as granted from queue.access"
    assert "t" in squeezed(reader.type_in(Block(0, "sql", f"{query};")))


def test_the_page_on_recurring_runs(reader: Reader) -> None:
    sql_of(reader, "docs/recurring.md")
    head = "from datetime import datetime\nimport pgdefer\napp = pgdefer.App()\n"
    (block,) = [block for block in shown("docs/recurring.md") if block.language == "python"]
    (reader.folder / "reports.py").write_text(head + block.text)
    reader.type_in(Block(0, "sh", "pgdefer worker -A reports --drain"))
    query = "select name from queue.schedules order by name;"
    found = squeezed(reader.type_in(Block(0, "sql", query)))[2:]
    assert found == ["daily report", "reports.send_report", "weekly report", "(3 rows)"]


def test_the_page_on_upgrading(reader: Reader, server: EmbeddedServer) -> None:
    if server.major < 18:
        pytest.skip("the extension needs extension_control_path, which PostgreSQL 18 brought")
    sql_of(reader, "docs/upgrading.md")
    found = reader.type_in(
        Block(0, "sql", "select code = tables as is_current from queue.version();")
    )
    assert "t" in squeezed(found)


def test_the_calls_of_the_worker_protocol(dsn: str) -> None:
    """The page has their parameters and results as the catalog has them."""
    (block,) = [
        b for b in blocks("docs/worker-protocol.md") if b.text.startswith("register_worker(")
    ]
    calls = re.findall(r"^(\w+)\((.*?)\):\s+(.*?)(?=^\w|\Z)", block.text, re.MULTILINE | re.DOTALL)
    assert len(calls) == 10
    columns: dict[str, str] = {}
    with psycopg.connect(dsn) as connection:
        for name, parameters, result in calls:
            found = connection.execute(
                "select pg_get_function_arguments(oid), pg_get_function_result(oid) from pg_proc"
                " where oid = to_regproc('queue.' || %s)",
                [name],
            ).fetchone()
            assert found is not None, name
            arguments, returned = (
                part.replace("timestamp with time zone", "timestamptz") for part in found
            )
            arguments = re.sub(r"DEFAULT ('{}'|\w+)(::[\w\[\]]+)?", r"= \1", arguments)
            assert parameters == arguments.replace("= NULL", "= null"), name
            columns[name] = re.sub(
                r"^(one row|rows) \((.*)\)$", r"TABLE(\2)", " ".join(result.split())
            )
            inherited = columns.get("fetch", "")[len("TABLE(") : -1]
            assert columns[name].replace("the columns of fetch", inherited) == returned, name


def test_apps_behind_pgbouncer(reader: Reader) -> None:
    """They connect when they have something to do."""
    found = [block for block in shown("docs/installing.md") if block.language == "python"]
    assert len(found) == 2
    for block in found:
        reader.type_in(block._replace(text=f"import pgdefer\n{block.text}\nprint(app)"))


@pytest.mark.long
def test_the_embedded_server(reader: Reader) -> None:
    """The folder must be one that the server's own user may enter."""
    page = [block for block in shown("docs/installing.md") if block.language == "sh"]
    assert [block.text.count("pgdefer ") for block in page] == [2, 2]
    with tempfile.TemporaryDirectory(prefix="pgdefer-docs-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        folder.chmod(0o755)
        reader.folder = folder
        reader.environment = {
            key: value for key, value in reader.environment.items() if not key.startswith("PG")
        } | {"PGDEFER_HOME": str(folder / "server")}
        try:
            first, last = page
            text = re.sub(r"(pgdefer psql) .*", r"\1 < /dev/null", first.text)
            assert reader.type_in(first._replace(text=text)).startswith("1\n")
            reader.type_in(Block(0, "sh", "pgdefer queue create demo"))
            made = "pgdefer psql -- -q -c 'create schema pgdefer_demo'"
            reader.type_in(Block(0, "sh", made))
            reader.type_in(last)
            left = "pgdefer psql -- -At -c 'select task from queue.jobs'"
            assert reader.type_in(Block(0, "sh", left)).split() == ["greet"]
        finally:
            EmbeddedServer(folder / "server").stop("immediate")


MOUNTED = """
from fastapi.testclient import TestClient
print(TestClient(app).get("/queue/login").status_code)
"""


def test_the_page_mounted(reader: Reader) -> None:
    (block,) = [block for block in shown("docs/page.md") if block.language == "python"]
    assert reader.type_in(block._replace(text=block.text + MOUNTED)).split() == ["200"]


def test_the_exporter_reads_every_column(dsn: str) -> None:
    (block,) = [block for block in blocks("docs/operating.md") if block.language == "yaml"]
    names = re.findall(r"- (\w+): \{usage", block.text)
    with psycopg.connect(dsn) as connection:
        cursor = connection.execute("select * from queue.metrics")
        assert cursor.description is not None
        assert names == [column.name for column in cursor.description]


def test_the_commands_of_troubleshooting_exist() -> None:
    headings = (ROOT / "docs" / "command-line.md").read_text("utf-8")
    block = blocks("docs/operating.md")[0]
    commands = re.findall(r"^\$ (pgdefer(?: [a-z]+)+)", block.text, re.MULTILINE)
    assert len(commands) == 11
    for command in commands:
        assert f"\n## {command}\n" in headings
