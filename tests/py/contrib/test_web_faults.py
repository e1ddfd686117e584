"""The page when a request, the server or the visitor's rights are not what it would like."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psycopg
import pytest

from pgdefer.contrib import web
from pgdefer.contrib.web import database, figures, pool
from pgdefer.contrib.web.sessions import REFUSED
from web_page import log_in, logged_in, send, serving, token, visitor
from workers import wait_for

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
Connect = Callable[..., Connection]


# Requests


def test_an_address_with_too_many_fields(client: httpx.Client) -> None:
    for fields, status in [(100, 200), (101, 400)]:
        assert client.get("/jobs?" + "&".join(["a=1"] * fields)).status_code == status


@pytest.mark.parametrize("path", ["/login", "/logout", "/jobs/act"])
def test_a_form_that_cannot_be_read(client: httpx.Client, path: str) -> None:
    for content, status in [(b"\xff", 400), (b"a=1&" * 2_001, 400), (b"x" * 4_000_001, 413)]:
        assert client.post(path, content=content).status_code == status
    assert client.get("/jobs").status_code == 200, "it does not end the session"


def test_an_origin_that_is_no_address(client: httpx.Client) -> None:
    answer = client.post("/jobs/act", headers={"origin": "http://["})
    assert answer.status_code == 403
    assert "from another site" in answer.text
    assert client.post("/login", headers={"origin": "http://["}).status_code == 403


def test_args_of_any_depth_and_length(client: httpx.Client, conn: Connection) -> None:
    conn.execute("select queue.defer('t')")
    for depth in (20_000, 100_000):
        nested = '{"a": ' + "[" * depth + "]" * depth + "}"
        for path, form in [("set_args", {"args": nested}), ("signal", {"payload": nested})]:
            answer = send(client, f"/jobs/1/{path}", name="s", **form)
            assert answer.status_code == 400
            assert "nested too deeply" in answer.text or "stack depth limit" in answer.text
    assert send(client, "/jobs/1/set_args", args=f'{{"n": {"1" * 5_000}}}').status_code == 303
    ((args,),) = conn.execute("select args ->> 'n' from queue.jobs").fetchall()
    assert args == "1" * 5_000


def test_enter_in_the_limit_of_a_queue_sets_it(client: httpx.Client, conn: Connection) -> None:
    conn.execute("select queue.defer('t', queue => 'q')")
    forms = re.findall("(?s)<form.*?</form>", client.get("/queues").text)
    (form,) = [form for form in forms if 'name="max_running"' in form]
    assert re.findall(r'name="queue" value="(\w+)"', form) == ["q"]
    buttons = re.findall(r'<button name="action" value="(\w+)"', form)
    assert buttons == ["configure_queue"], "Enter presses the first button of a form"


# Connections

PAGES = "select count(*) from pg_stat_activity where application_name = 'pgdefer page'"


def connections(conn: Connection) -> int:
    ((number,),) = conn.execute(PAGES + " and datname = current_database()").fetchall()
    return int(number)


def test_requests_without_a_cookie_share_a_connection(
    dsn: str, conn: Connection, granted: None
) -> None:
    with serving(web.asgi(dsn, role_header="x-role")) as site, visitor(site) as client:
        for role in ["page_reader", "page_operator"] * 3:
            assert client.get("/jobs", headers={"x-role": role}).status_code == 200
            client.cookies.clear()
        assert connections(conn) == 2


def test_the_next_login_of_a_visitor_ends_the_last(client: httpx.Client, conn: Connection) -> None:
    for _ in range(3):
        log_in(client, "page_operator")
    wait_for(lambda: connections(conn) == 1)


def test_idle_connections_are_closed_without_a_request(
    monkeypatch: pytest.MonkeyPatch, site: str, conn: Connection
) -> None:
    monkeypatch.setattr(pool, "IDLE", 0.1)
    with logged_in(site, "page_reader") as client:
        wait_for(lambda: connections(conn) == 0)
        assert client.get("/jobs").status_code == 200


def test_the_page_limits_its_connections(
    monkeypatch: pytest.MonkeyPatch, site: str, conn: Connection, connect: Connect
) -> None:
    monkeypatch.setattr(pool, "MOST", 2)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(logged_in(site, "page_operator")) for _ in range(3)]
        assert connections(conn) == 2, "an idle one makes room"
        other = connect(autocommit=False)
        other.execute("lock table queue.active_job")
        with ThreadPoolExecutor() as threads:
            answers = [threads.submit(client.get, "/jobs/1") for client in clients[:2]]
            waiting = PAGES + " and wait_event_type = 'Lock'"
            wait_for(lambda: conn.execute(waiting).fetchall() == [(2,)], 30)
            refused = [clients[2].get("/jobs"), log_in(clients[2], "page_reader")]
            other.rollback()
            assert [answer.result().status_code for answer in answers] == [404, 404]
        for answer in refused:
            assert answer.status_code == 503
            assert "All connections to the database are in use" in answer.text
        assert clients[2].get("/jobs").status_code == 200


@pytest.mark.parametrize("full", ["role page_operator", "database {}"])
def test_a_full_server_refuses_no_password(
    client: httpx.Client, conn: Connection, full: str
) -> None:
    full = full.format(conn.info.dbname)
    conn.execute(f"alter {full} connection limit 0".encode())
    try:
        conn.execute(
            "select pg_terminate_backend(pid, 10000) from pg_stat_activity"
            " where application_name = 'pgdefer page' and datname = current_database()"
        )
        client.get("/jobs")
        answers = [client.get("/jobs")]
        answers += [log_in(client, "page_operator") for _ in range(REFUSED + 1)]
    finally:
        conn.execute(f"alter {full} connection limit -1".encode())
    for answer in answers:
        assert answer.status_code == 503
        assert "All connections to the database are in use" in answer.text
    assert client.get("/jobs").status_code == 200, "the session goes on"


# What is shown


def test_the_end_of_a_long_timeline(client: httpx.Client, conn: Connection) -> None:
    conn.execute("select queue.register_worker('w')")
    conn.execute("select queue.defer('t')")
    ((claim,),) = conn.execute("select claim from queue.fetch(1)").fetchall()
    step = "select queue.finish_step(1, %s, 's' || n) from generate_series(1, 300) n"
    conn.execute(step, [claim])
    conn.execute("select queue.fail(1, %s, 'no')", [claim])
    text = client.get("/jobs/1").text.partition('id="timeline"')[2].partition("</section>")[0]
    assert "The last 300 of more" in text
    assert text.count("<li>") == 300
    assert "attempt 1: failed" in text


def test_cached_figures_end_with_the_rights_to_them(
    monkeypatch: pytest.MonkeyPatch, site: str, conn: Connection
) -> None:
    monkeypatch.setattr(figures, "SHORTEST", 3600)
    access = "select queue.grant_access('page_shop', 'reader', %s)"
    for queue in ("bank", "shop"):
        conn.execute("select queue.defer('t', queue => %s)", [queue])
    conn.execute("select queue.tick()")
    conn.execute(access, [["bank*", "shop"]])
    with logged_in(site, "page_shop") as client:

        def shown() -> list[str]:
            answer = client.get("/")
            assert answer.status_code == 200
            return re.findall(r'<th scope="row"><a href="/jobs\?queue=(\w+)', answer.text)

        assert shown() == ["bank", "shop"]
        conn.execute("select queue.defer('t', queue => 'bank2')")
        conn.execute("select queue.tick()")
        assert shown() == ["bank", "shop"], "they are cached"
        conn.execute(access, [["shop"]])
        assert shown() == ["shop"]
        conn.execute("select queue.revoke_access('page_shop')")
        assert client.get("/").status_code == 403


# Calls on many jobs


@pytest.fixture
def one_is_locked(conn: Connection, connect: Connect) -> Connection:
    """Defer jobs 1 to 3, and lock the second."""
    conn.execute("select queue.defer('t') from generate_series(1, 3)")
    conn.execute("select queue.tick()")
    other = connect(autocommit=False)
    other.execute("select from queue.active_job where id = 2 for update")
    return other


def go_on(client: httpx.Client, answer: httpx.Response) -> httpx.Response:
    """Send the form of a call that stopped."""
    assert answer.status_code == 200, answer.text
    assert "data-continue" not in answer.text, "only the visitor goes on"
    form: dict[str, list[str]] = {}
    text = answer.text.partition('action="/jobs/act"')[2]
    for name, value in re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', text):
        form.setdefault(name, []).append(value)
    return client.post("/jobs/act", data=form)


def held(conn: Connection) -> list[int]:
    return [id for (id,) in conn.execute("select id from queue.jobs where state = 'held'")]


def test_a_call_on_selected_jobs_that_stops(
    monkeypatch: pytest.MonkeyPatch, site: str, conn: Connection, one_is_locked: Connection
) -> None:
    monkeypatch.setitem(database.SETTINGS, "lock_timeout", "300")
    with logged_in(site, "page_operator") as client:
        ids = ["1", "2", "3"]
        answer = send(client, "/jobs/act", action="hold", ids=ids, confirmed="1")
        assert "Hold: 1 of 3 jobs" in answer.text
        assert "canceling statement due to lock timeout" in answer.text
        assert held(conn) == [1]
        one_is_locked.rollback()
        assert "Hold: 2 of 2 jobs" in go_on(client, answer).text
        assert len(held(conn)) == 3


@pytest.mark.long
@pytest.mark.parametrize("limit", ["statement_timeout", "transaction_timeout"])
@pytest.mark.usefixtures("one_is_locked")
def test_a_call_that_takes_too_long(
    monkeypatch: pytest.MonkeyPatch, site: str, conn: Connection, limit: str
) -> None:
    if limit == "transaction_timeout" and conn.info.server_version < 170_000:
        pytest.skip("PostgreSQL 17 has it")
    monkeypatch.setitem(database.SETTINGS, "lock_timeout", "0")
    monkeypatch.setitem(database.SETTINGS, limit, "5000")
    with logged_in(site, "page_operator") as client:
        answer = send(client, "/jobs/2/hold")
        assert answer.status_code == 504
        assert "call queue.tick() until it admits none" in answer.text
        assert client.get("/jobs/2").status_code == 200


def test_a_call_on_all_that_match_stops_at_a_lock(
    monkeypatch: pytest.MonkeyPatch, site: str, conn: Connection, one_is_locked: Connection
) -> None:
    monkeypatch.setitem(database.SETTINGS, "lock_timeout", "300")
    with logged_in(site, "page_operator") as client:
        form = {"action": "hold", "scope": "all", "confirmed": "1"}
        answer = send(client, "/jobs/act", **form)
        assert "1 done, 0 refused" in answer.text
        assert "canceling statement due to lock timeout" in answer.text
        assert "all done" not in answer.text
        assert held(conn) == [3]
        form |= {"action": "set_priority", "priority": "1", "done": "500", "refused": "0"}
        again = send(client, "/jobs/act", **form)
        assert "500 done, 0 refused" in again.text, "the slices before"
        assert go_on(client, again).status_code == 200
        one_is_locked.rollback()
        assert "3 done, 0 refused" in go_on(client, answer).text
        assert "503 done, 0 refused" in go_on(client, again).text


def test_a_call_on_all_that_match_loses_its_connection(
    site: str, conn: Connection, one_is_locked: Connection
) -> None:
    with logged_in(site, "page_operator") as client:
        with ThreadPoolExecutor() as threads:
            form = {"action": "hold", "scope": "all", "confirmed": "1"}
            sent = threads.submit(send, client, "/jobs/act", **form)
            waiting = (
                "from pg_stat_activity where usename = 'page_operator' and wait_event_type = 'Lock'"
            )
            wait_for(lambda: conn.execute(f"select {waiting}".encode()).fetchall() or sent.done())
            conn.execute(f"select pg_terminate_backend(pid, 10000) {waiting}".encode())
            answer = sent.result()
        assert "1 done, 0 refused" in answer.text
        assert "the connection was lost" in answer.text
        one_is_locked.rollback()
        assert "3 done, 0 refused" in go_on(client, answer).text


def test_the_server_ends_a_transaction_that_idles(
    monkeypatch: pytest.MonkeyPatch, dsn: str, conn: Connection
) -> None:
    monkeypatch.setitem(database.SETTINGS, "idle_in_transaction_session_timeout", "10")
    page = database.Database(dsn, pool.Pool())
    with pytest.raises(database.Unreachable), page.visit() as visit:
        wait_for(lambda: connections(conn) == 0)
        visit.rows("select 1")


# What a refusal says


def test_a_server_that_is_read_only_by_default(site: str, conn: Connection) -> None:
    conn.execute("select queue.defer('t')")
    conn.execute("select queue.tick()")
    where = psycopg.sql.Identifier(conn.info.dbname)
    setting = "alter role page_operator in database {} set default_transaction_read_only = on"
    conn.execute(psycopg.sql.SQL(setting).format(where))
    with logged_in(site, "page_operator") as client:
        answer = send(client, "/jobs/1/hold")
    assert answer.status_code == 400
    assert "read-only transaction" in answer.text


def test_the_login_says_that_the_session_has_ended(client: httpx.Client) -> None:
    ended = "Your session has ended"
    assert ended not in client.get("/login").text
    form = {"token": token(client.get("/jobs"))}
    client.cookies.clear()
    client.cookies.set("pgdefer_session", "over")
    for answer in (client.post("/jobs/1/hold", data=form), client.get("/jobs")):
        assert answer.status_code == 303
        assert ended in client.get(answer.headers["location"]).text
