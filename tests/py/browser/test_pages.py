"""What each page looks like to axe-core, in two widths, light and dark."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page, expect

from pgdefer.contrib import web
from web_page import ODD, location, serving

from .conftest import Open, log_in

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
OVERFLOW = """() => [...document.querySelectorAll("*")]
  .filter((e) => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".wide"))
  .map((e) => e.outerHTML.slice(0, 100))"""


def faults(page: Page, **options: Any) -> list[str]:
    """Return what axe-core finds, and what is wider than the window."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE_SCRIPT)
    found = page.evaluate(
        "(options) => axe.run(options)", {"resultTypes": ["violations"], **options}
    )
    told = [
        f"{page.url}: {v['id']}: {[n['html'][:200] for n in v['nodes']][:3]}"
        for v in found["violations"]
    ]
    if page.evaluate("document.documentElement.scrollWidth > innerWidth"):
        told.append(f"{page.url} scrolls sideways: {page.evaluate(OVERFLOW)[:5]}")
    return told


def both(page: Page) -> list[str]:
    """Return the faults of a page, wide and light, then narrow and dark."""
    page.set_viewport_size(WIDE)
    page.emulate_media(color_scheme="light")
    told = faults(page)
    page.set_viewport_size(NARROW)
    page.emulate_media(color_scheme="dark")
    return told + faults(page, runOnly=["color-contrast", "target-size"])


@pytest.mark.long
def test_each_page(visit: Open, shop: dict[str, int], conn: Connection) -> None:
    conn.execute("select queue.defer(%s, jsonb_build_object('a', %s::text))", [ODD, ODD * 9])
    page = visit(role="")
    told = both(page)
    page = visit()
    paths = "/ /jobs /queues /locks /groups /workers /schedules /tasks /audit /jobs/999999".split()
    paths += [f"/jobs/{shop[name]}" for name in ("failed", "next", "cancelled")]
    paths += [f"/jobs/{shop['waiting']}/graph"]
    paths += [f"/jobs/{shop['suspended']}{tail}" for tail in ("", "/stream?name=log")]
    paths += ["/jobs?at=finished&from=2020-01-01T00:00&zone=Europe/Berlin"]
    paths += ["/schedule?name=night+prices", "/jobs?state=failed&by=path&pattern=%24.order"]
    for path in paths:
        page.goto(path)
        page.evaluate("document.querySelectorAll('details').forEach((e) => { e.open = true })")
        told += both(page)
        assert not page.locator("b").count(), "names are text"
    assert not told, "\n".join(told)


def test_the_pages_of_many_databases(visit: Open, dsn: str) -> None:
    with serving(web.asgi_of_many({"shop": location(dsn), ODD + "x" * 99: location(dsn)})):
        page = visit(role="")
        told = both(page)
        page.get_by_role("listitem").first.get_by_role("link").click()
        told += both(page)
        log_in(page, "page_operator")
        expect(page.get_by_role("heading", name="Now")).to_be_visible()
        told += both(page)
        page.get_by_role("link", name="All databases").click()
        expect(page.get_by_role("heading")).to_have_text("Databases")
    assert not told, "\n".join(told)


def test_figures_are_fresh_but_never_jump(
    visit: Open, shop: dict[str, int], conn: Connection
) -> None:
    page = visit(path="/workers")
    page.clock.install()
    page.reload()
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(1)
    conn.execute("select queue.register_worker('second')")
    page.clock.run_for(10_000)
    expect(rows).to_have_count(2)
    conn.execute("select queue.register_worker('third')")
    page.get_by_role("region", name="Workers").focus()
    page.clock.run_for(30_000)
    page.get_by_role("link", name="Skip to the content").focus()
    assert rows.count() == 2, "somebody reads"
    page.set_viewport_size(NARROW)
    page.evaluate("document.querySelector('.wide').scrollLeft = 50")
    page.clock.run_for(30_000)
    assert rows.count() == 2, "somebody has scrolled a table"
    page.evaluate("document.querySelector('.wide').scrollLeft = 0")
    page.clock.run_for(10_000)
    expect(rows).to_have_count(3)


