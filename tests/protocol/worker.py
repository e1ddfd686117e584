"""The Python worker as a subject of this suite: the tasks of README.md, and its log as events.

python worker.py [QUEUE...]
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import enum
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pgdefer

# The suite's arguments name classes of this module, which is the program here.
sys.modules["protocol_types"] = sys.modules[__name__]

app = pgdefer.App()


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int
    y: Any


Color.__module__ = Point.__module__ = "protocol_types"


class ForGoodError(Exception):
    pass


async def echo(**values: Any) -> Any:
    return values


for _name in ["echo", *json.loads(Path(__file__).with_name("names.json").read_text("utf-8"))]:
    app.task(name=_name)(echo)


@app.task(name="none")
async def none() -> None:
    pass


@app.task(name="fail")
async def fail(message: str) -> None:
    raise RuntimeError(message)


@app.task(name="fail_for_good", give_up_on=ForGoodError)
async def fail_for_good(message: str) -> None:
    raise ForGoodError(message)


@app.task(name="hold")
async def hold(path: str) -> None:
    Path(f"{path}.began").touch()  # noqa: ASYNC240 (a moment)
    while not Path(path).exists():  # noqa: ASYNC110, ASYNC240 (another process makes it)
        await asyncio.sleep(0.02)


@app.task(name="stubborn")
async def stubborn(path: str) -> None:
    while not Path(path).exists():  # noqa: ASYNC240 (another process makes it)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.02)


@app.task(name="crash")
def crash(path: str) -> None:
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="again")
def again(path: str) -> None:
    if not Path(path).exists():
        Path(path).touch()
        raise pgdefer.RetryLater("not yet")


@app.task(name="again_after_none")
async def again_after_none() -> None:
    raise pgdefer.RetryLater("not yet", needs=[999999999999])


@app.task(name="large")
async def large() -> str:
    return "x" * 100_000


@app.task(name="unstorable")
async def unstorable() -> object:
    return object()


@app.task(name="nul")
async def nul() -> None:
    raise RuntimeError("a\0b")


def tell(event: str, id: int | None = None, claim: int | None = None, what: str = "") -> None:
    print(json.dumps({"event": event, "id": id, "claim": claim, "what": what}), flush=True)


class Events(logging.Handler):
    """Turns the log into events, recognised by the beginnings of messages."""

    def emit(self, record: logging.LogRecord) -> None:
        args: Any = record.args
        match record.msg.split():
            case ["worker", "%d", "serves", *_]:
                tell("ready", args[0])
            case ["worker", "%d", "was", "given", *_]:
                tell("gone", args[0])
            case ["stopping,", *_]:
                tell("stopping")
            case ["the", "connection", "was", "lost:", *_]:
                tell("lost")
            case ["%r", "starts"]:
                tell("started", args[0].id, args[0].claim)
            case ["%r", "has", "ended"]:
                tell("finished", args[0].id, args[0].claim)
            case ["the", "outcome", "of", "job", *_]:
                tell("refused", *args)


if __name__ == "__main__":
    log = logging.getLogger("pgdefer")
    log.setLevel(logging.DEBUG)
    log.addHandler(Events())
    log.addHandler(logging.StreamHandler())
    app.run_worker(
        sys.argv[1:] or None,
        concurrency=int(os.environ.get("CONCURRENCY", "4")),
        heartbeat_every=float(os.environ.get("HEARTBEAT_EVERY", "10")),
        dead_after=float(os.environ.get("DEAD_AFTER", "30")),
        drain="DRAIN" in os.environ,
    )
    tell("ended")
