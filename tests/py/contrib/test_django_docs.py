"""The examples of the page on Django are typed in and run, and print the documented output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import django
import psycopg
import pytest

from pgdefer.database.embedded import EmbeddedServer
from support import ROOT, output_of

from .conftest import PROJECT

pytestmark = pytest.mark.client

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ONLY_6 = ", with Django 6"


@pytest.fixture
def environment(server: EmbeddedServer) -> Iterator[dict[str, str]]:
    """A shell's environment, which names an empty database."""
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as conn:
        conn.execute("create database django_docs")
        yield os.environ | {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(ROOT / "python"),
            "PGHOST": str(server.socket_folder),
            "PGUSER": "postgres",
            "PGDATABASE": "django_docs",
        }
        conn.execute("drop database django_docs with (force)")


class Reader:
    """A reader who types in a page."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder = folder
        self.environment = {k: v for k, v in environment.items() if k != "DJANGO_SETTINGS_MODULE"}

    def type_in(self, language: str, text: str) -> str:
        """Return the output."""
        if language == "sh":
            return self._run(["bash", "-e", "-c", text])
        first, _, rest = text.partition("\n")
        where = first.removeprefix("# ").removesuffix(ONLY_6)
        if where == "in manage.py shell":
            return self._run([sys.executable, "manage.py", "shell", "-v", "0", "-c", rest])
        with (self.folder / where).open("a") as file:
            file.write(f"\n\n{rest}")
        return ""

    def _run(self, command: list[str]) -> str:
        return output_of(command, self.folder, self.environment)


@pytest.mark.long
def test_the_page(tmp_path: Path, environment: dict[str, str]) -> None:
    reader = Reader(tmp_path, environment)
    page = (ROOT / "docs" / "django.md").read_text("utf-8")
    output: str | None = ""
    blocks = list(BLOCK.finditer(page))
    assert blocks
    for match in blocks:
        language, text = match.groups()
        line = page.count("\n", 0, match.start()) + 1
        if language == "text":
            assert output is None or output.strip() == text.strip(), f"docs/django.md:{line}"
        elif ONLY_6 in text.partition("\n")[0] and django.VERSION < (6, 0):
            output = None
        else:
            output = reader.type_in(language, text)


def test_the_example(environment: dict[str, str], free_tcp_port: int) -> None:
    readme = (PROJECT / "README.md").read_text("utf-8")
    start = BLOCK.search(readme)
    assert start is not None
    commands = start[2].replace("PGDATABASE=shop", "PGDATABASE=django_docs")
    shell = subprocess.Popen(
        ["bash", "-e", "-c", f"{commands.strip()} {free_tcp_port}"],
        cwd=PROJECT,
        env=environment,
        start_new_session=True,
    )
    try:
        dsn = f"host={environment['PGHOST']} user=postgres dbname=django_docs"
        with psycopg.connect(dsn, autocommit=True) as conn:
            end = time.monotonic() + 120
            placed = False
            while time.monotonic() < end:
                assert shell.poll() is None
                try:
                    if not placed:
                        url = f"http://127.0.0.1:{free_tcp_port}/orders"
                        urllib.request.urlopen(url, b"customer=Ann&total=7").close()
                        placed = True
                    if conn.execute("select text from shop_letter").fetchall():
                        break
                except (OSError, psycopg.errors.UndefinedTable):
                    pass
                time.sleep(0.05)
            found = conn.execute("select text from shop_letter").fetchall()
        assert found == [("Thank you, Ann: 7 EUR.",)]
    finally:
        os.killpg(shell.pid, signal.SIGTERM)
        shell.wait(60)
