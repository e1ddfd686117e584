"""Operating from the command line: jobs, queues, the database."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from typer.testing import CliRunner

from pgdefer import App
from pgdefer.cli import Exit, _job, _job_changes
from pgdefer.cli._base import cli
from pgdefer.database import sql
from pgdefer.database.embedded import EmbeddedServer
from pgdefer.database.source import PsycopgConnection
from support import server_program

from .conftest import Jobs

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


@dataclasses.dataclass
class Done:
    """The exit code and the output of a command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Done]


@pytest.fixture
def run(dsn: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command in this process; an exception other than a clean exit fails the test."""
    monkeypatch.setenv("PGDEFER_DSN", dsn)
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("HOME", str(tmp_path))
    runner = CliRunner()

    def run(*arguments: object, input: str | bytes | None = None) -> Done:  # noqa: A002
        result = runner.invoke(cli, [str(word) for word in arguments], input=input)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Done(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def claim(conn: PsycopgConnection) -> Callable[[], dict[int, int]]:
    """Claim all ready jobs: id -> claim."""
    row = conn.execute("select queue.register_worker('test')").fetchone()
    assert row

    def claim() -> dict[int, int]:
        for _ in range(3):  # on a busy machine a long fetch may end without a claim
            cursor = conn.execute("select id, claim from queue.fetch(%s, null, 100)", row)
            if found := dict(cursor.fetchall()):
                return found
        return {}

    return claim


Claim = Callable[[], dict[int, int]]


def defer(run: Run, *arguments: object) -> int:
    done = run("defer", *arguments)
    assert done.code == 0, done.err
    return int(done.out)


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
    for words in (["queue", "pause", "q"], ["defer", "sned"]):
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


# Reading jobs


def test_listing(run: Run, conn: PsycopgConnection) -> None:
    assert run("job", "ls").err == "No such jobs.\n"
    conn.execute("select queue.defer('t' || n, queue => 'q' || n % 2) from generate_series(1, 5) n")
    conn.execute("select queue.cancel(2)")
    assert [row["id"] for row in run("job", "ls", "--json").json] == [5, 4, 3, 2, 1]
    assert [row["id"] for row in run("job", "ls", "-q", "q0", "--json").json] == [4, 2]
    assert [row["id"] for row in run("job", "ls", "-s", "cancelled", "--json").json] == [2]
    assert [row["id"] for row in run("job", "ls", "-t", "t3", "--json").json] == [3]
    page = run("job", "ls", "-n", 2)
    assert (page.code, page.err) == (0, "There may be more: --before 4\n")
    assert "t5" in page.out
    assert [row["id"] for row in run("job", "ls", "-n", 2, "--before", 4, "--json").json] == [3, 2]
    assert run("job", "ls", "-s", "nonsense").code == Exit.USAGE
    assert run("job", "ls", "-n", 0).code == Exit.USAGE


def test_a_list_does_not_look_at_everything(
    run: Run, conn: PsycopgConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    rare = defer(run, "t", "-q", "rare")
    conn.execute("select queue.defer('t') from generate_series(1, 50)")
    monkeypatch.setattr(_job, "GLANCE", 2000)
    done = run("job", "ls", "-q", "rare")
    assert (done.code, done.out) == (Exit.PARTLY, "")
    assert (
        done.err
        == f"None of the newest jobs.\nThere may be more: --before {rare + 31}, or --no-limit\n"
    )
    assert run("job", "ls", "-q", "rare", "--before", rare + 10, "--json").json[0]["id"] == rare
    assert run("job", "ls", "-q", "rare", "--no-limit", "--json").json[0]["id"] == rare


def test_showing(run: Run, conn: PsycopgConnection, claim: Claim) -> None:
    secret = {"__pgdefer__": "bytes", "value": "AAECAw=="}
    args = {"n": 1, "data": secret, "long": "x" * 1000, "escape": "\x1b[31m[bold]red"}
    id = defer(run, "t", json.dumps(args))
    ((_, number),) = claim().items()
    conn.execute("select queue.fail(%s, %s, E'went\\nwrong \x1b[0m')", [id, number])
    shown = run("job", "show", id)
    assert shown.code == 0
    assert "<4 bytes>" in shown.out
    assert "… <1000 bytes>" in shown.out
    assert "\x1b" not in shown.out
    assert "[bold]" in shown.out
    assert "state: failed" in shown.out
    assert "wrong" in shown.out
    full = run("job", "show", id, "--full").out
    assert "x" * 1000 in full
    assert "AAECAw==" in full
    (row,) = run("job", "show", id, "--json").json["history"]
    assert (row["outcome"], row["attempt"]) == ("failed", 1)
    assert run("job", "show", id, "--json").json["args"] == args
    missing = run("job", "show", 99)
    assert (missing.code, missing.out) == (Exit.NOT_FOUND, "")
    assert run("job", "why", id).out.startswith("it failed at")
    assert run("job", "why", 99).code == Exit.NOT_FOUND


@pytest.mark.parametrize("options", [[], ["--full"]])
def test_only_prose_has_several_lines(run: Run, options: list[str]) -> None:
    id = defer(run, "t\nstate: succeeded", "--lock", "a\nb")
    run("job", "fail", id, "-m", "went\nwrong", "-y")
    lines = run("job", "show", id, *options).out.splitlines()
    assert {"task: t\\nstate: succeeded", "lock: a\\nb", "error: went", "wrong"} <= {*lines}


def test_large_args(run: Run, conn: PsycopgConnection, jobs: Jobs) -> None:
    done = run("defer", "t", "-", input=json.dumps({"data": "0123456789" * 1_000_000}))
    id = int(done.out)
    shown = run("job", "show", id)
    assert "… <10000000 bytes>" in shown.out
    assert len(shown.out) < 2000
    copied = int(run("job", "copy", id, "--to", "q").out)
    assert run("job", "delete", id, "--yes").out == f"{id}: deleted\n"
    (row,) = jobs()
    assert (row["id"], row["queue"], len(row["args"]["data"])) == (copied, "q", 10_000_000)
    assert run("job", "search", "0123").out.count("q") >= 1
    assert len(run("job", "get", "data", copied).out) == 10_000_003


def test_failed_jobs_are_listed_with_their_errors(run: Run) -> None:
    failed, cancelled, ready = (defer(run, "t") for _ in range(3))
    run("job", "fail", failed, "-m", "\r\nfirst line\r\nsecond", "-y")
    run("job", "cancel", cancelled, "-y")
    for states in (["-s", "failed,cancelled"], ["-s", "failed", "-s", "cancelled,failed"]):
        lines = run("job", "ls", *states).out.splitlines()
        assert [line.split()[0] for line in lines[2:4]] == [str(cancelled), str(failed)]
        assert lines[0].split()[-2:] == ["ended", "error"]
        assert lines[3].strip().endswith("first line")
    rows = run("job", "ls", "--json").json
    assert [row["id"] for row in rows] == [ready, cancelled, failed]
    assert [row["error"] for row in rows] == [None, None, "\r\nfirst line\r\nsecond"]
    assert [row["finished_at"] is None for row in rows] == [True, False, False]


def test_workers_that_have_left(run: Run, conn: PsycopgConnection) -> None:
    for name in ("here", "left"):
        conn.execute("select queue.register_worker(%s)", [name])
    conn.execute("select queue.deregister_worker(2)")
    assert [row["has_left"] for row in run("worker", "ls", "--json").json] == [False, True]
    lines = run("worker", "ls").out.splitlines()
    assert [line.split()[:3] for line in lines[2:]] == [["1", "here", "yes"], ["2", "left", "left"]]


def test_zeros_of_top(run: Run) -> None:
    defer(run, "t")
    (row,) = run("top", "--once", "--json").json["queues"]
    assert {key for key, value in row.items() if value is None} <= {"paused", "oldest"}
    assert "blocked" not in run("top", "--once").out
    assert " 0 done/s" in run("top", "--once").out


def test_numbers_are_shown_as_they_are_stored(run: Run) -> None:
    numbers = '[12345678901234567890.123456789, 1.10, -2.50, 7, [], {}, "1.0"]'
    id = defer(run, "t", f'{{"n": {numbers}, "none": {{}}}}')
    shown = "".join(run("job", "show", id).out.split())
    assert f'{{"n":{numbers.replace(" ", "")},"none":{{}}}}' in shown
    full = run("job", "show", id, "--full").out
    assert json.loads(full[full.index("{") : full.rindex("}") + 1])["n"][1:4] == [1.1, -2.5, 7]


def test_args_of_many_parts(run: Run) -> None:
    for args in (
        {"n": [*range(900)]},
        {f"key {n}": n for n in range(900)},
        {str(n): {"n": n} for n in range(90)},
    ):
        text = json.dumps(args)
        id = defer(run, "t", text)
        shown = run("job", "show", id).out
        assert f"… <{len(text)} bytes>" in shown
        assert len(shown.splitlines()) < 130
        assert len(run("job", "show", id, "--full").out.splitlines()) > 270


def test_get_tells_apart(run: Run) -> None:
    id = defer(run, "t", '{"items": [{"price": 1.50}], "none": null, "big": 12345678901234567890}')
    assert run("job", "get", "items[0].price", id).out == "1.50\n"
    assert run("job", "get", "items[*]", id).out == '{"price": 1.50}\n'
    assert run("job", "get", "big", id).out == "12345678901234567890\n"
    null = run("job", "get", "none", id)
    assert (null.code, null.out) == (0, "null\n")
    missing = run("job", "get", "nope", id)
    assert (missing.code, missing.out) == (Exit.NOTHING, "")
    assert "nothing at nope" in missing.err
    assert run("job", "get", "items[", id).code == Exit.USAGE
    assert run("job", "get", "items", 99).code == Exit.NOT_FOUND


@pytest.mark.long
def test_get_raw(run: Run, app: App) -> None:
    args: dict[str, Any] = {
        "to": 'Ünn "A"\t',
        "pdf": b"%PDF\xff\0\n",
        "parts": [bytearray(b"\xfe"), "b", {"c": b"d"}, None, 1.5],
        "dates": [dt.date(2030, 1, 31), dt.time(9), dt.timedelta(-1, 5)],
        "at": dt.datetime(2030, 1, 31, 9, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        "numbers": [Decimal("1.50"), 1e300, uuid.UUID(int=1)],
        "odd": "a\0\ud800",
        "code": Exit.DONE,
        "tuple": (1, b"x"),
    }
    id = app.defer("t", args).id

    def get(path: str) -> bytes:
        command = [sys.executable, "-m", "pgdefer", "job", "get", path, str(id), "--raw"]
        return subprocess.run(command, check=True, capture_output=True).stdout

    assert get("to") == 'Ünn "A"\t\n'.encode()
    assert get("pdf") == args["pdf"], "without a line's end"
    tagged = b'{"c": {"value": "ZA==", "__pgdefer__": "bytes"}}'
    assert get("parts[*]") == b"\xfe\nb\n%b\nnull\n1.5\n" % tagged
    assert get("odd") == b"a\0\xed\xa0\x80\n"
    for path, shown in {
        "dates[*]": "2030-01-31\n09:00:00\n-1 day, 0:00:05\n",
        "at": "2030-01-31T09:00:00+01:00\n",
        "numbers[*]": f"1.50\n1e+300\n{uuid.UUID(int=1)}\n",
    }.items():
        assert run("job", "get", path, id, "--raw").out == shown
    for path in ("$", "parts", "code", "tuple"):
        assert run("job", "get", path, id, "--raw").out == run("job", "get", path, id).out
    assert run("job", "get", "nope", id, "--raw").code == Exit.NOTHING
    assert run("job", "get", "to", id, "--raw", "--json").code == Exit.USAGE


def test_get_raw_what_was_written_by_hand(run: Run) -> None:
    args = '{"a": {"__pgdefer__": "bytes", "value": 1}, "b": {"__pgdefer__": []}}'
    id = defer(run, "t", args)
    assert run("job", "get", "b", id, "--raw").out == '{"__pgdefer__": []}\n'
    malformed = run("job", "get", "a", id, "--raw")
    assert (malformed.code, malformed.out) == (Exit.ERROR, "")
    assert "the value is malformed" in malformed.err


@pytest.mark.long
def test_search(run: Run, conn: PsycopgConnection) -> None:
    a = defer(run, "t", '{"name": "needle", "n": 5}', "--lock", "the lock")
    b = defer(run, "t", '{"name": "hay", "n": 50}', "-q", "other")
    ids = lambda *words: [row["id"] for row in run("job", "search", *words, "--json").json]  # noqa: E731
    assert ids("needle") == [a]
    assert ids("name") == [b, a]
    assert ids("name", "-q", "other") == [b]
    assert ids("$.n > 10", "--path") == [b]
    assert ids("the lock", "--key") == [a]
    assert ids("nothing") == []
    assert "needle" in run("job", "search", "needle").out
    conn.execute(
        "select queue.defer('t', jsonb_build_object('x', repeat('y', 100000)))"
        " from generate_series(1, 20)"
    )
    partial = run("job", "search", "needle", "--max-bytes", 500_000)
    assert partial.code == Exit.PARTLY
    assert re.search(r"There may be more: --before \d+", partial.err)
    assert partial.out == ""
    assert [row["id"] for row in run("job", "search", "needle", "--no-limit", "--json").json] == [a]
    page = run("job", "search", "yyy", "-n", 3)
    assert (page.code, "There may be more" in page.err) == (0, True), "a page is no partial result"
    assert run("job", "search", "$[", "--path").code == Exit.USAGE
    assert run("job", "search", "x", "--path", "--key").code == Exit.USAGE


def test_tail(run: Run, conn: PsycopgConnection, claim: Claim) -> None:
    ids = [defer(run, "t", "-q", f"q{n}") for n in range(3)]
    for id, number in claim().items():
        conn.execute("select queue.succeed(%s, %s)", [id, number])
    lines = run("job", "tail", "--no-follow").out.splitlines()
    assert [int(line.split()[3]) for line in lines] == ids
    assert "succeeded" in lines[0]
    assert len(run("job", "tail", "--no-follow", "-n", 1).out.splitlines()) == 1
    assert len(run("job", "tail", "--no-follow", "-q", "q1").out.splitlines()) == 1
    rows = [
        json.loads(line) for line in run("job", "tail", "--no-follow", "--json").out.splitlines()
    ]
    assert [row["id"] for row in rows] == ids


def test_tail_follows(run: Run, conn: PsycopgConnection, claim: Claim) -> None:
    command = [sys.executable, "-m", "pgdefer", "job", "tail", "-n", "0", "--json"]
    with subprocess.Popen([*command, "--interval", "0.05"], stdout=subprocess.PIPE) as process:
        assert process.stdout
        ended: list[int] = []
        try:
            while not select.select([process.stdout], [], [], 0.05)[0]:
                ended.append(defer(run, "t"))
                for id, number in claim().items():
                    conn.execute("select queue.succeed(%s, %s)", [id, number])
            seen = [json.loads(process.stdout.readline())["id"]]
            while seen[-1] != ended[-1]:
                seen.append(json.loads(process.stdout.readline())["id"])
            assert seen == ended[-len(seen) :], "each once, in order"
            process.send_signal(signal.SIGINT)
            assert process.wait(300) == 0
        finally:
            process.kill()


@pytest.mark.parametrize("args", ['{"a": ' + "[" * 5000 + "]" * 5000 + "}", '{"a": 1e5000}'])
def test_showing_what_python_cannot_read(run: Run, conn: PsycopgConnection, args: str) -> None:
    """Values too deep or too long for Python are shown as the text that they are."""
    conn.execute("select queue.defer('t', %s::jsonb)", [args])
    shown = run("job", "show", 1)
    assert (shown.code, "state: ready" in shown.out) == (0, True)
    assert '"id":1,' in run("job", "show", 1, "--json").out.replace(" ", "")


def test_tail_shows_each_end_once(
    run: Run, conn: PsycopgConnection, claim: Claim, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However slow its queries are, and whatever happens to the last job that it has shown."""

    def end(ago: float) -> int:
        """End a job, as if that had happened this many seconds ago."""
        id = defer(run, "t")
        ((_, number),) = claim().items()
        conn.execute("select queue.fail(%s, %s, 'no')", [id, number])
        by = f"interval '{ago} s'"
        conn.execute(f"update queue.finished set finished_at = finished_at - {by} where id = {id}")
        return id

    for ago in (8, 7, 6, 4):
        end(ago)
    ended: list[int] = []
    looks = iter(range(10))

    def sleep(_: float) -> None:
        look = next(looks)
        if look == 1:
            ended.append(end(0))
        elif look == 3:
            ended.append(end(-4))
        elif look == 4:
            ended.append(end(-8))
        elif look == 6:
            conn.execute("select queue.retry(%s)", [ended[-1:]])
        elif look == 9:
            raise KeyboardInterrupt

    monkeypatch.setattr("time.sleep", sleep)
    lines = run("job", "tail", "-n", "0").out.splitlines()
    assert [int(line.split()[3]) for line in lines] == ended


# Changing jobs


def test_move(run: Run, jobs: Jobs, conn: PsycopgConnection, claim: Claim) -> None:
    retry = '{"retry": {"max_attempts": 5}}'
    id = defer(run, "t", '{"n": 1}', "--options", retry)
    ((_, number),) = claim().items()
    run("queue", "create", "q")
    done = run("job", "move", id, "--to", "q")
    assert (done.code, done.out) == (Exit.WRONG_STATE, "")
    assert (
        done.err == f"{id}: its state does not allow this (running)\nRunning jobs need --force.\n"
    )
    conn.execute("select queue.fail(%s, %s, 'once')", [id, number])
    run("queue", "pause", "q")
    assert run("job", "move", id, "--to", "q").out == f"{id}: ready\n"
    (job,) = jobs()
    assert (job["id"], job["queue"], job["args"], job["attempts"]) == (id, "q", {"n": 1}, 1)
    assert job["reason"] == "paused"
    assert [row["error"] for row in jobs.attempts()] == ["once"]
    run("queue", "resume", "q")
    ((_, number),) = claim().items()
    assert run("job", "move", id, "--to", "p", "--force").code == 0
    with pytest.raises(psycopg.Error) as lost:
        conn.execute("select queue.succeed(%s, %s)", [id, number])
    assert lost.value.sqlstate == "QJ002"
    assert run("job", "move", id, "--to", "x*").code == Exit.USAGE


def test_retry(run: Run, jobs: Jobs, conn: PsycopgConnection, claim: Claim) -> None:
    failed, running = defer(run, "t"), defer(run, "t")
    claims = claim()
    conn.execute("select queue.fail(%s, %s, 'no')", [failed, claims[failed]])
    done = run("job", "retry", failed, running)
    assert (done.code, done.out) == (Exit.PARTLY, f"{failed}: ready\n")
    assert jobs.states() == {failed: "ready", running: "running"}
    refused = run("job", "retry", running)
    assert refused.code == Exit.WRONG_STATE
    assert "Running jobs need --force." in refused.err
    assert run("job", "retry", running, "--force").out == f"{running}: ready\n"
    with pytest.raises(psycopg.Error, match="claim lost"):
        conn.execute("select queue.succeed(%s, %s)", [running, claims[running]])
    run("job", "fail", failed, running, "--yes")
    assert len(run("job", "retry", "--failed", "-n", 1, "--json").json) == 1
    assert len(run("job", "retry", "--failed", "-t", "other", "--json").json) == 0
    assert "no failed jobs" in run("job", "retry", "--failed", "-t", "other").err
    assert run("job", "retry").code == Exit.USAGE
    assert run("job", "retry", failed, "--failed").code == Exit.USAGE
    for option in (["-q", "default"], ["-t", "t"], ["-n", 1]):
        done = run("job", "retry", failed, *option)
        assert (done.code, done.out) == (Exit.USAGE, ""), option
        assert "-q, -t and -n go with --failed: ids name the jobs already" in done.err


def test_retry_with_changes(run: Run, jobs: Jobs, claim: Claim) -> None:
    first, second = defer(run, "t", "--lock", "l"), defer(run, "t")
    claim()
    run("job", "fail", first, second, "--yes")
    options = ["--to", "other", "--priority", 3, "--lock", "l"]
    assert run("job", "retry", first, second, *options).out.split() == [
        f"{first}:", "ready", f"{second}:", "blocked"
    ]  # fmt: skip
    assert {(row["queue"], row["priority"], row["lock"]) for row in jobs()} == {("other", 3, "l")}
    run("job", "fail", first, second, "--yes")
    assert run("job", "retry", first, "--at", "2999-01-01Z").out == f"{first}: scheduled\n"
    assert run("job", "retry", second, "--in", "1 day", "--lock", "").out.endswith("scheduled\n")
    at, later = [row["scheduled_at"] for row in jobs()]
    assert (at.year, later.year < 2900, jobs()[1]["lock"]) == (2999, True, None)
    for bad in (["--in", "-1 day"], ["--at", "x"], ["--to", "x*"], ["--at", "now", "--in", "1 s"]):
        assert run("job", "retry", first, *bad).code == Exit.USAGE, bad
    assert run("job", "retry", "--failed", "--to", "other").code == Exit.USAGE


def test_more_jobs_than_one_call_may_change(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_job_changes, "SLICE", 2)
    ids = [defer(run, "t") for _ in range(5)]
    done = run("job", "fail", *ids, ids[0], 99, "--yes")
    assert (done.code, done.out) == (Exit.PARTLY, "".join(f"{id}: failed\n" for id in ids))
    assert len(run("job", "retry", *ids, "--dry-run").out.splitlines()) == 5
    found = [row["id"] for row in run("job", "retry", "--failed", "-n", 3, "--json").json]
    assert found == ids[:3]
    # refused jobs are read once
    run("job", "fail", defer(run, "t", "--queueing-lock", "k"), "--yes")
    defer(run, "t", "--queueing-lock", "k")
    done = run("job", "retry", "--failed")
    assert (done.code, done.out) == (Exit.PARTLY, "".join(f"{id}: ready\n" for id in ids[3:]))
    assert run("job", "retry", "--failed").code == Exit.ALREADY_QUEUED


def test_retry_where_another_has_the_queueing_lock(run: Run, jobs: Jobs) -> None:
    first = defer(run, "t", "--queueing-lock", "k")
    run("job", "fail", first, "--yes")
    second = defer(run, "t", "--queueing-lock", "k")
    for which in (first, "--failed"):
        done = run("job", "retry", which)
        assert (done.code, done.out) == (Exit.ALREADY_QUEUED, "")
        assert done.err == f"{first}: another job has its queueing lock (failed)\n"
    assert run("job", "retry", first, 99).code == Exit.PARTLY
    run("job", "delete", second, "--yes")
    assert run("job", "retry", first).out == f"{first}: ready\n"
    assert jobs.states() == {first: "ready"}


def test_fail(run: Run, jobs: Jobs, conn: PsycopgConnection, claim: Claim) -> None:
    retry = '{"retry": {"max_attempts": 10}}'
    need = defer(run, "t", "--options", retry)
    dependent = defer(run, "t", "--needs", need)
    assert run("job", "fail", need).code == Exit.USAGE, "nobody to ask"
    assert run("job", "fail", need, "-m", "broken", "-y").out == f"{need}: failed\n"
    assert jobs.states() == {need: "failed", dependent: "upstream_failed"}
    assert jobs()[0]["error"] == "broken"
    assert run("job", "fail", need, "-y").code == Exit.WRONG_STATE
    assert "a need failed" in run("job", "why", dependent).out
    running = defer(run, "t", "--options", retry)
    ((_, number),) = claim().items()
    assert run("job", "fail", running, "-y").out == f"{running}: failed\n"
    with pytest.raises(psycopg.Error, match="claim lost"):
        conn.execute("select queue.succeed(%s, %s)", [running, number])
    assert run("db", "tick").code == 0
    assert jobs.states()[running] == "failed", "it is not retried"
    assert claim() == {}


@pytest.fixture
def zoo(run: Run, conn: PsycopgConnection, claim: Claim) -> dict[str, int]:
    """A job of each state: name -> id."""
    retry = '{"retry": {"max_attempts": 2, "base": "1 day"}}'
    ids = {
        "running": defer(run, "t", "--lock", "l"),
        "retrying": defer(run, "t", "--options", retry),
    }
    ids |= {name: defer(run, "t") for name in ("failed", "succeeded")}
    claims = claim()
    for name in ("retrying", "failed"):
        conn.execute("select queue.fail(%s, %s, 'no')", [ids[name], claims[ids[name]]])
    conn.execute("select queue.succeed(%s, %s)", [ids["succeeded"], claims[ids["succeeded"]]])
    ids["ready"] = defer(run, "t")
    ids["scheduled"] = defer(run, "t", "--at", "2999-01-01")
    ids["blocked"] = defer(run, "t", "--lock", "l")
    ids["waiting"] = defer(run, "t", "--needs", ids["blocked"])
    ids["held"] = defer(run, "t", "--options", '{"held": true}')
    ids["upstream_failed"] = defer(run, "t", "--needs", ids["held"])
    ids["cancelled"] = defer(run, "t")
    assert run("job", "cancel", ids["cancelled"], "-y").code == 0
    conn.execute("select queue.tick()")
    states = dict(conn.execute("select id, state from queue.jobs").fetchall())
    found = {name: states[id] for name, id in ids.items()}
    assert found == {name: name for name in ids} | {"retrying": "scheduled"}
    return ids


def test_done_on_each_state(run: Run, jobs: Jobs, zoo: dict[str, int]) -> None:
    before = jobs()
    done = run("job", "done", *zoo.values(), "--dry-run")
    assert done.code == Exit.PARTLY
    assert jobs() == before
    done = run("job", "done", *zoo.values(), "--yes")
    assert done.code == Exit.PARTLY
    assert done.err == f"{zoo['succeeded']}: its state does not allow this (succeeded)\n"
    assert set(jobs.states().values()) == {"succeeded"}
    assert run("job", "done", *zoo.values(), "--yes").code == Exit.WRONG_STATE


# The commands that change jobs, and the states in which each works.
CHANGES = {
    "move --to q": set(),
    "retry": {"failed", "succeeded", "cancelled", "retrying"},
    "delete --yes": set(),
    "fail --yes": set(),
    "priority 3": set(),
}
REFUSED = {
    "move --to q": {"running"},
    # needs are deleted together with their dependents
    "delete --yes": {"running"},
    "fail --yes": {"failed", "succeeded", "cancelled"},
    "priority 3": set(),
}


@pytest.mark.parametrize("command", CHANGES)
def test_each_change_on_each_state(run: Run, zoo: dict[str, int], command: str) -> None:
    done = run("job", *command.split(), *zoo.values(), "--json")
    accepted = {row["id"] for row in done.json if row["error"] is None}
    names = {name for name, id in zoo.items() if id in accepted}
    assert names == (CHANGES[command] or zoo.keys() - REFUSED[command])
    assert [row["id"] for row in done.json] == [*zoo.values()], "in the order given"
    assert done.code == (0 if len(names) == len(zoo) else Exit.PARTLY)


def test_a_mixed_list(run: Run, jobs: Jobs, claim: Claim) -> None:
    running = defer(run, "t")
    claim()
    valid = defer(run, "t")
    done = run("job", "delete", valid, 99, running, "--yes")
    assert done.code == Exit.PARTLY
    assert done.out == f"{valid}: deleted\n"
    assert done.err.splitlines() == [
        "99: there is no such job",
        f"{running}: its state does not allow this (running)",
        "Running jobs need --force.",
    ]
    assert run("job", "delete", 98, 99, "--yes").code == Exit.NOT_FOUND
    assert run("job", "delete", running, "--yes").code == Exit.WRONG_STATE
    assert run("job", "delete", running, "--yes", "--json").json == [
        {"id": running, "outcome": "running", "error": "QJ003"}
    ]
    assert run("job", "delete", "x", "--yes").code == Exit.USAGE
    assert jobs.states() == {running: "running"}
    assert run("job", "delete", running, "--yes", "--force").code == 0
    assert jobs() == []


def test_asking(dsn: str, run: Run, jobs: Jobs) -> None:
    """On a terminal destructive commands ask for confirmation."""
    id = defer(run, "t")

    def ask(answer: bytes) -> int:
        pid, terminal = os.forkpty()
        if pid == 0:
            arguments = ["-m", "pgdefer", "job", "delete", str(id)]
            os.execv(sys.executable, [sys.executable, *arguments])
        asked = b""
        while b"[y/N]" not in asked:
            asked += os.read(terminal, 1000)
        os.write(terminal, answer)
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
        return os.waitstatus_to_exitcode(status)

    assert ask(b"n\n") == Exit.ERROR
    assert jobs.states() == {id: "ready"}
    assert ask(b"y\n") == 0
    assert jobs() == []


def test_one_job(run: Run, jobs: Jobs, claim: Claim) -> None:
    id = defer(run, "t")
    assert run("job", "hold", id).out == f"{id}: held\n"
    assert run("job", "hold", 99).code == Exit.NOT_FOUND
    assert run("job", "unhold", id).out == f"{id}: ready\n"
    assert run("job", "unhold", id).code == Exit.WRONG_STATE
    assert run("job", "reschedule", id, "--at", "2999-01-01").out == f"{id}: scheduled\n"
    assert run("job", "reschedule", id, "--json").json == {"state": "ready"}
    for words in (("hold", "1x"), ("cancel", id, "1x", "-y"), ("retry", "1x")):
        done = run("job", *words)
        assert done.code == Exit.USAGE
        assert "'1x': an id is a whole number" in done.err
    assert run("job", "priority", "-5", id).out == f"{id}: ready\n"
    assert jobs()[0]["priority"] == -5
    assert run("job", "priority", 5, id, 99).code == Exit.PARTLY
    assert jobs()[0]["priority"] == 5
    claim()
    assert run("job", "cancel", id, "-y").code == Exit.WRONG_STATE
    done = run("job", "cancel", id, "-y", "--json")
    assert done.code == Exit.WRONG_STATE
    assert done.json == [{"id": id, "outcome": "running", "error": "QJ003"}]
    assert run("job", "cancel", id, "-y", "--abort").out == f"{id}: running\n"
    assert run("job", "reschedule", id).code == Exit.WRONG_STATE


def test_hold_many(run: Run) -> None:
    one, other = defer(run, "t"), defer(run, "t")
    done = run("job", "hold", one, 99, other, one)
    assert (done.code, done.out) == (Exit.PARTLY, f"{one}: held\n{other}: held\n")
    assert "99" in done.err
    done = run("job", "unhold", other, one, "--json")
    assert (done.code, done.json) == (
        0,
        [{"id": id, "outcome": "ready", "error": None} for id in (other, one)],
    )


def test_args(run: Run, jobs: Jobs, claim: Claim) -> None:
    id = defer(run, "t", '{"n": 1, "m": 1}')
    assert run("job", "args", id, '{"n": 2}').out == f"{id}: ready\n"
    assert jobs()[0]["args"] == {"n": 2}
    assert run("job", "args", id, "-", input='{"n": 3}').code == 0
    assert jobs()[0]["args"] == {"n": 3}
    for wrong in ("[]", "null", "{", "7"):
        assert run("job", "args", id, wrong).code == Exit.USAGE
    assert run("job", "args", 99, "{}").code == Exit.NOT_FOUND
    claim()
    assert run("job", "args", id, "{}").code == Exit.WRONG_STATE
    assert jobs()[0]["args"] == {"n": 3}


def test_copy(run: Run, jobs: Jobs) -> None:
    id = defer(run, "t", '{"n": 1}', "-p", 3, "--queueing-lock", "k")
    assert run("job", "copy", id, "--json").json == {"id": id + 1}
    (_, copied) = jobs()
    assert (copied["args"], copied["priority"], copied["queueing_lock"]) == ({"n": 1}, 3, None)
    assert run("job", "copy", 99).code == Exit.NOT_FOUND


# Common to all commands


def everything(conn: PsycopgConnection) -> list[Any]:
    views = "jobs", "queues", "schedules", "attempts"
    return [conn.execute(f"select * from queue.{view} order by 1").fetchall() for view in views]


@pytest.mark.long
def test_dry_runs(run: Run, conn: PsycopgConnection, zoo: dict[str, int]) -> None:
    assert run("schedule", "add", "nightly", "0 3 * * *", "report").code == 0
    assert run("queue", "create", "other").code == 0
    before = everything(conn)
    one = zoo["ready"]
    for words in (
        ["defer", "t"],
        ["job", "move", one, "--to", "other"],
        ["job", "copy", one],
        ["job", "retry", zoo["failed"]],
        ["job", "retry", "--failed"],
        ["job", "retry", zoo["running"], "--force"],
        ["job", "delete", one],
        ["job", "fail", one],
        ["job", "done", one],
        ["job", "hold", one],
        ["job", "unhold", zoo["held"]],
        ["job", "cancel", one],
        ["job", "cancel", zoo["running"], "--abort"],
        ["job", "priority", 7, one],
        ["job", "reschedule", one, "--at", "2999-01-01"],
        ["job", "args", one, '{"n": 2}'],
        ["queue", "create", "new"],
        ["queue", "delete", "other"],
        ["queue", "delete", "default", "--force"],
        ["queue", "pause", "other"],
        ["queue", "resume", "--all"],
        ["queue", "configure", "other", "--max-running", 3],
        ["schedule", "add", "weekly", "0 3 * * 1", "report"],
        ["schedule", "rm", "nightly"],
        ["schedule", "run", "nightly"],
        ["schedule", "enable", "nightly", "--off"],
        ["db", "prune", "-s", "failed"],
    ):
        done = run(*words, "--dry-run")
        assert (done.code, done.err) == (0, "Dry run, nothing is changed:\n"), words
        assert done.out, words
        assert everything(conn) == before, words


@pytest.mark.parametrize(
    "words",
    [
        "job delete 1",
        "job fail 1",
        "job done 1",
        "job cancel 1",
        "queue delete default",
        "schedule rm nightly",
        "db prune -s failed",
        "pg restore",
    ],
)
def test_what_destroys_asks(run: Run, conn: PsycopgConnection, words: str) -> None:
    defer(run, "t")
    assert run("schedule", "add", "nightly", "0 3 * * *", "report").code == 0
    before = everything(conn)
    done = run(*words.split())
    assert done.code == Exit.USAGE
    assert "pass --yes" in done.err
    assert everything(conn) == before


@pytest.mark.long
def test_json_everywhere(run: Run, zoo: dict[str, int]) -> None:
    assert run("schedule", "add", "nightly", "0 3 * * *", "report", "--json").json
    one = zoo["ready"]
    for words in (
        ["version"],
        ["install"],
        ["upgrade"],
        ["worker", "ls"],
        ["queue", "ls"],
        ["queue", "create", "q"],
        ["queue", "configure", "q", "--max-running", 3],
        ["queue", "pause", "q"],
        ["queue", "resume", "q"],
        ["queue", "delete", "q", "--yes"],
        ["schedule", "ls"],
        ["schedule", "run", "nightly"],
        ["schedule", "next", "@hourly"],
        ["schedule", "enable", "nightly"],
        ["schedule", "rm", "nightly", "--yes"],
        ["defer", "t"],
        ["job", "ls"],
        ["job", "show", one],
        ["job", "search", "x"],
        ["job", "why", one],
        ["job", "get", "$", one],
        ["job", "copy", one],
        ["job", "hold", one],
        ["job", "unhold", one],
        ["job", "priority", 2, one],
        ["job", "reschedule", one],
        ["job", "args", one, "{}"],
        ["job", "next", "--peek"],
        ["job", "retry", zoo["failed"]],
        ["job", "move", one, "--to", "q"],
        ["job", "cancel", one, "--yes"],
        ["job", "done", one, "--yes"],
        ["job", "fail", zoo["held"], "--yes"],
        ["job", "delete", one, "--yes"],
        ["db", "stats"],
        ["db", "health"],
        ["db", "check"],
        ["db", "reap"],
        ["db", "tick"],
        ["db", "prune"],
        ["top", "--once"],
        ["graph", zoo["waiting"]],
    ):
        done = run(*words, "--json")
        assert done.code in (0, Exit.UNHEALTHY), (words, done.err)
        assert isinstance(done.json, dict | list), words
    assert [
        json.loads(line) for line in run("job", "tail", "--no-follow", "--json").out.splitlines()
    ]


@pytest.mark.parametrize("styles", ["German iso_8601", "SQL,DMY sql_standard"])
def test_the_databases_own_styles(
    run: Run, claim: Claim, conn: PsycopgConnection, monkeypatch: pytest.MonkeyPatch, styles: str
) -> None:
    """Of times and intervals: what is printed does not depend on them."""
    id = defer(run, "t", "--deadline", "2999-12-31 09:00Z")
    conn.execute("select queue.succeed(%s, %s)", [id, claim()[id]])
    run("queue", "configure", "q", "--retain", "40 days")
    run("schedule", "add", "nightly", "0 3 * * *", "report")
    commands = [
        ["job", *words, *form]
        for words in (["tail", "--no-follow"], ["show", id], ["ls"])
        for form in ([], ["--json"])
    ]
    commands += [["queue", "ls"], ["queue", "ls", "--json"], ["schedule", "ls"]]
    usual = [run(*words) for words in commands]
    assert {done.code for done in usual} == {0}
    dates, intervals = styles.split()
    monkeypatch.setenv("PGOPTIONS", f"-c DateStyle={dates} -c IntervalStyle={intervals}")
    for words, before in zip(commands, usual, strict=True):
        assert run(*words) == before, words


def test_what_went_wrong_is_in_the_exit_code(
    run: Run, conn: PsycopgConnection, blank_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = "postgresql://127.0.0.1:1/nowhere?connect_timeout=1"
    codes = {
        "unreachable": run("job", "ls", "--dsn", nowhere).code,
        "not installed": run("job", "ls", "--dsn", blank_dsn).code,
        "not found": run("job", "why", 1).code,
        "usage": run("job", "ls", "-s", "x").code,
        "nothing": run("job", "next").code,
    }
    conn.execute("create role nobody_much login")
    try:
        monkeypatch.setenv("PGUSER", "nobody_much")
        user = re.sub(r"user=\S+", "user=nobody_much", os.environ["PGDEFER_DSN"])
        forbidden = run("job", "ls", "--dsn", user)
    finally:
        conn.execute("drop role nobody_much")
    codes["forbidden"] = forbidden.code
    assert codes == {
        "unreachable": Exit.UNREACHABLE,
        "not installed": Exit.NOT_INSTALLED,
        "not found": Exit.NOT_FOUND,
        "usage": Exit.USAGE,
        "nothing": Exit.NOTHING,
        "forbidden": Exit.FORBIDDEN,
    }
    assert "permission denied" in forbidden.err
    assert len({*Exit}) == len(Exit), "each cause has its own"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["defer", "t", "--at", "soonish"], "--at"),
        (["defer", "t", "--at", "2030-01-01", "--deadline", "2030-99-99"], "--deadline"),
        (["job", "reschedule", 1, "--at", "soonish"], "--at"),
        (["queue", "pause", "q", "--until", "soonish", "--json"], "--until"),
        (["db", "prune", "-s", "failed", "--older-than", "long", "--yes"], "--older-than"),
        (["job", "next", "--lease", "long"], "--lease"),
    ],
)
def test_a_time_that_cannot_be_read(run: Run, arguments: list[object], option: str) -> None:
    done = run(*arguments)
    assert done.code == Exit.USAGE
    assert done.err.startswith(f"pgdefer: {option}: ")
    assert re.search(r"\. Give an? (time|interval), such as .*\.\n$", done.err)


