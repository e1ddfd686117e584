"""Deferring jobs, and queues, from the command line."""

from __future__ import annotations

import pytest
from psycopg.conninfo import make_conninfo

from pgdefer.cli import Exit
from pgdefer.database.source import PsycopgConnection

from .command_line import Claim, Run, claim, defer, run
from .conftest import Jobs

__all__ = ["claim", "run"]

pytestmark = pytest.mark.client

NAMES = [
    '"quoted"',
    "it's",
    "Ünïcode 日本",
    "--leading",
    "x" * 999 + "y",
    "a b",
    "%s{}$1",
    "new\nline",
]


# Deferring


def test_defer(run: Run, jobs: Jobs) -> None:
    id = defer(run, "t", '{"a": 1}', "-q", "q", "-p", 3, "--lock", "l", "--at", "2999-01-01 00:00Z")
    second = defer(run, "t", "--needs", id, "--options", '{"description": "d"}')
    (one, two) = jobs()
    assert (one["task"], one["args"], one["queue"], one["priority"]) == ("t", {"a": 1}, "q", 3)
    assert (one["lock"], one["state"]) == ("l", "scheduled")
    assert (two["id"], two["needs"], two["description"]) == (second, [id], "d")
    assert defer(run, "--queueing-lock=k", "t") == second + 1
    assert run("defer", "t", "--queueing-lock", "k").code == Exit.ALREADY_QUEUED
    done = run("defer", "t", "-", input='{"from": "stdin"}')
    assert jobs()[-1]["args"] == {"from": "stdin"}
    assert run("defer", "t", "--json").json == {"id": int(done.out) + 1}
    count = len(jobs())
    done = run("defer", "t", "--dry-run")
    assert (done.code, done.err) == (0, "Dry run, nothing is changed:\n")
    assert len(jobs()) == count
    for wrong in (["{"], ["[]"], ["{}", "--options", "x"], ["{}", "--options", '{"no": 1}']):
        assert run("defer", "t", *wrong).code == Exit.USAGE
    assert len(jobs()) == count


# Queues


def test_queues(run: Run, jobs: Jobs, claim: Claim) -> None:
    assert run("queue", "ls").err == "There are no queues.\n"
    assert run("queue", "create", "q").out == "q: made\n"
    assert run("queue", "create", "q").out == "q: exists already\n"
    unpaused = "q: exists already, so --paused has no effect: use pgdefer queue pause\n"
    assert run("queue", "create", "q", "--paused").out == unpaused
    assert run("queue", "create", "q", "--json").json == [{"is_new": False}]
    assert run("queue", "create", "p", "--paused").code == 0
    first = defer(run, "t", "-q", "p")
    defer(run, "t", "-q", "p")
    assert claim() == {}
    assert run("queue", "resume", "p").out == "p: resumed, 2 jobs affected\n"
    assert len(claim()) == 2
    assert run("queue", "pause", "p").out == "p: paused, 0 jobs affected\n"
    assert jobs.states()[first] == "running", "pausing lets it run"
    assert run("queue", "pause", "p", "--json").json == [{"jobs": 0}]
    assert run("queue", "pause", "--all", "--until", "2999-01-01").code == 0
    assert [row["paused_until"][:4] for row in run("queue", "ls", "--json").json] == ["2999"] * 2
    assert "2999-01-01" in run("queue", "ls").out
    assert run("queue", "pause", "p").code == 0
    assert "resumed" in run("queue", "ls").out, "there is no end"
    assert {row["paused_until"][:8] for row in run("queue", "ls", "--json").json} == {
        "2999-01-",
        "infinity",
    }
    assert run("queue", "resume", "*").code == 0
    assert run("queue", "pause", "--task", "t").code == 0
    for wrong in (["pause"], ["resume"], ["pause", "q", "--all"], ["create", "q*"], ["create", ""]):
        assert run("queue", *wrong).code == Exit.USAGE


def test_configure_a_queue(run: Run) -> None:
    done = run("queue", "configure", "q", "--max-running", 3, "--rate", "10/1 min", "--json")
    assert done.code == 0, done.err
    (row,) = done.json
    assert (row["max_running"], row["rate"]) == (3, "10 per 00:01:00")
    (row,) = run("queue", "configure", "q", "--rate", "none", "--retain", "1 day", "--json").json
    assert (row["max_running"], row["rate"], row["retain"]) == (3, None, "1 day")
    assert "max running" in run("queue", "configure", "q", "--max-running", 4, "--dry-run").out
    assert run("queue", "ls", "--json").json[0]["max_running"] == 3
    for wrong in (
        [],
        ["--max-running", "x"],
        ["--rate", "10"],
        ["--rate", "x/1s"],
        ["--retain", "-"],
    ):
        assert run("queue", "configure", "q", *wrong).code == Exit.USAGE
    assert "--rate is N/INTERVAL" in run("queue", "configure", "q", "--rate", "10").err


