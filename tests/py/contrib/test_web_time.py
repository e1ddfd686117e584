"""Jobs of a time, streams and waits on the page; and that no page grows with what it shows."""

from __future__ import annotations

import re
from typing import Any

import httpx
import psycopg
import pytest

from web_page import logged_in, send
from workers import wait_for

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
WORKER = "select queue.register_worker('w', null, '{\"dead_after\": \"1 day\"}')"


def defer_each_minute(conn: Connection, jobs: int) -> None:
    """Defer jobs, the first at 00:01 UTC on the day on which Berlin changes its clock."""
    conn.execute(
        "select queue.defer_many((select jsonb_agg(jsonb_build_object('task', 't',"
        " 'queue', 'q' || n %% 2)) from generate_series(1, %s) n)), queue.tick()",
        [jobs],
    )
    conn.execute(
        "update queue.log set created_at = timestamptz '2025-03-30Z' + id * interval '1 min'"
    )


def ids_of(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return [int(id) for id in re.findall(r'name="ids" value="(\d+)"', answer.text)]


def every(client: httpx.Client, **asked: str) -> list[int]:
    """Return all that a filter finds, from page to page."""
    answer = client.get("/jobs", params=asked)
    found = ids_of(answer)
    while more := re.search(r'href="\?([^"]+)">Go on with older', answer.text):
        answer = client.get(f"/jobs?{more[1].replace('&amp;', '&')}")
        found += ids_of(answer)
    return found


# Times


def test_jobs_that_were_deferred_in_a_time(client: httpx.Client, conn: Connection) -> None:
    defer_each_minute(conn, 1500)
    berlin = {"zone": "Europe/Berlin", "from": "2025-03-30T03:00", "to": "2025-03-30T04:30:00"}
    assert every(client, **berlin) == list(range(149, 59, -1)), "03:00 is 01:00 UTC"
    text = client.get("/jobs", params=berlin).text
    assert "Deferred (Europe/Berlin)" in text
    assert "<time>2025-03-30 04:29:00</time>" in text
    assert every(client, **berlin, queue="q1") == list(range(149, 59, -2))
    assert every(client, to="2025-03-30T00:03") == [2, 1], "in UTC, if no zone is given"
    late = {"from": "2025-03-30T20:00"}
    assert every(client, **late) == list(range(1500, 1199, -1))
    answer = client.get("/jobs", params=late | {"queue": "q3"})
    assert "No jobs here" in answer.text
    assert "Go on" not in answer.text, "all older ones were deferred before"


def test_newer_jobs_are_not_read(client: httpx.Client, conn: Connection) -> None:
    defer_each_minute(conn, 3000)
    text = client.get("/jobs", params={"from": "2025-03-30T01:00", "to": "2025-03-30T02:00"}).text
    before, *_ = re.findall(r"&#39;before&#39;: (\d+)", text)
    assert 180 < int(before) < 240, "an hour for a transaction that was open, and 50 jobs"


def test_the_other_times(client: httpx.Client, conn: Connection) -> None:
    defer_each_minute(conn, 600)
    conn.execute("select queue.cancel(5), queue.cancel(6), queue.reschedule(7, '2999-01-01')")
    conn.execute(
        "update queue.finished set finished_at = timestamptz '2025-03-28Z' + id * interval '1 day'"
    )
    conn.execute(WORKER)
    ((started,),) = conn.execute("select id from queue.fetch(1)").fetchall()
    day = {"from": "2025-04-02T00:00", "to": "2025-04-03T00:00"}
    assert every(client, at="finished", **day) == [5]
    assert every(client, at="finished", **{"from": "2025-04-03T00:00"}) == [6]
    assert every(client, at="finished", state="failed", **day) == []
    assert every(client, at="scheduled", **{"from": "2900-01-01T00:00"}) == [7]
    assert every(client, at="scheduled", to="2900-01-01T00:00") == []
    assert every(client, at="started", **{"from": "2025-06-01T00:00"}) == [started]
    answer = client.get("/jobs", params={"at": "finished", **day})
    assert "stopped after a look at the times of 200 jobs" in answer.text
    assert "look further at once" in answer.text


def test_what_is_no_time(client: httpx.Client) -> None:
    good = {"from": "2025-01-01T00:00"}
    for asked in [
        {"from": "soon"},
        {"to": "2025-01-01"},
        {"from": "2025-02-31T00:00"},
        {"from": "2025-01-01T25:00"},
        good | {"at": "xid"},
        good | {"zone": "Nowhere/Else"},
        good | {"zone": "x\0"},
    ]:
        assert client.get("/jobs", params=asked).status_code == 400, asked
    assert client.get("/jobs", params={"zone": "Europe/Berlin", "at": "started"}).status_code == 200


# Calls on all that match


def confirm(client: httpx.Client, answer: httpx.Response, **fields: str) -> str:
    """Send the forms of a call on all that match, one after the other; return the last answer."""
    while 'action="/jobs/act"' in answer.text:
        hidden = re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', answer.text)
        answer = client.post("/jobs/act", data=fields | dict(hidden))
        assert answer.status_code == 200, answer.text
    return answer.text


def test_filters_are_not_fields_of_the_call(client: httpx.Client, conn: Connection) -> None:
    defer_each_minute(conn, 1200)
    asked = {"action": "move", "scope": "all", "only_queue": "q1"}
    time = {"only_at": "created", "only_from": "2025-03-30T10:00", "only_zone": "UTC"}
    answer = send(client, "/jobs/act", **asked, **time)
    assert "Move: 300 jobs" in answer.text
    assert "300 done, 0 refused" in confirm(client, answer, queue="elsewhere")
    rows = conn.execute("select queue, count(*), min(id) from queue.jobs group by 1 order by 1")
    assert rows.fetchall() == [("elsewhere", 300, 601), ("q0", 600, 2), ("q1", 300, 1)]
    answer = send(client, "/jobs/act", action="reschedule", scope="all", only_queue="q1")
    assert "300 done, 0 refused" in confirm(client, answer, at="2999-01-01")
    rows = conn.execute("select count(*) from queue.jobs where scheduled_at > '2900-01-01'")
    assert rows.fetchall() == [(300,)]


def test_a_call_when_the_first_search_finds_none(client: httpx.Client, conn: Connection) -> None:
    defer_each_minute(conn, 10_100)
    conn.execute("select queue.cancel(7)")
    time = {"only_at": "finished", "only_from": "2025-01-01T00:00"}
    answer = send(client, "/jobs/act", action="retry", scope="all", **time)
    assert "None is among the jobs that were searched so far" in answer.text
    assert "1 done, 0 refused" in confirm(client, answer, from_step="")
    assert conn.execute("select state from queue.jobs where id = 7").fetchall() != [("cancelled",)]


# Durable jobs


def test_streams(client: httpx.Client, site: str, conn: Connection) -> None:
    odd = "<b>'\"&é %s"
    conn.execute(WORKER)
    conn.execute("select queue.defer('t')")
    ((claim,),) = conn.execute("select claim from queue.fetch(1)").fetchall()
    emit = "select count(queue.emit(1, %s, %s, to_jsonb('<i>' || n))) from generate_series(1, %s) n"
    conn.execute(emit.encode(), [claim, odd, 120])
    conn.execute(emit.encode(), [claim, "log", 1])
    text = client.get("/jobs/1").text
    assert 'data-refresh="5"' in text
    assert "<b>'" not in text
    with logged_in(site, "page_reader") as reader:
        (path,) = re.findall(r'href="(/jobs/1/stream\?name=%3Cb[^"]+)"', reader.get("/jobs/1").text)
        answer = reader.get(path)
        assert 'data-refresh="5"' in answer.text
        assert "</a> has emitted 120 values" in answer.text
        seen: list[int] = []
        for label in ("older", "older", "newer", "newer", ""):
            assert "<i>" not in answer.text
            numbers = [int(no) for no in re.findall(r'class="n">(\d+)</th>', answer.text)]
            seen.append(numbers[0])
            assert numbers == list(range(numbers[0], numbers[-1] - 1, -1))
            if label:
                link = re.search(rf'href="\?([^"]+)">Go on with {label}', answer.text)
                assert link is not None, answer.text
                answer = reader.get("/jobs/1/stream?" + link[1].replace("&amp;", "&"))
                assert "data-refresh" not in answer.text
        assert seen == [120, 70, 50, 100, 120]
        for query in ("name=none", "", "name=log&after=-1", "name=%00"):
            assert reader.get(f"/jobs/1/stream?{query}").status_code in (400, 404), query
        assert reader.get("/jobs/2/stream?name=log").status_code == 404


def test_a_signal_is_sent_where_it_is_waited_for(
    client: httpx.Client, site: str, conn: Connection
) -> None:
    conn.execute(WORKER)
    conn.execute("select queue.defer('order', '{\"id\": 7}')")
    ((claim,),) = conn.execute("select claim from queue.fetch(1)").fetchall()
    assert "What it waits for" not in client.get("/jobs/1").text
    wait = "select queue.wait(1, %s, 'boss <b>', 'approval <i>', timeout => '1 day')"
    conn.execute(wait, [claim])
    conn.execute("select queue.tick()")
    text = client.get("/jobs/1").text
    assert (
        "Its step boss &lt;b&gt; waits for signal <strong>approval &lt;i&gt;</strong> until" in text
    )
    assert '<textarea name="payload" rows="3">{}</textarea>' in text, "not the job's args"
    with logged_in(site, "page_reader") as reader:
        text = reader.get("/jobs/1").text
        assert "What it waits for" in text
        assert "/jobs/1/signal" not in text
    assert send(client, "/jobs/1/signal", name="approval <i>", payload="{").status_code == 400
    answer = send(client, "/jobs/1/signal", name="approval <i>", payload='{"by": "ann"}')
    assert "the signal was sent" in client.get(answer.headers["location"]).text
    ((steps,),) = conn.execute("select steps from queue.fetch(1)").fetchall()
    assert steps == {"boss <b>": {"by": "ann"}}
    assert "What it waits for" not in client.get("/jobs/1").text
    calls = conn.execute("select role, ids, args ->> 'name' from queue.audit where call = 'signal'")
    assert calls.fetchall() == [("page_operator", [1], "approval <i>")]


# What a job's page holds


def test_the_reason_leads_to_the_holder(client: httpx.Client, conn: Connection) -> None:
    conn.execute("select queue.defer('t', lock => 'job 9') from generate_series(1, 2)")
    conn.execute("select queue.defer('t', needs => array[2])")
    conn.execute("select queue.tick()")
    why = re.findall('<p class="why">(.*?)</p>', client.get("/jobs/2").text)
    assert 'held by job <a href="/jobs/1">1</a>' in why[0]
    why = re.findall('<p class="why">(.*?)</p>', client.get("/jobs/3").text)
    assert 'it needs job <a href="/jobs/2">2</a> (blocked)' in why[0]
    conn.execute("select queue.cancel(1)")
    assert "data-refresh" in client.get("/jobs/3").text
    assert "data-refresh" not in client.get("/jobs/1").text, "it has ended"


def test_a_large_job_has_a_small_page(client: httpx.Client, conn: Connection) -> None:
    args = psycopg.types.json.Jsonb({"a": [str(n) for n in range(9999)]})
    retry = psycopg.types.json.Jsonb({"retry": {"max_attempts": None, "base": "0"}})
    step = (
        "select queue.finish_step(1, %s, 's' || n, to_jsonb(repeat('x', 9999)))"
        " from generate_series(1, 9) n"
    )
    text = "repeat('File', 2222)"
    fail = f"select queue.fail(1, %s, {text}, jsonb_build_object('traceback', {text}))"

    def fetched() -> list[Any]:
        return conn.execute("select claim from queue.fetch(1)").fetchall()

    conn.execute(WORKER)
    conn.execute("select queue.defer('t', %s, options => %s)", [args, retry])
    for n in range(30):
        ((claim,),) = wait_for(fetched)
        if n == 0:
            conn.execute(step, [claim])
        conn.execute(fail.encode(), [claim])
    answer = client.get("/jobs/1")
    assert answer.status_code == 200
    assert "The last 20 of more" in answer.text
    assert len(answer.content) < 150_000
