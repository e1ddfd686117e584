"""The documentation's site in a browser: each page, wide and narrow, light and dark; its search."""

from __future__ import annotations

import functools
import http.server
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from support import ROOT

pytestmark = pytest.mark.client

LOOKS = [
    ({"width": 1280, "height": 800}, "light"),
    ({"width": 1280, "height": 800}, "dark"),
    ({"width": 390, "height": 844}, "light"),
    ({"width": 390, "height": 844}, "dark"),
]
# What sticks out to the right, and is in no box that scrolls; pictures that are not there.
FAULTS = """() => {
  const scrolls = (e) => e && e !== document.body
    && (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const out = [...document.querySelectorAll(".md-content *")].filter((e) =>
    e.getBoundingClientRect().right > innerWidth + 1 && !scrolls(e.parentElement));
  const gone = [...document.images].filter((e) => e.complete && !e.naturalWidth);
  return [...out, ...gone].map((e) => e.outerHTML.slice(0, 100)).slice(0, 5);
}"""


class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """The site's address, and its pages."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "-d", str(folder)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    handler = functools.partial(Handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        pages = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.html"))
        yield f"http://127.0.0.1:{server.server_port}/", pages
        server.shutdown()


def visit(browser: Browser, address: str, told: list[str], **options: object) -> Page:
    page = browser.new_context(base_url=address, **options).new_page()
    page.on("pageerror", lambda error: told.append(str(error)))
    return page


@pytest.mark.long
def test_each_page_fits(browser: Browser, docs: tuple[str, list[str]]) -> None:
    address, pages = docs
    told: list[str] = []
    for viewport, scheme in LOOKS:
        page = visit(browser, address, told, viewport=viewport, color_scheme=scheme)
        for name in pages:
            page.goto(name, wait_until="load")
            shown = page.evaluate("document.body.dataset.mdColorScheme")
            assert shown == {"light": "default", "dark": "slate"}[scheme], name
            place = f"{name} at {viewport['width']}, {scheme}"
            told += [f"{place}: {fault}" for fault in page.evaluate(FAULTS)]
        page.context.close()
    assert len(pages) > 40
    assert not told


@pytest.mark.parametrize("viewport", [LOOKS[0][0], LOOKS[2][0]], ids=["wide", "narrow"])
def test_the_search_answers_in_the_browser(
    browser: Browser, docs: tuple[str, list[str]], viewport: dict[str, int]
) -> None:
    """A question that is typed in leads to its section."""
    told: list[str] = []
    page = visit(browser, docs[0], told, viewport=viewport)
    page.goto("index.html")
    if viewport["width"] < 1000:
        page.locator("label.md-header__button[for='__search']").click()
    page.get_by_role("textbox", name="Search").click()
    page.keyboard.type("What happens when the disk is full?")
    found = page.locator(".md-search-result__link").filter(has_text=re.compile("disk is full"))
    found.first.click()
    expect(page).to_have_url(
        re.compile(r"/how-to/production\.html.*#what-happens-when-the-disk-is-full")
    )
    assert not told
    page.context.close()
