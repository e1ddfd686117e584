"""The admin: its pages, its actions, and the rights to them."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from pgdefer import Retry
from pgdefer.contrib.django.application import DjangoApp
from pgdefer.contrib.django.models import Job, Queue, Schedule
from pgdefer.database import sql

pytestmark = pytest.mark.client

JOBS = "/admin/pgdefer/job/"


def browser(*permissions: str, is_superuser: bool = False) -> Client:
    """Return the browser of a logged-in user."""
    user = User.objects.create(
        username="-".join(permissions) or "nobody", is_staff=True, is_superuser=is_superuser
    )
    for name in permissions:
        user.user_permissions.add(Permission.objects.get(codename=name))
    client = Client()
    client.force_login(user)
    return client


def listed(client: Client, query: str = "") -> list[int]:
    page = client.get(f"{JOBS}{query}")
    assert page.status_code == 200, page
    return [int(id) for id in re.findall(r'name="_selected_action" value="(\d+)"', page.text)]


def do(client: Client, action: str, *ids: Any, at: str = JOBS) -> Any:
    return client.post(at, {"action": action, "_selected_action": list(ids)}, follow=True)


def test_jobs_are_found(app: DjangoApp) -> None:
    admin = browser("change_job")
    for number in range(120):
        app.defer("even" if number % 2 == 0 else "odd", {"n": number}, queue="q", lock=f"l{number}")
    app.job(7).hold()
    assert listed(admin) == list(range(120, 70, -1))
    page = admin.get(JOBS).text
    (older,) = re.findall(r'<a href="(\?before=\d+)">Older', page)
    assert listed(admin, older) == list(range(70, 20, -1))
    assert listed(admin, "?state=held") == [7]
    assert listed(admin, "?task=odd&queue=q") == list(range(120, 20, -2))
    assert listed(admin, "?queue=r") == []
    assert listed(admin, "?q=7") == [7]
    assert listed(admin, "?q=%22n%22: 33") == [34]
    assert listed(admin, "?q=$.n ? (@ == 33)") == [34]
    assert listed(admin, "?q=key:l33") == [34]
    assert listed(admin, "?q=$.n ? (@ ==") == []
    assert listed(admin, "?before=x&state=y") == []


def test_a_jobs_page(app: DjangoApp, drain: Callable[..., None]) -> None:
    admin = browser("change_job", "delete_job")
    failed = app.defer("shop.tasks.stamp", {"text": "<b>"}, retry=Retry(1)).id
    drain()
    page = admin.get(f"{JOBS}{failed}/change/").text
    assert "matching query does not exist" in page
    assert "Traceback" in page
    assert "failed" in page
    admin.post(f"{JOBS}{failed}/change/", {"args": '{"text": "new"}'})
    assert Job.objects.get(id=failed).args == {"text": "new"}
    admin.post(f"{JOBS}{failed}/act/retry/")
    assert Job.objects.get(id=failed).state == "ready"
    page = admin.post(f"{JOBS}{failed}/act/unhold/", follow=True).text
    assert "not held" in page or "does not allow" in page or "state" in page
    page = admin.post(f"{JOBS}{failed}/act/delete/").text
    assert "Are you sure?" in page
    assert f"<li>shop.tasks.stamp {failed}</li>" in page
    assert Job.objects.get(id=failed).state == "ready"
    admin.post(f"{JOBS}{failed}/act/delete/", {"confirmed": "yes"})
    assert not Job.objects.exists()
    assert admin.get(f"{JOBS}{failed}/change/").status_code == 302
    assert admin.get(f"{JOBS}1/act/retry/").status_code == 404


def test_sensitive_args_are_hidden(app: DjangoApp, shop: str) -> None:
    """From a role that is neither the queue's owner nor its member, in the admin and the model."""
    args = {"card": {"number": "4111-secret", "name": "n"}, "user": "u"}
    with psycopg.connect(shop, autocommit=True) as owner:
        owner.execute("""select queue.register_task('pay', '{"sensitive": ["card.number"]}')""")
        id = app.defer("pay", args).id
        admin = browser("change_job", "view_schedule")
        owner.execute("create role django_hides")
        try:
            owner.execute("select queue.grant_access('django_hides', 'operator')")
            owner.execute("grant django_hides to current_user")
            owner.execute("grant pg_read_all_data, pg_write_all_data to django_hides")
            with connection.cursor() as cursor:
                cursor.execute("set role django_hides")
                assert Job.objects.get(id=id).args["card"] == {"number": "***", "name": "n"}
                assert not Job.objects.filter(args__card__number="4111-secret").exists()
                pages = [admin.get(f"{JOBS}{id}/change/"), admin.get(JOBS)]
                assert [page.status_code for page in pages] == [200, 200]
                assert "***" in pages[0].text
                assert "4111-secret" not in pages[0].text + pages[1].text
                assert listed(admin, "?q=4111-secret") == []
                assert listed(admin, '?q=$.card.number ? (@ == "4111-secret")') == []
                edited = {"card": {"number": "***", "name": "n"}, "user": "v"}
                admin.post(f"{JOBS}{id}/change/", {"args": json.dumps(edited)})
                cursor.execute("reset role")
            assert Job.objects.get(id=id).args == args | {"user": "v"}
        finally:
            owner.execute("drop owned by django_hides")
            owner.execute("select queue.revoke_access('django_hides')")
            owner.execute("drop role django_hides")


