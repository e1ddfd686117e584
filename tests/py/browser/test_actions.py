"""Each action of a visitor by clicks, as it is seen in queue.jobs and queue.audit."""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest
from playwright.sync_api import Page, expect

from web_page import PASSWORD
from web_shop import state
from workers import wait_for

from .conftest import Open, log_in

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]


def act(page: Page, id: int, label: str, **fields: str) -> str:
    """Make a call on a job, and return what the page says."""
    page.goto(f"/jobs/{id}")
    page.locator("summary").get_by_text(label, exact=True).click()
    form = page.locator("details[open] form")
    for name, value in fields.items():
        field = form.locator(f"[name={name}]")
        if value == "on":
            field.check()
        else:
            field.fill(value)
    form.get_by_role("button", name=label, exact=True).click()
    return page.locator(".told").inner_text()


def audit(conn: Connection) -> list[str]:
    """Return what the operator has called."""
    rows = conn.execute(
        "select call from queue.audit where role = 'page_operator' order by id"
    ).fetchall()
    return [call for (call,) in rows]


@pytest.mark.long
def test_each_call_on_a_job(visit: Open, shop: dict[str, int], conn: Connection) -> None:
    page = visit()

    def job(name: str, columns: str) -> Any:
        query = f"select {columns} from queue.jobs where id = %s"
        return conn.execute(query.encode(), [shop[name]]).fetchone()

    ready = shop["ready"]
    assert act(page, ready, "Hold") == "Hold: held"
    assert state(conn, ready) == "held"
    assert act(page, ready, "Unhold") == "Unhold: ready"
    assert state(conn, ready) == "ready"
    act(page, ready, "Set the priority", priority="7")
    act(page, ready, "Move", queue="shipping-2")
    assert job("ready", "priority, queue") == (7, "shipping-2")
    act(page, shop["scheduled"], "Reschedule", at="2999-01-01 00:00")
    assert job("scheduled", "scheduled_at::text") == ("2999-01-01 00:00:00+00",)
    expect(page.locator(".timeline")).to_contain_text("2999-01-01 00:00:00")
    act(page, shop["held"], "Edit args", args='{"order": 8, "cents": 1}')
    assert job("held", "args") == ({"order": 8, "cents": 1},)
    assert act(page, shop["held"], "Copy") == f"this is the copy of job {shop['held']}"
    copy = int(page.url.partition("/jobs/")[2].partition("?")[0])
    assert act(page, copy, "Mark as succeeded") == "Mark as succeeded: succeeded"
    act(page, shop["unserved"], "Cancel")
    assert state(conn, shop["unserved"]) == "cancelled"
    act(page, shop["running"], "Cancel", abort="on")
    act(page, shop["next"], "Fail", message="no such customer")
    assert job("next", "state, error") == ("failed", "no such customer")
    act(page, shop["failed"], "Retry")
    wait_for(lambda: job("failed", "state, attempts") == ("failed", 4))
    assert "was deleted" in act(page, shop["cancelled"], "Delete")
    assert state(conn, shop["cancelled"]) == ""
    assert audit(conn) == (
        "hold unhold set_priority move reschedule set_args copy done cancel cancel fail_jobs retry"
        " delete".split()
    )
    page.goto("/audit?call=set_args")
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("tbody")).to_contain_text('"cents": 700')


def test_a_signal_that_a_job_waits_for(visit: Open, shop: dict[str, int], conn: Connection) -> None:
    page = visit(path=f"/jobs/{shop['suspended']}")
    page.get_by_label("Payload (JSON)").fill('{"by": "Ann"}')
    page.get_by_role("button", name="Send approval").click()
    expect(page.locator(".told")).to_have_text("the signal was sent")
    wait_for(lambda: state(conn, shop["suspended"]) == "succeeded")
    values = conn.execute("select value from queue.steps where name = 'approval'").fetchall()
    assert values == [({"by": "Ann"},)]
    assert audit(conn) == ["signal"]


def test_a_call_that_is_refused(visit: Open, shop: dict[str, int], conn: Connection) -> None:
    page = visit(path=f"/jobs/{shop['running']}")
    page.locator("summary").get_by_text("Move", exact=True).click()
    page.locator("details[open] form [name=queue]").fill("other")
    page.get_by_role("button", name="Move", exact=True).click()
    expect(page.locator("h1")).to_have_text("Move: the job's state does not allow this")
    page.go_back()
    page.locator("summary").get_by_text("Set the deadline", exact=True).click()
    page.get_by_label("at (UTC; empty: none)").fill("soon")
    page.get_by_role("button", name="Set the deadline", exact=True).click()
    expect(page.locator("h1")).to_contain_text("soon")
    assert audit(conn) == ["move"], "which answers with a row for each job"