def test_a_number_out_of_range(run: Run) -> None:
    assert run("job", "show", 10**30).code == Exit.USAGE


@pytest.mark.parametrize(
    "arguments",
    [["job", "ls"], ["version"], ["install"], ["upgrade"], ["psql"]],
)
def test_a_dsn_that_cannot_be_read(run: Run, arguments: list[object]) -> None:
    done = run(*arguments, "--dsn", "secret garbage")
    assert done.code == Exit.USAGE
    assert "the DSN can't be read. Write postgresql://" in done.err
    assert "secret" not in done.err


@pytest.mark.unchecked("the tables are of no version that there is")
def test_a_database_of_another_version(run: Run, conn: PsycopgConnection) -> None:
    conn.execute("update queue.installation set version = '999.0.0'")
    done = run("install")
    assert done.code == Exit.INCOMPATIBLE, done.err


def complete(dsn: str, line: str) -> list[str]:
    """Return the completions that bash would offer."""
    words = line.split(" ")
    given = {"_PGDEFER_COMPLETE": "complete_bash", "COMP_WORDS": line, "PGDEFER_DSN": dsn}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv[0] = 'pgdefer'; from pgdefer.cli import main; main()",
        ],
        env=os.environ | given | {"COMP_CWORD": str(len(words) - 1)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.long
def test_completion(dsn: str, conn: PsycopgConnection) -> None:
    conn.execute("select queue.create_queue('mail'), queue.create_queue('mad')")
    conn.execute("select queue.register_task('main', '{}')")
    assert complete(dsn, "pgdefer job re") == ["retry", "reschedule"]
    assert complete(dsn, "pgdefer job ls --state r") == ["ready", "running"]
    assert complete(dsn, "pgdefer job ls -q ma") == ["mad", "mail"]
    assert complete(dsn, "pgdefer queue pause mai") == ["mail"]
    assert complete(dsn, "pgdefer defer m") == ["main"]
    assert complete(dsn, "pgdefer web --po") == ["--port"]
    assert complete("postgresql://127.0.0.1:1/x?connect_timeout=1", "pgdefer queue pause m") == []


# Claiming jobs by hand


def test_next(run: Run, jobs: Jobs, conn: PsycopgConnection) -> None:
    assert run("job", "next").code == Exit.NOTHING
    one, two = defer(run, "t", "-q", "q", "-p", 1), defer(run, "t", "-q", "q")
    before = conn.execute("select * from queue.jobs order by id").fetchall()
    peeked = run("job", "next", "q", "--peek")
    assert (peeked.code, f"id: {one}\n" in peeked.out) == (0, True)
    assert conn.execute("select * from queue.jobs order by id").fetchall() == before
    assert run("job", "next", "other", "--peek").code == Exit.NOTHING
    taken = run("job", "next", "q", "--json").json
    assert taken["id"] == one
    conn.execute("select queue.succeed(%s, %s)", [one, taken["claim"]])
    assert f"id: {two}\n" in run("job", "next", "--ack").out
    assert set(jobs.states().values()) == {"succeeded"}
    assert run("job", "next", "--ack", "--peek").code == Exit.USAGE


def test_peek_changes_nothing_when_killed(run: Run, dsn: str, conn: PsycopgConnection) -> None:
    for _ in range(3):
        defer(run, "t")
    conn.execute("select queue.tick()")
    tables = "active_job", "job", "lane", "cursor", "waiting", "worker", "attempt"

    def contents() -> list[Any]:
        return [
            conn.execute(f"select t::text from queue.{table} t order by 1").fetchall()
            for table in tables
        ]

    before = contents()
    with psycopg.connect(dsn) as peeking:
        assert len(peeking.execute(sql.PEEK.psycopg, {"queues": None, "n": 3}).fetchall()) == 3
        pid = peeking.info.backend_pid
        conn.execute("select pg_terminate_backend(%s, 5000)", [pid])
        peeking.close()
    assert contents() == before
    assert len(run("job", "ls", "-s", "ready", "--json").json) == 3


def test_next_ack_by_fifty_callers(dsn: str, conn: PsycopgConnection, jobs: Jobs) -> None:
    conn.execute("select queue.defer('t', queue => 'q') from generate_series(1, 200)")
    taken: list[int] = []
    failures: list[BaseException] = []
    begin = threading.Barrier(50)

    def take() -> None:
        try:
            with psycopg.connect(dsn, autocommit=True) as connection:
                begin.wait()
                asked = {"queues": ["q"], "ack": True, "lease": "1 minute"}
                while row := connection.execute(sql.NEXT.psycopg, asked).fetchone():
                    taken.append(row[0])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=take) for _ in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(taken) == sorted(jobs.states()), "each job once"
    assert set(jobs.states().values()) == {"succeeded"}


