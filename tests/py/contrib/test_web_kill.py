"""The page is killed in a call on all that match: each job is changed and told, or neither."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable
from typing import Any

import httpx
import psycopg
import pytest

from web_page import logged_in, plain_environment, served, token, visitor
from workers import wait_for

pytestmark = pytest.mark.client

Connection = psycopg.Connection[Any]
JOBS = 1_200
CALLS = {"set_priority": {"priority": "3"}, "hold": {}}
DONE = {"set_priority": "priority = 3", "hold": "state = 'held'"}
PAGES = "select count(*) from pg_stat_activity where application_name = 'pgdefer page'"


def ask(client: httpx.Client, call: str) -> dict[str, str]:
    """Ask for a call on all jobs; return the form that confirms it."""
    form = {"action": call, "scope": "all", "only_queue": "bulk", "only_task": "t"}
    answer = client.post("/jobs/act", data=form | {"token": token(client.get("/jobs"))})
    assert "1000 or more jobs" in answer.text
    return hidden(answer) | CALLS[call]


def hidden(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 200, answer.text
    return dict(re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', answer.text))


@pytest.mark.parametrize("call", ["hold", pytest.param("set_priority", marks=pytest.mark.long)])
def test_killed_in_the_middle(
    dsn: str, conn: Connection, connect: Callable[..., Connection], call: str
) -> None:
    conn.execute(
        'select queue.defer_many((select jsonb_agg(\'{"task": "t", "queue": "bulk"}\'::jsonb)'
        " from generate_series(1, %s))), queue.tick()",
        [JOBS],
    )

    def count(statement: str, *values: Any) -> int:
        ((found,),) = conn.execute(statement.encode(), values).fetchall()
        return int(found)

    def changed() -> int:
        return count(f"select count(*) from queue.jobs where {DONE[call]}")

    def told() -> int:
        return count(
            "select coalesce(sum(cardinality(ids)), 0) from queue.audit where call = %s", call
        )

    environment = plain_environment() | {"PGDEFER_DSN": dsn}
    with (
        served(environment) as (address, page),
        logged_in(address, "postgres") as client,
        connect(autocommit=False) as other,
    ):
        form = ask(client, call)
        form = hidden(client.post("/jobs/act", data=form))
        assert (changed(), told()) == (500, 500)
        # In the middle of the next 500 it waits for this job, until it is killed or gives up.
        other.execute("select from queue.active_job where id = 450 for update")

        def send() -> None:
            with contextlib.suppress(httpx.TransportError):
                client.post("/jobs/act", data=form)

        thread = threading.Thread(target=send)
        thread.start()
        waits = PAGES + " and wait_event_type = 'Lock'"
        wait_for(lambda: count(waits) or not thread.is_alive())
        page.kill()
        thread.join()
        other.rollback()
        wait_for(lambda: not count(PAGES))
    assert changed() == told(), "each job that was changed is in the audit"
    assert changed() == 500 if call == "set_priority" else 500 <= changed() < JOBS

    with served(environment) as (address, _):
        with visitor(address) as old:
            answer = old.post("/jobs/act", data=form)
            assert answer.headers["location"] == "/login", "its session ended with it"
        with logged_in(address, "postgres") as client:
            form = ask(client, call)
            while True:
                answer = client.post("/jobs/act", data=form)
                if "all done" in answer.text:
                    break
                form = hidden(answer)
    assert changed() == JOBS
    assert told() >= JOBS
