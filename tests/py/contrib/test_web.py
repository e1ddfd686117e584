"""The page, over HTTP, as roles that log in by password."""

from __future__ import annotations

import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import httpx
import psycopg
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from bouncer import PROGRAM, bouncing
from pgdefer.contrib import web
from pgdefer.contrib.web import queries
from pgdefer.contrib.web.actions import JOB_ACTIONS
from web_page import (
    ODD,
    PASSWORD,
    fill,
    location,
    log_in,
    logged_in,
    send,
    serving,
    token,
    visitor,
)

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
PLACES = "/ /jobs /queues /locks /groups /workers /schedules /tasks /audit".split()


Login = Callable[[str], httpx.Client]


@pytest.fixture
def login(site: str) -> Iterator[Login]:
    with contextlib.ExitStack() as opened:
        yield lambda role: opened.enter_context(logged_in(site, role))


class Marks(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def state(conn: Connection, id: int) -> str:
    (found,) = conn.execute("select state from queue.jobs where id = %s", [id]).fetchone() or ("",)
    return str(found)


# Logging in


def test_nobody_sees_anything_without_a_login(site: str, conn: Connection) -> None:
    fill(conn)
    with visitor(site) as client:
        for path in [*PLACES, "/jobs/1", "/schedule?name=daily"]:
            answer = client.get(path)
            assert answer.status_code == 303
            assert answer.headers["location"] == f"/login?next={quote(path, safe='')}"
        for path in ("/jobs/act", "/jobs/1/cancel", "/queues/act", "/groups/act", "/schedules/act"):
            assert client.post(path, data={"token": ""}).headers["location"] == "/login"
        assert client.get("/nothing").status_code == 404
        assert client.put("/jobs").status_code == 405


def test_a_login_that_is_refused(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)  # nobody logs in with the page's own password
    with visitor(site) as client:
        for role, password in [
            ("page_reader", "wrong"),
            ("page_reader", ""),
            ("page_unknown", "x"),
            ("page_nobody", "x\0"),
            ("page_nobody", PASSWORD),  # roles without rights
            ("postgres", "the server asks for none"),
            ("", "x"),
        ]:
            answer = log_in(client, role, password)
            assert answer.status_code == 403, role
            assert "session" not in answer.headers.get("set-cookie", "")
            assert "/tmp" not in answer.text
            assert "socket" not in answer.text


def test_passwords_cannot_be_guessed(site: str) -> None:
    with visitor(site) as client:
        seen = [log_in(client, "page_reader", "x").status_code for _ in range(22)]
        assert seen == [403] * 20 + [429] * 2


def test_a_login_leads_to_the_page_that_was_asked_for(site: str) -> None:
    with visitor(site) as client:
        for asked, given in [("/jobs?state=failed", "/jobs?state=failed"), ("//evil.example", "/")]:
            answer = log_in(client, "page_reader", next=asked)
            assert answer.headers["location"] == given
        cookie = answer.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=lax" in cookie


def test_after_the_logout_the_session_is_gone(login: Login) -> None:
    client = login("page_reader")
    name = client.cookies["pgdefer_session"]
    form = {"token": token(client.get("/jobs"))}
    evil = {"origin": "https://evil.example"}
    for answer in (
        client.post("/logout", data={"token": "x"}),
        client.post("/logout"),
        client.post("/logout", data=form, headers=evil),
        client.post("/logout", data=form, headers={"sec-fetch-site": "cross-site"}),
    ):
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers
    assert client.get("/jobs").status_code == 200, "somebody else's form ends no session"
    answer = client.post("/logout", data=form)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login")
    assert "pgdefer_session" not in client.cookies
    client.cookies.set("pgdefer_session", name)
    assert client.get("/jobs").status_code == 303
    answer = client.post("/logout", data=form)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?ended=1")


def test_head_is_answered_as_get(site: str, login: Login) -> None:
    with visitor(site) as client:
        answer = client.head("/login")
        assert (answer.status_code, answer.content) == (200, b"")
        assert client.head("/jobs").headers["location"] == "/login?next=%2Fjobs"
    answer = login("page_reader").head("/jobs")
    assert (answer.status_code, answer.content) == (200, b"")


# Display


@pytest.mark.parametrize("role", ["page_operator", "page_reader"])
def test_every_page_answers(login: Login, conn: Connection, role: str) -> None:
    ids = fill(conn)
    client = login(role)
    pages = [*PLACES, "/schedule?name=daily%2Fx", *(f"/jobs/{id}" for id in ids.values())]
    pages += [f"/jobs/{ids['waits']}/graph", f"/jobs/{ids['odd']}/graph"]
    for path in pages:
        answer = client.get(path)
        assert answer.status_code == 200, (path, answer.text)
        assert len(answer.content) < 150_000
        marks = Marks(answer.text)
        assert [tag for tag, _ in marks.tags].count("h1") == 1
        assert not [a for _, a in marks.tags if any(n.startswith("on") or n == "style" for n in a)]
        scripts = [a for tag, a in marks.tags if tag in ("script", "link")]
        assert all((a.get("src") or a.get("href") or "").startswith("/static/") for a in scripts)
        forms = [a for tag, a in marks.tags if tag == "form" and a.get("method") == "post"]
        assert role == "page_operator" or len(forms) <= 2, "a reader is offered nothing to change"
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["cache-control"] == "no-store"
        assert "select" in marks.text, "each page shows its SQL"
    for name in ("page.css", "page.js"):
        assert client.get(f"/static/{name}").status_code == 200


def test_names_are_shown_as_text(login: Login, conn: Connection) -> None:
    ids = fill(conn)
    client = login("page_operator")
    for path in ["/", "/jobs", "/queues", "/locks", "/tasks", "/audit", f"/jobs/{ids['odd']}"]:
        text = client.get(path).text
        assert "<b>'" not in text, path
        text = re.sub("(?s)<textarea.*?</textarea>", "", text)  # the edited text is unchanged
        assert not re.search("[\x01\u202e]", Marks(text).text)
        assert "49" not in re.findall(r"\b49é", text)
    assert "&lt;b&gt;" in client.get(f"/jobs/{ids['failed']}").text
    asked = {"queue": ODD.replace("\x01", ""), "task": "<script>", "pattern": '"><i>', "by": "text"}
    assert "<i>" not in client.get("/jobs", params=asked).text


def test_a_durable_job(login: Login, conn: Connection) -> None:
    def value(statement: str, *values: Any) -> Any:
        (found,) = conn.execute(statement, values).fetchone() or (None,)
        return found

    worker = value("select queue.register_worker('w')")
    id = value('select queue.defer(\'order\', options => \'{"retry": {"base": "0"}}\')')
    claim = value("select claim from queue.fetch(%s)", worker)
    value("select queue.finish_step(%s, %s, 'charge', '{\"paid\": 7}')", id, claim)
    value("select queue.set_progress(%s, %s, 40, 'two of five')", id, claim)
    value("select queue.fail(%s, %s, 'no paper')", id, claim)
    value("select claim from queue.fetch(%s)", worker)
    text = Marks(login("page_reader").get(f"/jobs/{id}").text).text
    events = (
        "deferred",
        "attempt 1 started",
        "step charge",
        "attempt 1: failed",
        "attempt 2 started",
    )
    timeline = text[text.index("Timeline") :]
    places = [timeline.index(event) for event in events]
    assert places == sorted(places)
    assert timeline.count("attempt 1 started") == 1
    assert '{"paid": 7}' in text
    assert re.search(r"40\S* % two of five", text)
    conn.execute("select queue.heartbeat(id, 123456789) from queue.workers")
    text = Marks(login("page_reader").get("/workers").text).text
    assert f"1: {id} order" in text, "what each worker runs"
    assert "118 MB" in text, "and the memory that it uses"


def test_a_graph_of_needs(login: Login, conn: Connection) -> None:
    ids = fill(conn)
    marks = Marks(login("page_reader").get(f"/jobs/{ids['waits']}/graph").text)
    boxes = {a["href"]: a["transform"] for tag, a in marks.tags if "transform" in a}
    assert boxes == {
        f"../{ids['failed']}": "translate(0 0)",
        f"../{ids['waits']}": "translate(200 0)",
    }, "what it needs is to its left"
    lines = [a["d"] for tag, a in marks.tags if tag == "path"]
    assert lines == ["M150 17L200 17"]


def test_the_largest_graph(login: Login, conn: Connection) -> None:
    conn.execute("select queue.defer('root')")
    conn.execute(
        "select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 'leaf', 'needs',"
        " array[1])) from generate_series(1, 1200)))"
    )
    conn.execute("select queue.tick()")
    answer = login("page_reader").get("/jobs/1/graph")
    assert "Only the nearest 1,000 jobs are drawn" in answer.text
    assert answer.text.count("<rect") == 1000
    assert len(answer.content) < 150_000


def test_a_schedule_in_words(login: Login, conn: Connection) -> None:
    conn.execute("select queue.schedule('s', '30 2 * * SUN#1', 't', timezone => 'Europe/Berlin')")
    conn.execute("select queue.schedule('e', 'every 7 hours', 't')")
    client = login("page_reader")
    text = Marks(client.get("/schedule?name=s").text).text
    assert "30 2 * * SUN#1 (At 02:30, on the first Sunday of the month)" in text
    assert {*re.findall(r"02:30:00 \((.\d\d:\d\d)\)", text)} <= {"+01:00", "+02:00"}
    assert ("+01:00" in text and "+02:00" in text) == ("the clock has changed" in text)
    assert "every 7 hours" in client.get("/schedule?name=e").text


@pytest.mark.parametrize(
    ("cron", "days"),
    [
        ("0 0 13 * 5", "on day 13 of the month, on Friday; either day is enough"),
        ("0 0 13 * 1-5", "on day 13 of the month, Monday through Friday; either day is enough"),
        ("0 0 */2 * 1", "every 2 days, on Monday; both days must match"),
        ("0 0 0 1,15 * */2", "every 2 days of the week; both days must match"),
        ("0 0 13 * *", "on day 13 of the month"),
    ],
)
def test_two_fields_of_days_in_words(login: Login, conn: Connection, cron: str, days: str) -> None:
    conn.execute("select queue.schedule('s', %s, 't')", [cron])
    text = Marks(login("page_reader").get("/schedule?name=s").text).text
    assert f"{days})" in text


def test_shares(login: Login, conn: Connection) -> None:
    conn.execute("select queue.defer('t', options => '{\"share\": \"ann\"}')")
    conn.execute("select queue.configure_share('ann', '{\"weight\": 3}')")
    conn.execute("select queue.tick()")
    text = Marks(login("page_reader").get("/locks").text).text
    assert "Shares" in text
    assert "ann" in text[text.index("Shares") :]


def test_filters_and_pages(login: Login, conn: Connection) -> None:
    ids = fill(conn)
    client = login("page_reader")

    def shown(**asked: Any) -> set[int]:
        answer = client.get("/jobs", params=asked)
        assert answer.status_code == 200
        return {int(id) for id in re.findall(r'href="/jobs/(\d+)"', answer.text)}

    assert shown() == set(ids.values())
    assert shown(state="failed") == {ids["failed"]}
    assert "&lt;b&gt;" in client.get("/jobs?state=failed").text  # its error
    assert "&#34;ann&#34;" in client.get("/jobs?state=failed").text  # its args
    conn.execute("select queue.fail_jobs(array[%s], e'\\r\\nnone left\\r\\n')", [ids["ready"]])
    assert ">none left</span>" in client.get("/jobs?state=failed").text
    conn.execute("select queue.retry(array[%s])", [ids["ready"]])
    assert shown(queue="shop*", task="shop") == {ids["ready"], ids["waits"]}
    assert shown(by="key", pattern="l") == {ids["running"], ids["blocked"]}
    assert shown(by="path", pattern='$.to ? (@ == "ann")') == {ids["failed"]}
    conn.execute("select queue.defer_many((select jsonb_agg('{\"task\": \"x\"}'::jsonb)"
                 " from generate_series(1, 120)))")  # fmt: skip
    seen, query = 0, "task=x"
    for _ in range(3):
        text = client.get(f"/jobs?{query}").text
        seen += len(set(re.findall(r'href="/jobs/(\d+)"', text)))
        found = re.search(r'href="\?([^"]+)">Go on', text)
        query = found[1].replace("&amp;", "&") if found else ""
    assert seen == 120


def test_what_an_address_may_not_hold(login: Login) -> None:
    client = login("page_reader")
    for path in [
        "/jobs?state=none", "/jobs?by=path&pattern=%24.%5B", "/jobs?before=-1", "/jobs?before=1e9",
        "/jobs?before=99999999999999999999", "/jobs?queue=%00", "/audit?before=x", "/jobs?by=x",
        "/schedule?name=%00", "/jobs?before=%EF%BC%91",
    ]:  # fmt: skip
        answer = client.get(path)
        assert answer.status_code == 400, path
        assert ".py" not in answer.text


def test_what_is_not_there(login: Login) -> None:
    client = login("page_reader")
    for path in ("/jobs/1", "/jobs/999999999999999999", "/schedule?name=x", "/schedule"):
        assert client.get(path).status_code == 404


# Actions


def test_each_call_on_a_job(login: Login, conn: Connection) -> None:
    ids = fill(conn)
    client = login("page_operator")
    ready = ids["ready"]

    def act(name: str, id: int = ready, **form: Any) -> httpx.Response:
        answer = send(client, f"/jobs/{id}/{name}", **form)
        assert answer.status_code == 303, answer.text
        return client.get(answer.headers["location"])

    assert "Hold: held" in act("hold").text
    assert "Unhold: ready" in act("unhold").text
    act("set_priority", priority="7")
    assert "2998-01-01 00:00:00" in act("set_deadline", at="2998-01-01 00:00").text
    act("set_deadline", at="")
    act("move", queue="other")
    act("set_args", args='{"n": 12345678901234567890.5}')
    text = act("reschedule", at="2999-01-01 00:00").text
    assert "2999-01-01 00:00:00" in text
    assert "12345678901234567890.5" in text
    (job,) = conn.execute("select queue, priority from queue.jobs where id = %s", [ready])
    assert job == ("other", 7)
    assert "copy of job" in act("copy", queue="").text
    act("cancel")
    assert state(conn, ready) == "cancelled"
    act("retry")
    assert state(conn, ready) == "ready" or state(conn, ready) == "scheduled"
    act("fail_jobs", message=ODD.replace("\x01", ""))
    act("done")
    assert state(conn, ready) == "succeeded"
    act("cancel", ids["running"], abort="1")
    act("delete", force="1")
    assert state(conn, ready) == ""
    calls = conn.execute(
        "select call from queue.audit where role = 'page_operator' order by id"
    ).fetchall()
    assert [call for (call,) in calls] == (
        "hold unhold set_priority set_deadline set_deadline move set_args reschedule copy cancel"
        " retry fail_jobs done cancel delete".split()
    )


def test_calls_that_the_state_refuses_are_not_offered(login: Login, conn: Connection) -> None:
    ids = fill(conn)
    for name in ("held", "cancelled", "succeeded", "scheduled"):
        row = conn.execute("select queue.defer('t', queue => 'none')").fetchone()
        assert row
        (ids[name],) = row
    conn.execute("select queue.hold(%s)", [ids["held"]])
    conn.execute("select queue.cancel(%s)", [ids["cancelled"]])
    conn.execute("select count(*) from queue.done(%s)", [[ids["succeeded"]]])
    conn.execute("select queue.reschedule(%s, '2999-01-01')", [ids["scheduled"]])
    client = login("page_operator")
    fields = {"signal": {"name": "s"}, "fork": {"step": "s"}, "move": {"queue": "none"}}
    fields |= {"set_args": {"args": "{}"}, "set_priority": {"priority": "1"}}
    offered = {}
    for name, id in ids.items():
        marks = Marks(client.get(f"/jobs/{id}").text)
        actions = [attrs["action"] or "" for tag, attrs in marks.tags if "action" in attrs]
        offered[name] = {each.rpartition("/")[2] for each in actions} & JOB_ACTIONS.keys()
        for action in JOB_ACTIONS.keys() - offered[name]:
            answer = send(client, f"/jobs/{id}/{action}", **fields.get(action, {}))
            changes_nothing = (name, action) == ("held", "hold")
            assert changes_nothing or answer.status_code != 303, (name, action)
    assert "unhold" in offered["held"]
    assert not {"retry", "unhold", "fork"} & offered["ready"]
    assert offered["succeeded"] == {
        *("retry", "signal", "set_priority", "set_deadline", "move", "copy", "delete")
    }
    assert offered["failed"] == {*offered["succeeded"], "set_args", "done"}


def test_long_args_are_not_edited_here(login: Login, conn: Connection) -> None:
    row = conn.execute("select queue.defer('t', jsonb_build_object('a', repeat('x', 20000)))")
    (id,) = row.fetchone() or (0,)
    text = login("page_operator").get(f"/jobs/{id}").text
    assert f"pgdefer job args {id} -" in text
    assert 'name="args"' not in text


def test_lists_that_are_cut_say_so(login: Login, conn: Connection) -> None:
    conn.execute("select queue.create_queue('q' || n) from generate_series(1, 1001) n")
    conn.execute("select queue.register_worker('w' || n) from generate_series(1, 500) n")
    client = login("page_reader")
    text = client.get("/queues").text
    assert "first 1,000 of more: <code>pgdefer queue ls</code>" in text
    assert text.count('<tr><th scope="row">') == 1000
    assert "first 500 of more" in client.get("/").text
    assert "of more" not in client.get("/workers").text


def test_the_steps_of_a_job(login: Login, conn: Connection) -> None:
    client = login("page_operator")
    conn.execute("select queue.register_worker('w', null, '{\"dead_after\": \"1 day\"}')")
    ((id,),) = conn.execute("select queue.defer('order')").fetchall()
    ((claim,),) = conn.execute("select claim from queue.fetch(1)").fetchall()
    calls = (
        "finish_step(%s, %s, 'weigh', '\"<b>\"')",
        "fail_step(%s, %s, 'charge', 'no <i>money')",
        "set_progress(%s, %s, 50, 'half <u>')",
        "wait(%s, %s, 'approval', 'approval')",
    )
    for call in calls:
        conn.execute(f"select queue.{call}".encode(), [id, claim])
    conn.execute("select queue.tick()")
    text = Marks(client.get(f"/jobs/{id}").text).text
    for shown in ('"<b>"', "no <i>money", "50.0 % half <u>", "it waits for signal approval"):
        assert shown in text
    assert send(client, f"/jobs/{id}/signal", name="", payload="").status_code == 400
    answer = send(client, f"/jobs/{id}/signal", name="approval", payload='{"by": "ann"}')
    assert "the signal was sent" in client.get(answer.headers["location"]).text
    ((steps,),) = conn.execute("select steps from queue.fetch(1)").fetchall()
    assert steps["approval"] == {"by": "ann"}
    answer = send(client, f"/jobs/{id}/fork", step="charge")
    assert f"copy of job {id}" in client.get(answer.headers["location"]).text
    conn.execute("select queue.succeed(id, claim) from queue.jobs where id = %s", [id])
    assert send(client, f"/jobs/{id}/retry", from_step="weigh").status_code == 303
    names = conn.execute("select name from queue.steps where job_id = %s", [id]).fetchall()
    assert names == []


def test_groups(login: Login, conn: Connection) -> None:
    name = "<b>'\"&é"
    conn.execute('select queue.open_group(%s, \'{"task": "after"}\')', [name])
    conn.execute(
        "select queue.defer('t', options => jsonb_build_object('group', %s::text))", [name]
    )
    conn.execute("select queue.tick()")
    client = login("page_operator")
    text = Marks(client.get("/groups").text).text
    assert name in text
    assert "open" in text
    assert send(client, "/groups/act", name=name).status_code == 303
    conn.execute("select queue.cancel(id) from queue.jobs where task = 't'")
    conn.execute("select queue.tick()")
    assert "ended" in Marks(client.get("/groups").text).text
    assert 'href="/jobs/' in client.get("/groups").text
    reader = login("page_reader")
    assert name in Marks(reader.get("/groups").text).text
    assert "/groups/act" not in reader.get("/groups").text


def test_a_call_that_is_refused_says_why(login: Login, conn: Connection) -> None:
    ids = fill(conn)
    client = login("page_operator")
    for path, form, status in [
        (f"/jobs/{ids['running']}/hold", {}, 409),
        (f"/jobs/{ids['running']}/move", {"queue": "x"}, 409),
        (f"/jobs/{ids['ready']}/move", {}, 400),
        (f"/jobs/{ids['ready']}/set_args", {"args": "{"}, 400),
        (f"/jobs/{ids['ready']}/set_args", {"args": "[]"}, 400),
        (f"/jobs/{ids['ready']}/set_priority", {"priority": "9999999999"}, 400),
        (f"/jobs/{ids['ready']}/reschedule", {"at": "soon"}, 400),
        (f"/jobs/{ids['ready']}/explode", {}, 404),
        (f"/jobs/{ids['ready']}/retry", {"from_step": "zzz"}, 409),
        ("/jobs/999999/cancel", {}, 404),
        ("/queues/act", {"action": "pause", "queue": ""}, 400),
        ("/queues/act", {"action": "x"}, 400),
        ("/schedules/act", {"action": "x"}, 400),
        ("/jobs/act", {"action": "delete"}, 400),
        ("/jobs/act", {"action": "delete", "ids": "1' or true"}, 400),
    ]:
        answer = send(client, path, **form)
        assert answer.status_code == status, (path, form, answer.text)
        assert ".py" not in answer.text
        assert ("no such step" in answer.text) == ("from_step" in form)
    assert not conn.execute("select from queue.audit where role = 'page_operator'"
                            " and cardinality(ids) > 0").fetchall()  # fmt: skip


def test_a_job_that_is_missing(login: Login) -> None:
    client = login("page_operator")
    for call in ("hold", "delete", "set_priority"):
        answer = send(client, f"/jobs/99/{call}", priority="1")
        assert answer.status_code == 404
        assert "job not found" in answer.text


def test_more_jobs_than_a_call_takes(login: Login) -> None:
    client = login("page_operator")
    for ids, told in [(range(1, 1_002), "at most 1,000"), ([], "No job is selected")]:
        answer = send(client, "/jobs/act", action="hold", ids=[str(id) for id in ids])
        assert answer.status_code == 400
        assert told in answer.text


def test_many_jobs_at_once(login: Login, conn: Connection) -> None:
    ids = fill(conn)
    client = login("page_operator")
    both = [str(ids["ready"]), str(ids["running"])]
    asked = send(client, "/jobs/act", action="hold", ids=both)
    assert "Hold: 2 jobs" in asked.text
    assert state(conn, ids["ready"]) == "ready", "it is only shown what would be met"
    done = send(client, "/jobs/act", action="hold", ids=both, confirmed="1")
    assert "Hold: 1 of 2 jobs" in done.text
    assert "the job&#39;s state does not allow this" in done.text
    assert state(conn, ids["ready"]) == "held"
    done = send(client, "/jobs/act", action="delete", ids=both, confirmed="1")
    assert "Delete: 1 of 2 jobs" in done.text
    done = send(client, "/jobs/act", action="hold", ids=["999999"], confirmed="1")
    assert "job not found" in done.text
    assert "QJ001" not in done.text


def test_all_that_match_in_slices(login: Login, conn: Connection) -> None:
    conn.execute(
        "select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 't', 'queue', 'q'"
        " || g % 2)) from generate_series(1, 2400) g)), queue.tick()"
    )
    client = login("page_operator")
    answer = send(client, "/jobs/act", action="fail_jobs", scope="all", only_queue="q1")
    assert "Fail: 1000 or more jobs" in answer.text
    conn.execute("select queue.defer('t', queue => 'q1', priority => 1)")
    conn.execute("select queue.tick()")
    conn.execute("select queue.fail_jobs(array(select id from queue.jobs where queue = 'q1'"
                 " order by id limit 10))")  # fmt: skip
    seen: list[str] = []
    for _ in range(4):
        form = {
            str(a["name"]): str(a["value"])
            for tag, a in Marks(answer.text).tags
            if tag == "input" and a.get("type") == "hidden"
        }
        form |= {"message": "by hand"} if not seen else {}
        answer = client.post("/jobs/act", data=form)
        found = re.search("<p role=.status.>(.*?) refused", answer.text)
        assert found is not None, answer.text
        seen.append(found[1])
        if "Go on" not in answer.text:
            break
    assert seen == ["500 done, 0", "1000 done, 0", "1191 done, 10"]
    rows = conn.execute(
        "select queue, state, error, count(*) from queue.jobs"
        " where error = 'by hand' or state <> 'failed' group by 1, 2, 3 order by 1"
    )
    assert rows.fetchall() == [("q0", "ready", None, 1200), ("q1", "failed", "by hand", 1191)]


def test_queues_and_schedules(login: Login, conn: Connection) -> None:
    fill(conn)
    client = login("page_operator")
    send(client, "/queues/act", action="pause", queue="shop*", until="")
    assert "paused" in client.get("/").text
    answer = send(client, "/queues/act", action="pause", queue="shop", until="2001-01-01")
    assert "queue.resume ends a pause" in answer.text
    send(client, "/queues/act", action="resume", queue="shop")
    send(client, "/queues/act", action="configure_queue", queue="shop", max_running="3")
    rows = conn.execute("select max_running, paused_until from queue.queues where name = 'shop'")
    assert rows.fetchall() == [(3, None)]
    send(client, "/schedules/act", action="disable", name="daily/x")
    assert "Enable" in client.get("/schedule?name=daily%2Fx").text
    send(client, "/schedules/act", action="enable", name="daily/x")
    send(client, "/schedules/act", action="run_now", name="daily/x")
    send(client, "/schedules/act", action="unschedule", name="daily/x")
    assert not conn.execute("select from queue.schedules").fetchall()


def test_without_a_token_or_from_elsewhere_nothing_changes(login: Login, conn: Connection) -> None:
    ids = fill(conn)
    client = login("page_operator")
    path = f"/jobs/{ids['ready']}/cancel"
    good = token(client.get("/jobs"))
    for form, headers in [
        ({}, {}),
        ({"token": "x"}, {}),
        ({"token": good}, {"origin": "https://evil.example"}),
        ({"token": good}, {"origin": "null"}),
        ({"token": good}, {"sec-fetch-site": "cross-site"}),
        ({"token": good}, {"sec-fetch-site": "same-site"}),
    ]:
        assert client.post(path, data=form, headers=headers).status_code == 403
    assert client.get(path).status_code == 405
    assert client.post(path, content=b"x" * 5_000_000).status_code == 413
    assert client.post(path, content=b"\xff=1").status_code == 400
    assert state(conn, ids["ready"]) == "ready"
    assert client.post(path, data={"token": good}).status_code == 303


def test_a_reader_changes_nothing(login: Login, conn: Connection) -> None:
    ids = fill(conn)
    before = conn.execute("select * from queue.jobs order by id").fetchall()
    client = login("page_reader")
    for name in JOB_ACTIONS:
        form = {"queue": "x", "args": "{}", "priority": "1", "force": "1", "abort": "1"}
        form |= {"name": "s", "step": "a"}
        answer = send(client, f"/jobs/{ids['ready']}/{name}", **form)
        assert answer.status_code == 403, name
        assert "permission denied" in answer.text
    for action in ("pause", "resume", "configure_queue"):
        assert send(client, "/queues/act", action=action, queue="shop").status_code == 403
    for action in ("enable", "disable", "run_now", "unschedule"):
        assert send(client, "/schedules/act", action=action, name="daily/x").status_code == 403
    assert conn.execute("select * from queue.jobs order by id").fetchall() == before


def test_a_restricted_role_sees_only_its_queues(login: Login, conn: Connection) -> None:
    ids = fill(conn)
    conn.execute("select queue.grant_access('page_shop', 'operator', '{shop*}')")
    client = login("page_shop")
    hidden = {ids["failed"], ids["running"], ids["odd"], ids["blocked"]}
    answers = [client.get(path) for path in (*PLACES, "/jobs?queue=mail", "/jobs?by=key&pattern=l")]
    answers += [client.get(f"/jobs/{id}") for id in hidden]
    for id in hidden:
        answers += [send(client, f"/jobs/{id}/{name}") for name in ("hold", "cancel", "done")]
        answers.append(send(client, "/jobs/act", action="delete", ids=str(id)))
    answers.append(send(client, "/queues/act", action="pause", queue="mail"))
    for answer in answers:
        assert answer.status_code in (200, 403, 404)
        main = Marks(answer.text.partition("<footer>")[0])
        assert "ann" not in main.text.split()
        assert not [
            a for _, a in main.tags if (a.get("href") or "") in {f"/jobs/{i}" for i in hidden}
        ]
        assert "queue=mail" not in answer.text.partition("<footer>")[0]
    assert client.get(f"/jobs/{ids['ready']}").status_code == 200
    assert "Schedules" not in client.get("/jobs").text, "what it may not see is not offered"
    conn.execute("select queue.revoke_access('page_shop')")
    assert client.get("/jobs").status_code == 403


def test_sensitive_args_are_hidden(login: Login, conn: Connection) -> None:
    conn.execute("""select queue.register_task('pay', '{"sensitive": ["card.number"]}')""")
    args = '{"card": {"number": "4111-secret", "name": "n"}, "user": "u"}'
    conn.execute("select queue.defer('pay', %s)", [args])
    conn.execute("select queue.schedule('monthly', '@monthly', 'pay', %s)", [args])
    conn.execute("select queue.set_args(1, %s)", [args.replace("name", "alias")])
    for role in ("page_reader", "page_operator"):
        client = login(role)
        for path in (
            *PLACES,
            "/jobs/1",
            "/jobs/1/set_args",
            "/jobs?task=pay",
            "/jobs?pattern=user",
            "/jobs?by=path&pattern=" + quote("$.card"),
            "/schedules/monthly",
            "/audit?id=1",
        ):
            answer = client.get(path)
            assert "4111-secret" not in answer.text, path
            assert answer.status_code in (200, 403, 404, 405), path
        assert "***" in client.get("/jobs/1").text
        for asked in ("pattern=4111", "by=path&pattern=" + quote('$.card.number == "4111-secret"')):
            answer = client.get(f"/jobs?{asked}")
            assert answer.status_code == 200
            assert 'href="/jobs/1"' not in answer.text
    shown = '{"card": {"number": "***", "alias": "n"}, "user": "new"}'
    assert send(client, "/jobs/1/set_args", args=shown).status_code == 303
    wrong = send(client, "/jobs/1/set_args", args='{"card": [{"number": "***"}]}')
    assert wrong.status_code == 400
    assert "in place of a sensitive value" in wrong.text
    assert send(client, "/jobs/1/copy").status_code == 303
    assert "4111-secret" not in client.get("/jobs/2").text + client.get("/audit").text
    rows = conn.execute("select args from queue.jobs").fetchall()
    assert rows == [({"card": {"number": "4111-secret", "alias": "n"}, "user": "new"},)] * 2


# Mounting


def test_the_settings_of_queues_cost_no_count_of_jobs(login: Login, conn: Connection) -> None:
    fill(conn)
    text = Marks(login("page_reader").get("/queues").text).text
    assert re.search(r"\nmail\s*0\s*1\s", text), text

    def plan(statement: str) -> str:
        return str(conn.execute(f"explain verbose {statement}".encode()).fetchall())

    assert "count(" in plan(queries.QUEUE_COUNTS)
    assert "count(" not in plan(queries.QUEUES)


def test_the_audit_goes_on(login: Login, conn: Connection) -> None:
    conn.execute("select queue.set_priority('{1}', n) from generate_series(1, 51) n")
    client = login("page_operator")
    first = client.get("/audit?call=set_priority").text
    assert first.count("<td>set_priority</td>") == 50
    (more,) = re.findall(r'href="\?(call=set_priority&amp;before=\d+)"', first)
    second = client.get("/audit?" + more.replace("&amp;", "&")).text
    assert second.count("<td>set_priority</td>") == 1


def test_under_a_path_of_another_application(dsn: str, conn: Connection, granted: None) -> None:
    ids = fill(conn)
    pages = web.asgi(location(dsn))
    application = Starlette(routes=[Mount("/queue", pages)])
    with (
        serving(pages, application) as site,
        visitor(site, follow_redirects=True) as client,
    ):
        assert client.get("/queue/jobs").url.path == "/queue/login"
        answer = log_in(client, "page_operator", root="/queue", next="/jobs")
        assert answer.url.path == "/queue/jobs"
        for tag, attributes in Marks(answer.text).tags:
            address = attributes.get("href" if tag in ("a", "link") else "src") or "#"
            assert address.startswith(("/queue/", "#", "?")), address
            if address.startswith("/queue/"):
                assert client.get(address).status_code == 200
        answer = client.post(f"/queue/jobs/{ids['ready']}/hold", data={"token": token(answer)})
        assert answer.url.path == f"/queue/jobs/{ids['ready']}"


def test_the_cookies_of_a_page_at_the_root_of_the_host_are_not_taken(
    dsn: str, granted: None
) -> None:
    pages = web.asgi(location(dsn))
    application = Starlette(routes=[Mount("/queue", pages)])
    with serving(pages, application) as site, visitor(site) as client:
        for name in ("pgdefer_session", "pgdefer_login"):
            client.cookies.set(name, "another", path="/")
        assert log_in(client, "page_reader", root="/queue").status_code == 303
        assert client.get("/queue/jobs").status_code == 200


def test_behind_a_proxy_that_names_the_role(dsn: str, conn: Connection, granted: None) -> None:
    ids = fill(conn)
    application = web.asgi(dsn, role_header="x-role")
    with serving(application) as site, visitor(site) as client:
        assert client.get("/jobs").status_code == 403
        for role in ("none", "", "page_unknown", "x'y"):
            assert client.get("/jobs", headers={"x-role": role}).status_code in (400, 403)
        reader = {"x-role": "page_reader"}
        answer = client.get("/jobs", headers=reader)
        assert answer.status_code == 200
        form = {"token": token(answer)}
        path = f"/jobs/{ids['ready']}/hold"
        assert client.post(path, data=form, headers=reader).status_code == 403
        operator = {"x-role": "page_operator"}
        assert client.post(path, data=form, headers=operator).status_code == 403, "its own token"
        form = {"token": token(client.get("/jobs", headers=operator))}
        assert client.post(path, data=form, headers=operator).status_code == 303
    assert state(conn, ids["ready"]) == "held"


@pytest.mark.skipif(PROGRAM is None, reason="there is no pgbouncer here")
def test_behind_pgbouncer_nobody_gets_the_role_of_another(dsn: str, granted: None) -> None:
    """Nor the settings: its sessions serve one client after another."""
    with bouncing(dsn) as bouncer:
        settings = "select current_user, current_setting('statement_timeout')"
        with (
            psycopg.connect(bouncer.dsn, autocommit=True, prepare_threshold=None) as other,
            serving(web.asgi(bouncer.dsn, role_header="x-role")) as site,
            visitor(site) as client,
        ):
            before = other.execute(settings).fetchone()
            for role in ("page_operator", "page_reader", "page_operator"):
                page = client.get("/jobs", headers={"x-role": role})
                assert role in Marks(page.text).text
                assert other.execute(settings).fetchone() == before


@pytest.fixture
def odd_roles(conn: Connection) -> Iterator[list[str]]:
    """Roles outside ASCII; the last has as long a name as a role can have."""
    roles = ["jörg", "ж" * 31 + "x"]
    for role in roles:
        name = psycopg.sql.Identifier(role)
        conn.execute(psycopg.sql.SQL("create role {}").format(name))
        conn.execute("select queue.grant_access(%s, 'reader')", [role])
    yield roles
    for role in roles:
        name = psycopg.sql.Identifier(role)
        conn.execute(psycopg.sql.SQL("drop owned by {0}; drop role {0}").format(name))


@pytest.mark.usefixtures("page_server")
def test_a_proxy_names_a_role_in_utf8(dsn: str, odd_roles: list[str]) -> None:
    with serving(web.asgi(dsn, role_header="x-role")) as site:

        def ask(header: bytes) -> httpx.Response:
            with visitor(site) as client:
                return client.get("/jobs", headers={b"x-role": header})

        for role in odd_roles:
            answer = ask(role.encode())
            assert answer.status_code == 200
            assert role in answer.text
        for header in ("jörg".encode("latin-1"), f"{odd_roles[1]}y".encode(), b"x" * 64):
            answer = ask(header)
            assert answer.status_code == 403
            assert "The proxy has named no role" in answer.text


def test_a_lost_connection_is_made_again(login: Login, conn: Connection) -> None:
    client = login("page_reader")
    for _ in range(3):
        conn.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where application_name = 'pgdefer page' and datname = current_database()"
        )
        seen = [client.get("/jobs").status_code for _ in range(2)]
        assert seen in ([200, 200], [503, 200])


