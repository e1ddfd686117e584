"""Commands in this process, for the tests of the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pgdefer.cli._base import cli
from pgdefer.database.source import PsycopgConnection


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
