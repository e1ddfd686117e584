"""What handlers in processes log goes through the worker's log, at once and whatever happens."""

from __future__ import annotations

import importlib
import itertools
import logging
import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pgdefer import App
from pgdefer.worker.process_log import Outbox
from pgdefer.worker.processes import ChildProcess

from .conftest import Jobs, running, until

pytestmark = pytest.mark.client

MODULE = """
import contextlib, logging, os, signal, threading, time, warnings
from pgdefer import App

app = App({dsn!r})
log = logging.getLogger("shop.orders")
own = logging.getLogger("own")
own.addHandler(logging.FileHandler({own!r}, delay=True))
library = logging.getLogger("library")
library.addHandler(logging.NullHandler())
process = dict(run_in="process")

class Order:
    def __reduce__(self) -> tuple:
        return Order.made, ()

    @staticmethod
    def made() -> "Order":
        if os.getpid() != {pid}:
            return Order()
        raise ValueError("only there")

@app.task(**process)
def talk() -> None:
    logging.info("through the root")  # sets up nothing, as it does in the worker
    log.info("order %s", 7, extra=dict(order=7, odd=lambda: 1, day=dict(n=[1])))
    log.info("unread", extra=dict(order=Order()))
    log.debug("below the level")
    library.info("from a library")
    own.warning("in its own file")
    warnings.warn("be warned")
    try:
        raise KeyError("x")
    except KeyError:
        log.exception("it failed")

@app.task(**process, retry=dict(on_crash="fail"))
def killed() -> None:
    log.info("the last word" * 500_000)
    os.kill(os.getpid(), signal.SIGKILL)

class Alarm(Exception):
    count = 0

def ring(*_: object) -> None:
    Alarm.count += 1
    raise Alarm

@app.task(**process)
def interrupted(times: int) -> int:
    signal.signal(signal.SIGALRM, ring)
    n = 0
    while Alarm.count < times:
        n += 1
        with contextlib.suppress(Alarm):  # logging suppresses some itself
            signal.setitimer(signal.ITIMER_REAL, 0.0005)
            log.info("%s", str(n % 10) * 500_000)
            signal.setitimer(signal.ITIMER_REAL, 0)
    return n

@app.task(**process)
def both(count: int) -> None:
    def say(who: str) -> None:
        for n in range(count):
            log.info("%s %s", who, n)
    other = threading.Thread(target=say, args=("other",))
    other.start()
    say("main")
    other.join()

@app.task(**process)
def leaves_a_thread(go: str, done: str) -> None:
    def say() -> None:
        while not os.path.exists(go):
            time.sleep(0.01)
        for _ in range(500):
            log.info("x" * 5000)
        open(done, "w").close()
    threading.Thread(target=say, daemon=True).start()

@app.task(**process)
def forked() -> int:
    pid = os.fork()
    if pid == 0:
        log.info("from the fork")
        log.warning("from the fork")
        os._exit(3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
_numbers = itertools.count()


@pytest.fixture
def shop(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    name = f"shop_{next(_numbers)}"
    text = MODULE.format(dsn=dsn, own=str(tmp_path / "own.log"), pid=os.getpid())
    (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(name)
    yield module
    module.app.close()
    for handler in logging.getLogger("own").handlers[:]:
        logging.getLogger("own").removeHandler(handler)
        handler.close()
    del sys.modules[name]


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def of(logged: pytest.LogCaptureFixture, *names: str) -> list[logging.LogRecord]:
    return [record for record in logged.records if record.name in names]


async def run(app: App, name: str, *args: object, **options: Any) -> object:
    async with running(app):
        job = await app.tasks[name].configure(**options).defer_async(*args)
        return await job.result_async(300)


async def test_what_a_handler_logs(shop: Any, logged: Any, tmp_path: Path) -> None:
    await run(shop.app, f"{shop.__name__}.talk")
    root, order, failed = of(logged, "root", "shop.orders")
    assert root.getMessage() == "through the root"
    assert (order.getMessage(), order.order, order.day) == ("order 7", 7, {"n": [1]})
    assert order.odd.startswith("<function talk.<locals>.<lambda>")
    assert failed.getMessage().startswith("it failed\nTraceback")
    assert failed.getMessage().endswith("KeyError: 'x'")
    assert [record.getMessage() for record in of(logged, "library")] == ["from a library"]
    (warned,) = of(logged, "py.warnings")
    assert "UserWarning: be warned" in warned.getMessage()
    assert of(logged, "own") == []
    assert (tmp_path / "own.log").read_text() == "in its own file\n"
    unread = [each for each in of(logged, "pgdefer.worker") if "could not be read" in each.msg]
    assert [record.getMessage() for record in unread] == [
        "a log record of a job's process could not be read: only there"
    ]


async def test_what_it_has_logged_before_it_dies(shop: Any, logged: Any, jobs: Jobs) -> None:
    async with running(shop.app):
        await shop.killed.defer_async()
        await jobs.end()
    (record,) = of(logged, "shop.orders")
    assert record.getMessage() == "the last word" * 500_000


async def test_levels_are_the_workers(shop: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.DEBUG, "shop.orders")
    caplog.set_level(logging.ERROR, "py.warnings")
    await run(shop.app, f"{shop.__name__}.talk")
    loggers = ("root", "shop.orders", "library", "py.warnings")
    texts = [record.getMessage().partition("\n")[0] for record in of(caplog, *loggers)]
    assert texts == ["it failed"]  # the level of the root when the process began


async def test_filters_of_the_workers_loggers(shop: Any, logged: Any) -> None:
    filtered = logging.getLogger("shop.orders")

    def is_wanted(record: logging.LogRecord) -> bool:
        return record.levelno == logging.ERROR

    filtered.addFilter(is_wanted)
    try:
        await run(shop.app, f"{shop.__name__}.talk")
    finally:
        filtered.removeFilter(is_wanted)
    (record,) = of(logged, "shop.orders")
    assert record.levelno == logging.ERROR


async def test_exceptions_of_signals_halve_no_message(shop: Any, logged: Any) -> None:
    count = await run(shop.app, f"{shop.__name__}.interrupted", 50)
    records = of(logged, "shop.orders")
    assert isinstance(count, int)
    assert 0 < len(records) <= count
    assert {len(record.getMessage()) for record in records} == {500_000}


async def test_handlers_of_the_worker_that_fail(
    shop: Any, logged: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            sys.exit("it fails")

    failing = Failing()
    logging.getLogger("shop").addHandler(failing)
    try:
        await run(shop.app, f"{shop.__name__}.both", 1)
    finally:
        logging.getLogger("shop").removeHandler(failing)
    assert capsys.readouterr().err.count("SystemExit: it fails") == 2


async def test_what_an_sdk_adds_to_loggers_sees_no_record_again(
    shop: Any, logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    call_handlers = logging.Logger.callHandlers

    def added(its_logger: logging.Logger, record: logging.LogRecord) -> None:
        seen.append(record.name)
        call_handlers(its_logger, record)

    monkeypatch.setattr(logging.Logger, "callHandlers", added)
    await run(shop.app, f"{shop.__name__}.both", 1)
    assert len(of(logged, "shop.orders")) == 2
    assert "pgdefer.worker" in seen
    assert "shop.orders" not in seen


async def test_two_threads_log(shop: Any, logged: Any) -> None:
    await run(shop.app, f"{shop.__name__}.both", 500)
    said = [record.getMessage() for record in of(logged, "shop.orders")]
    for who in ("main", "other"):
        assert [text for text in said if text.startswith(who)] == [f"{who} {n}" for n in range(500)]


async def test_a_thread_of_an_idle_process_need_not_wait(
    shop: Any, logged: Any, tmp_path: Path
) -> None:
    """The worker reads nothing meanwhile."""
    go, done = tmp_path / "go", tmp_path / "done"
    async with running(shop.app):
        job = await shop.leaves_a_thread.defer_async(str(go), str(done))
        await job.result_async(300)
        go.touch()
        await until(done.exists)


def test_records_before_a_message_take_no_time_of_it(dsn: str) -> None:
    """As those of an import that has ended long before the next job of its module."""
    process = ChildProcess(dsn)
    try:
        ours, theirs = multiprocessing.Pipe()
        outbox = Outbox(theirs)
        for number in range(20):
            outbox.send_record(logging.makeLogRecord({"name": "shop", "msg": f"{number}"}))
        outbox.send("message")
        process._connection.close()
        process._connection = ours
        assert process._poll(0.0)
        assert process._next() == "message"
    finally:
        process.close()


async def test_a_fork_logs_as_python_does(
    shop: Any, logged: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    assert await run(shop.app, f"{shop.__name__}.forked") == 3
    assert of(logged, "shop.orders") == []
    assert capfd.readouterr().err.count("from the fork\n") == 1
