"""The addresses of hosts, which the event loop's default executor does not look up."""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from pgdefer.database.addresses import with_addresses
from pgdefer.database.source import Source

KNOWN = {"one": ["10.0.0.1", "::1"], "two": ["10.0.0.2"]}


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in KNOWN:
            raise socket.gaierror("not known")
        return [(0, 0, 0, "", (address, 0)) for address in KNOWN[host]]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    for name in ("PGHOST", "PGHOSTADDR", "PGPORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("given", "host", "hostaddr", "port"),
    [
        ("host=two", "two", "10.0.0.2", ""),
        ("host=one port=7", "one,one", "10.0.0.1,::1", "7,7"),
        (
            "host=two,/tmp,gone,one port=1,2,3,4",
            "two,/tmp,one,one",
            "10.0.0.2,,10.0.0.1,::1",
            "1,2,4,4",
        ),
    ],
)
async def test_names_get_addresses(given: str, host: str, hostaddr: str, port: str) -> None:
    found = conninfo_to_dict(await with_addresses(f"{given} dbname=d"))
    assert found == {"dbname": "d", "host": host, "hostaddr": hostaddr, "port": port}


async def test_a_name_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGHOST", "two")
    monkeypatch.setenv("PGPORT", "7")
    found = conninfo_to_dict(await with_addresses(""))
    assert found == {"host": "two", "hostaddr": "10.0.0.2", "port": "7"}


@pytest.mark.parametrize(
    "given", ["", "host=/tmp", "host=one hostaddr=10.0.0.9", "host=one,two,one port=1,2"]
)
async def test_what_stays_as_it_is(given: str) -> None:
    assert await with_addresses(given) == given


async def test_names_that_nobody_knows() -> None:
    with pytest.raises(psycopg.OperationalError, match="failed to resolve host 'gone'"):
        await with_addresses("host=gone")


async def test_a_full_executor_keeps_nobody_from_connecting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(KNOWN, "here", ["127.0.0.1"])
    release = threading.Event()
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(1))
    blocked = loop.run_in_executor(None, release.wait)
    try:
        with pytest.raises(psycopg.OperationalError, match="refused"):
            await asyncio.wait_for(Source("host=here port=1").connect_async(), 60)
    finally:
        release.set()
        await blocked
