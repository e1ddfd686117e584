"""The documentation's examples are typed in and run, and print the documented output."""

from __future__ import annotations

import configparser
import dataclasses
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

import pgdefer
from pgdefer.database.embedded import EmbeddedServer
from pgdefer.options import ARGUMENTS
from support import ROOT, output_of, server_program
from workers import wait_for

pytestmark = pytest.mark.client

END = "=== that was it ==="


class Block(NamedTuple):
    line: int
    language: str
    text: str


def blocks(path: str) -> list[Block]:
    """Return the fenced blocks of a page."""
    found = []
    page = (ROOT / path).read_text("utf-8")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        line = page.count("\n", 0, match.start()) + 1
        found.append(Block(line, match[1], match[2]))
    return found


class Reader:
    """A reader who types in a page, with a terminal for each kind of block."""

    def __init__(self, folder: Path, server: EmbeddedServer, environment: dict[str, str]) -> None:
        self.folder = folder
        tools = (Path(sys.executable).parent, server.bin_dir)
        # If the tests run from the sources, so do the programs.
        sources = str(ROOT / "python")
        path = os.pathsep.join([*map(str, tools), os.environ["PATH"]])
        self.environment = os.environ | {"PATH": path, "PYTHONPATH": sources} | environment
        self._psql = server_program(server, "psql") or "psql"
        self._session: subprocess.Popen[str] | None = None
        self._background: list[tuple[str, subprocess.Popen[str]]] = []

    def install(self) -> None:
        """Create the pages' database, with the queue."""
        self._run(["bash", "-c", "createdb shop && pgdefer install"])

    def type_in(self, block: Block) -> str:
        """Return the output."""
        first, _, rest = block.text.partition("\n")
        match block.language:
            case "python" if first.startswith("# shop.py"):
                with (self.folder / "shop.py").open("a") as file:
                    file.write(f"\n\n{block.text}")
                self._restart()
                return ""
            case "python" if found := re.fullmatch(r"# ((migrations/versions/)?\w+\.py)", first):
                (self.folder / found[1]).write_text(rest)
                return ""
            case "python" if first == "# migrations/env.py" and "target_metadata" in rest:
                path = self.folder / first.removeprefix("# ")
                path.write_text(path.read_text().replace("target_metadata = None\n", rest))
                return ""
            case "python" if first == "# migrations/env.py":
                self._configure(rest)
                return ""
            case "python":  # a reader's machine is not as busy
                text = block.text.replace("timeout=10)", "timeout=300)")
                return self._run([sys.executable, "-c", text])
            case "ini":
                self._merge(block.text)
                return ""
            case "sql":
                return self._sql(block.text)
            case "sh" if first == "# in another terminal":
                self._background.append((rest, self._start(rest)))
                return ""
            case "sh":
                return self._run(["bash", "-e", "-c", block.text])
        return ""

    def _run(self, command: list[str]) -> str:
        return output_of(command, self.folder, self.environment)

    def _sql(self, text: str) -> str:
        """Type into the single psql session."""
        if self._session is None:
            self._session = subprocess.Popen(
                [self._psql, "-X", "-q", "-v", "ON_ERROR_STOP=1"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=self.folder,
                env=self.environment,
            )
        assert self._session.stdin is not None
        assert self._session.stdout is not None
        self._session.stdin.write(f"{text}\n\\echo {END}\n")
        self._session.stdin.flush()
        found = ""
        for line in self._session.stdout:
            if line.strip() == END:
                return found
            found += line
        raise AssertionError(found)

    def _start(self, command: str) -> subprocess.Popen[str]:
        """Start a program; wait until it serves, if it is a worker."""
        before = self._registered()
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.environment, text=True
        )
        if command.startswith("pgdefer worker"):
            wait_for(lambda: process.poll() is not None or self._registered() != before)
            assert process.poll() is None, command
        return process

    def _registered(self) -> str:
        return self._sql("select max(id) from queue.workers;")

    def _merge(self, text: str) -> None:
        """Apply the lines of a block to alembic.ini."""
        path = self.folder / "alembic.ini"
        file, shown = configparser.RawConfigParser(), configparser.RawConfigParser()
        file.read(path)
        shown.read_string(text)
        for section in shown.sections():
            for key, value in shown.items(section):
                file.set(section, key, value)
        with path.open("w") as opened:
            file.write(opened)

    def _configure(self, text: str) -> None:
        """Add the options of a block to each call of context.configure in env.py."""
        (options,) = re.findall(
            r"^context\.configure\(\n    \.\.\.,\n(.*?)^\)", text, re.MULTILINE | re.DOTALL
        )
        path = self.folder / "migrations" / "env.py"
        imports, _, _ = text.partition("context.configure")
        page, count = re.subn(r"(context\.configure\()", rf"\1{options.strip()}", path.read_text())
        assert count == 2
        path.write_text(imports + page)

    def _restart(self) -> None:
        """Restart programs that have imported the module: they do not know later additions."""
        for number, (command, process) in enumerate(self._background):
            process.terminate()
            process.wait(300)
            self._background[number] = (command, self._start(command))

    def close(self) -> None:
        for process in [self._session, *(process for _, process in self._background)]:
            if process is not None:
                process.kill()
                process.communicate()