def test_sensitive_args_need_a_permission(app: DjangoApp, shop: str) -> None:
    """Where Django connects as the queue's owner, to whom the database shows them."""
    args = {"card": {"number": "4111-secret"}, "user": "u"}
    with psycopg.connect(shop, autocommit=True) as owner:
        owner.execute("""select queue.register_task('pay', '{"sensitive": ["card.number"]}')""")
        owner.execute("select queue.schedule('s', '@daily', 'pay', %s)", [json.dumps(args)])
    id = app.defer("pay", args).id
    job, schedule = f"{JOBS}{id}/change/", "/admin/pgdefer/schedule/s/change/"
    user = browser("change_job", "view_schedule")
    for page in (job, schedule):
        text = user.get(page).text
        assert "***" in text
        assert "4111-secret" not in text
    for asked in ("4111-secret", '$.card.number ? (@ == "4111-secret")'):
        assert listed(user, f"?q={asked}") == []
        # An action that does not exist shows the list again.
        again = do(user, "none", id, at=f"{JOBS}?q={asked}")
        assert f'name="_selected_action" value="{id}"' not in again.text
    user.post(job, {"args": json.dumps({"card": {"number": "***"}, "user": "v"})})
    assert Job.objects.get(id=id).args == args | {"user": "v"}
    user.post(job, {"args": json.dumps({"card": [{"number": "***"}]})})
    assert Job.objects.get(id=id).args == args | {"user": "v"}
    for asked in ("args__card__number__startswith=4", "args__user=u", "args__icontains=4111"):
        assert user.get(f"/admin/pgdefer/schedule/?{asked}").status_code == 400
    assert user.get("/admin/pgdefer/schedule/?enabled__exact=1&q=s").status_code == 200
    allowed = browser("change_job", "view_sensitive_args")
    assert "4111-secret" in allowed.get(job).text
    assert listed(allowed, "?q=4111-secret") == [id]
    allowed.post(job, {"args": json.dumps({"card": {"number": "4222"}})})
    assert Job.objects.get(id=id).args == {"card": {"number": "4222"}}


def test_args_that_python_can_not_read(app: DjangoApp, shop: str) -> None:
    admin = browser(is_superuser=True)
    with psycopg.connect(shop, autocommit=True) as sql_client:
        sql_client.execute("select queue.defer('x', jsonb_build_object('a', 1e5000::numeric))")
        sql_client.execute(
            "select queue.defer('x', %s)", ['{"a": ' + "[" * 3000 + "]" * 3000 + "}"]
        )
    assert listed(admin) == [2, 1]
    for id in (1, 2):
        assert admin.get(f"{JOBS}{id}/change/").status_code == 200
    do(admin, "hold_jobs", 1, 2)
    assert [job.state for job in Job.objects.order_by("id")] == ["held", "held"]