# The database


def test_upkeep(
    run: Run,
    jobs: Jobs,
    conn: PsycopgConnection,
    claim: Claim,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    id = defer(run, "t")
    health = run("db", "health")
    assert (health.code, "1 alive" in health.out) == (0, True)
    ((_, number),) = claim().items()
    conn.execute("select queue.succeed(%s, %s)", [id, number])
    (stats,) = run("db", "stats", "--json").json
    assert (stats["succeeded_5m"], stats["ready"]) == (1, 0)
    assert "The last 5 minutes:" in run("db", "stats").out
    assert "The last hour:" in run("db", "stats", "--hour").out
    assert run("db", "check").err == "Every invariant holds.\n"
    assert run("db", "check", "--json").json == []
    assert run("db", "reap").out.startswith("0 claims ended")
    assert run("db", "tick", "--json").json["reaped"] == 0
    assert run("db", "prune").out == "0 jobs removed\n"
    assert run("db", "prune", "-s", "succeeded").code == Exit.USAGE, "nobody to ask"
    assert run("db", "prune", "-s", "succeeded", "--dry-run").out == "1 job removed\n"
    assert run("db", "prune", "-s", "nonsense", "--yes").code == Exit.USAGE
    for words, said in (
        (["-s", "faild"], "state: faild"),
        (["-s", "failed", "--older-than", "3 dayz"], "--older-than"),
    ):
        done = run("db", "prune", *words)
        assert done.code == Exit.USAGE
        assert said in done.err, "refused before the question"
        assert "for good?" not in done.err
    assert len(jobs()) == 1
    assert run("db", "prune", "-s", "succeeded", "--yes", "--json").json == {"jobs": 1}
    monkeypatch.setattr("pgdefer.cli._db.PRUNED_AT_ONCE", 2)
    for _ in range(7):
        later = defer(run, "t", "--in", "1 hour")
        conn.execute("select queue.cancel(%s)", [later])
    prune = ["db", "prune", "-s", "cancelled", "--yes"]
    assert run(*prune, "--dry-run").out == "2 jobs removed\n"
    assert run(*prune, "--limit", "3").out == "3 jobs removed\n"
    assert run(*prune).out == "4 jobs removed\n", "until nothing is left"
    conn.execute(
        "update queue.worker set last_seen_at = now() - interval '1 hour', dead_after = '0'"
    )
    defer(run, "t")
    conn.execute("update queue.job set created_at = now() - interval '1 hour'")
    unwell = run("db", "health")
    assert unwell.code == Exit.UNHEALTHY
    assert "queue.tick()" in unwell.out


@pytest.mark.unchecked("breaks an invariant on purpose")
def test_check_says_what_is_wrong(run: Run, conn: PsycopgConnection) -> None:
    id = defer(run, "t")
    conn.execute("select queue.tick()")
    conn.execute("delete from queue.active_job")
    broken = run("db", "check")
    assert broken.code == Exit.UNHEALTHY
    assert f"{id}" in broken.out
    assert run("db", "check", "--json").code == Exit.UNHEALTHY


def test_workers(run: Run, conn: PsycopgConnection) -> None:
    assert run("worker", "ls").err == "There are no workers.\n"
    conn.execute("select queue.register_worker('the worker', '{a,b*}')")
    (row,) = run("worker", "ls", "--json").json
    assert (row["name"], row["queues"], row["is_alive"]) == ("the worker", ["a", "b*"], True)
    assert "a, b*" in run("worker", "ls").out
    assert row["memory"] is None
    conn.execute("select queue.heartbeat(%s, 123456789)", [row["id"]])
    assert run("worker", "ls", "--json").json[0]["memory"] == 123456789
    assert "118 MB" in run("worker", "ls").out
    assert "118 MB" in run("top", "--once").out
    conn.execute("select queue.heartbeat(%s, 9223372036854775807)", [row["id"]])
    assert "8589934592 GB" in run("worker", "ls").out


def test_schedules(run: Run, jobs: Jobs) -> None:
    assert run("schedule", "ls").err == "Nothing is scheduled.\n"
    added = run(
        "schedule", "add", "nightly", "0 3 * * *", "report", '{"n": 1}', "-z", "Europe/Paris"
    )
    assert added.out.startswith("next run: ")
    (row,) = run("schedule", "ls", "--json").json
    assert (row["name"], row["timezone"], row["args"]) == ("nightly", "Europe/Paris", {"n": 1})
    id = int(run("schedule", "run", "nightly").out)
    assert jobs()[0]["id"] == id
    assert run("schedule", "enable", "nightly", "--off").out == "next run: never\n"
    assert run("schedule", "next", "@hourly", "-n", 3, "--json").code == 0
    assert run("schedule", "add", "x", "not cron", "report").code == Exit.USAGE
    assert run("schedule", "rm", "nightly", "--dry-run").code == 0
    assert run("schedule", "rm", "nightly", "-y").out == "removed\n"
    assert run("schedule", "rm", "nightly", "-y").code == Exit.NOT_FOUND
    for command in ("run", "enable"):
        missing = run("schedule", command, "nightly")
        assert missing.code == Exit.NOT_FOUND
        assert missing.err == (
            "pgdefer: no such schedule (name: nightly). `pgdefer schedule ls` lists them.\n"
        )


def test_top(run: Run, claim: Claim) -> None:
    defer(run, "t", "-q", "mail")
    claim()
    shown = run("top", "--once").out
    assert "0 ready, 1 running" in shown
    assert "mail" in shown


@pytest.mark.long
def test_backup_and_restore(
    run: Run, server: EmbeddedServer, dsn: str, blank_dsn: str, tmp_path: Path
) -> None:
    if server_program(server, "pg_dump") is None:
        pytest.skip(f"there is no pg_dump for PostgreSQL {server.major}")
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute("drop trigger stay_alive on queue.worker")  # the tests' own database
    id = defer(run, "t", '{"kept": true}')
    command = [sys.executable, "-m", "pgdefer", "pg"]
    with (tmp_path / "dump").open("wb") as file:
        subprocess.run([*command, "backup"], stdout=file, check=True)
    install = [sys.executable, "-m", "pgdefer", "version", "--dsn", blank_dsn]
    assert (
        subprocess.run(install, capture_output=True, check=False).returncode == Exit.NOT_INSTALLED
    )
    with (tmp_path / "dump").open("rb") as file:
        restore = [*command, "restore", "--yes", "--dsn", blank_dsn]
        done = subprocess.run(restore, stdin=file, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    with psycopg.connect(blank_dsn) as restored:
        assert restored.execute("select id, args from queue.job").fetchall() == [
            (id, {"kept": True})
        ]


def test_a_backup_needs_the_right(
    run: Run, conn: PsycopgConnection, dsn: str, blank_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    conn.execute("create role dumps_nothing login")
    monkeypatch.setattr("os.isatty", lambda _: False)
    try:
        backup = run("pg", "backup", "--dsn", make_conninfo(dsn, user="dumps_nothing"))
        address = make_conninfo(blank_dsn, user="dumps_nothing")
        restore = run("pg", "restore", "--yes", "--dsn", address)
    finally:
        conn.execute("drop role dumps_nothing")
    for done, named in ((backup, "table queue."), (restore, "database ")):
        assert (done.code, done.out) == (Exit.FORBIDDEN, "")
        assert f"permission denied for {named}" in done.err
        assert "as the owner of the queue" in done.err


# psql


def test_psqlrc(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    own = tmp_path / ".psqlrc"
    own.write_text("\\set mine 1")
    for _ in range(2):
        assert "reads" in run("psqlrc").out
    assert own.read_text() == f"\\set mine 1\n\\i '{tmp_path}/config/pgdefer/psqlrc'\n"
    assert run("psqlrc", "--print").out == (tmp_path / "config/pgdefer/psqlrc").read_text()
    assert run("psqlrc", "--remove").code == 0
    assert own.read_text() == "\\set mine 1\n"


def test_psqlrc_without_a_home(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", os.devnull)
    for words in (["psqlrc"], ["psqlrc", "--remove"]):
        done = run(*words)
        assert (done.code, done.out) == (Exit.ERROR, "")
        assert f"{os.devnull}/.config/pgdefer can't be created: " in done.err


def test_psqlrc_either_prints_or_removes(run: Run) -> None:
    done = run("psqlrc", "--print", "--remove")
    assert (done.code, done.out) == (Exit.USAGE, "")
    assert "--print and --remove exclude each other" in done.err


def test_psql(run: Run, dsn: str, tmp_path: Path, server: EmbeddedServer) -> None:
    if server_program(server, "psql") is None:
        pytest.skip("there is no psql")
    id = defer(run, "t", "-q", "q")
    (tmp_path / ".psqlrc").write_text("\\set mine 'select 12345;'\n")
    shortcuts = (
        "failed running queues workers schedules stats health check job args attempts why graph"
    )
    script = "\\set ON_ERROR_STOP 1\n:jobs\n:mine\n:help\n\\set id " + str(id) + "\n"
    script += "".join(f":{name}\n" for name in shortcuts.split())
    script += "\\set find \"'t'\"\n:search\n:cancel\n"
    done = subprocess.run(
        [sys.executable, "-m", "pgdefer", "psql", "--", "-A"],
        input=script,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"{id}|q|t|ready" in done.stdout
    assert "12345" in done.stdout
    assert done.stdout.rstrip().endswith("cancelled\n(1 row)")


@pytest.mark.parametrize("own", ["", "\\set SHOW_CONTEXT always\n"])
def test_errors_in_psql(
    run: Run, dsn: str, tmp_path: Path, server: EmbeddedServer, own: str
) -> None:
    if server_program(server, "psql") is None:
        pytest.skip("there is no psql")
    (tmp_path / ".psqlrc").write_text(own)
    done = subprocess.run(
        [sys.executable, "-m", "pgdefer", "psql"],
        input="select queue.cancel(99);\n\\errverbose\n",
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert done.stderr.startswith("ERROR:  job not found\nDETAIL:  id: 99\nHINT:  The id is wrong")
    first, _, whole = done.stderr.partition("QJ001")
    assert ("CONTEXT" in first) == bool(own)
    assert "CONTEXT:  PL/pgSQL function queue." in whole


SECRET = "to'p se\\cret"


@pytest.mark.parametrize(
    "command",
    [["psql", "--", "-c", "select pg_sleep(60)"], ["pg", "backup"], ["pg", "restore", "--yes"]],
)
def test_no_password_on_a_command_line(
    command: list[str],
    dsn: str,
    conn: psycopg.Connection[Any],
    tmp_path: Path,
    server: EmbeddedServer,
) -> None:
    """Checked while they run: psql sleeps, pg_dump waits for a lock, pg_restore for input."""
    name = {"--": "psql", "backup": "pg_dump", "restore": "pg_restore"}[command[1]]
    if server_program(server, name) is None or not Path("/proc/self/cmdline").exists():
        pytest.skip(f"there is no {name}, or no /proc")
    with conn.transaction():
        conn.execute("lock table queue.task in access exclusive mode")
        process = subprocess.Popen(
            [sys.executable, "-m", "pgdefer", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ
            | {"PGDEFER_DSN": make_conninfo(dsn, password=SECRET), "XDG_CACHE_HOME": str(tmp_path)},
        )
        try:
            folder = Path(f"/proc/{process.pid}")
            deadline = time.monotonic() + 300
            while name not in (words := (folder / "cmdline").read_text().split("\0"))[0]:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert not any("se" in word and "cret" in word for word in words), words
            assert f"PGPASSWORD={SECRET}" in (folder / "environ").read_text().split("\0")
        finally:
            process.kill()
            process.communicate()
