"""The page in a real browser: Debian's chromium, driven by playwright. Without one these skip."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Browser, Page

from chromium import PATIENCE, open_chromium
from pgdefer.contrib import web
from pgdefer.database.embedded import EmbeddedServer
from web_page import (
    PASSWORD,
    ask_for_passwords,
    grant,
    lift_time_limits,
    location,
    server_of_pages,
    serving,
)
from web_shop import open_shop

# The page causes these on purpose: answers to a wrong form, a job that is gone, and no answer.
EXPECTED = (
    "Failed to load resource: the server responded with a status of 4",
    "Failed to load resource: net::ERR_INTERNET_DISCONNECTED",
)

Open = Callable[..., Page]


# Not for the session: while playwright runs, no other test in this thread could run an event loop.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_chromium() as browser:
        yield browser


@pytest.fixture(scope="module", autouse=True)
def _server_of_pages() -> Iterator[None]:
    with server_of_pages():
        yield


@pytest.fixture
def site(
    server: EmbeddedServer,
    dsn: str,
    conn: psycopg.Connection[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[str]:
    """The page's address. On a busy machine its time limits are no part of these tests."""
    lift_time_limits(monkeypatch)
    ask_for_passwords(server)
    grant(conn)
    with serving(web.asgi(location(dsn))) as address:
        yield address


@pytest.fixture
def shop(dsn: str) -> Iterator[dict[str, int]]:
    """A shop with a worker: the ids of a job in each state."""
    with open_shop(dsn) as ids:
        yield ids


@pytest.fixture
def visit(browser: Browser, site: str) -> Iterator[Open]:
    """Open a window and log in. No window may report an error."""
    told: list[str] = []
    with contextlib.ExitStack() as stack:

        def open_one(role: str = "page_operator", path: str = "/", **options: Any) -> Page:
            context = browser.new_context(base_url=site, **options)
            stack.callback(context.close)
            context.set_default_timeout(PATIENCE)
            page = context.new_page()
            page.on("console", lambda m: m.type in ("error", "warning") and told.append(m.text))
            page.on("pageerror", lambda error: told.append(str(error)))
            page.goto(path)
            if role:
                log_in(page, role)
            return page

        yield open_one
    assert not [text for text in told if not text.startswith(EXPECTED)]


def log_in(page: Page, role: str, password: str = PASSWORD) -> None:
    """Fill in the form and send it."""
    page.get_by_label("Role of the database").fill(role)
    page.get_by_label("Password").fill(password)
    page.get_by_role("button", name="Log in").click()
