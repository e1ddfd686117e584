"""The how-to pages are typed in, each from an empty database, and print the documented output."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

from pgdefer.database.embedded import EmbeddedServer
from support import ROOT, server_program

from .test_docs import END, Block, Reader, follow

pytestmark = pytest.mark.client

# Runs one Python block after another: starting Python for each would take most of the time.
PYTHON = f"""
import json
import sys

for line in sys.stdin:
    sys.modules.pop("shop", None)
    exec(json.loads(line), {{"__name__": "__main__"}})
    print({END!r}, flush=True)
"""

# What a worker would do to new jobs, on pages that tell the reader to do it after each block.
TICK = Block(0, "sql", "select queue.tick() \\g /dev/null")


class QuickReader(Reader):
    """A reader with one Python for all blocks."""

    _python: subprocess.Popen[str] | None = None

    def _run(self, command: list[str]) -> str:
        if command[:2] != [sys.executable, "-c"]:
            return super()._run(command)
        if self._python is None:
            self._python = subprocess.Popen(
                [sys.executable, "-c", PYTHON],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=self.folder,
                env=self.environment,
            )
        assert self._python.stdin is not None
        assert self._python.stdout is not None
        self._python.stdin.write(json.dumps(command[2]) + "\n")
        self._python.stdin.flush()
        found = ""
        for line in self._python.stdout:
            if line.strip() == END:
                return found
            found += line
        raise AssertionError(f"{found}: it has failed, see stderr")

    def close(self) -> None:
        super().close()
        if self._python is not None:
            self._python.kill()
            self._python.communicate()


@pytest.fixture
def reader(server: EmbeddedServer, dsn: str, tmp_path: Path) -> Iterator[QuickReader]:
    info = conninfo_to_dict(dsn)
    names = {"PGHOST": "host", "PGUSER": "user", "PGDATABASE": "dbname"}
    environment = {name: str(info[key]) for name, key in names.items()}
    environment |= {"PGTZ": "UTC", "PGDEFER_TEST_SERVER": server.dsn("postgres")}
    # The many plugins of this project's own tests take seconds to load.
    environment |= {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": "-p no:cacheprovider"}
    reader = QuickReader(tmp_path, server, environment)
    yield reader
    reader.close()
    with psycopg.connect(dsn, autocommit=True) as connection:
        # Roles belong to the server, which other tests use.
        for (role,) in connection.execute(
            "select rolname from pg_roles where rolname like 'shop\\_%'"
        ).fetchall():
            name = sql.Identifier(role)
            connection.execute(sql.SQL("drop owned by {0}; drop role {0}").format(name))


# What a page takes for granted.
BEFORE = {"moving": Path(__file__).with_name("other_queues.sql").read_text("utf-8")}

LONG = {"production", "workflows"}
PAGES = [
    pytest.param(path.stem, marks=pytest.mark.long if path.stem in LONG else [])
    for path in sorted((ROOT / "docs" / "how-to").glob("*.md"))
]


@pytest.mark.parametrize("page", PAGES)
def test_how_to(reader: QuickReader, server: EmbeddedServer, page: str) -> None:
    path = f"docs/how-to/{page}.md"
    words = " ".join((ROOT / path).read_text("utf-8").split())
    ticks = "type `pgdefer db tick` after each block" in words

    def type_in(block: Block) -> str:
        if "pg backup" in block.text and server_program(server, "pg_dump") is None:
            return ""
        if ticks and block.language == "sql":
            reader.type_in(TICK)
        return reader.type_in(block)

    reader.type_in(Block(0, "sql", BEFORE.get(page, "")))
    follow(type_in, path)


def test_the_page_on_debugging_explains_every_answer_of_why() -> None:
    files = sorted((ROOT / "extension" / "inspect").glob("why*.sql"))
    source = "".join(file.read_text("utf-8") for file in files)
    answers = set(re.findall(r"'((?:its?|no|a|at|the next) [^']*[^' ][^']*)'", source))
    page = (ROOT / "docs" / "how-to" / "debugging.md").read_text("utf-8")
    table = re.findall(r"^\| ((?:its?|no|a|at) .*?) \|", page, re.MULTILINE)
    shown = [
        ".*".join(map(re.escape, cell.split("..."))) for row in table for cell in row.split(", ")
    ]
    assert len(answers) > 20
    assert not [text for text in answers if not any(re.match(start, text) for start in shown)]
    assert not [start for start in shown if not any(re.match(start, text) for text in answers)]
