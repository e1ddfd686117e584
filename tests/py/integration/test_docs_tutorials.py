"""The tutorials on SQL alone and on FastAPI are typed in, and print the documented output."""

from __future__ import annotations

import shutil
import socket

import pytest

from pgdefer.database.embedded import sql_folder

from .conftest import wait_for
from .test_docs import Block, Reader, follow, reader

__all__ = ["reader"]

pytestmark = pytest.mark.client


def test_the_tutorial_on_sql_alone(reader: Reader) -> None:
    (reader.folder / "build").mkdir()
    shutil.copyfile(sql_folder() / "pgdefer.sql", reader.folder / "build" / "pgdefer.sql")
    follow(reader.type_in, "docs/sql.md")


def accepts(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="the page types in curl")
@pytest.mark.long
def test_the_tutorial_on_fastapi(reader: Reader, free_tcp_port: int) -> None:
    is_up = False

    def type_in(block: Block) -> str:
        nonlocal is_up
        output = reader.type_in(block._replace(text=block.text.replace("8000", str(free_tcp_port))))
        is_up = is_up or "uvicorn" in block.text
        if is_up:
            wait_for(lambda: accepts(free_tcp_port))  # new code restarts it
        return output

    follow(type_in, "docs/fastapi.md", asks=is_question)


def is_question(block: Block) -> bool:
    """Whether a block only asks for the state of a job."""
    return block.text.startswith("curl -s http://") and "/jobs/" in block.text
