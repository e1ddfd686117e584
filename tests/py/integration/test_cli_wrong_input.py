"""What the command line can't take, and what its output can't: messages, no tracebacks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from pgdefer.cli import Exit
from pgdefer.database.source import PsycopgConnection

from .command_line import Claim, Run, claim, defer, run

__all__ = ["claim", "run"]

pytestmark = pytest.mark.client

DEEP = "[" * 50_000 + "]" * 50_000
Program = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def program(dsn: str) -> Program:
    """Run a command as a process, perhaps without stdin."""

    def program(
        *words: str | bytes, has_stdin: bool = True, **env: str
    ) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "pgdefer", *words],
            check=False,
            capture_output=True,
            env=os.environ | {"PGDEFER_DSN": dsn, "COLUMNS": "160"} | env,
            stdin=subprocess.DEVNULL,
            preexec_fn=None if has_stdin else lambda: os.close(0),
            timeout=300,
        )

    return program


@pytest.mark.parametrize(
    "words",
    [
        ("defer", "t", DEEP),
        ("defer", "t", "--options", DEEP),
        ("publish", "paid", DEEP),
        ("schedule", "add", "s", "@hourly", "t", DEEP),
        ("job", "args", "1", DEEP),
        ("job", "signal", "1", "s", DEEP),
    ],
)
def test_json_with_too_many_levels(run: Run, words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.code, done.out) == (Exit.USAGE, "")
    assert "this JSON has too many levels" in done.err


@pytest.mark.parametrize("options", ["[1]", "null", '"held"'])
def test_options_are_an_object(run: Run, options: str) -> None:
    for more in ((), ("--retry", "3")):
        done = run("defer", "t", "--options", options, *more)
        assert (done.code, done.out) == (Exit.USAGE, "")
        assert "options: give a JSON object" in done.err


def test_unknown_options_list_the_keys_of_their_json(run: Run) -> None:
    done = run("defer", "t", "--options", '{"delai": 5}')
    assert (done.code, done.out) == (Exit.USAGE, "")
    assert "Known keys: delay, " in done.err
    assert "--" not in done.err


@pytest.mark.parametrize("command", [("job", "tail"), ("job", "stream", "1", "s"), ("top",)])
@pytest.mark.parametrize("interval", ["inf", "nan", "1e300", "-1"])
def test_intervals_are_sensible(run: Run, command: tuple[str, ...], interval: str) -> None:
    done = run(*command, "--interval", interval)
    assert done.code == Exit.USAGE
    assert "'--interval'" in done.err


@pytest.mark.parametrize(
    "words",
    [
        ("defer", "caf\udce9"),
        ("schedule", "enable", "caf\udce9"),
        ("schedule", "add", "s", "@hourly", "t", "--timezone", "\ud800"),
    ],
)
def test_arguments_that_are_not_utf_8(run: Run, words: tuple[str, ...]) -> None:
    done = run(*words)
    assert (done.code, done.out) == (Exit.USAGE, "")
    assert "in an argument is no utf-8 text" in done.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("job", "deadline", "x", "1"), "TIME: invalid input syntax for type timestamp"),
        (("job", "reschedule", "1", "--at", "x"), "--at: invalid input syntax"),
        (("job", "retry", "1", "--at", "x"), "--at is not a timestamp"),
        (("job", "retry", "1", "--in", "x"), "--delay is not an interval"),
        (("queue", "configure", "q", "--rate", "5/x"), "--rate, INTERVAL is not an interval"),
        (("queue", "configure", "q", "--rate", "x/1s"), "--rate needs a limit of at least 1"),
        (("queue", "configure", "q", "--retain", "x"), "--retain is not an interval"),
        (("queue", "configure", "q", "--max-running", "0"), "--max-running must be a whole"),
        (("queue", "configure", "q", "--max-running", "9" * 5000), "--max-running must be a"),
        (("worker", "-A", "json", "--max-running", "q=" + "9" * 5000), "--max-running is QUEUE=N"),
        (("db", "prune", "--older-than", "5"), "--older-than needs a --state"),
        (("job", "show", 2**63), f"{2**63} is too large: bigint out of range"),
        (("job", "hold", 2**63), f"{2**63} is too large: bigint out of range"),
        (("job", "priority", 2**31, "1"), f"{2**31} is too large: integer out of range"),
        (("defer", "t", "--priority", 2**31), f"{2**31} is too large: integer out of range"),
    ],
)
def test_what_is_wrong_is_named_as_it_was_typed(
    run: Run, words: tuple[object, ...], said: str
) -> None:
    done = run(*words)
    assert (done.code, done.out) == (Exit.USAGE, "")
    assert done.err.startswith(f"pgdefer: {said}")


def test_a_page_of_no_database(program: Program) -> None:
    done = program("web", "--port", "0", "--dsn", "bogus=1")
    assert done.returncode == Exit.USAGE
    assert b"Traceback" not in done.stderr
    assert b"the DSN can't be read" in done.stderr


def test_stdin_is_closed(run: Run, program: Program) -> None:
    id = defer(run, "t")
    for words, said in (
        (("job", "cancel", str(id)), b"so nobody can answer: pass --yes."),
        (("defer", "t", "-"), b"stdin, which is closed"),
        (("top",), b"this is not a terminal"),
    ):
        done = program(*words, has_stdin=False)
        assert (done.returncode, done.stdout) == (Exit.USAGE, b"")
        assert said in done.stderr
    assert run("job", "show", id, "--json").json["state"] == "ready"


def test_stdin_is_no_text(run: Run) -> None:
    done = run("defer", "t", "-", input=b"\xff")
    assert done.code == Exit.USAGE
    assert "stdin: not utf-8 text" in done.err


# What the output can't take


@pytest.mark.parametrize("encoding", ["latin-1", "ascii", "utf-8"])
def test_json_keeps_what_an_encoding_lacks(run: Run, program: Program, encoding: str) -> None:
    text = "é € 😀 日"
    id = str(defer(run, "t", json.dumps({"a": text})))
    for words in (("job", "get", "a", id), ("job", "get", "a", id, "--json")):
        done = program(*words, PYTHONIOENCODING=encoding)
        assert json.loads(done.stdout.decode(encoding)) in (text, [text])
        assert b"?" not in done.stdout
    shown = program("job", "show", id, "--json", PYTHONIOENCODING=encoding)
    assert json.loads(shown.stdout.decode(encoding))["args"] == {"a": text}


def test_no_escape_sequence_reaches_the_terminal(run: Run) -> None:
    odd = "\x1b[31m\nred"
    defer(run, "t", "--queueing-lock", odd)
    run("publish", odd)
    for words in (
        ("defer", "t", "--queueing-lock", odd),
        ("group", "show", odd),
        ("group", "close", odd),
        ("publish", odd),
        ("defer", "t", "--options", json.dumps({odd: 1})),
        ("defer", "t", "--at", odd),
    ):
        done = run(*words)
        said = done.out + done.err
        assert r"\x1b[31m" in said, words
        assert "\x1b" not in said, words
        assert len(said.splitlines()) == 1, words


# What another client stored, or Python can't show


@pytest.mark.parametrize("data", ["a", "é"])
def test_bytes_that_are_no_base64(run: Run, data: str) -> None:
    stored = {"x": {"__pgdefer__": "bytes", "value": data}}
    id = defer(run, "t", json.dumps(stored))
    for words in (("show", id), ("show", id, "--full"), ("next", "--peek"), ("next",)):
        done = run("job", *words)
        assert done.code == 0
        assert f'"value": "{data}"' in done.out, "it is shown as it is stored"


@pytest.mark.parametrize(
    "details", ["[1]", '"text"', "5", "true", '{"traceback": 5}', '{"traceback": ["a"]}']
)
def test_details_of_any_kind(run: Run, claim: Claim, conn: PsycopgConnection, details: str) -> None:
    id = defer(run, "t")
    conn.execute("select queue.fail(%s, %s, 'no', %s::jsonb)", [id, claim()[id], details])
    for words in (("show", id), ("show", id, "--full")):
        done = run("job", *words)
        assert (done.code, "failed" in done.out, "attempt 1:" in done.out) == (0, True, False)


@pytest.mark.parametrize("levels", [90, 600, 900, 985])
def test_args_with_many_levels(program: Program, conn: PsycopgConnection, levels: int) -> None:
    """Python can read them, but its stack may end before they are shown."""
    args = '{"a": ' * levels + "1" + "}" * levels
    conn.execute("select queue.defer('t', %s::jsonb)", [args])
    for words in (("show", "1"), ("next", "--peek"), ("next",), ("show", "1", "--full")):
        done = program("job", *words)
        assert (done.returncode, done.stderr) == (0, b"")
        assert b'{"a":' in re.sub(rb"\s", b"", done.stdout)
    assert re.sub(rb"\s", b"", done.stdout).count(b'{"a":') == levels, "all of them"


def test_a_moment_that_the_local_time_zone_lacks(program: Program, conn: PsycopgConnection) -> None:
    moment = "9999-12-31 23:30:00+00:00"
    options = json.dumps({"expires_at": moment})
    conn.execute("select queue.defer('t', deadline => %s, options => %s)", [moment, options])
    conn.execute("select queue.pause('p', %s)", [moment])
    shown = program("job", "show", "1", TZ="Asia/Tokyo")
    assert (shown.returncode, shown.stderr) == (0, b"")
    there = "10000-01-01 08:30:00+09"
    assert f"deadline: {there}" in shown.stdout.decode()
    listed = program("queue", "ls", TZ="Asia/Tokyo")
    assert (listed.returncode, there in listed.stdout.decode()) == (0, True)


@pytest.mark.parametrize(
    ("zone", "offset"),
    [
        ({"TZ": "America/New_York"}, "-05"),
        ({"TZ": ":Asia/Kolkata"}, "+05:30"),
        ({"TZ": ""}, "+00"),
        ({"TZ": "Asia/Tokyo", "PGTZ": "America/New_York"}, "-05"),
        ({"TZ": "Nowhere"}, "+01"),  # the session's
    ],
)
def test_times_are_read_in_the_zone_in_which_they_are_shown(
    program: Program, conn: PsycopgConnection, zone: dict[str, str], offset: str
) -> None:
    zone = {"PGOPTIONS": "-c TimeZone=Europe/Paris"} | zone
    moment = "2030-01-31 09:00"
    program("defer", "t", "--at", moment, **zone)
    program("job", "deadline", moment, "1", **zone)
    shown = program("job", "show", "1", **zone).stdout.decode()
    assert shown.count(f": {moment}:00{offset}") == 2
    program("queue", "pause", "q", "--until", moment, **zone)
    assert f"{moment}{offset}" in program("queue", "ls", **zone).stdout.decode()
    expected = conn.execute("select %s::timestamptz", [moment + offset]).fetchone()
    assert conn.execute("select scheduled_at from queue.jobs").fetchone() == expected
    why = program("job", "why", "1", **zone).stdout.decode()
    assert f"{moment}:00{offset}" in why


@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_stdin_that_is_no_text(dsn: str, locale: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pgdefer", "defer", "t", "-"],
        check=False,
        capture_output=True,
        env=os.environ | {"PGDEFER_DSN": dsn, "LC_ALL": locale},
        input=b'{"a": "\xff"}',
        timeout=300,
    )
    said = (done.returncode, done.stderr)
    assert said == (2, b"pgdefer: stdin: not utf-8 text: invalid start byte\n")


def test_messages_name_options_and_commands(program: Program, conn: PsycopgConnection) -> None:
    conn.execute("select queue.defer('t')")
    expected = {
        ("defer", "t", "--timeout", "-5"): "--timeout is not an interval",
        ("defer", "t", "--at", "2030-01-01", "--in", "5 s"): "--at and --delay exclude each other",
        ("defer", "t", "--unique-for", "5 s"): "--unique-for needs an --idempotency-key",
        ("job", "retry", "1", "--at", "2030-01-01", "--in", "5 s"): "--at and --delay exclude",
        ("queue", "delete", "default", "-y"): "or pass --force to remove them",
        ("queue", "delete", "none", "-y"): "no such queue (queue: none). `pgdefer queue ls` lists",
        ("queue", "configure", "q", "--rate", "0/1min"): "Give N/INTERVAL, such as 10/1min.",
    }
    for words in (("rm", "none", "-y"), ("run", "none"), ("enable", "none")):
        said = "no such schedule (name: none). `pgdefer schedule ls` lists them."
        expected["schedule", *words] = said
    for name in ("show", "close"):
        expected["group", name, "none"] = "no such group (name: none). `pgdefer group ls` lists"
    for words in (("job", "show"), ("job", "why"), ("job", "steps"), ("graph",)):
        expected[(*words, "99")] = "job not found (id: 99). The id is wrong, its transaction"
    for words, said in expected.items():
        done = program(*words)
        assert done.returncode in (2, 9, 11)
        assert said in " ".join(done.stderr.decode().split())