def test_the_server_goes_and_comes(dsn: str, granted: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    away = f"host=127.0.0.1 port={port} dbname=test user=x"
    with serving(web.asgi(away)) as site, visitor(site) as client:
        answer = log_in(client, "page_reader", "x")
        assert answer.status_code == 503
        assert str(port) not in answer.text
    with (
        serving(web.asgi(away, role_header="x-role")) as site,
        visitor(site, headers={"x-role": "page_reader"}) as client,
    ):
        answer = client.get("/jobs")
        assert answer.status_code == 503
        assert 'http-equiv="refresh"' in answer.text
        assert str(port) not in answer.text


def test_the_last_hours(login: Login, conn: Connection) -> None:
    ids = fill(conn)
    conn.execute("select queue.cancel(%s), queue.cancel(%s)", (ids["odd"], ids["ready"]))
    conn.execute("select queue.grant_access('page_shop', 'reader', '{shop*}')")
    with conn.transaction():
        conn.execute("select queue._lock_admission(true)")
        conn.execute("select queue._count_minutes('1 minute', '0')")
    client = login("page_reader")
    page = client.get("/")
    marks = Marks(page.text)
    assert [tag for tag, _ in marks.tags].count("svg") == 3
    assert {"rect", "polyline"} <= {tag for tag, _ in marks.tags}
    assert "Attempts that failed in 5 minutes" in marks.text
    assert len(page.content) < 150_000
    day = client.get("/tasks").text.partition("The last day")[2].partition("<footer>")[0]
    assert "100.0 %" in day
    assert "&lt;b&gt;" in day
    assert "<b>" not in day
    assert "mail" in Marks(day).text
    shop = login("page_shop")
    assert "shop" in Marks(client.get("/tasks").text).text
    for path in ("/", "/tasks"):
        main = Marks(shop.get(path).text.partition("<footer>")[0]).text
        assert "mail" not in main.split(), path
    conn.execute("select queue.revoke_access('page_shop')")
