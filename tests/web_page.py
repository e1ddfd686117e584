"""The web page, served to tests: a server, roles with passwords, and jobs of every kind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest
import uvicorn
from psycopg.conninfo import conninfo_to_dict

from pgdefer.contrib import web
from pgdefer.contrib.web import database
from pgdefer.database.embedded import EmbeddedServer

Connection = psycopg.Connection[Any]
PASSWORD = "it's a \\ 'pass' word"
ROLES = ("page_operator", "page_reader", "page_shop", "page_nobody")
COMMAND = [sys.executable, "-m", "pgdefer", "web", "--port", "0"]
ODD = "<b>'\"&/\x01\u202e\\%s{{ 7*7 }}é"


def ask_for_passwords(server: EmbeddedServer) -> None:
    """Create these roles, and make the server ask them for a password."""
    line = f"local all {','.join(ROLES)} scram-sha-256\n"
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as connection:
        if connection.execute("select from pg_roles where rolname = %s", [ROLES[0]]).rowcount:
            return
        ((file,),) = connection.execute("show hba_file").fetchall()
        Path(file).write_text(line + Path(file).read_text())
        connection.execute("select pg_reload_conf()")
        for role in ROLES:
            connection.execute(f"create role {role} login")
            text = psycopg.sql.Literal(PASSWORD).as_string(connection)
            connection.execute(f"alter role {role} password {text}")
        while not is_asked(server):
            time.sleep(0.01)


def is_asked(server: EmbeddedServer) -> bool:
    with contextlib.suppress(psycopg.OperationalError):
        psycopg.connect(server.dsn("postgres"), user="page_nobody").close()
        return False
    return True


def grant(connection: Connection) -> None:
    """Let the roles see and do what their names say."""
    connection.execute("select queue.grant_access('page_operator', 'operator')")
    connection.execute("select queue.grant_access('page_reader', 'reader')")


class Switch:
    """The application that the one server of these tests serves now."""

    application: Any = None
    address = ""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await self.application(scope, receive, send)


switch = Switch()


@contextlib.contextmanager
def server_of_pages() -> Iterator[None]:
    """Run the one server of the tests."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(switch, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        switch.address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        yield
        server.should_exit = True
        thread.join()


@contextlib.contextmanager
def serving(pages: web.Page | web.Pages, application: Any = None) -> Iterator[str]:
    switch.application = application or pages
    yield switch.address
    switch.application = None
    pages.close()


def plain_environment() -> dict[str, str]:
    """Return this process's environment without a database."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


@contextlib.contextmanager
def served(
    environment: Mapping[str, str], *options: str
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Start the page as a process that asks for no password; give the address that it prints."""
    command = [*COMMAND, "--no-password", *options]
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            said = ""
            while (found := re.search(r"running on (http://\S+)", said)) is None:
                line = process.stderr.readline()
                assert line, said
                said += line
            yield found[1], process
        finally:
            process.send_signal(signal.SIGINT)


def visitor(site: str, **options: Any) -> httpx.Client:
    """Return a client that waits as long as a busy machine may take."""
    # The server closes a connection that was idle for 5 s, perhaps while a request is on its way.
    limits = httpx.Limits(keepalive_expiry=1)
    return httpx.Client(base_url=site, timeout=300, limits=limits, **options)


def lift_time_limits(patch: pytest.MonkeyPatch) -> None:
    """Let the page's statements take as long as a busy machine may take."""
    for name in database.SETTINGS:
        if name.endswith("_timeout"):
            patch.setitem(database.SETTINGS, name, "300000")


def log_in(
    client: httpx.Client, role: str, password: str = PASSWORD, root: str = "", **fields: str
) -> httpx.Response:
    """Fill in the form of the page below this path, and send it."""
    form = {"role": role, "password": password, "token": token(client.get(f"{root}/login"))}
    return client.post(f"{root}/login", data=form | fields)


@contextlib.contextmanager
def logged_in(site: str, role: str) -> Iterator[httpx.Client]:
    """Give a client of a visitor."""
    with visitor(site) as client:
        answer = log_in(client, role)
        assert answer.status_code == 303, answer.text
        yield client


def token(answer: httpx.Response) -> str:
    """Return the token that a form of this page must send."""
    found = re.search('name="token" value="([^"]+)"', answer.text)
    assert found is not None, answer.text
    return found[1]


def send(client: httpx.Client, path: str, **form: Any) -> httpx.Response:
    """Send a form, with the token of another page."""
    return client.post(path, data={"token": token(client.get("/audit"))} | form)


def location(dsn: str) -> str:
    """Return the database's address, without a user."""
    parts = conninfo_to_dict(dsn)
    return psycopg.conninfo.make_conninfo("", host=parts["host"], dbname=parts["dbname"])


def fill(conn: Connection) -> dict[str, int]:
    """Create jobs of every kind, and rows for the other pages. Return some ids."""

    def one(statement: str, *values: Any) -> Any:
        (found,) = conn.execute(statement, values).fetchone() or (None,)
        return found

    worker = one("select queue.register_worker('w', null, '{\"dead_after\": \"1 day\"}')")
    failed = one("select queue.defer('mail', '{\"to\": \"ann\"}', queue => 'mail')")
    claim = one("select claim from queue.fetch(%s)", worker)
    one(
        "select queue.fail(%s, %s, %s, jsonb_build_object('traceback', %s::text))",
        failed,
        claim,
        ODD,
        ODD,
    )
    running = one("select queue.defer('runs', queue => 'mail', lock => 'l')")
    one("select count(*) from queue.fetch(%s)", worker)
    ready = one("select queue.defer('shop', '{\"n\": 1}', queue => 'shop')")
    waits = one("select queue.defer('shop', queue => 'shop', needs => array[%s::bigint])", failed)
    blocked = one("select queue.defer('runs', queue => 'mail', lock => 'l')")
    odd = one(
        "select queue.defer(%s, jsonb_build_object('a', %s::text), queue => %s,"
        " concurrency_key => %s, concurrency_limit => 1)",
        ODD,
        ODD,
        ODD,
        ODD.replace("{", ""),
    )
    one("select queue.schedule('daily/x', '@daily', 'mail', timezone => 'Europe/Berlin')")
    one("select queue.register_task(%s, '{\"priority\": 1}')", ODD)
    one("select queue.tick()")
    return {
        "failed": failed,
        "running": running,
        "ready": ready,
        "waits": waits,
        "blocked": blocked,
        "odd": odd,
    }
