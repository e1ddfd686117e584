"""The admin in a real browser: each page, each action, and what users without permission can do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from django.contrib.auth.models import Permission, User
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.core.handlers.wsgi import WSGIHandler
from django.core.servers.basehttp import ThreadedWSGIServer
from django.test.testcases import QuietWSGIRequestHandler
from playwright.sync_api import Browser, Page, expect

from chromium import PATIENCE, open_chromium

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
Open = Callable[..., Page]
JOBS = "/admin/pgdefer/job/"
MODELS = "job queue task schedule worker lock semaphore".split()
PASSWORD = "quite secret"
TOOK = """() => {
  const n = performance.getEntriesByType("navigation")[0];
  return n.responseEnd - n.requestStart }"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with pytest.MonkeyPatch.context() as patch, open_chromium() as browser:
        # playwright has an event loop in this thread: Django's ORM would refuse to be called
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")
        yield browser


@pytest.fixture
def conn(shop: str) -> Iterator[Connection]:
    with psycopg.connect(shop, autocommit=True) as connection:
        yield connection


@pytest.fixture
def site(browser: Browser, shop: str) -> Iterator[str]:
    """The project's address."""
    with ThreadedWSGIServer(("127.0.0.1", 0), QuietWSGIRequestHandler) as server:
        server.set_app(StaticFilesHandler(WSGIHandler()))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture
def visit(browser: Browser, site: str) -> Iterator[Open]:
    """Open a window, and log in as a new user with some permissions."""
    with contextlib.ExitStack() as stack:

        def open_one(*permissions: str, is_superuser: bool = False) -> Page:
            name = "-".join(permissions) or "nobody"
            user = User.objects.create_user(
                name, password=PASSWORD, is_staff=True, is_superuser=is_superuser
            )
            user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
            context = browser.new_context(base_url=site)
            stack.callback(context.close)
            context.set_default_timeout(PATIENCE)
            page = context.new_page()
            page.goto("/admin/")
            page.get_by_label("Username").fill(name)
            page.get_by_label("Password").fill(PASSWORD)
            page.get_by_role("button", name="Log in").click()
            page.wait_for_url("**/admin/")
            return page

        yield open_one


