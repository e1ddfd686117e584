"""`python -m pgdefer.contrib.cluster`: what it says of mistakes, in one line and an exit code."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.types.json import Jsonb
from typer.testing import CliRunner

from pgdefer.cli._base import Exit
from pgdefer.contrib.cluster import Cluster
from pgdefer.contrib.cluster.__main__ import cli
from pgdefer.database.install import install
from pgdefer.database.source import DEFAULTS

from .conftest import NAMES, rows


def said(code: int, *arguments: str) -> str:
    """Run a command, which must end with this code and no traceback; return what it said."""
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == code, done.output
    assert isinstance(done.exception, SystemExit | None)
    return " ".join(done.output.split())


def test_shards_by_the_urls_of_sqlalchemy(dsns: dict[str, str], blank_dsn: str) -> None:
    install(blank_dsn)
    urls = {}
    for name, dsn in {**dsns, "d": blank_dsn}.items():
        place = conninfo_to_dict(dsn)
        user, database = place.pop("user"), place.pop("dbname")
        urls[name] = f"postgresql+psycopg://{user}@/{database}?{urlencode(place)}"
    said(0, "create", *(f"{name}={urls[name]}" for name in NAMES))
    a = ["--dsn", urls["a"]]
    said(0, "add", *a, "d", urls["d"])
    assert "0 jobs moved" in said(0, "move", *a, "5", "d")


def test_a_new_shard_that_is_silent_is_given_up(
    cluster: Cluster, dsns: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DEFAULTS, "connect_timeout", 2)
    cluster.refresh()
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = make_conninfo("", host="127.0.0.1", port=server.getsockname()[1])
        timer = threading.Timer(30, server.close)  # so that the test ends, whatever happens
        timer.start()
        assert "connection timeout expired" in said(
            Exit.UNREACHABLE, "add", "--dsn", dsns["a"], "d", silent
        )
        timer.cancel()


@pytest.mark.usefixtures("cluster")
def test_mistakes_are_one_line(dsns: dict[str, str], blank_dsn: str, tmp_path: Path) -> None:
    a = ["--dsn", dsns["a"]]
    for expected, code, arguments in (
        ("there is no slot 1024. Slots are 0 to 1023", Exit.USAGE, ["move", *a, "1024", "b"]),
        ("there is no slot -1", Exit.USAGE, ["move", *a, "--", "-1", "b"]),
        ("there is no shard 'z'. The map has a, b, c", Exit.USAGE, ["move", *a, "5", "z"]),
        ("Invalid value for '--patience'", 2, ["move", *a, "--patience", "nan", "5", "b"]),
        ("Invalid value for '--patience'", 2, ["move", *a, "--patience", "-1", "5", "b"]),
        ("valid integer", 2, ["move", *a, "five", "b"]),
        ("this slot does not leave (slot: 5)", Exit.USAGE, ["stay", *a, "5"]),
        ("there is no slot 5000", Exit.USAGE, ["stay", *a, "5000"]),
        ("there is a shard 'b', and this database is", Exit.USAGE, ["add", *a, "b", dsns["c"]]),
        ("connection is bad", Exit.UNREACHABLE, ["add", *a, "d", "host=/nonexistent"]),
        ("the DSN can't be read", Exit.USAGE, ["add", *a, "d", "nonsense"]),
        ("shard 'd' has a password", Exit.USAGE, ["add", *a, "d", "dbname=d password=secret"]),
        ("shard 'a' has a password", Exit.USAGE, ["create", "a=postgresql://me:secret@host/a"]),
        ('schema "queue" does not exist', Exit.NOT_INSTALLED, ["add", *a, "d", blank_dsn]),
        ('schema "queue" does not exist', Exit.NOT_INSTALLED, ["slots", "--dsn", blank_dsn]),
        ("connection is bad", Exit.UNREACHABLE, ["check", "--dsn", "host=/nonexistent"]),
        ("can't write", Exit.ERROR, ["dsns", *a, str(tmp_path / "nowhere" / "dsns")]),
        ("can't write", Exit.ERROR, ["dsns", *a, str(tmp_path)]),
        ("this database has a map", Exit.USAGE, ["create", f"a={dsns['b']}"]),
        ("give NAME=DSN", 2, ["create", "a"]),
    ):
        text = said(code, *arguments)
        assert expected in text
        assert "secret" not in text
    assert not list(tmp_path.parent.glob(".*.new"))
    assert said(0, "check", *a) == ""


def test_a_role_without_rights_is_told_so(cluster: Cluster, dsns: dict[str, str]) -> None:
    cluster.refresh()
    rows(dsns["a"], "drop role if exists shard_stranger")
    rows(dsns["a"], "create role shard_stranger login")
    stranger = make_conninfo(dsns["a"], user="shard_stranger")
    for command in ("slots", "dsns", "check"):
        expected = "permission denied for schema queue"
        assert expected in said(Exit.FORBIDDEN, command, "--dsn", stranger)
    rows(dsns["a"], "drop role shard_stranger")


def test_a_cluster_that_was_refused_can_be_created_rightly(dsns: dict[str, str]) -> None:
    again = make_conninfo(dsns["a"], application_name="again")
    for twice in (dsns["a"], again):
        expected = "the database of shard 'b' is that of a shard before it"
        assert expected in said(Exit.USAGE, "create", f"a={dsns['a']}", f"b={twice}")
    assert said(0, "create", f"a={dsns['a']}", f"b={dsns['b']}") == ""
    # c is not made a shard of another cluster either
    refused = said(Exit.USAGE, "create", f"c={dsns['c']}", f"a={dsns['a']}")
    assert "this database has a map" in refused
    assert said(0, "add", "--dsn", dsns["a"], "c", dsns["c"]) == ""
    assert said(0, "check", "--dsn", dsns["a"]) == ""


@pytest.mark.usefixtures("cluster")
def test_a_second_mover_is_refused(dsns: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pgdefer.contrib.cluster.move_slot.time.sleep", lambda _: None)
    move = ["move", "--dsn", dsns["a"], "5", "b"]
    with psycopg.connect(dsns["a"], autocommit=True) as mover:
        mover.execute("select queue.shard_leave(5, 'b'), queue.shard_mover(5)")
        assert "slot 5 is being moved by another process" in said(Exit.ERROR, *move)
    rows(dsns["a"], "select queue.shard_stay(5)")
    assert said(0, *move).startswith("0 jobs moved")


def connections(server: socket.socket) -> Iterator[socket.socket]:
    """Accept those that wait, and close them."""
    server.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            with server.accept()[0] as accepted:
                yield accepted


def test_a_silent_shard_is_waited_for_once(cluster: Cluster, dsns: dict[str, str]) -> None:
    cluster.refresh()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        silent = make_conninfo("connect_timeout=2", host="127.0.0.1", port=port)
        known = {
            "shards": {**dsns, "c": silent},
            "versions": {"a": 1, "b": 1, "c": 2},
            "slots": cluster.map.slots,
        }
        rows(dsns["b"], "select queue.shard_learn(%s)", [Jsonb(known)])
        a = ["--dsn", dsns["a"]]
        for code, arguments, expected in (
            (0, ["slots", *a], "c: 341 slots"),
            (0, ["dsns", *a], silent),
            (1, ["check", *a], "shard c: can't be reached"),
            (0, ["move", *a, "5", "b"], "0 jobs moved"),
            (Exit.USAGE, ["stay", *a, "5"], "does not leave"),
            (Exit.UNREACHABLE, ["move", *a, "5", "c"], "shard c: can't be reached"),
            (Exit.UNREACHABLE, ["move", *a, "1023", "b"], "shard c: can't be reached"),
            (Exit.UNREACHABLE, ["stay", *a, "1023"], "shard c: can't be reached"),
            (0, ["add", *a, "b", dsns["b"]], "shard c can't be reached"),
        ):
            assert expected in said(code, *arguments)
            assert len(list(connections(server))) == 1, arguments
        limit = "select max_running from queue.queues where name = 'mail'"
        with pytest.raises(psycopg.OperationalError, match="shard c: can't be reached"):
            cluster.split("mail", 9)
        assert len(list(connections(server))) == 1
        assert rows(dsns["a"], limit) == rows(dsns["b"], limit) == []
