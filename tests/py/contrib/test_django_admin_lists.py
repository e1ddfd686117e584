"""The lists of the admin: what they show of each row, and whom their actions leave out."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable

import pytest

from pgdefer import Retry
from pgdefer.contrib.django.application import DjangoApp
from pgdefer.contrib.django.models import Job

from .test_django_admin import JOBS, browser, do

pytestmark = pytest.mark.client


def test_no_list_counts(app: DjangoApp) -> None:
    admin = browser("change_job", "view_queue")
    for number in range(61):
        app.defer("one", {"n": number}, queue=f"q{number}")
    for page in (JOBS, f"{JOBS}?q=key:none", "/admin/pgdefer/queue/"):
        text = admin.get(page).text
        assert "Show all" not in text
        assert not re.search(r"\d+ results", text)


def test_a_pause_without_end(app: DjangoApp) -> None:
    admin = browser("view_queue")
    app.pause("endless")
    end = dt.datetime(2090, 5, 6, 7, 8, tzinfo=dt.UTC)
    app.pause("ending", until=end)
    page = admin.get("/admin/pgdefer/queue/").text
    assert "until resumed" in page
    assert "until May 6, 2090, 7:08 a.m." in page
    assert "9999" not in page
    page = admin.get("/admin/pgdefer/queue/endless/change/").text
    assert "until resumed" in page
    assert "9999" not in page


def test_the_list_of_jobs_has_the_reason(app: DjangoApp, drain: Callable[..., None]) -> None:
    admin = browser("view_job")
    app.pause("closed")
    job = app.defer("one", queue="closed")
    drain()
    reason = Job.objects.get(id=job.id).reason
    assert reason
    assert f'<td class="field-reason">{reason}</td>' in admin.get(JOBS).text


def test_retry_skips_what_has_succeeded(app: DjangoApp, drain: Callable[..., None]) -> None:
    admin = browser("change_job")
    failed = app.defer("shop.tasks.stamp", {"text": "no order"}, retry=Retry(1)).id
    given = {"scheduled_for": "2030-01-01T00:00:00Z"}
    done = [app.defer("shop.tasks.forget_old_orders", given).id for _ in range(2)]
    drain()
    page = do(admin, "retry_jobs", failed, *done).text
    assert "Skipped, as they have succeeded: 2." in page
    assert "Done: 1." in page
    states = dict(Job.objects.values_list("id", "state"))
    assert states == {failed: "ready", **dict.fromkeys(done, "succeeded")}
    assert "Done" not in do(admin, "retry_jobs", *done).text


def test_limits_of_one_key(app: DjangoApp, drain: Callable[..., None]) -> None:
    """A lock and a concurrency key may have one name: no page shows one of them."""
    admin = browser("view_semaphore")
    for _ in range(2):
        app.defer("one", lock="same", lock_mode="mutex", queue="unserved")
        app.defer("one", concurrency_key="same", concurrency_limit=1, queue="unserved")
    drain(queues=["another"])
    page = admin.get("/admin/pgdefer/semaphore/").text
    assert page.count('class="field-key">same<') == 2
    for part in ("change", "history"):
        answer = admin.get(f"/admin/pgdefer/semaphore/same/{part}/")
        assert (answer.status_code, answer.headers.get("location")) == (302, "/admin/")


def test_a_position_that_is_no_id(app: DjangoApp) -> None:
    assert browser("view_job").get(f"{JOBS}?before={'9' * 5000}").status_code == 200