@pytest.fixture
def reader(server: EmbeddedServer, tmp_path: Path) -> Iterator[Reader]:
    info = conninfo_to_dict(server.dsn("postgres"))
    environment = {"PGHOST": str(info["host"]), "PGUSER": str(info["user"]), "PGDATABASE": "shop"}
    reader = Reader(tmp_path, server, environment | {"PGTZ": "UTC"})
    yield reader
    reader.close()
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute("drop database if exists shop with (force)")


def squeezed(text: str) -> list[str]:
    """Return the lines without trailing blanks, whatever the widths of columns."""
    lines = (re.sub(r"-+", "-", re.sub(r" +", " ", line)).strip() for line in text.splitlines())
    return [line for line in lines if line]


def follow(
    type_in: Callable[[Block], str],
    page: str,
    *,
    normal: Callable[[str], object] = squeezed,
    asks: Callable[[Block], bool] = lambda _: False,
) -> None:
    """Type in a page; it must print what the page shows.

    A block that only asks is typed in again for some time: nobody types this fast, so workers may
    not have seen a job yet.
    """
    typed, output = Block(0, "", ""), ""
    for block in blocks(page):
        where = f"{page}:{block.line}"
        try:
            if block.language != "text":
                typed, output = block, type_in(block)
                continue
            end = time.monotonic() + 300
            while asks(typed) and normal(output) != normal(block.text) and time.monotonic() < end:
                output = type_in(typed)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None
        assert normal(output) == normal(block.text), where


def test_the_tutorial(reader: Reader) -> None:
    follow(
        reader.type_in,
        "docs/tutorial.md",
        asks=lambda block: block.text.startswith("select queue.why"),
    )


BEFORE_SQL = """
create table account (id bigint primary key, balance numeric);
insert into account values (1, 100);
create table customer (id bigint primary key);
"""


def test_the_readme(reader: Reader) -> None:
    reader.install()
    reader.type_in(Block(0, "sql", BEFORE_SQL))
    follow(reader.type_in, "README.md")
    reader.type_in(Block(0, "sql", "insert into customer values (1);"))
    found = reader.type_in(Block(0, "sql", "select task, queue, lock from queue.jobs order by id;"))
    assert squeezed(found)[2:] == [
        "receipt | default | account:1",
        "receipt | default | account:1",
        "receipt | default | account:1",
        "welcome | mail |",
        "(4 rows)",
    ]
    reader.type_in(Block(0, "sh", "pgdefer worker -A shop --drain"))
    found = reader.type_in(Block(0, "sql", "select name, value from queue.steps where job_id = 1;"))
    assert squeezed(found)[2:] == ["number | 1001", "(1 row)"]


REQUESTS = """
from fastapi.testclient import TestClient
from pooled import web

with TestClient(web) as client:
    for id in range(2):
        for path in (f"/pictures/{id}", f"/pictures/{id}/thumbnail"):
            print(client.post(path).status_code)
"""


def test_the_page_on_python(reader: Reader) -> None:
    reader.install()
    follow(reader.type_in, "docs/python.md")
    reader.type_in(Block(0, "sh", "pgdefer worker -A shop --drain"))
    found = reader.type_in(
        Block(0, "sql", "select task, state, count(*) from queue.jobs group by 1, 2 order by 1, 2;")
    )
    assert squeezed(found)[2:] == [
        "inner | failed | 1",
        "letter | failed | 1",
        "letter | succeeded | 1",
        "outer | succeeded | 1",
        "resize | scheduled | 1",
        "resize | succeeded | 9",
        "visit | failed | 1",
        "visit | succeeded | 2",
        "(8 rows)",
    ]
    reader.type_in(Block(0, "sh", "psql -c 'create table picture (id int)'"))
    assert reader.type_in(Block(0, "python", REQUESTS)).split() == ["200"] * 4
    reader.type_in(Block(0, "sh", "pgdefer worker -A pooled:jobs --drain"))
    query = "select state from queue.jobs where task = 'thumbnail'"
    found = reader.type_in(Block(0, "sh", f'psql -At -c "{query}"'))
    assert found.split() == ["succeeded"] * 4