@pytest.mark.parametrize(
    ("words", "said", "near"),
    [
        ("queue pause mial", "the queue mial is new or misspelt", "mail"),
        ("queue pause mial*", "the queue mial* is new or misspelt", "mail"),
        ("queue pause --task snd", "the task snd is new or misspelt", "send"),
        ("queue resume xyz", "the queue xyz is new or misspelt", None),
        ("queue configure mial --max-running 3", "the queue mial is new or misspelt", "mail"),
        ("defer snd -q mail", "the task snd is new or misspelt", "send"),
        ("schedule add daily @daily snd", "the task snd is new or misspelt", "send"),
    ],
)
def test_a_new_name_may_be_misspelt(
    run: Run, conn: PsycopgConnection, words: str, said: str, near: str | None
) -> None:
    conn.execute("select queue.register_task('send', '{\"queue\": \"mail\"}')")
    defer(run, "send", "--in", "1 hour")
    run("job", "cancel", defer(run, "send"), "--yes")
    done = run(*words.split())
    said += ": no recent job, worker or schedule names it"
    said += f"; did you mean {near}?" if near else ""
    assert (done.code, done.err) == (0, f"pgdefer: {said}\n")
    assert done.out, "it did what it was told"


def test_a_name_is_new_once(run: Run) -> None:
    run("queue", "create", "mail")
    refused = run("queue", "configure", "q", "--max-running", 0)
    assert "misspelt" not in refused.err, "it names only what is wrong"
    for words in (["queue", "pause", "q"], ["queue", "configure", "mall", "--max-running", "3"]):
        assert "is new or misspelt" in run(*words).err
        assert run(*words).err == ""


@pytest.mark.parametrize(
    "words",
    [
        *[
            f"queue pause {name}"
            for name in ("mail", "m*", "*", "default", "slow", "late", "served")
        ],
        *[f"queue pause --task {name}" for name in ("send", "report", "old")],
        "queue pause --all",
        "queue resume slow",
        "queue configure idle --max-running 3",
        "defer send",
        "defer report -q served",
        "defer old -q late",
        "defer other -q unlike",
    ],
)
def test_a_name_that_is_not_misspelt(run: Run, conn: PsycopgConnection, words: str) -> None:
    conn.execute("select queue.register_task('send', '{\"queue\": \"mail\"}')")
    conn.execute(
        "select queue.schedule('s', '@daily', 'report', options => '{\"queue\": \"slow\"}')"
    )
    conn.execute("select queue.register_worker('w', '{served,x*}')")
    run("queue", "create", "idle")
    old = defer(run, "old", "-q", "late", "--at", "2999-01-01")
    run("db", "tick")
    run("job", "cancel", old, "--yes")
    assert run(*words.split()).err == ""


def test_an_empty_database_has_no_names_to_compare(run: Run) -> None:
    assert run("defer", "t", "-q", "q").err == ""


def test_a_producer_gets_no_warning_of_names(run: Run, conn: PsycopgConnection, dsn: str) -> None:
    conn.execute("select queue.register_task('send', '{\"queue\": \"mail\"}')")
    conn.execute("create role only_producer login")
    try:
        conn.execute("select queue.grant_access('only_producer', 'producer')")
        done = run("defer", "snd", "--dry-run", "--dsn", make_conninfo(dsn, user="only_producer"))
    finally:
        conn.execute("select queue.revoke_access('only_producer')")
        conn.execute("drop role only_producer")
    assert (done.code, done.err) == (0, "Dry run, nothing is changed:\n")


def test_delete_a_queue(run: Run, jobs: Jobs, claim: Claim) -> None:
    ids = [defer(run, "t", "-q", "q") for _ in range(3)]
    claims = claim()
    assert set(claims) == set(ids)
    done = run("queue", "delete", "q", "--yes")
    assert done.code == Exit.NOT_EMPTY
    assert "unfinished jobs: 3, of these running: 3" in done.err
    assert run("queue", "delete", "q", "--force").code == Exit.USAGE, "nobody to ask"
    assert run("queue", "delete", "q", "--force", "--dry-run").out == "3 jobs removed\n"
    assert len(jobs()) == 3
    assert run("queue", "delete", "q", "--force", "--yes", "--json").json == [{"jobs": 3}]
    assert jobs() == []
    assert run("queue", "delete", "q", "--yes").code == Exit.NOT_FOUND


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_odd_names(run: Run, jobs: Jobs, name: str) -> None:
    assert run("queue", "create", "--", name).code == 0
    id = int(run("defer", f"--queue={name}", "--", name).out)
    assert [row["name"] for row in run("queue", "ls", "--json").json] == [name]
    assert [row["id"] for row in run("job", "ls", f"--queue={name}", "--json").json] == [id]
    assert run("job", "show", id).code == 0
    assert run("job", "move", id, f"--to={name[::-1]}").code == 0
    assert jobs()[0]["queue"] == name[::-1]
    assert run("queue", "pause", "--", name).code == 0
    assert run("queue", "delete", "--force", "--yes", "--", name[::-1]).out == "1 job removed\n"
    assert run("queue", "delete", "--yes", "--", name).code == 0
