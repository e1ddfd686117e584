"""What the documentation shows is typed in and run, and prints what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from pgdefer._server import EmbeddedServer
from support import ROOT, server_program

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
    """Somebody who types in a page, with a terminal for each kind of block."""

    def __init__(self, folder: Path, server: EmbeddedServer, environment: dict[str, str]) -> None:
        self.folder = folder
        tools = (Path(sys.executable).parent, server.bin_dir)
        # Where the tests run from the sources, so do the programs.
        sources = str(ROOT / "python")
        path = os.pathsep.join([*map(str, tools), os.environ["PATH"]])
        self.environment = os.environ | {"PATH": path, "PYTHONPATH": sources} | environment
        self._psql = server_program(server, "psql") or "psql"
        self._session: subprocess.Popen[str] | None = None
        self._background: list[tuple[str, subprocess.Popen[str]]] = []

    def type_in(self, block: Block) -> str:
        """Return what is printed."""
        first, _, rest = block.text.partition("\n")
        match block.language:
            case "python" if first.startswith("# shop.py"):
                with (self.folder / "shop.py").open("a") as file:
                    file.write(f"\n\n{block.text}")
                self._restart()
                return ""
            case "python":
                return self._run([sys.executable, "-c", block.text])
            case "sql":
                return self._sql(block.text)
            case "sh" if first == "# in another terminal":
                self._background.append((rest, self._start(rest)))
                return ""
            case "sh":
                return self._run(["bash", "-e", "-c", block.text])
        return ""

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            check=False,
            cwd=self.folder,
            env=self.environment,
            timeout=60,
        )
        assert not done.returncode, done.stdout + done.stderr
        return done.stdout

    def _sql(self, text: str) -> str:
        """Type into the one session of psql."""
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
        return subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.environment, text=True
        )

    def _restart(self) -> None:
        """Start again what has imported the module: it knows nothing of what was added since."""
        for number, (command, process) in enumerate(self._background):
            process.terminate()
            process.wait(20)
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
    """Return the lines, blanks at their ends and the widths of columns aside."""
    lines = (re.sub(r"-+", "-", re.sub(r" +", " ", line)).strip() for line in text.splitlines())
    return [line for line in lines if line]


def test_the_tutorial(reader: Reader) -> None:
    before, output = None, ""
    for block in blocks("docs/tutorial.md"):
        where = f"docs/tutorial.md:{block.line}"
        try:
            if block.language != "text":
                before, output = block, reader.type_in(block)
                continue
            end = time.monotonic() + 10
            while before and before.text.startswith("select queue.why") and time.monotonic() < end:
                # Nobody types as fast as this: workers may not have looked at the job yet.
                if squeezed(output) == squeezed(block.text):
                    break
                output = reader.type_in(before)
        except AssertionError as error:
            raise AssertionError(f"{where}: {error}") from None
        assert squeezed(output) == squeezed(block.text), where


BEFORE_SQL = """
create table account (id bigint primary key, balance numeric);
insert into account values (1, 100);
create table customer (id bigint primary key);
"""
BEFORE_PYTHON = """
import psycopg
session = psycopg.connect()
"""
AFTER_PYTHON = """
session.commit()
"""


def test_the_readme(reader: Reader) -> None:
    reader.type_in(Block(0, "sh", "createdb shop && pgdefer install"))
    reader.type_in(Block(0, "sql", BEFORE_SQL))
    for block in blocks("README.md"):
        before, after = (BEFORE_PYTHON, AFTER_PYTHON) if block.language == "python" else ("", "")
        reader.type_in(block._replace(text=before + block.text + after))
    reader.type_in(Block(0, "sql", "insert into customer values (1);"))
    found = reader.type_in(Block(0, "sql", "select task, queue, lock from queue.jobs order by id;"))
    assert squeezed(found)[2:] == [
        "send_receipt | default | account:1",
        "send_receipt | default | account:1",
        "send_receipt | default | account:1",
        "welcome | mail |",
        "(4 rows)",
    ]