def test_a_job_and_its_stream_are_live(visit: Open, conn: Connection) -> None:
    conn.execute("select queue.register_worker('w', null, '{\"dead_after\": \"1 day\"}')")
    conn.execute("select queue.defer('t')")
    ((claim,),) = conn.execute("select claim from queue.fetch(1)").fetchall()
    conn.execute("select queue.emit(1, %s, 'log', '1')", [claim])
    page = visit(path="/jobs/1")
    page.clock.install()
    page.reload()
    main = page.locator("main")
    expect(main).not_to_contain_text("50.0 %")
    conn.execute("select queue.set_progress(1, %s, 50)", [claim])
    page.clock.run_for(5_000)
    expect(main).to_contain_text("50.0 %")
    page.locator("summary").get_by_text("Move", exact=True).click()
    page.get_by_role("link", name="Skip to the content").focus()
    page.evaluate("scrollTo(0, 0)")
    conn.execute("select queue.set_progress(1, %s, 60)", [claim])
    page.clock.run_for(30_000)
    expect(main).to_contain_text("50.0 %")
    page.get_by_role("link", name="log", exact=True).click()
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(1)
    conn.execute("select queue.emit(1, %s, 'log', '2')", [claim])
    page.clock.run_for(5_000)
    expect(rows).to_have_count(2)
    expect(rows.first).to_contain_text("2")


def test_times_are_in_the_zone_of_the_browser(visit: Open, conn: Connection) -> None:
    conn.execute("select queue.defer('t') from generate_series(1, 2)")
    conn.execute("update queue.log set created_at = '2026-01-31 23:30-05' where id = 1")
    page = visit(path="/jobs", timezone_id="America/New_York")
    zone = page.get_by_label("in the zone")
    expect(zone).to_have_value("America/New_York")
    page.get_by_label("from").fill("2026-01-31T23:00")
    page.get_by_label("to, exclusive").fill("2026-02-01T00:00")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody")).to_contain_text("2026-01-31 23:30:00")
    expect(page.locator("thead")).to_contain_text("Deferred (America/New_York)")
    assert "zone=America%2FNew_York" in page.url
    other = visit(path=page.url, timezone_id="Europe/Berlin")
    expect(other.locator("tbody tr")).to_have_count(1)
    expect(other.get_by_label("in the zone")).to_have_value("America/New_York")


def test_the_page_says_so_when_its_server_is_away(visit: Open, conn: Connection) -> None:
    page = visit(path="/workers")
    page.clock.install()
    page.reload()
    told = page.get_by_text("These figures are old")
    expect(told).to_have_count(0)
    page.context.set_offline(True)
    page.clock.run_for(10_000)
    expect(told).to_have_text(re.compile("the page's server does not answer"))
    conn.execute("select queue.register_worker('meanwhile')")
    page.context.set_offline(False)
    page.clock.run_for(10_000)
    expect(page.get_by_text("meanwhile")).to_have_count(1)
    expect(told).to_have_count(0)


@pytest.mark.long
def test_without_javascript(visit: Open, conn: Connection) -> None:
    conn.execute(
        'select queue.defer_many((select jsonb_agg(\'{"task": "t"}\'::jsonb)'
        " from generate_series(1, 600)))"
    )
    page = visit(java_script_enabled=False)
    for path in "/ /queues /locks /groups /workers /schedules /tasks /audit /jobs".split():
        page.goto(path)
        assert page.locator("h1").inner_text()
        assert page.locator("nav a").count() == 9
    assert page.locator("tbody tr").count() == 50
    page.get_by_role("link", name="Go on with older ones").click()
    page.get_by_label("With the selected jobs").select_option("Fail")
    page.get_by_role("button", name="Go on with all that match").click()
    expect(page.locator("h1")).to_have_text("Fail: 600 jobs")
    page.get_by_label("message").fill("by hand")
    page.get_by_role("button", name="Fail").click()
    expect(page.locator("h1")).to_have_text("Fail: 500 jobs so far")
    page.get_by_role("button", name="Go on").click()
    expect(page.locator("h1")).to_have_text("Fail: 600 jobs, all done")
    rows = conn.execute("select error, count(*) from queue.jobs where state = 'failed' group by 1")
    assert rows.fetchall() == [("by hand", 600)]