def test_args_are_edited_without_loss(app: DjangoApp, shop: str) -> None:
    admin = browser("change_job")
    with psycopg.connect(shop, autocommit=True) as sql_client:
        sql_client.execute(
            """select queue.defer('x', '{"n": 12345678901234567890.123456789, "t": "a"}')"""
        )
        page = admin.get(f"{JOBS}1/change/").text
        assert "12345678901234567890.123456789" in page
        admin.post(f"{JOBS}1/change/", {"args": '{"n": 12345678901234567890.123456789, "t": "b"}'})
        ((args,),) = sql_client.execute("select args::text from queue.jobs").fetchall()
        assert args == '{"n": 12345678901234567890.123456789, "t": "b"}'
        assert "no JSON" in admin.post(f"{JOBS}1/change/", {"args": "{"}).text
        for refused in ("[1]", '{"n": ' + "1" * 5000 + "e9999999}"):
            page = admin.post(f"{JOBS}1/change/", {"args": refused}, follow=True).text
            assert 'class="error"' in page
        ((args,),) = sql_client.execute("select args::text from queue.jobs").fetchall()
        assert args == '{"n": 12345678901234567890.123456789, "t": "b"}'


def test_what_the_database_refuses(app: DjangoApp, shop: str) -> None:
    """A role with fewer rights than the user's, a read-only session, an id that can't be."""
    admin = browser(is_superuser=True)
    id = app.defer("a").id
    with connection.cursor() as cursor:
        cursor.execute("set default_transaction_read_only = on")
    assert "read-only" in admin.post(f"{JOBS}{id}/act/hold/", follow=True).text
    with connection.cursor() as cursor:
        cursor.execute("set default_transaction_read_only = off")
    assert admin.post(f"{JOBS}{'9' * 25}/act/hold/").status_code == 302
    with psycopg.connect(shop, autocommit=True) as owner:
        owner.execute("create role django_limited")
        try:
            owner.execute("select queue.grant_access('django_limited', 'operator', '{other}')")
            owner.execute("grant django_limited to current_user")
            owner.execute("grant pg_read_all_data, pg_write_all_data to django_limited")
            owner.execute("revoke all on queue.tasks from django_limited")
            with connection.cursor() as cursor:
                cursor.execute("set role django_limited")
                assert listed(admin) == []
                assert "not found" in admin.post(f"{JOBS}{id}/act/hold/", follow=True).text.lower()
                cursor.execute("reset role")
        finally:
            owner.execute("drop owned by django_limited")
            owner.execute("select queue.revoke_access('django_limited')")
            owner.execute("drop role django_limited")
    assert Job.objects.get(id=id).state == "ready"


def test_each_action(app: DjangoApp, drain: Callable[..., None]) -> None:
    admin = browser(is_superuser=True)
    one, two = app.defer("a").id, app.defer("b").id

    def states() -> list[str]:
        return [job.state for job in Job.objects.order_by("id")]

    do(admin, "hold_jobs", one, two)
    assert states() == ["held", "held"]
    do(admin, "unhold_jobs", one)
    assert states() == ["ready", "held"]
    do(admin, "cancel_jobs", one, two)
    assert states() == ["cancelled", "cancelled"]
    do(admin, "retry_jobs", one)
    assert states() == ["ready", "cancelled"]
    assert "is not held" in do(admin, "unhold_jobs", one).text or states()[0] == "ready"
    page = do(admin, "delete_jobs", two)
    assert f"<li>b {two}</li>" in page.text
    assert states() == ["ready", "cancelled"]
    fields = re.findall(r'<input type="hidden" name="(\w+)" value="(\w+)">', page.text)
    again = {key: value for key, value in fields if key != "csrfmiddlewaretoken"}
    assert again == {"action": "delete_jobs", "_selected_action": str(two)}
    admin.post(JOBS, {**again, "confirmed": "yes"})
    assert states() == ["ready"]
    do(admin, "pause", "default", at="/admin/pgdefer/queue/")
    assert Queue.objects.get(name="default").paused_until is not None
    do(admin, "resume", "default", at="/admin/pgdefer/queue/")
    assert Queue.objects.get(name="default").paused_until is None
    drain()
    name = Schedule.objects.get().name
    do(admin, "disable", name, at="/admin/pgdefer/schedule/")
    assert not Schedule.objects.get().enabled
    do(admin, "enable", name, at="/admin/pgdefer/schedule/")
    do(admin, "run_now", name, at="/admin/pgdefer/schedule/")
    assert Job.objects.filter(task="shop.tasks.forget_old_orders").count() == 1
    for model in ("job", "queue", "task", "schedule", "worker", "lock", "semaphore"):
        assert admin.get(f"/admin/pgdefer/{model}/").status_code == 200
    assert (
        admin.get(f"/admin/pgdefer/schedule/{name.replace('_', '_5F')}/change/").status_code == 200
    )
    assert admin.get("/admin/pgdefer/queue/default/change/").status_code == 200


