"""What works on a standby: what only reads. The rest is refused there, until it is promoted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from failover import Connection, Pair, folder_of_servers, refused
from pgdefer.cli import Exit
from pgdefer.contrib import web
from pgdefer.database.embedded import EmbeddedServer
from web_page import fill, lift_time_limits, log_in, server_of_pages, serving, token, visitor
from workers import wait_for

pytestmark = pytest.mark.client

# Calls of each function that a reader may call.
READS = {
    "autoscale_hint": "()",
    "backoff": "('{{}}', 1)",
    "check": "()",
    "get": "({ready}, 'n')",
    "graph": "({waits})",
    "health": "()",
    "list_jobs": "()",
    "needs": "({waits})",
    "next_runs": "('@daily')",
    "peek": "()",
    "read_stream": "({running}, 'letters')",
    "result": "({failed})",
    "search": "('ann')",
    "series": "()",
    "stats": "()",
    "streams": "({running})",
    "task_stats": "()",
    "version": "()",
    "waits_for": "({running})",
    "why": "({blocked})",
}
# Their answers depend on the time, or on the server.
CHANGING = {"health", "next_runs", "series", "autoscale_hint", "stats"}
WRITES = (
    "defer('t')",
    "register_worker('w')",
    "fetch(1)",
    "heartbeat(1)",
    "succeed(1, 1)",
    "pause()",
    "hold({ready})",
    "cancel({ready})",
    "retry(array[{failed}::bigint])",
    "move(array[{ready}::bigint], 'other')",
    "tick()",
    "reap()",
    "publish('e')",
    "schedule('nightly', '@daily', 't')",
    "prune()",
)
COMMANDS = """
version; job ls; job show {blocked}; job why {blocked}; job search ann; job get n {ready};
job steps {running}; graph {waits}; queue ls; task ls; worker ls; lock ls;
limit ls; share ls; group ls; schedule ls; schedule next @daily; db stats; db check
"""


@pytest.fixture(scope="module")
def pair(server: EmbeddedServer) -> Iterator[Pair]:
    with folder_of_servers(server) as folder:
        made = Pair(folder, server, "")
        yield made
        made.stop()


@pytest.fixture(scope="module")
def ids(pair: Pair) -> dict[str, int]:
    """Jobs of every kind, which the standby has received, and roles that see or change them."""
    with pair.primary.connect() as connection:
        for kind in ("reader", "operator"):
            connection.execute(f"create role shop_{kind} login".encode())
            connection.execute("select queue.grant_access(%s, %s)", [f"shop_{kind}", kind])
        made = fill(connection)
        call = "select queue.emit(id, claim, 'letters', '\"a\"') from queue.jobs where id = %s"
        connection.execute(call, [made["running"]])
        ((at,),) = connection.execute("select pg_current_wal_lsn()::text").fetchall()
    with pair.standby.connect() as reader:
        received = f"select pg_last_wal_replay_lsn() >= '{at}'".encode()
        wait_for(lambda: reader.execute(received).fetchall() == [(True,)])
    return made


@pytest.fixture
def both(pair: Pair, ids: dict[str, int]) -> Iterator[tuple[Connection, Connection]]:
    """The primary and the standby, as a reader sees them."""
    with pair.primary.connect() as primary, pair.standby.connect() as standby:
        for connection in (primary, standby):
            connection.execute("set role shop_reader")
        yield primary, standby


def granted(connection: Connection, kind: str) -> set[str]:
    """Return what readers may call, or see; functions of shards are not there."""
    connection.execute("reset role")
    rows = connection.execute(
        f"select name from queue._{kind}_grants() where 'reader' = any (kinds)".encode()
    ).fetchall()
    connection.execute("set role shop_reader")
    return {name for (name,) in rows if not name.startswith("shard_")}


def test_views_show_what_the_primary_shows(both: tuple[Connection, Connection]) -> None:
    primary, standby = both
    views = granted(primary, "view")
    assert len(views) > 10
    for view in views:
        text = f"select * from queue.{view}".encode()
        here, there = (connection.execute(text).fetchall() for connection in (primary, standby))
        assert len(here) == len(there), view
        assert {row[0] for row in here} == {row[0] for row in there}, view
    jobs = "select * from queue.jobs order by id"
    assert standby.execute(jobs).fetchall() == primary.execute(jobs).fetchall() != []


def test_functions_that_read_return_what_the_primary_returns(
    both: tuple[Connection, Connection], ids: dict[str, int]
) -> None:
    primary, standby = both
    assert granted(primary, "function") == set(READS)
    for name, call in READS.items():
        text = f"select * from queue.{name}{call.format(**ids)}"
        here, there = (
            connection.execute(text.encode()).fetchall() for connection in (primary, standby)
        )
        if name in CHANGING:
            assert len(here) == len(there), name
        else:
            assert here == there, name
    for id_ in ids.values():
        text = f"select queue.why({id_})"
        here, there = (
            connection.execute(text.encode()).fetchall() for connection in (primary, standby)
        )
        assert here == there


def test_changes_are_refused(both: tuple[Connection, Connection], ids: dict[str, int]) -> None:
    _, standby = both
    standby.execute("reset role")
    for call in WRITES:
        assert refused(standby, f"select queue.{call.format(**ids)}") == "25006", call


@pytest.mark.long
def test_commands_that_read_work_and_others_are_refused(
    pair: Pair, ids: dict[str, int], tmp_path: Path
) -> None:
    def run(dsn: str, *arguments: str) -> tuple[int, str]:
        command = [sys.executable, "-m", "pgdefer", *arguments, "--dsn", dsn]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300,
            env=os.environ | {"COLUMNS": "200"},
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    both = f"{pair.folder},{pair.folder} port=5432,5433 user=postgres dbname=postgres"
    standby = f"host={both} target_session_attrs=prefer-standby"
    for line in COMMANDS.replace("\n", " ").split(";"):
        arguments = line.format(**ids).split()
        there = run(standby, *arguments)
        assert there[0] == 0, (line, there)
        if arguments[-1].isdigit():
            assert there == run(pair.primary.dsn(), *arguments)
    code, said = run(standby, "db", "health")
    assert code in (0, 15), said
    code, said = run(standby, "job", "hold", str(ids["ready"]))
    assert code == Exit.ERROR
    assert "recovery" in said or "read-only" in said, said


def test_the_page(pair: Pair, ids: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it only reads, and goes on in full when the standby is promoted."""
    lift_time_limits(monkeypatch)
    places = ["/", "/jobs", f"/jobs/{ids['ready']}", "/queues", "/locks", "/groups", "/workers"]
    places += ["/schedules", "/tasks", "/audit"]
    dsn = f"host={pair.folder} port={pair.standby.port} dbname=postgres"
    hold = f"/jobs/{ids['ready']}/hold"
    with (
        server_of_pages(),
        serving(web.asgi(dsn, needs_password=False)) as address,
        visitor(address) as client,
    ):
        assert log_in(client, "shop_operator").status_code == 303
        for place in places:
            answer = client.get(place)
            assert answer.status_code == 200, place
            assert "standby, read-only" in answer.text, place
            assert not re.search(r'action="/jobs/\d|name="action" value=', answer.text), place
        sent: dict[str, Any] = {"token": token(answer)}
        answer = client.post(hold, data=sent)
        assert 400 <= answer.status_code < 500
        assert "recovery" in answer.text or "read-only" in answer.text
        pair.primary.stop("immediate")
        pair.promote()
        answer = client.get(f"/jobs/{ids['ready']}")
        assert "standby, read-only" not in answer.text
        assert f'action="{hold}"' in answer.text
        assert client.post(hold, data=sent).status_code == 303
        with pair.primary.connect() as connection:
            state = "select state from queue.jobs where id = %s"
            assert connection.execute(state, [ids["ready"]]).fetchall() == [("held",)]
