"""`pgdefer job steps`, `signal`, `fork` and `stream`, and `pgdefer publish`: durable jobs.

Tests: integration/test_cli_durable.py.
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import Annotated, Any

import typer
from rich.text import Text

from pgdefer.database import sql
from pgdefer.options import ENDED

from . import _show
from ._base import DSN, AsJson, DryRun, Interval, Session, fail_for_missing, out, session
from ._job import STEPS, Id, jobs

Payload = Annotated[str, typer.Argument(metavar="[JSON]", help="Its payload; - reads stdin.")]
Step = Annotated[str, typer.Argument(metavar="STEP", help="The step's name, from `job steps`.")]


def _read(payload: str) -> str:
    text = _show.given(payload)
    _show.check_json(payload=text)
    return text


def _state_of(on: Session, id: int) -> str:
    """Return a job's state; exit if there is no such job."""
    rows = on.call(sql.JOB, {"id": id}).values
    if not rows:
        fail_for_missing("job", id)
    return str(rows[0]["state"])


@jobs.command("steps")
def steps(id: Id, dsn: DSN = None, as_json: AsJson = False) -> None:
    """List the finished steps of a durable job, in order."""
    with session(dsn, as_json=as_json) as on:
        _state_of(on, id)
        rows = on.call(sql.FINISHED_STEPS, {"id": id})
    if rows.texts is not None:
        _show.print_json(rows.texts)
    elif rows.values:
        _show.table(rows, STEPS, least=("claim", "finished_at"), folded=("value",))
    else:
        out.print("No step is finished.")


@jobs.command("signal")
def signal(
    id: Id,
    name: Annotated[str, typer.Argument(metavar="NAME", help="The signal's name.")],
    payload: Payload = "{}",
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Send a signal to a job, for a wait of its handler, now or later."""
    parameters = {"id": id, "name": name, "payload": _read(payload)}
    with session(dsn, dry_run=dry_run) as on:
        on.call(sql.SIGNAL, parameters)
    if as_json:
        _show.write(json.dumps({"id": id, "name": name}))


@jobs.command("fork")
def fork(
    id: Id, step: Step, dsn: DSN = None, as_json: AsJson = False, dry_run: DryRun = False
) -> None:
    """Defer a copy of a job that continues from a step, and print its id.

    The copy has the steps that were finished before that one.
    """
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(sql.FORK, {"id": id, "from_step": step})
    _show.answer(rows, lambda row: str(row["id"]))


@jobs.command("stream")
def stream(
    id: Id,
    name: Annotated[str, typer.Argument(metavar="STREAM", help="The stream's name.")],
    after: Annotated[int, typer.Option(help="Begin after the value with this number.")] = 0,
    follow: Annotated[
        bool, typer.Option("--follow/--no-follow", help="Continue until the job has ended.")
    ] = True,
    interval: Interval = 0.5,
    dsn: DSN = None,
) -> None:
    """Print the values that a job emits to a stream: one JSON value per line."""
    with contextlib.suppress(KeyboardInterrupt), session(dsn) as on:
        while True:
            state = _state_of(on, id)
            asked: dict[str, Any] = {"id": id, "stream": name, "after": after}
            if rows := on.call(sql.READ_STREAM, asked).values:
                after = rows[-1]["no"]
                _show.write("\n".join(row["value"] for row in rows))
            elif not follow or state in ENDED:
                return
            else:
                time.sleep(interval)


def publish(
    event: Annotated[str, typer.Argument(metavar="EVENT", help="The event's name.")],
    payload: Payload = "{}",
    retain: Annotated[
        str | None, typer.Option(help="How long to keep it for later waits, for example '7 days'.")
    ] = None,
    dsn: DSN = None,
    as_json: AsJson = False,
    dry_run: DryRun = False,
) -> None:
    """Publish an event to all jobs that wait for it, now or later. The first payload counts."""
    parameters = {"event": event, "payload": _read(payload), "retain": retain}
    with session(dsn, as_json=as_json, dry_run=dry_run) as on:
        rows = on.call(sql.PUBLISH, parameters)
    if as_json:
        _show.answer(rows, str)
    elif not rows.values[0]["is_first"]:
        out.print(Text(f"{_show.escaped(event)} was published before: that payload stands."))