@pytest.mark.long
def test_many_jobs(visit: Open, shop: dict[str, int], conn: Connection) -> None:
    page = visit(path="/jobs")
    page.get_by_label("State").select_option("held")
    page.get_by_role("button", name="Show").click()
    page.get_by_label("All jobs of this page").check()
    page.get_by_label("With the selected jobs").select_option("Cancel")
    page.get_by_role("button", name="Go on", exact=True).click()
    expect(page.locator("h1")).to_have_text("Cancel: 1 job")
    expect(page.locator("tbody tr")).to_have_text("heldpayments1")
    assert state(conn, shop["held"]) == "held", "it is only shown what would be met"
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("h1")).to_have_text("Cancel: 1 of 1 job")
    assert state(conn, shop["held"]) == "cancelled"
    conn.execute(
        'select queue.defer_many((select jsonb_agg(\'{"task": "t", "queue": "bulk"}\'::jsonb)'
        " from generate_series(1, 600)))"
    )
    page.goto("/jobs?queue=bulk")
    page.get_by_label("With the selected jobs").select_option("Set the priority")
    page.get_by_role("button", name="Go on with all that match").click()
    expect(page.locator("h1")).to_have_text("Set the priority: 600 jobs")
    page.get_by_label("priority").fill("3")
    page.get_by_role("button", name="Set the priority").click()
    expect(page.locator("h1")).to_have_text("Set the priority: 600 jobs, all done")
    rows = conn.execute("select priority, count(*) from queue.jobs where queue = 'bulk' group by 1")
    assert rows.fetchall() == [(3, 600)]
    assert audit(conn) == ["cancel", "set_priority", "set_priority"]


@pytest.mark.long
def test_queues_and_schedules(visit: Open, shop: dict[str, int], conn: Connection) -> None:
    page = visit(path="/queues")
    mail = page.locator("tr", has=page.get_by_role("rowheader", name="mail"))
    mail.get_by_role("button", name="Pause").click()
    mail.get_by_role("button", name="Resume").wait_for()
    queue = "select max_running, paused_until is not null from queue.queues where name = 'mail'"
    assert conn.execute(queue.encode()).fetchone() == (None, True)
    mail.get_by_role("button", name="Resume").click()
    mail.get_by_role("button", name="Pause").wait_for()
    mail.get_by_label("at most").fill("3")
    mail.get_by_role("button", name="Set").click()
    expect(mail.get_by_role("cell").nth(2)).to_have_text("3")
    assert conn.execute(queue.encode()).fetchone() == (3, False)

    schedule = "/schedule?name=night+prices"
    for label, after in [
        ("Run now", "(by hand)"),
        ("Disable", "Enable"),
        ("Enable", "Disable"),
    ]:
        page.goto(schedule)
        page.get_by_role("button", name=label, exact=True).click()
        page.wait_for_url("**/schedules")
        page.goto(schedule)
        expect(page.locator("main")).to_contain_text(after)
    page.get_by_role("button", name="Remove").click()
    page.wait_for_url("**/schedules")
    names = conn.execute("select name from queue.schedules").fetchall()
    assert names == [("morning report",)]
    assert audit(conn) == (
        "pause resume configure_queue run_now enable_schedule enable_schedule unschedule".split()
    )


def test_logging_in_and_out(visit: Open) -> None:
    page = visit(role="", path="/jobs?state=failed")
    log_in(page, "page_reader", "wrong")
    expect(page.get_by_role("alert")).to_contain_text("does not accept this role and password")
    log_in(page, "page_reader")
    expect(page).to_have_url(re.compile(r"/jobs\?state=failed$"))
    assert not page.get_by_label("With the selected jobs").count()
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login")
    page.goto("/audit")
    page.wait_for_url("**/login?next=%2Faudit")


def tab_to(page: Page, text: str) -> None:
    """Press the tab key until an element with this text has the focus; each must be seen."""
    seen = []
    for _ in range(100):
        page.keyboard.press("Tab")
        focused = page.locator(":focus")
        assert focused.evaluate("(e) => getComputedStyle(e).outlineStyle") == "solid"
        seen.append(focused.inner_text() or focused.get_attribute("name"))
        if seen[-1] == text:
            return
    raise AssertionError(seen)


def test_with_the_keyboard_alone(visit: Open, shop: dict[str, int], conn: Connection) -> None:
    page = visit(role="", path=f"/jobs/{shop['ready']}")
    tab_to(page, "role")
    page.keyboard.type("page_operator")
    tab_to(page, "password")
    page.keyboard.type(PASSWORD)
    page.keyboard.press("Enter")
    page.wait_for_url("**/jobs/*")
    tab_to(page, "Skip to the content")
    page.keyboard.press("Enter")
    tab_to(page, "Cancel")
    page.keyboard.press("Enter")
    tab_to(page, "abort")
    page.keyboard.press("Space")
    tab_to(page, "Cancel")
    page.keyboard.press("Enter")
    expect(page.locator(".told")).to_have_text("Cancel: cancelled")
    assert state(conn, shop["ready"]) == "cancelled"