def test_who_has_no_permission_does_nothing(app: DjangoApp) -> None:
    one = app.defer("a").id
    stranger, viewer = browser(), browser("view_job", "view_queue")
    assert stranger.get(JOBS).status_code == 403
    assert listed(viewer) == []  # nothing to select
    assert "a</a>" in viewer.get(JOBS).text
    for name in ("retry", "cancel", "hold", "delete"):
        for client in (stranger, viewer):
            do(client, f"{name}_jobs", one)
            assert client.post(f"{JOBS}{one}/act/{name}/").status_code == 403
    assert viewer.post(f"{JOBS}{one}/change/", {"args": '{"x": 1}'}).status_code == 403
    do(viewer, "pause", "default", at="/admin/pgdefer/queue/")
    job = Job.objects.get()
    assert (job.state, job.args) == ("ready", {})
    assert Queue.objects.filter(paused_until__isnull=False).count() == 0
    changer = browser("change_job")
    assert changer.post(f"{JOBS}{one}/act/delete/").status_code == 403
    anonymous = Client().post(f"{JOBS}{one}/act/hold/")
    assert anonymous.status_code == 302
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get(username="change_job"))
    assert strict.post(f"{JOBS}{one}/act/hold/").status_code == 403
    assert Job.objects.get().state == "ready"


@pytest.mark.soak
def test_a_million_jobs(app: DjangoApp, shop: str) -> None:
    admin = browser(is_superuser=True)
    with psycopg.connect(shop, autocommit=True) as conn:
        for _ in range(20):
            conn.execute(
                "select count(*) from queue.defer_many((select jsonb_agg(jsonb_build_object("
                "'task', 't' || n % 7, 'queue', 'q' || n % 5, 'args', jsonb_build_object('n', n)))"
                " from generate_series(1, 50000) n))"
            )
        for _ in range(200):
            conn.execute("select queue.tick()")
        conn.execute("vacuum analyze")
    pages = ["", "?state=ready", "?state=failed", "?queue=q3", "?task=t3&state=ready", "?q=zzz"]
    for page in [*(JOBS + query for query in pages), f"{JOBS}500000/change/"]:
        admin.get(page)
        begun = time.perf_counter()
        assert admin.get(page).status_code == 200
        print(f"{page}: {(time.perf_counter() - begun) * 1000:.0f} ms")
    for model in ("queue", "task", "schedule", "worker", "lock", "semaphore"):
        begun = time.perf_counter()
        assert admin.get(f"/admin/pgdefer/{model}/").status_code == 200
        print(f"{model}: {(time.perf_counter() - begun) * 1000:.0f} ms")


def test_workers_show_their_memory(app: DjangoApp) -> None:
    admin = browser("view_worker")
    for name, memory in (("tells", 3 << 20), ("silent", None)):
        ((id, *_),) = app.client.call(
            sql.REGISTER_WORKER, {"name": name, "queues": None, "info": "{}"}
        )
        app.client.call(sql.HEARTBEAT, {"worker": id, "memory": memory})
    page = admin.get("/admin/pgdefer/worker/").text
    cells = re.findall(r'class="field-resident[^>]*>([^<]*)<', page)
    assert sorted(cell.replace("\N{NO-BREAK SPACE}", " ") for cell in cells) == ["-", "3.0 MB"]