def fill(conn: Connection, more: int) -> None:
    """Defer so many jobs, then jobs 1 and 2 above them, and something for every list."""
    for _ in range(more // 50_000):
        conn.execute(
            "select count(*) from queue.defer_many((select jsonb_agg(jsonb_build_object("
            "'task', 't' || n % 7, 'queue', 'q' || n % 5, 'args', jsonb_build_object('n', n)))"
            " from generate_series(1, 50000) n))"
        )
        while conn.execute("select admitted from queue.tick()").fetchone() != (0,):
            pass
    if more:
        conn.execute("vacuum analyze")
    worker = "select queue.register_worker('w', array['runs'], '{\"dead_after\": \"1 day\"}')"
    ((id,),) = conn.execute(worker.encode()).fetchall()
    conn.execute("select queue.register_task('thing', '{\"queue\": \"things\"}')")
    conn.execute("select queue.schedule('morning', '0 6 * * *', 'thing')")
    key = "concurrency_key => 'k', concurrency_limit => 1"
    conn.execute(f"select queue.defer('runs', queue => 'runs', lock => 'l', {key})".encode())
    # Only of its queue: without a list, a fetch takes the jobs of any.
    fetched = conn.execute("select f.task from queue.fetch(%s, array['runs']) f", [id]).fetchall()
    assert fetched == [("runs",)]
    conn.execute(
        "select queue.defer('thing', jsonb_build_object('n', n)) from generate_series(1, 2) n"
    )
    conn.execute("select queue.tick()")


def seen(page: Page, path: str) -> float:
    """Open a page, which must not fail. Return how long it took, in ms."""
    answer = page.goto(path)
    assert answer is not None
    assert answer.status == 200, (path, answer.status)
    return float(page.evaluate(TOOK))


def confirm(page: Page, label: str) -> None:
    """Say yes if the action asks."""
    if label in ("Delete", "Cancel, or abort"):
        page.locator("input[name=confirmed]").click()


def act(page: Page, path: str, label: str, *rows: Any) -> str:
    """Select rows of a list, run an action, and return what the page says."""
    seen(page, path)
    for row in rows:
        page.locator(f'input[name="_selected_action"][value="{row}"]').check()
    page.locator("select[name=action]").select_option(label=label)
    page.locator("button[name=index]").first.click()
    confirm(page, label)
    return page.locator(".messagelist").inner_text()


@pytest.mark.long
@pytest.mark.parametrize("more", [0, pytest.param(1_000_000, marks=pytest.mark.soak)])
def test_each_page_and_each_action(visit: Open, conn: Connection, more: int) -> None:
    fill(conn, more)
    page = visit(is_superuser=True)
    running, one, two = more + 1, more + 2, more + 3

    def job(id: int, column: str = "state") -> Any:
        query = f"select {column} from queue.jobs where id = %s".encode()
        return (conn.execute(query, [id]).fetchone() or ("",))[0]

    paths = [f"/admin/pgdefer/{model}/" for model in MODELS]
    paths += [
        "/admin/",
        "/admin/pgdefer/schedule/morning/change/",
        "/admin/pgdefer/queue/runs/change/",
    ]
    paths += [f"{JOBS}{id}/change/" for id in (running, one)]
    paths += [f"{JOBS}?state={state}" for state in ("ready", "running", "failed", "succeeded")]
    paths += [f"{JOBS}?queue=runs", f"{JOBS}?task=thing", f"{JOBS}?q=nowhere", f"{JOBS}?q={one}"]
    for path in paths:
        seen(page, path)  # the first also compiles templates
        took = sorted(seen(page, path) for _ in range(3 if more else 1))
        print(f"{path:<50}{took[len(took) // 2]:>6.0f} ms")
        assert page.locator("h1").count()

    # On the list of jobs
    abort = "select h.reason from queue.workers w, queue.heartbeat(w.id) h"
    assert act(page, JOBS, "Hold", one, two) == "Done: 2."
    assert (job(one), job(two)) == ("held", "held")
    assert act(page, JOBS, "Unhold", one) == "Done: 1."
    assert job(one) == "ready"
    assert "Done" not in act(page, JOBS, "Unhold", one)
    assert act(page, JOBS, "Cancel", one) == "Done: 1."
    assert job(one) == "cancelled"
    assert act(page, JOBS, "Retry", one) == "Done: 1."
    assert job(one) == "ready"
    conn.execute("select queue.reschedule(%s, '2999-01-01')", [one])
    assert act(page, JOBS, "Run now", one) == "Done: 1."
    assert job(one) == "ready"
    assert job(running) == "running"
    assert act(page, JOBS, "Cancel, or abort", running) == "Done: 1."
    assert conn.execute(abort).fetchall() == [("cancelled",)]
    assert act(page, JOBS, "Delete", two) == "Done: 1."
    assert job(two) == ""

    # On a job's page
    def click(label: str) -> str:
        seen(page, f"{JOBS}{one}/change/")
        page.locator(".job-actions").get_by_role("button", name=label, exact=True).click()
        confirm(page, label)
        return page.locator(".messagelist").inner_text()

    assert click("Hold") == f"Job {one}: hold"
    assert click("Unhold") == f"Job {one}: unhold"
    assert click("Cancel") == f"Job {one}: cancel"
    assert click("Retry") == f"Job {one}: retry"
    conn.execute("select queue.reschedule(%s, '2999-01-01')", [one])
    assert click("Run now") == f"Job {one}: run_now"
    assert job(one) == "ready"
    seen(page, f"{JOBS}{one}/change/")
    page.locator("#id_args").fill('{"n": 7}')
    page.locator("input[name=_save]").click()
    expect(page.locator(".messagelist")).to_contain_text("was changed successfully")
    assert job(one, "args") == {"n": 7}
    assert click("Delete") == f"Job {one}: delete"
    assert job(one) == ""
    seen(page, f"{JOBS}{running}/change/")
    page.get_by_role("button", name="Cancel, or abort").click()
    confirm(page, "Cancel, or abort")
    expect(page.locator(".messagelist")).to_contain_text(f"Job {running}: abort")

    # On the other lists
    paused = "select paused_until is not null from queue.queues where name = 'things'"
    for label, is_paused in (("Pause", True), ("Resume", False)):
        assert act(page, "/admin/pgdefer/queue/", label, "things") == "Done: 1."
        assert conn.execute(paused.encode()).fetchall() == [(is_paused,)]
        assert act(page, "/admin/pgdefer/task/", label, "thing") == "Done: 1."
    enabled = "select enabled from queue.schedules where name = 'morning'"
    for label, is_enabled in (("Run now", True), ("Disable", False), ("Enable", True)):
        assert act(page, "/admin/pgdefer/schedule/", label, "morning") == "Done: 1."
        assert conn.execute(enabled.encode()).fetchall() == [(is_enabled,)]
    calls = conn.execute("select call from queue.audit order by id").fetchall()
    assert [
        call for (call,) in calls if call in ("run_now", "enable_schedule", "pause", "resume")
    ] == ("pause pause resume resume run_now enable_schedule enable_schedule".split())


def test_who_has_no_permission_can_do_nothing(visit: Open, conn: Connection) -> None:
    fill(conn, 0)
    before = conn.execute("select * from queue.jobs order by id").fetchall()

    def post(page: Page, path: str, **form: str) -> int:
        """Send a form as the page's own script could."""
        token = page.locator("input[name=csrfmiddlewaretoken]").first.input_value()
        answer = page.request.post(
            path, form={"csrfmiddlewaretoken": token, **form}, headers={"referer": page.url}
        )
        return answer.status

    viewer = visit(*(f"view_{model}" for model in MODELS))
    stranger = visit()
    assert "permission" in stranger.locator("#content").inner_text()
    for model in MODELS:
        answer = stranger.goto(f"/admin/pgdefer/{model}/")
        assert answer is not None
        assert answer.status == 403, model
        seen(viewer, f"/admin/pgdefer/{model}/")
        assert viewer.locator("#result_list tbody tr").count(), model
        assert not viewer.locator("select[name=action], input[name=_selected_action]").count(), (
            model
        )
    seen(viewer, f"{JOBS}2/change/")
    expect(viewer.locator("#content")).to_contain_text("thing")
    assert not viewer.locator(".job-actions button, input[type=submit], textarea").count()
    stranger.goto("/admin/")
    for page in (viewer, stranger):
        for name in ("retry", "cancel", "abort", "hold", "unhold", "run_now", "delete"):
            assert post(page, f"{JOBS}2/act/{name}/") == 403, name
            post(page, JOBS, action=f"{name}_jobs", _selected_action="2", index="0")
        assert post(page, f"{JOBS}2/change/", args='{"n": 7}', _save="Save") == 403
        for model, key, name in (
            ("queue", "things", "pause"),
            ("task", "thing", "pause"),
            ("schedule", "morning", "disable"),
            ("schedule", "morning", "run_now"),
        ):
            post(page, f"/admin/pgdefer/{model}/", action=name, _selected_action=key, index="0")
    assert conn.execute("select * from queue.jobs order by id").fetchall() == before
    rows = conn.execute(
        "select call from queue.audit where call not in ('schedule', 'register_task')"
    )
    assert rows.fetchall() == []