def test_the_page_on_durable_jobs(reader: Reader) -> None:
    def normal(text: str) -> list[str]:
        return squeezed(re.sub(r"until \d.*", "until TIME", text))

    follow(reader.type_in, "docs/durable.md", normal=normal)
    found = reader.type_in(Block(0, "sh", "psql -At -c 'select * from parcel'"))
    assert found.strip() == "1|1.5"


def test_the_page_on_many_databases(reader: Reader, server: EmbeddedServer) -> None:
    try:
        follow(reader.type_in, "docs/many-databases.md")
    finally:
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
            connection.execute("drop database if exists tenant_a with (force)")
            connection.execute("drop database if exists tenant_b with (force)")


@pytest.mark.long
def test_the_page_on_scaling(reader: Reader, server: EmbeddedServer) -> None:
    try:
        # The page takes the third shard's database for granted.
        reader.type_in(Block(0, "sh", "createdb shop_c && pgdefer install --dsn dbname=shop_c"))
        follow(reader.type_in, "docs/scaling.md")
    finally:
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
            for name in ("shop_a", "shop_b", "shop_c"):
                connection.execute(f"drop database if exists {name} with (force)".encode())


def words(path: str) -> set[str]:
    """Return the words that a page marks as code."""
    page = re.sub(
        r"^```.*?^```$", "", (ROOT / path).read_text("utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    return set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]*)`", page))))


def test_every_name_is_listed() -> None:
    options = (pgdefer.TaskOptions, pgdefer.DeferOptions, pgdefer.RecurringOptions)
    lists = (*options, pgdefer.HandlingOptions, pgdefer.WorkerOptions)
    names = {name for kind in lists for name in kind.__annotations__} | set(pgdefer.__all__)
    assert names - words("docs/python.md") == set()
    options_of_defer = set(pgdefer.DeferOptions.__annotations__) - ARGUMENTS
    policy = {field.name for field in dataclasses.fields(pgdefer.Retry)}
    assert (options_of_defer | policy) - words("docs/reference.head.md") == set()


def test_the_page_on_sqlalchemy(reader: Reader) -> None:
    reader.install()
    follow(reader.type_in, "docs/sqlalchemy.md")


MODELS = """# shop.py
from sqlalchemy.orm import DeclarativeBase


class Base(DeclarativeBase):
    pass
"""


@pytest.mark.long
def test_the_page_on_alembic(reader: Reader) -> None:
    reader.type_in(Block(0, "sh", "createdb shop"))
    reader.type_in(Block(0, "python", MODELS))
    for block in blocks("docs/alembic.md"):
        if "version_locations" in block.text:
            # The other way begins: for a reader who has not followed the first.
            reader.type_in(Block(0, "sh", "rm migrations/versions/*.py"))
            reader.type_in(Block(0, "sh", "dropdb --force shop && createdb shop"))
        if "--sql" in block.text:
            reader.type_in(block._replace(text=block.text.replace("head", "heads")))
            # Its output makes the same as the existing files.
            reader.type_in(Block(0, "sh", "dropdb --force shop && createdb shop"))
            reader.type_in(Block(0, "sh", "psql -q -v ON_ERROR_STOP=1 -f upgrade.sql"))
        else:
            output = reader.type_in(block)
            if "alembic current" in block.text:
                assert "pgdefer_0_1_0 (head)" in output
            if block.text.startswith("# migrations/env.py"):
                reader.type_in(Block(0, "sh", "alembic check"))
    found = reader.type_in(Block(0, "sh", "psql -At -c 'select tables from queue.version()'"))
    assert found.strip() == "0.1.0"
    refused = "if alembic downgrade pgdefer@base 2> log; then false; fi"
    reader.type_in(Block(0, "sh", f"{refused}\ngrep -q 'uninstall removes every job' log"))
    reader.type_in(Block(0, "sh", "alembic -x pgdefer_force=yes downgrade pgdefer@base"))
    assert not reader.type_in(
        Block(0, "sh", "psql -At -c \"select to_regclass('queue.job')\"")
    ).strip()
