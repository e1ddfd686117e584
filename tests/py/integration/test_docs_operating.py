"""The examples of the pages for operators are typed in, and print the documented output."""

from __future__ import annotations

import re

import psycopg
import pytest

from pgdefer.database.embedded import EmbeddedServer
from support import server_program

from .test_docs import Reader, blocks, reader, squeezed

__all__ = ["reader"]


def matches(output: str, shown: str) -> bool:
    """Whether lines are the same; `...` stands for anything, a rule for one of any length."""
    printed, wanted = (
        [re.sub("─+", "─", line) for line in squeezed(text)] for text in (output, shown)
    )
    patterns = [".*".join(map(re.escape, line.split("..."))) for line in wanted]
    return len(printed) == len(patterns) and all(map(re.fullmatch, patterns, printed))


def type_in(reader: Reader, page: str) -> None:
    reader.install()
    output = ""
    for block in blocks(page):
        if block.language == "sh":
            # stderr also appears in a terminal
            output = reader.type_in(block._replace(text=f"exec 2>&1\n{block.text}"))
        elif block.language == "sql":
            output = reader.type_in(block)
        elif block.language == "text":
            assert matches(output, block.text), f"{page}:{block.line}:\n{output}"


@pytest.mark.parametrize("page", ["docs/limits.md", "docs/workers.md"])
def test_workers_and_limits(reader: Reader, page: str) -> None:
    type_in(reader, page)


@pytest.mark.long
def test_operating(reader: Reader, server: EmbeddedServer) -> None:
    if server_program(server, "pg_dump") is None:
        pytest.skip(f"the page makes a backup: there is no pg_dump for PostgreSQL {server.major}")
    try:
        type_in(reader, "docs/operating.md")
    finally:
        with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
            connection.execute("drop database if exists shop_again with (force)")
