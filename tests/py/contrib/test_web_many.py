"""The pages of many databases, below an index of them."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from starlette.applications import Starlette
from starlette.routing import Mount

from pgdefer.contrib import web
from pgdefer.contrib.web import app, database, pool
from pgdefer.contrib.web.text import plain
from pgdefer.database.embedded import EmbeddedServer
from support import create_database
from web_page import (
    COMMAND,
    ODD,
    location,
    log_in,
    plain_environment,
    served,
    serving,
    token,
    visitor,
)
from workers import wait_for

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
PAGES = "select count(*) from pg_stat_activity where application_name = 'pgdefer page'"


@pytest.fixture
def other(server: EmbeddedServer, granted: None) -> Iterator[str]:
    """Another database, in which page_reader is an operator and page_operator is nobody."""
    create_database(server, "page_other", "pgdefer_base")
    with psycopg.connect(server.dsn("page_other"), autocommit=True) as connection:
        connection.execute("select queue.grant_access('page_reader', 'operator')")
        connection.execute("select queue.defer('of_other')")
    yield location(server.dsn("page_other"))
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        connection.execute("drop database page_other with (force)")


@pytest.fixture
def both(dsn: str, other: str) -> Iterator[str]:
    """The address of the pages of two databases."""
    with serving(web.asgi_of_many({"shop": location(dsn), "other": other})) as site:
        yield site


def links(answer: httpx.Response) -> dict[str, str]:
    """Return the links of an index by their texts."""
    found = re.findall(r'<li><a href="([^"]*)">(.*?)</a>', answer.text)
    return {unescape(text): unescape(address) for address, text in found}


def test_an_index_leads_to_the_page_of_each_database(both: str) -> None:
    with visitor(both, follow_redirects=True) as client:
        index = client.get("/")
        assert list(links(index).items()) == [("other", "/db/other/"), ("shop", "/db/shop/")]
        assert "default-src 'none'" in index.headers["content-security-policy"]
        assert index.headers["cache-control"] == "no-store"
        assert client.get("/static/page.css").status_code == 200
        answer = client.get("/db/other")
        assert answer.url.path == "/db/other/login"
        assert "<strong>other</strong>" in answer.text, "whose password it asks for"
        answer = log_in(client, "page_reader", root="/db/other")
        assert answer.url.path == "/db/other/"
        assert "<strong>other</strong>" in answer.text
        assert " other \N{EN DASH} pgdefer</title>" in answer.text, "the title of the tab"
        assert '<a href="/">All databases</a>' in answer.text
        assert "of_other" in client.get("/db/other/jobs").text
        for path in ("/db/", "/db/none/", "/db/none/login", "/jobs", "/login"):
            answer = client.get(path)
            assert answer.status_code == 404, path
            assert "There is no such page." in answer.text
            assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_a_page_of_one_database_leads_to_no_index(client: httpx.Client) -> None:
    text = client.get("/").text
    assert "All databases" not in text
    assert "<title>Now \N{EN DASH} pgdefer</title>" in text


def test_a_session_counts_in_its_database_only(both: str, conn: Connection) -> None:
    conn.execute("select queue.defer('t')")
    with visitor(both) as client:
        answer = log_in(client, "page_reader", root="/db/other")
        session = answer.cookies["pgdefer_session"]
        assert "path=/db/other;" in answer.headers["set-cookie"].lower()
        assert client.get("/db/shop/jobs").headers["location"] == "/db/shop/login?next=%2Fjobs"
        stolen = {"cookie": f"pgdefer_session={session}"}
        answer = client.get("/db/shop/jobs", headers=stolen)
        assert answer.headers["location"].startswith("/db/shop/login?"), "nor its copied cookie"
        of_other = token(client.get("/db/other/jobs"))
        assert log_in(client, "page_reader", root="/db/shop").status_code == 303
        text = client.get("/db/shop/jobs/1").text
        assert "/hold" not in text, "a reader there, whatever the role is in the other"
        for proof in (of_other, token(client.get("/db/shop/jobs"))):
            answer = client.post("/db/shop/jobs/1/hold", data={"token": proof})
            assert answer.status_code == 403
        assert conn.execute("select state from queue.jobs").fetchall() == [("ready",)]
        form = {"token": token(client.get("/db/shop/jobs"))}
        client.post("/db/shop/logout", data=form)
        assert client.get("/db/shop/jobs").status_code == 303
        assert client.get("/db/other/jobs").status_code == 200


def test_names_are_safe_in_addresses_and_in_html(dsn: str, conn: Connection, granted: None) -> None:
    names = [".", "..", "..a", ".hidden", "a.b", "a/b", "a%2Fb", "a~2Fb", "host:5432/shop as ann"]
    names += ["a;b", "a b", "a?b#c", "a\\b", "A", "a", "{a:path}", "<b>&amp;'\"", ODD]
    application = web.asgi_of_many(dict.fromkeys(names, location(dsn)))
    mounted = Starlette(routes=[Mount("/queues", application)])
    with serving(application, mounted) as site, visitor(site) as client:
        index = client.get("/queues/")
        assert "<b>" not in index.text
        addresses = links(index)
        assert addresses.keys() == {plain(name) for name in names}
        assert len({*addresses.values()}) == len(names)
        for name, address in addresses.items():
            assert re.fullmatch(r"/queues/db/[\w.~-]+/", address), address
            root = address.removesuffix("/")
            assert log_in(client, "page_reader", root=root).headers["location"] == address
            text = client.get(f"{root}/jobs").text
            (shown,) = re.findall("<strong>(.*)</strong>", text)
            assert unescape(shown) == name
            assert '<a href="/queues/">All databases</a>' in text
            assert f'href="{root}/queues"' in text


def test_a_database_without_a_name() -> None:
    with pytest.raises(ValueError, match="name"):
        web.asgi_of_many({"": "dbname=shop"})


def test_the_proxy_names_the_role_for_all(dsn: str, other: str, server: EmbeddedServer) -> None:
    dsns = {"shop": dsn, "other": server.dsn("page_other")}
    application = web.asgi_of_many(dsns, role_header="x-role")
    with serving(application) as site, visitor(site) as client:
        for role, statuses in {"page_operator": (200, 403), "page_reader": (200, 200)}.items():
            for name, status in zip(dsns, statuses, strict=True):
                answer = client.get(f"/db/{name}/jobs", headers={"x-role": role})
                assert answer.status_code == status, (role, name)


def test_databases_that_nobody_visits_have_no_connections(
    dsn: str, conn: Connection, granted: None
) -> None:
    def connections() -> list[Any]:
        return conn.execute(PAGES + " and datname = current_database()").fetchall()

    dsns = {f"tenant {number}": location(dsn) for number in range(200)}
    with serving(web.asgi_of_many(dsns)) as site, visitor(site) as client:
        addresses = links(client.get("/"))
        assert addresses.keys() == dsns.keys()
        for address in addresses.values():
            assert client.get(f"{address}login").status_code == 200
        assert connections() == [(0,)]
        assert log_in(client, "page_reader", root="/db/tenant~20199").status_code == 303
        assert connections() == [(1,)]


def test_databases_that_do_not_answer_delay_no_other(
    monkeypatch: pytest.MonkeyPatch, dsn: str, conn: Connection, granted: None
) -> None:
    monkeypatch.setattr(database, "CONNECT_TIMEOUT", 600)
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        silent.setblocking(False)
        opened: list[socket.socket] = []

        def waiting() -> int:
            try:
                while True:
                    opened.append(silent.accept()[0])
            except BlockingIOError:
                return len(opened)

        down = make_conninfo("dbname=x", host="127.0.0.1", port=silent.getsockname()[1])
        names = ("first", "second")
        dsns = {"shop": location(dsn), **dict.fromkeys(names, down)}
        every = len(names) * pool.MOST
        assert every > app.THREADS
        with (
            serving(web.asgi_of_many(dsns)) as site,
            visitor(site) as client,
            ThreadPoolExecutor(every) as threads,
        ):
            answers = []
            for name in names:
                form = {"role": "page_reader", "password": "x"}
                form["token"] = token(client.get(f"/db/{name}/login"))
                for _ in range(pool.MOST):
                    post = threads.submit(client.post, f"/db/{name}/login", data=form)
                    answers.append(post)
            try:
                wait_for(lambda: waiting() == every, 60)
                with visitor(site) as guest:
                    assert guest.get("/").status_code == 200
                    assert log_in(guest, "page_reader", root="/db/shop").status_code == 303
                    assert guest.get("/db/shop/jobs").status_code == 200
            finally:
                silent.close()
                for connection in opened:
                    connection.close()
            assert {answer.result().status_code for answer in answers} == {503}


def test_the_end_of_the_application_closes_every_page(
    dsn: str, other: str, conn: Connection
) -> None:
    pages = web.asgi_of_many({"shop": location(dsn), "other": other})

    async def live() -> list[str]:
        messages = iter([{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}])
        sent: list[str] = []

        async def receive() -> Any:
            return next(messages)

        async def send(message: Any) -> None:
            sent.append(message["type"])

        await pages({"type": "lifespan", "asgi": {"version": "3.0"}}, receive, send)
        return sent

    with serving(pages) as site, visitor(site) as client:
        roots = ("/db/shop", "/db/other")
        for root in roots:
            log_in(client, "page_reader", root=root)
            assert client.get(f"{root}/jobs").status_code == 200
        assert asyncio.run(live()) == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
        wait_for(lambda: conn.execute(PAGES).fetchall() == [(0,)])
        for root in roots:
            assert client.get(f"{root}/jobs").status_code == 303


# The command


def test_the_command_serves_the_databases_of_a_file(
    tmp_path: Path, dsn: str, other: str, conn: Connection
) -> None:
    file = tmp_path / "tenants"
    own = conn.info.dbname
    file.write_text(f"# tenants\n{dsn}\n{other} user=postgres\nno dsn\n\n")
    environment = plain_environment() | {"PGDEFER_DSN": "dbname=ignored"}
    with served(environment, "--dsns", str(file)) as (address, process):
        with visitor(address) as client:
            addresses = links(client.get("/"))
            assert sorted(name.rpartition("/")[2] for name in addresses) == ["page_other", own]
            for where in addresses.values():
                assert log_in(client, "postgres", root=where.removesuffix("/")).status_code == 303
                assert client.get(where).status_code == 200
            headers = {"host": "evil.example"}
            assert client.get("/", headers=headers).status_code == 400
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "Application shutdown complete" in process.stderr.read()


@pytest.mark.parametrize(
    ("line", "options", "said"),
    [
        ("# none\n", [], "names no database"),
        ("dbname=shop\n", ["--dsn", "dbname=shop"], "not both"),
    ],
)
def test_the_command_refuses(tmp_path: Path, line: str, options: list[str], said: str) -> None:
    file = tmp_path / "tenants"
    file.write_text(line)
    done = subprocess.run(
        [*COMMAND, "--dsns", str(file), *options],
        env=plain_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr
