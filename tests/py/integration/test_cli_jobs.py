"""Reading jobs from the command line: lists, one job, its args, its end."""

from __future__ import annotations

import datetime as dt
import json
import re
import select
import signal
import subprocess
import sys
import uuid
import zoneinfo
from decimal import Decimal
from typing import Any

import pytest

from pgdefer import App
from pgdefer.cli import Exit, _job
from pgdefer.database.source import PsycopgConnection

from .command_line import Claim, Run, claim, defer, run
from .conftest import Jobs

__all__ = ["claim", "run"]

pytestmark = pytest.mark.client


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