def test_no_page_reads_its_rows_one_by_one(app: DjangoApp, drain: Callable[..., None]) -> None:
    admin = browser(is_superuser=True)
    drain()  # registers the schedules
    (schedule,) = Schedule.objects.all()
    for n in range(20):
        app.defer(f"task {n}", lock=f"l{n}", concurrency_key=f"k{n}", concurrency_limit=1)
        app.client.call(sql.RUN_NOW, {"name": schedule.name})
    lists = ("job", "queue", "task", "schedule", "worker", "lock", "semaphore")
    places = [*(f"{name}/" for name in lists), f"schedule/{quote(schedule.name)}/change/"]
    for place in places:
        with CaptureQueriesContext(connection) as queries:
            assert admin.get(f"/admin/pgdefer/{place}").status_code == 200
        assert len(queries) < 12, [query["sql"] for query in queries]


@pytest.mark.parametrize("levels", range(860, 960, 20))
def test_args_with_many_levels_are_shown(app: DjangoApp, shop: str, levels: int) -> None:
    args = '{"a": ' * levels + "1" + "}" * levels
    with psycopg.connect(shop, autocommit=True) as owner:
        owner.execute("select queue.defer('t', %s::jsonb)", [args])
        owner.execute("select queue.schedule('s', '@daily', 't', %s::jsonb)", [args])
    for admin in (browser("view_job", "view_schedule"), browser("change_job")):
        assert admin.get(f"{JOBS}1/change/").status_code == 200
    admin = browser(is_superuser=True)
    assert admin.get("/admin/pgdefer/schedule/s/change/").status_code == 200
    assert admin.get(JOBS).status_code == 200


@pytest.mark.parametrize("permissions", [(), ("view_job", "view_schedule", "view_semaphore")])
def test_what_is_no_text_of_the_database(app: DjangoApp, permissions: tuple[str, ...]) -> None:
    admin = browser(*permissions)
    for model in ("job", "queue", "task", "schedule", "lock", "semaphore", "worker"):
        for page in ("change", "history", "delete"):
            found = admin.get(f"/admin/pgdefer/{model}/%00/{page}/")
            assert found.status_code in (302, 403, 404), (model, page)
    assert admin.get("/admin/pgdefer/semaphore/?kind__exact=%00").status_code in (400, 403)
    assert admin.get("/admin/pgdefer/semaphore/?kind=%00").status_code in (400, 403)


def test_selected_rows_that_can_not_be(app: DjangoApp) -> None:
    admin = browser("change_job", "change_queue", "change_schedule")
    id = app.defer("t").id
    for at, action, keys in (
        (JOBS, "hold_jobs", ["x"]),
        (JOBS, "hold_jobs", [id, "\0"]),
        (JOBS, "hold_jobs", ["9" * 5000]),
        ("/admin/pgdefer/queue/", "pause", ["default", "\0"]),
        ("/admin/pgdefer/schedule/", "run_now", ["\0"]),
    ):
        assert do(admin, action, *keys, at=at).status_code == 400, (at, keys)
    assert do(admin, "hold_jobs", id, "9" * 30).status_code == 200
    assert Job.objects.get().state == "held"
    assert not Queue.objects.filter(paused_until__isnull=False)


@pytest.mark.parametrize(("model", "action"), [("job", "hold_jobs"), ("queue", "pause")])
def test_no_action_is_for_all_rows(app: DjangoApp, model: str, action: str) -> None:
    """A list shows a part, and all would be more than its filters let through."""
    admin = browser("change_job", "change_queue")
    ids = [app.defer("t", queue=name).id for name in ("a", "b")]
    form = {"action": action, "_selected_action": [ids[0] if model == "job" else "a"]}
    answer = admin.post(f"/admin/pgdefer/{model}/?queue=a", {**form, "select_across": "1"})
    assert answer.status_code == 400
    assert not Job.objects.filter(state="held").exists()
    assert not Queue.objects.filter(paused_until__isnull=False).exists()
