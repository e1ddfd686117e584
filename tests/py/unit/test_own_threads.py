"""Calls in threads of their own."""

from __future__ import annotations

import ast
import asyncio
import contextvars
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import pgdefer
from pgdefer.database.own_threads import in_own_thread

PACKAGE = Path(pgdefer.__file__).parent
# The supervisor runs no handlers.
SOURCES = [p for p in PACKAGE.glob("[dw]*/*.py") if p.name != "supervisor.py"]


async def test_what_a_call_returns_or_raises_though_handlers_fill_the_executor() -> None:
    seen = contextvars.ContextVar("seen", default=0)
    seen.set(1)
    release = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    blocked = loop.run_in_executor(None, release.wait)
    try:
        assert await in_own_thread(lambda one, two: (one, two, seen.get()), 2, two=3) == (2, 3, 1)
        with pytest.raises(KeyError):
            await in_own_thread({}.__getitem__, "missing")
        with pytest.raises(RuntimeError, match="StopIteration"):
            await in_own_thread(next, iter(()))
    finally:
        release.set()
        await blocked


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_worker_leaves_the_default_executor_to_handlers(path: Path) -> None:
    names = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute)
    }
    assert not names & {"to_thread", "run_in_executor"}
