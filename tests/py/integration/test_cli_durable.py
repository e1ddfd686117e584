"""Durable jobs from the command line: steps, signals, events, streams, forks."""

from __future__ import annotations

import threading

import psycopg
import pytest

from pgdefer.cli import Exit

from .command_line import Claim, Run, claim, defer, run

__all__ = ["claim", "run"]

pytestmark = pytest.mark.client

Connection = psycopg.Connection


def finish_steps(conn: Connection, claim: Claim, id_: int, *names: str) -> int:
    """Claim the job, and finish steps of it; return the claim."""
    number = claim()[id_]
    for name in names:
        conn.execute("select queue.finish_step(%s, %s, %s, %s)", [id_, number, name, f'"{name}!"'])
    return number


def test_steps(run: Run, conn: Connection, claim: Claim) -> None:
    id_ = defer(run, "t")
    assert run("job", "steps", id_).out == "No step is finished.\n"
    finish_steps(conn, claim, id_, "charge", "pack", "charge#2")
    found = run("job", "steps", id_, "--json").json
    assert [(row["name"], row["value"]) for row in found] == [
        ("charge", "charge!"),
        ("pack", "pack!"),
        ("charge#2", "charge#2!"),
    ]
    shown = run("job", "steps", id_).out
    assert shown.index("charge") < shown.index("pack") < shown.index("charge#2")
    assert run("job", "steps", 999).code == Exit.NOT_FOUND
    assert run("job", "show", id_, "--json").json["steps"] == found
    assert "charge#2!" in run("job", "show", id_).out


def test_a_signal(run: Run, conn: Connection, claim: Claim) -> None:
    id_ = defer(run, "t")
    number = claim()[id_]
    conn.execute("select queue.wait(%s, %s, 'approval', signal => 'approved')", [id_, number])
    assert run("job", "signal", id_, "approved", '{"by": "ann"}', "--dry-run").code == 0
    assert claim() == {}
    assert run("job", "signal", id_, "approved", "-", input='{"by": "ann"}').code == 0
    assert claim().keys() == {id_}
    assert run("job", "steps", id_, "--json").json[0]["value"] == {"by": "ann"}
    assert run("job", "signal", id_, "approved", "{").code == Exit.USAGE
    refused = run("job", "signal", id_, "approved", "[NaN]")
    assert (refused.code, refused.err.strip()) == (
        Exit.USAGE,
        "pgdefer: payload: not JSON: it has no NaN",
    )
    assert run("job", "signal", id_, "more", "--json").json == {"id": id_, "name": "more"}


def test_an_event(run: Run, conn: Connection, claim: Claim) -> None:
    id_ = defer(run, "t")
    conn.execute("select queue.wait(%s, %s, 'w', event => 'paid')", [id_, claim()[id_]])
    assert run("publish", "paid", "[7]", "--retain", "1 hour").out == ""
    refused = run("publish", "other", "--retain", "long")
    assert "--retain: invalid input syntax for type interval" in refused.err
    assert refused.code == Exit.USAGE
    assert "published before" in run("publish", "paid", "[8]").out
    assert run("publish", "paid", "[8]", "--json").json == {"is_first": False}
    assert run("publish", "new", "--json").json == {"is_first": True}
    assert claim().keys() == {id_}
    assert run("job", "steps", id_, "--json").json[0]["value"] == [7]


def test_back_to_a_step(run: Run, conn: Connection, claim: Claim) -> None:
    id_ = defer(run, "t")
    number = finish_steps(conn, claim, id_, "one", "two", "three")
    conn.execute("select queue.succeed(%s, %s)", [id_, number])
    other = int(run("job", "fork", id_, "two").out)
    assert run("job", "fork", id_, "two", "--dry-run", "--json").json["id"] > other
    assert [row["name"] for row in run("job", "steps", other, "--json").json] == ["one"]
    for command in (["fork", id_, "four"], ["retry", id_, "--from-step", "four"]):
        refused = run("job", *command)
        assert "has finished no such step" in refused.err
        assert refused.code == Exit.NOT_FOUND
    assert run("job", "retry", id_, "--from-step", "three").code == 0
    assert [row["name"] for row in run("job", "steps", id_, "--json").json] == ["one", "two"]
    assert run("job", "retry", "--failed", "--from-step", "three").code == Exit.USAGE


def test_a_stream(run: Run, conn: Connection, claim: Claim) -> None:
    id_ = defer(run, "t")
    number = claim()[id_]

    def emit(value: str) -> None:
        conn.execute("select queue.emit(%s, %s, 'tokens', %s)", [id_, number, value])

    emit('"a"')
    emit("2")
    assert run("job", "stream", id_, "tokens", "--no-follow").out == '"a"\n2\n'
    assert run("job", "stream", id_, "tokens", "--after", 1, "--no-follow").out == "2\n"
    followed = []
    thread = threading.Thread(
        target=lambda: followed.append(run("job", "stream", id_, "tokens", "--interval", 0.05).out)
    )
    thread.start()
    emit("null")
    conn.execute("select queue.succeed(%s, %s)", [id_, number])
    thread.join(120)
    assert followed == ['"a"\n2\nnull\n']
    assert run("job", "stream", 999, "tokens").code == Exit.NOT_FOUND


def test_the_children_of_a_cancelled_job(run: Run, conn: Connection, claim: Claim) -> None:
    parent = defer(run, "t")
    number = claim()[parent]
    options = f'{{"parent": {parent}}}'
    query = "select queue.defer('child', options => %s)"
    ids = [conn.execute(query, [options]).fetchone()[0] for _ in range(2)]  # type: ignore[index]
    conn.execute("select queue.await_jobs(%s, %s, 'gather', %s)", [parent, number, ids])
    said = "".join(f"{id_}: cancelled\n" for id_ in (parent, *ids))
    done = run("job", "cancel", parent, "--children", "--dry-run", "--json")
    assert [(row["id"], row["outcome"]) for row in done.json] == [
        (id_, "cancelled") for id_ in (parent, *ids)
    ]
    assert run("job", "cancel", parent, "--children", "--yes").out == said
    assert run("job", "cancel", parent, "--children", "--yes").code != 0
    assert run("job", "show", ids[0], "--json").json["state"] == "cancelled"
